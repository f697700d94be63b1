"""Show a run while it is running: TensorBoard, Weights & Biases, and a live Chrome trace.

Where else a step's figures go beside metrics.jsonl: TensorBoard, Weights & Biases, as far as a run file asks.

None of them can hurt a run: the first that fails says so, and is asked no more.

The Chrome trace of a run while it goes on, in an array that has no end until the run has one.

A run that is killed leaves what ui.perfetto.dev opens: the format lets the closing bracket be missing. It lacks the last
seconds, and where full batches are not known beforehand (`costs.profile`) the counter of underfilled GPUs. It cannot
hurt a run: what fails is said once, and no more is written.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, assert_never

import msgspec

from streamrl.engine.trace import DecodeYield, Entry
from streamrl.record.chrome_trace import CHROME_TRACE, ChromeReader, TraceEvent
from streamrl.runfile.config import Run, TrackerName

logger = logging.getLogger(__name__)

MODULES: dict[TrackerName, tuple[str, ...]] = {"tensorboard": ("tensorboard",), "wandb": ("wandb",)}
"""What each needs; the extra of this package has its name."""
PROJECT = "streamrl"
"""Of Weights & Biases, unless WANDB_PROJECT says another."""


class Tracker(Protocol):
    """Takes the figures of each step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take a step's figures; steps that are made again come again."""

    def close(self) -> None:
        """Take no more."""


class Trackers:
    """Those that a run asks for."""

    def __init__(self, names: Sequence[TrackerName], directory: Path) -> None:
        """Open each in the run's directory."""
        self._open: dict[TrackerName, Tracker] = {}
        for name in names:
            self._try(name, partial(self._add, name, directory))

    def write(self, step: int, figures: Mapping[str, object]) -> None:
        """Give a step's numbers to each."""
        numbers = {
            key: float(value)
            for key, value in figures.items()
            if isinstance(value, int | float) and key != "step"
        }
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.write, step, numbers))

    def close(self) -> None:
        """Close each."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _add(self, name: TrackerName, directory: Path) -> None:
        self._open[name] = open_tracker(name, directory)

    def _try(self, name: TrackerName, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._open.pop(name, None)
            what = (
                f"execute.trackers: {name} takes no more figures: {type(error).__name__}: {error}"
            )
            logger.warning(what)


def open_tracker(name: TrackerName, directory: Path) -> Tracker:
    """Open a tracker for the run in `directory`; only its own libraries are imported."""
    match name:
        case "tensorboard":
            return TensorBoard(directory)
        case "wandb":
            return WeightsAndBiases(directory)
        case _:
            assert_never(name)


class TensorBoard:
    """Event files beside the run: `tensorboard --logdir RUN`."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._writer = writer(str(directory / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a point to each figure's curve."""
        for key, value in figures.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, the same one after a resume; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, directory: Path) -> None:
        import wandb

        name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=directory.name,
            id=name,
            resume="allow",
            dir=str(directory),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log a step's figures, against a step of our own: W&B's only rises, and a lost trainer goes back."""
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


MOST_ENTRIES = 500
"""Of a block; each block looks at all that is under way."""
LONGEST = 5.0
"""Seconds of a block, and so about what a run that is killed lacks."""
SEPARATOR = b",\n"


class LiveTrace:
    """Writes events block by block; what is under way is kept."""

    def __init__(self, directory: Path, run: Run, decode: Sequence[DecodeYield]) -> None:
        """Begin the file anew in a run's directory."""
        self._path = directory / CHROME_TRACE
        self._reader = ChromeReader(run, decode)
        self._block: list[Entry] = []
        self._is_open = True
        self._try(self._begin)

    def take(self, entry: Entry) -> None:
        """Take what has happened, and write what is known by now once a block is full."""
        if not self._is_open:
            return
        self._block.append(entry)
        if len(self._block) >= MOST_ENTRIES or entry.time >= self._block[0].time + LONGEST:
            self._try(self._write_block)

    def close(self) -> None:
        """Write what is left, and the end."""
        if self._is_open:
            self._try(self._end)
            self._is_open = False

    def _begin(self) -> None:
        self._path.write_bytes(b"[\n" + _encode(self._reader.names()))

    def _write_block(self) -> None:
        block, self._block = self._block, []
        self._add([*self._reader.read(block), *self._reader.settle()])

    def _end(self) -> None:
        self._add([*self._reader.read(self._block), *self._reader.finish()], end=b"\n]\n")

    def _add(self, events: Sequence[TraceEvent], end: bytes = b"") -> None:
        """Write on; a file that is opened anew for each block holds what it says, whatever becomes of this process."""
        with self._path.open("ab") as file:
            file.write((SEPARATOR if events else b"") + _encode(events) + end)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._is_open = False
            self._block.clear()
            what = f"{self._path} is no longer written: {type(error).__name__}: {error}"
            logger.warning(what)


def _encode(events: Iterable[TraceEvent]) -> bytes:
    return SEPARATOR.join(map(_ENCODER.encode, events))


_ENCODER = msgspec.json.Encoder()
