"""Record the steps and checkpoints of secondary trainers in the run directory.

followers/1-NAME/        of the first trainer that follows, and so on
    metrics.jsonl        a line for each of its steps, and for each time that steps were taken back
    checkpoints/         see `streamrl.executor.checkpoints`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from streamrl.engine.trace import LineFile, open_at_end
from streamrl.executor.checkpoints import Checkpoint, Checkpoints, TrainerRecord
from streamrl.executor.directory_lock import replace_file
from streamrl.record.run_directory import METRICS, ROLLED_BACK_TO, RUN, secondary_trainer_directory
from streamrl.record.samples import SampledGroup
from streamrl.runfile.config import Run
from streamrl.runfile.files import encode_run


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


class SecondaryRecords:
    """Owns the records of all secondary trainers of a run, in the order of their numbers."""

    def __init__(self, names: tuple[str, ...], path: Path) -> None:
        """Name the records of the trainers that the run file has; `path` is the run's directory."""
        self.path = path
        self.all = _records_of(names, path)
        self._leg = 1

    def check(self) -> None:
        """Check that each trainer can resume.

        Raises:
            ValueError: every checkpoint of a trainer is damaged.
        """
        for record in self.all:
            record.checkpoints.newest_whole()

    def open(self, leg: int, *, is_resumed: bool) -> list[str]:
        """Make or reopen all directories; return the damaged checkpoints that a resume passes over.

        Raises:
            ValueError: every checkpoint of a trainer is damaged.
        """
        self._leg = leg
        return [
            f"{record.path.name}: {damage}"
            for record in self.all
            for damage in record.open(leg, is_resumed=is_resumed)
        ]

    def join(self, run: Run) -> SecondaryTrainerRecord:
        """Open the record of the last trainer of a run, which joins the others."""
        record = _records_of(run.secondary_trainer_names, self.path)[-1]
        record.open(self._leg, is_resumed=False)
        self.all.append(record)
        replace_file(self.path / RUN, encode_run(run))
        return record

    def close(self) -> None:
        """Close the files of all records."""
        for record in self.all:
            record.close()


def _records_of(names: tuple[str, ...], path: Path) -> list[SecondaryTrainerRecord]:
    return [
        SecondaryTrainerRecord(secondary_trainer_directory(path, number, name))
        for number, name in enumerate(names, start=1)
    ]
