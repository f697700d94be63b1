"""The blocking part of the trainer: load models, accumulate gradients, step, push and save, with any backend."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from streamrl.executor.checksums import write_checksums
from streamrl.executor.libc import closed_afterwards
from streamrl.executor.roles import Manifest, Sample
from streamrl.executor.router_replay import Routers
from streamrl.executor.trainer import losses
from streamrl.executor.trainer.adapters import (
    adapters_of,
    add_adapters,
    load_adapters,
    scale_of,
    without_adapters,
)
from streamrl.executor.trainer.backends import make_backend, make_frozen
from streamrl.executor.trainer.critic import Critic
from streamrl.executor.trainer.joining import hand_over
from streamrl.executor.trainer.model_loading import load_model, recompute
from streamrl.executor.trainer.objectives import objective_of
from streamrl.executor.trainer.optimizers import rate_of
from streamrl.executor.trainer.passes import (
    check_chunks,
    output_logprobs,
    outputs_with_entropy,
    passes,
)
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.sequences import NOTHING, TokenSequence, read_samples
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings
from streamrl.executor.trainer.training_backend import TrainingBackend, weights_in_place
from streamrl.executor.transfer.packed_weights import separate_cuda_stream
from streamrl.executor.transfer.shared_memory import (
    NamedTensors,
    blaming_disk,
    cast_tensors,
    partial_of,
    replaced_directory,
)
from streamrl.runfile.algorithms import algorithm_named

WriteWeights = Callable[[NamedTensors, int], Manifest]
"""Writes the weights of a version, and returns their manifest."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Endings of files that are not copied from the model directory to checkpoints; tokenizer files are copied."""


@dataclasses.dataclass
class Accumulated:
    """Counts and sums since the last step; the summed gradient is in the parameters."""

    num_tokens: float = 0
    """Over all ranks, like all counts here."""
    num_rollouts: float = 0
    count: float = 0
    """Divisor of the gradient at the step."""
    num_passes: int = 0
    """Number of backward passes of this rank since the last optimizer step."""
    portion: tuple[float, float] = (0, 0)
    """Number of rollouts since the last optimizer step, and of the tokens that a critic learns from."""
    num_masked: float = 0
    """Rollouts that are left out of the loss."""
    counted: float = 0
    """Sum of the divisors of this batch's optimizer steps."""
    norms: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """Figures of each optimizer step."""
    sums: Counter[str] = dataclasses.field(default_factory=Counter)
    waiting: list[TokenSequence] = dataclasses.field(default_factory=list)
    """Samples that wait until the step, if the run is deterministic."""
    unpaired: dict[int, TokenSequence] = dataclasses.field(default_factory=dict)
    """Rollouts of a pair whose partner has not arrived yet."""
    whole: bool = True
    """False during a call of `train`; stays False if the call fails."""

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the counts and sums that every rank has, for a rank that joins."""
        own = ("num_passes", "waiting", "unpaired", "whole")
        names = (field.name for field in dataclasses.fields(self) if field.name not in own)
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, received: dict[str, Any]) -> Accumulated:
        """Return the batch of a rank that joins others, which have these counts and sums."""
        return cls(**{**received, "sums": Counter(received["sums"])})

    def summary(self) -> dict[str, float]:
        """Return the counts, and how far the policy is from the one that sampled."""
        counts = {"tokens": self.num_tokens, "rollouts": self.num_rollouts}
        return counts | losses.diagnostics(self.sums)


@dataclasses.dataclass
class Learner:
    """The blocking part of the trainer; its methods are those of `TrainerWorker`."""

    config: TrainerSettings
    ranks: RankGroup
    backend: TrainingBackend
    reference: PreTrainedModel | None
    """The initial model; None if unused, or if it is the policy without its adapters."""
    critic: Critic | None
    version: int
    batch: Accumulated = dataclasses.field(default_factory=Accumulated)
    pushable: dict[str, torch.Tensor] | None = None
    """Weights of `version`, kept once an optimizer step within the next batch has changed the backend's."""
    changing: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """Held while weights change, and while a push reads them."""
    scores: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """By rollout and name: `proximal` and `reference` log-probabilities of sampled tokens, and the critic's `values`."""

    def __post_init__(self) -> None:
        self.objective = objective_of(self.config)
        of_reference = (losses.REFERENCE_SUM,) if self.config.has_reference else ()
        self._sums = ("loss", *losses.SUMS, *of_reference, *self.objective.sums)

    def score(self, samples: list[Sample]) -> dict[str, float]:
        """Compute and store the scores that `train` needs; in a deterministic run the step computes them."""
        sequences = self.ranks.agree(lambda: self._read_samples(samples))
        if not self.config.deterministic:
            self._score(sequences)
        computed = sum(s.num_trained for s in self._to_score(sequences))
        return {"scored_tokens": self.ranks.sum([computed])[0]}

    def _score(self, sequences: list[TokenSequence]) -> None:
        for some in self._passes_in_step(self._to_score(sequences)) if self._scorers else ():
            lengths = [sequence.num_trained for sequence in some]
            for name, score in self._scorers.items():
                with torch.no_grad():
                    parts = torch.split(score(some), lengths)
                for sequence, part in zip(some, parts, strict=True):
                    if sequence is not NOTHING:
                        self.scores.setdefault(sequence.rollout, {})[name] = part.clone()

    def _read_samples(self, samples: list[Sample]) -> list[TokenSequence]:
        return read_samples(samples, with_experts=self.config.router_replay)

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """Add samples to the batch and their gradient to the parameters; a deterministic run waits for the step."""
        sequences = self.ranks.agree(lambda: self._read(samples))
        if self.config.deterministic:
            self.batch.waiting += sequences
            return {"tokens": sum(s.num_trained for s in sequences), "rollouts": len(sequences)}
        return self._train_portion(sequences)

    def _train_portion(self, sequences: list[TokenSequence]) -> dict[str, float]:
        """Accumulate gradients, after the optimizer step within the batch if it is due."""
        portion = self.config.rollouts_per_update
        if portion is not None and self.batch.portion[0] >= portion:
            with self.changing:
                if self.pushable is None:
                    self.pushable = {n: w.detach().clone() for n, w in self._weights()}
                self._update()
        return self._accumulate(sequences)

    def _update(self) -> None:
        """Turn the summed gradient into a mean, clip it and update the weights."""
        batch = self.batch
        if self.backend.in_step and not batch.num_passes:
            self._backward([NOTHING])  # all advantages are 0, but other ranks wait
        config = self.config
        rate = rate_of(config, config.learning_rate, self.version)
        self.backend.set_rate(rate)
        figures = {
            "learning_rate": rate,
            "grad_norm": self.backend.step(batch.count or 1.0),
        }  # count is 0 if nothing was chosen
        if self.critic is not None:
            assert config.critic_learning_rate is not None
            self.critic.backend.set_rate(rate_of(config, config.critic_learning_rate, self.version))
            figures["critic_grad_norm"] = self.critic.backend.step(batch.portion[1] or 1.0)
        batch.norms.append(figures)
        batch.counted += batch.count
        batch.count, batch.num_passes, batch.portion = 0, 0, (0, 0)

    def _read(self, samples: list[Sample]) -> list[TokenSequence]:
        """Read samples and check that they can be trained on."""
        sequences = self._read_samples(samples)
        if not self.config.deterministic:
            self._check_scored(sequences)
        return sequences

    def _accumulate(self, sequences: list[TokenSequence]) -> dict[str, float]:
        computed = self._with_partners([s for s in sequences if self.objective.computes(s)])
        whole, self.batch.whole = self.batch.whole, False
        sums: Counter[str] = Counter()
        for some in self._passes_in_step(computed):
            sums.update(self._backward(some))
            self.batch.num_passes += 1
        for sequence in (*sequences, *computed):
            if sequence.rollout not in self.batch.unpaired:
                self.scores.pop(sequence.rollout, None)
        counts: list[float] = [sum(s.num_trained for s in sequences), len(sequences)]
        counts.append(math.fsum(self.objective.count(s) for s in sequences))
        masked = [s for s in sequences if s.is_masked]
        counts += [len(masked), sum(s.num_trained for s in masked)]
        num_tokens, num_rollouts, count, num_masked, masked_tokens, *summed = self.ranks.sum(
            [*counts, *(sums[name] for name in self._sums)]
        )
        sums = Counter(dict(zip(self._sums, summed, strict=True)))
        added = Accumulated(num_tokens=num_tokens, num_rollouts=num_rollouts, sums=sums)
        self.batch.count += count
        self.batch.num_tokens += added.num_tokens
        self.batch.num_rollouts += added.num_rollouts
        rollouts, tokens = self.batch.portion
        self.batch.portion = (
            rollouts + added.num_rollouts,
            tokens + added.num_tokens - masked_tokens,
        )
        self.batch.num_masked += num_masked
        self.batch.sums.update(sums)
        self.batch.whole = whole
        return added.summary()

    def _with_partners(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Return sequences without a partner, and the complete pairs."""
        ready = [sequence for sequence in sequences if sequence.partner is None]
        for sequence in sequences:
            if sequence.partner is None:
                continue
            other = self.batch.unpaired.pop(sequence.partner, None)
            if other is None:
                self.batch.unpaired[sequence.rollout] = sequence
            else:
                ready += [other, sequence]
        return ready

    def step(self, version: int) -> dict[str, float]:
        """Turn the summed gradient into the batch's mean, clip it and update the weights."""
        batch = self.batch
        if version != self.version + 1:
            raise ValueError(f"step must make version {self.version + 1}, got {version}")
        waiting, batch.waiting = batch.waiting, []
        for portion in self._portions(waiting):
            self._score(portion)
            self._train_portion(portion)
        if batch.num_tokens == 0 or not batch.whole:
            reason = "nothing was trained on" if batch.whole else "a call of train failed"
            raise ValueError(
                f"step to version {version} without a gradient: {reason}; train first, or restart from a checkpoint"
            )
        with self.changing:
            self._update()
            self.pushable = None
        self.version, self.batch = version, Accumulated()
        figures = {
            name: statistics.fmean(each[name] for each in batch.norms) for name in batch.norms[0]
        }
        figures["loss"] = batch.sums["loss"] / (batch.counted or 1.0)
        if batch.num_masked:
            figures["masked_rollouts"] = batch.num_masked
        return {**figures, **self.objective.figures(batch.sums), **batch.summary()}

    def _portions(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        """Yield the rollouts of each optimizer step, in an order that does not depend on arrival."""
        size = self.config.rollouts_per_update or len(sequences) or 1
        in_order = (
            sorted(sequences, key=lambda s: s.rollout) if size < len(sequences) else sequences
        )
        for first in range(0, len(in_order), size):
            yield in_order[first : first + size]

    def push(self, version: int, write: WriteWeights) -> Manifest:
        """Write the weights in the dtype of rollouts; all ranks must call this, and the first one writes."""
        if version != self.version:
            raise ValueError(f"push must write the current version {self.version}, got {version}")
        with self.changing if self.config.rollouts_per_update else contextlib.nullcontext():
            dtype = DTYPES[self.config.dtype]
            weights = self._weights(dtype) if self.pushable is None else self.pushable.items()
            if not self.ranks.is_first:
                for _ in weights:  # the first rank needs this rank's part
                    pass
                return Manifest(version=version, buckets=[])
            if self.config.adapter_rank is None:
                pushed = cast_tensors(weights, dtype)
            else:
                pushed = adapters_of(weights, scale_of(self.backend.model), dtype)
            with separate_cuda_stream(torch.device(self.config.device)):
                return write(pushed, version)

    def _weights(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights that are pushed, under the model's names."""
        return self.backend.weights(learned=self.config.adapter_rank is not None, dtype=dtype)

    def save(self, path: Path) -> None:
        """Write weights, optimizer state, version, the model's other files, and checksums of all."""
        if not self.ranks.is_first:
            self.ranks.wait()
            with blaming_disk(path):
                self._save_models(partial_of(path))
            self.ranks.wait()
            return
        with replaced_directory(path) as partial:
            for file in Path(self.config.model).iterdir():
                if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                    shutil.copyfile(file, partial / file.name)
            self.ranks.wait()
            self._save_models(partial)
            self.ranks.wait()
            write_checksums(partial)

    def _save_models(self, path: Path) -> None:
        self.backend.save(path, self.version)
        if self.critic is not None:
            self.critic.save(path, self.version, is_first=self.ranks.is_first)

    def regroup(self, config: TrainerSettings, num_kept: int) -> int:
        """Continue with other ranks, those of `config`, and return the version; all of them must call this.

        Ranks from `num_kept` on are new. They get their state from the first rank, and their part of the gradient is 0.

        Raises:
            ValueError: ranks leave after samples were trained on since the last step.
        """
        if config.num_ranks < num_kept and (self.batch.num_rollouts or self.batch.waiting):
            raise ValueError("ranks leave only between two steps, but the batch has begun")
        assert config.rendezvous is not None, "ranks of a trainer meet"
        self.config = config
        with closed_afterwards(keep_port=urlsplit(config.rendezvous).port):
            self.ranks.regroup(config)
            state = hand_over(self.ranks, num_kept, self._state(), config.device)
        if state is not None:
            self.version = state["version"]
            self.batch = Accumulated.of(state["batch"])
            for backend, received in zip(self._backends(), state["models"], strict=True):
                backend.take_state(received)
        return self.version

    def _state(self) -> dict[str, Any]:
        models = [each.state() for each in self._backends()]
        return {"version": self.version, "batch": self.batch.of_all_ranks(), "models": models}

    def _backends(self) -> list[Any]:
        return [self.backend, *(() if self.critic is None else (self.critic.backend,))]

    def move(self, device: str) -> None:
        """Move everything on a device to another one, and free the memory that it used before."""
        self.backend.move(device)
        if self.critic is not None:
            self.critic.backend.move(device)
        if self.reference is not None:
            reference: Any = self.reference
            reference.to(device)
        for held in self.scores.values():
            held.update({name: tensor.to(device) for name, tensor in held.items()})
        torch.cuda.empty_cache()  # does nothing without a GPU

    @property
    def _scorers(self) -> dict[str, Callable[[list[TokenSequence]], torch.Tensor]]:
        """Return the scores to compute before training, by name; each gives [n], one value for each sampled token."""
        config = self.config
        scorers: dict[str, Callable[[list[TokenSequence]], torch.Tensor]] = {}
        if (
            config.correction == "decoupled"
            or algorithm_named(config.algorithm).recomputes_log_probs
        ):
            scorers["proximal"] = self._proximal
        if config.has_reference:
            scorers["reference"] = self._of_reference
        if self.critic is not None:
            scorers["values"] = self.critic.values
        return scorers

    def _proximal(self, sequences: list[TokenSequence]) -> torch.Tensor:
        """Compute log-probabilities, [n], under the weights at the beginning of the batch."""
        with weights_in_place(self.backend.model, self.pushable):
            return self._logprobs(self.backend.model, sequences)

    def _of_reference(self, sequences: list[TokenSequence]) -> torch.Tensor:
        """Compute log-probabilities, [n], under the initial weights of the run."""
        if self.config.adapter_rank is None:
            return self._logprobs(self.reference, sequences)
        with without_adapters(self.backend.model):
            return self._logprobs(self.backend.model, sequences)

    def _to_score(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Return the sequences that need scores."""
        return [s for s in sequences if self._scorers and self.objective.computes(s)]

    def _check_scored(self, sequences: list[TokenSequence]) -> None:
        names = self._scorers
        for sequence in self._to_score(sequences):
            scores = self.scores.get(sequence.rollout, {})
            if any(len(scores.get(name, ())) != sequence.num_trained for name in names):
                raise ValueError(f"rollout {sequence.rollout}: call score before train")

    def _backward(self, sequences: list[TokenSequence]) -> dict[str, float]:
        """Add the gradient of one pass's summed loss, and return the sums."""
        config, objective = self.config, self.objective
        if sequences[0] is NOTHING:
            self.backend.backward(0 * self._logprobs(self.backend.model, sequences).sum())
            if self.critic is not None:
                self.critic.take_part(sequences)
            return {}
        scored = [self.scores.get(sequence.rollout, {}) for sequence in sequences]
        proximal = torch.cat([s["proximal"] for s in scored]) if "proximal" in scored[0] else None
        logprobs, entropies = self._outputs(sequences)
        advantages = [objective.advantages(s, self.scores) for s in sequences]
        tokens = losses.flatten_sequences(sequences, advantages, logprobs, proximal)
        bounds: dict[str, Any] = {
            "clip": config.clip,
            "clip_high": config.clip_high,
            "clip_dual": config.clip_dual,
            "cap": config.weight_bound,
        }
        per_token = losses.policy_losses(tokens, config.correction, **bounds)
        if entropies is not None:
            per_token = per_token - config.entropy_coefficient * entropies
        sums = Counter(losses.diagnostic_sums(tokens, config.correction, **bounds))
        if config.has_reference:
            reference = torch.cat([s["reference"] for s in scored])
            penalty = losses.kl_losses(logprobs, reference, config.kl_estimator)
            sums.update({losses.REFERENCE_SUM: penalty.detach().double().sum().item()})
            if config.has_kl_loss:
                per_token = per_token + config.kl_coefficient * penalty
        shares = [objective.share(sequence) for sequence in sequences]
        loss = (per_token * torch.tensor(shares, device=config.device)[tokens.rollouts]).sum()
        self.backend.backward(loss)
        if self.critic is not None:
            values = torch.cat([each["values"] for each in scored])
            self.critic.backward(sequences, tokens.advantages + values)
        for sequence in sequences:
            sums.update(objective.summed(sequence, self.scores))
        return {"loss": loss.item(), **sums}

    def _outputs(self, sequences: list[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute log-probabilities, and entropies if the loss needs them."""
        if self.config.entropy_coefficient == 0:
            return self._logprobs(self.backend.model, sequences), None
        return outputs_with_entropy(self.backend.model, sequences, **self._how)

    def _passes(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        return passes(sequences, self.config.max_tokens_per_pass, self.config.packing)

    def _passes_in_step(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        """Yield passes; if ranks wait for each other in passes, every rank makes the same number."""
        mine = list(self._passes(sequences))
        most = self.ranks.most(len(mine)) if self.backend.in_step else len(mine)
        return chain(mine, repeat([NOTHING], most - len(mine)))

    def _logprobs(self, model: Any, sequences: list[TokenSequence]) -> torch.Tensor:
        return output_logprobs(model, sequences, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        """Return the settings of output passes."""
        config = self.config
        return {
            "temperature": config.temperature,
            "truncation": config.truncation,
            "packing": config.packing,
            "dtype": DTYPES[config.dtype],
            "chunk": config.logits_chunk,
        }


def load_blank_learner(config: TrainerSettings) -> Learner:
    """Load the models of a rank that will join others with `Learner.regroup`, and get its weights from the first one."""
    alone = replace(config, rank=0, num_ranks=1, rendezvous=None)
    return _load_learner(alone, None, is_blank=config.adapter_rank is None)


def load_learner(config: TrainerSettings, checkpoint: str | None) -> Learner:
    """Join the other ranks, and load the initial weights (version 0) or a checkpoint.

    FSDP2 and DeepSpeed make process groups of their own meanwhile. Afterwards nobody can connect to the sockets on which
    these still listen. NCCL connects to the store again later.
    """
    if config.rendezvous is None:
        return _load_learner(config, checkpoint)
    with closed_afterwards(keep_port=urlsplit(config.rendezvous).port):
        return _load_learner(config, checkpoint)


def _load_learner(
    config: TrainerSettings, checkpoint: str | None, *, is_blank: bool = False
) -> Learner:
    ranks = RankGroup(config)
    torch.manual_seed(config.seed)
    has_adapters = config.adapter_rank is not None
    directory = config.model if has_adapters else checkpoint or config.model
    if not Path(directory, "config.json").is_file():
        raise ValueError(f"no Hugging Face model directory (config.json) at {directory!r}")
    model = load_model(directory, config, ranks, learns=not has_adapters, is_blank=is_blank)
    recompute(model, config.recompute)
    if config.router_replay:
        Routers(model)
    if config.logits_chunk is not None:
        check_chunks(model)
    if config.adapter_rank is not None:
        add_adapters(model, config.adapter_rank, config.adapter_alpha)
        if checkpoint is not None:
            load_adapters(model, Path(checkpoint), config.adapter_rank)
    backend = make_backend(config, model, ranks)
    reference = None
    # With ZeRO 3 the actor's weights are already split here, which leaves memory for another model.
    if config.has_reference and not has_adapters:
        own = load_model(config.model, config, ranks, learns=not config.splits_weights)
        reference = make_frozen(config, own)
    critic = None
    if config.critic_learning_rate is not None:
        critic = Critic(config, ranks, checkpoint, is_blank=is_blank)
    version = 0 if checkpoint is None else backend.load(Path(checkpoint))
    return Learner(config, ranks, backend, reference, critic, version)
