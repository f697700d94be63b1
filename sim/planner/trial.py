"""Simulations of plans, in worker processes: one run file after the other, all on the same workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import lru_cache
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from sim.batch_time import generate_batch
from sim.costs.costs import Costs
from sim.costs.fill import fill_latency, fill_policies
from sim.parallel import answers
from sim.planner.generation_time import GenerationTime, summarize
from sim.planner.space import Candidate
from sim.world import SimWorld
from streamrl.record.metrics import Metrics, Speed, measure, measure_speed
from streamrl.record.trace import Trace
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.reading import decode_run, encode_run
from streamrl.workload.workload import SimulatedWorkload

Key = TypeVar("Key")
Answer = TypeVar("Answer")


class Trial(NamedTuple):
    """One plan to simulate."""

    run: bytes
    """The run file as JSON that plans are made of: with its seed and its steps."""
    candidate: Candidate
    batches: tuple[int, ...] = (0,)
    """Which batches are generated, where generation alone is asked for."""


def shortened(run: Run, seed: int) -> bytes:
    """Return a run file as trials take it, with at most `plan.steps` steps, drifting as the whole run would."""
    algorithm, lengths = run.algorithm, run.workload.lengths
    steps = min(run.plan.steps, algorithm.steps)
    workload = run.workload
    if lengths is not None and lengths.scale_to is not None and lengths.drift_steps is None:
        lengths = replace(lengths, drift_steps=max(2, algorithm.steps))
        workload = replace(workload, lengths=lengths)
    algorithm = replace(algorithm, steps=steps)
    return encode_run(replace(run, seed=seed, algorithm=algorithm, workload=workload))


def speed_of(trial: Trial) -> Speed:
    """Simulate a plan from its first prompt to its last step."""
    return measure_speed(trace_of(trial))


def metrics_of(trial: Trial) -> Metrics:
    """Simulate a plan and measure all of it."""
    return measure(trace_of(trial))


def trace_of(trial: Trial) -> Trace:
    """Return the trace of a plan's simulation.

    Raises:
        ValueError: the plan is no valid run file.
    """
    base, workload = open_trial(trial.run)
    run = trial.candidate.apply(base)
    check_run(run)
    costs = Costs.load(run)
    return SimWorld(fill_policies(run, costs), costs, workload).run()


def generation_of(trial: Trial) -> GenerationTime:
    """Simulate a plan's replicas alone, on one batch after the other."""
    base, workload = open_trial(trial.run)
    run = trial.candidate.apply(base)
    costs, size = Costs.load(run), run.algorithm.prompts_per_step
    run = fill_latency(run, costs)
    draws = [workload.draw(batch * size, size) for batch in trial.batches]
    return summarize([generate_batch(run, costs, batch) for batch in draws])


@lru_cache(maxsize=8)
def open_trial(run: bytes) -> tuple[Run, SimulatedWorkload]:
    """Read a run file and its workload, which all its plans share: to calibrate a ranker takes as long as a trial."""
    decoded = decode_run(run)
    return decoded, SimulatedWorkload(decoded)


def run_all(
    pool: Executor,
    work: Callable[[Trial], Answer],
    trials: Iterable[tuple[Key, Trial]],
    watch: Callable[[], None] = lambda: None,
) -> dict[Key, Answer]:
    """Return the answer to each trial, in the order of the trials; `watch` is called as each comes in."""
    pairs = list(trials)
    found = answers(pool, work, [trial for _, trial in pairs], watch)
    return {key: answer for (key, _), answer in zip(pairs, found, strict=True)}
