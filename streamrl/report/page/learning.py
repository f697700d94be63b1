"""Write the sections on learning: rewards, losses, lengths, samples, and selection of rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from streamrl.record.run_directory import FATES, OF_FAMILY, OF_SCORER, Line
from streamrl.record.samples import SampledGroup, shortened
from streamrl.record.selection import SelectionMetrics, Share
from streamrl.report.page.parts import PageCell, PageSection, PageTable, cells
from streamrl.report.page.sources import Learned, RecordedRun
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.step_curves import Curve, curves_picture
from streamrl.report.words import ENDS, percent, seconds
from streamrl.runfile.escaping import visible

MOST_TEXT = 600
"""Characters shown of a completion or a prompt; a longer one keeps both ends."""
MOST_ROWS = 12
"""Steps in the table."""
COLOURS = ("s-0", "s-1 dashed", "s-2 dotted", "s-3 dash-dot")


def figure(value: float) -> str:
    """Return a figure of a step with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Panel(NamedTuple):
    """A picture: its title, the keys of metrics.jsonl with their labels, and the format of values."""

    title: str
    keys: tuple[tuple[str, str], ...]
    show: Callable[[float], str]


PANELS = (
    Panel("Reward", (("reward", "mean"), ("reward_std", "standard deviation")), figure),
    Panel("KL from the policy that sampled, nats a token", (("kl_k3", "k3"),), figure),
    Panel("KL from the initial policy, nats a token", (("reference_kl", "reference"),), figure),
    Panel("Entropy, nats a token", (("entropy", "entropy"),), figure),
    Panel("Loss", (("loss", "loss"),), figure),
    Panel("Norm of the gradient", (("grad_norm", "before clipping"),), figure),
    Panel("Output tokens of a rollout", (("length_mean", "mean"), ("length_max", "most")), figure),
    Panel(
        "Shares",
        (
            ("uniform_groups", "groups of one reward"),
            ("cut_off", "rollouts cut off"),
            ("clip_fraction", "tokens clipped"),
            ("ranker_recall", "longest fifth found by the ranker"),
        ),
        percent,
    ),
    Panel("Versions behind", (("staleness_mean", "mean"), ("staleness_max", "most")), figure),
    Panel(
        "Seconds of a step, and of the trainer's work in it",
        (
            ("step_time", "all of it"),
            ("score_time", "score"),
            ("train_time", "train"),
            ("optimizer_time", "optimizer"),
        ),
        seconds,
    ),
)


def learning_sections(runs: Sequence[RecordedRun]) -> Iterator[PageSection]:
    """Yield a section for each trainer that recorded its steps."""
    for number, run in enumerate(runs, start=1):
        for place, learned in enumerate(run.learned):
            steps = (
                f" of {run.run.algorithm.steps:,} steps"
                if not place
                else " steps, in its own time,"
            )
            name = f"learning-{number}" + (f"-{place}" if place else "")
            yield _section(name, learned, steps)


def steps_sections(runs: Sequence[RecordedRun]) -> Iterator[PageSection]:
    """Yield the figures of single steps, and samples of what was written, for each trainer."""
    for number, run in enumerate(runs, start=1):
        for place, learned in enumerate(run.learned):
            name = f"steps-{number}" + (f"-{place}" if place else "")
            yield _steps_section(name, learned)


def _section(name: str, learned: Learned, of_steps: str) -> PageSection:
    first, last = learned.steps[0], learned.steps[-1]
    section = PageSection(name, f"What {learned.who} learned", is_pair=True)
    section.text.append(
        f"{last['step']:,}{of_steps} are made. From step {first['step']} to step {last['step']} the mean reward went from {figure(first['reward'])} to {figure(last['reward'])}."
    )
    section.pictures += _pictures(name, learned)
    return section


def _steps_section(name: str, learned: Learned) -> PageSection:
    section = PageSection(name, f"Steps and samples of {learned.who}")
    section.tables.append(_steps_table(learned.steps))
    section.tables += [_samples_table(group) for group in learned.samples]
    section.notes.append(
        "Steps that were rolled back are left out. The first step that is made after a start, or a resume, took that too. Entropy is estimated from the tokens that were sampled; groups of one reward teach nothing."
    )
    if learned.samples:
        section.notes.append(
            "Of each step that is shown, the group whose rewards differ most, from its best rollout to its worst; samples.jsonl has the same of every step, rollouts.jsonl all rollouts."
        )
    return section


def _rewards_panel(learned: Learned) -> Iterator[Panel]:
    """Yield the panel of rewards by scorer, with as many scorers as curves can be distinguished."""
    named = {key: None for line in learned.steps for key in line if key.startswith(OF_SCORER)}
    keys = tuple((key, key.removeprefix(OF_SCORER)) for key in named)
    for first in range(0, len(keys), len(COLOURS)):
        yield Panel("What scorers gave", keys[first : first + len(COLOURS)], figure)


def _pictures(name: str, learned: Learned) -> Iterator[Picture]:
    numbers = [line["step"] for line in learned.steps]
    for panel in (*PANELS[:1], *_rewards_panel(learned), *PANELS[1:]):
        keys = [
            (key, label) for key, label in panel.keys if any(key in line for line in learned.steps)
        ]
        curves = [
            Curve(label, [float(line.get(key, float("nan"))) for line in learned.steps], colour)
            for (key, label), colour in zip(keys, COLOURS, strict=False)
        ]
        if curves:
            slug = re.sub(r"[^A-Za-z0-9]", "-", panel.keys[0][0])
            yield curves_picture(f"{name}-{slug}", panel.title, numbers, curves, panel.show)


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step", "step", figure),
    ("reward", "reward", figure),
    ("spread", "reward_std", figure),
    ("uniform groups", "uniform_groups", percent),
    ("tokens", "length_mean", figure),
    ("most", "length_max", figure),
    ("cut off", "cut_off", percent),
    ("behind", "staleness_mean", figure),
    ("loss", "loss", figure),
    ("gradient", "grad_norm", figure),
    ("entropy", "entropy", figure),
    ("KL", "kl_k3", figure),
    ("KL from the initial policy", "reference_kl", figure),
    ("clipped", "clip_fraction", percent),
    ("step took", "step_time", seconds),
    ("train", "train_time", seconds),
)
"""Columns of the table: head, key, and format of values."""


def spread_places(count: int) -> list[int]:
    """Return at most `MOST_ROWS` places of a list of `count` items, evenly spread, with the first and the last."""
    rows = min(MOST_ROWS, count)
    return sorted({round(row * (count - 1) / max(rows - 1, 1)) for row in range(rows)})


def _steps_table(steps: Sequence[Line]) -> PageTable:
    """Return a table of some steps, spread evenly over the run, with the first and the last."""
    places = spread_places(len(steps))
    shown = [column for column in COLUMNS if any(column[1] in line for line in steps)]
    cells = [
        [PageCell(show(steps[at][key]) if key in steps[at] else "") for _, key, show in shown]
        for at in places
    ]
    is_whole = len(places) == len(steps)
    caption = "Figures of its steps." if is_whole else f"Figures of {len(places)} of its steps."
    return PageTable(
        caption,
        [name for name, _, _ in shown],
        cells,
        range(len(shown)),
        is_cards=True,
        is_grid=True,
    )


def _samples_table(group: SampledGroup) -> PageTable:
    prompt = visible(shortened(group.prompt, MOST_TEXT))
    rows = [
        [
            PageCell(figure(each.reward)),
            PageCell(f"{each.advantage:+.3g}"),
            PageCell(f"{each.num_tokens:,}"),
            PageCell(ENDS[each.finish]),
            PageCell(f"{each.version}"),
            PageCell(visible(shortened(each.text, MOST_TEXT))),
        ]
        for each in group.rollouts
    ]
    caption = f"Step {group.step}, a group of mean reward {figure(group.mean_reward)}: {prompt}"
    heads = ("reward", "advantage", "tokens", "end", "version", "completion")
    return PageTable(caption, heads, rows, (0, 1, 2, 4), is_cards=True)


def learning_json(runs: Sequence[RecordedRun]) -> list[dict[str, object]]:
    """Return the same as data: the lines of all steps that were kept, and the samples."""
    return [
        {
            "name": run.name,
            "trainer": None if learned.who == run.name else learned.who,
            "steps": learned.steps,
            "samples": learned.samples,
        }
        for run in runs
        for learned in run.learned
    ]


NOTABLE = 0.01
"""Share of a length by which a step must differ to count as selected."""


def selection_sections(runs: Sequence[RecordedRun]) -> Iterator[PageSection]:
    """Yield the section on selection, if any run has finished a step."""
    known = [(run, run.metrics.selection) for run in runs]
    found = [(run, each) for run, each in known if each is not None and each.trained.rollouts]
    if not found:
        return
    section = PageSection("selected", "What was trained on, of what was generated", is_pair=True)
    for number, (run, each) in enumerate(found, start=1):
        section.text.append(
            f"{run.name}: {describe_selection_bias(each)}{describe_waste(run.metrics.wasted)}"
        )
        if is_selective(each):
            section.pictures.append(_picture(f"selected-{number}", run, each))
            section.tables.append(_fates_table(run.name, each))
        section.tables += _families_tables(run)
    section.notes.append(
        "Only finished rollouts are counted as generated. The length of a rollout that was aborted is not known."
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
    """Return whether any step trained on other rollouts than those generated for it."""
    known = [ratio for ratio in found.length_ratio if ratio is not None]
    return bool(found.left_out) or any(abs(ratio - 1) > NOTABLE for ratio in known)


def describe_selection_bias(found: SelectionMetrics) -> str:
    """Return a sentence or two on whether steps favoured some lengths."""
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


def describe_waste(shares: Mapping[str, float]) -> str:
    """Return the share of generated tokens without training, and the reasons; empty if there are none."""
    if not shares:
        return ""
    reasons = ", ".join(f"{reason} {percent(share)}" for reason, share in shares.items())
    return f" {percent(sum(shares.values()))} of the tokens generated in the steps that count were not trained on: {reasons}."


def _fates_table(name: str, found: SelectionMetrics) -> PageTable:
    rows = [_row("generated", found.generated), _row("trained", found.trained)]
    rows += [_row(f"left out: {reason}", share) for reason, share in found.left_out.items()]
    heads = ("", "rollouts", "mean output tokens", "mean reward")
    return PageTable(f"{name}: what became of rollouts.", heads, rows, (1, 2, 3), is_cards=True)


def _row(name: str, share: Share) -> list[PageCell]:
    tokens = "" if share.mean_tokens is None else f"{share.mean_tokens:,.1f}"
    reward = "" if share.mean_reward is None else f"{share.mean_reward:.3f}"
    return cells(name, f"{share.rollouts:,}", tokens, reward)


def _families_tables(run: RecordedRun) -> Iterator[PageTable]:
    """Yield tables of each family's rollouts, if an executed run had several families."""
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
        yield PageTable(
            f"{run.name}: rollouts by family.", ("family", *FATES), rows, (1, 2, 3), is_cards=True
        )
