"""Track every rollout of a run: its tokens, its reward, and the statistics of each step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, islice
from math import inf, isfinite
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.random import SeedSequence

from streamrl.engine.messages import DrawnGroup, Drop, Generate, Generated, KeptTurns, Skip
from streamrl.engine.trainer_side import LEADER
from streamrl.engine.world import GroupReferences
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.roles import Completion, FinishReason, Request, Sample, Scoring
from streamrl.executor.token_files import (
    Head,
    KeptTokens,
    attempt_of,
    remove_ended,
    remove_files,
    take_over,
    write_attempt,
)
from streamrl.executor.tokens import (
    TokenBlock,
    TokenSegment,
    count_ids,
    count_tokens,
    merge_segments,
    read_blocks,
)
from streamrl.record.run_directory import FATES, OF_FAMILY
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.workload.episodes import RecordedTurn
from streamrl.workload.prompt_families import prompt_family
from streamrl.workload.prompt_records import Record

GENERATED, TRAINED, DROPPED = FATES
OF_REASON = "dropped for "
"""Prefix of the keys in metrics.jsonl that count rollouts the primary trainer dropped, by reason."""
OF_TOKENS = "tokens dropped for "
"""Prefix of the keys that count their output tokens."""


class StepStatistics:
    """Counts rollouts by fate and prompt family, with the lengths and rewards of finished ones."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._dropped = Counter[str]()
        self._wasted = Counter[str]()
        self._families = Counter[str]()

    def end(self, num_tokens: int, reward: float, record: Record) -> None:
        """Record a rollout that has its reward."""
        self._lengths.append(num_tokens)
        self._rewards.append(reward)
        self._count(GENERATED, [record])

    def give_up(self, records: Iterable[Record], reason: str) -> None:
        """Record rollouts that the primary trainer will not train on."""
        self._dropped[reason] += self._count(DROPPED, records)

    def waste(self, num_tokens: int, reason: str) -> None:
        """Record output tokens of dropped rollouts."""
        if num_tokens:
            self._wasted[reason] += num_tokens

    def take(self, trained: Iterable[Record]) -> dict[str, float]:
        """Return the statistics of the step that trained on `trained`, and start those of the next step.

        | key                               | value                                                      |
        |-----------------------------------|------------------------------------------------------------|
        | generated                         | finished rollouts with a reward                            |
        | generated_length_mean             | their mean output tokens                                   |
        | generated_reward                  | their mean reward                                          |
        | dropped for REASON                | dropped rollouts                                           |
        | tokens dropped for REASON         | their output tokens; those of an aborted one count when the abort returns |
        | generated/F, trained/F, dropped/F | rollouts of prompt family F, if prompts have families      |
        """
        self._count(TRAINED, trained)
        figures: dict[str, float] = {GENERATED: len(self._lengths)}
        if self._lengths:
            figures["generated_length_mean"] = sum(self._lengths) / len(self._lengths)
            figures["generated_reward"] = math.fsum(self._rewards) / len(self._rewards)
        figures |= {OF_REASON + reason: count for reason, count in self._dropped.items()}
        figures |= {OF_TOKENS + reason: tokens for reason, tokens in self._wasted.items()}
        figures |= dict(sorted(self._families.items()))
        self._begin()
        return figures

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
    """All rollouts of the same prompt, including this one."""
    line: int
    """Index of its record in the prompts file."""
    step: int | None = None
    """The step that its group was drawn for."""
    num_tokens: int = 0
    """Number of tokens that the policy generated."""
    output: tuple[TokenBlock, ...] = ()
    """One block for each attempt that generated tokens, and for each observation."""
    segments: tuple[TokenSegment, ...] = ()
    """Turns of the policy, and observations."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Spans `(version, start)`: the policy version that sampled from token `start` on, without observations."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward that the environment gave for each turn."""
    action_times: list[float] = field(default_factory=list)
    """Seconds until the environment answered each turn."""
    num_late: int = 0
    """Actions that reached their time limit."""
    start_time: float | None = None
    """Seconds of the start of its environment; the last start counts."""
    text: str | None = None
    """Its output as text, without special tokens; None unless it waits for its reward."""
    reward: float = 0.0
    fault: str | None = None
    """Why it could not be scored, if so; see `Scoring`."""
    verify_time: float = 0.0
    """Seconds from its end to its reward."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """With several scorers, the score of each."""
    paths: list[str] = field(default_factory=list)
    """Token file of each attempt. The last attempt may not have written all of its tokens yet."""
    is_turn_over: bool = False
    """Whether its last saved attempt ended a turn."""
    finish: FinishReason | None = None
    """How it ended before the last restart; None if it must still be generated to its end."""
    is_truncated: bool = False
    """Whether it ended because it had the maximum length, or because the time of its episode was over."""
    lost_for: str = ""
    """Why the primary trainer dropped it; empty if it did not."""
    num_holders: int = 1
    """Users of its files: the buffer while the rollout is open, and calls that read or write its tokens."""

    @property
    def length(self) -> int:
        """Number of its tokens after the prompt, observations included."""
        return count_tokens(self.output)

    @property
    def num_observed(self) -> int:
        """Number of tokens of its observations."""
        return count_tokens(each for each in self.segments if not each.is_policy)

    @property
    def num_turns(self) -> int:
        """Number of turns of the policy; the last one may not have ended."""
        return sum(segment.is_policy for segment in self.segments)

    @property
    def returns(self) -> list[float]:
        """For each turn the sum of the rewards from it on; the score of the verifier belongs to the last turn."""
        rewards = (self.turn_rewards + [0.0] * self.num_turns)[: self.num_turns]
        rewards[-1] += self.reward - math.fsum(self.turn_rewards)
        return [math.fsum(rewards[turn:]) for turn in range(len(rewards))]

    @property
    def num_answered(self) -> int:
        """Number of turns that an observation follows."""
        return self.num_turns - (bool(self.segments) and self.segments[-1].is_policy)

    @property
    def turns(self) -> list[RecordedTurn]:
        """The turns of the policy, each with the observation that follows it, if any."""
        found: list[RecordedTurn] = []
        for segment in self.segments:
            if segment.is_policy:
                at = len(found)
                time = self.action_times[at] if at < len(self.action_times) else None
                found.append(RecordedTurn(segment.num_tokens, action_time=time))
            elif found:
                found[-1] = replace(found[-1], observation_tokens=segment.num_tokens)
        return found

    @property
    def policy_output(self) -> tuple[TokenBlock, ...]:
        """The blocks that the policy generated."""
        ends = list(accumulate(segment.num_tokens for segment in self.segments))
        starts = accumulate((block.num_tokens for block in self.output), initial=0)
        pairs = zip(self.output, starts, strict=False)
        return tuple(b for b, start in pairs if self.segments[bisect_right(ends, start)].is_policy)

    @property
    def born(self) -> int:
        """The version that sampled its first token; 0 without tokens."""
        return self.versions[0][0] if self.versions else 0

    @property
    def kept(self) -> tuple[int, int]:
        """Number of its output tokens, and the version that sampled the first."""
        return self.num_tokens, self.born

    def add(self, completion: Completion) -> int:
        """Append the tokens of an attempt; return the rollout's number of output tokens."""
        start = self.num_tokens
        self.versions += [(version, start + offset) for version, offset in completion.versions]
        if completion.output.num_tokens:
            self.num_tokens += completion.output.num_tokens
            self.output += (completion.output,)
            self.segments = merge_segments(self.segments, completion.segments)
        self.text = completion.text
        return self.num_tokens

    def end(self, completion: Completion) -> Generated:
        """Append the tokens of an ended attempt; return its `Generated` event."""
        self.is_truncated = self.is_truncated or completion.finish == "length"
        return Generated(
            completion.rollout,
            self.add(completion),
            completion.finish,
            completion.versions[0][0] if completion.versions else 0,
            completion.run_time,
            completion.prefill_time,
        )

    def enter(self, scoring: Scoring) -> None:
        """Record the reward, and free the text, which can be large.

        Raises:
            ValueError: the reward is not finite; a NaN would make every weight NaN.
        """
        if not isfinite(scoring.reward):
            raise ValueError(f"a reward must be a finite number, got {scoring.reward}")
        self.reward, self.fault, self.scores = scoring
        self.text = None


def turn_facts(buffered: BufferedRollout) -> dict[str, object]:
    """Return what rollouts.jsonl says of an episode; see `RecordedEpisode`."""
    segments = buffered.segments
    first = segments[0].num_tokens if segments and not segments[0].is_policy else 0
    return {
        "turns": buffered.turns,
        "first_observation_tokens": first,
        "start_time": buffered.start_time,
    }


def _kept_turns(buffered: BufferedRollout) -> KeptTurns:
    """Return the turns of a rollout from before a restart."""
    return KeptTurns(buffered.num_answered, buffered.num_observed, buffered.is_turn_over)


class Hold:
    """A context in which the token files of some rollouts are not removed.

    It is a class, not a `@contextmanager`, because that is slower and every rollout is held at least twice.
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
    """Holds every drawn rollout until it is trained on or dropped.

    A rollout's files are removed when it is closed and no call uses them. All other files remain if the run is killed.
    A resumed run continues from them.
    """

    def __init__(
        self,
        workload: PromptWorkload,
        num_trainers: int,
        seed: int | None = None,
        directory: Path | None = None,
        kept: KeptTokens | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """Create an empty buffer.

        Args:
            workload: the prompts to draw from.
            num_trainers: trainers that train on each group.
            seed: seed of the run, from which each rollout gets its own; None: rollouts have no seed.
            directory: directory for token files of workers. None: workers send tokens with their answers.
            kept: tokens that were saved before a restart, of rollouts that will be drawn again.
            environment: settings of episodes of several turns; None: each rollout has one turn.
        """
        self.workload = workload
        self._seed = seed
        self._directory = directory
        self._kept = kept
        self._environment = environment
        self._undrawn: Iterator[int] = count()
        self.step_statistics = StepStatistics()
        """Statistics since the primary trainer's last step."""
        self._next_group = 0
        self._keeps_files = False
        self._done_with = GroupReferences(num_trainers)
        self.rollouts: dict[int, BufferedRollout] = {}

    def begin_at(self, group: int, done_ahead: Collection[int] = ()) -> None:
        """Start the next draw at `group` and skip groups in `done_ahead`, for a resumed run."""
        done = frozenset(done_ahead)
        self._undrawn = (each for each in count(group) if each not in done)
        self._next_group = group

    def draw(
        self, num_groups: int, oldest_version: int = 0, step: int | None = None
    ) -> tuple[DrawnGroup, ...]:
        """Draw the next groups for a step; saved tokens of versions older than `oldest_version` are not used."""
        groups = islice(self._undrawn, num_groups)
        draws = [draw.drawn for group in groups for draw in self.workload.draw(group, 1)]
        self._next_group = max(self._next_group, *(1 + drawn.group for drawn in draws))
        return tuple(self._open(drawn, oldest_version, step) for drawn in draws)

    def _open(self, drawn: DrawnGroup, oldest_version: int, step: int | None) -> DrawnGroup:
        """Add the rollouts of a group; return the group with the sizes of saved tokens."""
        line = self.workload.line(drawn.group)
        opened = [BufferedRollout(drawn.rollouts, line, step=step) for _ in drawn.rollouts]
        self.rollouts.update(zip(drawn.rollouts, opened, strict=True))
        if self._kept is not None:
            for rollout, buffered in zip(drawn.rollouts, opened, strict=True):
                self._restore(buffered, self._kept.take(rollout, oldest_version))
        if not any(buffered.output for buffered in opened):
            return drawn
        turns = () if self._environment is None else tuple(map(_kept_turns, opened))
        return replace(drawn, kept=tuple(buffered.kept for buffered in opened), turns=turns)

    def _restore(self, buffered: BufferedRollout, attempts: list[Completion]) -> None:
        """Add the saved attempts of a rollout."""
        for completion in attempts:
            assert completion.output.path is not None
            buffered.paths.append(completion.output.path)
            buffered.add(completion)
            is_over = buffered.num_tokens >= self.workload.max_tokens
            is_last = self._environment is None and completion.finish == "stop"
            buffered.is_turn_over = completion.finish == "stop"
            if is_last or is_over or completion.finish == "length":
                buffered.finish = "stop" if completion.finish == "stop" else "length"
                buffered.is_truncated = buffered.finish == "length"
                buffered.text = self._text_of(buffered)

    def _text_of(self, buffered: BufferedRollout) -> str:
        """Return the text of a rollout, decoded from its tokens."""
        return self.workload.text(read_blocks(buffered.output)[0].tolist())

    def facts(self, buffered: BufferedRollout) -> dict[str, object]:
        """Return what rollouts.jsonl says of a rollout's prompt (its place in the data, text and tokens) and turns."""
        line = buffered.line
        return {
            **({} if self._environment is None else turn_facts(buffered)),
            "step": buffered.step,
            "place": self.workload.place(line),
            "prompt": self.workload.records[line]["prompt"],
            "prompt_tokens": count_ids(self.workload.prompts[line]),
        }

    def request(self, command: Generate) -> Request:
        """Return the request with which a replica starts or continues a rollout."""
        buffered = self.rollouts[command.rollout]
        path = self._take_path(command.rollout, buffered)
        return Request(
            rollout=command.rollout,
            prompt=self.workload.prompts[buffered.line],
            priority=command.priority,
            max_tokens=buffered.length + self.room(buffered),
            prefix=buffered.output,
            seed=self._seed_of(command.rollout, buffered.num_tokens),
            output_path=path,
        )

    def room(self, buffered: BufferedRollout) -> int:
        """Return the number of tokens that the policy may still generate for a rollout."""
        room = self.workload.max_tokens - buffered.num_tokens
        return int(min(room, self.context_room(buffered)))

    def context_room(self, buffered: BufferedRollout) -> float:
        """Return the number of tokens that the context of a rollout may still have."""
        if self._environment is None:
            return inf
        num_prompt = count_ids(self.workload.prompts[buffered.line])
        return self._environment.max_context - num_prompt - buffered.length

    def observe(self, rollout: int, buffered: BufferedRollout, ids: list[int]) -> int:
        """Append the tokens of an observation to a rollout; return their number."""
        segments, path = (
            (TokenSegment(len(ids), is_policy=False),),
            self._take_path(rollout, buffered),
        )
        head = Head(rollout, buffered.length, len(ids), segments, [], "aborted", 0.0, 0.0)
        buffered.output += (write_attempt(head, ids, [0.0] * len(ids), path),)
        buffered.segments = merge_segments(buffered.segments, segments)
        return len(ids)

    def start_over(self, buffered: BufferedRollout) -> None:
        """Remove all tokens of a rollout, whose environment was lost."""
        self.step_statistics.waste(buffered.num_tokens, "a lost environment")
        for path in buffered.paths:
            remove_files(path)
        buffered.paths.clear()
        buffered.versions.clear()
        buffered.turn_rewards.clear()
        buffered.action_times.clear()
        buffered.num_late = 0
        buffered.num_tokens, buffered.output, buffered.segments = 0, (), ()
        buffered.is_truncated = False

    def truncate(self, rollout: int) -> None:
        """Record that the time of an episode is over."""
        self.rollouts[rollout].is_truncated = True

    def turn_texts(self, buffered: BufferedRollout) -> list[str]:
        """Return the text of each turn of the policy, without special tokens."""
        return [text for text, is_policy in self.parts(buffered) if is_policy]

    def parts(self, buffered: BufferedRollout) -> list[tuple[str, bool]]:
        """Return the text of each turn and observation, without special tokens, and whether the policy wrote it."""
        ids, start, texts = read_blocks(buffered.output)[0].tolist(), 0, []
        for segment in buffered.segments:
            end = start + segment.num_tokens
            texts.append((self.workload.text(ids[start:end]), segment.is_policy))
            start = end
        return texts

    @property
    def has_episodes(self) -> bool:
        """Whether rollouts have turns and observations."""
        return self._environment is not None

    def last_token(self, buffered: BufferedRollout) -> int:
        """Return the last token of a rollout with output."""
        return int(read_blocks(buffered.output[-1:])[0][-1])

    def record(self, rollout: int) -> Record:
        """Return the record of a rollout's prompt."""
        return self.workload.records[self.rollouts[rollout].line]

    def text(self, rollout: int) -> str:
        """Return the output text of a rollout that waits for its reward, without special tokens."""
        text = self.rollouts[rollout].text
        assert text is not None, f"rollout {rollout} does not wait for a reward"
        return text

    def reread(self, rollout: int) -> str:
        """Return the output text of an open rollout, decoded again from its tokens, without special tokens."""
        return self._text_of(self.rollouts[rollout])

    def sample(
        self,
        rollout: int,
        advantage: float,
        partner: int | None = None,
        *,
        turn_advantages: tuple[float, ...] = (),
        masks_truncated: bool = False,
    ) -> Sample:
        """Return a rollout as a sample for the trainer; `partner` is the other one of its pair, if any.

        With `turn_advantages` each turn has an advantage of its own.

        With `masks_truncated` it is left out of the loss if the maximum length cut it off.
        """
        buffered = self.rollouts[rollout]
        ends_with_observation = bool(buffered.segments) and not buffered.segments[-1].is_policy
        end = -1 if ends_with_observation else None  # nothing that is trained on follows it
        return Sample(
            rollout=rollout,
            prompt=self.workload.prompts[buffered.line],
            output=buffered.output[:end],
            segments=buffered.segments[:end],
            advantage=advantage,
            turn_advantages=turn_advantages,
            partner=partner,
            is_masked=masks_truncated and buffered.is_truncated,
        )

    def hold(self, rollouts: Iterable[int]) -> Hold:
        """Return a context with these open rollouts; their files stay until it ends, even if they are closed."""
        return Hold([self.rollouts[rollout] for rollout in rollouts], self.let_go)

    def keep_files(self) -> None:
        """Stop removing files of closed rollouts, because the run ends and a resume needs them."""
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
        """Record that one trainer will not train on a group."""
        if command.trainer == LEADER:
            self._give_up(command.group, command.reason)
        self.leave(command.group, command.trainer)

    def drop(self, command: Drop) -> None:
        """Record that no trainer will train on a group from now on."""
        if not self._done_with.has_left(command.group, LEADER):
            self._give_up(command.group, command.reason)
        self.close_group(command.group)
        self.workload.forget(command.group)

    def _give_up(self, group: int, reason: str) -> None:
        """Record that the primary trainer will not train on a group."""
        self.step_statistics.give_up(self.records_of([group]), reason)
        for rollout in self._rollouts(group):
            if (buffered := self.rollouts.get(rollout)) is not None:
                buffered.lost_for = reason
                self.step_statistics.waste(buffered.num_tokens, reason)

    def end(self, buffered: BufferedRollout, completion: Completion) -> Generated:
        """Append the tokens of an ended attempt; they count as wasted if the rollout was dropped meanwhile."""
        num_before = buffered.num_tokens
        event = buffered.end(completion)
        if buffered.lost_for:
            self.step_statistics.waste(buffered.num_tokens - num_before, buffered.lost_for)
        return event

    def join(self) -> None:
        """Keep groups that are drawn from now on for one more trainer."""
        self._done_with.join(self._next_group)

    def leave(self, group: int, trainer: int) -> None:
        """Record that a trainer is done with a group; remove the group when all trainers are."""
        if self._done_with.leave(group, trainer):
            self.close_group(group)

    def close_group(self, group: int) -> None:
        """Remove the rollouts of a group."""
        self._done_with.drop(group)
        for rollout in self._rollouts(group):
            closed = self.rollouts.pop(rollout, None)
            if closed is not None:
                self.let_go(closed)

    def _rollouts(self, group: int) -> range:
        size = self.workload.group_size
        return range(group * size, group * size + size)

    def _seed_of(self, rollout: int, num_tokens: int) -> int | None:
        """Return the seed of an attempt after `num_tokens` output tokens; each needs noise of its own."""
        if self._seed is None:
            return None
        place = (rollout, num_tokens) if num_tokens else (rollout,)
        seed: int = SeedSequence([self._seed, *place]).generate_state(1, np.uint64)[0]
        return int(seed) >> 1

    def _take_path(self, rollout: int, buffered: BufferedRollout) -> str | None:
        """Return the path of a token file for the next attempt."""
        if self._directory is None:
            return None
        attempt = 1 + attempt_of(buffered.paths[-1]) if buffered.paths else 0
        path = (
            f"{self._directory}/{rollout}.{attempt}"  # a string, because a Path interns its names
        )
        buffered.paths.append(path)
        return path

    def end_failed(self, command: Generate, *, is_lost: bool) -> Generated | None:
        """Record that an attempt failed; if its worker was lost, return an event with its saved tokens, if any."""
        buffered = self.rollouts.get(command.rollout)
        if buffered is None or self._directory is None or not buffered.paths:
            return None
        path = buffered.paths[-1]
        if not is_lost:
            remove_files(path)
            return None
        saved = take_over(command.rollout, path, buffered.length)
        if saved is None:
            return None
        event = buffered.end(saved)
        if saved.finish != "aborted":
            buffered.text = self._text_of(buffered)
        return event

    def let_go(self, buffered: BufferedRollout) -> None:
        """Release one use of a rollout's files; remove them after the last one."""
        buffered.num_holders -= 1
        if not buffered.num_holders and not self._keeps_files:
            for path in buffered.paths:
                remove_ended(path)
