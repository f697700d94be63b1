"""The ranker of a run, in both worlds: it learns by windows in draw order, and is not heeded where it is worse than none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.config import Run
from streamrl.sim.world import simulate
from streamrl.workload.online_ranker import LengthRanker
from tests.runs import small_run
from tests.test_execute import execute, real_run

RANKED = {
    "workload.ranker.window": 8,
    "policies.order": "longest-first",
    "algorithm.group_size": 4,
    "algorithm.prompts_per_step": 8,
    "rollout.max_tokens": 4096,
    "workload.max_prompt_tokens": 512,
}


def ended(rollout: int, tokens: int, finish: str = "stop") -> Generated:
    return Generated(rollout, tokens, finish, 0, 1.0, 0.1)  # type: ignore[arg-type]  # one of three


def drawn(group: int, expected: int) -> DrawnGroup:
    return DrawnGroup(group, tuple(range(4 * group, 4 * group + 4)), 100, (expected,) * 4)


def make_ranker(run: Run) -> LengthRanker:
    config = run.workload.ranker
    assert config is not None
    size, most = run.algorithm.prompts_per_step, run.rollout.max_tokens
    return LengthRanker(config, prompts_per_step=size, max_tokens=most, seed=run.seed)


def finish(ranker: LengthRanker, group: DrawnGroup, tokens: int) -> ExpectationsChanged | None:
    """End all rollouts of a group; return what the last one told."""
    return [ranker.learn(ended(rollout, tokens)) for rollout in group.rollouts][-1]


def length_of(prompt: int) -> int:
    return 100 * 2 ** (prompt % 8)


def test_a_window_is_learnt_once_all_its_groups_in_draw_order_are_over() -> None:
    ranker = make_ranker(small_run(RANKED))
    groups = [ranker.draw(drawn(n, 500), prompt=n) for n in range(16)]
    for late in groups[8:]:  # a younger window ends first, and says nothing yet
        assert finish(ranker, late, length_of(late.group)) is None
    for early in groups[:7]:
        assert finish(ranker, early, length_of(early.group)) is None
    said = finish(ranker, groups[7], length_of(7))
    assert said is not None and said.recall is not None and said.rollouts == ()
    again = ranker.draw(drawn(16, 500), prompt=7)
    assert again.expected_tokens[0] > ranker.draw(drawn(17, 500), prompt=0).expected_tokens[0]
    new = ranker.draw(drawn(18, 500), prompt=99).expected_tokens[0]
    assert new == pytest.approx(
        math.exp(np.mean([math.log(length_of(n)) for n in range(8)])), rel=0.01
    )


def test_a_dropped_group_keeps_no_window_open() -> None:
    ranker = make_ranker(small_run({**RANKED, "workload.ranker.window": 9}))
    groups = [ranker.draw(drawn(n, 500), prompt=n) for n in range(9)]
    ranker.forget(0)
    ranker.forget(0)
    said = [finish(ranker, group, length_of(group.group)) for group in groups[1:]]
    assert [each is None for each in said] == [True] * 7 + [False]
    assert ranker.learn(ended(0, 5)) is None


def test_what_a_dropped_group_ends_is_told_with_the_next_rollout() -> None:
    ranker = make_ranker(small_run({**RANKED, "workload.ranker.window": 9}))
    groups = [ranker.draw(drawn(n, 500), prompt=n) for n in range(10)]
    for group in groups[:8]:
        finish(ranker, group, length_of(group.group))
    ranker.forget(8)
    said = ranker.learn(ended(groups[9].rollouts[0], 7))
    assert said is not None and said.recall is not None


def test_aborts_teach_nothing() -> None:
    ranker = make_ranker(small_run(RANKED))
    group = ranker.draw(drawn(0, 500), prompt=0)
    for rollout in group.rollouts:
        assert ranker.learn(ended(rollout, 9, "aborted")) is None
    assert group.rollouts[0] in ranker._group_of


def adversary(run: Any, num_windows: int) -> tuple[LengthRanker, list[ExpectationsChanged]]:
    """Let a prior say the opposite of all lengths."""
    ranker, said = make_ranker(run), []
    for number in range(8 * num_windows):
        tokens = length_of(number)
        group = ranker.draw(drawn(number, 12_800 // tokens), prompt=None)
        news = finish(ranker, group, tokens)
        if news is not None:
            said.append(news)
    return ranker, said


def test_a_ranker_that_says_the_opposite_is_switched_off_and_says_so() -> None:
    run = small_run({**RANKED, "workload.ranker.history": False})
    ranker, said = adversary(run, 1)
    assert not ranker.is_heeded
    assert "switched off" in said[0].reason and said[0].recall == 0.0
    fresh = make_ranker(run)  # whose prior has not yet been given a slope of nothing
    fresh.is_heeded = False
    for each in (ranker, fresh):
        alike = each.draw(drawn(100, 3), None), each.draw(drawn(101, 4000), None)
        assert alike[0].expected_tokens == alike[1].expected_tokens


def test_what_waits_is_expected_to_be_alike_once_the_ranker_is_off() -> None:
    run = small_run({**RANKED, "workload.ranker.history": False})
    ranker = make_ranker(run)
    groups = [ranker.draw(drawn(n, 12_800 // length_of(n)), None) for n in range(9)]
    ranker.learn(ended(groups[8].rollouts[0], 10))
    said = [finish(ranker, group, length_of(group.group)) for group in groups[:8]][-1]
    assert said is not None
    assert said.rollouts == groups[8].rollouts[1:]
    assert len(set(said.tokens)) == 1


def test_one_that_knows_better_later_is_heeded_again() -> None:
    run = small_run({**RANKED, "workload.ranker.history": False})
    ranker, _ = adversary(run, 1)
    heeded = []
    for number in range(8, 8 + 80):  # now the prior is right
        group = ranker.draw(drawn(number, length_of(number)), None)
        news = finish(ranker, group, length_of(number))
        if news is not None and "on again" in news.reason:
            heeded.append(number)
    assert ranker.is_heeded and heeded


# Worlds -------------------------------------------------------------------------------------------


def write_lengths(path: Path, num_prompts: int = 32, noise: float = 0.1) -> Path:
    """Write prompts that differ by a factor of 64, each with eight outputs that are nearly alike."""
    rng = np.random.default_rng(0)
    rows = ["prompt_id,sample_idx,output_tokens"]
    for prompt in range(num_prompts):
        for sample in range(8):
            tokens = round(40 * 2 ** (6 * prompt / num_prompts) * math.exp(rng.normal(0, noise)))
            rows.append(f"{prompt},{sample},{tokens}")
    path.write_text("\n".join(rows) + "\n")
    return path


def simulated(tmp_path: Path, **changes: Any) -> Trace:
    lengths = {
        "workload.lengths": {
            "kind": "groups",
            "source": str(write_lengths(tmp_path / "lengths.csv")),
            "epochs": True,
            "prompt_tokens": 100,
        },
        "algorithm.steps": 12,
        "policies.system": "stream-sync",
        "rollout.max_running": 2,  # eight waves of a step, so that their order counts
    }
    return simulate(small_run({**RANKED, **lengths, **changes}))


def recalls(trace: Trace) -> list[float]:
    found = (event for _, event, _ in trace.entries if isinstance(event, ExpectationsChanged))
    return [event.recall for event in found if event.recall is not None]


def test_in_the_second_epoch_prompts_are_known(tmp_path: Path) -> None:
    found = recalls(simulated(tmp_path))
    assert len(found) >= 11
    assert np.mean(found[:4]) < 0.45  # 32 prompts are four steps: the first epoch knows nothing
    assert np.mean(found[5:]) > 0.7


def test_longest_first_by_what_was_learnt_takes_less_time(tmp_path: Path) -> None:
    random = {"policies.order": "fifo", "policies.dispatch": "random"}
    plain = simulated(tmp_path, **{"workload.ranker": None, **random})
    learnt = simulated(tmp_path)
    assert learnt.entries[-1].time < 0.95 * plain.entries[-1].time


def test_a_replay_decides_as_the_run_did_without_the_ranker(tmp_path: Path) -> None:
    trace = simulated(tmp_path)
    assert replay(trace) is None
    file = tmp_path / "trace.jsonl"
    file.write_bytes(trace.encode())
    again = read_trace(file)
    assert replay(again) is None
    assert recalls(again) == recalls(trace)


def test_simulated_epochs_have_each_prompt_once_in_the_order_of_executed_ones(
    tmp_path: Path,
) -> None:
    from streamrl.workload.prompt_order import EpochOrder
    from streamrl.workload.workload import SimulatedWorkload

    path = write_lengths(tmp_path / "lengths.csv", num_prompts=10, noise=0.0)
    table = {"kind": "groups", "source": str(path), "epochs": True, "prompt_tokens": 100}
    run = small_run({**RANKED, "workload.ranker": None, "workload.lengths": table})
    lengths = [draw.lengths[0] for draw in SimulatedWorkload(run).draw(0, 30)]
    order = EpochOrder(run.seed, 10)
    by_prompt = sorted(set(lengths))
    assert lengths == [by_prompt[order.prompt(place)] for place in range(30)]
    assert sorted(lengths[:10]) == sorted(lengths[10:20]) == by_prompt
    assert lengths[:10] != lengths[10:20]


def test_what_an_earlier_leg_knew_is_remembered() -> None:
    ranker = make_ranker(small_run(RANKED))
    known = [(prompt, length_of(prompt)) for prompt in range(8) for _ in range(4)]
    ranker.remember(known, [500] * len(known))
    found = [ranker.draw(drawn(n, 500), prompt=n).expected_tokens[0] for n in range(8)]
    assert found == sorted(found) and found[-1] > 2 * found[0]
    assert math.prod(found) ** (1 / 8) == pytest.approx(
        100 * 2**3.5, rel=0.1
    )  # nor longer nor shorter in all
    deaf = make_ranker(small_run({**RANKED, "workload.ranker.history": False}))
    deaf.remember(known, [500] * len(known))
    assert {deaf.draw(drawn(n, 500), prompt=n).expected_tokens for n in range(8)} == {(500,) * 4}


def test_an_executed_run_learns_too_and_is_decided_identically(tmp_path: Path) -> None:
    changes = {"workload__ranker__window": 8, "policies__order": "longest-first"}
    trace = execute(real_run(tmp_path, algorithm__steps=6, **changes))
    assert recalls(trace)
    steps = read_metrics(tmp_path / "run")
    assert steps[-1]["ranker_recall"] == recalls(trace)[-1] and "ranker_recall" not in steps[0]
    recorded = read_trace(tmp_path / "run" / "trace.jsonl")
    assert recalls(recorded) == recalls(trace)
    assert replay(recorded) is None
