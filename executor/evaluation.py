"""Evaluate policy versions on held-out prompts: the prompts, their requests and scores, and the files of results.

A replica knows a rollout of an evaluation by a number that no rollout of training has. Nothing of it
enters the rollout buffer. Each evaluation has the same prompts. Rollouts with seeds have the same
seeds in each evaluation, so that two scores differ by their weights alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.random import SeedSequence

from streamrl.engine.messages import (
    DrawEvaluation,
    EndEvaluation,
    Evaluate,
    Evaluated,
    EvaluationDrawn,
)
from streamrl.executor.prompts import PromptWorkload, tokenize
from streamrl.executor.roles import Completion, Request, VerifierRole
from streamrl.executor.tokens import count_ids, encode_ids
from streamrl.record.evaluation import EvaluationResult, by_prompt, scores_of
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.prompt_records import PromptSource, Record, read_source

logger = logging.getLogger(__name__)

FIRST = 1 << 40
"""Number by which replicas know the first rollout of an evaluation; training has fewer rollouts."""
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
        ids = tokenize(source, workload.tokenizer, limits.template_arguments)
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
    ) -> None:
        """Take the prompts, what scores their rollouts, the seed of rollouts that have one, and where results go.

        `is_alone` if the run trains nothing: its version has not the number of the step whose weights it evaluates.
        """
        self._is_alone = is_alone
        self._config = config
        self._max_tokens = max_tokens
        self._prompts = prompts
        self._verifier = verifier
        self._seed = seed
        self._write_rollout = write_rollout
        self._write_result = write_result
        self._running: _Running | None = None
        self.on_replicas: dict[int, int] = {}
        """Replica of each rollout that is generated now, by its number there."""

    def draw(self, command: DrawEvaluation, now: float) -> EvaluationDrawn:
        """Begin an evaluation; return its prompts, which are the same for every version."""
        self._running = _Running(command.version, now)
        tokens = tuple([count_ids(prompt.tokens) for prompt in self._prompts])
        return EvaluationDrawn(command.version, self._config.samples, tokens)

    def request(self, command: Evaluate) -> Request:
        """Return the request with which a replica generates a rollout."""
        prompt = self._prompts[command.rollout // self._config.samples]
        seed = None
        if self._seed is not None:
            (state,) = SeedSequence([self._seed, FIRST, command.rollout]).generate_state(
                1, np.uint64
            )
            seed = int(state) >> 1
        return Request(
            rollout=FIRST + command.rollout,
            prompt=prompt.tokens,
            priority=FIRST_OUT,
            max_tokens=self._max_tokens,
            seed=seed,
            evaluates=True,
        )

    async def score(self, command: Evaluate, completion: Completion) -> Evaluated:
        """Return the event of a rollout that was generated, with its reward.

        Raises:
            RuntimeError: the rollout was aborted, or cannot be scored.
        """
        if completion.finish == "aborted" or completion.text is None:
            raise RuntimeError("the evaluation was ended")
        prompt, sample = divmod(command.rollout, self._config.samples)
        held_out, num_tokens = self._prompts[prompt], completion.output.num_tokens
        scoring = await self._verifier.verify(completion.text, num_tokens, held_out.record)
        is_truncated = completion.finish == "length"
        running = self._running
        if running is not None and running.version == command.version:
            running.rewards.append((command.rollout, scoring.reward))
            running.tokens.append(num_tokens)
            running.num_truncated += is_truncated
        self._write_rollout(
            {
                "step": command.version,
                "prompt_number": prompt,
                "sample": sample,
                "place": held_out.place,
                "prompt": held_out.record["prompt"],
                "text": completion.text,
                "num_tokens": num_tokens,
                "is_truncated": is_truncated,
                "reward": scoring.reward,
                **({"rewards": dict(scoring.scores)} if scoring.scores else {}),
                **({} if scoring.fault is None else {"verifier": scoring.fault}),
            }
        )
        return Evaluated(
            command.rollout,
            command.version,
            num_tokens,
            scoring.reward,
            completion.run_time,
            completion.prefill_time,
            is_truncated=is_truncated,
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
        self._write_result(result)

    def _of(self, version: int) -> str:
        """Return the step in the words of a log line; nothing if the run only evaluates a model."""
        return "" if self._is_alone else f" of step {version}"

    def _result(self, running: _Running, now: float) -> EvaluationResult:
        rewards, num = by_prompt(running.rewards, self._config.samples), len(running.rewards)
        return EvaluationResult(
            step=running.version,
            time=now,
            seconds=now - running.began_at,
            num_prompts=len(self._prompts),
            samples=self._config.samples,
            confidence=self._config.confidence,
            scores=scores_of(rewards, self._config),
            mean_tokens=sum(running.tokens) / num,
            truncated_share=running.num_truncated / num,
            num_failed=len(self._prompts) * self._config.samples - num,
            rewards=rewards,
        )


def say(result: EvaluationResult) -> str:
    """Return a line with the scores of an evaluation."""
    scores = ", ".join(f"{name} {score}" for name, score in result.scores.items())
    failed = f"; {result.num_failed} rollouts failed and are left out" if result.num_failed else ""
    return (
        f"{scores} at {result.confidence:.0%} confidence, "
        f"{result.num_prompts} prompts, {result.seconds:.1f} s{failed}"
    )
