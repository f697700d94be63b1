"""What a trainer leaves on disk beside the trace: its steps, its checkpoints, and of the one that leads what people read.

followers/1-NAME/        of the first trainer that follows, and so on
    metrics.jsonl        a line for each of its steps, and for each time that steps were taken back
    checkpoints/         see `streamrl.executor.checkpoints`
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from streamrl.engine.trace import LineFile, open_at_end
from streamrl.executor.checkpoints import Checkpoint, Checkpoints
from streamrl.record.run_directory import METRICS, ROLLED_BACK_TO, secondary_trainer_directory
from streamrl.record.samples import SampledGroup
from streamrl.runfile.config import Run


class TrainerRecord(ABC):
    """Where a trainer writes down its steps and its checkpoints."""

    checkpoints: Checkpoints

    @abstractmethod
    def write_step(self, figures: Mapping[str, object]) -> None:
        """Add a line to metrics.jsonl."""

    @abstractmethod
    def write_samples(self, make: Callable[[], SampledGroup | Mapping[str, object]]) -> None:
        """Write down what a step was trained on, where anybody wants to read it."""

    def roll_back(self, time: float) -> None:
        """Add a line to metrics.jsonl: the steps after the newest checkpoint are taken back, and will be made again."""
        saved = self.checkpoints.newest()
        self.write_step({ROLLED_BACK_TO: saved.version if saved else 0, "time": time})


class SecondaryTrainerRecord(TrainerRecord):
    """Owns the files of a trainer that follows; what it was trained on others wrote down already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.resumed_from: Checkpoint | None = None
        self._metrics: LineFile | None = None
        """None before it is opened."""

    def open(self, leg: int, *, is_resumed: bool) -> list[str]:
        """Make or reopen the directory; return what is wrong with checkpoints that a resume passes over.

        Raises:
            ValueError: every checkpoint is damaged.
        """
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._metrics = open_at_end(self.path / METRICS)
        if not is_resumed:
            return []
        self.resumed_from = self.checkpoints.newest_whole()
        damaged = self.checkpoints.resume_from(self.resumed_from)
        version = 0 if self.resumed_from is None else self.resumed_from.version
        self.write_step({ROLLED_BACK_TO: version, "leg": leg})
        return damaged

    def write_step(self, figures: Mapping[str, object]) -> None:
        """Add a line to metrics.jsonl."""
        assert self._metrics is not None, "call open first"
        self._metrics.write(json.dumps(figures).encode() + b"\n")

    def write_samples(self, make: Callable[[], SampledGroup | Mapping[str, object]]) -> None:
        """Write nothing: the trainer that leads has the same rollouts."""

    def close(self) -> None:
        """Close its file, if it was ever opened."""
        if self._metrics is not None:
            self._metrics.close()


def secondary_records(run: Run, path: Path) -> list[SecondaryTrainerRecord]:
    """Return the records of the trainers that follow, in order, in a run's directory."""
    names = enumerate(run.secondary_trainer_names, start=1)
    return [
        SecondaryTrainerRecord(secondary_trainer_directory(path, number, name))
        for number, name in names
    ]
