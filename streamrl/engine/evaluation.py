"""Evaluations of policy versions on held-out prompts, as the engine sees them.

A version is *due* from its step until its weights are on every serving replica. Then its prompts are
drawn, and it is *running* until each of its rollouts has a score. Evaluation rollouts are no
`Rollout`: they are in no group, no batch and no statistics of the run. They are numbered from 0 in
each evaluation; rollout r is of prompt r // samples.

With an environment each of them is an episode. It has a `Rollout` of its own here, and shares
queues and limits of `streamrl.engine.environments` with the episodes of training:

    queued -> Act (start) -> Evaluate (turn) -> Act -> Evaluate (turn) -> ... -> Verify

| held                                    | until                                                   |
|-----------------------------------------|---------------------------------------------------------|
| the next optimizer step                 | the evaluation runs; with `waits`, until it has ended   |
| new weights on replicas, surplus stops  | it has ended                                            |
| the start of training rollouts          | with `waits`: from due until it has ended               |

A rollout whose replica is lost runs again on another one; an episode repeats only its turn. If a trainer is lost with the version, its
evaluation ends without a result; the version is evaluated when it is made again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from streamrl.engine.entities import Group, Phase, Replica, Rollout
from streamrl.engine.environments import Environments
from streamrl.engine.messages import HELD_OUT, Evaluate, EvaluationDrawn
from streamrl.runfile.evaluation_config import EvaluationConfig

RUNNING: tuple[Phase, ...] = ("generating", "verifying", "acting")
"""Phases of an episode for which a command runs."""


@dataclass(slots=True)
class Evaluations:
    """Which version is evaluated, and where its rollouts are."""

    config: EvaluationConfig
    num_steps: int
    max_attempts: int
    due: int | None = None
    """Version that is to be evaluated next."""
    running: int | None = None
    """Version whose evaluation was begun and has not ended."""
    is_drawing: bool = False
    """Whether its prompts are being drawn."""
    is_void: bool = False
    """Whether the running one ends without a result, because its version was lost."""
    to_send: deque[int] = field(default_factory=deque)
    """Rollouts to send to a replica."""
    sent: dict[int, int] = field(default_factory=dict)
    """Replica of each rollout that has been sent and has not ended."""
    failures: dict[int, int] = field(default_factory=dict)
    """Failed attempts by rollout; those of lost replicas do not count."""
    episodes: dict[int, Rollout] = field(default_factory=dict)
    """With an environment: the episodes that have not ended, or whose environment is open, by their
    number beside training (`HELD_OUT`).
    """
    num_rollouts: int = 0
    """Rollouts of the running evaluation."""
    num_ended: int = 0
    """Its rollouts with a score, and those that failed too often."""

    @property
    def is_pending(self) -> bool:
        """Whether a version is due or running."""
        return self.due is not None or self.running is not None

    @property
    def has_open_rollouts(self) -> bool:
        """Whether a rollout, or the environment of an episode, has not ended."""
        return bool(self.sent or self.episodes)

    @property
    def holds_training(self) -> bool:
        """Whether no training rollout may start."""
        return self.is_pending and not self.config.beside

    @property
    def holds_step(self) -> bool:
        """Whether the primary trainer must not make its next step."""
        return self.due is not None or (self.running is not None and not self.config.beside)

    @property
    def has_ended(self) -> bool:
        """Whether every rollout of the running evaluation has a score, or failed too often."""
        is_drawn = self.running is not None and not self.is_drawing
        return is_drawn and self.num_ended == self.num_rollouts

    def see_version(self, version: int) -> None:
        """Record that the trainer has a version, which may become due."""
        if self.config.is_due(version, self.num_steps):
            self.due = version

    def fall_back(self, version: int) -> None:
        """Record that versions after `version` are lost."""
        if self.due is not None and self.due > version:
            self.due = None
        if self.running is not None and self.running > version:
            self.is_void = True

    def begin(self, version: int) -> None:
        """Record that the prompts of an evaluation are drawn."""
        self.due, self.running, self.is_drawing, self.is_void = None, version, True, False
        self.num_rollouts = self.num_ended = 0

    def draw(self, event: EvaluationDrawn) -> None:
        """Record the prompts of the running evaluation."""
        if event.version != self.running or not self.is_drawing:
            raise ValueError(f"prompts drawn for an evaluation of {event.version}, not asked for")
        self.is_drawing = False
        self.num_rollouts = len(event.prompt_tokens) * event.samples
        self.to_send.extend(range(self.num_rollouts))

    def send(self, command: Evaluate) -> None:
        """Record that the next rollout is sent to a replica."""
        if (rollout := self.to_send.popleft()) != command.rollout:
            raise ValueError(f"{command} must wait for rollout {rollout} of the evaluation")
        self.sent[command.rollout] = command.replica

    def end(self, rollout: int) -> None:
        """Record that a rollout has its score."""
        del self.sent[rollout]
        self.num_ended += 1

    def fail(self, rollout: int, *, is_lost: bool) -> None:
        """Record that a rollout failed: it runs again, unless it has failed too often."""
        del self.sent[rollout]
        if self.running is None or self.is_void:
            return
        if not is_lost and self.has_failed_too_often(rollout):
            self.num_ended += 1
        else:
            self.to_send.append(rollout)

    def has_failed_too_often(self, rollout: int) -> bool:
        """Count a failure of a rollout; return whether it was the last one that it may have."""
        self.failures[rollout] = self.failures.get(rollout, 0) + 1
        return self.failures[rollout] >= self.max_attempts

    def finish(self, environments: Environments | None) -> list[Rollout]:
        """Record that the running evaluation is over. What was sent ends by its own events.

        Return the episodes whose reward was to be requested.
        """
        self.running = None
        self.is_drawing = self.is_void = False
        self.to_send.clear()
        self.failures.clear()
        if environments is None:
            return []
        unverified = []
        for episode in list(self.episodes.values()):
            episode.group.is_dropped = True
            environments.end(episode)
            if episode.has_environment:
                environments.to_close.append(episode)
            if episode.phase == "finished":
                unverified.append(episode)
            if episode.phase not in RUNNING:
                self.settle(episode)
        return unverified

    # Episodes -------------------------------------------------------------------------------------

    def begin_episodes(self, event: EvaluationDrawn) -> list[Rollout]:
        """Turn the drawn rollouts into episodes, and return them. Each is sent once it has an environment."""
        version, samples = event.version, event.samples
        groups = [
            Group(HELD_OUT + prompt, version, version, tokens)
            for prompt, tokens in enumerate(event.prompt_tokens)
        ]
        found = [
            Rollout(HELD_OUT + number, groups[number // samples], 0) for number in self.to_send
        ]
        self.to_send.clear()
        self.episodes.update({rollout.id: rollout for rollout in found})
        return found

    def await_turn(self, episode: Rollout) -> None:
        """Record that an episode's next turn is to be generated."""
        episode.phase = "waiting"
        self.to_send.append(episode.id - HELD_OUT)

    def send_turn(self, command: Evaluate, replica: Replica) -> None:
        """Record the replica of an episode's turn."""
        episode = self.episodes[HELD_OUT + command.rollout]
        episode.phase, episode.replica, episode.is_aborting = "generating", replica, False

    def return_turn(self, number: int) -> Rollout:
        """Return the episode of a rollout whose turn was generated, or failed."""
        del self.sent[number]
        episode = self.episodes[HELD_OUT + number]
        assert episode.replica is not None, "its turn was sent to a replica"
        episode.home, episode.replica, episode.phase = episode.replica.id, None, "waiting"
        return episode

    def end_episode(self, number: int, environments: Environments) -> None:
        """Record that an episode has its reward."""
        episode = self.episodes[number]
        self.num_ended += not episode.group.is_dropped
        if episode.has_environment:
            environments.to_close.append(episode)
        self.settle(episode)

    def leave_out(self, episode: Rollout, environments: Environments) -> None:
        """Record that an episode has failed too often."""
        environments.end(episode)
        if episode.has_environment:
            environments.to_close.append(episode)
        self.num_ended += 1
        self.settle(episode)

    def settle(self, episode: Rollout) -> None:
        """Record that nothing runs for an episode that is over. It is forgotten once its environment is closed."""
        episode.phase = "ready"
        if not episode.has_environment:
            del self.episodes[episode.id]
