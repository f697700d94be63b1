"""Track every rollout of a run: where its tokens are, what became of it, and the statistics of each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count, islice
from math import isfinite
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.random import SeedSequence

from streamrl.engine.messages import DrawnGroup, Drop, Generate, Generated, Skip
from streamrl.engine.trainer_side import LEADER
from streamrl.engine.world import GroupReferences
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.roles import Completion, FinishReason, Request, Sample, Scoring
from streamrl.executor.token_files import (
    KeptTokens,
    attempt_of,
    remove_ended,
    remove_files,
    take_over,
)
from streamrl.executor.tokens import TokenBlock, TokenSegment, merge_segments, read_blocks
from streamrl.record.run_directory import FATES, OF_FAMILY
from streamrl.runfile.config import Run
from streamrl.workload.prompt_families import prompt_family
from streamrl.workload.prompt_records import Record

GENERATED, TRAINED, DROPPED = FATES
OF_REASON = "dropped for "
"""What the keys of metrics.jsonl begin with that count what the leader gave up, by reason."""
OF_TOKENS = "tokens dropped for "
"""The same of their output tokens."""


class StepStatistics:
    """Counts rollouts by what became of them, lengths and rewards of those that ended, families where there are any."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._dropped = Counter[str]()
        self._wasted = Counter[str]()
        self._families = Counter[str]()

    def end(self, num_tokens: int, reward: float, record: Record) -> None:
        """Enter a rollout that has its reward."""
        self._lengths.append(num_tokens)
        self._rewards.append(reward)
        self._count(GENERATED, [record])

    def give_up(self, records: Iterable[Record], reason: str) -> None:
        """Enter rollouts that the trainer which leads will not train on."""
        self._dropped[reason] += self._count(DROPPED, records)

    def waste(self, num_tokens: int, reason: str) -> None:
        """Enter output tokens of what was given up."""
        if num_tokens:
            self._wasted[reason] += num_tokens

    def take(self, trained: Iterable[Record]) -> dict[str, float]:
        """Return the figures since the last step, which was made of `trained`, and begin anew.

        | key                       | of                                                                   |
        |---------------------------|----------------------------------------------------------------------|
        | generated                 | rollouts that ended, with their reward                               |
        | generated_length_mean     | their output tokens                                                  |
        | generated_reward          | their mean reward                                                    |
        | dropped for REASON        | rollouts that were given up                                          |
        | tokens dropped for REASON | their output tokens, those that come with their abort when they do   |
        | generated/F, trained/F, dropped/F | rollouts of family F, where prompts have several              |
        """
        self._count(TRAINED, trained)
        found: dict[str, float] = {GENERATED: len(self._lengths)}
        if self._lengths:
            found["generated_length_mean"] = sum(self._lengths) / len(self._lengths)
            found["generated_reward"] = math.fsum(self._rewards) / len(self._rewards)
        found |= {OF_REASON + reason: count for reason, count in self._dropped.items()}
        found |= {OF_TOKENS + reason: tokens for reason, tokens in self._wasted.items()}
        found |= dict(sorted(self._families.items()))
        self._begin()
        return found

    def _count(self, fate: str, records: Iterable[Record]) -> int:
        num = 0
        for record in records:
            num += 1
            family = prompt_family(record)
            if family is not None:
                self._families[f"{fate}{OF_FAMILY}{family}"] += 1
        return num


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
    """Its output as text, special tokens left out; None unless it waits for its reward."""
    reward: float = 0.0
    fault: str | None = None
    """What became of it where it could not be scored; see `Scoring`."""
    verify_time: float = 0.0
    """Seconds from its end to its reward."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """What each of several scorers gave."""
    paths: list[str] = field(default_factory=list)
    """Where its attempts were told to put tokens; the last one may have put none there yet, or not all."""
    finish: FinishReason | None = None
    """How an earlier leg of the run ended it; None where it has still to be generated to its end."""
    lost_for: str = ""
    """Why the trainer that leads gave it up, where it did."""
    num_holders: int = 1
    """The buffer, while the rollout is open, and calls under way that read its tokens or write them."""

    @property
    def born(self) -> int:
        """The version that sampled its first token; 0 of none."""
        return self.versions[0][0] if self.versions else 0

    @property
    def kept(self) -> tuple[int, int]:
        """Output tokens that it has, and the version that sampled the first."""
        return self.num_tokens, self.born

    def add(self, completion: Completion) -> int:
        """Enter what an attempt made; return the output tokens that the rollout has now."""
        start = self.num_tokens
        self.versions += [(version, start + offset) for version, offset in completion.versions]
        if completion.output.num_tokens:
            self.num_tokens += completion.output.num_tokens
            self.output += (completion.output,)
            self.segments = merge_segments(self.segments, completion.segments)
        self.text = completion.text
        return self.num_tokens

    def end(self, completion: Completion) -> Generated:
        """Enter what an attempt made that has ended; return the event of that."""
        return Generated(
            completion.rollout,
            self.add(completion),
            completion.finish,
            completion.versions[0][0] if completion.versions else 0,
            completion.run_time,
            completion.prefill_time,
        )

    def enter(self, scoring: Scoring) -> None:
        """Enter what the verifier said, which nobody needs the text after: a long one is larger than all else here.

        Raises:
            ValueError: the reward is none, such as NaN, which would spoil every weight.
        """
        if not isfinite(scoring.reward):
            raise ValueError(f"a reward must be a finite number, got {scoring.reward}")
        self.reward, self.fault, self.scores = scoring
        self.text = None


class Hold:
    """A context in which nobody writes over the tokens of some rollouts.

    Every rollout is held twice or more, so that this is no generator: one as a context manager costs more.
    """

    def __init__(
        self, rollouts: list[BufferedRollout], let_go: Callable[[BufferedRollout], None]
    ) -> None:
        self._rollouts = rollouts
        self._let_go = let_go

    def __enter__(self) -> list[BufferedRollout]:
        for buffered in self._rollouts:
            buffered.num_holders += 1
        return self._rollouts

    def __exit__(self, *error: object) -> None:
        for buffered in self._rollouts:
            self._let_go(buffered)


class RolloutBuffer:
    """Opens a place for every drawn rollout, and closes it once it is trained on or dropped.

    The files of a rollout that is closed, and that no call under way reads or writes, are removed; those of the others
    outlive a run that is killed, so that a resumed one goes on with them.
    """

    def __init__(
        self,
        run: Run,
        workload: PromptWorkload,
        directory: Path | None = None,
        kept: KeptTokens | None = None,
    ) -> None:
        """Begin without rollouts.

        Args:
            run: the run file.
            workload: what to draw from.
            directory: where workers put tokens; None: they send them.
            kept: what earlier legs of the run left of rollouts that are to be drawn again.
        """
        self._run = run
        self.workload = workload
        self._directory = directory
        self._kept = kept
        self._undrawn: Iterator[int] = count()
        self.step_statistics = StepStatistics()
        """What became of rollouts since the leading trainer's last step."""
        self._next_group = 0
        self._keeps_files = False
        self._done_with = GroupReferences(run.num_trainers)
        self.rollouts: dict[int, BufferedRollout] = {}

    def begin_at(self, group: int, done_ahead: Collection[int] = ()) -> None:
        """Let the next draw start at `group` and leave those out that are done, for a run that resumes."""
        done = frozenset(done_ahead)
        self._undrawn = (each for each in count(group) if each not in done)
        self._next_group = group

    def draw(self, num_groups: int, oldest_version: int = 0) -> tuple[DrawnGroup, ...]:
        """Open places for the next groups, whose tokens may be of no version older than `oldest_version`."""
        groups = islice(self._undrawn, num_groups)
        draws = [draw.drawn for group in groups for draw in self.workload.draw(group, 1)]
        self._next_group = max(self._next_group, *(1 + drawn.group for drawn in draws))
        return tuple(self._open(drawn, oldest_version) for drawn in draws)

    def _open(self, drawn: DrawnGroup, oldest_version: int) -> DrawnGroup:
        """Open the places of a group; return it with what is left of its rollouts."""
        line = self.workload.line(drawn.group)
        opened = [BufferedRollout(drawn.rollouts, line) for _ in drawn.rollouts]
        self.rollouts.update(zip(drawn.rollouts, opened, strict=True))
        if self._kept is not None:
            for rollout, buffered in zip(drawn.rollouts, opened, strict=True):
                self._restore(buffered, self._kept.take(rollout, oldest_version))
        if not any(buffered.num_tokens for buffered in opened):
            return drawn
        return replace(drawn, kept=tuple(buffered.kept for buffered in opened))

    def _restore(self, buffered: BufferedRollout, attempts: list[Completion]) -> None:
        """Enter what earlier legs left of a rollout."""
        for completion in attempts:
            assert completion.output.path is not None
            buffered.paths.append(completion.output.path)
            buffered.add(completion)
            is_over = buffered.num_tokens >= self._run.rollout.max_tokens
            if completion.finish != "aborted" or is_over:
                buffered.finish = "stop" if completion.finish == "stop" else "length"
                buffered.text = self._text_of(buffered)

    def _text_of(self, buffered: BufferedRollout) -> str:
        """Return the text of a rollout whose worker could not tell it, or which nobody needed any more."""
        return self.workload.text(read_blocks(buffered.output)[0].tolist())

    def request(self, command: Generate) -> Request:
        """Return what a replica needs to generate, or to go on with, a rollout."""
        buffered = self.rollouts[command.rollout]
        path = self._take_path(command.rollout, buffered)
        return Request(
            rollout=command.rollout,
            prompt=self.workload.prompts[buffered.line],
            priority=command.priority,
            max_tokens=self._run.rollout.max_tokens,
            prefix=buffered.output,
            seed=self._seed_of(command.rollout) if self._run.execute.deterministic else None,
            output_path=path,
        )

    def record(self, rollout: int) -> Record:
        """Return the line of the prompts file that a rollout was made from."""
        return self.workload.records[self.rollouts[rollout].line]

    def text(self, rollout: int) -> str:
        """Return the output of a rollout that waits for its reward as text, special tokens left out."""
        text = self.rollouts[rollout].text
        assert text is not None, f"rollout {rollout} does not wait for a reward"
        return text

    def reread(self, rollout: int) -> str:
        """Return the output of an open rollout as text, special tokens left out, decoded again from its tokens."""
        return self._text_of(self.rollouts[rollout])

    def sample(self, rollout: int, advantage: float, partner: int | None = None) -> Sample:
        """Return a rollout as the trainer consumes it, beside the other one of its pair where it has one."""
        buffered = self.rollouts[rollout]
        return Sample(
            rollout=rollout,
            prompt=self.workload.prompts[buffered.line],
            output=buffered.output,
            segments=buffered.segments,
            advantage=advantage,
            partner=partner,
        )

    def hold(self, rollouts: Iterable[int]) -> Hold:
        """Return what gives you open rollouts; their files stay until you are done, even where they are closed meanwhile."""
        return Hold([self.rollouts[rollout] for rollout in rollouts], self.let_go)

    def keep_files(self) -> None:
        """Leave from now on the files of rollouts that are closed: the run ends, and a resumed one goes on with them."""
        self._keeps_files = True

    def numbers_of(self, groups: Iterable[int]) -> Iterator[int]:
        """Yield the numbers of the rollouts of groups, in order."""
        return chain.from_iterable(map(self._rollouts, groups))

    def rollouts_of(self, groups: Iterable[int]) -> list[BufferedRollout]:
        """Return the rollouts of groups, in order."""
        return [self.rollouts[rollout] for rollout in self.numbers_of(groups)]

    def records_of(self, groups: Iterable[int]) -> Iterator[Record]:
        """Yield the record of each open rollout of groups, in order."""
        for group in groups:
            for rollout in self._rollouts(group):
                if rollout in self.rollouts:
                    yield self.record(rollout)

    def skip(self, command: Skip) -> None:
        """Enter that one trainer will not train on a group."""
        if command.trainer == LEADER:
            self._give_up(command.group, command.reason)
        self.leave(command.group, command.trainer)

    def drop(self, command: Drop) -> None:
        """Enter that nobody will train on a group who has not yet."""
        if not self._done_with.has_left(command.group, LEADER):
            self._give_up(command.group, command.reason)
        self.close_group(command.group)
        self.workload.forget(command.group)

    def _give_up(self, group: int, reason: str) -> None:
        """Enter that the trainer which leads will not train on a group."""
        self.step_statistics.give_up(self.records_of([group]), reason)
        for rollout in self._rollouts(group):
            if (buffered := self.rollouts.get(rollout)) is not None:
                buffered.lost_for = reason
                self.step_statistics.waste(buffered.num_tokens, reason)

    def end(self, buffered: BufferedRollout, completion: Completion) -> Generated:
        """Enter what an attempt made that has ended, be it of a rollout that was given up meanwhile."""
        num_before = buffered.num_tokens
        event = buffered.end(completion)
        if buffered.lost_for:
            self.step_statistics.waste(buffered.num_tokens - num_before, buffered.lost_for)
        return event

    def join(self) -> None:
        """Keep what is drawn from now on for one more trainer too."""
        self._done_with.join(self._next_group)

    def leave(self, group: int, trainer: int) -> None:
        """Enter that a trainer is done with a group; forget its rollouts where all are."""
        if self._done_with.leave(group, trainer):
            self.close_group(group)

    def close_group(self, group: int) -> None:
        """Forget the rollouts of a group."""
        self._done_with.drop(group)
        for rollout in self._rollouts(group):
            closed = self.rollouts.pop(rollout, None)
            if closed is not None:
                self.let_go(closed)

    def _rollouts(self, group: int) -> range:
        size = self._run.algorithm.group_size
        return range(group * size, group * size + size)

    def _seed_of(self, rollout: int) -> int:
        """Return the same seed for a rollout in every run of one seed, whoever generates it and whenever."""
        seed: int = SeedSequence([self._run.seed, rollout]).generate_state(1, np.uint64)[0]
        return int(seed) >> 1

    def _take_path(self, rollout: int, buffered: BufferedRollout) -> str | None:
        """Return the path of a file for a further attempt."""
        if self._directory is None:
            return None
        attempt = 1 + attempt_of(buffered.paths[-1]) if buffered.paths else 0
        path = f"{self._directory}/{rollout}.{attempt}"  # a Path would intern each name
        buffered.paths.append(path)
        return path

    def end_failed(self, command: Generate, *, is_lost: bool) -> Generated | None:
        """Enter that an attempt failed; return what it comes to where its worker was lost and has left tokens."""
        buffered = self.rollouts.get(command.rollout)
        if buffered is None or self._directory is None or not buffered.paths:
            return None
        path = buffered.paths[-1]
        if not is_lost:
            remove_files(path)
            return None
        left = take_over(command.rollout, path, buffered.num_tokens)
        if left is None:
            return None
        event = buffered.end(left)
        if left.finish != "aborted":
            buffered.text = self._text_of(buffered)
        return event

    def let_go(self, buffered: BufferedRollout) -> None:
        """Enter that a call less needs a rollout's files; after the last one they are removed."""
        buffered.num_holders -= 1
        if not buffered.num_holders and not self._keeps_files:
            for path in buffered.paths:
                remove_ended(path)
