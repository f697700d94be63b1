"""Plan what a profile measures (batches, contexts, lengths, repeats) and hold the readings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from streamrl.executor.profiling.environment_times import MeasuredEnvironment
from streamrl.executor.rollout.inference_engine import (
    GPU_PASS_TOKENS,
    PREFILL_TOKENS,
    TimedPass,
)
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.policies_config import SyncMode
from streamrl.runfile.roles_config import Packing, Recompute

BATCHES = (1, 2, 4, 8, 16, 32, 48)
"""Decode batch sizes below the largest one. They are dense where Python's share of a step falls fast."""
REPEATS, FEW = 5, 8
"""Rounds of a profile. There are three times as many if at most `FEW` rollouts run at a time."""
NUM_CONTEXTS = 4
WINDOW = 16
"""Decode steps at each batch size and context. The recorded context is the mean over these steps."""
JOIN_STEPS = 96
"""Decode steps during which new rollouts join."""
COMPANIES = ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
"""(replicas, trainers) that compute at the same time. The slowdown of more roles is extrapolated from these."""
REWARDED = (1, 4, 16)
"""Rollouts in one call of the reward model. They ended at the same time, in one group or several."""
SHORT = 16
"""Tokens of the shortest measured prefix. It shows best the cost of a rollout that does not depend on its length."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest sizes that a profile measures; larger runs are extrapolated."""

    max_running: int
    max_context: int
    """Prompt and output tokens of a rollout."""
    max_tokens_per_pass: int
    """Tokens in one pass of the trainer."""
    longest_prefix: int = PREFILL_TOKENS
    """New tokens of one rollout in one pass of the replica."""

    def __post_init__(self) -> None:
        for key, least in (("max_running", 1), ("max_context", 4 * WINDOW)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, got {getattr(self, key)}")
        if self.max_tokens_per_pass < self.max_context:
            raise ValueError(
                f"max_tokens_per_pass must be at least max_context={self.max_context}, "
                f"got {self.max_tokens_per_pass}"
            )


class Company(NamedTuple):
    """Roles that compute at the same time."""

    generating: int
    training: int
    acts: bool = False
    """Whether environments start and act meanwhile."""


BESIDE_REPLICA = Company(1, 0, acts=True)
"""The company with the CPU seconds of environments."""
BESIDE_ENVIRONMENTS = (BESIDE_REPLICA, Company(1, 1, acts=True))
"""Companies in which environments start and act."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All points that are measured, each `repeats` times."""

    repeats: int
    decode: list[tuple[int, int]]
    """(rollouts, tokens of context)"""
    mixed: list[tuple[int, int]]
    """(rollouts, how many of them have the maximum length); the others are short"""
    prefill: list[tuple[int, int]]
    """(rollouts, tokens of a prefix)"""
    join: list[tuple[int, int, int]]
    """(running rollouts, joining rollouts, tokens of a prefix)"""
    passes: list[tuple[int, int]]
    """(rollouts, tokens of each)"""
    calls: list[tuple[int, int]]
    """(rollouts, tokens of each)"""
    rewards: list[tuple[int, int]]
    """(rollouts, tokens of each), in one call of the reward model's replica"""
    companies: list[tuple[int, int]]
    """(replicas, trainers) that compute at the same time on the cores of one host"""
    beside: list[Company]
    """Companies in which environments start and act"""


class RayPlace(msgspec.Struct, frozen=True):
    """A Ray cluster on this machine, with nodes of one pool."""

    pool: str
    address: str = "auto"
    """Address of the cluster, as in `execute.ray_address`."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The points to measure, and the settings of the measured processes."""

    model: str
    """Hugging Face directory."""
    dtype: str
    device: str
    backend: str = "transformers"
    threads: int
    limits: Limits
    plan: Measurements
    packing: Packing
    """Packing of the trainer's passes."""
    recompute: Recompute
    """Activations that the trainer's backward pass recomputes."""
    lora_rank: int | None = None
    """Rank of the adapters that are trained and pushed instead of weights; None for full training."""
    reward_model: str | None = None
    """Hugging Face directory of a reward model to measure too, if any."""
    ray: RayPlace | None = None
    """Ray cluster on which Ray's overhead is measured, if any."""
    environment: MeasuredEnvironment | None = None
    """Environment whose starts and actions are measured; None for one that computes nothing."""

    @property
    def serves_adapters(self) -> bool:
        """Whether the replica applies adapters without merging them, which is the default of its engine."""
        return self.lora_rank is not None and engine_named(self.backend).serves_adapters

    @property
    def training(self) -> dict[str, object]:
        """Settings of the trainer that depend on this setup."""
        adapters = {"adapter_rank": self.lora_rank}
        return {"packing": self.packing, "recompute": self.recompute, **adapters}

    @property
    def num_points(self) -> int:
        """Number of points that are reported to the watcher."""
        plan = self.plan
        replica = len(plan.decode) + len(plan.mixed) + len(plan.prefill) + len(plan.join) + 2
        trainer = len(plan.passes) + len(plan.calls) + 1
        points = plan.repeats * (replica + trainer + len(plan.passes) + len(plan.companies))
        points += plan.repeats * len(plan.rewards) if self.reward_model is not None else 0
        points += plan.repeats * len(plan.beside)
        points += 2 if plan.companies else 0
        return points + (self.ray is not None)


def longest_prefix(backend: str, gpu: str) -> int:
    """Return the most new tokens of one rollout in one pass of an engine; longer prefixes are not measured."""
    return (
        GPU_PASS_TOKENS
        if engine_named(backend).has_long_passes and gpu != "cpu"
        else PREFILL_TOKENS
    )


def full_plan(limits: Limits) -> Measurements:
    """Return points up to the limits, dense enough to interpolate: some minutes for a small model on a CPU.

    Steps with few rollouts are short. On a shared host, noise then hides the cost of context and padding. So if only few
    rollouts run at a time, all points are repeated more often.
    """
    batches = [b for b in BATCHES if b < limits.max_running] + [limits.max_running]
    repeats = REPEATS * (3 if limits.max_running <= FEW else 1)
    return _plan(limits, repeats, batches, NUM_CONTEXTS, COMPANIES)


def quick_plan(limits: Limits) -> Measurements:
    """Return few points for every table, for tests and as a smoke test."""
    return _plan(limits, 2, sorted({1, limits.max_running}), 2, COMPANIES[:1])


def _plan(
    limits: Limits,
    repeats: int,
    batches: list[int],
    num_contexts: int,
    companies: Sequence[tuple[int, int]],
) -> Measurements:
    lengths = _spread(SHORT, limits.max_context - WINDOW, num_contexts)
    widths = _spread(SHORT, limits.max_context, num_contexts)
    room = limits.max_tokens_per_pass
    passes = [(n, w) for w in widths for n in sorted({1, max(1, room // w // 4), room // w})]
    running = sorted({max(1, limits.max_running // 4), max(1, 3 * limits.max_running // 4)})
    return Measurements(
        repeats=repeats,
        decode=[(b, context) for b in batches for context in lengths],
        mixed=[(b, long) for b in running if b > 1 for long in sorted({1, b // 2})],
        prefill=_prefixes(limits, lengths),
        join=[
            (b, max(1, b // 8), length)
            for b in running
            for length in lengths[:2]
            if length <= limits.longest_prefix
        ],
        passes=passes,
        rewards=[(n, w) for w in widths for n in REWARDED if n == 1 or n * w <= room],
        calls=[(1, SHORT), (max(1, room // widths[-1]), widths[-1])],
        companies=[*companies],
        beside=[*BESIDE_ENVIRONMENTS],
    )


def _prefixes(limits: Limits, lengths: list[int]) -> list[tuple[int, int]]:
    """Return one prefix of each length, and passes with several of the shorter ones."""
    lengths = sorted({min(length, limits.longest_prefix) for length in lengths})
    ones = [(1, length) for length in lengths]
    many = [(min(limits.max_running, max(2, 256 // length)), length) for length in lengths[:2]]
    return [*ones, *(pair for pair in many if pair[0] > 1 and pair[0] <= limits.max_running)]


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` evenly spaced numbers from `first` to `last`."""
    steps = max(1, count - 1)
    return sorted({first + (last - first) * index // steps for index in range(count)})


class RefillStream(NamedTuple):
    """The passes of a replica whose batch was refilled: from its queue, or by calls that arrive meanwhile."""

    num_rollouts: int
    passes: list[TimedPass]


@dataclass
class Readings:
    """The measured seconds of each point, one entry per repeat."""

    decode: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    decode_context: dict[tuple[int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    mixed: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by (running rollouts, number of long ones)."""
    mixed_context: dict[tuple[int, int], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Mean and longest context, in tokens, of each step."""
    prefill: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    join: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by (running rollouts, joining rollouts, tokens of a prefix)."""
    step: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of the decode steps before and after a join, by the same key."""
    join_context: dict[tuple[int, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    train: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    score: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    reward: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by (rollouts, tokens of each that the reward model read)."""
    call: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by number of tokens sent."""
    optimizer: list[float] = field(default_factory=list)
    push: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    lend: list[float] = field(default_factory=list)
    take_back: list[float] = field(default_factory=list)
    pack: dict[SyncMode, list[float]] = field(default_factory=lambda: defaultdict(list))
    unpack: dict[SyncMode, list[float]] = field(default_factory=lambda: defaultdict(list))
    packed: dict[SyncMode, tuple[int, int]] = field(default_factory=dict)
    """Bytes that a relay sent, and the number of weights or changes in them."""
    refill_passes: list[float] = field(default_factory=list)
    streams: list[RefillStream] = field(default_factory=list)
    """From its queue, which was never empty."""
    turns: list[RefillStream] = field(default_factory=list)
    """By calls: each rollout is called once another one has ended, as the turns of episodes are."""
    handling: list[float] = field(default_factory=list)
    episode: list[float] = field(default_factory=list)
    action: list[float] = field(default_factory=list)
    handling_over_ray: list[float] = field(default_factory=list)
    push_over_ray: list[float] = field(default_factory=list)
    generation: dict[Company, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Speed of a replica relative to its speed alone."""
    training: dict[Company, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Speed of the trainer relative to its speed alone."""
    acting: dict[Company, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU seconds per second of environments, and of the process that calls them."""
    environment_action: dict[Company, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    environment_start: dict[Company, list[float]] = field(default_factory=lambda: defaultdict(list))
    pushed_bytes: int = 0
    loaded_bytes: int = 0
    """Bytes that a replica loads; more than it is sent if adapters are merged."""
    pads_context: bool = False
    prefill_tokens: int = 0

    @property
    def timed(self) -> list[Mapping[Any, list[float]]]:
        """Readings of the operations that take most of the time of a run."""
        tables: list[Mapping[Any, list[float]]] = [self.decode, self.mixed, self.prefill, self.join]
        return [*tables, self.train, self.score, self.reward]
