"""What a run file says of the work of a step, beside what was measured: where they differ, no factor is fitted.

A factor would hide a wrong run file, and be wrong for every other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from streamrl.engine.presets import choose_system
from streamrl.logs.measured_steps import MeasuredSteps
from streamrl.runfile.config import Run
from streamrl.runfile.errors import shown
from streamrl.runfile.files import run_table
from streamrl.workload.workload import SimulatedWorkload

LENGTHS, COUNTS = 0.10, 0.02
"""Shares by which means of tokens may differ beside their scatter, and counts, which are exact."""
OVERHEAD = 0.03
"""Share of a step by which its seconds beside its stages may differ from what a run file states."""
PROMPTS = 512
"""Over which the lengths of a run file are taken."""
OF_THE_RUN = ("model", "cluster", "rollout", "trainer", "algorithm", "sync", "policies", "verifier")
"""Sections in which a recorded run and the run file must agree, but for `NOT_OF_SPEED`."""
NOT_OF_SPEED = (
    *("model.path", "algorithm.steps", "algorithm.learning_rate", "policies.latency"),
    *("policies.context_time", "rollout.temperature", "verifier.scorer", "verifier.reward"),
)


PRICES = (".price", ".price_per_gb")
"""What keys end with that are dollars; an executed run's own machine costs none."""


class Disagreement(NamedTuple):
    """One key of a run file that says something else than what was measured."""

    key: str
    text: str
    """What it says, what was measured, and by how much they differ."""


def takes_turns(run: Run) -> bool:
    """Return whether a run generates a batch and trains on it, in turns."""
    return choose_system(run.policies).staleness_bound == 0


def find_disagreements(run: Run, measured: MeasuredSteps) -> list[Disagreement]:
    """Return where a run file disagrees with the work of the steps that were measured."""
    finders = (_of_mode, _of_rollouts, _of_lengths, _of_prompts, _of_longest, _of_gpus, _of_passes)
    return [found for find in finders for found in find(run, measured)]


def find_differences(run: Run, recorded: Run) -> list[Disagreement]:
    """Return where a run file differs from that of a recorded run in what its seconds depend on."""
    ours, theirs = _flat(run_table(run)), _flat(run_table(recorded))
    found = []
    for key in sorted({*ours, *theirs}):
        if key.startswith(NOT_OF_SPEED) or key.endswith(PRICES) or ours.get(key) == theirs.get(key):
            continue
        text = f"{_told(ours, key)} in the run file, {_told(theirs, key)} in the recorded run"
        found.append(Disagreement(key, text))
    return found


def _told(table: dict[str, Any], key: str) -> str:
    return shown(table[key]) if key in table else "absent"


def _flat(table: dict[str, Any], parent: str = "") -> dict[str, Any]:
    """Return the values of a run file's sections by dotted key."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if not parent and name not in OF_THE_RUN:
            continue
        key = f"{parent}.{name}" if parent else name
        if isinstance(value, dict):
            found |= _flat(value, key)
        else:
            found[key] = value
    return found


def _of_mode(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    turns = takes_turns(run)
    if turns and choose_system(run.policies).streaming == "whole-batch":
        yield from _of_turns(run, measured)
    if measured.is_asynchronous is None or measured.is_asynchronous is not turns:
        return
    theirs = "beside training" if measured.is_asynchronous else "in turns with training"
    ours = "takes turns" if turns else "is asynchronous"
    text = f"{run.policies.system!r} {ours}, but {measured.framework} generated {theirs}"
    yield Disagreement("policies.system", text)


def _of_turns(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    """Find stages that take longer together than the steps in which they would follow each other."""
    step, generation = measured.mean("step_time"), measured.mean("generation")
    first, train = (
        measured.mean("busy") if generation is None else generation,
        measured.mean("train"),
    )
    if step is None or first is None or train is None:
        return
    together = first + train + sum(measured.mean(name) or 0.0 for name in ("score", "sync"))
    if together > (1 + LENGTHS) * step:
        text = (
            f"{run.policies.system!r} takes turns, but generation, passes and sync of {together:.4g} s are in steps of "
            f"{step:.4g} s: some went on at once"
        )
        yield Disagreement("policies.system", text)


def _of_rollouts(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    ours, theirs = run.algorithm.rollouts_per_step, measured.mean("rollouts")
    if theirs is None:
        theirs, within = _counted_by_tokens(measured), LENGTHS
    else:
        within = COUNTS
    if theirs is None or abs(theirs / ours - 1) <= within:
        return
    size = run.algorithm.group_size
    text = (
        f"{run.algorithm.prompts_per_step} prompts x group_size {size} are {ours} rollouts a step, but {theirs:.5g} were "
        f"measured, {theirs / ours:.3g} times as many"
    )
    if size > 1 and abs(theirs * size / ours - 1) <= COUNTS:
        text += ": as many as prompts, if those were counted"
    yield Disagreement("algorithm.prompts_per_step", text)


def _counted_by_tokens(measured: MeasuredSteps) -> float | None:
    total, output = measured.mean("total_tokens"), measured.mean("output_tokens")
    prompt = measured.mean("prompt_tokens")
    if total is None or output is None or prompt is None or output + prompt == 0:
        return None
    return total / (output + prompt)


def _of_lengths(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    values = measured.values("output_tokens")
    if not values:
        return
    ours, _ = mean_tokens(run)
    theirs = fmean(values)
    scatter = 2 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    if abs(theirs - ours) <= LENGTHS * ours + scatter:
        return
    text = f"a mean of {ours:.5g} output tokens a rollout, but {theirs:.5g} were measured, {theirs / ours:.3g} times as many"
    lengths = run.workload.lengths
    assert lengths is not None, "mean_tokens has drawn some"
    text += f"; scale = {lengths.scale * theirs / ours:.4g} has about those"
    yield Disagreement("workload.lengths", text)


def _of_prompts(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    theirs = measured.mean("prompt_tokens")
    if theirs is None:
        return
    output, ours = mean_tokens(run)
    away = abs(theirs - ours)
    if away > LENGTHS * ours and away > LENGTHS / 2 * (ours + output):
        text = f"{ours:.5g} tokens of a prompt, but {theirs:.5g} were measured, {theirs / ours:.3g} times as many"
        yield Disagreement("workload.lengths.prompt_tokens", text)


def _of_longest(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    theirs = max(measured.values("longest_output"), default=0.0)
    if theirs > run.rollout.max_tokens:
        text = f"at most {run.rollout.max_tokens} output tokens, but {theirs:.0f} were measured, {theirs / run.rollout.max_tokens:.3g} times as many"
        yield Disagreement("rollout.max_tokens", text)


def _of_gpus(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    theirs = measured.mean("gpus")
    if theirs is None:
        tokens, seconds, rate = (
            measured.mean(name) for name in ("total_tokens", "step_time", "tokens_per_gpu_second")
        )
        if not (tokens and seconds and rate):
            return
        theirs = tokens / seconds / rate
    if abs(theirs / run.num_gpus - 1) > LENGTHS / 2:
        text = (
            f"replicas and trainer have {run.num_gpus} GPUs by their degrees, but {theirs:.4g} were measured, "
            f"{theirs / run.num_gpus:.3g} times as many"
        )
        yield Disagreement("rollout.replicas, trainer.data_parallel", text)


def _of_passes(run: Run, measured: MeasuredSteps) -> Iterator[Disagreement]:
    scored, reference = measured.mean("score"), measured.mean("reference")
    if reference and not run.algorithm.has_reference:
        text = f"{run.algorithm.kl_coefficient:g}, so that no reference runs, but its passes took {reference:.4g} s of a step"
        yield Disagreement("algorithm.kl_coefficient", text)
    elif scored and not run.algorithm.needs_score:
        text = f"{run.algorithm.old_log_probs!r}, and no pass before training, but such passes took {scored:.4g} s of a step"
        yield Disagreement("algorithm.old_log_probs", text)


def check_overhead(run: Run, seconds: float, step_time: float) -> Disagreement | None:
    """Return how the seconds beside the stages differ from those that a run file states; None where they do not."""
    stated = run.framework.step_time
    if stated is None or abs(seconds - stated) <= LENGTHS * stated + OVERHEAD * step_time:
        return None
    text = f"{stated:.4g} s of a step beside its stages, but {seconds:.4g} s were measured; left out, it is fitted"
    return Disagreement("framework.step_time", text)


def mean_tokens(run: Run) -> tuple[float, float]:
    """Return the mean output and prompt tokens of a rollout, as a run file has them."""
    draws = SimulatedWorkload(run).draw(0, PROMPTS)
    output = fmean(length for draw in draws for length in draw.lengths)
    return output, fmean(draw.drawn.prompt_tokens for draw in draws)
