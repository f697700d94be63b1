"""Predict a plan's step, days and dollars with another folder of profiles, in a process of its own.

A process reads its profiles once. So the prediction runs as `python -m streamrl.sim.acceptance.outlook`, which reads a
question from standard input and writes an `Outlook` to standard output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.record.band import Band
from streamrl.runfile.files import load_run
from streamrl.runfile.profile_folder import VARIABLE
from streamrl.sim.acceptance.result import Outlook
from streamrl.sim.costs.costs import Costs
from streamrl.sim.steady_state import measure_steady


class DecodePoint(msgspec.Struct, frozen=True):
    """A decode step of `running` rollouts with `context` tokens each."""

    running: int
    context: float


class _Question(msgspec.Struct, frozen=True):
    run_file: str
    settings: list[str]
    decode: DecodePoint | None


def find_outlook(
    run_file: Path,
    settings: Sequence[str] = (),
    decode: DecodePoint | None = None,
    profiles: Path | None = None,
) -> Outlook:
    """Return the outlook of a run file.

    Args:
        run_file: the plan.
        settings: as for `--set`.
        decode: a decode step to predict too.
        profiles: the folder of profiles; those in use if None.

    Raises:
        ValueError: the run file is wrong.
        RuntimeError: the simulation failed.
    """
    question = _Question(str(run_file), list(settings), decode)
    named = {} if profiles is None else {VARIABLE: str(profiles)}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=msgspec.json.encode(question),
        env={**os.environ, **named},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        kind = ValueError if done.returncode == WRONG_INPUT else RuntimeError
        raise kind(lines[-1])
    return msgspec.json.decode(done.stdout, type=Outlook)


WRONG_INPUT = 2


def _answer(question: _Question) -> Outlook:
    run = load_run(Path(question.run_file), question.settings)
    metrics = measure_steady(run)
    whole, point = metrics.whole_run, question.decode
    assert whole is not None, "a simulation has one"
    decode = None
    if point is not None:
        decode = Costs.load(run).decode.step_time(point.running, point.running * point.context)
    return Outlook(
        step_time=metrics.step_time,
        step_band=metrics.step_time_band or _point(metrics.step_time),
        seconds=whole.seconds,
        seconds_band=whole.seconds_band or _point(whole.seconds),
        dollars=whole.dollars,
        dollars_band=whole.dollars_band or _point(whole.dollars),
        decode_time=decode,
    )


def _point(value: float) -> Band:
    return Band(low=value, high=value)


def _main() -> None:
    try:
        answer = _answer(msgspec.json.decode(sys.stdin.buffer.read(), type=_Question))
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(WRONG_INPUT)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main()
