"""What a run wrote, to read: the best, the middling and the worst rollout of a group of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.engine.messages import Step
from streamrl.engine.trainer_side import LEADER
from streamrl.record.run_lines import Line, read_rollouts
from streamrl.record.trace import Trace


class SampledRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was trained on."""

    rollout: int
    text: str
    """Its whole output."""
    reward: float
    num_tokens: int
    version: int
    """That sampled its first token."""


class SampledGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Some rollouts of one prompt."""

    step: int
    prompt: str | None
    """None where the prompts file is not there any more."""
    mean_reward: float
    """Of the whole group."""
    rollouts: tuple[SampledRollout, ...]
    """By falling reward."""


def sample_completions(
    trace: Trace, directory: Path, steps: Sequence[int]
) -> tuple[SampledGroup, ...]:
    """Return a group of each of `steps`: the one whose rewards differ most, since it is what was learned from.

    Raises:
        ValueError: rollouts.jsonl cannot be read.
    """
    groups = {
        command.version: command.groups
        for _, _, commands in trace.entries
        for command in commands
        if isinstance(command, Step) and command.trainer == LEADER and command.version in steps
    }
    wanted = {group for those in groups.values() for group in those}
    lines: dict[int, list[Line]] = {}
    for line in read_rollouts(directory):
        if line.get("group") in wanted:
            lines.setdefault(line["group"], []).append(line)
    prompts = _read_prompts(trace.run.workload.prompts)
    found = []
    for step, those in sorted(groups.items()):
        there = [lines[group] for group in those if group in lines]
        if there:
            found.append(_sample(step, max(there, key=_spread), prompts))
    return tuple(found)


def _spread(lines: Sequence[Line]) -> float:
    rewards = [line["reward"] for line in lines]
    return float(max(rewards) - min(rewards))


def _sample(step: int, lines: Sequence[Line], prompts: Sequence[str]) -> SampledGroup:
    """Take the best, the middle and the worst of a group."""
    ranked = sorted(lines, key=lambda line: (-line["reward"], line["rollout"]))
    places = sorted({0, len(ranked) // 2, len(ranked) - 1})
    number = ranked[0]["line"]
    return SampledGroup(
        step=step,
        prompt=prompts[number] if number < len(prompts) else None,
        mean_reward=sum(line["reward"] for line in lines) / len(lines),
        rollouts=tuple(
            SampledRollout(
                rollout=line["rollout"],
                text=line["text"],
                reward=line["reward"],
                num_tokens=line["num_tokens"],
                version=line["versions"][0][0] if line["versions"] else 0,
            )
            for line in (ranked[place] for place in places)
        ),
    )


def _read_prompts(path: str | None) -> list[str]:
    """Return each line's prompt as text; none where the file is not there, or is another's now."""
    if path is None or not Path(path).is_file():
        return []
    prompts = []
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return []
        prompt = record.get("prompt") if isinstance(record, dict) else None
        prompts.append(prompt if isinstance(prompt, str) else json.dumps(prompt))
    return prompts
