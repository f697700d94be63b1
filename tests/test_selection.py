"""What was trained on beside what was generated: asynchrony by completion favours the short, a line in draw order nobody."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.messages import Drop, Generated, PromptsDrawn, Skip, Step, Verified
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER, ROLLED_BACK, UNIFORM
from streamrl.record.metrics import measure
from streamrl.record.run_directory import read_metrics
from streamrl.record.selection import Selection, SelectionMetrics
from streamrl.report.page.learning import describe_selection_bias, is_selective
from streamrl.report.run_tables import metrics_table
from streamrl.sim.world import simulate
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_dynamic_sampling import DYNAMIC
from tests.test_execute import execute, real_run

LONG: dict[str, Any] = {"algorithm.steps": 12, "algorithm.prompts_per_step": 8}


def selection_of(trace: Trace) -> SelectionMetrics:
    found = measure(trace).selection
    assert found is not None
    return found


@pytest.mark.parametrize("system", ["stream-sync", "stream-async", "fully-async"])
def test_a_line_in_draw_order_trains_on_what_was_generated(system: str) -> None:
    found = selection_of(simulate(small_run({**LONG, "policies.system": system})))
    assert found.length_ratio == [1.0] * 12 and found.generated == found.trained
    assert not is_selective(found) and "nothing was selected" in describe_selection_bias(found)


@pytest.mark.parametrize("system", ["stream-async", "fully-async"])
def test_what_is_done_first_is_short_at_the_start_and_the_long_come_later(system: str) -> None:
    greedy = {"policies.system": system, "policies.consumption": "greedy"}
    trace = simulate(small_run({**LONG, **greedy}))
    found = selection_of(trace)
    first = found.length_ratio[0]
    assert first is not None and first < 0.8
    assert any(ratio is not None and ratio > 1.1 for ratio in found.length_ratio[1:])
    assert is_selective(found) and f"{first:.2f}" in str(
        list(metrics_table(measure(trace)).columns[1].cells)
    )
    synchronous = selection_of(
        simulate(
            small_run({**LONG, "policies.consumption": "greedy", "policies.system": "stream-sync"})
        )
    )
    assert synchronous.length_ratio == [1.0] * 12


def test_means_are_those_of_the_trace() -> None:
    changes = {**DYNAMIC, "workload.informative_share": 0.5, "policies.system": "stream-async"}
    trace = simulate(small_run(changes))
    found = selection_of(trace)
    lengths, groups, taught, passed = {}, {}, set(), set()
    for entry in trace.entries:
        match entry.event:
            case Generated(rollout, tokens):
                lengths[rollout] = tokens
            case PromptsDrawn():
                groups |= {drawn.group: drawn.rollouts for drawn in entry.event.groups}
        for command in entry.commands:
            if isinstance(command, Step) and command.trainer == LEADER:
                taught |= {r for group in command.groups for r in groups[group]}
            if isinstance(command, Skip) and command.reason == UNIFORM:
                passed |= set(groups[command.group])
    assert passed and found.left_out[UNIFORM].rollouts == len(passed)
    for share, rollouts in ((found.trained, taught), (found.left_out[UNIFORM], passed)):
        assert share.mean_tokens == pytest.approx(sum(lengths[r] for r in rollouts) / len(rollouts))
    assert found.generated.rollouts >= len(taught) + len(passed)
    assert is_selective(found)


def test_what_is_taken_back_is_trained_on_no_more_but_was_generated() -> None:
    selection = Selection()
    selection.begin_at(4)
    selection.train(5, 5, 1, tokens=10, reward=1.0)
    selection.train(6, 5, 1, tokens=30, reward=0.0)
    selection.leave_out(6, "failed", tokens=3, reward=None)
    selection.take_back(5, ROLLED_BACK)
    found = selection.metrics()
    assert (found.generated.rollouts, found.generated.mean_tokens) == (2, 20)
    assert (found.trained.rollouts, found.trained.mean_tokens) == (1, 10)
    assert found.left_out[ROLLED_BACK].mean_tokens == 30
    assert found.left_out["failed"].rollouts == 1 and found.left_out["failed"].mean_tokens is None
    assert found.length_ratio == [0.5] and found.reward_difference == [0.5]


def test_an_executed_run_tells_in_every_step_what_ended_what_was_trained_and_what_was_given_up(
    tmp_path: Path,
) -> None:
    """By family too; over the run they are what its trace has."""
    run = real_run(
        tmp_path,
        algorithm__steps=6,
        algorithm__name="grpo",
        algorithm__dynamic_sampling=True,
        algorithm__group_size=2,
    )
    prompts = Path(run.workload.sources[0].prompts)
    families = ("odd", "even")
    prompts.write_text(
        "".join(
            f'{{"prompt": "p{n}", "answer": "odd", "family": "{families[n % 2]}"}}\n'
            for n in range(7)
        )
    )
    trace = execute(run)
    lines = read_metrics(tmp_path / "run")
    found = selection_of(trace)
    verified = sum(isinstance(entry.event, Verified) for entry in trace.entries)
    skipped = [
        c for e in trace.entries for c in e.commands if isinstance(c, Skip) and c.trainer == LEADER
    ]
    assert skipped and not any(
        isinstance(c, Drop) and c.group in {s.group for s in skipped}
        for e in trace.entries
        for c in e.commands
    )
    for fate in ("generated", "trained", "dropped"):
        counts = [sum(line.get(f"{fate}/{family}", 0) for line in lines) for family in families]
        assert all(counts), fate
        if fate == "trained":
            assert sum(counts) == found.trained.rollouts
    assert sum(line["generated"] for line in lines) <= verified
    assert sum(line.get(f"dropped for {UNIFORM}", 0) for line in lines) == 2 * len(skipped)


def test_the_report_says_what_was_selected_and_that_nothing_was(tmp_path: Path) -> None:
    said = []
    for consumption in ("greedy", "strict-fifo"):
        run = small_run({**LONG, "policies.consumption": consumption})
        directory = tmp_path / consumption
        directory.mkdir()
        (directory / "trace.jsonl").write_bytes(simulate(run).encode())
        report = streamrl("report", directory, "--json")
        assert report.returncode == 0 and '"length_ratio"' in report.stdout
        page = streamrl("report", directory)
        assert page.returncode == 0
        said.append(re.sub("<[^>]*>", "", (directory / "report.html").read_text()))
    assert "What the first step trained on was" in said[0] and "nothing was selected" in said[1]
