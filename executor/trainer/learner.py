"""What a trainer does with a batch: its sums, its passes and its versions, whatever backend holds the weights."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from executor.checksums import write_checksums
from executor.pretrained import load_pretrained
from executor.samples import Manifest, Sample
from executor.tokens import ID, LOGPROB
from executor.trainer import losses
from executor.trainer.adapters import adapters_of, add_adapters, load_adapters
from executor.trainer.backends import make_backend
from executor.trainer.passes import attend_apart, output_logprobs, passes
from executor.trainer.rank_group import RankGroup
from executor.trainer.sequences import TokenSequence, read_samples
from executor.trainer.trainer_settings import DTYPES, TrainerSettings
from executor.trainer.training_backend import TrainingBackend
from executor.transfer.shared_memory import (
    cast_tensors,
    partial_of,
    replaced_directory,
    write_buckets,
)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files that a checkpoint does not copy from the model directory, as it does the tokenizer's."""
SUMS = ("loss", *losses.SUMS)
NOTHING = TokenSequence(
    rollout=-1,
    prompt=np.zeros(1, ID),
    tokens=np.zeros(1, ID),
    logprobs=np.zeros(1, LOGPROB),
    is_policy=np.ones(1, bool),
    advantage=0.0,
)
"""What a rank computes, for no gradient, while others have passes left that it must take part in."""


@dataclasses.dataclass
class Accumulated:
    """What was trained on since the last step; its gradient is in the parameters."""

    num_tokens: float = 0
    """Of all ranks, as everything here that is counted."""
    num_rollouts: float = 0
    num_passes: int = 0
    """Backward passes of this rank."""
    sums: Counter[str] = dataclasses.field(default_factory=Counter)
    waiting: list[TokenSequence] = dataclasses.field(default_factory=list)
    """What is computed as one at the step, where that is deterministic."""
    whole: bool = True
    """False while a call of `train` is under way, and for good once one has failed."""

    def summary(self) -> dict[str, float]:
        """Return its counts, and how far the policy is from the one that sampled."""
        counts = {"tokens": self.num_tokens, "rollouts": self.num_rollouts}
        return counts | losses.diagnostics(self.sums)


@dataclasses.dataclass
class Learner:
    """The trainer's blocking half; its methods are those of `TrainerWorker`."""

    config: TrainerSettings
    ranks: RankGroup
    backend: TrainingBackend
    reference: PreTrainedModel | None
    version: int
    batch: Accumulated = dataclasses.field(default_factory=Accumulated)
    scores: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """By rollout: `proximal` and `reference` log-probabilities of the tokens that the policy sampled."""

    def score(self, samples: list[Sample]) -> dict[str, float]:
        """Keep what `train` needs of these samples; a deterministic step does that itself."""
        sequences = self.ranks.agree(lambda: read_samples(samples))
        if not self.config.deterministic:
            self._score(sequences)
        computed = sum(s.num_trained for s in sequences) if self._models_to_score() else 0
        return {"scored_tokens": self.ranks.sum([computed])[0]}

    def _score(self, sequences: list[TokenSequence]) -> None:
        models = self._models_to_score()
        for some in self._passes_in_step(sequences) if models else ():
            lengths = [sequence.num_trained for sequence in some]
            for name, model in models.items():
                with torch.no_grad():
                    parts = torch.split(self._logprobs(model, some), lengths)
                for sequence, part in zip(some, parts, strict=True):
                    if sequence is not NOTHING:
                        self.scores.setdefault(sequence.rollout, {})[name] = part.clone()

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """Add these samples to the batch and their gradient to the parameters, or leave that to a deterministic step."""
        sequences = self.ranks.agree(lambda: self._read(samples))
        if self.config.deterministic:
            self.batch.waiting += sequences
            return {"tokens": sum(s.num_trained for s in sequences), "rollouts": len(sequences)}
        return self._accumulate(sequences)

    def _read(self, samples: list[Sample]) -> list[TokenSequence]:
        """Read samples that can be trained on."""
        sequences = read_samples(samples)
        if not self.config.deterministic:
            self._check_scored(sequences)
        return sequences

    def _accumulate(self, sequences: list[TokenSequence]) -> dict[str, float]:
        computed = [s for s in sequences if s.advantage != 0 or self.reference is not None]
        whole, self.batch.whole = self.batch.whole, False
        sums: Counter[str] = Counter()
        for some in self._passes_in_step(computed):
            sums.update(self._backward(some))
            self.batch.num_passes += 1
        for sequence in sequences:
            self.scores.pop(sequence.rollout, None)
        counts = [sum(s.num_trained for s in sequences), len(sequences)]
        num_tokens, num_rollouts, *summed = self.ranks.sum(
            [*counts, *(sums[name] for name in SUMS)]
        )
        sums = Counter({name: value for name, value in zip(SUMS, summed, strict=True) if summed})
        added = Accumulated(num_tokens=num_tokens, num_rollouts=num_rollouts, sums=sums)
        self.batch.num_tokens += added.num_tokens
        self.batch.num_rollouts += added.num_rollouts
        self.batch.sums.update(sums)
        self.batch.whole = whole
        return added.summary()

    def step(self, version: int) -> dict[str, float]:
        """Turn the summed gradient into the batch's mean, clip it and update the weights."""
        batch = self.batch
        if version != self.version + 1:
            raise ValueError(f"step must make version {self.version + 1}, got {version}")
        waiting, batch.waiting = batch.waiting, []
        if waiting:
            self._score(waiting)
            self._accumulate(waiting)
        if batch.num_tokens == 0 or not batch.whole:
            reason = "nothing was trained on" if batch.whole else "a call of train failed"
            raise ValueError(f"step to version {version} without a gradient: {reason}")
        if self.backend.in_step and not batch.num_passes:
            self._backward([NOTHING])  # all advantages are 0
        count = batch.num_tokens if self.config.loss_mean == "token" else batch.num_rollouts
        grad_norm = self.backend.step(count)
        self.version, self.batch = version, Accumulated()
        return {"grad_norm": grad_norm, "loss": batch.sums["loss"] / count, **batch.summary()}

    def push(self, version: int, directory: Path) -> Manifest:
        """Write the weights in the dtype that rollouts compute in; the first rank does, with the help of all."""
        if version != self.version:
            raise ValueError(f"push must write the current version {self.version}, got {version}")
        weights, dtype = dict(self.backend.weights()), DTYPES[self.config.dtype]
        if not self.ranks.is_first:
            return Manifest(version=version, buckets=[])
        has_adapters = self.config.adapter_rank is not None
        tensors = (
            adapters_of(weights.items(), dtype) if has_adapters else cast_tensors(weights, dtype)
        )
        return write_buckets(tensors, directory, version)

    def save(self, path: Path) -> None:
        """Write weights, optimizer and version, the model's other files beside them, and checksums of all."""
        if not self.ranks.is_first:
            self.ranks.wait()
            self.backend.save(partial_of(path), self.version)
            self.ranks.wait()
            return
        with replaced_directory(path) as partial:
            for file in Path(self.config.model).iterdir():
                if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                    shutil.copy(file, partial)
            self.ranks.wait()
            self.backend.save(partial, self.version)
            self.ranks.wait()
            write_checksums(partial)

    def move(self, device: str) -> None:
        """Take everything that lies on a device to another one, and give the memory back that it leaves."""
        self.backend.move(device)
        if self.reference is not None:
            reference: Any = self.reference
            reference.to(device)
        for held in self.scores.values():
            held.update({name: tensor.to(device) for name, tensor in held.items()})
        torch.cuda.empty_cache()  # nothing where there is no GPU

    def _models_to_score(self) -> dict[str, Any]:
        models = {"proximal": self.backend.model} if self.config.correction == "decoupled" else {}
        return models if self.reference is None else {**models, "reference": self.reference}

    def _check_scored(self, sequences: list[TokenSequence]) -> None:
        names = self._models_to_score()
        for sequence in sequences:
            scores = self.scores.get(sequence.rollout, {})
            if any(len(scores.get(name, ())) != sequence.num_trained for name in names):
                raise ValueError(f"rollout {sequence.rollout}: score it before training on it")

    def _backward(self, sequences: list[TokenSequence]) -> dict[str, float]:
        """Add the gradient of the summed loss of one pass, and return the sums."""
        config = self.config
        if sequences[0] is NOTHING:
            self.backend.backward(0 * self._logprobs(self.backend.model, sequences).sum())
            return {}
        scored = [self.scores.get(sequence.rollout, {}) for sequence in sequences]
        proximal = torch.cat([s["proximal"] for s in scored]) if "proximal" in scored[0] else None
        logprobs = self._logprobs(self.backend.model, sequences)
        tokens = losses.flatten_sequences(sequences, logprobs, proximal)
        bounds = {"clip": config.clip, "clip_high": config.clip_high or config.clip}
        bounds["cap"] = config.correction_cap
        per_token = losses.policy_losses(tokens, config.correction, **bounds)
        if "reference" in scored[0]:
            reference = torch.cat([s["reference"] for s in scored])
            penalty = losses.kl_losses(logprobs, reference, config.kl_estimator)
            per_token = per_token + config.kl_coefficient * penalty
        shares = [1.0 if config.loss_mean == "token" else 1 / s.num_trained for s in sequences]
        loss = (per_token * torch.tensor(shares, device=config.device)[tokens.rollouts]).sum()
        self.backend.backward(loss)
        return {"loss": loss.item(), **losses.diagnostic_sums(tokens, config.correction, **bounds)}

    def _passes(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        return passes(sequences, self.config.max_tokens_per_pass, self.config.packing)

    def _passes_in_step(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        """Yield passes, as many as any rank has where they wait for each other."""
        mine = list(self._passes(sequences))
        most = self.ranks.most(len(mine)) if self.backend.in_step else len(mine)
        return chain(mine, repeat([NOTHING], most - len(mine)))

    def _logprobs(self, model: Any, sequences: list[TokenSequence]) -> torch.Tensor:
        config, dtype = self.config, DTYPES[self.config.dtype]
        return output_logprobs(model, sequences, config.temperature, config.packing, dtype)


def load_learner(config: TrainerSettings, checkpoint: str | None) -> Learner:
    """Join the other ranks, and load the initial weights (version 0) or a checkpoint."""
    ranks = RankGroup(config)
    torch.manual_seed(config.seed)
    model = _load_model(config.model if config.adapter_rank else checkpoint or config.model, config)
    if config.adapter_rank is not None:
        add_adapters(model, config.adapter_rank)
        if checkpoint is not None:
            load_adapters(model, Path(checkpoint), config.adapter_rank)
    reference = _load_model(config.model, config) if config.kl_coefficient > 0 else None
    backend = make_backend(config, model, ranks)
    version = 0 if checkpoint is None else backend.load(Path(checkpoint))
    return Learner(config, ranks, backend, reference, version)


def _load_model(directory: str, config: TrainerSettings) -> Any:
    if not Path(directory, "config.json").is_file():
        raise ValueError(f"no Hugging Face model directory (config.json) at {directory!r}")
    model = load_pretrained(
        directory, is_aligned=config.deterministic, dtype=torch.float32, local_files_only=True
    )
    # eval, so without dropout: a ratio must say how the weights differ, not which units are off.
    model = model.to(config.device).eval()
    if config.packing == "packed":
        attend_apart(model)
    return model
