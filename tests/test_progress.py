"""How far a command is: plain lines where nobody sees a bar, and silence of what is quickly done."""

from __future__ import annotations

import re
import time

import pytest

from streamrl.cli.progress import EVERY, PlainProgress, make_progress
from streamrl.sim.planner.planner import make_plan
from tests.test_plan import SMALL, few


def test_a_pipe_has_a_line_every_few_seconds_with_what_is_done(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []

    def wait_for(line: str) -> None:
        while line not in told:
            time.sleep(0.01)
            told.extend(re.sub(r"\d+ s$", "", each) for each in capfd.readouterr().err.splitlines())

    with PlainProgress(every=0.2) as progress:
        step = progress.add_task("step", total=400, facts="")
        progress.update(step, completed=12)
        wait_for("step: 12/400 done, ")
        progress.update(step, completed=400)
        plan = progress.add_task("plan", total=None, facts="screening")
        progress.update(plan, completed=7, facts="finalists")
        wait_for("plan: finalists, 7 done, ")
    assert {*told} == {"step: 12/400 done, ", "plan: finalists, 7 done, "}


def test_what_is_done_before_the_first_line_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert EVERY >= 5
    began_at = time.monotonic()
    with make_progress() as progress:
        assert isinstance(progress, PlainProgress)
        progress.add_task("step", total=3, facts="")
        time.sleep(0.1)
    assert capfd.readouterr().err == "" and time.monotonic() - began_at < 1


def test_planning_names_its_phases_in_their_order() -> None:
    told: list[tuple[int, str]] = []
    make_plan(few(SMALL, systems=["stream-async"]), lambda done, what: told.append((done, what)))
    phases = list(dict.fromkeys(what for _, what in told))
    found = ("simulating", "finalists", "faster plans", "the chosen plan", "what if")
    last = ("options", "near plans")
    assert phases == [*found, *last]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    firsts = {what: done for done, what in reversed(told)}
    assert firsts["simulating"] == 0
