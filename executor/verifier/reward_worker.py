"""The worker of a replica of the reward model: scores what it is sent, one call after the other."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from streamrl.executor.roles import RewardRole
from streamrl.executor.samples import Exchange, ModelScore
from streamrl.executor.verifier.scoring_model import RewardSettings, ScoringModel


class RewardWorker(RewardRole):
    """Works in one thread, so that the event loop stays free to say that it lives."""

    def __init__(self, config: RewardSettings) -> None:
        self.config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._model: ScoringModel | None = None

    async def start(self) -> None:
        """Load the model."""
        torch.set_num_threads(self.config.num_threads)
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._thread, ScoringModel, self.config)

    async def score(self, exchanges: list[Exchange]) -> list[ModelScore]:
        """Return what the model makes of each, in order."""
        if self._model is None:
            raise RuntimeError("the reward model is not loaded: call start first")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._model.score, exchanges)

    async def stop(self) -> None:
        """Finish the work that was called for, and free the model."""
        await asyncio.to_thread(self._thread.shutdown)
        self._model = None
