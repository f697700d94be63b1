"""The legs of a run make one ledger: all are there, each in its place, or it says what it lacks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.engine.messages import (
    RunStarted,
    SaveCheckpoint,
    Woke,
)
from streamrl.engine.trace import read_trace
from streamrl.record.ledger import ledger_line
from streamrl.record.restarts import ledger_of_run
from tests.command_line import streamrl
from tests.hand_traces import HandTrace
from tests.test_execute import execute, real_run
from tests.test_resume import die_after_step


def test_an_executed_run_balances_over_all_its_legs(tmp_path: Path) -> None:
    keys = {"policies__consumption": "greedy", "policies__max_staleness": 4}
    run = real_run(
        tmp_path,
        policies__system="fully-async",
        algorithm__steps=12,
        execute__checkpoint_every=2,
        **keys,
    )
    die_after_step(run, 5)
    die_after_step(run, 9, resume=True)
    last = execute(run, resume=True)
    balance = ledger_of_run(last, tmp_path / "run")
    assert balance.is_balanced, balance.faults
    per_group = run.algorithm.group_size
    assert balance.trainers[0].trained == 36 * per_group and balance.legs == 3
    assert balance.taken_back >= 2 * 3 * per_group
    assert balance.checksummed and not balance.unverified
    done = streamrl("replay", tmp_path / "run")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == ledger_line(balance)
    first = read_trace(tmp_path / "run" / "trace.1.jsonl")
    assert ledger_of_run(first, tmp_path / "run").trainers[0].open > 0
    alone = ledger_of_run(last, tmp_path / "elsewhere")  # where its earlier legs are not
    assert alone.is_balanced and alone.trainers[0].trained < balance.trainers[0].trained
    assert "ledger: begins with start 3, because earlier traces are missing; " in ledger_line(alone)


def write_legs(directory: Path) -> list[Path]:
    """Write a run of three legs, each from the checkpoint that the leg before it saved; return its files, in order."""
    names = ["trace.1.jsonl", "trace.2.jsonl", "trace.jsonl"]
    for leg, name in enumerate(names, start=1):
        part = HandTrace(algorithm__steps=3, policies__system="fully-async")
        part.trace.leg, part.num_groups = leg, leg - 1
        part.at(0.0, RunStarted(leg - 1, leg - 1))
        part.draw(0.0, leg, 1)
        part.generate(0.0, leg - 1)
        part.generated(0.5, leg - 1, 0.5, version=leg - 1)
        part.train(0.6, 0.9, leg, leg - 1)
        part.at(1.0, Woke(1.0), SaveCheckpoint(leg, leg, 0))
        (directory / name).write_bytes(part.trace.encode())
    return [directory / name for name in names]


def test_the_legs_of_a_run_balance_together(tmp_path: Path) -> None:
    files = write_legs(tmp_path)
    for legs, path in enumerate(files, start=1):
        balance = ledger_of_run(read_trace(path), tmp_path)
        assert balance.is_balanced and balance.legs == legs and balance.first_leg == 1
        assert balance.trainers[0].trained == legs


def test_a_run_whose_earlier_legs_are_gone_says_where_its_books_begin(tmp_path: Path) -> None:
    first, second, last = write_legs(tmp_path)
    first.unlink()
    second.unlink()
    balance = ledger_of_run(read_trace(last), tmp_path)
    assert balance.is_balanced and ledger_line(balance).startswith(
        "ledger: begins with start 3, because earlier traces are missing; 1 rollouts drawn: "
    )


@pytest.mark.parametrize("leg", [1, 2])
def test_a_leg_that_was_cut_to_its_header_does_not_balance(leg: int, tmp_path: Path) -> None:
    files = write_legs(tmp_path)
    cut = files[leg - 1]
    cut.write_bytes(cut.read_bytes().splitlines(keepends=True)[0])
    balance = ledger_of_run(read_trace(files[-1]), tmp_path)
    assert balance.faults == [f"a restart resumes from step {leg}, which was never saved"]


def exchange(one: Path, other: Path) -> None:
    texts = one.read_bytes(), other.read_bytes()
    other.write_bytes(texts[0])
    one.write_bytes(texts[1])


def take_from_another_run(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":7'))


DISORDER: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "one missing": (lambda files: files[0].unlink(), r"trace\.1\.jsonl: No such file"),
    "exchanged": (
        lambda files: exchange(files[0], files[1]),
        r"trace\.1\.jsonl: its header says start 2 of a run, expected start 1",
    ),
    "exchanged with the last": (
        lambda files: exchange(files[0], files[2]),
        r"trace\.1\.jsonl: its header says start 3 of a run, but trace\.jsonl is start 1",
    ),
    "second exchanged with the last": (
        lambda files: exchange(files[1], files[2]),
        r"trace\.2\.jsonl: its header says start 3 of a run, but trace\.jsonl is start 2",
    ),
    "of another run": (
        lambda files: take_from_another_run(files[1]),
        r"trace\.2\.jsonl: belongs to another run: seed is 7 there, and 0 in trace\.jsonl",
    ),
}


@pytest.mark.parametrize("way", DISORDER)
def test_legs_that_are_not_those_of_the_run_are_refused_by_file(way: str, tmp_path: Path) -> None:
    disorder, told = DISORDER[way]
    disorder(write_legs(tmp_path))
    done = streamrl("replay", tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert re.search(told, done.stderr), done.stderr
