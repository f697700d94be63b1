"""Show the generation part of a profile: decode curves as tables, notes and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from streamrl.report.pictures.drawing import SERIES
from streamrl.runfile.result_files import replacing
from streamrl.sim.studies.results import GenerationCurve, GenerationPoint, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = tuple(colour.light for colour in SERIES)


def share_figure(
    series: Sequence[Series], *, over: str, share: str, title: str, path: Path | str | None = None
) -> Figure:
    """Draw shares over a logarithmic axis; write a .png or .svg file to a path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for line, colour in zip(series, COLOURS * len(series), strict=False):
        style = "--" if line.is_unmeasured else "-"
        axes.plot(
            line.places,
            line.values,
            style,
            color=colour,
            marker="o",
            markersize=4,
            label=line.legend,
        )
    axes.set(xscale="log", xlabel=over, ylabel=share, title=title)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    if path is not None:
        with replacing(Path(path)) as partial:
            figure.savefig(partial, dpi=120)
    return figure


def generation_table(curve: GenerationCurve) -> Table:
    """Lay out one GPU's curve: seconds, speed, and each step's share of the datasheet limits."""
    table = Table(box=None, pad_edge=False, title=_title(curve), title_justify="left")
    for name in (
        "rollouts",
        "step",
        "at peak",
        "tokens/s/GPU",
        "tokens/$",
        "MBU",
        "MFU",
        "bound by",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for point in curve.points:
        table.add_row(
            str(point.num_running),
            f"{point.step_time * 1e3:.2f} ms",
            f"{point.roofline_time * 1e3:.2f} ms",
            f"{point.tokens_per_second:,.0f}",
            f"{point.tokens_per_dollar:,.0f}",
            f"{point.mbu:.0%}",
            f"{point.mfu:.0%}",
            "compute" if point.is_compute_bound else "memory",
        )
    return table


def comparison_table(curves: Sequence[GenerationCurve]) -> Table:
    """Set several GPUs side by side: step time and tokens per dollar of each, and the cheaper one."""
    table = Table(box=None, pad_edge=False, title=_title(*curves), title_justify="left")
    table.add_column("rollouts", justify="right")
    for curve in curves:
        table.add_column(f"{curve.gpu} step", justify="right", no_wrap=True)
        table.add_column("tokens/$", justify="right", no_wrap=True)
    table.add_column("most per $", justify="right", no_wrap=True)
    rows = [{point.num_running: point for point in curve.points} for curve in curves]
    for num_running in sorted({num for row in rows for num in row}):
        pairs = list(zip(curves, rows, strict=True))
        if all(num_running in row or num_running > curve.most_running for curve, row in pairs):
            table.add_row(str(num_running), *_cells(pairs, num_running))
    return table


def _cells(
    pairs: Sequence[tuple[GenerationCurve, dict[int, GenerationPoint]]], num_running: int
) -> list[str]:
    cells: list[str] = []
    found: list[tuple[float, str]] = []
    for curve, row in pairs:
        point = row.get(num_running)
        if point is None:
            cells += ["does not fit", ""]
            continue
        cells += [f"{point.step_time * 1e3:.2f} ms", f"{point.tokens_per_dollar:,.0f}"]
        found.append((point.tokens_per_dollar, curve.gpu))
    ranked = sorted(found, reverse=True)
    if len(ranked) < 2:
        return [*cells, ranked[0][1]]
    return [*cells, f"{ranked[0][1]} ({ranked[0][0] / ranked[1][0]:.2f}x)"]


def generation_notes(curves: Sequence[GenerationCurve]) -> list[str]:
    """Return one line each on the limiting resource, the GPU with the most tokens per dollar, and the sources."""
    notes = []
    for curve in curves:
        notes.append(
            f"{curve.gpu}: matrix products turn from memory-bound to compute-bound at "
            f"{curve.ridge:,.0f} rollouts; {curve.most_running:,} rollouts of {curve.context:,} tokens fit; "
            f"${curve.price:.2f} a GPU-hour"
        )
    for curve in curves:
        shares = curve.provenance.shares
        marks = {
            "composed": "composed of measured operators",
            "scaled": "scaled from other GPUs (unmeasured)",
            "roofline": "roofline (unmeasured)",
        }
        parts = [f"{share:.0%} {marks.get(tier, tier)}" for tier, share in shares.items()]
        notes.append(f"{curve.gpu}: seconds are {', '.join(parts)}; sources:")
        notes += [f"  {source}" for source in curve.provenance.sources]
    return notes


def generation_figure(curves: Sequence[GenerationCurve], path: Path | str | None = None) -> Figure:
    """Draw step time and tokens per dollar over the batch size; write a .png or .svg file to a path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    speed, value = figure.subplots(1, 2)
    for curve, colour in zip(curves, COLOURS * len(curves), strict=False):
        batch = [point.num_running for point in curve.points]
        style = {"color": colour, "linestyle": "--" if curve.is_unmeasured else "-", "marker": "o"}
        steps = [point.step_time * 1e3 for point in curve.points]
        speed.plot(batch, steps, label=curve.label, markersize=4, **style)
        peak = [point.roofline_time * 1e3 for point in curve.points]
        speed.plot(batch, peak, color=colour, linestyle=":", linewidth=1)
        tokens = [point.tokens_per_dollar for point in curve.points]
        value.plot(batch, tokens, label=curve.label, markersize=4, **style)
        for axes in (speed, value):
            axes.axvline(curve.ridge, color=colour, linewidth=0.8, alpha=0.4)
    _finish(speed, "milliseconds of one decode step", "dotted: at the datasheet's peak")
    _finish(value, "tokens per dollar", "thin lines: where matrix products turn compute-bound")
    figure.suptitle(_title(*curves))
    if path is not None:
        with replacing(Path(path)) as partial:
            figure.savefig(partial, dpi=120)
    return figure


def _finish(axes: Axes, label: str, title: str) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set(xscale="log", yscale="log", xlabel="rollouts in the batch", ylabel=label)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, fontsize=9)
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)


def _title(*curves: GenerationCurve) -> str:
    one = curves[0]
    degrees = f"TP{one.tensor_parallel}"
    if one.expert_parallel > 1:
        degrees += f" EP{one.expert_parallel}"
    gpus = " and ".join(curve.label for curve in curves)
    return f"{one.model}, {one.dtype}, {degrees} on {gpus}: decode at {one.context:,} tokens of context"
