"""Record the steps and checkpoints of secondary trainers in the run directory.

| path in the run directory         | content                                                            |
|-----------------------------------|--------------------------------------------------------------------|
| `followers/1-NAME/metrics.jsonl`  | a line for each step of the first secondary trainer, and for each roll-back |
| `followers/1-NAME/checkpoints/`   | see `streamrl.executor.checkpoints`                                |

Each further secondary trainer has its own directory, such as `followers/2-NAME/`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from streamrl.engine.trace import LineFile, open_at_end
from streamrl.executor.checkpoints import Checkpoint, Checkpoints, TrainerRecord, check_position
from streamrl.record.restarts import RecordedStarts
from streamrl.record.run_directory import METRICS, ROLLED_BACK_TO, secondary_trainer_directory
from streamrl.record.samples import SampledGroup

logger = logging.getLogger(__name__)


class SecondaryTrainerRecord(TrainerRecord):
    """Owns the files of a secondary trainer; the primary trainer's record has the rollouts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.resumed_from: Checkpoint | None = None
        self._metrics: LineFile | None = None
        """None until `begin` is called."""

    def find_checkpoint(self) -> None:
        """Find the checkpoint from which the trainer resumes; write nothing.

        Raises:
            ValueError: every checkpoint is damaged.
        """
        self.resumed_from = self.checkpoints.newest_whole()

    def begin(self, leg: int, *, is_resumed: bool) -> None:
        """Create or reopen the files; a resume sets newer checkpoints aside."""
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._metrics = open_at_end(self.path / METRICS)
        if not is_resumed:
            return
        for damage in self.checkpoints.resume_from(self.resumed_from):
            logger.warning(f"a damaged checkpoint is skipped: {self.path.name}: {damage}")
        version = 0 if self.resumed_from is None else self.resumed_from.version
        self.write_step({ROLLED_BACK_TO: version, "leg": leg})

    def write_step(self, figures: Mapping[str, object]) -> None:
        """Add a line to metrics.jsonl."""
        assert self._metrics is not None, "call begin first"
        self._metrics.write(json.dumps(figures).encode() + b"\n")

    def write_samples(self, make: Callable[[], SampledGroup | Mapping[str, object]]) -> None:
        """Write nothing: the primary trainer's record has the same rollouts."""

    def close(self) -> None:
        """Close its file, if it is open."""
        if self._metrics is not None:
            self._metrics.close()


class SecondaryRecords:
    """Owns the records of all secondary trainers of a run, in the order of their numbers."""

    def __init__(self, names: tuple[str, ...], path: Path) -> None:
        """Create a record for each secondary trainer of the run file; `path` is the run directory."""
        self.path = path
        self.all = [
            SecondaryTrainerRecord(secondary_trainer_directory(path, number, name))
            for number, name in enumerate(names, start=1)
        ]
        self._leg, self._is_resumed = 1, False

    def check(self, recorded: RecordedStarts | None = None) -> None:
        """Check that each trainer can resume, also from what the traces of the run recorded.

        Raises:
            ValueError: every checkpoint of a trainer is damaged, or the newest is of another position than its trace says.
        """
        for number, record in enumerate(self.all, start=1):
            checkpoint = record.checkpoints.newest_whole()
            if checkpoint is None or recorded is None:
                continue
            saved = recorded.saved.get((number, checkpoint.version))
            if saved is not None:
                check_position(checkpoint, saved)

    def open(self, leg: int, *, is_resumed: bool) -> None:
        """Find the checkpoints from which trainers resume; write nothing.

        Args:
            leg: number of this start of the run.
            is_resumed: whether it continues an earlier one.

        Raises:
            ValueError: every checkpoint of a trainer is damaged.
        """
        self._leg, self._is_resumed = leg, is_resumed
        for record in self.all if is_resumed else ():
            record.find_checkpoint()

    def begin(self) -> None:
        """Create or reopen the files of all trainers."""
        for record in self.all:
            record.begin(self._leg, is_resumed=self._is_resumed)

    def join(self, name: str) -> SecondaryTrainerRecord:
        """Create the record of one more trainer, which has just been attached."""
        number = 1 + len(self.all)
        record = SecondaryTrainerRecord(secondary_trainer_directory(self.path, number, name))
        record.begin(self._leg, is_resumed=False)
        self.all.append(record)
        return record

    def close(self) -> None:
        """Close the files of all records."""
        for record in self.all:
            record.close()
