"""`streamrl samples`: print what a run trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, holds_run, open_trace, print_json
from streamrl.record.run_directory import SAMPLES
from streamrl.record.samples import (
    SampledGroup,
    SampledRollout,
    read_completions,
)
from streamrl.report.words import ENDS
from streamrl.runfile.escaping import visible


def samples(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of an executed run.")],
    steps: Annotated[
        list[int] | None,
        typer.Option(
            "--step", metavar="STEP", help="Step to print. Repeat for more. Default: the newest."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the prompts, completions and rewards that a run trained on.

    One group is printed per step: prompt, completions, rewards and advantages. The job may still be running.

    Example: streamrl samples runs/quickstart --step 1 --step 40
    """
    if not (directory / SAMPLES).exists() and holds_run(directory):
        _refuse_simulated(directory)
    groups = _choose(read_completions(directory), steps or (), directory)
    if as_json:
        print_json({"samples": groups})
    else:
        echo("\n\n".join(map(describe_group, groups)))


def _refuse_simulated(directory: Path) -> None:
    """Raise `ValueError` if a run was simulated, because such a run has no texts."""
    if open_trace(directory).world == "simulated":
        raise ValueError(
            f"{directory} is a simulated run, which has no texts; `streamrl samples` prints those of an executed run"
        )


def _choose(
    groups: Sequence[SampledGroup], steps: Sequence[int], directory: Path
) -> list[SampledGroup]:
    """Return the groups of some steps; without steps, of the newest."""
    if not groups:
        raise ValueError(f"{directory} has no samples yet: no step has ended")
    found = {group.step: group for group in groups}
    for step in steps:
        if step not in found:
            raise ValueError(
                f"--step {step}: {directory} has samples of {len(found)} steps, {min(found)} to {max(found)}"
            )
    return [found[step] for step in steps or (max(found),)]


def describe_group(group: SampledGroup) -> str:
    """Return a group as text: prompt and completions."""
    shown = f"{len(group.rollouts)} of the {group.size} rollouts of a prompt"
    head = f"step {group.step}: {shown}, of mean reward {group.mean_reward:.3g}"
    return "\n".join([head, _quoted(group.prompt), *map(_describe_rollout, group.rollouts)])


def _describe_rollout(rollout: SampledRollout) -> str:
    facts = (
        f"rollout {rollout.rollout}: reward {rollout.reward:.3g}, advantage {rollout.advantage:+.3g}, "
        f"{rollout.num_tokens:,} tokens, {ENDS[rollout.finish]}, begun under version {rollout.version}"
    )
    fault = f", {rollout.verifier}" if rollout.verifier else ""
    return f"\n{facts}{fault}\n{_text_of(rollout)}"


def _text_of(rollout: SampledRollout) -> str:
    """Return a completion; of an episode, its turns and observations, each below its name."""
    if not rollout.parts:
        return _quoted(rollout.text)
    lines, turn = [], 0
    for part in rollout.parts:
        turn += part.is_policy
        lines += [f"  turn {turn}:" if part.is_policy else "  observation:", _quoted(part.text)]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return an indented text."""
    return indent(visible(text), "  | ", lambda line: True)
