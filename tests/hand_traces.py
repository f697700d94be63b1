"""Traces written by hand, so small that pencil and paper give every share."""

from __future__ import annotations

from typing import Any

from streamrl.engine.messages import (
    Command,
    DrawnGroup,
    DrawPrompts,
    Event,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaStarted,
    RunStarted,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    Take,
    Train,
    Trained,
    TrainerStarted,
    Verified,
    Verify,
    Woke,
)
from streamrl.engine.trace import Facts, Trace
from tests.runs import small_run

LEARNERS: dict[str, Any] = {
    "trainer": [
        {"pool": "near"},
        {
            "name": "second",
            "pool": "near",
            "tensor_parallel": 2,
            "algorithm": {"prompts_per_step": 2},
        },
    ],
    "verifier": {"pool": "near", "workers": 2, "gpus_per_worker": 1, "time": "2 s"},
}
"""Changes of a hand trace: a second learner of two GPUs and batches of two, and two verifiers of one GPU."""

TIERS: Facts = {
    "prefill": {"measured": 1.0},
    "decode": {"measured": 1.0},
    "score": {"roofline": 1.0},
    "train": {"roofline": 1.0},
    "train second": {"composed": 1.0},
}


class HandTrace:
    """A trace of one-GPU replicas and a one-GPU trainer, or more; a group is one rollout of the same id."""

    def __init__(self, replicas: int = 1, **changes: Any) -> None:
        algorithm = {"algorithm.name": "ppo", "algorithm.group_size": 1}
        sizes = {"rollout.replicas": replicas, "trainer.tensor_parallel": 1}
        prompts = {"algorithm.prompts_per_step": 1, "algorithm.steps": 1}
        system = {"policies.system": "stream-sync"}
        named = {key.replace("__", "."): value for key, value in changes.items()}
        run = small_run({**algorithm, **sizes, **prompts, **system, **named})
        self.trace = Trace(run, "simulated", TIERS)
        self.num_replicas = replicas
        self.num_groups = 0

    def at(self, time: float, event: Event, *commands: Command) -> None:
        """Record an event and what it led to."""
        self.trace.record(time, event, list(commands))

    def command(self, time: float, *commands: Command) -> None:
        """Record commands that no event of interest led to."""
        self.at(time, Woke(time), *commands)

    def begin(self, replicas_at: float = 0.0, trainer_at: float = 0.0) -> None:
        """Start the run; replicas and trainer come up later or at once."""
        starts = [StartReplica(replica, 0) for replica in range(self.num_replicas)]
        trainers = range(self.trace.run.num_trainers)
        self.at(0.0, RunStarted(0, 0), *(StartTrainer(trainer, 0) for trainer in trainers), *starts)
        ready: list[tuple[float, Event]] = [
            (replicas_at, ReplicaStarted(replica, 0)) for replica in range(self.num_replicas)
        ]
        ready += [(trainer_at, TrainerStarted(trainer, 0)) for trainer in trainers]
        for time, event in sorted(ready, key=lambda r: r[0]):
            self.at(time, event)

    def draw(self, time: float, step: int, num_rollouts: int, is_taken: bool = True) -> None:
        """Draw the next rollouts for `step`, and take them for the coming step."""
        ids = range(self.num_groups, self.num_groups + num_rollouts)
        self.num_groups += num_rollouts
        groups = tuple(DrawnGroup(i, (i,), 40, (10,)) for i in ids)
        self.command(time, DrawPrompts(step, num_rollouts, 0))
        takes = [Take(i, step, 0) for i in ids] if is_taken else []
        self.at(time, PromptsDrawn(step, 0, groups), *takes)

    def generate(self, time: float, *rollouts: int, replica: int = 0) -> None:
        """Send rollouts to a replica."""
        self.command(time, *(Generate(rollout, replica, 0) for rollout in rollouts))

    def generated(
        self,
        time: float,
        rollout: int,
        run_time: float,
        version: int = 0,
        prefill_time: float = 0.0,
        tokens: int = 100,
        verified_at: float | None = None,
    ) -> None:
        """End a rollout of 100 tokens, whose reward of 0.5 is known at once or later."""
        event = Generated(rollout, tokens, "stop", version, run_time, prefill_time)
        self.at(time, event, Verify(rollout))
        self.at(time if verified_at is None else verified_at, Verified(rollout, 0.5))

    def train(
        self, start: float, end: float, version: int, *rollouts: int, trainer: int = 0
    ) -> None:
        """Train on rollouts from `start` to `end` seconds and make `version`."""
        self.command(start, Train(rollouts, trainer))
        self.at(end, Trained(rollouts, trainer), Step(version, rollouts, trainer))
        self.at(end, Stepped(version, trainer))

    def sort(self) -> None:
        """Put the entries in order of time."""
        self.trace.entries.sort(key=lambda entry: entry.time)
