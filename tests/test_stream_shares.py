"""A trainer that follows takes a share of the stream: what is left out is lost to it, with the reason, in both worlds."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.entities import Group
from streamrl.engine.messages import (
    DrawnGroup,
    Generated,
    PromptsDrawn,
    Skip,
    Stepped,
    Take,
    TrainerStarted,
    Verified,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.engine.trainer_side import OF_COUNT, OF_FAMILY, OF_REWARD, OF_STALENESS, StreamShare
from streamrl.executor.prompts import PromptWorkload
from streamrl.record.metrics import measure
from streamrl.record.recorded_workload import group_rewards
from streamrl.record.restarts import ledger_of_run
from streamrl.report.words import share_text
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.policies_config import SystemName
from streamrl.sim.verifier import SimRewards
from streamrl.targets.execute_limits import check_back_ends
from tests.command_line import streamrl
from tests.runs import checked_world, of, script, small_run
from tests.scripted import ScriptedTokenizer
from tests.test_attach import execute as execute_with
from tests.test_attach import joins
from tests.test_execute import execute, real_run
from tests.test_ledger import balance_of
from tests.test_resume import die_after_step

FOLLOWER: dict[str, Any] = {
    "name": "half",
    "pool": "aside",
    "algorithm": {"name": "rloo", "prompts_per_step": 1},
    "backlog": 50,
}
ASIDE: dict[str, Any] = {"cluster.pools.aside": {"gpu": "h20"}, "model.name": "qwen2.5-1.5b"}
DOCS = Path(__file__).parents[1] / "docs"
FAMILIES = "odd", "even"


def run_of(share: dict[str, Any], **changes: Any) -> Run:
    return small_run(
        {**ASIDE, "algorithm.steps": 8, "followers": [{**FOLLOWER, **share}], **changes}
    )


def real_run_of(directory: Path, share: dict[str, Any], **changes: Any) -> Run:
    """Return a run whose prompts are of two families in turn."""
    pools = {"cluster.pools.aside": {"gpu": "h20"}, "execute.checkpoint_every": 2}
    followers = [{**FOLLOWER, **share}] if share else []
    given = {**pools, "algorithm__steps": 6, "followers": followers, **changes}
    run = real_run(directory, **given)
    lines = (
        f'{{"prompt": "p{n}", "answer": "odd", "family": "{FAMILIES[n % 2]}"}}\n' for n in range(8)
    )
    Path(run.workload.sources[0].prompts).write_text("".join(lines))
    return run


def skipped(trace: Trace, trainer: int = 1) -> dict[int, str]:
    """Return the groups that a trainer gave up, and why."""
    skips = (skip for entry in trace.entries for skip in of(Skip, entry.commands))
    return {skip.group: skip.reason for skip in skips if skip.trainer == trainer}


def taken(trace: Trace, trainer: int = 1) -> list[int]:
    takes = (take for entry in trace.entries for take in of(Take, entry.commands))
    return [take.group for take in takes if take.trainer == trainer]


def completed(trace: Trace, size: int) -> list[int]:
    """Return groups in the order in which they became complete."""
    verified = (e.event.rollout // size for e in trace.entries if isinstance(e.event, Verified))
    found, counts = [], Counter[int]()
    for group in verified:
        counts[group] += 1
        found += [group] if counts[group] == size else []
    return found


def books_agree(trace: Trace, reason: str) -> int:
    """Return the rollouts that the follower lost for a reason, the same in ledger and metrics."""
    assert replay(trace) is None
    balance = balance_of(trace)
    assert balance.is_balanced, balance.faults
    lost = balance.trainers[1].dropped[reason]
    assert measure(trace).trainers[1].lost[reason] == lost > 0
    return lost


# What is judged -----------------------------------------------------------------------------------


def complete(*rewards: float, born: int = 0, family: str | None = None) -> Group:
    group = Group.draw(DrawnGroup(0, tuple(range(len(rewards))), 1, (1,) * len(rewards)), 1, 0)
    group.family = family
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        rollout.reward, rollout.born = reward, born + rollout.id
    return group


@pytest.mark.parametrize(
    ("share", "group", "version", "reason"),
    [
        (StreamShare(min_staleness=2), complete(0, 0), 1, OF_STALENESS),
        (StreamShare(min_staleness=2), complete(0, 0), 2, None),
        (StreamShare(max_staleness=1), complete(0, 0, born=3), 5, OF_STALENESS),
        (StreamShare(max_staleness=2), complete(0, 0, born=3), 5, None),
        (StreamShare(min_reward=0.5), complete(1, 0), 0, None),
        (StreamShare(min_reward=0.51), complete(1, 0), 0, OF_REWARD),
        (StreamShare(min_reward=0.1), complete(*[0.1] * 3), 0, None),
        (StreamShare(max_reward=0.4), complete(1, 0), 0, OF_REWARD),
        (StreamShare(families=frozenset({"a"})), complete(1, family="a"), 0, None),
        (StreamShare(families=frozenset({"a"})), complete(1, family="b"), 0, OF_FAMILY),
        (StreamShare(families=frozenset({"a"})), complete(1), 0, OF_FAMILY),
    ],
)
def test_a_group_is_judged_by_its_oldest_token_its_mean_reward_and_its_family(
    share: StreamShare, group: Group, version: int, reason: str | None
) -> None:
    assert share.leaves_out(group, version) == reason


def test_every_third_counts_what_all_else_lets_pass_from_its_first_on() -> None:
    share = StreamShare(every=3, min_reward=1.0)
    groups = [complete(1.0), complete(0.0), *[complete(1.0) for _ in range(4)]]
    assert [share.leaves_out(group, 0) for group in groups] == [
        *(None, OF_REWARD, OF_COUNT, OF_COUNT),
        *(None, OF_COUNT),
    ]


def test_what_is_left_out_is_never_taken_nor_waited_for() -> None:
    s = script(
        policies__system="stream-sync",
        algorithm__steps=5,
        followers=[{**FOLLOWER, "pool": "near", "tensor_parallel": 4, "every": 2}],
    )
    s.draw(s.begin())
    s.tell(TrainerStarted(1, 0))
    assert of(Skip, s.finish(0, 1)) == []
    assert of(Skip, s.finish(2, 3)) == [Skip(1, 1, OF_COUNT)]
    side = s.state.trainers[1]
    assert side.lost == {OF_COUNT: 2} and not side.outside
    s.step(1)
    assert set(s.state.groups) == {0}


# Simulated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["stream-sync", "fully-async", "colocated"])
def test_of_complete_groups_one_in_two_is_taken_and_the_leader_is_none_the_wiser(
    system: str,
) -> None:
    changes = {"policies.system": system}
    trace = checked_world(run_of({"every": 2}, **changes)).run()
    order = completed(trace, 2)
    gone = skipped(trace)
    others = [group for group in order if gone.get(group) == OF_COUNT]
    assert others == order[1::2][: len(others)] and len(others) >= 6
    assert set(taken(trace)).isdisjoint(others)
    books_agree(trace, OF_COUNT)
    alone = checked_world(run_of({}, **changes)).run()
    made = [[e.time for e in t.entries if e.event == Stepped(8, 0)] for t in (trace, alone)]
    assert made[0] == made[1]


def test_staleness_is_that_of_the_leader_when_a_group_is_complete() -> None:
    run = run_of({"max_staleness": 0}, **{"policies.system": "fully-async"})
    trace = checked_world(run).run()
    version, size, born = 0, run.algorithm.group_size, dict[int, int]()
    behind: dict[int, int] = {}
    for entry in trace.entries:
        match entry.event:
            case Generated(rollout, version=own):
                born.setdefault(rollout, own)
            case Stepped(made, 0):
                version = made
            case Verified(rollout):
                rollouts = range(rollout // size * size, rollout // size * size + size)
                if all(r in born for r in rollouts):
                    behind[rollout // size] = version - min(born[r] for r in rollouts)
    gone = {group for group, why in skipped(trace).items() if why == OF_STALENESS}
    assert gone and all(behind[group] > 0 for group in gone)
    assert taken(trace) and all(behind[group] == 0 for group in taken(trace))
    books_agree(trace, OF_STALENESS)


def test_a_simulation_takes_as_large_a_share_by_rewards_as_the_run_file_says() -> None:
    rewards = [[0.0, 0.5], [0.25, 0.25], [1.0, 0.25]]
    share = {"min_reward": 0.25, "max_reward": 0.5}
    run = run_of(share, **{"workload.group_rewards": rewards, "algorithm.steps": 60})
    trace = checked_world(run).run()
    num = len([why for why in skipped(trace).values() if why == OF_REWARD])
    assert num / len(completed(trace, 2)) == pytest.approx(0.75, abs=0.08)
    books_agree(trace, OF_REWARD)
    with pytest.raises(
        RunError, match=r"workload\.group_rewards is missing, but trainer\.1 selects"
    ):
        checked_world(run_of(share))


def test_groups_of_a_mean_reward_may_differ_inside() -> None:
    changes = {"workload.group_rewards": [[0.3, 1.0]], "workload.informative_share": 0.5}
    dynamic = {"algorithm.name": "grpo", "algorithm.dynamic_sampling": True}
    rewards = SimRewards(run_of({"min_reward": 0.3}, **changes, **dynamic))
    pairs = [(rewards.of(2 * n), rewards.of(2 * n + 1)) for n in range(200)]
    assert all(a + b == pytest.approx(0.6) for a, b in pairs)
    assert sum(a != b for a, b in pairs) == pytest.approx(100, abs=25)


def test_families_of_a_simulation_are_a_column_beside_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    rows = [f"{n},{100 + n},{FAMILIES[n % 2]}" for n in range(10) for _ in range(2)]
    file.write_text("\n".join(["prompt_id,output_tokens,family", *rows]))
    lengths = {"kind": "groups", "source": str(file), "prompt_tokens": 10}
    share = {"families": ["even"]}
    trace = checked_world(run_of(share, **{"workload.lengths": lengths})).run()
    told = {
        drawn.group: drawn.family
        for entry in trace.entries
        if isinstance(entry.event, PromptsDrawn)
        for drawn in entry.event.groups
    }
    assert set(told.values()) == set(FAMILIES)
    assert {told[group] for group in taken(trace)} == {"even"}
    assert {told[g] for g, why in skipped(trace).items() if why == OF_FAMILY} == {"odd"}
    books_agree(trace, OF_FAMILY)
    nobody = checked_world(run_of({}, **{"workload.lengths": lengths})).run()
    assert b"family" not in b"".join(line for line in nobody.encode().splitlines()[1:])
    for families, said in (
        (["odd", "strange"], r"trainer\.1\.families must name one of even, odd, got 'strange'"),
        (
            ["odd"],
            r"trainer\.1\.families names 'odd', but the prompts of this run have no families; add",
        ),
    ):
        with pytest.raises(RunError, match=said):
            more = {"workload.lengths": lengths} if "strange" in families else {}
            checked_world(run_of({"families": families}, **more))


def test_rewards_of_groups_are_written_as_the_docs_have_them() -> None:
    blocks = (DOCS / "subscribers.md").read_text().split("```toml\n")[1:]
    (written,) = (text.split("```")[0] for text in blocks if "group_rewards" in text)
    pairs = tomllib.loads(written)["workload"]["group_rewards"]
    run = run_of({"max_reward": 0.7}, **{"workload.group_rewards": pairs, "algorithm.steps": 30})
    (follower,) = measure(checked_world(run).run()).trainers[1:]
    gone = follower.lost[OF_REWARD] / (30 * run.algorithm.rollouts_per_step)
    assert gone == pytest.approx(pairs[-1][1], abs=0.08)


# Executed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "reason"),
    [
        ({"every": 3}, OF_COUNT),
        ({"families": ["even"]}, OF_FAMILY),
        ({"min_reward": 0.5}, OF_REWARD),
        ({"min_staleness": 1}, OF_STALENESS),
    ],
)
def test_an_executed_run_leaves_the_same_out_and_its_ledger_balances(
    tmp_path: Path, share: dict[str, Any], reason: str
) -> None:
    run = real_run_of(tmp_path, share, policies__system="fully-async")
    trace = execute(run, slowest=0.01)
    assert taken(trace)
    books_agree(trace, reason)
    assert set(taken(trace)).isdisjoint(g for g, why in skipped(trace).items() if why == reason)
    if reason == OF_REWARD:
        measured = group_rewards(trace)
        assert sum(share for _, share in measured) == pytest.approx(1)
        means = {mean for mean, _ in measured}
        assert means <= {0.0, 0.5, 1.0} and len(means) > 1
    told = streamrl("replay", tmp_path / "run")
    assert told.returncode == 0 and reason in told.stdout


def test_a_resume_judges_what_it_draws_again_and_the_ledger_of_all_legs_balances(
    tmp_path: Path,
) -> None:
    share = {"families": ["odd"], "every": 2}
    die_after_step(real_run_of(tmp_path, share), 3)
    execute(real_run_of(tmp_path, share), resume=True)
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    balance = ledger_of_run(trace, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    assert {OF_FAMILY, OF_COUNT} <= set(balance.trainers[1].dropped)


def test_who_joins_may_take_a_share_by_family_though_nobody_did_before(tmp_path: Path) -> None:
    run = real_run_of(tmp_path, {}, algorithm__steps=8)
    trace = execute_with(run, joins(families=["even"]))
    assert replay(trace, checks_invariants=True) is None
    balance = ledger_of_run(read_trace(tmp_path / "run" / "trace.jsonl"), tmp_path / "run")
    assert balance.is_balanced and balance.trainers[1].dropped[OF_FAMILY] > 0
    assert balance.trainers[1].trained > 0


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ({"every": 0}, "trainer.1.every must be at least 1, got 0"),
        ({"min_staleness": -1}, "trainer.1.min_staleness must be at least 0, got -1"),
        (
            {"min_staleness": 3, "max_staleness": 1},
            "trainer.1.max_staleness must be at least trainer.1.min_staleness=3, got 1",
        ),
        (
            {"min_reward": 0.5, "max_reward": 0.25},
            "trainer.1.max_reward must be at least trainer.1.min_reward=0.5, got 0.25",
        ),
        ({"min_reward": float("nan")}, "trainer.1.min_reward must be in"),
        ({"families": ["a", "a"]}, "trainer.1.families must name each family once, got ['a', 'a']"),
        ({"families": [""]}, "trainer.1.families must not have an empty name, got ['']"),
    ],
)
def test_a_share_that_cannot_be_is_refused_in_a_line(share: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError) as error:
        run_of(share)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_a_share_that_is_staler_than_any_group_can_be_is_refused_in_both_worlds(
    tmp_path: Path, system: SystemName
) -> None:
    most = SYSTEMS[system].staleness_bound
    checked_world(run_of({"min_staleness": most}, **{"policies.system": system}))
    run = run_of({"min_staleness": most + 1}, **{"policies.system": system})
    real = real_run_of(tmp_path, {"min_staleness": most + 1}, policies__system=system)
    for check in (partial(checked_world, run), partial(check_back_ends, real)):
        with pytest.raises(RunError) as error:
            check()
        said = f"trainer.1.min_staleness must be at most {most}, as policies.system"
        assert str(error.value).startswith(said)
    ahead = {"policies.system": system, "policies.consumption": "greedy"}
    checked_world(run_of({"min_staleness": most + 1}, **ahead))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([[0.0, 0.5], [1.0, 0.4]], "must have shares that add up to 1, got 0.9"),
        ([[0.0, 0.0], [1.0, 1.0]], r"must have pairs of a mean reward and a share in \(0, 1\]"),
    ],
)
def test_rewards_whose_shares_do_not_add_up_are_refused(pairs: Any, said: str) -> None:
    with pytest.raises(RunError, match=said):
        run_of({}, **{"workload.group_rewards": pairs})


def test_a_family_that_no_prompt_is_of_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    run = real_run_of(tmp_path, {"families": ["strange"]})
    with pytest.raises(RunError, match=r"must name one of even, odd, got 'strange'"):
        PromptWorkload(run, ScriptedTokenizer())


def test_a_report_says_which_groups_a_trainer_takes() -> None:
    follower = run_of({"every": 2, "max_staleness": 2, "families": ["a", "b"]}).followers[0]
    assert share_text(follower) == "one in 2 of a and b, with staleness at most 2"
