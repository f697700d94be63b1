"""The worker of the trainer: trains on rollouts as they arrive, makes and pushes weight versions.

Invariants:
1. The gradient of a batch does not depend on how it was split over calls of `train`, nor on their
   order: sums accumulate, and `step` divides by the tokens (or rollouts) of the whole batch.
2. Versions rise by one: `step` makes only the next one, `push` writes only the current one.
3. Work runs in one thread, in order of the calls; the event loop stays free. Only pushes run beside it, since replicas
   wait for them: they read weights, as passes and checkpoints do, and whatever changes weights waits for them. Where
   pushes and passes are both made by all ranks together, there is one thread for both.
4. A checkpoint is complete or absent.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch

from streamrl.executor.roles import Manifest, Sample, TrainerRole
from streamrl.executor.trainer.learner import Learner, load_learner
from streamrl.executor.trainer.trainer_settings import TrainerSettings

R = TypeVar("R")


class TrainerWorker(TrainerRole):
    """The trainer as a handle reaches it; every method waits for the ones called before it."""

    def __init__(self, config: TrainerSettings) -> None:
        self.config = config
        threads = (config.num_threads,)
        self._thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, threads)
        self._pusher = ThreadPoolExecutor(1, "push", torch.set_num_threads, threads)
        self._step_over, self._push_over = Event(), Event()
        """Set once the last step, or push, that was called for has ended."""
        self._step_over.set()
        self._push_over.set()
        self._learner: Learner | None = None

    async def start(self, checkpoint: str | None, version: int | None = None) -> int:
        """Load the initial weights (version 0) or a checkpoint, and return the version: `version` where it is given."""
        load = functools.partial(load_learner, self.config, checkpoint)
        self._learner = await asyncio.get_running_loop().run_in_executor(self._thread, load)
        if version is not None:
            self._learner.version = version
        return self._learner.version

    async def score(self, samples: list[Sample]) -> dict[str, float]:
        """Take the log-probabilities that training on these samples needs, at the current weights.

        They are kept by rollout until `train` takes them, those of a critic's values too. Where the config needs none
        (neither `decoupled` nor a KL penalty, dpo or ppo) this costs nothing and returns `scored_tokens` 0.
        """
        return await self._run(lambda learner: learner.score(samples))

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        """Add the gradient of these samples to the batch, and return `losses.diagnostics` of them.

        Without a KL penalty or a critic, rollouts of advantage 0 are counted but not computed, since their
        gradient is zero; of a pair that is compared, both are computed once both have come. ValueError on a malformed or unscored sample leaves the batch as it was.
        After any other failure inside, `step` refuses the batch: start again from a checkpoint.
        """
        return await self._run(lambda learner: learner.train(samples))

    async def step(self, version: int) -> dict[str, float]:
        """Make `version` from the batch; returns grad_norm (unclipped), loss and diagnostics.

        Raises ValueError where `version` is not the next one or nothing was trained on since the
        last step, FloatingPointError on a gradient that is not finite; the weights then stay.
        """
        self._check_started()
        before, self._step_over = self._push_over, Event()
        return await self._run(
            in_turn(before, lambda learner: learner.step(version), self._step_over)
        )

    async def push(self, version: int, directory: str) -> Manifest:
        """Write the weights as buckets to `directory`; whoever knows the readers removes old versions.

        Raises ValueError where `version` is not the current one. A repeat writes the same bytes.
        """
        learner = self._check_started()
        before, self._push_over = self._step_over, Event()

        def push(learner: Learner) -> Manifest:
            return learner.push(version, Path(directory))

        thread = None if learner.backend.in_step else self._pusher
        return await self._run(in_turn(before, push, self._push_over), thread)

    async def save(self, path: str) -> None:
        """Write a checkpoint of the last step to `path`, in place of what was there.

        It is a Hugging Face directory, so a rollout engine loads it too. It holds no gradients: a
        batch in progress is trained on anew after a restart.
        """
        await self._run(lambda learner: learner.save(Path(path)))

    async def sleep(self) -> None:
        """Keep weights, gradients and optimizer in host memory until `wake`."""
        await self._run(lambda learner: learner.move("cpu"))

    async def wake(self) -> None:
        """Take them back to the device."""
        await self._run(lambda learner: learner.move(self.config.device))

    async def stop(self) -> None:
        """Finish the work that was called for and free the model."""
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._pusher.shutdown)
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.ranks.leave()

    async def _run(self, work: Callable[[Learner], R], thread: Executor | None = None) -> R:
        learner = self._check_started()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread or self._thread, work, learner)

    def _check_started(self) -> Learner:
        if self._learner is None:
            raise RuntimeError("the trainer has no weights: call start first")
        return self._learner


def in_turn(before: Event, work: Callable[[Learner], R], over: Event) -> Callable[[Learner], R]:
    """Return work that waits for `before`, in whatever thread it is done, and sets `over` at its end."""

    def do(learner: Learner) -> R:
        before.wait()
        try:
            return work(learner)
        finally:
            over.set()

    return do
