"""What a run says in its log: one line for each loss and each replacement, and how much of it a terminal shows."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrl.cli.log_output import log_to_stderr, set_verbosity
from streamrl.cli.watch_run import RunWatch
from streamrl.engine.messages import Event, Failed, Stepped, TrainerLost, Verify
from streamrl.engine.state import State
from streamrl.engine.trace import Trace
from streamrl.executor.run_log import COUNTED, MOST_ALIKE, RunLog
from streamrl.executor.world import RealWorld
from streamrl.runfile.config import Run
from tests.runs import singles
from tests.scripted import make_world
from tests.test_execute import real_run
from tests.test_faults import fault
from tests.test_faults_executed import faulty

LOGGER = logging.getLogger("streamrl.executor.world")


def shown(verbose: int = 0, quiet: bool = False) -> list[str]:
    """Return the levels of the records that reach standard error."""
    stderr = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, log_to_stderr():
        patch.setattr(sys, "stderr", stderr)
        set_verbosity(verbose, quiet)
        for level in ("debug", "info", "warning", "error"):
            getattr(LOGGER, level)(level)
    return [line.split()[-1] for line in stderr.getvalue().splitlines()]


def test_v_shows_more_and_q_shows_errors_only() -> None:
    assert shown() == ["info", "warning", "error"]
    assert shown(verbose=1) == ["debug", "info", "warning", "error"]
    assert shown(quiet=True) == ["error"]
    with pytest.raises(ValueError, match="-v and -q exclude each other"):
        shown(verbose=1, quiet=True)


def test_libraries_are_shown_with_v_twice_only(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr():
        for verbose in (1, 2):
            set_verbosity(verbose)
            logging.getLogger("library").info("from a library, -v times %d", verbose)
            LOGGER.info("from streamrl, -v times %d", verbose)
    lines = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    ours = [f"from streamrl, -v times {number}" for number in (1, 2)]
    assert lines == [ours[0], "from a library, -v times 2", ours[1]]


def test_a_warning_of_a_library_is_one_line_without_a_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = warnings.showwarning
    with log_to_stderr():
        for number in range(2):
            warnings.warn_explicit(f"{number} has\nno \x1b[31mfigures", UserWarning, "/a/b.py", 3)
    assert warnings.showwarning is before
    said = capsys.readouterr().err
    assert said == "".join(
        f"streamrl: UserWarning: {number} has no \\x1b[31mfigures\n" for number in range(2)
    )


def test_the_end_of_a_command_leaves_logging_as_it_was() -> None:
    loggers = [logging.getLogger(name) for name in ("streamrl", "asyncio", None)]
    before = [(logger.level, [*logger.handlers]) for logger in loggers]
    with log_to_stderr():
        set_verbosity(verbose=2)
    assert [(logger.level, [*logger.handlers]) for logger in loggers] == before


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_a_closed_terminal_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        with log_to_stderr():
            monkeypatch.setattr(sys, "stderr", stream)
            LOGGER.warning("replica 1 lost")


def test_a_log_line_is_above_the_live_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with log_to_stderr(), RunWatch(40, console=console):
        LOGGER.warning("replica 1 lost at step 3")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "streamrl: replica 1 lost at step 3\n" in text
    assert text.rindex("replica 1 lost") < text.rindex("0/40")


# Whole runs ---------------------------------------------------------------------------------------

Act = Callable[[RealWorld, Event], None]


def execute(run: Run, act: Act = lambda world, event: None, **options: Any) -> Trace:
    """Execute a run with scripted roles in processes of their own; `act` is told each event."""

    async def go() -> Trace:
        def watch(event: Event, state: State, now: float) -> None:
            act(world, event)

        world = make_world(run, {"is_local": True, "slowest": 0.02, **options}, watch=watch)
        with contextlib.closing(world._directory):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


def kill_at_step(version: int, who: str) -> Act:
    """Return what kills a process from outside, without a word to its handle, once a step is made."""
    killed: list[int] = []

    def act(world: RealWorld, event: Event) -> None:
        if isinstance(event, Stepped) and event.version == version and not killed:
            launcher: Any = world._launcher
            handle = launcher.trainers[-1] if who == "trainer" else launcher.replicas[1]
            handle.send_signal(signal.SIGKILL)
            killed.append(handle.pid)

    return act


def test_a_killed_replica_is_one_line_and_its_replacement_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    execute(faulty(tmp_path, rollout__replicas=2), kill_at_step(2, "replica"))
    loss, replacement = caplog.records
    going = r"its \d+ rollouts? restarts? on replica 0|it had no rollouts"
    assert re.fullmatch(
        rf"replica 1 lost at step 3 \(process \d+ ended with signal 9\); ({going}); "
        "replica 2 starts in its place",
        loss.getMessage(),
    )
    assert loss.levelname == "WARNING" and replacement.levelname == "INFO"
    assert re.fullmatch(
        r"replica 2 started at step \d in place of replica 1", replacement.getMessage()
    )


def test_a_killed_trainer_is_one_line_and_its_restart_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    execute(faulty(tmp_path), kill_at_step(3, "trainer"))
    loss, restart = caplog.records
    assert re.fullmatch(
        r"trainer lost at step 4 \(process \d+ ended with signal 9\); "
        r"rolled back from step 3 to step 2(; \d+ groups? dropped)?",
        loss.getMessage(),
    )
    assert loss.levelname == "WARNING" and restart.levelname == "INFO"
    assert restart.getMessage() == "trainer restarted at step 2"


def test_every_failure_is_logged_with_what_becomes_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plan = [fault("link-drops", step=2), fault("disk-full", step=3)]
    execute(faulty(tmp_path, *plan))
    push, save = caplog.messages
    assert push.startswith("transfer: push of step ") and push.endswith("; it is repeated")
    assert save.startswith("trainer: SaveCheckpoint failed") and "No space left" in save


def test_groups_dropped_because_a_rollout_fails_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = real_run(tmp_path, policies__max_attempts=1)
    trace = execute(run, is_local=False, failure_rate=0.3)
    dropped = [c.group for e in trace.entries for c in e.commands if type(c).__name__ == "Drop"]
    told = [m for m in caplog.messages if m.endswith("no trainer trains on it")]
    assert told and len(told) == len(dropped)
    assert told[0] == f"group {dropped[0]} dropped (failed 1 times); no trainer trains on it"


@pytest.mark.parametrize(("verbose", "quiet"), [(0, True), (0, False), (1, False)])
def test_a_terminal_shows_of_a_run_what_was_asked_for(
    verbose: int, quiet: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to_stderr():
        set_verbosity(verbose, quiet)
        trace = execute(faulty(tmp_path), kill_at_step(3, "trainer"))
    assert any(isinstance(entry.event, TrainerLost) for entry in trace.entries)
    told = capsys.readouterr().err
    assert ("trainer lost at step 4" in told) is not quiet
    assert ("command Train(" in told and "event Stepped(" in told) is (verbose > 0)
    assert not quiet or told == ""


def test_nothing_is_written_to_a_process_that_has_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss is noticed some time after it; asyncio warns of each write in between but the first five."""
    from streamrl.executor.launchers.handles import LocalProcess
    from tests.scripted import BEGIN, TRAINER

    async def go() -> None:
        config: dict[str, object] = {"seed": 1}
        handle = await LocalProcess.start(TRAINER, config, tmp_path / "log", {}, begin=BEGIN)
        handle.send_signal(signal.SIGKILL)
        await asyncio.to_thread(handle._process.wait, 20)
        calls = (handle.call("stop", returns=type(None)) for _ in range(20))
        lost = await asyncio.gather(*calls, return_exceptions=True)
        assert all("ended with status -9" in str(error) for error in lost)
        await handle.close()

    asyncio.run(go())
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def logged(failures: list[str], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of verifications that fail for these reasons, each of a rollout of its own."""
    script = singles(len(failures))
    script.draw(script.begin())
    log = RunLog(script.state, ())
    with caplog.at_level(logging.INFO):
        for rollout, reason in enumerate(failures):
            event = Failed(Verify(rollout), reason)
            log.see(event)
            log.write(event, ())
    return caplog.messages


def test_a_reason_of_several_lines_is_logged_in_one(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = logged(["ValueError: first\n\nsecond\r\nthird"], caplog)
    assert "(ValueError: first second third); it is repeated" in line


def test_failures_alike_are_counted_after_the_first(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged([f"no answer in line {n}" for n in range(MOST_ALIKE + 2 * COUNTED)], caplog)
    assert len(lines) == MOST_ALIKE + 2
    assert lines[MOST_ALIKE - 1].endswith("; from now on, 100 such lines are logged as one")
    last = MOST_ALIKE + 2 * COUNTED - 1
    assert lines[-1] == f"Verify failed 100 more times (no answer in line {last})"
    caplog.clear()
    assert len(logged(["another reason"], caplog)) == 1
