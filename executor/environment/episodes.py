"""Carry out `Act` and `Close`: let environments answer the turns of episodes, and append the observations.

An environment of a rollout is a `Session`. When it was lost, a new one repeats the actions of the earlier turns, whose
texts are decoded from the sampled tokens. Rewards of repeated actions replace the earlier ones.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from math import fsum

from streamrl.engine.messages import Act, Close, Observed
from streamrl.executor.buffer import BufferedRollout, RolloutBuffer
from streamrl.executor.environment.observation_tokens import ObservationEncoder
from streamrl.executor.environment.session import (
    Answer,
    EnvironmentFaultError,
    EnvironmentHost,
    Observation,
    Session,
)
from streamrl.executor.roles import Scoring, VerifierRole
from streamrl.runfile.choices import ExtensionError
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.formatting import format_duration

logger = logging.getLogger(__name__)

FEW_STARTS = 8
"""Starts that fail before the first one succeeds, after which the run ends. Assumption: a class that fails so often with
an error of its own never begins an episode.
"""


class EpisodeRunner:
    """The environments of all episodes of a run."""

    def __init__(
        self,
        config: EnvironmentConfig,
        host: EnvironmentHost,
        encoder: ObservationEncoder,
        buffer: RolloutBuffer,
    ) -> None:
        self._config = config
        self._host = host
        self._encoder = encoder
        self._buffer = buffer
        self._sessions: dict[int, Session] = {}
        self._ends: dict[int, bool] = {}
        """By rollout that is judged: whether its environment is closed afterwards."""
        self._num_failed: int | None = 0
        """Starts that have failed; None after the first one that succeeded."""
        self._num_actions = 0
        self._num_late: Counter[str] = Counter()
        """Actions that reached their limit, by the MCP server that they waited for; "" without one."""

    async def act(self, command: Act) -> Observed:
        """Let the environment of a rollout answer a turn, or start it, or both.

        Raises:
            WorkerLostError: the environment was lost.
            EnvironmentFaultError: the environment raised an error.
        """
        rollout = command.rollout
        if rollout not in self._buffer.rollouts:  # its group was dropped meanwhile
            return Observed(rollout, 0)
        with self._buffer.hold([rollout]) as (buffered,):
            try:
                return await self._act(command, buffered)
            except Exception:
                if rollout not in self._sessions:  # the engine has closed it
                    return Observed(rollout, 0)
                self._end(rollout)
                raise

    async def _act(self, command: Act, buffered: BufferedRollout) -> Observed:
        rollout, added = command.rollout, 0
        if command.starts:
            self._end(rollout)
            if self._config.after_loss == "restart" and buffered.output:
                self._buffer.start_over(buffered)
            added = await self._start(rollout, buffered)
        session = self._sessions[rollout]
        answer = await self._catch_up(session, buffered, command.turn, command.time_limit)
        if answer is None or command.turn <= buffered.num_answered:
            return Observed(rollout, added, session.is_over)
        tokens = 0 if session.is_over else self._append(rollout, buffered, answer.observation)
        return Observed(rollout, tokens, session.is_over, answer.timed_out)

    async def _start(self, rollout: int, buffered: BufferedRollout) -> int:
        """Start an environment; return the new tokens of its first observation."""
        session = self._sessions[rollout] = Session(self._host)
        task = self._buffer.workload.records[buffered.line]
        buffered.turn_rewards.clear()
        buffered.action_times.clear()
        buffered.num_late = 0
        began_at = time.monotonic()
        try:
            observation = await session.reset(task)
        except EnvironmentFaultError as error:
            self._note_failure(error)
            raise
        self._num_failed = None
        buffered.start_time = time.monotonic() - began_at
        if buffered.output:
            return 0
        ids = self._encoder.first(task["prompt"], observation)
        return self._buffer.observe(rollout, buffered, ids) if ids else 0

    def _note_failure(self, error: EnvironmentFaultError) -> None:
        """Count a failed start.

        Raises:
            ExtensionError: no environment can be started.
        """
        if self._num_failed is None:
            return
        self._num_failed += 1
        if self._num_failed >= FEW_STARTS:
            raise ExtensionError(
                f"environment.implementation {self._config.implementation!r} begins no episode: all of its first "
                f"{FEW_STARTS} starts failed, the last one with: {error}. `streamrl doctor` tries one start"
            ) from None

    async def _catch_up(
        self, session: Session, buffered: BufferedRollout, turn: int, limit: float | None
    ) -> Answer | None:
        """Let an environment answer all turns up to `turn`; return its last answer, if it gave one."""
        answer = None
        texts = self._buffer.turn_texts(buffered) if session.num_steps < turn else []
        while session.num_steps < turn and not session.is_over:
            is_last = session.num_steps + 1 == turn
            seconds = limit if is_last else self._config.action_time_limit
            began_at = time.monotonic()
            answer = await session.step(texts[session.num_steps], seconds)
            buffered.action_times.append(time.monotonic() - began_at)
            buffered.turn_rewards.append(answer.reward)
            buffered.num_late += answer.timed_out
            self._note_time(answer, seconds)
        return answer

    def _note_time(self, answer: Answer, limit: float | None) -> None:
        """Count an action, and log the first, second, fourth, eighth, ... one that reached its limit."""
        self._num_actions += 1
        if not answer.timed_out:
            return
        self._num_late[answer.server] += 1
        num = self._num_late[answer.server]
        if num & (num - 1) == 0:
            name = f"environment.implementation {str(self._config.implementation)!r}"
            whose = f"the MCP server {answer.server!r}" if answer.server else name
            limit_text = "its time" if limit is None else format_duration(limit)
            logger.warning(
                f"{whose} did not answer {num:,} of {self._num_actions:,} actions within {limit_text} "
                "(environment.action_time_limit); the policy reads that they timed out"
            )

    def _append(self, rollout: int, buffered: BufferedRollout, observation: Observation) -> int:
        """Append an observation, and return its tokens; one that fills the context ends the episode unread."""
        if observation is None:
            raise EnvironmentFaultError("the observation is None, but the episode is not over")
        ids = self._encoder.next(observation, self._buffer.last_token(buffered))
        if self._buffer.context_room(buffered) <= len(ids):
            return len(ids)
        return self._buffer.observe(rollout, buffered, ids)

    async def score(
        self, rollout: int, verifier: VerifierRole | None, *, scores_length: bool = True
    ) -> Scoring:
        """Return the rewards that the environment gave, plus a verifier's score of the last turn if there is one.

        The environment judges the last turn first, unless it has answered it. Without `scores_length`, no score
        depends on the number of tokens.

        Raises:
            WorkerLostError: the environment was lost; another call starts a new one.
            EnvironmentFaultError: the environment raised an error.
        """
        with self._buffer.hold([rollout]) as (buffered,):
            await self._judge(rollout, buffered)
            last_turn, given = self._buffer.turn_texts(buffered)[-1], fsum(buffered.turn_rewards)
        if verifier is None:
            return Scoring(given, None)
        record = self._buffer.workload.records[buffered.line]
        num_tokens = buffered.num_tokens if scores_length else None
        scored = await verifier.verify(last_turn, num_tokens, record)
        return scored._replace(reward=given + scored.reward)

    async def _judge(self, rollout: int, buffered: BufferedRollout) -> None:
        session = self._sessions.get(rollout)
        if len(buffered.turn_rewards) == buffered.num_turns or (session and session.is_over):
            return
        self._ends[rollout] = session is None
        try:
            if session is None or session.is_closed:
                await self._start(rollout, buffered)
            limit = self._config.action_time_limit
            await self._catch_up(self._sessions[rollout], buffered, buffered.num_turns, limit)
        except Exception:
            self._ends[rollout] = True
            raise
        finally:
            if self._ends.pop(rollout):
                self._end(rollout)

    def close(self, command: Close) -> None:
        """Close the environment of a rollout, after a judgement that runs. A running action ends now."""
        if command.rollout in self._ends:
            self._ends[command.rollout] = True
        else:
            self._end(command.rollout)

    def _end(self, rollout: int) -> None:
        session = self._sessions.pop(rollout, None)
        if session is not None:
            session.close()

    def kill(self, rollout: int) -> None:
        """Kill the environment of a rollout, which hangs."""
        session = self._sessions.get(rollout)
        if session is not None:
            session.kill()

    def stop(self) -> None:
        """Kill all environments; may be called from any thread."""
        self._sessions.clear()
        self._host.close()
