"""Episodes of several turns: what the engine decides about turns, environments, limits and losses."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.engine.entities import Group, Rollout
from streamrl.engine.environments import Environments
from streamrl.engine.messages import (
    Abort,
    Act,
    Close,
    DrawnGroup,
    Drop,
    Failed,
    Generate,
    Generated,
    KeptTurns,
    LoadWeights,
    Observed,
    PromptsDrawn,
    PushWeights,
    Truncate,
    Verified,
    Verify,
    WakeAt,
    WeightsLoaded,
    WeightsPushed,
    Woke,
)
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.units import Duration
from tests.runs import Script, generated, of, script, singles, small_run

LIMITS = {"max_turns": 4, "max_context": 4096}


def episodes(num: int = 2, **changes: Any) -> Script:
    """Return a script whose groups are single episodes; keys of the environment begin with `env__`."""
    table: dict[str, Any] = {**LIMITS}
    for key in [key for key in changes if key.startswith("env__")]:
        table[key.removeprefix("env__")] = changes.pop(key)
    return singles(num, environment=table, **changes)


def begun(s: Script) -> list[Any]:
    """Let the first prompts be drawn, and return what the engine wants of environments then."""
    return of(Act, s.draw(s.begin()))


def answered(s: Script, *rollouts: int, tokens: int = 7, **more: Any) -> list[Any]:
    """Let environments answer."""
    return s.tell(*(Observed(rollout, tokens, **more) for rollout in rollouts))


# Turns --------------------------------------------------------------------------------------------


def test_an_environment_starts_before_the_first_turn() -> None:
    s = episodes(1, policies__system="stream-sync")
    assert begun(s) == [Act(0, 0, starts=True)]
    assert answered(s, 0, tokens=0) == [Generate(0, 0, 0)]


def test_turns_alternate_with_answers_and_each_turn_continues_the_episode() -> None:
    s = episodes(1, policies__system="stream-sync")
    begun(s)
    answered(s, 0, tokens=0)
    assert s.tell(generated(0, 10)) == [Act(0, 1)]
    assert answered(s, 0, tokens=7) == [Generate(0, 0, 0, prefix=10, turn=1, observed=7)]
    assert s.tell(generated(0, 25)) == [Act(0, 2)]
    assert answered(s, 0, tokens=5) == [Generate(0, 0, 0, prefix=25, turn=2, observed=12)]


def test_an_episode_ends_when_its_environment_says_so() -> None:
    s = episodes(1, policies__system="stream-sync")
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(generated(0, 10))
    assert answered(s, 0, tokens=0, is_over=True) == [Verify(0), Close(0)]


def test_the_last_turn_is_not_answered() -> None:
    s = episodes(1, policies__system="stream-sync", env__max_turns=2)
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(generated(0, 10))
    answered(s, 0)
    assert s.tell(generated(0, 20)) == [Verify(0), Close(0)]


def test_an_episode_ends_at_the_token_limit() -> None:
    s = episodes(1, policies__system="stream-sync")
    begun(s)
    answered(s, 0, tokens=0)
    assert s.tell(generated(0, 256, "length")) == [Verify(0), Close(0)]


def test_an_observation_that_fills_the_context_ends_the_episode() -> None:
    s = episodes(1, policies__system="stream-sync", env__max_context=4096)
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(generated(0, 10))
    assert answered(s, 0, tokens=4096 - 40 - 10) == [Verify(0), Close(0)]


def test_an_aborted_turn_continues_without_the_environment() -> None:
    s = episodes(1, policies__system="stream-sync")
    begun(s)
    answered(s, 0, tokens=0)
    assert s.tell(generated(0, 4, "aborted")) == [Generate(0, 0, 0, prefix=4)]


@pytest.mark.parametrize(("placement", "replica"), [("sticky", 1), ("any", 0)])
def test_a_turn_goes_to_the_replica_of_the_turn_before_where_it_is_sticky(
    placement: str, replica: int
) -> None:
    s = episodes(2, policies__system="stream-sync", policies__turn_placement=placement)
    begun(s)
    sent = answered(s, 0, 1, tokens=0)
    assert [command.replica for command in sent] == [0, 1]
    s.tell(generated(0), generated(1))
    assert of(Generate, answered(s, 1))[0].replica == replica


@pytest.mark.parametrize(("imbalance", "replica"), [(1, 1), (2, 0)])
def test_a_turn_leaves_an_overloaded_replica_where_placement_is_cache_aware(
    imbalance: int, replica: int
) -> None:
    """Replica 0 has one turn of another episode, and replica 1 has none."""
    changes = {"policies__turn_placement": "cache-aware", "policies__turn_imbalance": imbalance}
    s = episodes(3, policies__system="stream-sync", **changes)
    begun(s)
    sent = answered(s, 0, 1, 2, tokens=0)
    assert [command.replica for command in sent] == [0, 1, 0]
    s.tell(generated(0), generated(1))
    assert of(Generate, answered(s, 0))[0].replica == replica


def test_the_staleness_of_an_episode_is_that_of_its_oldest_turn() -> None:
    s = episodes(1, policies__system="fully-async", policies__max_staleness=1, algorithm__steps=3)
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(Generated(0, 10, "stop", 0, 1.0, 0.1))
    s.state.fleet.serve(0, 0, 0)
    answered(s, 0)
    s.tell(Generated(0, 20, "stop", 1, 1.0, 0.1))
    assert s.state.rollouts[0].born == 0


# Admission ----------------------------------------------------------------------------------------


def test_no_more_environments_are_open_than_there_are_sandboxes() -> None:
    s = episodes(3, policies__system="stream-sync", env__sandboxes=2)
    assert begun(s) == [Act(0, 0, starts=True), Act(1, 0, starts=True)]
    answered(s, 0, 1, tokens=0)
    commands = s.tell(generated(1, 256, "length"))
    assert commands == [Verify(1), Close(1), Act(2, 0, starts=True)]


def test_no_more_episodes_are_in_flight_than_allowed() -> None:
    s = episodes(3, policies__system="stream-sync", env__max_episodes=1)
    assert begun(s) == [Act(0, 0, starts=True)]
    answered(s, 0, tokens=0)
    assert Act(1, 0, starts=True) in s.tell(generated(0, 256, "length"))


def test_a_sandbox_stays_open_until_the_reward_where_it_computes_the_reward() -> None:
    s = episodes(2, policies__system="stream-sync", env__sandboxes=1, env__scores_in_sandbox=True)
    begun(s)
    answered(s, 0, tokens=0)
    assert s.tell(generated(0, 256, "length")) == [Verify(0)]
    assert s.tell(Verified(0, 1.0))[-2:] == [Close(0), Act(1, 0, starts=True)]


def test_the_next_batch_waits_for_acting_episodes_where_batches_are_whole() -> None:
    s = episodes(1, policies__system="one-step-async")
    begun(s)
    answered(s, 0, tokens=0)
    assert s.tell(generated(0)) == [Act(0, 1)]
    commands = answered(s, 0, is_over=True)
    assert [command.step for command in commands if hasattr(command, "num_groups")] == [2]


def test_a_barrier_waits_for_acting_episodes() -> None:
    s = episodes(1, policies__system="stream-async", policies__weight_sync="barrier")
    s.draw(s.draw(s.begin()))
    answered(s, 0, 1, tokens=0)
    s.tell(generated(1))
    s.tell(generated(0, 256, "length"))
    s.tell(Verified(0, 1.0))
    assert not of(PushWeights, s.step(1)), "episode 1 still acts"
    assert of(PushWeights, answered(s, 1, is_over=True))


def test_an_environment_starts_when_a_replica_is_fresh_enough_for_its_episode() -> None:
    s = episodes(1, policies__system="stream-sync", policies__weight_sync="barrier")
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(generated(0, 256, "length"), Verified(0, 1.0))
    commands = s.step(1)
    assert not of(Act, s.draw(commands)), "no replica has version 1"
    (push,) = of(PushWeights, commands)
    assert of(Act, s.tell(WeightsPushed(push.version, 1))) == [Act(1, 0, starts=True)]


# Time limits --------------------------------------------------------------------------------------


def test_an_action_has_the_lesser_of_both_time_limits() -> None:
    limits = {"env__action_time_limit": "10 s", "env__episode_time_limit": "14 s"}
    s = episodes(1, policies__system="stream-sync", **limits)
    begun(s)
    answered(s, 0, tokens=0)
    (first,) = of(Act, s.tell(generated(0, 10)))
    assert first.time_limit == 10.0
    answered(s, 0)
    s.now += 8.0
    (second,) = of(Act, s.tell(generated(0, 20)))
    assert second.time_limit == pytest.approx(14.0 - 11.0)


def test_an_overdue_turn_is_aborted_and_its_tokens_are_kept() -> None:
    s = episodes(1, policies__system="stream-sync", env__episode_time_limit="20 s")
    begun(s)
    (wake,) = of(WakeAt, answered(s, 0, tokens=0))
    s.tell(generated(0, 10))
    answered(s, 0)
    s.now = wake.time - 1.0
    assert s.tell(Woke(wake.time)) == [Truncate(0), Abort(0, 0)]
    assert s.tell(generated(0, 15, "aborted")) == [Verify(0), Close(0)]
    assert s.state.rollouts[0].tokens == 15


def test_an_answer_at_the_time_limit_ends_the_episode() -> None:
    s = episodes(1, policies__system="stream-sync", env__episode_time_limit="20 s")
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(generated(0, 10))
    s.now = s.state.rollouts[0].deadline - 1.0
    assert answered(s, 0)[-2:] == [Verify(0), Close(0)]


def test_an_episode_whose_time_is_over_before_its_first_token_starts_over() -> None:
    s = episodes(1, policies__system="stream-sync", env__episode_time_limit="20 s")
    begun(s)
    answered(s, 0, tokens=0)
    s.now = s.state.rollouts[0].deadline - 1.0
    s.tell(Woke(s.now + 1.0))
    assert Act(0, 0, starts=True) in s.tell(generated(0, 0, "aborted"))
    assert s.state.rollouts[0].failures == 1


def test_an_episode_that_is_over_too_often_before_its_first_token_is_dropped_at_once() -> None:
    s = episodes(2, policies__max_attempts=1, env__episode_time_limit="20 s")
    begun(s)
    answered(s, 0, tokens=0)
    s.now += 10.0
    answered(s, 1, tokens=0)
    s.now = s.state.rollouts[0].deadline - 1.0
    assert Abort(0, 0) in s.tell(Woke(s.now + 1.0))
    s.tell(generated(1, 5))  # nothing but routine follows, so the next event concerns few policies
    assert Drop(0, "failed 1 times") in s.tell(generated(0, 0, "aborted"))


# Losses -------------------------------------------------------------------------------------------


def in_second_turn(**changes: Any) -> Script:
    """Return a script whose only episode has one answer and is acting again."""
    s = episodes(1, policies__system="stream-sync", **changes)
    begun(s)
    answered(s, 0, tokens=0)
    s.tell(generated(0, 10))
    answered(s, 0, tokens=7)
    s.tell(generated(0, 20))
    return s


def test_an_episode_starts_over_after_the_loss_of_its_environment() -> None:
    s = in_second_turn()
    assert s.tell(Failed(Act(0, 2), "gone")) == [Act(0, 0, starts=True)]
    assert answered(s, 0, tokens=0) == [Generate(0, 0, 0)]
    assert s.state.rollouts[0].born is None


def test_an_episode_repeats_its_actions_in_a_new_environment() -> None:
    s = in_second_turn(env__after_loss="replay")
    assert s.tell(Failed(Act(0, 2), "gone")) == [Act(0, 2, starts=True)]
    assert answered(s, 0, tokens=5) == [Generate(0, 0, 0, prefix=20, turn=2, observed=12)]


def test_a_group_whose_environment_fails_too_often_is_dropped_with_the_reason() -> None:
    s = script(environment={**LIMITS}, policies__max_attempts=2)
    begun(s)
    s.tell(Failed(Act(0, 0, starts=True), "no room"))
    commands = s.tell(Failed(Act(0, 0, starts=True), "no room"))
    assert Drop(0, "failed 2 times") in commands
    assert Close(1) in commands, "its sibling's environment"
    s.tell(Observed(1, 0))
    assert 1 not in s.state.rollouts


def test_a_lost_replica_loses_no_environment() -> None:
    s = episodes(1, policies__system="stream-sync")
    begun(s)
    (sent,) = answered(s, 0, tokens=0)
    commands = s.tell(Failed(sent, "lost"))
    assert not of(Act, commands) and of(Generate, commands)


@pytest.mark.parametrize(
    ("kept", "action", "sent"),
    [
        (KeptTurns(1, 7, True), Act(0, 2, starts=True), Generate(0, 0, 0, 20, turn=2, observed=12)),
        (KeptTurns(1, 7, False), Act(0, 1, starts=True), Generate(0, 0, 0, 20, turn=1, observed=7)),
        (KeptTurns(0, 0, False), Act(0, 0, starts=True), Generate(0, 0, 0, 20)),
    ],
)
def test_a_resumed_episode_continues_in_the_middle(
    kept: KeptTurns, action: Act, sent: Generate
) -> None:
    s = episodes(1, policies__system="stream-sync", env__after_loss="replay")
    s.begin()
    drawn = DrawnGroup(0, (0,), 40, (10,), kept=((20, 0),), turns=(kept,))
    assert of(Act, s.tell(PromptsDrawn(1, 0, (drawn,)))) == [action]
    assert answered(s, 0, tokens=5 if kept.is_turn_over else 0) == [sent]


def test_a_turn_after_a_weight_load_has_the_new_version() -> None:
    s = episodes(1, policies__system="stream-async", rollout__replicas=1)
    s.draw(s.draw(s.begin()))
    answered(s, 0, 1, tokens=0)
    s.tell(generated(1, 10), generated(0, 256, "length"), Verified(0, 1.0))
    pushed = of(PushWeights, s.step(1))
    loads = of(LoadWeights, s.tell(*(WeightsPushed(push.version, 1) for push in pushed)))
    assert [load.drain for load in loads] == [True]
    s.tell(WeightsLoaded(0, 1, 1.0))
    (sent,) = of(Generate, answered(s, 1))
    assert sent.turn == 1


# Run file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"policies.migration": "consolidate"}, "policies.migration 'consolidate' is for episodes"),
        ({"policies.weight_sync": "between-batches"}, "policies.weight_sync 'between-batches'"),
        ({"rollout.admission": "reserve"}, "rollout.admission 'reserve'"),
        ({"environment.max_context": 2048}, "environment.max_context must be above"),
        ({"environment.turns": "mean 3, p95 2"}, "environment.turns 'mean 3, p95 2' needs"),
        ({"environment.action_time": "5"}, "environment.action_time '5' cannot be read"),
        ({"environment.sandboxes": 0}, "environment.sandboxes"),
    ],
)
def test_a_value_that_does_not_fit_episodes_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(RunError, match=what):
        small_run({"environment": {**LIMITS}, **changes})


# Queues -------------------------------------------------------------------------------------------


def open_ones(num: int) -> tuple[Environments, list[Rollout]]:
    """Return environments with a time limit of 20 s, and episodes that wait for them."""
    limit = Duration(20.0)
    config = EnvironmentConfig(max_turns=4, max_context=4096, episode_time_limit=limit)
    own, rollouts = Environments(config, is_sticky=True), []
    for number in range(num):
        rollouts.append(Rollout(number, Group(number, 1, 0, 10), 10))
        own.add(rollouts[-1])
    return own, rollouts


def begin(own: Environments, rollout: Rollout, now: float) -> None:
    """Start the environment of an episode, which is open at once."""
    own.begin(rollout, Act(rollout.id, 0, starts=True))
    own.answer(rollout, Observed(rollout.id, 0), now)


def test_an_episode_of_a_dropped_group_does_not_act() -> None:
    own, (first, second) = open_ones(2)
    for rollout in (first, second):
        begin(own, rollout, 0.0)
        own.end_turn(rollout)
    first.group.is_dropped = True
    assert own.next_to_act() is second


def test_the_deadline_of_a_restarted_episode_counts_from_its_second_start() -> None:
    own, (first, second) = open_ones(2)
    begin(own, first, 0.0)
    begin(own, second, 5.0)
    own.lose(first)
    begin(own, first, 10.0)
    assert own.next_deadline() is second
    own.end(second)
    assert own.next_deadline() is first
    assert first.deadline == 30.0


def test_tools_without_a_scorer_are_refused() -> None:
    """Their environment gives no reward, so nothing would be learned."""
    tools = {"env__implementation": "tools", "env__tools": ["mcp:server"], "env__sandbox": False}
    with pytest.raises(RunError, match=r"verifier.scorer is missing: .*'tools' gives no reward"):
        episodes(1, **tools, verifier__scorer=None)
    episodes(1, **tools, verifier__scorer="exact")
