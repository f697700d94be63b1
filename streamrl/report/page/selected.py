"""The section on what a run trained on beside what was generated for it: lengths, rewards, families, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from streamrl.record.run_lines import FATES, OF_FAMILY
from streamrl.record.selection import SelectionMetrics, Share
from streamrl.report.page.parts import PageCell, PageSection, PageTable, cells
from streamrl.report.page.sources import RecordedRun
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.step_curves import Curve, curves_picture
from streamrl.report.words import percent

NOTABLE = 0.01
"""Share of a length by which a step has to differ before it is called selected."""


def selection_sections(runs: Sequence[RecordedRun]) -> Iterator[PageSection]:
    """Yield the section, where any run has made a step."""
    known = [(run, run.metrics.selection) for run in runs]
    found = [(run, each) for run, each in known if each is not None and each.trained.rollouts]
    if not found:
        return
    section = PageSection("selected", "What was trained on, of what was generated", is_pair=True)
    for number, (run, each) in enumerate(found, start=1):
        section.text.append(f"{run.name}: {tell_selection(each)}{tell_waste(run.metrics.wasted)}")
        if is_selective(each):
            section.pictures.append(_picture(f"selected-{number}", run, each))
            section.tables.append(_fates_table(run.name, each))
        section.tables += _families_tables(run)
    section.notes.append(
        "Generated for a step is what was drawn for it, as far as it ended; of what was given up before its end nobody knows how long it would have come out."
    )
    yield section


def _picture(name: str, run: RecordedRun, found: SelectionMetrics) -> Picture:
    ratios = [float("nan") if ratio is None else ratio for ratio in found.length_ratio]
    last = run.newest_step or len(ratios)
    numbers = range(last - len(ratios) + 1, last + 1)
    title = (
        f"{run.name}: mean output tokens of what a step trained on, over what was generated for it"
    )
    curves = [Curve("trained / generated", ratios, "s-0")]
    return curves_picture(name, title, numbers, curves, lambda value: f"{value:.2f}")


def is_selective(found: SelectionMetrics) -> bool:
    """Whether any step trained on something else than what was generated for it."""
    known = [ratio for ratio in found.length_ratio if ratio is not None]
    return bool(found.left_out) or any(abs(ratio - 1) > NOTABLE for ratio in known)


def tell_selection(found: SelectionMetrics) -> str:
    """Say in a sentence or two whether steps favoured some lengths."""
    if not is_selective(found):
        return "Every step trained on what was generated for it, no longer and no shorter: nothing was selected."
    first = next((ratio for ratio in found.length_ratio if ratio is not None), None)
    parts = []
    if first is not None:
        parts.append(
            f"What the first step trained on was {percent(first)} as long as what was generated for it"
        )
    whole, all_of_it = found.trained.mean_tokens, found.generated.mean_tokens
    if whole is not None and all_of_it:
        parts.append(f"over the run it was {percent(whole / all_of_it)}")
    left_out = sum(share.rollouts for share in found.left_out.values())
    return "; ".join(parts) + f". {left_out:,} rollouts were left out."


def tell_waste(shares: Mapping[str, float]) -> str:
    """Say which share of the tokens nothing was learned from, and why; nothing where that is none."""
    if not shares:
        return ""
    reasons = ", ".join(f"{reason} {percent(share)}" for reason, share in shares.items())
    return f" {percent(sum(shares.values()))} of the tokens generated in the steps that count were not trained on: {reasons}."


def _fates_table(name: str, found: SelectionMetrics) -> PageTable:
    rows = [_row("generated", found.generated), _row("trained", found.trained)]
    rows += [_row(f"left out: {reason}", share) for reason, share in found.left_out.items()]
    heads = ("", "rollouts", "mean output tokens", "mean reward")
    return PageTable(f"{name}: what became of rollouts.", heads, rows, (1, 2, 3))


def _row(name: str, share: Share) -> list[PageCell]:
    tokens = "" if share.mean_tokens is None else f"{share.mean_tokens:,.1f}"
    reward = "" if share.mean_reward is None else f"{share.mean_reward:.3f}"
    return cells(name, f"{share.rollouts:,}", tokens, reward)


def _families_tables(run: RecordedRun) -> Iterator[PageTable]:
    """Yield what became of each family's rollouts, where an executed run had several."""
    lines = run.learned[0].steps if run.learned else ()
    sums: dict[str, dict[str, float]] = {}
    for line in lines:
        for key, value in line.items():
            fate, of_family, family = key.partition(OF_FAMILY)
            if of_family and fate in FATES:
                of_one = sums.setdefault(family, dict.fromkeys(FATES, 0.0))
                of_one[fate] += float(value)
    if len(sums) > 1:
        rows = [cells(f, *(f"{of_one[fate]:,.0f}" for fate in FATES)) for f, of_one in sums.items()]
        yield PageTable(f"{run.name}: rollouts by family.", ("family", *FATES), rows, (1, 2, 3))
