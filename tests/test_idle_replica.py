"""When the rollouts of an idle replica end: computed in short, and by the replica's process."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from streamrl.engine.messages import Generate
from streamrl.sim.costs.costs import Costs
from streamrl.sim.idle_replica import IdleReplica
from streamrl.sim.world_interface import SimRollout
from tests.runs import small_run

NUM_CASES = 300
COSTS = Costs.load(small_run({"rollout.max_running": 64}))


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
        held = sum(prompts) * (1 if shares_prefixes else size)
        held += 900 * num if admission == "reserve" else tokens
        least = max(prompts) + (900 if admission == "reserve" else longest) + 1
        room = random.choice([random.randint(least, least + held), held - 1, held, held + 9**6])
        costs = replace(COSTS, kv_capacity=max(least, room))
        self.replica = IdleReplica(small_run(changes), costs, 0)

    @property
    def joins_at_once(self) -> bool:
        """Whether no rollout waits for another one."""
        return self.replica._prefill_time(list(self.rollouts.values())) is not None


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("admission", ["on-demand", "reserve"])
def test_ends_are_those_of_the_process_to_the_last_bit(
    admission: str, shares_prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, num_at_once = Random(admission), 0
    process = IdleReplica.simulated_ends
    monkeypatch.delattr(IdleReplica, "simulated_ends")
    for _ in range(NUM_CASES):
        case = Case(random, admission, shares_prefixes=shares_prefixes)
        expected = sorted(process(case.replica, case.rollouts, case.commands))
        assert len(expected) == len(case.rollouts)
        assert sorted(case.replica.ends(case.rollouts, case.commands)) == expected
        num_at_once += case.joins_at_once
    assert NUM_CASES // 5 < num_at_once < NUM_CASES * 4 // 5


@pytest.mark.parametrize(
    "limits",
    [{"rides_along": True}, {"refill_passes": 2}, {"padded_share": 0.5}, {"tokens_per_pass": 60}],
    ids=str,
)
def test_replicas_of_a_measured_machine_are_simulated(limits: dict[str, Any]) -> None:
    run = small_run({"rollout.max_running": 2})
    plain = IdleReplica(run, COSTS, 0)
    measured = IdleReplica(run, replace(COSTS, **limits), 0)
    rollouts = {n: SimRollout(n, 40, 30 + 9 * n) for n in range(4)}
    commands = [Generate(n, 0, n) for n in rollouts]
    ends = sorted(measured.ends(rollouts, commands))
    assert ends == sorted(measured.simulated_ends(rollouts, commands))
    assert ends != sorted(plain.ends(rollouts, commands))


def test_rollouts_that_already_have_tokens_are_simulated() -> None:
    run = small_run()
    replica = IdleReplica(run, Costs.load(run), 0)
    rollouts = {0: SimRollout(0, 40, 30)}
    (whole,), (rest,) = (replica.ends(rollouts, [Generate(0, 0, 0, done)]) for done in (0, 20))
    assert whole.tokens == rest.tokens == 30 and rest.time < whole.time
