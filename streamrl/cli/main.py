"""`streamrl COMMAND`: exit status 0 is success, 2 is wrong input with one clear line, 1 is failure."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import F_GETFL, fcntl
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, ClassVar

import typer

from streamrl import __version__
from streamrl.cli.lazy_commands import UNTIL_END, CommandTable, LazyGroup
from streamrl.cli.log_output import log_to_stderr
from streamrl.cli.output import echo
from streamrl.runfile.escaping import visible

STDERR = 2
WRONG_INPUT = 2
FAILED = 1
ENDS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
    signal.SIGQUIT: "Ctrl-\\",
}
"""Signals that end a command, with what is printed. No core is dumped: it would hold prompts and keys."""
NO_ROOM_FOR_LIBRARY = ("failed to map segment", "annot allocate memory")
"""Texts of the dynamic linker, if the limit of memory leaves no room for a library."""
MOST_LINE_CHARS = 1000
"""Maximum characters of a line that quotes a file."""
MOST_NAME_CHARS = 80
"""Characters that are quoted of a file name that would fill the line."""
MOST_FURTHER = 19
"""Maximum lines about further errors of a run file."""

BEGIN = (
    "Begin with: streamrl plan --model Qwen/Qwen3-8B --gpus 16xH100@2.20\n"
    "`streamrl COMMAND --help` explains a command and gives an example."
)
"""Last lines of the help of `streamrl`."""


class Commands(LazyGroup):
    """All commands by task, in the order of their use."""

    panels: ClassVar[dict[str, CommandTable]] = {
        "Plan and simulate": {
            "examples": (
                "streamrl.cli.examples:examples",
                "List the example run files, or copy one.",
            ),
            "init": (
                "streamrl.cli.init:init",
                "Write a run file from a few answers.",
            ),
            "plan": (
                "streamrl.cli.plan:plan",
                "Choose GPUs, parallelism and system for a run, by cost or speed.",
            ),
            "simulate": (
                "streamrl.cli.simulate:simulate",
                "Predict time, cost and GPU idle time of a run.",
            ),
            "doctor": (
                "streamrl.cli.doctor:doctor",
                "Find the problems of a run file before it uses a GPU.",
            ),
            "explain": (
                "streamrl.cli.explain:explain",
                "Explain a key or a section of a run file.",
            ),
            "diff": (
                "streamrl.cli.diff:diff",
                "Show what differs between two plans, run files or executed runs.",
            ),
            "export": (
                "streamrl.cli.export:export",
                "Write launch arguments for verl, NeMo-RL, slime or OpenRLHF.",
            ),
        },
        "Run": {
            "execute": (
                "streamrl.cli.execute:execute",
                "Run the training of a run file, locally or on Ray.",
            ),
            "attach": (
                "streamrl.cli.attach:attach",
                "Add a trainer to a running job, or re-attach one.",
            ),
            "detach": (
                "streamrl.cli.attach:detach",
                "Save a trainer's checkpoint and remove it from a running job.",
            ),
            "notice": (
                "streamrl.cli.notice:notice",
                "Tell a running job that machines of replicas will be taken away.",
            ),
            "resize": (
                "streamrl.cli.resize:resize",
                "Add or remove ranks of the trainer of a running job.",
            ),
            "evaluate": (
                "streamrl.cli.evaluate:evaluate",
                "Score a run's checkpoint, or a model, on held-out prompts.",
            ),
            "checkpoint": (
                "streamrl.cli.checkpoint:checkpoint",
                "List the checkpoints of a run, or export one.",
            ),
        },
        "Look at results": {
            "report": (
                "streamrl.cli.report:report",
                "Write one HTML page about plans, runs and studies.",
            ),
            "compare": (
                "streamrl.cli.compare:compare",
                "Compare an executed run with its simulation.",
            ),
            "replay": (
                "streamrl.cli.replay:replay",
                "Check a finished run: repeat its decisions and account for each rollout.",
            ),
            "samples": (
                "streamrl.cli.samples:samples",
                "Print the prompts, completions and rewards that a run trained on.",
            ),
        },
        "Data, costs and accuracy": {
            "import": (
                "streamrl.cli.import_log:import_log",
                "Make a workload from a log, an executed run or recorded rollouts.",
            ),
            "lengths": (
                "streamrl.cli.lengths:lengths",
                "Show the statistics and a histogram of output lengths.",
            ),
            "model": (
                "streamrl.cli.model:model",
                "Show what a config.json or a profile says about a model.",
            ),
            "profile": (
                "streamrl.cli.profile:profile",
                "Measure a model on this machine, or show and check profiles.",
            ),
            "calibrate": (
                "streamrl.cli.calibrate:calibrate",
                "Fit predicted times to the measured steps of your own runs.",
            ),
            "diagnose": (
                "streamrl.cli.diagnose:diagnose",
                "Say whether a run is normal for its hardware.",
            ),
            "ranker": (
                "streamrl.cli.ranker:ranker",
                "Fit, use and test rankers that predict output lengths.",
            ),
            "validate": (
                "streamrl.cli.validate:validate",
                "Compare predictions with published measurements.",
            ),
        },
    }


app = typer.Typer(
    cls=Commands,
    help="Plan, simulate and run disaggregated RL post-training of LLMs.",
    epilog=BEGIN,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        echo(f"streamrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of `streamrl` itself."""


def main() -> None:
    """Run a command; print one line for each error of its input, or why it failed."""
    _fill_streams()
    if sys.stderr is None or _is_read_only(STDERR):  # print would write to standard output instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (open until this process ends)
    if sys.stdout is None:
        _say("standard output is closed; redirect it, such as with > /dev/null")
        sys.exit(WRONG_INPUT)
    try:
        Path.cwd()
    except OSError as error:
        _say(f"the working directory cannot be used: {error.strerror}; change to another one")
        sys.exit(WRONG_INPUT)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a character that the terminal cannot show is not an error
    try:
        with log_to_stderr(), end_by_signals(), UNTIL_END:
            app(prog_name="streamrl")
    except ValueError as error:
        if isinstance(error, OSError):  # `UnreadableError`
            _say(f"{error.filename}: {error.strerror}")
            sys.exit(WRONG_INPUT)
        for each in (error, *getattr(error, "further", ())[:MOST_FURTHER]):
            _say(each)
        sys.exit(WRONG_INPUT)
    except MemoryError:
        _say("the memory of this machine does not suffice for this input; use a smaller one")
        sys.exit(WRONG_INPUT)
    except RecursionError:
        _say("the input is nested too deeply")
        sys.exit(WRONG_INPUT)
    except ImportError as error:
        if not any(text in str(error) for text in NO_ROOM_FOR_LIBRARY):
            raise
        _say(f"{error}; raise the limit of memory (ulimit -v)")
        sys.exit(WRONG_INPUT)
    except RuntimeError as error:
        traceback = getattr(error, "traceback", "")  # of `ExtensionError`
        print(visible(traceback), end="", file=sys.stderr)
        _say(error)
        sys.exit(FAILED)
    except KeyboardInterrupt:  # after a command
        sys.exit(128 + signal.SIGINT)
    except OSError as error:  # such as a full disk, or a file that was deleted
        from streamrl.runfile.errors import system_remedy  # a list of commands needs no run files

        name = str(error.filename or "")
        name = name if len(name) <= MOST_LINE_CHARS // 2 else f"{name[:MOST_NAME_CHARS]}..."
        text = f"{name}: {error.strerror}" if name else str(error)
        _say(text + system_remedy(error))
        sys.exit(WRONG_INPUT if error.errno == errno.ENAMETOOLONG else FAILED)


@contextmanager
def end_by_signals() -> Iterator[None]:
    """Let the signals of `ENDS` end a command as Ctrl-C does, with one line and their own exit status.

    So a command removes its temporary files, and may say in a `KeyboardInterrupt` what it keeps. A second signal ends the
    process at once. A signal that this process was started to ignore, as with nohup, stays ignored.
    """
    received: list[signal.Signals] = []

    def obey(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for each in obeyed:
            signal.signal(each, signal.SIG_DFL)
        interrupt = signal.getsignal(
            signal.SIGINT
        )  # such as that of asyncio, which cancels its task
        (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    is_main = threading.current_thread() is threading.main_thread()
    obeyed = [each for each in ENDS if is_main and signal.getsignal(each) == signal.SIG_DFL]
    for each in obeyed:
        signal.signal(each, obey)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        interrupt = _interrupt_of(error)
        if not received and interrupt is None:
            raise
        number = received[0] if received else signal.SIGINT
        with suppress(OSError):  # the terminal was closed
            _say(": ".join(filter(None, (ENDS[number], str(interrupt or "")))))
        sys.exit(128 + number)
    finally:
        for each in obeyed:
            signal.signal(each, signal.SIG_DFL)


def _interrupt_of(error: KeyboardInterrupt | SystemExit) -> KeyboardInterrupt | None:
    """Return the interrupt that ended a command; typer makes an exit of it."""
    cause = getattr(error.__context__, "__cause__", None)
    found = error if isinstance(error, KeyboardInterrupt) else cause
    return found if isinstance(found, KeyboardInterrupt) else None


def _fill_streams() -> None:
    """Open /dev/null for standard streams that the caller closed, so that no file of a command gets their numbers."""
    for stream in range(STDERR + 1):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _is_read_only(descriptor: int) -> bool:
    """Return whether a descriptor is only read: that of a stream that the caller closed may be a shell's script."""
    return fcntl(descriptor, F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def _say(error: Exception | str) -> None:
    text = " ".join(str(error).split())
    shown = text if len(text) <= MOST_LINE_CHARS else f"{text[:MOST_LINE_CHARS]}..."
    print(visible(f"streamrl: {shown}"), file=sys.stderr)
