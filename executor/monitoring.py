"""Show a run while it is running: TensorBoard, Weights & Biases, MLflow, and a live Chrome trace.

`Trackers` send the figures of each step to the trackers of `execute.trackers`. `LiveTrace` writes the Chrome trace
incrementally, and closes its array when the run ends. None of them can stop a run: after an error, a tracker or the
trace is closed with one warning.

ui.perfetto.dev also opens the trace of a killed run, because the format allows the closing bracket to be missing. Such a
trace lacks the last seconds. Without `costs.profile` it also lacks the counter of underfilled GPUs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, assert_never

import msgspec

from streamrl.engine.trace import Entry
from streamrl.record.chrome_trace import CHROME_TRACE, ChromeReader, TraceEvent
from streamrl.runfile.config import TrackerName

logger = logging.getLogger(__name__)

MODULES: dict[TrackerName, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Modules that each tracker needs. The extra of this package has the tracker's name."""
PROJECT = "streamrl"
"""Default project in Weights & Biases and experiment in MLflow; WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME override it."""


class Tracker(Protocol):
    """Receives the figures of each step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Record a step's figures; after a roll-back, the same step comes again."""

    def close(self) -> None:
        """Close the tracker."""


class Trackers:
    """The open trackers of a run."""

    def __init__(self, names: Sequence[TrackerName], directory: Path) -> None:
        """Open each in the run's directory."""
        self._open: dict[TrackerName, Tracker] = {}
        for name in names:
            self._try(name, partial(self._add, name, directory))

    def write(self, step: int, figures: Mapping[str, object]) -> None:
        """Send the numbers of a step to each tracker."""
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
        case "mlflow":
            return Mlflow(directory)
        case _:
            assert_never(name)


class TensorBoard:
    """Writes event files to the run directory; view them with `tensorboard --logdir RUN`."""

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
    """Logs to one run of Weights & Biases, also after a resume; `WANDB_MODE=offline` sends nothing."""

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
        """Log a step's figures with our own step metric, because W&B's step cannot go back after a roll-back."""
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


MLFLOW_RUN = "mlflow-run"
"""File in a run directory with the id of its run in MLflow."""


class Mlflow:
    """Logs to one run of MLflow, also after a resume."""

    def __init__(self, directory: Path) -> None:
        from mlflow import MlflowClient

        store = (
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.resolve()}/mlflow.db"
        )
        self._client: Any = MlflowClient(store)
        self._run = self._find_run(directory, directory / MLFLOW_RUN)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a point to each figure's curve; characters that MLflow refuses in a name become `_`."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [
            Metric(_NOT_MLFLOW.sub("_", key), each, now, step) for key, each in figures.items()
        ]
        self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)

    def _find_run(self, directory: Path, note: Path) -> str:
        """Return the id of the run that the directory had before, or of a new one."""
        if note.is_file():
            run = note.read_text(encoding="utf-8").strip()
            self._client.update_run(run, status="RUNNING")
            return run
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        made: str = self._client.create_run(experiment, run_name=directory.name).info.run_id
        note.write_text(made, encoding="utf-8")
        return made


_NOT_MLFLOW = re.compile(r"[^\w\-. /:]")
"""Characters that names of MLflow's metrics may not have (mlflow 3, utils/validation.py)."""

MOST_ENTRIES = 500
"""Maximum entries of a block. Each block costs a pass over everything that is running."""
LONGEST = 5.0
"""Maximum seconds of a block; a killed run lacks about as much."""
SEPARATOR = b",\n"


class LiveTrace:
    """Writes events of the Chrome trace in blocks, and keeps the state of spans that have not ended."""

    def __init__(self, directory: Path, reader: ChromeReader) -> None:
        """Take a run directory, whose file is created or overwritten at the first entry."""
        self._path = directory / CHROME_TRACE
        self._reader = reader
        self._block: list[Entry] = []
        self._is_open = True
        self._has_begun = False

    def take(self, entry: Entry) -> None:
        """Add an entry, and write the block if it is full."""
        if not self._has_begun:
            self._has_begun = True
            self._try(self._begin)
        if not self._is_open:
            return
        self._block.append(entry)
        if len(self._block) >= MOST_ENTRIES or entry.time >= self._block[0].time + LONGEST:
            self._try(self._write_block)

    def close(self) -> None:
        """Write the remaining entries and close the array."""
        if self._is_open and self._has_begun:
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
        """Append to the file; it is opened for each block, so a block is complete even if this process dies."""
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
