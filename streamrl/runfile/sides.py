"""Who uses the GPUs of a run: the replicas, each trainer, and verifiers that have any."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.keys import join_key
from streamrl.runfile.sides_config import OF_REPLICAS, RolloutConfig, TrainerConfig, VerifierConfig
from streamrl.runfile.trainers import trainer_key

OWN_KEYS = re.compile(rf"\brollout\.(?=(?:{'|'.join(OF_REPLICAS)})\b)")
"""Where a text names a key that each kind of replica has of its own."""

MORE_RANKS = ("pipeline_parallel", "data_parallel")
"""Keys of a replica's degrees that most replicas have none of."""

SideKind: TypeAlias = Literal["rollout", "trainer", "verifier", "shared"]


class Side(NamedTuple):
    """GPUs of one pool that do one thing; of a run that takes turns, "shared" ones do two."""

    name: str
    """What reports call it: its kind, and of a trainer that follows its own name."""
    kind: SideKind
    pool: str
    num_gpus: int
    trainer: int = 0
    """Which trainer it is, the one that leads first."""
    of_kind: int = 0
    """Of which kind its replicas are."""


class Claim(NamedTuple):
    """A section of a run file whose keys say how many GPUs of a pool it has."""

    key: str
    section: RolloutConfig | TrainerConfig | VerifierConfig
    pool: str
    factors: tuple[str, ...]
    """Keys whose product is its GPUs."""

    @property
    def keys(self) -> list[str]:
        """The dotted keys of its factors."""
        return [join_key(self.key, factor) for factor in self.factors]


def kind_key(kind: int) -> str:
    """Return the key of the section that says how replicas of a kind are."""
    return f"rollout.others.{kind - 1}" if kind else "rollout"


def kind_name(kind: int) -> str:
    """Return what reports call the replicas of a kind."""
    return f"rollout-{kind + 1}" if kind else "rollout"


def of_kind(error: RunError, kind: int) -> RunError:
    """Return an error of a run that has one kind of replicas alone, with the keys that these have in the whole run."""
    key, text, *others = (own_keys(t, kind) for t in (error.key, str(error), *error.others))
    return RunError(key, error.value, error.allowed, text, tuple(others))


def own_keys(text: str, kind: int) -> str:
    """Return a text with the keys that replicas of a kind have for those of the kind that is named first."""
    return OWN_KEYS.sub(f"{kind_key(kind)}.", text)


def claims_of(run: Run) -> Iterator[Claim]:
    """Yield every section that has GPUs."""
    for kind, rollout in enumerate(run.rollout.kinds):
        more = [key for key in MORE_RANKS if getattr(rollout, key) > 1]
        factors = ("replicas", "tensor_parallel", *more)
        yield Claim(kind_key(kind), rollout, rollout.pool, factors)
    for number, trainer in enumerate(run.trainers):
        shared = ("context_parallel",) if trainer.context_parallel > 1 else ()
        factors = ("data_parallel", *shared, "tensor_parallel", "pipeline_parallel")
        yield Claim(trainer_key(number), trainer, trainer.pool, factors)
    verifier = run.verifier
    if verifier.pool is not None:
        yield Claim("verifier", verifier, verifier.pool, ("workers", "gpus_per_worker"))


def sides_of(run: Run) -> list[Side]:
    """Return the sides of a run, every GPU once; a side without GPUs is left out."""
    rollout, trainer = run.rollout.num_gpus, run.trainer.num_gpus
    shared = min(rollout, trainer) if run.shares_gpus else 0
    found = [
        Side("shared", "shared", run.rollout.pool, shared),
        Side("rollout", "rollout", run.rollout.pool, rollout - shared),
        Side("trainer", "trainer", run.trainer.pool, trainer - shared),
    ]
    for kind, other in enumerate(run.rollout.kinds[1:], start=1):
        found.append(Side(kind_name(kind), "rollout", other.pool, other.num_gpus, of_kind=kind))
    for number, follower in enumerate(run.followers, start=1):
        found.append(Side(follower.name, "trainer", follower.pool, follower.num_gpus, number))
    if run.verifier.pool is not None:
        found.append(Side("verifier", "verifier", run.verifier.pool, run.verifier.num_gpus))
    return [side for side in found if side.num_gpus]


def trainer_names(run: Run) -> list[str]:
    """Return what reports call each trainer, the one that leads first."""
    return ["trainer", *(follower.name for follower in run.followers)]


def gpus_used(run: Run, pool: str) -> int:
    """Return the GPUs of a pool that a run has work for."""
    return sum(side.num_gpus for side in sides_of(run) if side.pool == pool)
