"""When policy versions are evaluated on held-out prompts, and what waits meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heapreplace

from streamrl.engine.engine import Policy
from streamrl.engine.evaluation import Evaluations
from streamrl.engine.messages import (
    HELD_OUT,
    Command,
    DrawEvaluation,
    EndEvaluation,
    Evaluate,
    Generated,
    Step,
    Verified,
)
from streamrl.engine.state import State

LOST = "its version was lost with the trainer"


class EvaluateVersions:
    """Evaluate each version that is due, once every serving replica has its weights.

    All rollouts are sent at once, each to the replica with the fewest rollouts of this evaluation
    for its share. An episode's turns are sent when its environment has answered; with sticky
    placement they stay on one replica.
    """

    def __init__(self, has_environment: bool = False) -> None:
        self.ignores = () if has_environment else (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the beginning of an evaluation, its rollouts, and its end."""
        own = state.evaluations
        return () if own is None or not own.is_pending else self._evaluate(state, own)

    def _evaluate(self, state: State, own: Evaluations) -> Iterator[Command]:
        if own.running is not None and not own.is_drawing:
            reason = LOST if own.is_void else state.stop_reason
            if own.has_ended:
                yield EndEvaluation(own.running)
            elif reason is not None:
                yield EndEvaluation(own.running, reason)
        if own.due is not None and _may_begin(state, own):
            yield DrawEvaluation(own.due)
        if own.to_send and own.running is not None:
            yield from _send(state, own, own.running)


def _may_begin(state: State, own: Evaluations) -> bool:
    is_free = own.running is None and not own.has_open_rollouts and state.stop_reason is None
    has_weights = state.is_synced and state.pushed_version == own.due
    return is_free and has_weights and state.fleet.has_come_up


def _send(state: State, own: Evaluations, version: int) -> Iterator[Evaluate]:
    replicas = [
        replica
        for replica in state.fleet.serving()
        if replica.loading is None and replica.version == version
        if not (replica.is_lent or replica.prefills)
    ]
    if not replicas:
        return
    num_sent = dict.fromkeys((replica.id for replica in replicas), 1)
    for replica in own.sent.values():
        if replica in num_sent:
            num_sent[replica] += 1
    shares = {replica.id: replica.share for replica in replicas}
    loads = [(num / shares[replica], replica) for replica, num in num_sent.items()]
    heapify(loads)
    is_sticky = state.environments is not None and state.environments.is_sticky
    while own.to_send:
        episode = own.episodes.get(HELD_OUT + own.to_send[0])
        home = episode.home if episode is not None and is_sticky else None
        replica = loads[0][1] if home is None or home not in shares else home
        if episode is None:
            yield Evaluate(own.to_send[0], replica, version)
        else:
            yield Evaluate(
                own.to_send[0], replica, version, episode.tokens, episode.turn, episode.observed
            )
        num_sent[replica] += 1
        if replica == loads[0][1]:
            heapreplace(loads, (num_sent[replica] / shares[replica], replica))


def take_optional(policy: Policy, wrapper: Policy) -> None:
    """Give a wrapper the optional methods of a policy that say when it is not asked."""
    for name in ("ignores", "is_at_rest", "rests_until"):
        if hasattr(policy, name):
            setattr(wrapper, name, getattr(policy, name))


class WhileNotEvaluating:
    """Runs another policy, except while an evaluation holds what it decides."""

    def __init__(self, policy: Policy, holds: Callable[[Evaluations], bool]) -> None:
        self.policy = policy
        self._holds = holds
        take_optional(policy, self)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the commands of the policy, unless they are held."""
        assert state.evaluations is not None, "only a run with [evaluation] holds policies"
        return () if self._holds(state.evaluations) else self.policy.decide(state)


class HoldStep:
    """Runs the policy of the primary trainer's work, and holds its optimizer step for an evaluation."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        take_optional(policy, self)

    def decide(self, state: State) -> Iterator[Command]:
        """Yield the trainer's next work, but no step that an evaluation holds."""
        assert state.evaluations is not None, "only a run with [evaluation] holds steps"
        for command in self.policy.decide(state):
            if isinstance(command, Step) and state.evaluations.holds_step:
                return
            yield command
