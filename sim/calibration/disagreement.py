"""Compare the work of a step in a run file with the measured work.

No factor is fitted if they differ. The factor would hide an error in the run file, and would be wrong
for other run files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from streamrl.engine.presets import choose_system
from streamrl.logs.measured_steps import MeasuredSteps
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import shown
from streamrl.runfile.files import run_table
from streamrl.runfile.policies_config import PoliciesConfig, SystemName
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.workload.workload import SimulatedWorkload

LENGTHS, COUNTS = 0.10, 0.02
"""Accepted relative differences of token means, in addition to their scatter, and of counts, which
are exact.
"""
OVERHEAD = 0.03
"""Share of a step by which its seconds outside its stages may differ from the run file."""
PROMPTS = 512
"""Prompts over which the mean lengths of a run file are computed."""
OF_THE_RUN = ("model", "cluster", "rollout", "trainer", "algorithm", "sync", "policies", "verifier")
"""Sections in which the recorded run and the run file must agree, except `NOT_OF_SPEED`."""
NOT_OF_SPEED = (
    *("model.path", "algorithm.steps", "algorithm.learning_rate", "policies.latency"),
    *("policies.context_time", "rollout.temperature", "verifier.scorer", "verifier.reward"),
    "cluster.billing",
)


PRICES = (".price", ".price_per_gb", ".billing_unit", ".minimum_term")
"""Ends of keys that are prices. The machine of an executed run costs nothing."""


class Disagreement(NamedTuple):
    """One key of a run file whose value differs from the measured one."""

    key: str
    text: str
    """The value, the measured value, and their difference."""


def takes_turns(policies: PoliciesConfig) -> bool:
    """Return whether a run generates a batch and then trains on it, in turns."""
    return choose_system(policies).staleness_bound == 0


def find_disagreements(run: Run, measured: MeasuredSteps) -> list[Disagreement]:
    """Return the keys whose values disagree with the work of the measured steps."""
    of_tokens: Iterable[Disagreement] = ()
    if any(map(measured.has, ("output_tokens", "prompt_tokens", "tokens_per_rollout"))):
        workload = SimulatedWorkload(run)
        assert run.workload.lengths is not None, "a simulated workload has some"
        of_tokens = _of_tokens(mean_tokens(workload), run.workload.lengths.scale, measured)
    return [
        *_of_mode(run.policies, measured),
        *_of_rollouts(run.algorithm, measured),
        *_of_informative(run.algorithm, run.workload.informative_share, measured),
        *_of_pace(run.algorithm, run.rollout, measured),
        *of_tokens,
        *_of_longest(run.rollout.max_tokens, measured),
        *_of_gpus(run.num_gpus, measured),
        *_of_passes(run.algorithm, measured),
    ]


def find_differences(run: Run, recorded: Run) -> list[Disagreement]:
    """Return the keys that affect seconds and differ between a run file and that of a recorded run."""
    ours, theirs = _flat(run_table(run)), _flat(run_table(recorded))
    found = []
    for key in sorted({*ours, *theirs}):
        if key.startswith(NOT_OF_SPEED) or key.endswith(PRICES) or ours.get(key) == theirs.get(key):
            continue
        text = f"{_shown(ours, key)} in the run file, {_shown(theirs, key)} in the recorded run"
        found.append(Disagreement(key, text))
    return found


def _shown(table: dict[str, Any], key: str) -> str:
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


def _of_mode(policies: PoliciesConfig, measured: MeasuredSteps) -> Iterator[Disagreement]:
    turns = takes_turns(policies)
    if turns and choose_system(policies).streaming == "whole-batch":
        yield from _of_turns(policies.system, measured)
    if measured.is_asynchronous is None or measured.is_asynchronous is not turns:
        return
    theirs = (
        "at the same time as training" if measured.is_asynchronous else "in turns with training"
    )
    ours = "takes turns" if turns else "is asynchronous"
    text = f"{policies.system!r} {ours}, but {measured.framework} generated {theirs}"
    yield Disagreement("policies.system", text)


def _of_turns(system: SystemName, measured: MeasuredSteps) -> Iterator[Disagreement]:
    """Find stages that should take turns but together take longer than their step."""
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
            f"{system!r} takes turns, but generation, passes and sync of {together:.4g} s are in steps of "
            f"{step:.4g} s, so some of them overlapped"
        )
        yield Disagreement("policies.system", text)


def _of_rollouts(algorithm: AlgorithmConfig, measured: MeasuredSteps) -> Iterator[Disagreement]:
    ours, theirs = algorithm.rollouts_per_step, measured.mean("rollouts")
    if theirs is None:
        theirs, within = _counted_by_tokens(measured), LENGTHS
    else:
        within = COUNTS
    if theirs is None or abs(theirs / ours - 1) <= within:
        return
    size = algorithm.group_size
    text = (
        f"{algorithm.prompts_per_step} prompts x group_size {size} are {ours} rollouts a step, but {theirs:.5g} were "
        f"measured ({theirs / ours:.3g} times as many)"
    )
    if size > 1 and abs(theirs * size / ours - 1) <= COUNTS:
        text += "; the measured number may count prompts"
    yield Disagreement("algorithm.prompts_per_step", text)


def _of_informative(
    algorithm: AlgorithmConfig, ours: float, measured: MeasuredSteps
) -> Iterator[Disagreement]:
    """Find another share of rollouts that the trainer computes: its seconds are nearly proportional to it."""
    theirs = measured.mean("informative_share")
    if theirs is None or algorithm.computes_all or abs(theirs - ours) <= COUNTS:
        return
    text = (
        f"{ours:g} of the rollouts have a non-zero advantage, but {theirs:.3g} were measured, and the trainer skips the "
        f"others; set it to {theirs:.3g}"
    )
    yield Disagreement("workload.informative_share", text)


def _counted_by_tokens(measured: MeasuredSteps) -> float | None:
    total, output = measured.mean("total_tokens"), measured.mean("output_tokens")
    prompt = measured.mean("prompt_tokens")
    if total is None or output is None or prompt is None or output + prompt == 0:
        return None
    return total / (output + prompt)


def _of_pace(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, measured: MeasuredSteps
) -> Iterator[Disagreement]:
    """Find rollouts and GPUs that contradict a measured rate of tokens."""
    output, seconds, rate = (
        measured.mean(name) for name in ("output_tokens", "generation", "outputs_per_gpu_second")
    )
    rollouts = algorithm.rollouts_per_step
    if output and seconds and rate and not algorithm.dynamic_sampling:
        gpus = sum(kind.num_gpus for kind in rollout.kinds)
        ours, theirs = rollouts / gpus, rate * seconds / output
        if abs(theirs / ours - 1) > LENGTHS:
            text = (
                f"{rollouts} rollouts a step on {gpus} GPUs that generate are {ours:.4g} a GPU, but "
                f"{rate:.4g} tokens/s and GPU x {seconds:.4g} s / {output:.5g} tokens are {theirs:.3g} a GPU"
            )
            yield Disagreement("algorithm.prompts_per_step, rollout.replicas", text)
    yield from _of_throughput(rollouts, measured)


def _of_throughput(rollouts: int, measured: MeasuredSteps) -> Iterator[Disagreement]:
    """Find more rollouts than a measured throughput allows: it counts at most the seconds of a step."""
    tokens, seconds, rate = (
        measured.mean(name) for name in ("tokens_per_rollout", "step_time", "tokens_per_second")
    )
    if measured.has("rollouts") or not (tokens and seconds and rate):
        return
    most = rate * seconds / tokens
    if rollouts > (1 + LENGTHS) * most:
        text = (
            f"{rollouts} rollouts a step, but {rate:.5g} tokens/s x {seconds:.4g} s / {tokens:.4g} tokens are at most "
            f"{most:.4g}"
        )
        yield Disagreement("algorithm.prompts_per_step", text)


def _of_tokens(
    ours: tuple[float, float], scale: float, measured: MeasuredSteps
) -> Iterator[Disagreement]:
    """Find differences in the mean tokens of an output or a prompt.

    Args:
        ours: mean output and prompt tokens of the run file.
        scale: `workload.lengths.scale`.
        measured: the steps.
    """
    outputs, prompt = measured.values("output_tokens"), measured.mean("prompt_tokens")
    mean_output, mean_prompt = ours
    if outputs:
        yield from _of_outputs(scale, mean_output, outputs)
    if prompt is not None:
        yield from _of_prompts(mean_prompt, mean_output, prompt)
    if not outputs and (both := measured.mean("tokens_per_rollout")) is not None:
        yield from _of_both(mean_output + mean_prompt, both)


def _of_outputs(scale: float, ours: float, values: Sequence[float]) -> Iterator[Disagreement]:
    theirs = fmean(values)
    scatter = 2 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    if abs(theirs - ours) <= LENGTHS * ours + scatter:
        return
    text = f"a mean of {ours:.5g} output tokens a rollout, but {theirs:.5g} were measured ({theirs / ours:.3g} times as many)"
    text += f"; set workload.lengths.scale to {scale * theirs / ours:.4g} to get about this mean"
    yield Disagreement("workload.lengths", text)


def _of_prompts(ours: float, output: float, theirs: float) -> Iterator[Disagreement]:
    away = abs(theirs - ours)
    if away > LENGTHS * ours and away > LENGTHS / 2 * (ours + output):
        text = f"{ours:.5g} tokens a prompt, but {theirs:.5g} were measured ({theirs / ours:.3g} times as many)"
        yield Disagreement("workload.lengths.prompt_tokens", text)


def _of_both(ours: float, theirs: float) -> Iterator[Disagreement]:
    if abs(theirs / ours - 1) > LENGTHS:
        text = (
            f"a mean of {ours:.5g} prompt and output tokens a rollout, but {theirs:.5g} were measured "
            f"({theirs / ours:.3g} times as many)"
        )
        yield Disagreement("workload.lengths", text)


def _of_longest(max_tokens: int, measured: MeasuredSteps) -> Iterator[Disagreement]:
    theirs = max(measured.values("longest_output"), default=0.0)
    if theirs > max_tokens:
        text = (
            f"at most {max_tokens} output tokens, but {theirs:.0f} were measured "
            f"({theirs / max_tokens:.3g} times as many)"
        )
        yield Disagreement("rollout.max_tokens", text)


def _of_gpus(ours: int, measured: MeasuredSteps) -> Iterator[Disagreement]:
    theirs = measured.mean("gpus")
    if theirs is None:
        tokens, seconds, rate = (
            measured.mean(name) for name in ("total_tokens", "step_time", "tokens_per_gpu_second")
        )
        if not (tokens and seconds and rate):
            return
        theirs = tokens / seconds / rate
    if abs(theirs / ours - 1) > LENGTHS / 2:
        text = (
            f"replicas and trainer have {ours} GPUs by their degrees, but {theirs:.4g} were measured "
            f"({theirs / ours:.3g} times as many)"
        )
        yield Disagreement("rollout.replicas, trainer.data_parallel", text)


def _of_passes(algorithm: AlgorithmConfig, measured: MeasuredSteps) -> Iterator[Disagreement]:
    scored, reference = measured.mean("score"), measured.mean("reference")
    if reference and not algorithm.has_reference:
        text = f"{algorithm.kl_coefficient:g} needs no reference model, but its passes took {reference:.4g} s of a step"
        yield Disagreement("algorithm.kl_coefficient", text)
    elif scored and not algorithm.needs_score:
        text = f"{algorithm.old_log_probs!r} needs no pass before training, but such passes took {scored:.4g} s of a step"
        yield Disagreement("algorithm.old_log_probs", text)


def check_overhead(stated: float | None, seconds: float, step_time: float) -> Disagreement | None:
    """Return the disagreement of stated and measured seconds outside all stages; None if they agree.

    Args:
        stated: `framework.step_time`.
        seconds: measured seconds of a step outside its stages.
        step_time: measured seconds of a step.
    """
    if stated is None or abs(seconds - stated) <= LENGTHS * stated + OVERHEAD * step_time:
        return None
    text = f"{stated:.4g} s of a step outside its stages, but {seconds:.4g} s were measured; remove the key to have it fitted"
    return Disagreement("framework.step_time", text)


def mean_tokens(workload: SimulatedWorkload) -> tuple[float, float]:
    """Return the mean output and prompt tokens of a rollout, over the first prompts."""
    draws = workload.draw(0, PROMPTS)
    output = fmean(length for draw in draws for length in draw.lengths)
    return output, fmean(draw.drawn.prompt_tokens for draw in draws)
