"""What a run knows of its rollouts, by rollout: where their tokens are, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from executor.prompts import PromptWorkload, Record
from executor.samples import Completion, Request, Sample
from executor.tokens import TokenBlock, TokenSegment, merge_segments
from streamrl.engine.messages import DrawnGroup, Generate
from streamrl.runfile.config import Run


@dataclass(slots=True)
class BufferedRollout:
    """One rollout from its prompt to its reward."""

    group: tuple[int, ...]
    """Rollouts of the same prompt, itself included."""
    line: int
    """Index of its record in the prompts file."""
    num_tokens: int = 0
    output: tuple[TokenBlock, ...] = ()
    """A block for each attempt that made tokens."""
    segments: tuple[TokenSegment, ...] = ()
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Spans `(version, start)`: from token `start` on, the policy version that sampled."""
    text: str | None = None
    """Its output as text, special tokens left out; None while it is not finished."""
    reward: float = 0.0
    fault: str | None = None
    """What became of it where it could not be scored; see `Scoring`."""
    paths: list[str] = field(default_factory=list)
    """Where its attempts were told to put tokens, whether or not they came to it."""
    num_holders: int = 1
    """The buffer, while the rollout is open, and calls under way that read its tokens or write them."""

    def add(self, completion: Completion) -> int:
        """Enter what an attempt made; return the output tokens that the rollout has now."""
        start = self.num_tokens
        self.versions.extend((version, start + offset) for version, offset in completion.versions)
        if completion.output.num_tokens:
            self.num_tokens += completion.output.num_tokens
            self.output += (completion.output,)
            self.segments = merge_segments(self.segments, completion.segments)
        self.text = completion.text
        return self.num_tokens


class RolloutBuffer:
    """Opens a place for every drawn rollout, and closes it once it is trained on or dropped.

    A rollout's files are removed when it is closed and no call under way needs them.
    """

    def __init__(self, run: Run, workload: PromptWorkload, directory: Path | None = None) -> None:
        """Begin without rollouts.

        Args:
            run: the run file.
            workload: what to draw from.
            directory: where workers put tokens; None: they send them.
        """
        self._run = run
        self._workload = workload
        self._directory = directory
        self._next_group = 0
        self.rollouts: dict[int, BufferedRollout] = {}

    def begin_at(self, group: int) -> None:
        """Let the next draw start at `group`, for a run that resumes."""
        self._next_group = group

    def draw(self, num_groups: int) -> tuple[DrawnGroup, ...]:
        """Open places for the next groups."""
        draws = self._workload.draw(self._next_group, num_groups)
        self._next_group += num_groups
        for draw in draws:
            line = self._workload.line(draw.drawn.group)
            for rollout in draw.drawn.rollouts:
                self.rollouts[rollout] = BufferedRollout(draw.drawn.rollouts, line)
        return tuple(draw.drawn for draw in draws)

    def request(self, command: Generate) -> Request:
        """Return what a replica needs to generate, or to go on with, a rollout."""
        buffered = self.rollouts[command.rollout]
        return Request(
            rollout=command.rollout,
            prompt=self._workload.prompts[buffered.line],
            priority=command.priority,
            max_tokens=self._run.rollout.max_tokens,
            prefix=buffered.output,
            output_path=self._new_path(command.rollout, buffered),
        )

    def record(self, rollout: int) -> Record:
        """Return the line of the prompts file that a rollout was made from."""
        return self._workload.records[self.rollouts[rollout].line]

    def text(self, rollout: int) -> str:
        """Return the output of a finished rollout as text, special tokens left out."""
        text = self.rollouts[rollout].text
        assert text is not None, f"rollout {rollout} is not finished"
        return text

    def sample(self, rollout: int, advantage: float) -> Sample:
        """Return a rollout as the trainer consumes it."""
        buffered = self.rollouts[rollout]
        return Sample(
            rollout=rollout,
            prompt=self._workload.prompts[buffered.line],
            output=buffered.output,
            segments=buffered.segments,
            advantage=advantage,
        )

    @contextmanager
    def hold(self, rollouts: Iterable[int]) -> Iterator[list[BufferedRollout]]:
        """Yield you open rollouts; their files stay until you are done, even where they are closed meanwhile."""
        held = [self.rollouts[rollout] for rollout in rollouts]
        for buffered in held:
            buffered.num_holders += 1
        try:
            yield held
        finally:
            for buffered in held:
                _let_go(buffered)

    def rollouts_of(self, groups: Iterable[int]) -> list[BufferedRollout]:
        """Return the rollouts of groups, in order."""
        return [self.rollouts[rollout] for group in groups for rollout in self._rollouts(group)]

    def close_group(self, group: int) -> None:
        """Forget the rollouts of a group."""
        for rollout in self._rollouts(group):
            closed = self.rollouts.pop(rollout, None)
            if closed is not None:
                _let_go(closed)

    def _rollouts(self, group: int) -> range:
        size = self._run.algorithm.group_size
        return range(group * size, group * size + size)

    def _new_path(self, rollout: int, buffered: BufferedRollout) -> str | None:
        """Return a path that no other attempt has: one that failed may have left something at its own."""
        if self._directory is None:
            return None
        path = f"{self._directory}/{rollout}-{len(buffered.paths)}"
        buffered.paths.append(path)
        return path


def _let_go(buffered: BufferedRollout) -> None:
    buffered.num_holders -= 1
    if not buffered.num_holders:
        for path in buffered.paths:
            Path(path).unlink(missing_ok=True)  # an attempt that made nothing has left none
