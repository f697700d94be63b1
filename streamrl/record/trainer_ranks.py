"""Follow the data-parallel ranks whose GPUs the primary trainer has: while they change, those of the larger size."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.engine.messages import ResizeTrainer, StartTrainer, TrainerResized
from streamrl.engine.trainer_side import LEADER
from streamrl.record.message_reader import Handlers, MessageReader


class RankReader(MessageReader):
    """Reads how many data-parallel ranks the primary trainer has GPUs for, from each instant on."""

    def __init__(self, data_parallel: int) -> None:
        """Begin with the ranks of the run file."""
        self._started = data_parallel
        self.since = [0.0]
        """Instants in seconds."""
        self.ranks = [data_parallel]
        """Ranks from each of these instants on."""
        self.changes: list[tuple[float, float, int]] = []
        """Begin and end of each change, in seconds, and the ranks after it."""
        self._begun_at = 0.0

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that changes the ranks."""
        yield {StartTrainer: self._start, ResizeTrainer: self._grow, TrainerResized: self._set}

    def _start(self, command: StartTrainer, time: float) -> None:
        if command.trainer == LEADER:
            self._enter(command.data_parallel or self._started, time)

    def _grow(self, command: ResizeTrainer, time: float) -> None:
        """Count ranks that are added as soon as they start."""
        if command.trainer == LEADER:
            self._begun_at = time
            self._enter(max(command.data_parallel, self.ranks[-1]), time)

    def _set(self, event: TrainerResized, time: float) -> None:
        if event.trainer == LEADER:
            self.changes.append((self._begun_at, time, event.data_parallel))
            self._enter(event.data_parallel, time)

    def _enter(self, ranks: int, time: float) -> None:
        if ranks != self.ranks[-1]:
            self.since.append(time)
            self.ranks.append(ranks)
