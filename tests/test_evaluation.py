"""Evaluations on held-out prompts: what the engine decides, in scripts and in simulated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.engine.messages import (
    HELD_OUT,
    Abort,
    Act,
    Close,
    DrawEvaluation,
    EndEvaluation,
    Evaluate,
    Evaluated,
    EvaluationDrawn,
    Failed,
    Generate,
    Interrupted,
    LoadWeights,
    Observed,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    StartReplica,
    Step,
    Stepped,
    TrainerLost,
    Truncate,
    Verified,
    Verify,
    WakeAt,
    Woke,
)
from streamrl.engine.trace import replay
from streamrl.record.attribution import attribute
from streamrl.record.steady_state import read_steps
from streamrl.runfile.errors import RunError
from streamrl.sim.steady_state import measure_steady
from streamrl.sim.world import SimWorld, simulate
from tests.runs import Script, checked_world, done, lose_replica_at, of, singles, small_run
from tests.test_agentic_simulation import agentic

OWN = {"num_prompts": 3, "every": 2, "samples": 2}


def evaluating(num: int = 2, **changes: Any) -> Script:
    """Return a script that evaluates two rollouts of each of three prompts; `eval__` begins its keys."""
    table: dict[str, Any] = {**OWN}
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
    table = {**OWN, "beside": beside}
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
    trace = checked_world(small_run({**changes, "evaluation": OWN})).run()
    pushed = [c.version for e in trace.entries for c in e.commands if isinstance(c, PushWeights)]
    assert pushed == [2, 4, 5]


@pytest.mark.parametrize(
    ("evaluation", "num_prompts"),
    [({"share": 0.4}, 4), ({"prompts": "FILE"}, 10), ({"prompts": "FILE", "num_prompts": 3}, 3)],
)
def test_a_simulation_counts_held_out_prompts_in_their_file(
    tmp_path: Path, evaluation: dict[str, Any], num_prompts: int
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1="}\n' * 10)
    own = {key: str(path) if each == "FILE" else each for key, each in evaluation.items()}
    run = small_run({"workload.prompts": str(path), "evaluation": own})
    drawn = [e for _, e, _ in checked_world(run).run().entries if isinstance(e, EvaluationDrawn)]
    assert {len(each.prompt_tokens) for each in drawn} == {num_prompts}


@pytest.mark.parametrize("key", ["workload", "evaluation"])
def test_a_simulation_without_the_file_of_held_out_prompts_names_the_key_to_set(key: str) -> None:
    missing, own = "/nowhere/prompts.jsonl", {"share": 0.4}
    changes: dict[str, Any] = {"workload.prompts": missing, "evaluation": own}
    if key == "evaluation":
        changes = {"evaluation": {"prompts": missing}}
    with pytest.raises(RunError, match=r"--set evaluation\.num_prompts=N$"):
        checked_world(small_run(changes))
    own = {**changes["evaluation"], "num_prompts": 3}
    checked_world(small_run({**changes, "evaluation": own}))


def test_training_has_the_same_lengths_with_and_without_evaluations() -> None:
    from streamrl.engine.messages import Generated

    def lengths(changes: dict[str, Any]) -> dict[int, int]:
        trace = simulate(small_run({"policies.system": "stream-sync", **changes}))
        ends = [e.event for e in trace.entries if isinstance(e.event, Generated)]
        return {each.rollout: each.tokens for each in ends if each.finish != "aborted"}

    assert lengths({}) == lengths({"evaluation": OWN})


@pytest.mark.parametrize(
    ("scorer", "why"), [("exat", "must be one of exact"), ("regex", "needs a pattern")]
)
def test_a_scorer_that_cannot_score_evaluations_is_refused(scorer: str, why: str) -> None:
    with pytest.raises(RunError, match=f"evaluation.scorer .*{why}"):
        small_run({"evaluation": {**OWN, "scorer": scorer}})


# Seconds and dollars ------------------------------------------------------------------------------


def test_seconds_of_evaluations_belong_to_no_step_and_to_the_whole_run() -> None:
    changes = {"policies.system": "stream-sync", "algorithm.steps": 60}
    table = {**OWN, "every": 20}
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


def test_seconds_of_evaluations_belong_to_no_step_after_a_roll_back() -> None:
    keys = {"algorithm.steps": 5, "execute.checkpoint_every": 3, "evaluation": {**OWN, "every": 1}}
    fault = {"kind": "trainer-dies-training", "step": 5}
    steps = read_steps(checked_world(small_run({**keys, "faults": [fault]})).run())
    assert steps.num_made > len(steps) == 5
    before_last_step = sum(steps.evaluation_times[:-1])
    assert sum(steps.durations()) + before_last_step == pytest.approx(steps.ended_at[-1])


@pytest.mark.parametrize(("every", "count"), [(1, 4), (1000, 2)])
def test_a_run_shorter_than_its_simulation_has_its_own_evaluations(every: int, count: int) -> None:
    changes = {"policies.system": "stream-async", "algorithm.steps": 3}
    table = {**OWN, "every": every}
    whole = measure_steady(small_run({**changes, "evaluation": table})).whole_run
    assert whole is not None
    assert whole.num_evaluations == count


@pytest.mark.parametrize("system", ["stream-sync", "stream-async", "colocated"])
def test_gpu_seconds_of_evaluations_are_attributed(system: str) -> None:
    run = small_run({"policies.system": system, "evaluation": OWN})
    found = attribute(simulate(run))
    assert sum(found.busy.values()) + sum(found.idle.values()) == pytest.approx(1)
    assert found.busy["evaluate"] > 0 and found.idle["evaluation"] > 0
    plain = attribute(simulate(small_run({"policies.system": system})))
    assert plain.busy["evaluate"] == plain.idle["evaluation"] == 0


# Episodes -----------------------------------------------------------------------------------------

LIMITS = {"max_turns": 4, "max_context": 4096}


def evaluating_episodes(**environment: Any) -> Script:
    """Return a script that evaluates one episode of each of two prompts before it trains."""
    return evaluating(eval__num_prompts=2, eval__samples=1, environment={**LIMITS, **environment})


def turned(rollout: int, tokens: int, **more: Any) -> Evaluated:
    """Return the event that ends a turn of an evaluation."""
    return Evaluated(rollout, 0, tokens, 0.0, 1.0, 0.1, is_turn=True, **more)


def test_an_episode_is_evaluated_turn_by_turn_and_scored_at_its_end() -> None:
    s = evaluating_episodes()
    s.draw(s.begin())
    first, second = HELD_OUT, HELD_OUT + 1
    started = of(Act, s.tell(drawn(prompts=2, samples=1)))
    assert [(each.rollout, each.starts) for each in started] == [(first, True), (second, True)]
    sent = of(Evaluate, s.tell(Observed(first, 7)))
    assert sent == [Evaluate(0, 0, 0, 0, 0, 7)]
    assert of(Act, s.tell(turned(0, 10))) == [Act(first, 1)]
    assert of(Evaluate, s.tell(Observed(first, 5))) == [Evaluate(0, 0, 0, 10, 1, 12)]
    assert of(Act, s.tell(turned(0, 30))) == [Act(first, 2)]
    over = s.tell(Observed(first, 0, is_over=True))
    assert of(Verify, over) == [Verify(first)] and of(Close, over) == [Close(first)]
    s.tell(Verified(first, 1.0))
    s.tell(Observed(second, 0))
    s.tell(turned(1, 9, is_truncated=True))
    ended = s.tell(Verified(second, 0.0))
    assert of(EndEvaluation, ended) == [EndEvaluation(0)]
    assert [each.rollout for each in of(Act, ended)] == [0, 1]  # training begins
    assert not s.engine.state.evaluations.episodes


def test_a_lost_replica_costs_an_episode_only_its_turn() -> None:
    s = evaluating_episodes()
    s.draw(s.begin())
    s.tell(drawn(prompts=2, samples=1))
    s.tell(Observed(HELD_OUT, 0), turned(0, 10))
    (second,) = of(Evaluate, s.tell(Observed(HELD_OUT, 5)))
    lost = [*s.tell(ReplicaLost(0, "died")), *s.tell(Failed(second, "died"))]
    assert of(Evaluate, lost) == [Evaluate(0, 1, 0, 10, 1, 5)]


def test_an_episode_whose_environment_is_lost_too_often_is_left_out() -> None:
    s = evaluating_episodes()
    s.draw(s.begin())
    (command, other) = of(Act, s.tell(drawn(prompts=2, samples=1)))
    for _ in range(s.run.policies.max_attempts):
        (command,) = of(Act, s.tell(Failed(command, "died"))) or (None,)
    assert command is None
    s.tell(Observed(other.rollout, 0), turned(1, 9), Observed(other.rollout, 0, is_over=True))
    ended = s.tell(Verified(other.rollout, 1.0))
    assert of(EndEvaluation, ended) == [EndEvaluation(0)]


def test_the_time_of_an_episode_ends_in_the_last_evaluation_too() -> None:
    changes = {"environment": {**LIMITS, "episode_time_limit": "30 s"}, "eval__num_prompts": 1}
    run = evaluating(1, eval__samples=1, **changes).run
    s = Script(replace(run, algorithm=replace(run.algorithm, steps=0)))
    s.begin()
    s.tell(drawn(prompts=1, samples=1))
    waits = s.tell(Observed(HELD_OUT, 0))
    (wake,) = of(WakeAt, waits)
    s.tell(turned(0, 9), Observed(HELD_OUT, 5))
    s.now = wake.time - 1
    over = s.tell(Woke(wake.time))
    assert of(Truncate, over) == [Truncate(HELD_OUT)] and of(Abort, over) == [Abort(HELD_OUT, 0)]
    assert of(Verify, s.tell(turned(0, 20))) == [Verify(HELD_OUT)]


@pytest.mark.parametrize(("system", "beside"), [("stream-sync", True), ("fully-async", False)])
def test_episodes_of_every_due_version_are_evaluated_within_the_sandboxes(
    system: str, beside: bool
) -> None:
    """Training episodes under way go on while an evaluation waits for their sandboxes; else the run would be stuck."""
    own = {"num_prompts": 3, "every": 2, "samples": 2, "beside": beside}
    changes = {"policies.system": system, "policies.max_restarts": 9, "evaluation": own}
    limits = {"action_time_limit": "5 s", "sandboxes": 2}
    world = checked_world(agentic(changes, failed_share=0.1, **limits))
    for time, replica in ((3.0, 0), (40.0, 1)):
        lose_replica_at(world, time, replica)
    trace = world.run()
    assert replay(trace) is None
    ends = [c for entry in trace.entries for c in of(EndEvaluation, entry.commands)]
    assert [(each.version, each.reason) for each in ends] == [(0, ""), (2, ""), (3, "")]
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1.0)
    assert shares.busy["evaluate"] > 0
    assert (read_steps(trace).evaluation_time > 0) == (not beside)


def test_seconds_of_evaluated_episodes_belong_to_the_whole_run_and_to_no_figure_of_training() -> (
    None
):
    changes = {"policies.system": "stream-sync", "simulate.max_steps": 5}
    own = {"num_prompts": 4, "every": 2, "samples": 2}
    without, waits = (
        measure_steady(agentic({**changes, **more})) for more in ({}, {"evaluation": own})
    )
    assert waits.step_time == pytest.approx(without.step_time, rel=0.1)
    assert waits.episodes is not None and without.episodes is not None
    assert waits.episodes.turns == pytest.approx(without.episodes.turns)
    whole = waits.whole_run
    assert whole is not None and whole.num_evaluations == 3
    assert (
        whole.evaluation_time == pytest.approx(3 * waits.evaluation_time) and waits.evaluation_time
    )
