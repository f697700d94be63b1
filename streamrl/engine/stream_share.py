"""What part of the stream a trainer that follows takes: what is left out is lost to it, with the reason.

A group is judged once it is complete, by what is known then: how far behind its oldest token is, its mean reward, the
family of its prompt, and last how many came before it that all else lets pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamrl.engine.entities import Group
from streamrl.engine.presets import choose_system
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.keys import join_key
from streamrl.runfile.sides_config import FollowerConfig
from streamrl.runfile.trainers import trainer_key

OF_FAMILY = "outside its share: family"
OF_STALENESS = "outside its share: staleness"
OF_REWARD = "outside its share: reward"
OF_COUNT = "outside its share: every"
"""Why groups are left out: by the key that leaves them out, and the first that does where several would."""

ROUNDING = 1e-9
"""A mean of rewards such as 0.1 is off by some 1e-17: so much beyond a bound is still within it."""


@dataclass(slots=True)
class StreamShare:
    """See the module; counts what it lets pass."""

    every: int = 1
    min_staleness: int = 0
    max_staleness: float = math.inf
    min_reward: float = -math.inf
    max_reward: float = math.inf
    families: frozenset[str] = frozenset()
    """Of prompts; all where there are none."""
    num_passed: int = 0
    """Groups that all else let pass so far: every so many one is taken, the first of them too."""

    @classmethod
    def of(cls, follower: FollowerConfig) -> StreamShare | None:
        """Return what a trainer's section says; None where it takes all."""
        if not follower.takes_share:
            return None
        least, most = follower.min_staleness, follower.max_staleness
        return cls(
            every=follower.every,
            min_staleness=0 if least is None else least,
            max_staleness=math.inf if most is None else most,
            min_reward=-math.inf if follower.min_reward is None else follower.min_reward,
            max_reward=math.inf if follower.max_reward is None else follower.max_reward,
            families=frozenset(follower.families),
        )

    def leaves_out(self, group: Group, version: int) -> str | None:
        """Return why a complete group is left out, the leading trainer being at `version`; None where it is taken."""
        if self.families and group.family not in self.families:
            return OF_FAMILY
        if not self.min_staleness <= _staleness(group, version) <= self.max_staleness:
            return OF_STALENESS
        reward = _mean_reward(group)
        if not self.min_reward - ROUNDING <= reward <= self.max_reward + ROUNDING:
            return OF_REWARD
        self.num_passed += 1
        return None if (self.num_passed - 1) % self.every == 0 else OF_COUNT


def check_reach(run: Run) -> None:
    """Raise `RunError` where no group is ever as stale as a trainer wants it: the leader's bound holds for all."""
    system = choose_system(run.policies)
    if not system.keeps_bound:
        return
    most = system.staleness_bound
    for number, follower in enumerate(run.followers, start=1):
        if (least := follower.min_staleness) is not None and least > most:
            key = join_key(trainer_key(number), "min_staleness")
            why = f"as policies.system {run.policies.system!r} lets no rollout be further behind"
            text = f"{key} must be at most {most}, {why}, got {least}"
            raise RunError(key, least, Bounds(0, most), text, ("policies.max_staleness",))


def _staleness(group: Group, version: int) -> int:
    """Return how many versions the oldest token of a group is behind the leader's."""
    born = [rollout.born for rollout in group.rollouts if rollout.born is not None]
    return version - min(born, default=version)


def _mean_reward(group: Group) -> float:
    return math.fsum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
