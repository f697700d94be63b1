"""A replica stepped token by token, written from its description alone: what `streamrl.sim.replica` must agree with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.engine.messages import LoadWeights
from streamrl.sim.costs.costs import Costs


class Job(NamedTuple):
    """A rollout that is sent at `time`."""

    time: float
    rollout: int
    group: int
    priority: int
    prompt_tokens: int
    length: int


class End(NamedTuple):
    """A rollout that ended at `time` with `tokens`, aborted or finished."""

    rollout: int
    tokens: int
    is_aborted: bool
    time: float


@dataclass(eq=False)
class Sequence:
    """A job with the tokens it has."""

    job: Job
    done: int = 0


@dataclass
class StepByStep:
    """One decode step a turn; memory is counted from scratch each time."""

    costs: Costs
    max_running: int
    jobs: list[Job]
    aborts: list[tuple[float, int]] = field(default_factory=list)
    """(time, rollout); what is aborted is sent again at once, with what it has."""
    load: tuple[float, LoadWeights] | None = None
    reserved: int | None = None
    """Output tokens that memory must have for each that runs; None where what it has now must fit."""
    now: float = 0.0
    queue: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    """In the order they joined."""
    is_full: bool = False
    num_preempted: int = 0
    ends: list[End] = field(default_factory=list)
    loaded_at: float | None = None

    def run(self) -> StepByStep:
        """Go on until nothing is left."""
        while self.jobs or self.queue or self.running or self.load:
            self._turn()
        return self

    @property
    def kv(self) -> int:
        """Tokens in the KV cache, a group's prompt counted once."""
        prompts = {s.job.group: s.job.prompt_tokens for s in self.running}
        return sum(prompts.values()) + sum(s.done for s in self.running)

    def _turn(self) -> None:
        self._receive()
        is_loading = self.load is not None and self.load[0] <= self.now
        if is_loading and not (self.running and self.load[1].drain):  # type: ignore[index]
            self.now += self.costs.load_time
            self.load, self.loaded_at = None, self.now
        elif not is_loading and not self.is_full and self._admit():
            self._end_finished()
        elif self.running and self.kv + len(self.running) > self.costs.kv_capacity:
            self.queue.append(self.running.pop())
            self.is_full = True
            self.num_preempted += 1
        elif self.running:
            context = sum(s.job.prompt_tokens + s.done for s in self.running)
            self.now += self.costs.decode.step_time(len(self.running), context)
            for sequence in self.running:
                sequence.done += 1
            assert self.kv <= self.costs.kv_capacity
            self._end_finished()
        else:
            calls = [*self.jobs, *self.aborts, *([self.load] if self.load else [])]
            self.now = max(self.now, min(call[0] for call in calls))

    def _receive(self) -> None:
        self.queue += [Sequence(job) for job in self.jobs if job.time <= self.now]
        self.jobs = [job for job in self.jobs if job.time > self.now]
        for _, rollout in [abort for abort in self.aborts if abort[0] <= self.now]:
            for sequence in [s for s in self.running if s.job.rollout == rollout]:
                self.running.remove(sequence)
                self.is_full = False
                self.queue.append(sequence)
            for sequence in [s for s in self.queue if s.job.rollout == rollout]:
                self.ends.append(End(rollout, sequence.done, True, self.now))
        self.aborts = [abort for abort in self.aborts if abort[0] > self.now]

    def _admit(self) -> bool:
        tokens, pairs, joined = 0, 0.0, 0
        self.queue.sort(key=lambda s: (s.job.priority, s.job.rollout))
        while self.queue and len(self.running) < self.max_running:
            sequence = self.queue[0]
            is_cached = any(s.job.group == sequence.job.group for s in self.running)
            context = sequence.job.prompt_tokens + sequence.done
            fresh = sequence.done if is_cached else context
            if not self._has_room(sequence, fresh):
                break
            tokens += max(fresh, 1)
            pairs += fresh * (context - fresh / 2)
            sequence.done += 1
            self.running.append(self.queue.pop(0))
            joined += 1
        if joined:
            self.now += self.costs.prefill_time(tokens, pairs, len(self.running) - joined)
        return joined > 0

    def _has_room(self, sequence: Sequence, fresh: int) -> bool:
        if self.reserved is None:
            return self.kv + fresh + 1 <= self.costs.kv_capacity
        batch = [*self.running, sequence]
        prompts = {s.job.group: s.job.prompt_tokens for s in batch}
        return sum(prompts.values()) + len(batch) * self.reserved <= self.costs.kv_capacity

    def _end_finished(self) -> None:
        for sequence in [s for s in self.running if s.done == s.job.length]:
            self.running.remove(sequence)
            self.is_full = False
            self.ends.append(End(sequence.job.rollout, sequence.done, False, self.now))
