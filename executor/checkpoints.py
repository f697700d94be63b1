"""The checkpoints of a run: which is the newest that is whole, and which are kept.

checkpoints/v000050/     weights, optimizer, checksums of all of them, and at last position.json: where in the prompts
                         the run was; without that a checkpoint is not complete
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from streamrl.engine.messages import SaveCheckpoint
from streamrl.executor.checksums import find_damage
from streamrl.record.run_directory import ROLLED_BACK_TO
from streamrl.record.samples import SampledGroup

KEPT_CHECKPOINTS = 2  # the newest may be the one that a crash left useless
POSITION = "position.json"

Count = Annotated[int, msgspec.Meta(ge=0)]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where in its prompts a run was."""

    version: Count
    groups_done: Count
    """Groups before this one, in draw order, are trained or dropped."""
    done_ahead: tuple[Count, ...] = ()
    """Later ones that are too."""
    baseline: float = 0.0
    """Mean reward of the batch that made `version`, which `reinforce++` goes by."""

    def as_saved(self, trainer: int) -> SaveCheckpoint:
        """Return the command that wrote it down for a trainer."""
        return SaveCheckpoint(self.version, self.groups_done, trainer, self.done_ahead)


class Checkpoint(NamedTuple):
    """Where a run can resume."""

    path: Path
    position: Position

    @property
    def version(self) -> int:
        """The policy version that it is of."""
        return self.position.version


class Checkpoints:
    """Owns the directory of a run's checkpoints."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damage: dict[Path, str] = {}
        """What was found by reading every byte, which takes long; empty of those that are whole."""
        self._resumed_from: Path | None = None

    def path_of(self, version: int) -> Path:
        """Return the directory of one checkpoint."""
        return self._path / f"v{version:06d}"

    def read(self, version: int) -> Checkpoint:
        """Return a complete checkpoint."""
        return Checkpoint(self.path_of(version), _read_position(self.path_of(version)))

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint whose files have their sizes, None where there is none."""
        for path in self._complete():
            try:
                if not find_damage(path, reads_all=False):
                    return Checkpoint(path, _read_position(path))
            except ValueError:
                pass  # an older one may do
        return None

    def newest_whole(self) -> Checkpoint | None:
        """Return the newest checkpoint that is as it was written, None where none was ever completed.

        Raises:
            ValueError: all are damaged, which is for a person to decide about.
        """
        complete = self._complete()
        for path in complete:
            if not self._find_damage(path):
                return Checkpoint(path, _read_position(path))
        if complete:
            found = "; ".join(f"{path.name}: {self._damage[path]}" for path in complete)
            raise ValueError(f"{self._path}: every checkpoint is damaged: {found}")
        return None

    def resume_from(self, checkpoint: Checkpoint | None) -> list[str]:
        """Put what is newer than a checkpoint aside, and keep that one; return what is wrong with the others.

        Replicas that start later load it, whatever is saved meanwhile.
        """
        self._resumed_from = None if checkpoint is None else checkpoint.path
        damaged = []
        for path in self._all():
            if checkpoint is not None and path.name <= checkpoint.path.name:
                continue
            if not (path / POSITION).exists():
                shutil.rmtree(path)  # never completed
                continue
            damaged.append(f"{path.name}: {self._find_damage(path)}")
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        return damaged

    def finish(self, position: Position) -> None:
        """Mark a checkpoint complete, and remove those that are not kept."""
        path = self.path_of(position.version) / POSITION
        path.with_suffix(".tmp").write_bytes(msgspec.json.encode(position))
        path.with_suffix(".tmp").rename(path)
        for old in self._all()[:-KEPT_CHECKPOINTS]:
            if old != self._resumed_from:
                shutil.rmtree(old)

    def _all(self) -> list[Path]:
        return sorted(self._path.glob("v*"))

    def _complete(self) -> list[Path]:
        return [path for path in reversed(self._all()) if (path / POSITION).exists()]

    def _find_damage(self, path: Path) -> str:
        if path not in self._damage:
            try:
                _read_position(path)
                damage = find_damage(path, reads_all=True)
            except ValueError as error:
                damage = str(error)
            self._damage[path] = damage
        return self._damage[path]


def _read_position(path: Path) -> Position:
    """Read where a checkpoint is.

    Raises:
        ValueError: it cannot be read, or is another's.
    """
    try:
        position = msgspec.json.decode((path / POSITION).read_bytes(), type=Position)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{POSITION}: {error}") from None
    if path.name != f"v{position.version:06d}":
        raise ValueError(f"{POSITION} is of version {position.version}")
    return position


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
