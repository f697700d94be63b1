"""Find the newest undamaged checkpoint of a run, and remove old checkpoints.

A checkpoint is a directory such as checkpoints/v000050. It has the weights, the optimizer state and their checksums.
position.json is written last. It has the run's position in its prompts. Without it the checkpoint is incomplete.
"""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamrl.engine.messages import SaveCheckpoint
from streamrl.executor.checksums import find_damage
from streamrl.record.run_directory import ROLLED_BACK_TO
from streamrl.record.samples import SampledGroup
from streamrl.runfile.formatting import listing
from streamrl.runfile.recorded_numbers import Count, GroupNumber, Number

KEPT_CHECKPOINTS = 2  # a crash may have damaged the newest one
POSITION = "position.json"
CHECKPOINT = re.compile(r"v[0-9]{6,}")
"""Names of checkpoints."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run in its prompts."""

    version: Count
    groups_done: GroupNumber
    """All groups before this one, in draw order, are trained on or dropped."""
    done_ahead: tuple[GroupNumber, ...] = ()
    """Later groups that are trained on or dropped."""
    baseline: Number = 0.0
    """Mean reward of the batch that created `version`; the baseline of `reinforce++`."""

    def as_saved(self, trainer: int) -> SaveCheckpoint:
        """Return the command that saves a trainer's checkpoint at this position."""
        return SaveCheckpoint(self.version, self.groups_done, trainer, self.done_ahead)


class Checkpoint(NamedTuple):
    """A checkpoint from which a run can resume."""

    path: Path
    position: Position

    @property
    def version(self) -> int:
        """Its policy version."""
        return self.position.version


class Retention(NamedTuple):
    """Which checkpoints are kept."""

    last: int = KEPT_CHECKPOINTS
    """Newest ones."""
    best: int = 0
    """Ones with the best score."""
    scores: Callable[[], Mapping[int, float]] = dict
    """Returns the score of each evaluated version; a higher one is better."""
    awaits_score: Callable[[int], bool] = lambda version: False
    """Whether a version is evaluated. It is kept until it has its score."""

    def kept(self, versions: Sequence[int]) -> set[int]:
        """Return which of these versions, in ascending order, are kept."""
        found = {*versions[-self.last :]}
        if self.best:
            scores = self.scores()
            scored = sorted(
                (v for v in versions if v in scores), key=lambda v: (scores[v], v), reverse=True
            )
            found.update(scored[: self.best])
            found.update(v for v in versions if self.awaits_score(v) and v not in scores)
        return found


class Checkpoints:
    """Owns the directory of a run's checkpoints."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.retention = Retention()
        self._damage: dict[Path, str] = {}
        """Fault of each checkpoint that was read completely, which is slow; an empty text means undamaged."""
        self._resumed_from: Path | None = None

    def path_of(self, version: int) -> Path:
        """Return the directory of one checkpoint."""
        return self._path / f"v{version:06d}"

    def read(self, version: int) -> Checkpoint:
        """Return a complete checkpoint."""
        return Checkpoint(self.path_of(version), _read_position(self.path_of(version)))

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint whose files have the right sizes, or None."""
        for path in self._complete():
            with suppress(ValueError):  # try an older one
                if is_whole(path):
                    return Checkpoint(path, _read_position(path))
        return None

    def newest_whole(self) -> Checkpoint | None:
        """Return the newest checkpoint with correct checksums, or None if no checkpoint is complete.

        Raises:
            ValueError: all are damaged; then the user must decide.
        """
        complete = self._complete()
        for path in complete:
            if not self._find_damage(path):
                return Checkpoint(path, _read_position(path))
        if complete:
            damage = "; ".join(f"{path.name}: {self._damage[path]}" for path in complete)
            raise ValueError(f"{self._path}: every checkpoint is damaged: {damage}")
        return None

    def resume_from(self, checkpoint: Checkpoint | None) -> list[str]:
        """Rename or remove all checkpoints that are newer than `checkpoint`; return the faults of the renamed ones.

        `checkpoint` is kept for the whole run, because replicas that start before the next push load it.
        """
        self._resumed_from = None if checkpoint is None else checkpoint.path
        damaged = []
        for path in self._all():
            if checkpoint is not None and _version_of(path) <= checkpoint.version:
                continue
            if not (path / POSITION).exists():
                _remove(path)  # never completed
                continue
            damaged.append(f"{path.name}: {self._find_damage(path)}")
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        return damaged

    def finish(self, position: Position) -> None:
        """Mark a checkpoint as complete, and remove old ones."""
        path = self.path_of(position.version) / POSITION
        path.with_suffix(".tmp").write_bytes(msgspec.json.encode(position))
        path.with_suffix(".tmp").rename(path)
        self.remove_old()

    def remove_old(self) -> None:
        """Remove checkpoints that are not kept, and incomplete ones before the newest that are kept."""
        kept = {self.path_of(version) for version in self.retention.kept(self.versions())}
        newest = self._all()[-KEPT_CHECKPOINTS:]
        for old in self._all():
            if old not in kept and old not in newest and old != self._resumed_from:
                _remove(old)

    def versions(self) -> list[int]:
        """Return the versions of complete checkpoints, in ascending order."""
        return [_version_of(path) for path in reversed(self._complete())]

    def _all(self) -> list[Path]:
        """Return all checkpoints, oldest first. Other files and directories there are the user's."""
        found = self._path.glob("v*")
        return sorted(
            (path for path in found if CHECKPOINT.fullmatch(path.name) and path.is_dir()),
            key=_version_of,
        )

    def _complete(self) -> list[Path]:
        return [path for path in reversed(self._all()) if (path / POSITION).is_file()]

    def _find_damage(self, path: Path) -> str:
        if path not in self._damage:
            try:
                _read_position(path)
                damage = find_damage(path, reads_all=True)
            except ValueError as error:
                damage = str(error)
            self._damage[path] = damage
        return self._damage[path]


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint is complete and its files have the right sizes; their bytes are not read."""
    return (path / POSITION).is_file() and not find_damage(path, reads_all=False)


def _remove(path: Path) -> None:
    """Remove a checkpoint; of one that was moved elsewhere only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _version_of(path: Path) -> int:
    return int(path.name.removeprefix("v"))


def _read_position(path: Path) -> Position:
    """Read the position of a checkpoint.

    Raises:
        ValueError: it cannot be read, or belongs to another version.
    """
    try:
        position = msgspec.json.decode((path / POSITION).read_bytes(), type=Position)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{POSITION}: {error}") from None
    if path.name != f"v{position.version:06d}":
        raise ValueError(f"{POSITION} is of version {position.version}")
    return position


def check_position(checkpoint: Checkpoint, saved: set[int]) -> None:
    """Raise `ValueError` if a checkpoint continues from another group than the trace saved it at."""
    found = checkpoint.position.groups_done
    if found not in saved:
        known = listing([str(each) for each in sorted(saved)])
        raise ValueError(
            f"{checkpoint.path / POSITION}: groups_done is {found}, but the trace saved step {checkpoint.version} at "
            f"group {known}; restore the file, or remove {checkpoint.path} to resume from an older checkpoint"
        )


class TrainerRecord(ABC):
    """The metrics and checkpoints of one trainer."""

    checkpoints: Checkpoints

    @abstractmethod
    def write_step(self, figures: Mapping[str, object]) -> None:
        """Add a line to metrics.jsonl."""

    @abstractmethod
    def write_samples(self, make: Callable[[], SampledGroup | Mapping[str, object]]) -> None:
        """Record samples of a step, if this record keeps samples."""

    def roll_back(self, time: float) -> None:
        """Add a line to metrics.jsonl: steps after the newest checkpoint are discarded, and will be repeated."""
        saved = self.checkpoints.newest()
        self.write_step({ROLLED_BACK_TO: saved.version if saved else 0, "time": time})
