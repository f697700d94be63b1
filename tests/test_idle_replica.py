"""When the rollouts of an idle replica end: by a sum over their lengths, and by the replica's process."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from streamrl.engine.messages import Generate
from streamrl.sim.costs.costs import Costs
from streamrl.sim.idle_replica import End, IdleReplica
from streamrl.sim.world_interface import SimRollout
from tests.runs import small_run

NUM_CASES = 150


class Case:
    """Rollouts of a replica, and its limits."""

    def __init__(self, random: Random, admission: str, *, shares_prefixes: bool) -> None:
        size, longest = random.choice([1, 1, 4]), random.choice([3, 60, 900])
        num_groups = random.randint(1, 12)
        prompts = [random.choice([0, 1, 40, 700]) for _ in range(num_groups)]
        self.rollouts = {
            rollout: SimRollout(
                rollout // size, prompts[rollout // size], random.randint(1, longest)
            )
            for rollout in range(size * num_groups)
        }
        self.commands = [
            Generate(rollout, 0, random.randint(0, 9))
            for rollout in random.sample(sorted(self.rollouts), len(self.rollouts))
        ]
        num, tokens = len(self.rollouts), sum(each.length for each in self.rollouts.values())
        changes = {
            "rollout.admission": admission,
            "rollout.max_tokens": 900,
            "rollout.max_running": max(1, num + random.choice([-1, 0, 0, 5])),
            "rollout.shares_prefixes": shares_prefixes,
        }
        run = small_run(changes)
        held = sum(prompts) * (1 if shares_prefixes else size)
        held += 900 * num if admission == "reserve" else tokens
        least = 1600 if admission == "reserve" else 1 + 2 * 700 + longest
        room = max(least, held + random.choice([-longest, -1, 0, 0, 1, 10**6]))
        per_pass = random.choice([float("inf"), float("inf"), held // 2 + 1])
        limits = {"kv_capacity": room, "tokens_per_pass": per_pass}
        self.replica = IdleReplica(run, replace(Costs.load(run), **limits), 0)


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("admission", ["on-demand", "reserve"])
def test_a_batch_that_only_shrinks_ends_as_the_process_says_to_the_last_bit(
    admission: str, shares_prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, simulated, summed = Random(admission), 0, 0
    process = IdleReplica.simulated_ends
    for _ in range(NUM_CASES):
        case = Case(random, admission, shares_prefixes=shares_prefixes)
        expected = sorted(process(case.replica, case.rollouts, case.commands))
        assert len(expected) == len(case.rollouts)
        with monkeypatch.context() as patched:
            patched.setattr(IdleReplica, "simulated_ends", lambda *arguments: [])
            found = sorted(case.replica.ends(case.rollouts, case.commands))
        summed, simulated = summed + bool(found), simulated + (not found)
        assert found in (expected, list[End]())
    assert min(summed, simulated) > NUM_CASES // 5, "both ways are used"


def test_rollouts_that_already_have_tokens_are_simulated() -> None:
    run = small_run()
    replica = IdleReplica(run, Costs.load(run), 0)
    rollouts = {0: SimRollout(0, 40, 30)}
    (whole,), (rest,) = (replica.ends(rollouts, [Generate(0, 0, 0, done)]) for done in (0, 20))
    assert whole.tokens == rest.tokens == 30 and rest.time < whole.time
