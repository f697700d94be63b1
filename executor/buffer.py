"""The token data of a run, by rollout: what the engine's counts stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from executor.prompts import PromptWorkload, Record
from executor.samples import Completion, Request, Sample
from streamrl.engine.messages import DrawnGroup, Generate
from streamrl.runfile.config import Run


@dataclass(slots=True)
class BufferedRollout:
    """One rollout from its prompt to its reward."""

    group: tuple[int, ...]
    """Rollouts of the same prompt, itself included."""
    line: int
    """Index of its record in the prompts file."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Spans `(version, start)`: from token `start` on, the policy version that sampled."""
    reward: float = 0.0
    fault: str | None = None
    """What became of it where it could not be scored; see `Scoring`."""


class RolloutBuffer:
    """Opens a place for every drawn rollout, and closes it once it is trained on or dropped."""

    def __init__(self, run: Run, workload: PromptWorkload) -> None:
        self._run = run
        self.workload = workload
        self._next_group = 0
        self.rollouts: dict[int, BufferedRollout] = {}

    def begin_at(self, group: int) -> None:
        """Let the next draw start at `group`, for a run that resumes."""
        self._next_group = group

    def draw(self, num_groups: int) -> tuple[DrawnGroup, ...]:
        """Open places for the next groups."""
        draws = self.workload.draw(self._next_group, num_groups)
        self._next_group += num_groups
        for draw in draws:
            line = self.workload.line(draw.drawn.group)
            for rollout in draw.drawn.rollouts:
                self.rollouts[rollout] = BufferedRollout(draw.drawn.rollouts, line)
        return tuple(draw.drawn for draw in draws)

    def request(self, command: Generate) -> Request:
        """Return what a replica needs to generate, or to go on with, a rollout."""
        buffered = self.rollouts[command.rollout]
        return Request(
            rollout=command.rollout,
            prompt=self.workload.tokens[buffered.line],
            priority=command.priority,
            max_tokens=self._run.rollout.max_tokens,
            prefix=buffered.tokens[: command.prefix],
        )

    def add(self, completion: Completion) -> int:
        """Enter what an attempt made; return the output tokens that the rollout has now."""
        buffered = self.rollouts[completion.rollout]
        offset = len(buffered.tokens)
        buffered.versions.extend(
            (version, offset + start) for version, start in completion.versions
        )
        buffered.tokens.extend(completion.tokens)
        buffered.logprobs.extend(completion.logprobs)
        return len(buffered.tokens)

    def record(self, rollout: int) -> Record:
        """Return the line of the prompts file that a rollout was made from."""
        return self.workload.records[self.rollouts[rollout].line]

    def text(self, rollout: int) -> str:
        """Return a rollout's output as text, special tokens left out."""
        return self.workload.decode(self.rollouts[rollout].tokens)

    def sample(self, rollout: int, advantage: float) -> Sample:
        """Return a rollout as the trainer consumes it."""
        buffered = self.rollouts[rollout]
        return Sample(
            rollout=rollout,
            prompt=self.workload.tokens[buffered.line],
            tokens=buffered.tokens,
            logprobs=buffered.logprobs,
            advantage=advantage,
        )

    def rollouts_of(self, groups: Iterable[int]) -> list[BufferedRollout]:
        """Return the rollouts of groups, in order."""
        return [self.rollouts[rollout] for group in groups for rollout in self._rollouts(group)]

    def close_group(self, group: int) -> None:
        """Forget the rollouts of a group."""
        for rollout in self._rollouts(group):
            self.rollouts.pop(rollout, None)

    def _rollouts(self, group: int) -> range:
        size = self._run.algorithm.group_size
        return range(group * size, group * size + size)
