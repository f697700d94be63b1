"""The books of a run: they balance whatever fails, and no rollout or version can go astray without their saying so."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    DrawnGroup,
    Drop,
    Event,
    Generated,
    PromptsDrawn,
    RunStarted,
    SaveCheckpoint,
    Skip,
    Step,
    Stepped,
    Trained,
    TrainerLost,
    TrainerStarted,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Entry, Trace, blaming_damage
from streamrl.engine.trainer_side import ROLLED_BACK, drawn_again
from streamrl.executor.checkpoints import KEPT_CHECKPOINTS
from streamrl.record.ledger import (
    KEPT_ACCOUNTS,
    Ledger,
    LedgerReader,
    SavedAccount,
    SavedAccounts,
    ledger_line,
)
from tests.command_line import streamrl
from tests.hand_traces import HandTrace
from tests.random_runs import Losses, failures, losses, runs, runs_of_several, simulate
from tests.runs import Script, small_run


def balance_of(trace: Trace) -> Ledger:
    """Return how the books of a run of one leg stand."""
    books = LedgerReader(trace)
    books.read(trace.entries)
    return books.balance()


# Runs whose books balance -------------------------------------------------------------------------


@pytest.mark.parametrize("system", sorted(SYSTEMS))
@settings(max_examples=10, deadline=None)
@given(st.data(), losses, failures)
def test_every_run_balances_whatever_fails(
    system: str, data: st.DataObject, lost: Losses, faults: frozenset[int]
) -> None:
    trace = simulate(data.draw(runs(None, system)), lost, faults)
    balance = balance_of(trace)
    assert balance.is_balanced, balance.faults
    assert balance.drawn == balance.trainers[0].trained + sum(balance.trainers[0].dropped.values())
    assert balance.checksummed is None and ledger_line(balance).count("\n") == 0


@settings(max_examples=25, deadline=None)
@given(st.data(), losses, losses, failures, st.integers(1, 3))
def test_the_books_of_several_trainers_that_are_lost_balance(
    data: st.DataObject, lost: Losses, trainers: Losses, faults: frozenset[int], every: int
) -> None:
    run = data.draw(runs_of_several())
    which = [(time, trainer % run.num_trainers) for time, trainer in trainers]
    balance = balance_of(simulate(run, lost, faults, which, every))
    assert balance.is_balanced, balance.faults
    for trainer in balance.trainers:
        assert trainer.trained + sum(trainer.dropped.values()) == balance.drawn
        assert trainer.open == 0


def test_a_simulation_without_an_end_has_rollouts_open_and_says_how_many(tmp_path: Path) -> None:
    done = streamrl("simulate", "examples/h20-h800.toml", *FEW_STEPS)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and last.startswith("ledger: ") and " open; staleness at " in last
    done = streamrl("simulate", "examples/h20-h800.toml", *FEW_STEPS, "--json")
    ledger = json.loads(done.stdout)["ledger"]
    (trainer,) = ledger["trainers"]
    assert ledger["is_balanced"] and trainer["open"] > 0
    assert ledger["drawn"] == trainer["trained"] + trainer["open"]
    assert ledger["staleness"] <= ledger["max_staleness"] == 1


FEW_STEPS = ("--set", "simulate.max_steps=3", "--set", "algorithm.prompts_per_step=16")


# Books that are cooked ----------------------------------------------------------------------------


def hand(**changes: Any) -> HandTrace:
    """Return a run of three rollouts, each trained on in a step of its own, of which every token is fresh."""
    found = HandTrace(algorithm__steps=3, policies__system="fully-async", **changes)
    found.begin()
    for step in range(3):
        found.draw(step, step + 1, 1)
        found.generate(step, step)
        found.generated(step + 0.5, step, 0.5, version=step)
        found.train(step + 0.6, step + 0.9, step + 1, step)
    return found


def index_of(trace: Trace, kind: type[Event], nth: int = 0) -> int:
    """Return the place of the nth entry of a kind."""
    return [n for n, entry in enumerate(trace.entries) if isinstance(entry.event, kind)][nth]


def put(trace: Trace, index: int, event: Event, *commands: Command) -> None:
    """Put other words in the place of an entry."""
    trace.entries[index] = Entry(trace.entries[index].time, event, list(commands))


def train_twice(trace: Trace) -> None:
    at = index_of(trace, Trained, 1)
    put(trace, at, Trained((0,), 0), Step(2, (0,), 0))


def train_twice_in_one_step(trace: Trace) -> None:
    at = index_of(trace, Trained, 1)
    trace.entries.insert(at, Entry(trace.entries[at].time, Trained((1,), 0), []))


def lose_one(trace: Trace) -> None:
    """Let the last step be made of nothing, and the last rollout be forgotten."""
    put(trace, index_of(trace, Trained, 2), Trained((), 0), Step(3, (), 0))


def lose_one_of_a_step(trace: Trace) -> None:
    put(trace, index_of(trace, Trained, 1), Trained((), 0), Step(2, (1,), 0))


def pass_one_over(trace: Trace) -> None:
    """Let the run break off after a step that is made of a later group than the first that is open."""
    del trace.entries[index_of(trace, Stepped, 2) + 1 :]
    put(trace, index_of(trace, Trained, 1), Trained((), 0), Step(2, (), 0))


def drop_twice(trace: Trace) -> None:
    trace.entries.append(Entry(9.0, TrainerStarted(0, 3), [Drop(0, "failed 3 times")]))


def skip_what_is_trained(trace: Trace) -> None:
    trace.entries.append(Entry(9.0, TrainerStarted(0, 3), [Skip(2, 0, "the trainer was behind")]))


def draw_twice(trace: Trace) -> None:
    found = next(n for n, e in enumerate(trace.entries) if getattr(e.event, "step", 0) == 2)
    first = next(e.event for e in trace.entries if getattr(e.event, "step", 0) == 1)
    put(trace, found, first)


def sample_stale(trace: Trace) -> None:
    put(trace, index_of(trace, Generated, 2), Generated(2, 100, "stop", 0, 0.5, 0.0))


def sample_partly_stale(trace: Trace) -> None:
    """Let the first attempt of a rollout begin two versions earlier than the one that ends it."""
    at = index_of(trace, Generated, 2)
    aborted = Generated(2, 40, "aborted", 0, 0.5, 0.0)
    trace.entries.insert(at, Entry(trace.entries[at].time, aborted, []))


def sample_from_the_future(trace: Trace) -> None:
    put(trace, index_of(trace, Generated, 1), Generated(1, 100, "stop", 2, 0.5, 0.0))


def sample_nothing(trace: Trace) -> None:
    del trace.entries[index_of(trace, Generated, 1)]


BREAKS: dict[str, tuple[Callable[[Trace], None], str]] = {
    "trained twice": (train_twice, "step 2 trained on rollout 0, which was not open any more"),
    "trained twice in a step": (train_twice_in_one_step, "rollout 1 was trained on twice"),
    "lost": (lose_one, "rollouts 2 of group 2 were lost"),
    "lost by its step": (lose_one_of_a_step, "step 2 lost rollout 1 of its own groups"),
    "passed over": (
        pass_one_over,
        "rollouts 1 of group 1 were lost: later groups were trained on first",
    ),
    "dropped twice": (drop_twice, "group 0 was dropped twice, or after a step trained on it"),
    "given up after its step": (skip_what_is_trained, "group 2 was dropped twice"),
    "drawn twice": (draw_twice, "group 0 was drawn again although it was done"),
    "too stale": (
        sample_stale,
        "rollout 2 was trained on with tokens 2 versions behind, but at most 1",
    ),
    "first tokens too stale": (sample_partly_stale, "rollout 2 .* tokens 2 versions behind"),
    "of no version yet": (sample_from_the_future, "tokens of version 2, which did not exist yet"),
    "without a token": (sample_nothing, "rollout 1 was trained on without a token"),
}


def test_the_hand_trace_balances_before_it_is_broken() -> None:
    trace = hand(policies__max_staleness=1).trace
    assert ledger_line(balance_of(trace)) == (
        "ledger: 3 rollouts drawn: 3 trained once; staleness at most 0 of 1"
    )


@pytest.mark.parametrize("way", BREAKS)
def test_a_trace_that_is_broken_in_one_way_does_not_balance(way: str, tmp_path: Path) -> None:
    break_it, told = BREAKS[way]
    trace = hand(policies__max_staleness=1).trace
    break_it(trace)
    balance = balance_of(trace)
    assert not balance.is_balanced and balance.num_faults >= 1
    assert re.search(told, balance.faults[0]), balance.faults
    (tmp_path / "trace.jsonl").write_bytes(trace.encode())
    done = streamrl("replay", tmp_path)
    assert done.returncode == 1 and "the ledger does not balance: " in done.stderr
    assert done.stdout.splitlines()[-1].startswith("ledger: does not balance: ")
    assert json.loads(streamrl("replay", tmp_path, "--json").stdout)["ledger"]["faults"]


def twice(kind: type[Event]) -> Trace:
    """Return a simulated run with an entry that happened twice."""
    trace = simulate(small_run(), (), frozenset())
    at = index_of(trace, kind, 1)
    trace.entries.insert(at, trace.entries[at])
    return trace


@pytest.mark.parametrize("kind", [Stepped, Generated, Trained])
def test_replay_tells_the_ledger_of_what_cannot_have_happened_and_says_why_in_words(
    kind: type[Event], tmp_path: Path
) -> None:
    trace = twice(kind)
    file = tmp_path / "trace.jsonl"
    file.write_bytes(trace.encode())
    entry = index_of(trace, kind, 1) + 1
    done = streamrl("replay", tmp_path)
    said, ledger = done.stdout.splitlines()
    assert done.returncode == 1 and ledger == ledger_line(balance_of(trace))
    where = f"{file}: a damaged trace: entry {entry} does not follow from those before it: "
    assert f"decided differently: {where}{kind.__name__} cannot follow: " in said
    found = json.loads(streamrl("replay", tmp_path, "--json").stdout)
    assert found["first_difference"].startswith(where) and not found["is_identical"]
    reported = streamrl("report", tmp_path)
    assert reported.stderr.count(str(file)) == reported.returncode / 2
    for text in (said, reported.stderr):
        assert "Error" not in text and "()" not in text


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("groups_done", 10**15),
        ("group", 10**15),
        ("done_ahead", [10**15]),
        ("leg", 10**15),
    ],
)
def test_a_group_number_that_would_fill_the_memory_is_refused_with_its_entry(
    name: str, number: object, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in hand().trace.encode().splitlines()]
    save = {"type": "SaveCheckpoint", "version": 1, "groups_done": 1, "trainer": 0}
    for line in lines[1:]:
        if line[1]["type"] == "RunStarted" and name == "groups_done":
            line[1][name] = number
        if line[1]["type"] == "PromptsDrawn" and name == "group":
            line[1]["groups"][0][name] = number
    if name == "done_ahead":
        lines[-1][2].append({**save, name: number})
    if name == "leg":
        lines[0][name] = number
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = streamrl("replay", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(r"/trace\.jsonl:\d+: not a trace (entry|header): ", done.stderr), done.stderr


def test_a_run_does_not_leap_over_more_groups_than_memory_holds() -> None:
    s = Script(small_run({"algorithm.prompts_per_step": 1, "algorithm.group_size": 2}))
    s.begin()
    far = DrawnGroup(9 * 10**8, (18 * 10**8, 18 * 10**8 + 1), 40, (9, 9))
    with pytest.raises(ValueError, match="group 900000000 drawn, but 0 is next"):
        s.tell(PromptsDrawn(1, 0, (far,)))
    begun = RunStarted(1, 3)
    assert drawn_again(begun, SaveCheckpoint(2, 5, 1, (6,))) == {3, 4, 6}
    with pytest.raises(ValueError, match="trainer 1 continues from group 900000000, and the run"):
        drawn_again(begun, SaveCheckpoint(2, 9 * 10**8, 1))


@pytest.mark.parametrize("error", [AssertionError(), KeyError(40), AttributeError("'NoneType'")])
def test_what_python_raises_by_itself_is_told_in_words(error: Exception) -> None:
    trace = hand().trace
    with pytest.raises(ValueError, match="a damaged trace: ") as told, blaming_damage(trace):
        raise error
    assert "Error" not in str(told.value) and "None" not in str(told.value)


# What a loss and a resume take back ---------------------------------------------------------------


def test_steps_that_a_loss_took_back_are_given_up_and_their_rollouts_count_once() -> None:
    found = hand()
    found.at(5.0, TrainerLost(0, "gone"))
    assert dict(balance_of(found.trace).trainers[0].dropped) == {ROLLED_BACK: 3}
    saved = hand()
    saved.trace.entries.insert(
        index_of(saved.trace, Stepped, 1) + 1, Entry(1.9, CheckpointSaved(2, 0), [])
    )
    saved.at(5.0, TrainerLost(0, "gone"))
    balance = balance_of(saved.trace)
    assert balance.is_balanced and balance.trainers[0].trained == 2
    assert balance.trainers[0].dropped == {ROLLED_BACK: 1}


def resumed(
    *groups: int,
    groups_done: int = 2,
    ahead: tuple[int, ...] = (),
    kept: tuple[int, int] | None = None,
    leg: int = 2,
) -> LedgerReader:
    """Return the books of a run that saved its second step, died after the third and goes on with some groups.

    Of the first of these tokens may be there.
    """
    first = hand()
    at = index_of(first.trace, Stepped, 1)
    save = SaveCheckpoint(2, 2, 0, ahead)
    put(first.trace, at, first.trace.entries[at].event, save)
    second = HandTrace(algorithm__steps=4, policies__system="fully-async")
    second.trace.leg = leg
    second.at(0.0, RunStarted(2, groups_done))
    for step, group in enumerate(groups, start=3):
        second.num_groups = group
        second.draw(step, step, 1)
        if kept is not None and step == 3:
            drawn = DrawnGroup(group, (group,), 40, (10,), kept=(kept,))
            put(second.trace, -1, PromptsDrawn(step, 0, (drawn,)))
        second.generate(step, group)
        second.generated(step + 0.5, group, 0.5, version=step - 1)
        second.train(step + 0.6, step + 0.9, step, group)
    books = LedgerReader(first.trace)
    books.read(first.trace.entries)
    books.begin_trace(second.trace)
    books.read(second.trace.entries)
    return books


def test_what_a_resume_took_back_is_drawn_again_and_counts_once() -> None:
    balance = resumed(2, 3).balance()
    assert balance.is_balanced, balance.faults
    assert ledger_line(balance) == (
        "ledger: 4 rollouts drawn: 4 trained once; staleness at most 0 of 2; 2 starts, 1 rollouts taken back by resumes"
    )
    assert resumed(3, 4, ahead=(2,)).balance().is_balanced


def test_the_bound_of_staleness_is_the_largest_of_all_starts() -> None:
    strict, loose = (hand(policies__max_staleness=most).trace for most in (0, 3))
    for first, second in ((strict, loose), (loose, strict)):
        books = LedgerReader(first)
        books.begin_trace(second)
        assert books.balance().max_staleness == 3


def test_tokens_from_before_a_resume_are_of_the_version_that_sampled_them() -> None:
    balance = resumed(2, 3, kept=(50, 1)).balance()
    assert balance.is_balanced and balance.staleness == 1
    assert resumed(2, 3, kept=(50, 2)).balance().staleness == 0


@pytest.mark.parametrize(("kept", "leg"), [((50, 3), 2), ((50, 0), 1)])
def test_tokens_that_no_leg_before_can_have_left_do_not_balance(
    kept: tuple[int, int], leg: int
) -> None:
    told = f"rollout 2 was drawn with tokens of version {kept[1]}, which no earlier start had made"
    assert told in resumed(2, 3, kept=kept, leg=leg).balance().faults


def test_a_checkpoint_that_calls_done_what_is_open_does_not_balance() -> None:
    found = hand()
    at = index_of(found.trace, Generated, 1)
    put(found.trace, at, found.trace.entries[at].event, SaveCheckpoint(1, 2, 0))
    balance = balance_of(found.trace)
    assert balance.faults == ["a checkpoint counts group 1 as done, but it is open"]


@pytest.mark.parametrize(
    ("books", "told"),
    [
        (lambda: resumed(1, 2), "group 1 was drawn again although it was done"),
        (lambda: resumed(3, 4), "group 2 was never drawn"),
        (
            lambda: resumed(3, 4, groups_done=3),
            "resumes from group 3, but its checkpoint continues from",
        ),
    ],
)
def test_a_leg_that_trains_what_is_done_or_leaves_prompts_out_does_not_balance(
    books: Callable[[], LedgerReader], told: str
) -> None:
    balance = books().balance()
    assert told in balance.faults[0]


def test_tokens_of_a_version_that_a_loss_took_back_are_told_as_such() -> None:
    found = hand().trace
    at = index_of(found, Stepped, 1) + 1
    lost = [TrainerLost(0, "gone"), TrainerStarted(0, 1)]
    found.entries[at:at] = [Entry(1.9, event, []) for event in lost]
    put(found, index_of(found, Generated, 2), Generated(2, 100, "stop", 2, 0.5, 0.0))
    told = "rollout 2 was trained on with tokens of version 2, which was rolled back"
    assert balance_of(found).faults == [told]


def test_staleness_that_is_not_bounded_is_told_as_such() -> None:
    greedy = hand(policies__consumption="greedy", policies__max_staleness=1)
    assert ledger_line(balance_of(greedy.trace)).endswith("; staleness at most 0, not bounded")


def a_book(version: int) -> SavedAccount:
    return SavedAccount(2 * version, frozenset(), version, Counter())


def test_the_books_of_the_newest_checkpoints_are_kept_and_no_more() -> None:
    assert KEPT_ACCOUNTS > KEPT_CHECKPOINTS
    saved = SavedAccounts()
    for version in range(1, 1001):
        saved.request(version, a_book(version))
        saved.complete(version)
        assert len(saved) <= KEPT_ACCOUNTS + 1
        if version == 3:
            assert saved.resume(2) == a_book(2)
    for version in (2, *range(1001 - KEPT_ACCOUNTS, 1001)):
        assert saved.resume(version) == a_book(version), version
    assert saved.resume(1000 - KEPT_ACCOUNTS) is None


def test_checkpoints_that_nobody_said_to_be_complete_push_none_out() -> None:
    saved = SavedAccounts()
    saved.complete(3)  # which nobody asked for
    for version in range(1, 21):
        saved.request(version, a_book(version))
        if version in (1, 2, 20):
            saved.complete(version)
    assert all(saved.resume(version) for version in range(1, 21))
