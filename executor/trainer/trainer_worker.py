"""The trainer's worker process: train on rollouts as they arrive, and make and push weight versions.

Invariants:
1. The gradient of a batch does not depend on how the batch was split over calls of `train`, nor on their order. Sums
   accumulate, and `step` divides by the tokens (or rollouts) of the whole batch.
2. Versions increase by one: `step` makes only the next version, and `push` writes only the current one.
3. Work runs in one thread, in the order of calls, so that the event loop stays free. Only pushes have their own
   thread, because replicas wait for them. Pushes, passes and checkpoints read weights; a change of weights waits for
   pushes. If all ranks must take part in pushes, pushes and passes share one thread.
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
from msgspec.structs import replace

from streamrl.executor.roles import BroadcastRank, Manifest, Sample, TrainerRole
from streamrl.executor.trainer.learner import (
    Learner,
    WriteWeights,
    load_blank_learner,
    load_learner,
)
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.transfer.packed_weights import WeightSender
from streamrl.executor.transfer.shared_memory import NamedTensors, write_buckets

R = TypeVar("R")


class TrainerWorker(TrainerRole):
    """The trainer behind a handle; every method waits for earlier calls."""

    def __init__(self, config: TrainerSettings) -> None:
        self.config = config
        threads = (config.num_threads,)
        self._thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, threads)
        self._pusher = ThreadPoolExecutor(1, "push", torch.set_num_threads, threads)
        self._step_over, self._push_over = Event(), Event()
        """Set when the last requested step (or push) has ended."""
        self._step_over.set()
        self._push_over.set()
        self._learner: Learner | None = None
        self._sender = WeightSender(config.device)

    async def start(self, checkpoint: str | None, version: int | None = None) -> int:
        """Load the initial weights (version 0) or a checkpoint; return the version, or `version` if it is given."""
        load = functools.partial(load_learner, self.config, checkpoint)
        self._learner = await asyncio.get_running_loop().run_in_executor(self._thread, load)
        if version is not None:
            self._learner.version = version
        return self._learner.version

    async def start_blank(self) -> None:
        """Load the models without trained weights, as a new rank that `regroup` will add."""
        load = functools.partial(load_blank_learner, self.config)
        self._learner = await asyncio.get_running_loop().run_in_executor(self._thread, load)

    async def regroup(self, num_ranks: int, num_kept: int, rendezvous: str) -> int:
        """Continue with `num_ranks` ranks, and return the version; those from `num_kept` on are new.

        No push runs meanwhile, so that no other group is made in this process. Raises `ValueError` if the batch has
        begun.
        """
        learner = self._check_started()
        self.config = replace(self.config, num_ranks=num_ranks, rendezvous=rendezvous)
        work = functools.partial(learner.regroup, self.config, num_kept)
        return await self._run(lambda _: self._thread.submit(work).result(), self._pusher)

    async def score(self, samples: list[Sample]) -> dict[str, float]:
        """Compute the log-probabilities that training on these samples needs, with the current weights.

        They are stored by rollout until `train` uses them, together with a critic's values. Only `decoupled`, a KL penalty,
        dpo and ppo need them. Otherwise this does nothing and returns `scored_tokens` 0.
        """
        return await self._run(lambda learner: learner.score(samples))

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        """Add the gradient of these samples to the batch, and return their `losses.diagnostics`.

        Without a KL penalty or a critic, rollouts of advantage 0 are counted but not computed, because their gradient is
        zero. A pair is computed when both of its rollouts have arrived. A malformed or unscored sample raises
        `ValueError` and leaves the batch unchanged. After any other failure `step` rejects the batch: restart from a
        checkpoint.
        """
        return await self._run(lambda learner: learner.train(samples))

    async def step(self, version: int) -> dict[str, float]:
        """Make `version` from the batch; return grad_norm (before clipping), loss and diagnostics.

        Raises `ValueError` if `version` is not the next one or nothing was trained on since the last step. Raises
        `FloatingPointError` if the gradient is not finite. The weights are then unchanged.
        """
        self._check_started()
        before, self._step_over = self._push_over, Event()
        return await self._run(
            in_turn(before, lambda learner: learner.step(version), self._step_over)
        )

    async def push(self, version: int, directory: str) -> Manifest:
        """Write the weights as buckets to `directory`; the caller removes old versions.

        Raises `ValueError` if `version` is not the current one. A repeated push writes the same bytes.
        """

        def write(weights: NamedTensors, version: int) -> Manifest:
            return write_buckets(weights, Path(directory), version)

        return await self._push(version, write)

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        """Pack the weights in host memory, for `send`; else like `push`. Forget packed versions other than `kept`."""

        def write(weights: NamedTensors, version: int) -> Manifest:
            return self._sender.pack(weights, version, kept)

        return await self._push(version, write)

    async def _push(self, version: int, write: WriteWeights) -> Manifest:
        learner = self._check_started()
        before, self._push_over = self._step_over, Event()

        def push(learner: Learner) -> Manifest:
            return learner.push(version, write)

        thread = None if learner.backend.in_step else self._pusher
        return await self._run(in_turn(before, push, self._push_over), thread)

    async def listen(self) -> str:
        """Open the rendezvous of the next group on the first rank, and return its address.

        It runs after `send`, because a group that is being joined closes the sockets that are opened meanwhile.
        """
        if not self._check_started().ranks.is_first:
            return ""
        return await self._run(lambda _: self._sender.listen(), self._pusher)

    async def send(self, version: int, seat: BroadcastRank) -> None:
        """Send a packed version from the first rank; passes go on meanwhile.

        Raises:
            RuntimeError: a member of the group is gone.
            ValueError: the version is not packed here.
        """
        if self._check_started().ranks.is_first:
            await self._run(lambda _: self._sender.send(version, seat), self._pusher)

    async def save(self, path: str) -> None:
        """Write a checkpoint of the last step to `path`, and replace an older one there.

        It is a Hugging Face directory, so an inference engine can load it. It has no gradients: an unfinished batch is
        trained on again after a restart.
        """
        await self._run(lambda learner: learner.save(Path(path)))

    async def sleep(self) -> None:
        """Move weights, gradients and optimizer state to host memory until `wake`."""
        await self._run(lambda learner: learner.move("cpu"))

    async def wake(self) -> None:
        """Move them back to the device."""
        await self._run(lambda learner: learner.move(self.config.device))

    async def stop(self) -> None:
        """Finish pending work and free the model."""
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
    """Return work that first waits for `before`, and sets `over` when it ends."""

    def do(learner: Learner) -> R:
        before.wait()
        try:
            return work(learner)
        finally:
            over.set()

    return do
