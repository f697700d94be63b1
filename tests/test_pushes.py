"""When weights are pushed: never while an optimizer step is made, whose end makes another version of them."""

from __future__ import annotations

from streamrl.engine.messages import Failed, PushWeights, Step, Stepped
from streamrl.engine.systems import build_engine
from streamrl.engine.trainer_side import LEADER
from tests.runs import checked_world, of, small_run

SLOW = [{"between": ["far", "near"], "bandwidth": "1 Gbps", "latency": "1 s"}]
"""A push takes longer than the steps that the bound on staleness lets a trainer make meanwhile."""


def test_a_push_that_fails_in_the_middle_of_a_step_is_made_again_of_the_next_version() -> None:
    run = small_run({"policies.system": "fully-async", "cluster.links": SLOW})
    engine = build_engine(run)
    for entry in checked_world(run).run().entries:
        commands = engine.handle(entry.event, entry.time)
        lost = engine.state.pushing
        if lost is not None and (steps := of(Step, commands)):
            break
    commands = engine.handle(Failed(PushWeights(lost, LEADER), "no space"), entry.time)
    assert not of(PushWeights, commands)
    commands = engine.handle(Stepped(steps[0].version, LEADER), entry.time + 1.0)
    assert of(PushWeights, commands) == [PushWeights(lost + 1, LEADER)]
