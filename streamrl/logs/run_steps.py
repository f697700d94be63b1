"""Measured steps from a trace, of an executed run or of its simulation alike: what a log would have said of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from statistics import fmean

from msgspec.structs import replace

from streamrl.engine.messages import (
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    PushWeights,
    Score,
    Scored,
    Step,
    Stepped,
    Train,
    Trained,
    TrainerLost,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trainer_side import LEADER
from streamrl.logs.measured_steps import MeasuredStep
from streamrl.record.entries import Entry
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.record.trace import Trace

WORK = (Score, Train, Step)


def read_run_steps(
    trace: Trace, overhead: float = 0.0, *, takes_turns: bool = False
) -> list[MeasuredStep]:
    """Return what each step of the leader took.

    Args:
        trace: of a run.
        overhead: seconds of a simulated step that are of no stage, which its trace has in the optimizer step.
        takes_turns: whether a batch is generated while nothing trains, so that it has seconds of its own.
    """
    reader = _Reader(overhead, takes_turns)
    for entry in trace.entries:
        reader.read(entry)
    return _with_busy(reader.steps, read_timeline(trace))


def _with_busy(steps: list[MeasuredStep], timeline: Timeline) -> list[MeasuredStep]:
    """Add how long replicas generated in each step."""
    if not timeline.replicas:
        return steps
    ends = list(accumulate(step.step_time or 0.0 for step in steps))
    busy = [0.0] * len(steps)
    for spans in timeline.replicas.values():
        for span in spans:
            if span.activity == "generate":
                _deal(span, ends, busy)
    num = len(timeline.replicas)
    return [replace(step, busy=each / num) for step, each in zip(steps, busy, strict=True)]


def _deal(span: Span, ends: list[float], busy: list[float]) -> None:
    """Add the seconds of a span to the steps that it lies in."""
    start = span.start
    for place in range(bisect_right(ends, start), len(ends)):
        busy[place] += min(span.end, ends[place]) - start
        start = ends[place]
        if span.end <= start:
            return


class _Reader:
    """The seconds and the work of the step under way."""

    def __init__(self, overhead: float, takes_turns: bool) -> None:
        self.steps: list[MeasuredStep] = []
        self._overhead = overhead
        self._takes_turns = takes_turns
        self._issued: deque[float] = deque()
        self._free_at = 0.0
        """When the trainer ended what it did last."""
        self._ended_at = 0.0
        """The step before."""
        self._ran: dict[int, float] = {}
        """Seconds that each rollout ran in attempts that were broken off."""
        self._first_sent: float | None = None
        """When the first rollout of the step was sent."""
        self._last_done: float | None = None
        self._loaded_at = 0.0
        self._pushed_at = 0.0
        self._seconds: dict[str, float] = {"score": 0.0, "train": 0.0, "sync": 0.0}
        self._load_time = 0.0
        self._latencies: list[float] = []
        self._prompts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._trained: list[int] = []
        self._has: set[str] = set()

    def read(self, entry: Entry) -> None:
        self._take_event(entry)
        for command in entry.commands:
            match command:
                case Score() | Train() | Step() if command.trainer == LEADER:
                    self._issued.append(entry.time)
                    if isinstance(command, Train):
                        self._trained += command.rollouts
                case Generate():
                    if self._first_sent is None:
                        self._first_sent = entry.time
                case PushWeights():
                    self._pushed_at = entry.time
                case _:
                    pass

    def _take_event(self, entry: Entry) -> None:
        event, now = entry.event, entry.time
        match event:
            case PromptsDrawn():
                for group in event.groups:
                    self._prompts.update(dict.fromkeys(group.rollouts, group.prompt_tokens))
            case Generated():
                self._take_rollout(event, now)
            case Scored() if event.trainer == LEADER:
                self._end_work("score", now)
            case Trained() if event.trainer == LEADER:
                self._end_work("train", now)
            case Stepped() if event.trainer == LEADER:
                self._end_work("train", now)
                self._end_step(event.version, now)
            case WeightsPushed():
                self._has.add("sync")
                self._seconds["sync"] += now - self._pushed_at
            case WeightsLoaded():
                self._loaded_at = now
                self._load_time = max(self._load_time, event.load_time)
            case TrainerLost(trainer) if trainer == LEADER:
                self._issued.clear()
            case Failed(command) if isinstance(command, WORK) and command.trainer == LEADER:
                if self._issued:
                    self._issued.popleft()
            case _:
                pass

    def _take_rollout(self, event: Generated, now: float) -> None:
        ran = self._ran.pop(event.rollout, 0.0) + event.run_time
        if event.finish == "aborted":
            self._ran[event.rollout] = ran
            return
        self._latencies.append(ran)
        self._lengths[event.rollout] = event.tokens
        self._last_done = now

    def _end_work(self, stage: str, now: float) -> None:
        if self._issued:
            self._has.add(stage)
            self._seconds[stage] += now - max(self._issued.popleft(), self._free_at)
            self._free_at = now

    def _generation(self) -> float | None:
        """Return the seconds from the first rollout, once weights are loaded, to the last."""
        if not self._takes_turns or self._first_sent is None or self._last_done is None:
            return None
        began = max(self._first_sent, self._loaded_at)
        return self._last_done - began if began < self._last_done else None

    def _end_step(self, version: int, now: float) -> None:
        outputs = [self._lengths[r] for r in self._trained if r in self._lengths]
        prompts = [self._prompts[r] for r in self._trained if r in self._prompts]
        has = self._has
        self._seconds["train"] -= self._overhead
        seconds = {name: value for name, value in self._seconds.items() if name in has}
        if "sync" in seconds:
            seconds["sync"] += self._load_time
        self.steps.append(
            MeasuredStep(
                step=version,
                step_time=now - self._ended_at,
                generation=self._generation(),
                rollout_time=fmean(self._latencies) if self._latencies else None,
                **seconds,
                rollouts=len(outputs) or None,
                output_tokens=fmean(outputs) if outputs else None,
                longest_output=max(outputs) if outputs else None,
                prompt_tokens=fmean(prompts) if prompts else None,
                total_tokens=sum(outputs) + sum(prompts) if outputs else None,
            )
        )
        for rollout in self._trained:
            self._lengths.pop(rollout, None)
            self._prompts.pop(rollout, None)
        self._ended_at = self._free_at = now
        self._first_sent = self._last_done = None
        self._latencies, self._trained, self._load_time = [], [], 0.0
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        has.clear()
