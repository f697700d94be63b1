"""How long the last step took each side, so that a policy can tell which of the two is the slower."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.engine.fleet import Fleet


class StepPace(NamedTuple):
    """What one step took, in seconds."""

    step: int
    generation_time: float
    """From its first `Generate`, or the last `Generated` of the step before where that is later, to its last
    `Generated`: where steps overlap, generation works for the older one until that is done."""
    training_time: float
    """While the trainer had any of its work in hand."""
    num_replicas: int
    """Replicas that served when its generation began."""

    @property
    def lag(self) -> float:
        """Seconds by which generation is the slower side; below 0 where training is."""
        return self.generation_time - self.training_time


@dataclass(slots=True)
class Pace:
    """What the last step took that has been generated and trained on since the run began, or was resumed."""

    last: StepPace | None = None
    _newest: int = 0
    """Newest step of which a rollout was sent."""
    _begun: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By step: instant of its first `Generate`, and replicas that served then."""
    _ended_at: dict[int, float] = field(default_factory=dict)
    """By step: instant of its last `Generated` so far."""
    _free_at: float = 0.0
    """Instant of the last `Generated` of the last step."""
    _work_began_at: float = 0.0
    _training_time: float = 0.0

    def begin_generation(self, step: int, now: float, fleet: Fleet) -> None:
        """Enter that a rollout of `step` was sent to a replica."""
        if step > self._newest:
            self._newest = step
            self._begun[step] = (now, fleet.num_up)

    def end_generation(self, step: int, now: float) -> None:
        """Enter that a rollout of `step` came back; one that comes after its step was made is of none."""
        if step in self._begun:
            self._ended_at[step] = now

    def begin_work(self, now: float) -> None:
        """Enter that the trainer was given something to do."""
        self._work_began_at = now

    def end_work(self, now: float) -> None:
        """Enter that the trainer has done it."""
        self._training_time += now - self._work_began_at

    def end_step(self, step: int, now: float) -> None:
        """Enter that the trainer has made policy version `step`."""
        self.end_work(now)
        training_time, self._training_time = self._training_time, 0.0
        begun, ended_at = self._begun.pop(step, None), self._ended_at.pop(step, None)
        if begun is None or ended_at is None:
            return  # made of what was drawn for other steps
        began_at, num_replicas = begun
        generation_time = max(0.0, ended_at - max(began_at, self._free_at))
        self._free_at = max(self._free_at, ended_at)
        self.last = StepPace(step, generation_time, training_time, num_replicas)

    def forget(self) -> None:
        """Enter that steps are made again: what was under way belongs to none."""
        self._newest = 0
        self._begun.clear()
        self._ended_at.clear()
        self._training_time = 0.0
