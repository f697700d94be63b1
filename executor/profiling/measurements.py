"""Plan what a profile measures (batches, contexts, lengths, repeats) and hold the readings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from streamrl.executor.rollout.inference_engine import TimedPass
from streamrl.executor.rollout.transformers_engine import PREFILL_TOKENS
from streamrl.executor.rollout.vllm_settings import GPU_PASS_TOKENS
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.policies_config import SyncMode
from streamrl.runfile.roles_config import Packing, Recompute

BATCHES = (1, 2, 4, 8, 16, 32, 48)
"""Batches of the decode step below the largest one: dense where Python's share of a step falls fast."""
REPEATS, FEW = 5, 8
"""Rounds of a profile, three times as many where no more rollouts than `FEW` run at a time."""
NUM_CONTEXTS = 4
WINDOW = 16
"""Decode steps at each batch and context: a rollout gains so many tokens, which its context is the mean of."""
JOIN_STEPS = 96
"""Decode steps beside which prefixes join."""
COMPANIES = ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
"""(replicas, trainers) that compute at the same time: what more lose is reckoned from these."""
REWARDED = (1, 4, 16)
"""Rollouts of a call of the reward model: those that end together, of a group or of several."""
SHORT = 16
"""Tokens of the shortest prefix measured: what a rollout costs whatever its length shows best here."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a profile goes; a run beyond them is extrapolated."""

    max_running: int
    max_context: int
    """Prompt and output tokens of a rollout."""
    max_tokens_per_pass: int
    """Of the trainer."""
    longest_prefix: int = PREFILL_TOKENS
    """New tokens of a rollout in a pass of the replica."""

    def __post_init__(self) -> None:
        for key, least in (("max_running", 1), ("max_context", 4 * WINDOW)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, got {getattr(self, key)}")
        if self.max_tokens_per_pass < self.max_context:
            raise ValueError(
                f"max_tokens_per_pass must be at least max_context={self.max_context}, "
                f"got {self.max_tokens_per_pass}"
            )


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Every point that is measured, `repeats` times over."""

    repeats: int
    decode: list[tuple[int, int]]
    """(rollouts, tokens of context)"""
    mixed: list[tuple[int, int]]
    """(rollouts, how many of them are as long as may be), the others short"""
    prefill: list[tuple[int, int]]
    """(rollouts, tokens of a prefix)"""
    join: list[tuple[int, int, int]]
    """(running rollouts, joining ones, tokens of a prefix)"""
    passes: list[tuple[int, int]]
    """(rollouts, tokens of each)"""
    calls: list[tuple[int, int]]
    """(rollouts, tokens of each)"""
    rewards: list[tuple[int, int]]
    """(rollouts, tokens of each), in one call of the reward model's replica"""
    companies: list[tuple[int, int]]
    """(replicas that decode, trainers that train), at the same time on the cores of one host"""


class RayPlace(msgspec.Struct, frozen=True):
    """A Ray cluster on this machine, some of whose nodes are of a pool."""

    pool: str
    address: str = "auto"
    """As `execute.ray_address`."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and how its processes run."""

    model: str
    """Hugging Face directory."""
    dtype: str
    device: str
    backend: str = "transformers"
    threads: int
    limits: Limits
    plan: Measurements
    packing: Packing
    """Of the trainer's passes."""
    recompute: Recompute
    """What they compute again."""
    lora_rank: int | None = None
    """Of adapters, which train and are pushed instead of weights; none where absent."""
    reward_model: str | None = None
    """Hugging Face directory of a reward model whose calls are measured too; none where absent."""
    ray: RayPlace | None = None
    """Where to measure what Ray takes; nowhere where absent."""

    @property
    def serves_adapters(self) -> bool:
        """Whether the replica computes with adapters beside its weights, as runs of its engine do that say nothing of it."""
        return self.lora_rank is not None and engine_named(self.backend).serves_adapters

    @property
    def training(self) -> dict[str, object]:
        """What a trainer's settings say of it."""
        adapters = {"adapter_rank": self.lora_rank}
        return {"packing": self.packing, "recompute": self.recompute, **adapters}

    @property
    def num_points(self) -> int:
        """How often whoever watches the measuring is told of a point."""
        plan = self.plan
        replica = len(plan.decode) + len(plan.mixed) + len(plan.prefill) + len(plan.join) + 1
        trainer = len(plan.passes) + len(plan.calls) + 1
        points = plan.repeats * (replica + trainer + len(plan.passes) + len(plan.companies))
        points += plan.repeats * len(plan.rewards) if self.reward_model is not None else 0
        return points + bool(plan.companies) + (self.ray is not None)


def longest_prefix(backend: str, gpu: str) -> int:
    """Return the new tokens of a rollout that one pass of an engine takes; longer prefixes are not measured."""
    return (
        GPU_PASS_TOKENS
        if engine_named(backend).has_long_passes and gpu != "cpu"
        else PREFILL_TOKENS
    )


def full_plan(limits: Limits) -> Measurements:
    """Cover the limits densely enough to interpolate; a few minutes for a small model on a CPU.

    Of steps of few rollouts, which are short, the pace of a shared host hides what contexts and padding cost: where there
    are no others, all is measured more often.
    """
    batches = [b for b in BATCHES if b < limits.max_running] + [limits.max_running]
    repeats = REPEATS * (3 if limits.max_running <= FEW else 1)
    return _plan(limits, repeats, batches, NUM_CONTEXTS, COMPANIES)


def quick_plan(limits: Limits) -> Measurements:
    """Touch every table: for tests, and to see that everything runs."""
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
    )


def _prefixes(limits: Limits, lengths: list[int]) -> list[tuple[int, int]]:
    """One prefix of each length, and as many of the shorter ones as a pass has room for."""
    lengths = sorted({min(length, limits.longest_prefix) for length in lengths})
    ones = [(1, length) for length in lengths]
    many = [(min(limits.max_running, max(2, 256 // length)), length) for length in lengths[:2]]
    return [*ones, *(pair for pair in many if pair[0] > 1 and pair[0] <= limits.max_running)]


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` numbers at equal distances from `first` to `last`."""
    steps = max(1, count - 1)
    return sorted({first + (last - first) * index // steps for index in range(count)})


class RefillStream(NamedTuple):
    """A replica that was kept full from its queue."""

    num_rollouts: int
    passes: list[TimedPass]


@dataclass
class Readings:
    """Seconds by point, as many of each as the rounds gave."""

    decode: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    decode_context: dict[tuple[int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    mixed: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (running, how many of them are long)."""
    mixed_context: dict[tuple[int, int], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Mean and longest context of each."""
    prefill: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    join: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (running, joining, tokens)."""
    step: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Decode steps around a join, by the same key."""
    join_context: dict[tuple[int, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    train: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    score: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    reward: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (rollouts, tokens that the reward model read of each)."""
    call: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By tokens sent."""
    optimizer: list[float] = field(default_factory=list)
    push: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    pack: dict[SyncMode, list[float]] = field(default_factory=lambda: defaultdict(list))
    unpack: dict[SyncMode, list[float]] = field(default_factory=lambda: defaultdict(list))
    packed: dict[SyncMode, tuple[int, int]] = field(default_factory=dict)
    """Bytes of what relays sent, and values that it told of."""
    refill_passes: list[float] = field(default_factory=list)
    streams: list[RefillStream] = field(default_factory=list)
    handling: list[float] = field(default_factory=list)
    handling_over_ray: list[float] = field(default_factory=list)
    push_over_ray: list[float] = field(default_factory=list)
    generation: dict[tuple[int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By company: what is left of a replica's speed, as a share of that alone."""
    training: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """The same of a trainer's, where there is one."""
    pushed_bytes: int = 0
    loaded_bytes: int = 0
    """More than are pushed where those are of adapters."""
    pads_context: bool = False
    prefill_tokens: int = 0

    @property
    def timed(self) -> list[Mapping[Any, list[float]]]:
        """Readings of operations that take most of a run's seconds."""
        tables: list[Mapping[Any, list[float]]] = [self.decode, self.mixed, self.prefill, self.join]
        return [*tables, self.train, self.score, self.reward]
