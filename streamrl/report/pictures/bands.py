"""How far seeds, and what seconds are made of, may move the cost of one option."""

from __future__ import annotations

from streamrl.report.page.options import Option
from streamrl.report.pictures.drawing import Drawing, scale, ticks
from streamrl.report.words import dollars

WIDTH = 900.0
LEFT, RIGHT, TOP, ROW = 190.0, 70.0, 6.0, 34.0


def bands_figure(name: str, option: Option) -> Drawing:
    """Draw the range by seeds alone, by tiers alone, and by both."""
    value = option.cost_per_million_tokens
    seeds = "its one seed" if option.band.num_seeds == 1 else f"{option.band.num_seeds} seeds"
    rows = [
        (seeds, option.band.seeds, "less"),
        ("seconds by tier", option.band.of_tiers, "less"),
        ("together", option.band.factors, "more"),
    ]
    ranges = [(label, value * low, value * high, css) for label, (low, high), css in rows]
    told = "; ".join(f"{label}: {dollars(a)} to {dollars(b)}" for label, a, b, _ in ranges)
    title = f"Dollars per million tokens of {option.name}: {dollars(value)}"
    drawing = Drawing(name, title, told, WIDTH, TOP + ROW * len(rows) + 30)
    low, high = min(a for _, a, _, _ in ranges), max(b for _, _, b, _ in ranges)
    margin = 0.12 * (high - low)
    across = scale(low - margin, high + margin, LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * len(rows)
    for tick in ticks(low - margin, high + margin):
        drawing.line(across(tick), TOP, across(tick), bottom, "grid")
        drawing.text(across(tick), bottom + 18, dollars(tick), "muted small", "middle")
    for row, (label, start, end, css) in enumerate(ranges):
        y = TOP + row * ROW + 8
        drawing.text(LEFT - 12, y + 14, label, "", "end")
        width = max(across(end) - across(start), 2.0)
        drawing.rectangle(
            across(start), y, width, 18, css, f"{label}: {dollars(start)} to {dollars(end)}"
        )
        if label == "together":
            drawing.text(across(start) - 6, y + 14, dollars(start), "strong", "end")
            drawing.text(across(end) + 6, y + 14, dollars(end), "strong")
    drawing.line(across(value), TOP, across(value), bottom, "axis")
    return drawing
