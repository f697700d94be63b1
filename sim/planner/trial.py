"""Simulations of plans, in worker processes: one run file after the other, all on the same workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import lru_cache
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from sim.batch_time import generate_batch
from sim.costs.costs import Costs
from sim.costs.fill import fill_latency
from sim.parallel import answers
from sim.planner.generation_time import GenerationTime, summarize
from sim.planner.space import Candidate
from sim.steady_state import measure_steady, sampled, simulate_steady
from streamrl.record.metrics import Metrics, Speed, measure_speed
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.reading import decode_run, encode_run
from streamrl.workload.workload import SimulatedWorkload

SEARCH_STEPS = 6
"""Most steps by which a search compares plans: all take the same prompts and lengths, so that their difference is known
better than the time of any. The first is left out."""

Key = TypeVar("Key")
Answer = TypeVar("Answer")


class Trial(NamedTuple):
    """One plan to simulate."""

    run: bytes
    """The run file as JSON that plans are made of: with its seed, and how many steps are simulated."""
    candidate: Candidate
    batches: tuple[int, ...] = (0,)
    """Which batches are generated, where generation alone is asked for."""


def whole(run: Run, seed: int) -> bytes:
    """Return a run file as the chosen plan takes it: until its mean step time is known."""
    return encode_run(replace(run, seed=seed))


def shortened(run: Run, seed: int, steps: int = SEARCH_STEPS) -> bytes:
    """Return a run file as a search takes it: a few steps of it, which drift as far as the whole run."""
    most = min(run.simulate.max_steps, steps)
    return whole(replace(run, simulate=replace(run.simulate, max_steps=most)), seed)


def speed_of(trial: Trial) -> Speed:
    """Simulate the steady state of a plan.

    Raises:
        ValueError: the plan is no valid run file.
    """
    run, workload = _planned(trial)
    return measure_speed(simulate_steady(run, workload=workload))


def metrics_of(trial: Trial) -> Metrics:
    """Simulate the steady state of a plan and measure all of it.

    Raises:
        ValueError: the plan is no valid run file.
    """
    run, workload = _planned(trial)
    return measure_steady(run, workload=workload)


def _planned(trial: Trial) -> tuple[Run, SimulatedWorkload]:
    """Return a plan's run file and its workload."""
    base, workload = open_trial(trial.run)
    run = trial.candidate.apply(base)
    check_run(run)
    return run, workload


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
    return decoded, SimulatedWorkload(sampled(decoded))


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
