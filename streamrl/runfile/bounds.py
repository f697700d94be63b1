"""Numbers of a run file that must lie within bounds whatever other keys say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import get_type_hints

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.cluster_config import LinkConfig, PoolConfig
from streamrl.runfile.config import CostsConfig, ExecuteConfig, Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.failures_config import FailuresConfig
from streamrl.runfile.faults_config import FaultConfig
from streamrl.runfile.framework_config import FrameworkConfig
from streamrl.runfile.keys import join_key
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.section import Section
from streamrl.runfile.sides_config import (
    AlgorithmChanges,
    FollowerConfig,
    ReplicasConfig,
    RolloutConfig,
    SpeculativeConfig,
    TrainerConfig,
    VerifierConfig,
)
from streamrl.runfile.simulate_config import SimulateConfig
from streamrl.runfile.sync_config import SyncConfig
from streamrl.runfile.trainers import FOLLOWERS, trainer_key
from streamrl.runfile.workload_config import (
    TAIL_SHARE,
    LengthsConfig,
    RankerConfig,
    SourceConfig,
    WorkloadConfig,
)

POSITIVE = Bounds(0, excludes_least=True)
SHARE = Bounds(0, 1)
REWARD = Bounds(-1e9, 1e9)
MONEY = Bounds(0, 10**6)
"""Dollars of a GPU-hour, or of a gigabyte."""
SECONDS = Bounds(0, 1e7)
"""Of something that happens within a run: at most four months."""
FACTOR = Bounds(1e-4, 1e4)
POSITIVE_SHARE = Bounds(0, 1, excludes_least=True)
MOST_PER_GROUP = 2**14
"""Rollouts of one prompt; lengths of a thousand groups are drawn at once, which this keeps below 128 MiB."""
MOST_FAILURES = 10**7
"""Within a minute; each is remembered that long."""
MOST_FAULTS = 1000
MOST_THREADS = 1024
"""Of a process: more than any machine has cores."""
MOST_DRAFTED = 64
"""Tokens of a draft: engines draft up to 16."""
MOST_OVERSAMPLED = 16
"""Steps' worth of prompts drawn for one step: beyond, hardly any is trained on."""
OF_LOSSES = {
    "learning_rate": Bounds(0),
    "correction_cap": Bounds(1),
    "clip": POSITIVE,
    "clip_high": POSITIVE,
    "beta": POSITIVE,
    "critic_learning_rate": POSITIVE,
    "gae_lambda": Bounds(0, 1),
    "kl_coefficient": Bounds(0),
    "entropy_coefficient": Bounds(0),
    "second_moment": POSITIVE,
    "max_grad_norm": POSITIVE,
}
OF_TRAINERS = {
    "efficiency": POSITIVE_SHARE,
    "start_time": SECONDS,
    "expert_tensor_parallel": Bounds(1),
}
COUNTS = (
    *(PoolConfig, RolloutConfig, TrainerConfig, FollowerConfig, AlgorithmConfig, WorkloadConfig),
    *(VerifierConfig, SyncConfig, ExecuteConfig, FrameworkConfig, ReplicasConfig),
    SpeculativeConfig,
)
"""Sections whose whole numbers are all at least 1."""
BOUNDS: dict[type[Section], dict[str, Bounds]] = {
    Run: {"seed": Bounds(0)},
    PoolConfig: {
        "host_memory": POSITIVE,
        "node_bandwidth": POSITIVE,
        "nvlink_domain": Bounds(1),
        "price": MONEY,
        "spot_failures_per_gpu_day": Bounds(0),
    },
    LinkConfig: {"bandwidth": POSITIVE, "price_per_gb": MONEY},
    RolloutConfig: {
        "memory_utilization": POSITIVE_SHARE,
        "start_time": SECONDS,
        "temperature": POSITIVE,
    },
    SpeculativeConfig: {"tokens": Bounds(1, MOST_DRAFTED), "acceptance": SHARE},
    ReplicasConfig: {"max_running": Bounds(1), "share": POSITIVE},
    TrainerConfig: OF_TRAINERS,
    FollowerConfig: {
        **OF_TRAINERS,
        "min_staleness": Bounds(0),
        "max_staleness": Bounds(0),
        "min_reward": REWARD,
        "max_reward": REWARD,
    },
    AlgorithmConfig: {"group_size": Bounds(1, MOST_PER_GROUP), **OF_LOSSES},
    AlgorithmChanges: {"prompts_per_step": Bounds(1), "max_gen_batches": Bounds(1), **OF_LOSSES},
    WorkloadConfig: {"informative_share": SHARE},
    SourceConfig: {"weight": POSITIVE},
    RankerConfig: {"window": Bounds(8), "false_alarms": Bounds(0.001, 0.5)},
    LengthsConfig: {
        "scale": POSITIVE,
        "scale_to": POSITIVE,
        "drift_steps": Bounds(2),
        "ranker_recall": Bounds(TAIL_SHARE, 1),
        "ranker_recall_to": Bounds(TAIL_SHARE, 1),
        "ranker_correlation": SHARE,
        "ranker_history": Bounds(1),
    },
    VerifierConfig: {
        "gpus_per_worker": Bounds(0),
        "start_time": SECONDS,
        "time_limit": POSITIVE,
        "memory_limit": POSITIVE,
    },
    SyncConfig: {"bucket_size": POSITIVE, "changed_share": POSITIVE_SHARE},
    CostsConfig: {"generation_factor": FACTOR, "training_factor": FACTOR},
    PoliciesConfig: {
        "max_staleness": Bounds(0),
        "sync_every": Bounds(1),
        "oversampling": Bounds(1, MOST_OVERSAMPLED),
        "context_time": Bounds(0),
        "tail_share": SHARE,
        "tail_every": Bounds(2),
        "resize_unit": Bounds(1),
        "max_replicas": Bounds(1),
        "resize_window": Bounds(1),
        "shrink_after": Bounds(1),
        "max_attempts": Bounds(1),
        "max_restarts": Bounds(0),
        "max_dropped_groups": Bounds(1),
        "max_failures_per_minute": Bounds(1, MOST_FAILURES),
        "max_step_time": POSITIVE,
    },
    PlanConfig: {
        "budget_per_hour": POSITIVE,
        "budget_per_step": POSITIVE,
        "budget_per_day": POSITIVE,
        "budget": POSITIVE,
        "deadline": POSITIVE,
        "unit": Bounds(1),
        "finalists": Bounds(1),
        "seeds": Bounds(1),
        "staleness_cost": Bounds(0),
    },
    ExecuteConfig: {
        "patience": POSITIVE,
        "samples_per_step": Bounds(0),
        "stream_port": Bounds(0, 65535),
        "save_tokens_every": POSITIVE,
        "threads": Bounds(1, MOST_THREADS),
    },
    SimulateConfig: {"interval": POSITIVE_SHARE, "max_steps": Bounds(1)},
    FailuresConfig: {"per_gpu_day": Bounds(0)},
    FaultConfig: {
        "step": Bounds(1),
        "time": SECONDS,
        "count": Bounds(1, MOST_FAULTS),
        "seed": Bounds(0),
        "duration": POSITIVE,
        "factor": Bounds(1, 1e4, excludes_least=True),
    },
    FrameworkConfig: {
        "step_time": SECONDS,
        "switch_time": SECONDS,
        "checkpoint_time": SECONDS,
    },
}


def check_bounds(run: Run) -> None:
    """Raise `RunError` where a number is out of bounds, or not finite."""
    followers = enumerate(run.followers, start=1)
    sections = ((trainer_key(trainer), follower) for trainer, follower in followers)
    for key, section in chain(_sections(run), *(_sections(s, key) for key, s in sections)):
        for name, bounds in _bounds_of(type(section)).items():
            value = getattr(section, name)
            if value is not None and not bounds.hold(value):
                raise RunError(join_key(key, name), value, bounds)


def _sections(place: object, key: str = "") -> Iterator[tuple[str, Section]]:
    """Yield a section and all that are in it, in tables and lists too, with their keys."""
    match place:
        case Section():
            yield key, place
            for name in place.__struct_fields__:
                if name != FOLLOWERS:
                    yield from _sections(getattr(place, name), join_key(key, name))
        case dict():
            for name, entry in place.items():
                yield from _sections(entry, join_key(key, name))
        case list() | tuple():
            for index, entry in enumerate(place):
                yield from _sections(entry, join_key(key, index))


@cache
def _bounds_of(kind: type[Section]) -> dict[str, Bounds]:
    """Return the bounds of a section's keys."""
    hints = get_type_hints(kind) if kind in COUNTS else {}
    counts = {name: Bounds(1) for name, hint in hints.items() if hint is int}
    return {**counts, **BOUNDS.get(kind, {})}
