"""What a profile's stopwatches read, by what was asked for; rows of quartiles are made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamrl.executor.rollout.inference_engine import TimedPass
from streamrl.runfile.policies_config import SyncMode


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
