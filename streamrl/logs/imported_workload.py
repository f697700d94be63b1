"""Write the part of a run file that replays imported rollouts, a trace, or the mean lengths of a log."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray

from streamrl.engine.trace import Trace
from streamrl.hardware.profiles import find_profile
from streamrl.logs.agent_logs import AgentLog, mean_facts
from streamrl.logs.log_formats import known_formats, load_format
from streamrl.logs.measured_steps import MeasuredSteps
from streamrl.logs.recorded_rollouts import RecordedRollouts
from streamrl.record.recorded_workload import group_rewards, informative_share
from streamrl.runfile.reading import read_text
from streamrl.runfile.workload_config import LengthsConfig, LengthsKind
from streamrl.workload.workload import RecordedGroups, load_source

LENGTHS, PROMPTS, STEPS, WORKLOAD = "lengths.csv", "prompts.jsonl", "steps.csv", "workload.toml"
EPISODES = "episodes.csv"
SHAPE = "r1-distill-aime"
"""Assumed shape of lengths if a log has only means: real outputs of a reasoning model on mathematics."""
DRAWN = 1 << 16
"""Number of drawn lengths from which the scale of a shape is computed."""
HALVINGS = 60
MOST_SCALE = 1e6


class Fragment(NamedTuple):
    """A part of a run file."""

    text: str
    facts: dict[str, float | int | str]
    """Facts about its origin, for people and scripts."""


def replay_rollouts(found: RecordedRollouts, source: str) -> Fragment:
    """Return a workload of recorded rollouts: every prompt once in each epoch, in its order, with its own lengths."""
    lengths, prompts = found.lengths, found.prompt_tokens
    kind: LengthsKind = "groups" if found.has_prompts else "empirical"
    table: dict[str, object] = {"kind": kind, "source": LENGTHS}
    workload: dict[str, object] = {}
    if prompts:
        table["prompt_tokens"] = max(1, round(fmean(prompts)))
        workload["max_prompt_tokens"] = max(1, *prompts)
    if found.has_prompts:
        table["epochs"] = True
        workload["order"] = "file"
    if found.records:
        workload = {"prompts": PROMPTS, **workload}
    sizes = Counter(len(group) for group in found.groups)
    size = sizes.most_common(1)[0][0] if found.has_prompts else 1
    facts: dict[str, float | int | str] = {
        "rollouts": len(lengths),
        "prompts": len(found.groups) if found.has_prompts else 0,
        "group_size": size,
        "mean_output_tokens": round(fmean(lengths), 2),
        "longest_output": max(lengths),
    }
    if prompts:
        facts |= {"mean_prompt_tokens": round(fmean(prompts), 2), "longest_prompt": max(prompts)}
    notes = [
        f"{len(lengths)} rollouts of {source}, a mean of {fmean(lengths):.5g} output tokens, at most {max(lengths)}.",
        f"rollout.max_tokens must be at least {max(lengths)}, so that no output is cut off.",
    ]
    if found.has_prompts:
        least, most = min(sizes), max(sizes)
        notes.append(
            f"Prompts have {least if least == most else f'{least} to {most}'} rollouts each: algorithm.group_size = {size} "
            "replays them. A larger group_size repeats some."
        )
    else:
        notes.append("The file does not identify prompts, so lengths are drawn independently.")
    notes += [f"Note: {note}." for note in found.notes]
    return Fragment(_written(notes, {**workload, "lengths": table}), facts)


def replay_episodes(log: AgentLog, source: str, tokens: str) -> Fragment:
    """Return a workload that samples the episodes of an agent's log.

    Args:
        log: the episodes.
        source: its name.
        tokens: how tokens were counted.
    """
    prompts = [each.prompt_tokens for each in log.episodes if each.prompt_tokens]
    table: dict[str, object] = {"kind": "episodes", "source": EPISODES}
    if prompts:
        table["prompt_tokens"] = max(1, round(fmean(prompts)))
    notes = [
        f"{len(log.episodes)} episodes of {source} ({log.format}). Tokens: {tokens}.",
        f"They need [environment] with max_turns of at least {log.max_turns} and max_context of at least {log.max_context}.",
        *(f"Note: {note}." for note in log.notes),
    ]
    workload: dict[str, object] = {"max_prompt_tokens": max(prompts)} if prompts else {}
    return Fragment(_written(notes, {**workload, "lengths": table}), mean_facts(log))


def replay_trace(trace: Trace, file: str, shown: str, source: str) -> Fragment:
    """Return a workload that replays a recorded run, group by group, with the rewards that decide what is trained on.

    Args:
        trace: the recorded run.
        file: its trace file.
        shown: its path, relative to the written workload.
        source: its name.

    Raises:
        ValueError: the trace has no finished group.
    """
    RecordedGroups(Path(file))
    table: dict[str, object] = {"kind": "trace", "source": shown, "ranker": "recorded"}
    notes = [f"The groups of {source} in the order in which they were drawn."]
    share = round(informative_share(trace), 4)
    workload: dict[str, object] = {"informative_share": share}
    if rewards := group_rewards(trace):
        workload["group_rewards"] = [list(pair) for pair in rewards]
    facts: dict[str, float | int | str] = {"trace": shown, "informative_share": share}
    return Fragment(_written(notes, {**workload, "lengths": table}), facts)


def replay_steps(measured: MeasuredSteps, shape: str = SHAPE) -> Fragment:
    """Return a workload for a log with only mean lengths: a known shape, scaled to the mean.

    Raises:
        ValueError: the log has no lengths, or the shape is unknown.
    """
    outputs = measured.values("output_tokens")
    has_both = not outputs and measured.has("tokens_per_rollout")
    outputs = measured.values("tokens_per_rollout") if has_both else outputs
    if not outputs:
        raise ValueError(
            f"{measured.source} has no lengths of rollouts, and a workload needs them: {_missing(measured)} is "
            "missing"
        )
    mean, longest = fmean(outputs), max(measured.values("longest_output"), default=None)
    kind = _kind_of(shape)
    scale = scale_to_mean(LengthsConfig(kind=kind, source=shape), mean, longest)
    table: dict[str, object] = {"kind": kind, "source": shape, "scale": float(f"{scale:.5g}")}
    prompt = measured.mean("prompt_tokens")
    if prompt is not None:
        table["prompt_tokens"] = max(1, round(prompt))
    elif has_both:
        table["prompt_tokens"] = 1
    what = "prompt and output tokens together" if has_both else "output tokens"
    notes = [
        f"{measured.source} has only means of lengths: {mean:.5g} {what} over {len(outputs)} steps, from {outputs[0]:.5g} "
        f"in the first to {outputs[-1]:.5g} in the last.",
        f"Their shape is assumed: that of profiles/lengths/{shape}.csv, scaled. Recorded rollouts replay themselves.",
    ]
    if has_both:
        notes.append(
            "All of them count as output here. If you know your prompts, set prompt_tokens, and lower scale accordingly."
        )
    if longest is not None:
        notes.append(
            f"The longest output was {longest:.0f} tokens. Set rollout.max_tokens to the framework's limit."
        )
    facts: dict[str, float | int | str] = {
        "steps": len(measured.steps),
        "mean_output_tokens": round(mean, 2),
        "shape": shape,
        "scale": float(f"{scale:.5g}"),
    }
    return Fragment(_written(notes, {"lengths": table}), facts)


def _missing(measured: MeasuredSteps) -> str:
    """Return the missing key, or column of our own CSV, for the lengths of rollouts."""
    for log in map(load_format, known_formats()):
        if log.name == measured.framework:
            keys = log.keys(is_asynchronous=bool(measured.is_asynchronous))
            return " or ".join(map(str, keys.get("output_tokens") or keys["tokens_per_rollout"]))
    return "the column output_tokens"


def _written(notes: list[str], workload: dict[str, object]) -> str:
    head = "".join(f"# {note}\n" for note in notes)
    head += "# A part of a run file. Paths are relative to the run file that you copy it into.\n"
    return f"{head}\n{tomli_w.dumps({'workload': workload})}"


def _kind_of(shape: str) -> LengthsKind:
    path = find_profile("lengths", shape, ".csv")
    lines = read_text(path).splitlines()
    header = next(line for line in lines if not line.startswith("#"))
    return "histogram" if "density" in header else "empirical"


def scale_to_mean(config: LengthsConfig, mean: float, longest: float | None) -> float:
    """Return the scale of a shape for a mean, with outputs capped at the longest."""
    lengths = _unscaled(config)
    cap = max(longest or np.inf, mean)
    low, high = 1 / MOST_SCALE, MOST_SCALE
    for _ in range(HALVINGS):
        scale = float((low * high) ** 0.5)
        is_short = np.minimum(lengths * scale, cap).mean() < mean
        low, high = (scale, high) if is_short else (low, scale)
    return float((low * high) ** 0.5)


def mean_of_shape(config: LengthsConfig, factor: float, longest: float) -> float:
    """Return the mean of scaled lengths times a factor, with outputs capped at the longest."""
    return float(np.minimum(_unscaled(config) * config.scale * factor, longest).mean())


def _unscaled(config: LengthsConfig) -> NDArray[np.float64]:
    """Return lengths that are drawn from a shape without its scale."""
    source = load_source(config)
    assert not isinstance(source, RecordedGroups), "a shape is no trace"
    return source.sample(np.random.default_rng(0), DRAWN, 1)[0].astype(float)
