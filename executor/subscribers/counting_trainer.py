"""A secondary trainer without a model that counts what it is sent, to measure the stream itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.executor.checksums import write_checksums
from streamrl.executor.roles import Figures, Manifest, Sample, TrainerRole
from streamrl.executor.tokens import count_tokens

COUNTS = "counts.json"
"""File in its checkpoints instead of weights."""


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts and tokens that it has counted up to a version."""

    version: int = 0
    rollouts: int = 0
    tokens: int = 0
    """Output tokens."""


class CountingSettings(msgspec.Struct, frozen=True):
    """Settings of a counting trainer; it ignores all settings of other trainers."""


class CountingTrainer(TrainerRole):
    """Counts rollouts and output tokens from the samples' segment lengths; it never reads the tokens."""

    def __init__(self, config: CountingSettings) -> None:
        self.config = config
        self._counts = Tally()
        self._rollouts = self._tokens = 0
        """Counts for the next step."""

    async def start(self, checkpoint: str | None, version: int | None = None) -> int:
        """Start from zero or from its own checkpoint; `version` is ignored, because the checkpoint has it.

        Raises:
            ValueError: the checkpoint is not one of a counting trainer.
        """
        self._counts = Tally() if checkpoint is None else _read(Path(checkpoint))
        self._rollouts = self._tokens = 0
        return self._counts.version

    async def start_blank(self) -> None:
        """Do nothing: there is no model."""

    async def regroup(self, num_ranks: int, num_kept: int, rendezvous: str) -> int:
        """Return the version; a counting trainer has one rank."""
        return self._counts.version

    async def score(self, samples: list[Sample]) -> Figures:
        """Do nothing: there is no forward pass."""
        return {}

    async def train(self, samples: list[Sample]) -> Figures:
        """Count these samples."""
        self._rollouts += len(samples)
        self._tokens += sum(count_tokens(sample.segments) for sample in samples)
        return {}

    async def step(self, version: int) -> Figures:
        """Count a step; see `TrainerRole`."""
        if version != self._counts.version + 1:
            raise ValueError(f"step makes version {self._counts.version + 1}, got {version}")
        if not self._rollouts:
            raise ValueError("nothing was trained on since the last step")
        rollouts, tokens = self._rollouts, self._tokens
        self._counts = Tally(
            version=version,
            rollouts=self._counts.rollouts + rollouts,
            tokens=self._counts.tokens + tokens,
        )
        self._rollouts = self._tokens = 0
        return {"rollouts": rollouts, "counted_tokens": tokens}

    async def push(self, version: int, directory: str) -> Manifest:
        """Raise an error: a counting trainer has no weights.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a trainer that only counts has no weights")

    async def save(self, path: str) -> None:
        """Write the counts as a checkpoint."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / COUNTS).write_bytes(msgspec.json.encode(self._counts))
        write_checksums(directory)

    async def sleep(self) -> None:
        """Do nothing: it uses no device memory."""

    async def wake(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


def _read(checkpoint: Path) -> Tally:
    try:
        return msgspec.json.decode((checkpoint / COUNTS).read_bytes(), type=Tally)
    except (OSError, ValueError, RecursionError) as error:
        text = f"{checkpoint}: this is no checkpoint of a trainer that only counts: {error}"
        raise ValueError(text) from None
