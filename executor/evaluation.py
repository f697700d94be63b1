"""Evaluate policy versions on held-out prompts: the prompts, their requests and scores, and the files of results.

A replica knows a rollout of an evaluation by a number that no rollout of training has. Nothing of it
enters the rollout buffer. Each evaluation has the same prompts. Rollouts with seeds have the same
seeds in each evaluation, so that two scores differ by their weights alone.

Penalties on the length shape the training and are left out: a right answer that is long is right.

With an environment, a rollout is an episode. Its tokens are in a buffer of its own, and the engine has its environment
act, as in training. An evaluation that a killed driver began is repeated as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.random import SeedSequence

from streamrl.engine.messages import (
    HELD_OUT,
    DrawEvaluation,
    EndEvaluation,
    Evaluate,
    Evaluated,
    EvaluationDrawn,
    Generate,
    Verified,
    Verify,
)
from streamrl.executor.buffer import BufferedRollout, RolloutBuffer, turn_facts
from streamrl.executor.environment.episodes import EpisodeRunner
from streamrl.executor.environment.observation_tokens import ObservationEncoder
from streamrl.executor.environment.session import EnvironmentHost
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.roles import Completion, Request, Scoring, VerifierRole
from streamrl.executor.tokens import count_ids, encode_ids
from streamrl.executor.verifier.reward_checks import check_sources
from streamrl.record.evaluation import (
    EvaluationResult,
    Limits,
    by_prompt,
    passes_hint,
    scores_by_source,
    scores_of,
)
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.prompt_families import prompt_source
from streamrl.workload.prompt_records import PromptSource, Record, read_source, read_sources

logger = logging.getLogger(__name__)

FIRST_OUT = 0
"""Priority of evaluation rollouts in a replica's queue: before those of training, which wait for them."""


def verifier_of(config: EvaluationConfig, verifier: VerifierConfig) -> VerifierConfig:
    """Return the verifier of evaluations: the run's, or one with the scorer of `[evaluation]`."""
    if config.scorer is None:
        return verifier
    return replace(verifier, scorer=config.scorer, reward=(), pool=None)


def held_out_source(config: EvaluationConfig) -> PromptSource | None:
    """Return the records of `evaluation.prompts`, at most `evaluation.num_prompts`; None without that key."""
    if config.source is None:
        return None
    source = read_source(config.source, "evaluation.prompts")
    return source._replace(records=source.records[: config.num_prompts])


def check_held_out(
    config: EvaluationConfig, verifier: VerifierConfig, workload: WorkloadConfig
) -> None:
    """Raise `ValueError` if the held-out prompts cannot be read, or their rollouts cannot be scored.

    A share of the run's own prompts is checked for the scorer of `[evaluation]`; the caller checks that of the run.
    """
    source, own = held_out_source(config), verifier_of(config, verifier)
    if source is None and config.share is None:
        key = "evaluation.prompts"
        text = f"{key} is missing: set it to a file of held-out prompts, or set evaluation.share"
        raise RunError(key, None, str, text)
    if not own.rewards:  # the environment gives them
        return
    if source is not None:
        check_sources(own, [source])
    elif config.scorer is not None:
        check_sources(own, read_sources(workload))


class HeldOutPrompt(NamedTuple):
    """One held-out prompt."""

    record: Record
    tokens: bytes
    """Token ids; see `streamrl.executor.tokens`."""
    place: str
    """File and line of the record."""


def held_out_prompts(
    config: EvaluationConfig, limits: WorkloadConfig, workload: PromptWorkload
) -> list[HeldOutPrompt]:
    """Return the held-out prompts of a run: those of `evaluation.prompts`, or a share of the run's own.

    Raises:
        ValueError: a prompt is longer than `workload.max_prompt_tokens`, or none is left.
    """
    source = held_out_source(config)
    if source is None:
        lines = workload.held_out[: config.num_prompts]
        found = [
            HeldOutPrompt(workload.records[line], workload.prompts[line], workload.place(line))
            for line in lines
        ]
    else:
        ids = workload.tokenized(source)
        found = [
            HeldOutPrompt(record, encode_ids(tokens), source.line(at))
            for at, (record, tokens) in enumerate(zip(source.records, ids, strict=True))
        ]
    return _short_enough(found, limits.max_prompt_tokens, limits.overlong_prompts)


def _short_enough(prompts: list[HeldOutPrompt], most: int, overlong: str) -> list[HeldOutPrompt]:
    kept = []
    for prompt in prompts:
        num_tokens = count_ids(prompt.tokens)
        if num_tokens <= most:
            kept.append(prompt)
        elif overlong == "refuse":
            raise ValueError(
                f"{prompt.place}: {num_tokens} prompt tokens, but workload.max_prompt_tokens is {most}; "
                "raise it, or leave such prompts out: --set workload.overlong_prompts=filter"
            )
    if not kept:
        raise ValueError("evaluation: no held-out prompt is left")
    if len(kept) < len(prompts):
        logger.warning(
            f"{len(prompts) - len(kept)} of {len(prompts)} held-out prompts have more than "
            f"workload.max_prompt_tokens={most} tokens and are left out"
        )
    return kept


class _Output(NamedTuple):
    """What the policy wrote in a rollout."""

    text: str
    num_tokens: int
    is_truncated: bool
    turns: Mapping[str, object] = MappingProxyType({})
    """Of an episode; see `turn_facts`."""


@dataclass
class _Running:
    """The evaluation that runs now."""

    version: int
    began_at: float
    rewards: list[tuple[int, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_truncated: int = 0


Write = Callable[[dict[str, object]], None]


class HeldOut:
    """The held-out prompts of a run, and the results of the evaluation that runs now."""

    def __init__(
        self,
        config: EvaluationConfig,
        max_tokens: int,
        prompts: Sequence[HeldOutPrompt],
        verifier: VerifierRole,
        seed: int | None,
        write_rollout: Write,
        write_result: Callable[[EvaluationResult], None],
        *,
        is_alone: bool = False,
        episodes: HeldOutEpisodes | None = None,
        bounds: Limits | None = None,
    ) -> None:
        """Take the prompts, what scores their rollouts, the seed of rollouts that have one, and where results go.

        `bounds` are the least and the most reward of a rollout, if they are known.

        `is_alone` if the run trains nothing: its version has not the number of the step whose weights it evaluates.
        A run without `episodes` has rollouts of one turn.
        """
        self.episodes = episodes
        self._is_alone = is_alone
        self._config = config
        self._max_tokens = max_tokens
        self._prompts = prompts
        self._verifier = verifier
        self._seed = seed
        self._write_rollout = write_rollout
        self._write_result = write_result
        self._bounds = bounds
        self._running: _Running | None = None
        self._is_hinted = False
        self.on_replicas: dict[int, int] = {}
        """Replica of each rollout that is generated now, by its number there."""

    def draw(self, command: DrawEvaluation, now: float) -> EvaluationDrawn:
        """Begin an evaluation; return its prompts, which are the same for every version."""
        self._running = _Running(command.version, now)
        if self.episodes is not None:
            self.episodes.begin(len(self._prompts), self._config.samples)
        tokens = tuple([count_ids(prompt.tokens) for prompt in self._prompts])
        return EvaluationDrawn(command.version, self._config.samples, tokens)

    def request(self, command: Evaluate) -> Request:
        """Return the request with which a replica generates a rollout, or a turn of it."""
        if self.episodes is not None:
            return self.episodes.request(command)
        prompt = self._prompts[command.rollout // self._config.samples]
        seed = None
        if self._seed is not None:
            (state,) = SeedSequence([self._seed, HELD_OUT, command.rollout]).generate_state(
                1, np.uint64
            )
            seed = int(state) >> 1
        return Request(
            rollout=HELD_OUT + command.rollout,
            prompt=prompt.tokens,
            priority=FIRST_OUT,
            max_tokens=self._max_tokens,
            seed=seed,
            evaluates=True,
        )

    async def score(self, command: Evaluate, completion: Completion) -> Evaluated:
        """Return the event of a rollout that was generated, with its reward; or of a turn.

        Raises:
            RuntimeError: the rollout was aborted, or cannot be scored.
        """
        if self.episodes is not None:
            return self.episodes.end_turn(command, completion)
        if completion.finish == "aborted" or completion.text is None:
            raise RuntimeError("the evaluation was ended")
        num_tokens = completion.output.num_tokens
        record = self._prompts[command.rollout // self._config.samples].record
        scoring = await self._verifier.verify(completion.text, None, record)
        is_truncated = completion.finish == "length"
        output = _Output(completion.text, num_tokens, is_truncated=is_truncated)
        self._enter(command.version, command.rollout, scoring, output)
        return Evaluated(
            command.rollout,
            command.version,
            num_tokens,
            scoring.reward,
            completion.run_time,
            completion.prefill_time,
            is_truncated=is_truncated,
        )

    async def verify(self, command: Verify) -> Verified:
        """Compute the reward of an episode that is over.

        Raises:
            RuntimeError: it cannot be scored.
        """
        assert self.episodes is not None, "only an episode is scored by a command of its own"
        scoring = await self.episodes.score(command.rollout, self._verifier)
        if self._running is not None:
            rollout, output = command.rollout - HELD_OUT, self.episodes.output(command.rollout)
            self._enter(self._running.version, rollout, scoring, output)
        return Verified(command.rollout, scoring.reward)

    def _enter(self, version: int, rollout: int, scoring: Scoring, output: _Output) -> None:
        """Record a rollout with its reward, and write its line.

        Raises:
            ValueError: the reward is not finite.
        """
        if not isfinite(scoring.reward):
            raise ValueError(f"a reward must be a finite number, got {scoring.reward}")
        running = self._running
        if running is not None and running.version == version:
            running.rewards.append((rollout, scoring.reward))
            running.tokens.append(output.num_tokens)
            running.num_truncated += output.is_truncated
        prompt, sample = divmod(rollout, self._config.samples)
        self._write_rollout(
            {
                "step": version,
                "prompt_number": prompt,
                "sample": sample,
                "place": self._prompts[prompt].place,
                "prompt": self._prompts[prompt].record["prompt"],
                "text": output.text,
                "num_tokens": output.num_tokens,
                "is_truncated": output.is_truncated,
                **output.turns,
                "reward": scoring.reward,
                **({"rewards": dict(scoring.scores)} if scoring.scores else {}),
                **({} if scoring.fault is None else {"verifier": scoring.fault}),
            }
        )

    def close(self) -> None:
        """End all scoring at once."""
        self._verifier.close()

    def end(self, command: EndEvaluation, now: float) -> None:
        """Write the result of an evaluation that has ended, and log it."""
        running, self._running = self._running, None
        if running is None or command.reason:
            logger.info(f"evaluation{self._of(command.version)} ended: {command.reason}")
            return
        if not running.rewards:
            logger.warning(
                f"evaluation{self._of(command.version)} has no score: all rollouts failed"
            )
            return
        result = self._result(running, now)
        logger.info(f"evaluation{self._of(result.step)}: {say(result)}")
        if (hint := passes_hint(result, self._config)) and not self._is_hinted:
            self._is_hinted = True
            logger.warning(hint)
        self._write_result(result)

    def _of(self, version: int) -> str:
        """Return the step in the words of a log line; nothing if the run only evaluates a model."""
        return "" if self._is_alone else f" of step {version}"

    def _result(self, running: _Running, now: float) -> EvaluationResult:
        rewards, num = by_prompt(running.rewards, self._config.samples), len(running.rewards)
        sources = [prompt_source(each.record) for each in self._prompts]
        return EvaluationResult(
            step=running.version,
            time=now,
            seconds=now - running.began_at,
            num_prompts=len(self._prompts),
            samples=self._config.samples,
            confidence=self._config.confidence,
            scores=scores_of(rewards, self._config, self._bounds),
            sources=scores_by_source(rewards, sources, self._config, self._bounds),
            bounds=self._bounds,
            mean_tokens=sum(running.tokens) / num,
            truncated_share=running.num_truncated / num,
            num_failed=len(self._prompts) * self._config.samples - num,
            rewards=rewards,
        )


class HeldOutEpisodes:
    """The episodes of the evaluation that runs now: their tokens, and the environments that answer their turns."""

    def __init__(
        self,
        config: EnvironmentConfig,
        workload: PromptWorkload,
        prompts: Sequence[HeldOutPrompt],
        max_tokens: int,
        host: EnvironmentHost,
        encoder: ObservationEncoder,
        seed: int | None,
        *,
        has_scorer: bool,
    ) -> None:
        """Take the parts of a run that its own episodes have too, and the held-out prompts.

        With a `seed` each turn has one. With `has_scorer` a verifier scores the last turn.
        """
        records, ids = [each.record for each in prompts], [each.tokens for each in prompts]
        own = workload.with_prompts(records, ids, max_tokens)
        self._buffer = RolloutBuffer(own, 1, seed, environment=config)
        self.runner = EpisodeRunner(config, host, encoder, self._buffer)
        self._has_scorer = has_scorer

    def begin(self, num_prompts: int, samples: int) -> None:
        """Begin an episode for each sample of each prompt, and forget those of the last evaluation."""
        self._buffer.rollouts = {
            HELD_OUT + number: BufferedRollout((), number // samples)
            for number in range(num_prompts * samples)
        }

    def request(self, command: Evaluate) -> Request:
        """Return the request with which a replica generates the next turn of an episode."""
        generate = Generate(HELD_OUT + command.rollout, command.replica, FIRST_OUT)
        return replace(self._buffer.request(generate), evaluates=True)

    def end_turn(self, command: Evaluate, completion: Completion) -> Evaluated:
        """Append a turn that was generated, and return its event.

        Raises:
            RuntimeError: the evaluation was ended.
        """
        buffered = self._buffer.rollouts[completion.rollout]
        if completion.finish == "aborted" and not buffered.is_truncated:
            raise RuntimeError("the evaluation was ended")
        event = self._buffer.end(buffered, completion)
        return Evaluated(
            command.rollout,
            command.version,
            event.tokens,
            0.0,
            event.run_time,
            event.prefill_time,
            is_truncated=event.finish == "length",
            is_turn=True,
        )

    def without_room(self, command: Evaluate) -> Evaluated | None:
        """Return the end of an episode that has the maximum length before its next turn; None if there is room."""
        buffered = self._buffer.rollouts[HELD_OUT + command.rollout]
        if self._buffer.room(buffered):
            return None
        buffered.is_truncated = True
        return Evaluated(
            command.rollout,
            command.version,
            buffered.num_tokens,
            0.0,
            0.0,
            0.0,
            is_truncated=True,
            is_turn=True,
        )

    def truncate(self, number: int) -> None:
        """Record that the time of an episode is over."""
        self._buffer.truncate(number)

    async def score(self, number: int, verifier: VerifierRole) -> Scoring:
        """Return the reward of an episode; see `EpisodeRunner.score`."""
        scorer = verifier if self._has_scorer else None
        return await self.runner.score(number, scorer, scores_length=False)

    def output(self, number: int) -> _Output:
        """Return what the policy wrote in an episode, with its turns."""
        buffered = self._buffer.rollouts[number]
        return _Output(
            self._buffer.reread(number),
            buffered.num_tokens,
            is_truncated=buffered.is_truncated,
            turns=turn_facts(buffered),
        )


def say(result: EvaluationResult) -> str:
    """Return a line with the scores of an evaluation."""
    scores = ", ".join(f"{name} {score}" for name, score in result.scores.items())
    failed = f"; {result.num_failed} rollouts failed and are left out" if result.num_failed else ""
    return (
        f"{scores} at {result.confidence:.0%} confidence, "
        f"{result.num_prompts} prompts, {result.seconds:.1f} s{failed}"
    )
