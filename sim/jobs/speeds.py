"""Plan one job for one share of the pools, and compute its speed there and the cost of a switch.

    save   =  (weights + optimizer states) / storage bandwidth of the trainer's nodes
    switch =  save  +  load, which takes as long  +  start of engines and trainer  +  fill of the pipeline

The plan is the fastest one on these GPUs, because a job pays for all GPUs of its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.hardware.memory import optimizer_bytes
from streamrl.hardware.model_shape import BYTES
from streamrl.hardware.resolved import ResolvedRun, TrainerHardware, resolve
from streamrl.record.band import Band, band_of
from streamrl.record.metrics import Metrics
from streamrl.record.whole_run import WholeRun
from streamrl.runfile.checks import check_run
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import expected_losses
from streamrl.runfile.files import decode_run
from streamrl.runfile.jobs_config import ScheduleConfig
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.recorded_numbers import Setting
from streamrl.runfile.start_values import with_fitting_start
from streamrl.runfile.units import Duration
from streamrl.sim.jobs.schedule import JobSpeed
from streamrl.sim.planner.modes import keep_to_framework
from streamrl.sim.planner.plan_description import choice_of
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.take import with_restarts
from streamrl.sim.steady_state import UnfinishedError, measure_steady


class PlannedShare(NamedTuple):
    """A job at one share of the pools."""

    run: Run
    """Its run file there, with the allocation filled in."""
    choice: str
    """Its plan in one line."""
    settings: dict[str, Setting]
    speed: JobSpeed
    step_time_band: Band


def plan_share(
    offer: Run,
    cluster: ClusterConfig,
    schedule: ScheduleConfig,
    most_seconds: float,
    pool: Executor,
    watch: Callable[[], None],
) -> PlannedShare:
    """Choose the fastest plan of a job on some GPUs, and simulate its steady state.

    Args:
        offer: the run file of the job.
        cluster: the pools that it has.
        schedule: what a switch costs.
        most_seconds: seconds after which no further plan is simulated.
        pool: workers.
        watch: called after each simulation.

    Raises:
        ValueError: no plan fits on these GPUs.
        RuntimeError: no plan reaches the last step.
    """
    if offer.num_trainers > 1:
        raise ValueError(f"a job has one trainer, its run file has {offer.num_trainers}")
    goal = _goal(offer.plan, most_seconds)
    own = replace(offer, cluster=cluster, plan=goal, faults=(), lending=None)
    run = keep_to_framework(with_fitting_start(own)).run
    search = Search.open(run, time.perf_counter() + most_seconds)
    search.run(pool, watch)
    race = Race(search)
    chosen = race.settle(pool, race.run(pool, watch), watch)
    metrics, *_ = race.steady[chosen]
    planned = race.planned(chosen)
    losses = expected_losses(planned, metrics.step_time)
    planned = replace(planned, plan=offer.plan, policies=with_restarts(planned.policies, losses))
    check_run(planned)
    choice = choice_of(search, chosen, race.steady[chosen])
    return PlannedShare(
        planned,
        choice.text,
        dict(choice.settings),
        speed_of(resolve(planned), metrics, schedule),
        band_of(metrics.step_time, metrics.sampled, metrics.model_error),
    )


def _goal(plan: PlanConfig, most_seconds: float) -> PlanConfig:
    """Return the goal of a job's plan at one share: the shortest step, whatever the limits of its run file are."""
    goal: PlanConfig = replace(
        plan,
        objective="step-time",
        value_of_hour=0.0,
        budget=None,
        budget_per_hour=None,
        budget_per_day=None,
        budget_per_step=None,
        deadline=None,
        seeds=1,
        time_limit=Duration(most_seconds),
    )
    return goal


def speed_of(resolved: ResolvedRun, metrics: Metrics, schedule: ScheduleConfig) -> JobSpeed:
    """Return the speed of a planned run from its simulation.

    Raises:
        RuntimeError: the run stops before its last step.
    """
    whole: WholeRun | None = metrics.whole_run
    if whole is None:
        raise UnfinishedError(metrics.unfinished)
    run, trainer = resolved.run, resolved.trainer
    steps = run.algorithm.steps
    saving = checkpoint_bytes(trainer) / schedule.storage_bandwidth / nodes_of(trainer)
    starts_itself = run.rollout.start_time > 0 or run.trainer.start_time > 0
    num_gpus = sum(metrics.num_gpus.values())
    busy = sum(metrics.busy.values()) * num_gpus * metrics.step_time * whole.steps
    gpu_dollars = sum(pool.dollars for pool in whole.pools.values())
    return JobSpeed(
        step_time=(whole.seconds - whole.start_time) / steps,
        start_time=whole.start_time + (0.0 if starts_itself else schedule.start_time),
        load_time=saving,
        save_time=max(saving, float(run.framework.checkpoint_time)),
        busy=busy / steps,
        other_dollars=max(0.0, whole.dollars - gpu_dollars) / steps,
    )


def checkpoint_bytes(trainer: TrainerHardware) -> float:
    """Return the bytes of a checkpoint: weights of actor and critic, and optimizer states of what is trained."""
    weights = trainer.num_trained_models * BYTES[trainer.dtype]
    states = trainer.trained_models * optimizer_bytes(trainer.config)
    return trainer.model.num_parameters * (weights + states)


def nodes_of(trainer: TrainerHardware) -> int:
    """Return the number of nodes on which a trainer is; each writes its part of a checkpoint."""
    return -(-trainer.config.num_gpus // trainer.pool.gpus_per_node)


def measured_speed(job: tuple[bytes, ScheduleConfig]) -> JobSpeed:
    """Simulate an encoded run file, and return its speed. Workers call it."""
    planned = decode_run(job[0])
    return speed_of(resolve(planned), measure_steady(planned), job[1])
