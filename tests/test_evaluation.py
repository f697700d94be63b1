"""Evaluations on held-out prompts: what the engine decides, in scripts and in simulated runs."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.engine.messages import (
    DrawEvaluation,
    EndEvaluation,
    Evaluate,
    Evaluated,
    EvaluationDrawn,
    Failed,
    Generate,
    Interrupted,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    StartReplica,
    Step,
    Stepped,
    TrainerLost,
)
from streamrl.engine.trace import replay
from streamrl.record.attribution import attribute
from streamrl.runfile.errors import RunError
from streamrl.sim.steady_state import measure_steady
from streamrl.sim.world import SimWorld, simulate
from tests.runs import Script, checked_world, done, of, singles, small_run

HELD_OUT = {"num_prompts": 3, "every": 2, "samples": 2}


def evaluating(num: int = 2, **changes: Any) -> Script:
    """Return a script that evaluates two rollouts of each of three prompts; `eval__` begins its keys."""
    table: dict[str, Any] = {**HELD_OUT}
    for key in [key for key in changes if key.startswith("eval__")]:
        table[key.removeprefix("eval__")] = changes.pop(key)
    changes = {"policies__system": "stream-sync", **changes}
    return singles(num, evaluation=table, **changes)


def drawn(version: int = 0, prompts: int = 3, samples: int = 2) -> EvaluationDrawn:
    """Return the prompts of an evaluation."""
    return EvaluationDrawn(version, samples, (40,) * prompts)


def evaluated(rollout: int, version: int = 0, reward: float = 1.0) -> Evaluated:
    """Return the event that ends an `Evaluate`."""
    return Evaluated(rollout, version, 10, reward, 1.0, 0.1)


def finish(s: Script, commands: list[Any], version: int = 0) -> list[Any]:
    """Let every rollout of `commands` be evaluated."""
    return s.tell(*(evaluated(each.rollout, version) for each in of(Evaluate, commands)))


def test_the_first_version_is_evaluated_before_any_rollout_starts() -> None:
    s = evaluating()
    begun = s.begin()
    assert of(DrawEvaluation, begun) == [DrawEvaluation(0)]
    assert of(Generate, s.draw(begun)) == []
    sent = s.tell(drawn())
    assert [(each.rollout, each.replica) for each in of(Evaluate, sent)] == [
        *((0, 0), (1, 1), (2, 0)),
        *((3, 1), (4, 0), (5, 1)),
    ]
    ended = finish(s, sent)
    assert of(EndEvaluation, ended) == [EndEvaluation(0)]
    assert [each.rollout for each in of(Generate, ended)] == [0, 1]


def test_without_before_the_first_version_is_not_evaluated() -> None:
    s = evaluating(eval__before=False)
    assert of(DrawEvaluation, s.begin()) == []


def test_beside_training_only_new_weights_wait() -> None:
    s = evaluating(eval__beside=True, policies__system="stream-async")
    begun = s.begin()
    assert of(Generate, s.draw(begun))
    sent = s.tell(drawn())
    s.finish(0, 1)
    assert not of(PushWeights, s.step(1))
    assert of(PushWeights, finish(s, sent)) == [PushWeights(1, 0)]


def step_to(s: Script, version: int, *rollouts: int) -> list[Any]:
    """Let a step of these rollouts be made, and its weights be pushed and loaded by all replicas."""
    s.finish(*rollouts, version=version - 1)
    commands = s.step(version)
    said = list(commands)
    while todo := [c for c in commands if isinstance(c, PushWeights | LoadWeights)]:
        commands = s.tell(*map(done, todo))
        said += commands
    return said


def test_a_version_is_evaluated_once_all_replicas_have_loaded_it() -> None:
    s = evaluating(eval__before=False, algorithm__steps=4)
    s.draw(s.begin())
    said = step_to(s, 1, 0, 1)
    assert not of(DrawEvaluation, said)
    said = [*s.draw(said), *said]
    last = step_to(s, 2, 2, 3)
    assert of(DrawEvaluation, last) == [DrawEvaluation(2)]
    assert isinstance(last[-1], DrawEvaluation) or last.index(DrawEvaluation(2)) > last.index(
        of(LoadWeights, last)[-1]
    )
    assert not of(Generate, s.draw(last))


def test_the_last_version_is_pushed_loaded_and_evaluated() -> None:
    s = evaluating(eval__before=False, eval__every=100, algorithm__steps=1)
    s.draw(s.begin())
    said = step_to(s, 1, 0, 1)
    assert of(DrawEvaluation, said) == [DrawEvaluation(1)]
    assert not s.engine.is_finished
    s.tell(done(s.state.leader.command))  # type: ignore[arg-type]  # the last checkpoint
    finish(s, s.tell(drawn(1)), 1)
    assert s.engine.is_finished


def test_no_step_is_made_before_the_evaluated_version_is_on_replicas() -> None:
    s = evaluating(
        eval__beside=True,
        eval__every=1,
        eval__before=False,
        policies__system="stream-async",
        algorithm__steps=4,
    )
    s.draw(s.begin())
    s.finish(0, 1)
    said = s.step(1)
    pushed = of(PushWeights, said)
    assert pushed == [PushWeights(1, 0)]
    s.finish(2, 3)
    while s.state.leader.command is not None:
        assert not isinstance(s.state.leader.command, Step)
        s.tell(done(s.state.leader.command))
    loads = of(LoadWeights, s.tell(done(pushed[0])))
    said = s.tell(*map(done, loads))
    assert of(DrawEvaluation, said) == [DrawEvaluation(1)]
    assert isinstance(s.state.leader.command, Step)


def test_rollouts_of_a_lost_replica_run_again_on_the_others() -> None:
    s = evaluating()
    s.begin()
    sent = of(Evaluate, s.tell(drawn()))
    lost = [each for each in sent if each.replica == 1]
    s.tell(ReplicaLost(1, "killed"))
    again = of(Evaluate, s.tell(*(Failed(each, "killed") for each in lost)))
    assert [(each.rollout, each.replica) for each in again] == [(1, 0), (3, 0), (5, 0)]
    assert of(EndEvaluation, finish(s, [each for each in sent if each.replica == 0] + again))


def test_with_all_replicas_lost_the_replacement_evaluates() -> None:
    s = evaluating()
    s.begin()
    sent = of(Evaluate, s.tell(drawn()))
    started = s.tell(ReplicaLost(0, "killed"), ReplicaLost(1, "killed"))
    assert not of(Evaluate, s.tell(*(Failed(each, "killed") for each in sent)))
    (replica, _) = (each.replica for each in of(StartReplica, started))
    assert len(of(Evaluate, s.tell(ReplicaStarted(replica, 0)))) == len(sent)


def test_a_rollout_that_fails_too_often_is_left_out() -> None:
    s = evaluating(policies__max_attempts=2)
    s.begin()
    sent = of(Evaluate, s.tell(drawn()))
    assert of(Evaluate, s.tell(Failed(sent[0], "no score"))) == [sent[0]]
    assert not of(Evaluate, s.tell(Failed(sent[0], "no score")))
    assert of(EndEvaluation, finish(s, sent[1:])) == [EndEvaluation(0)]


def test_an_evaluation_of_a_lost_version_has_no_result_and_is_repeated() -> None:
    s = evaluating(eval__before=False, eval__every=1, algorithm__steps=4)
    s.draw(s.begin())
    step_to(s, 1, 0, 1)
    sent = s.tell(drawn(1))
    said = s.tell(TrainerLost(0, "killed"))
    (ended,) = of(EndEvaluation, said)
    assert ended.version == 1 and ended.reason
    s.tell(*(Failed(each, "aborted") for each in of(Evaluate, sent)))
    assert s.state.evaluations is not None
    s.state.evaluations.see_version(1)
    assert s.state.evaluations.due == 1


def test_an_interrupted_run_ends_its_evaluation() -> None:
    s = evaluating()
    s.draw(s.begin())
    sent = s.tell(drawn())
    said = s.tell(Interrupted("Ctrl-C"))
    assert [each.version for each in of(EndEvaluation, said)] == [0]
    s.tell(*(Failed(each, "aborted") for each in of(Evaluate, sent)))
    assert s.engine.is_finished


def test_a_resumed_run_does_not_repeat_the_evaluation_of_its_checkpoint() -> None:
    from streamrl.engine.messages import RunStarted, TrainerStarted

    for is_evaluated in (True, False):
        s = evaluating(eval__every=1)
        s.tell(RunStarted(1, 2, is_evaluated=is_evaluated))
        said = s.tell(TrainerStarted(0, 1), ReplicaStarted(0, 1), ReplicaStarted(1, 1))
        assert bool(of(DrawEvaluation, said)) != is_evaluated


SYSTEMS = ("stream-sync", "stream-async", "fully-async", "colocated", "partial-rollouts")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("system", SYSTEMS[:4])
def test_every_due_version_is_evaluated_in_simulated_runs(system: str, beside: bool) -> None:
    table = {**HELD_OUT, "beside": beside}
    run = small_run({"policies.system": system, "algorithm.steps": 5, "evaluation": table})
    world: SimWorld = checked_world(run)
    trace = world.run()
    ended = [c for e in trace.entries for c in e.commands if isinstance(c, EndEvaluation)]
    assert ended == [EndEvaluation(version) for version in (0, 2, 4, 5)]
    scored = [e.event for e in trace.entries if isinstance(e.event, Evaluated)]
    assert len(scored) == 4 * 6
    assert sum(isinstance(e.event, Stepped) for e in trace.entries) == 5
    assert replay(trace, checks_invariants=True) is None


def test_a_due_version_is_pushed_although_the_weight_sync_would_leave_it_out() -> None:
    changes = {"policies.system": "stream-async", "policies.sync_every": 4, "algorithm.steps": 5}
    trace = checked_world(small_run({**changes, "evaluation": HELD_OUT})).run()
    pushed = [c.version for e in trace.entries for c in e.commands if isinstance(c, PushWeights)]
    assert pushed == [2, 4, 5]


def test_training_has_the_same_lengths_with_and_without_evaluations() -> None:
    from streamrl.engine.messages import Generated

    def lengths(changes: dict[str, Any]) -> dict[int, int]:
        trace = simulate(small_run({"policies.system": "stream-sync", **changes}))
        ends = [e.event for e in trace.entries if isinstance(e.event, Generated)]
        return {each.rollout: each.tokens for each in ends if each.finish != "aborted"}

    assert lengths({}) == lengths({"evaluation": HELD_OUT})


@pytest.mark.parametrize(
    ("scorer", "why"), [("exat", "must be one of exact"), ("regex", "needs a pattern")]
)
def test_a_scorer_that_cannot_score_evaluations_is_refused(scorer: str, why: str) -> None:
    with pytest.raises(RunError, match=f"evaluation.scorer .*{why}"):
        small_run({"evaluation": {**HELD_OUT, "scorer": scorer}})


# Seconds and dollars ------------------------------------------------------------------------------


def test_seconds_of_evaluations_belong_to_no_step_and_to_the_whole_run() -> None:
    changes = {"policies.system": "stream-sync", "algorithm.steps": 60}
    table = {**HELD_OUT, "every": 20}
    without, waits = (
        measure_steady(small_run({**changes, **more})) for more in ({}, {"evaluation": table})
    )
    assert waits.step_time == pytest.approx(without.step_time, rel=0.02)
    assert waits.evaluation_time > 0
    whole, before = waits.whole_run, without.whole_run
    assert whole is not None and before is not None
    assert whole.num_evaluations == 4  # 0, 20, 40, 60
    assert whole.evaluation_time == pytest.approx(4 * waits.evaluation_time)
    more = whole.seconds - before.seconds
    assert more == pytest.approx(whole.evaluation_time, rel=0.2)
    assert whole.evaluation_dollars == pytest.approx(
        whole.evaluation_time * waits.cost_per_step / waits.step_time, rel=0.05
    )


@pytest.mark.parametrize(("every", "count"), [(1, 4), (1000, 2)])
def test_a_run_shorter_than_its_simulation_has_its_own_evaluations(every: int, count: int) -> None:
    changes = {"policies.system": "stream-async", "algorithm.steps": 3}
    table = {**HELD_OUT, "every": every}
    whole = measure_steady(small_run({**changes, "evaluation": table})).whole_run
    assert whole is not None
    assert whole.num_evaluations == count


@pytest.mark.parametrize("system", ["stream-sync", "stream-async", "colocated"])
def test_gpu_seconds_of_evaluations_are_attributed(system: str) -> None:
    run = small_run({"policies.system": system, "evaluation": HELD_OUT})
    found = attribute(simulate(run))
    assert sum(found.busy.values()) + sum(found.idle.values()) == pytest.approx(1)
    assert found.busy["evaluate"] > 0 and found.idle["evaluation"] > 0
    plain = attribute(simulate(small_run({"policies.system": system})))
    assert plain.busy["evaluate"] == plain.idle["evaluation"] == 0
