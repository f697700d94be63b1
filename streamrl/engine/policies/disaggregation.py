"""Prefill contexts on replicas of their own, and decode them on the others.

    waiting --Generate--> prefill replica --Generated "prefilled"--> prefilled --Generate--> decode replica

A decode replica gets a rollout only when its context is prefilled. It then transfers the KV cache from
the prefill replica. If the cache is gone, because that replica was lost or loaded weights, the
decode replica computes the context itself. An aborted rollout, and each turn of an episode, passes
through a prefill replica again.

The rollouts of a group share a prefill replica, which has the prompt in its prefix cache. So do the
turns of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.messages import Command, Generate
from streamrl.engine.policies.dispatch import Dispatch
from streamrl.engine.state import State
from streamrl.runfile.roles_config import RolloutConfig

AHEAD = 0.25
"""Rollouts under way beyond those that decode replicas run at once, relative to these. They keep
slots busy while contexts are prefilled, for up to a quarter of the time in which a rollout is
decoded. More would compute contexts under weights that are replaced before they are decoded.
"""


class PrefillThenDecode(Dispatch):
    """Send each rollout to a prefill replica, and then where another dispatch policy decodes it."""

    def __init__(self, decode: Dispatch, most: int) -> None:
        super().__init__(decode.order, decode.keeps_groups)
        self.decode = decode
        self.most = most
        """Rollouts that are prefilled and decoded at once."""

    @classmethod
    def of(cls, decode: Dispatch, rollout: RolloutConfig) -> PrefillThenDecode:
        """Return the policy of a run whose decode replicas `decode` chooses among."""
        slots = sum(kind.replicas * kind.max_running for kind in rollout.decode_kinds)
        return cls(decode, int(slots * (1 + AHEAD)))

    def decide(self, state: State) -> Iterable[Command]:
        """Yield rollouts that are prefilled, then others in draw order."""
        has_work = state.prefilled or state.waiting.heap
        if not has_work or state.stop_reason is not None or not state.fleet.has_come_up:
            return ()
        return self._send(state)

    def choose(self, state: State, rollout: Rollout) -> Replica | None:
        """Return the prefill replica of the rollout or its siblings, or else the least loaded one."""
        oldest = rollout.group.oldest_version
        for each in (rollout, *rollout.group.rollouts):
            replica = _prefill_replica(state, each)
            if replica is not None and replica.promises(oldest):
                return replica
        return state.fleet.least_loaded(oldest, prefills=True)

    def check_choices(self, check: Callable[[object, State, Rollout], Replica | None]) -> None:
        """See `Dispatch`: the other policy chooses."""
        self.decode.check_choices(check)

    def _send(self, state: State) -> Iterator[Command]:
        for rollout in list(state.prefilled.values()):
            replica = self.decode.place(state, rollout)
            if replica is not None:
                yield self._decode_on(replica, rollout)
        while state.num_generating + len(state.prefilled) < self.most:
            waiting = state.waiting.first()
            replica = None if waiting is None else self.choose(state, waiting)
            if waiting is None or replica is None:
                return
            yield self.send(waiting, replica)

    def _decode_on(self, replica: Replica, rollout: Rollout) -> Generate:
        sent = self.decode.send(rollout, replica)
        found: Generate = msgspec.structs.replace(sent, prefilled_on=rollout.prefilled_on)
        return found


def _prefill_replica(state: State, rollout: Rollout) -> Replica | None:
    """Return the prefill replica that computes, or last computed, the context of a rollout."""
    if rollout.replica is not None and rollout.replica.prefills:
        return rollout.replica
    last = rollout.prefilled_on
    return None if last is None else state.fleet.replicas.get(last)
