"""Whether the chosen plan should prefill on replicas of their own: one simulation of the same GPUs, on the same prompts.

The search itself compares plans whose replicas prefill and decode. If the run file has prefill replicas, the same
share of the plan's replicas becomes prefill replicas.
"""

from __future__ import annotations

from concurrent.futures import Executor

from msgspec.structs import replace

from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import encode_run
from streamrl.runfile.roles_config import OF_REPLICAS, ReplicasConfig, RolloutConfig
from streamrl.sim.planner.lending import LEAST_GAIN, step_time_of
from streamrl.sim.planner.plan import PlannedDisaggregation
from streamrl.sim.steady_state import UnfinishedError
from streamrl.targets.verdicts import check_target


def without_prefill_replicas(rollout: RolloutConfig) -> RolloutConfig:
    """Return the replicas without those that only prefill."""
    found: RolloutConfig = replace(
        rollout, others=tuple(other for other in rollout.others if not other.prefills)
    )
    return found


def with_prefill_replicas(rollout: RolloutConfig, num: int) -> RolloutConfig:
    """Return the replicas with `num` of the first kind as prefill replicas."""
    own = {key: getattr(rollout, key) for key in OF_REPLICAS} | {"replicas": num}
    prefill = ReplicasConfig(**own, disaggregation_mode="prefill")
    found: RolloutConfig = replace(
        rollout, replicas=rollout.replicas - num, others=(*rollout.others, prefill)
    )
    return found


def num_prefill(planned: RolloutConfig, wanted: RolloutConfig) -> int:
    """Return how many replicas of a plan prefill, if as large a share of them does as in a run file."""
    share = 1 - wanted.num_decode_replicas / wanted.num_replicas
    return max(1, min(round(share * planned.num_replicas), planned.replicas - 1))


def planned_disaggregation(
    planned: Run, wanted: RolloutConfig, step_time: float, pool: Executor
) -> PlannedDisaggregation | None:
    """Simulate a plan with prefill replicas, and compare it with its step time in seconds without them.

    None if the run file, whose replicas are `wanted`, has no prefill replicas.
    """
    if not wanted.prefill_kinds:
        return None
    if planned.rollout.replicas < 2:
        return PlannedDisaggregation(reason="the plan has a single replica")
    num = num_prefill(planned.rollout, wanted)
    apart = replace(planned, rollout=with_prefill_replicas(planned.rollout, num))
    try:
        check_run(apart)
        if planned.plan.target is not None:
            check_target(apart, planned.plan.target)
        seconds = pool.submit(step_time_of, encode_run(apart)).result()
    except (RunError, UnfinishedError) as error:
        return PlannedDisaggregation(reason=str(error))
    return PlannedDisaggregation(
        step_time=step_time,
        step_time_apart=seconds,
        num_prefill=num,
        is_taken=seconds < (1 - LEAST_GAIN) * step_time,
    )
