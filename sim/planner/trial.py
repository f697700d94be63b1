"""Simulate candidate plans in worker processes on the same workload. Of a huge plan, simulate one portion.

A portion has one of every N replicas, data-parallel ranks, reward workers and prompts, with the costs of the whole
plan. Each replica and rank has the same work and the same transfers as in the whole plan. So a
portion is enough for the search. Its sampling error is larger, and the longest of fewer rollouts is
shorter. So finalists are simulated whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace as replace_fields
from functools import lru_cache, partial
from itertools import islice
from math import inf
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from streamrl.engine.presets import choose_system
from streamrl.hardware.resolved import resolve
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import Metrics
from streamrl.record.steady_state import START, Speed
from streamrl.record.whole_run import whole_time, with_bill
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import can_fail
from streamrl.runfile.files import decode_run, encode_run
from streamrl.sim.batch_generation import StepBatch, generate_batch, step_batches
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.parallel import answers_in_time
from streamrl.sim.planner.episode_times import times_of_episodes
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.stage_times import (
    DealtBatch,
    GenerationTime,
    closed_form_error,
    summarize,
)
from streamrl.sim.steady_state import UnfinishedError, measure_steady, open_world, simulate_speed
from streamrl.sim.trace import SpeedTrace
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload

PORTION_ROLLOUTS, PORTION_REPLICAS = 2048, 8
"""Fewest rollouts of a step, and fewest replicas, in a portion."""


def portions_of(run: Run) -> int:
    """Return the number of portions of a plan: a power of two, or 1 if the plan must be simulated whole.

    A plan with failures is simulated whole, because failures are too rare in a few steps of a
    portion.
    """
    is_plain = run.num_trainers == 1 and run.policies.resize == "keep" and not can_fail(run)
    if not is_plain or run.costs.profile is not None:
        return 1
    counts = [kind.replicas for kind in run.rollout.kinds]
    counts += [run.trainer.data_parallel, run.algorithm.prompts_per_step]
    if run.verifier.pool is not None or run.verifier.time:
        counts.append(run.verifier.workers)
    portions = 1
    while (
        all(count % (2 * portions) == 0 for count in counts)
        and run.algorithm.rollouts_per_step >= 2 * portions * PORTION_ROLLOUTS
        and run.rollout.num_replicas >= 2 * portions * PORTION_REPLICAS
    ):
        portions *= 2
    return portions


def portion_of(run: Run, portions: int) -> Run:
    """Return a plan with 1/`portions` of its replicas, ranks and prompts."""
    rollout = replace(
        run.rollout,
        replicas=run.rollout.replicas // portions,
        others=tuple(
            replace(kind, replicas=kind.replicas // portions) for kind in run.rollout.others
        ),
    )
    trainer = replace(run.trainer, data_parallel=run.trainer.data_parallel // portions)
    verifier = run.verifier
    if run.verifier.pool is not None or run.verifier.time:
        verifier = replace(verifier, workers=verifier.workers // portions)
    algorithm = with_fewer_prompts(run.algorithm, portions)
    return replace(run, algorithm=algorithm, rollout=rollout, trainer=trainer, verifier=verifier)


def with_fewer_prompts(algorithm: AlgorithmConfig, portions: int) -> AlgorithmConfig:
    """Return an algorithm with 1/`portions` of the prompts per step."""
    fewer: AlgorithmConfig = replace(
        algorithm, prompts_per_step=algorithm.prompts_per_step // portions
    )
    return fewer


def costs_of_portion(costs: Costs, portions: int) -> Costs:
    """Return the costs of a plan for one of its portions. Fewer ranks share a pass there."""
    training = costs.training
    assert isinstance(training, TrainingCosts), "portions are of composed costs"
    trainer = replace(training.trainer, data_parallel=training.trainer.data_parallel // portions)
    fewer = replace(training, trainer=trainer, mini_batch=training.mini_batch / portions)
    return replace_fields(costs, training=fewer)


def speed_of_all(speed: Speed, price: float, portions: int) -> Speed:
    """Return the speed of a whole plan from that of one portion.

    Args:
        speed: speed of one portion.
        price: dollars a second of all GPUs of the plan.
        portions: number of portions of the plan.
    """
    goodput = speed.goodput * portions
    dollars = price * speed.step_time + speed.egress_per_step
    tokens = goodput * speed.step_time
    return replace(
        speed,
        step_tokens=[tokens * portions for tokens in speed.step_tokens],
        throughput=speed.throughput * portions,
        goodput=goodput,
        samples_per_second=speed.samples_per_second * portions,
        cost_per_step=dollars,
        cost_per_million_tokens=dollars / tokens * 1e6 if tokens else 0.0,
    )


SEARCH_STEPS = 8
"""Most steps by which a search compares plans. All plans have the same prompts and lengths, so
their difference is more exact than the step time of each.
"""
EPISODE_STEPS = START + 3
"""Most steps of any comparison of plans with episodes. An episode has dozens of turns, so its
simulation takes as long as that of dozens of rollouts.
"""
COUNTED = 8
"""Batches from which the tokens of uncut episodes are known."""
LEAST_COUNTED, ROLLOUTS = 2, 100_000
"""Fewest steps that count. More steps count until all of them have the second value of rollouts
together.
"""
MOST_REPLICAS = 64
"""Most replicas whose generation of a batch is simulated. A few dozen represent hundreds with equal
work.
"""

Key = TypeVar("Key")
Answer = TypeVar("Answer")
Figures = TypeVar("Figures", bound=Speed)


class Unfinished(NamedTuple):
    """Result of a simulation that stopped before the run's last step. The plan cannot be compared."""

    reason: str


class Trial(NamedTuple):
    """One plan to simulate."""

    run: bytes
    """The run file as JSON, with the seed and the number of steps to simulate. All plans derive
    from it.
    """
    candidate: Candidate
    batches: tuple[int, ...] = (0,)
    """Indices of the batches, if only generation or training is simulated."""
    portions: int = 1
    """Number of portions of the plan. One of them is simulated; see `streamrl.sim.planner.trial`.
    """


def whole(run: Run, seed: int) -> bytes:
    """Encode a run file with a seed, to simulate it until its mean step time is known."""
    return encode_run(replace(run, seed=seed))


def shortened(run: Run, seed: int, steps: int = SEARCH_STEPS) -> bytes:
    """Encode a run file with a seed and few steps, for the search.

    Steps with very many rollouts have less sampling error, so fewer of them are simulated.
    """
    enough = START + max(LEAST_COUNTED, ROLLOUTS // run.algorithm.rollouts_per_step)
    most = min(run.simulate.max_steps, steps, enough)
    if run.environment is not None:
        most = min(most, EPISODE_STEPS)
    return whole(replace(run, simulate=replace(run.simulate, max_steps=most)), seed)


def short_speed_of(trial: Trial) -> Speed | Unfinished:
    """Simulate a plan for the steps of its run file, and measure them without the first ones."""
    return _if_finished(_measure_short, trial)


def metrics_of(trial: Trial) -> Metrics | Unfinished:
    """Simulate the steady state of a plan and measure all of it."""
    return _if_finished(_measure_steady, trial)


def _if_finished(measure: Callable[[Trial], Figures], trial: Trial) -> Figures | Unfinished:
    try:
        found = measure(trial)
    except UnfinishedError as error:
        return Unfinished(str(error))
    if found.unfinished:
        return Unfinished(str(UnfinishedError(found.unfinished)))
    reason = _cut_too_much(trial, found)
    return Unfinished(reason) if reason else found


def _cut_too_much(trial: Trial, speed: Speed) -> str:
    """Return that a plan cuts off too many episodes at their time limit; empty if it does not."""
    run, _ = open_trial(trial.run)
    if run.environment is None or run.environment.episode_time_limit is None:
        return ""
    batches = [DealtBatch.of(batch.trained) for batch in counted_batches(trial.run, COUNTED)]
    whole = sum(float(batch.outputs.sum()) for batch in batches) / len(batches)
    lost = 1 - speed.goodput * speed.step_time / whole
    if lost <= run.plan.cut_off_share:
        return ""
    return (
        f"episodes lose {lost:.0%} of their tokens at environment.episode_time_limit, "
        f"plan.cut_off_share allows {run.plan.cut_off_share:.0%}"
    )


@lru_cache(maxsize=64)
def _measure_short(trial: Trial) -> Speed:
    run, workload = _planned(trial)
    if trial.portions == 1:
        return _speed_of(open_world(run, workload, trace_type=SpeedTrace))
    costs = costs_of_portion(Costs.load(run), trial.portions)
    portion = portion_of(run, trial.portions)
    fewer = open_portion(trial.run, trial.portions)
    world = open_world(portion, fewer, costs, trace_type=SpeedTrace)
    paid = PaidGpus.of(run)
    speed = speed_of_all(_speed_of(world), paid.dollars_per_second, trial.portions)
    return with_bill(run.cluster, speed, whole_time(run, speed), paid)


def _speed_of(world: SimWorld) -> Speed:
    trace = simulate_speed(world)
    first, last = counted_steps(trace.run.simulate.max_steps)
    num_whole = len(trace.steps)  # without steps that a lost trainer rolled back
    return trace.measure((min(first, num_whole), min(last, num_whole)))


class Watched(NamedTuple):
    """The speed of a plan with episodes over a few steps."""

    speed: Speed | Unfinished
    recomputed: float
    """Share of the replicas' seconds in which they compute contexts again that the KV cache has lost."""


def watched_speed_of(trial: Trial) -> Watched:
    """Simulate a whole plan for the steps of its run file, and tell what its replicas compute again."""
    run, workload = _planned(trial)
    world = open_world(run, workload, trace_type=SpeedTrace)
    speed = _if_finished(lambda _: _speed_of(world), trial)
    seconds = world.env.now * max(1, len(world.replicas))
    return Watched(speed, sum(each.recompute_time for each in world.replicas.values()) / seconds)


def timed_speed_of(trial: Trial) -> tuple[Speed | Unfinished, float]:
    """Return the result of `short_speed_of` and the seconds that the simulation took."""
    began_at = time.perf_counter()
    return short_speed_of(trial), time.perf_counter() - began_at


def _measure_steady(trial: Trial) -> Metrics:
    run, workload = _planned(trial)
    return measure_steady(run, workload=workload)


def counted_steps(max_steps: int) -> tuple[int, int]:
    """Return the first and last step that count, if a search simulates `max_steps` steps of a plan."""
    return min(START, max_steps - 1) + 1, max_steps


def counted_batches(base: bytes, most: int | None = None) -> list[StepBatch]:
    """Return the batches of the first `most` steps that count in a trial; of all that count if None."""
    run, _ = open_trial(base)
    first, last = counted_steps(run.simulate.max_steps)
    return _batches_of(base, range(first - 1, last)[:most])


def _batches_of(base: bytes, numbers: Sequence[int]) -> list[StepBatch]:
    """Return some batches of a run file. All its plans share them."""
    known = _first_batches(base, max(numbers) + 1)
    return [known[number] for number in numbers]


@lru_cache(maxsize=8)
def _first_batches(base: bytes, num: int) -> list[StepBatch]:
    return list(islice(step_batches(*open_trial(base)), num))


def _planned(trial: Trial) -> tuple[Run, SimulatedWorkload]:
    """Return a plan's run file and its workload.

    Raises:
        ValueError: the run file of the plan is invalid.
    """
    base, workload = open_trial(trial.run)
    run = trial.candidate.apply(base)
    check_run(run)
    return run, workload


def generation_of(trial: Trial) -> GenerationTime:
    """Simulate only the generation of a plan, for one batch after the other; compute that of episodes."""
    base, _ = open_trial(trial.run)
    run = trial.candidate.apply(base)
    costs = Costs.load(run)
    run = fill_policies(run, costs)
    batches = _batches_of(trial.run, trial.batches)
    if run.environment is not None:
        return times_of_episodes(resolve(run), costs, batches)
    generate = partial(generate_batch, run, costs, most=MOST_REPLICAS)
    ends = [batch.generate(generate) for batch in batches]
    return summarize(
        ends,
        run.rollout.num_replicas,
        waits_for_groups=run.algorithm.trains_whole_groups,
        has_reward_time=costs.rewards is not None or run.verifier.time > 0,
    )


def training_error_of(trial: Trial) -> float:
    """Return the ratio of a plan's passes, computed one by one on its first batch, to their closed form."""
    base, _ = open_trial(trial.run)
    run, (batch,) = trial.candidate.apply(base), _batches_of(trial.run, trial.batches[:1])
    lengths = DealtBatch.of(batch.trained).lengths
    streaming = choose_system(run.policies).streaming
    costs = TrainingCosts.load(resolve(run))
    return closed_form_error(costs, run.framework, run.algorithm, lengths, streaming)


@lru_cache(maxsize=8)
def open_trial(run: bytes) -> tuple[Run, SimulatedWorkload]:
    """Read a run file and its workload, which all its plans share.

    They are cached, because calibrating a length ranker takes as long as a trial.
    """
    decoded = decode_run(run)
    most = decoded.simulate.max_steps
    return decoded, SimulatedWorkload(decoded, num_steps=most, keeps_draws=True)


@lru_cache(maxsize=8)
def open_portion(run: bytes, portions: int) -> SimulatedWorkload:
    """Return the workload of one portion, for every plan of a run file with this number of portions."""
    decoded = decode_run(run)
    fewer = with_fewer_prompts(decoded.algorithm, portions)
    portion, most = replace(decoded, algorithm=fewer), decoded.simulate.max_steps
    return SimulatedWorkload(portion, num_steps=most, keeps_draws=True)


def run_all(
    pool: Executor,
    work: Callable[[Trial], Answer],
    trials: Iterable[tuple[Key, Trial]],
    watch: Callable[[], None] = lambda: None,
    until: float = inf,
) -> dict[Key, Answer]:
    """Return the answer to each trial, in the order of the trials; `watch` is called after each answer.

    Trials that did not start by `until`, a value of `time.perf_counter`, are left out. The first
    trial always runs.
    """
    pairs = list(trials)
    found = answers_in_time(pool, work, [trial for _, trial in pairs], watch, until)
    return {pairs[place][0]: answer for place, answer in found.items()}
