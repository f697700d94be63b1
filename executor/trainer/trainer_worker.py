"""The worker of the trainer: trains on rollouts as they arrive, makes and pushes weight versions.

Invariants:
1. The gradient of a batch does not depend on how it was split over calls of `train`, nor on their
   order: sums accumulate, and `step` divides by the tokens (or rollouts) of the whole batch.
2. Versions rise by one: `step` makes only the next one, `push` writes only the current one.
3. Work runs in one thread, in order of the calls; the event loop stays free. Only pushes run beside it, since replicas
   wait for them: they read weights, as passes and checkpoints do, and whatever changes weights waits for them.
4. A checkpoint is complete or absent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, TypeVar, get_args

import msgspec
import torch
from transformers import PreTrainedModel

from executor.checksums import write_checksums
from executor.pretrained import load_pretrained
from executor.roles import TrainerRole
from executor.samples import Manifest, Sample
from executor.trainer import losses
from executor.trainer.passes import attend_apart, output_logprobs, passes
from executor.trainer.sequences import TokenSequence, read_samples
from executor.transfer.shared_memory import cast_tensors, replaced_directory, write_buckets
from streamrl.runfile.algorithm_config import CorrectionName, LossMean
from streamrl.runfile.sides_config import Packing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHOICES = {
    "correction": losses.CORRECTIONS,
    "loss_mean": get_args(LossMean),
    "packing": get_args(Packing),
    "dtype": tuple(DTYPES),
}
ADAM_BETAS = (0.9, 0.999)
"""AdamW's published values (arXiv 1711.05101)."""
STATE_FILE = "trainer.pt"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files that a checkpoint does not copy from the model directory, as it does the tokenizer's."""

R = TypeVar("R")


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer trains. A field out of range raises ValueError with its name and value."""

    model: str
    """Hugging Face directory of the initial weights."""
    learning_rate: float
    temperature: float
    """That rollouts are sampled at; log-probabilities are taken at it."""
    correction: CorrectionName
    """See the table of `executor.trainer.losses`."""
    clip: float = 0.2
    """PPO clip range of the ratio, to both sides of 1."""
    tis_cap: float = 2.0
    """Largest importance weight; icepop masks outside [1/tis_cap, tis_cap]."""
    kl_coefficient: float = 0.0
    """Weight of k3 against the initial weights; above 0 the trainer holds a second model."""
    loss_mean: LossMean = "token"
    """token: mean over all output tokens that the policy sampled; rollout: mean over rollouts of their token means."""
    max_grad_norm: float = 1.0
    max_tokens_per_pass: int = 16384
    """Tokens in one forward and backward, padding included; a longer rollout has a pass of its own."""
    packing: Packing = "packed"
    """See the table of `executor.trainer.passes`."""
    weight_decay: float = 0.0
    seed: int = 0
    """Of weights that the directory lacks; training itself draws nothing."""
    device: str = "cpu"
    dtype: str = "float32"
    """Of compute and of pushed weights; the weights that AdamW updates are float32."""
    num_threads: int = 1
    deterministic: bool = False
    """Whether a batch is computed as one at its step, so that its sums do not show how it arrived."""

    def __post_init__(self) -> None:
        for field, names in CHOICES.items():
            if getattr(self, field) not in names:
                raise ValueError(f"{field} must be one of {names}, got {getattr(self, field)!r}")
        for field in ("temperature", "max_grad_norm", "max_tokens_per_pass", "num_threads"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0, got {getattr(self, field)}")
        if not self.tis_cap >= 1:
            raise ValueError(f"tis_cap must be at least 1, got {self.tis_cap}")


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

    async def start(self, checkpoint: str | None) -> int:
        """Load the initial weights (version 0) or a checkpoint, and return the version."""
        load = functools.partial(_load_learner, self.config, checkpoint)
        self._learner = await asyncio.get_running_loop().run_in_executor(self._thread, load)
        return self._learner.version

    async def score(self, samples: list[Sample]) -> dict[str, float]:
        """Take the log-probabilities that training on these samples needs, at the current weights.

        They are kept by rollout until `train` takes them. Where the config needs none (neither
        `decoupled` nor a KL penalty) this costs nothing and returns `scored_tokens` 0.
        """
        return await self._run(lambda learner: learner.score(samples))

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        """Add the gradient of these samples to the batch, and return `losses.diagnostics` of them.

        Without a KL penalty, rollouts of advantage 0 are counted but not computed, since their
        gradient is zero. ValueError on a malformed or unscored sample leaves the batch as it was.
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
        self._check_started()
        before, self._push_over = self._step_over, Event()

        def push(learner: Learner) -> Manifest:
            return learner.push(version, Path(directory))

        return await self._run(in_turn(before, push, self._push_over), self._pusher)

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
        self._learner = None

    async def _run(self, work: Callable[[Learner], R], thread: Executor | None = None) -> R:
        learner = self._check_started()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread or self._thread, work, learner)

    def _check_started(self) -> Learner:
        if self._learner is None:
            raise RuntimeError("the trainer has no weights: call start first")
        return self._learner


@dataclasses.dataclass
class Accumulated:
    """What was trained on since the last step; its gradient is in the parameters."""

    num_tokens: int = 0
    num_rollouts: int = 0
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
    model: PreTrainedModel
    reference: PreTrainedModel | None
    optimizer: torch.optim.Optimizer
    version: int
    batch: Accumulated = dataclasses.field(default_factory=Accumulated)
    scores: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """By rollout: `proximal` and `reference` log-probabilities of the tokens that the policy sampled."""

    def score(self, samples: list[Sample]) -> dict[str, float]:
        """Keep what `train` needs of these samples; a deterministic step does that itself."""
        sequences = read_samples(samples)
        if not self.config.deterministic:
            self._score(sequences)
        computed = self._models_to_score()
        return {"scored_tokens": sum(s.num_trained for s in sequences) if computed else 0}

    def _score(self, sequences: list[TokenSequence]) -> None:
        models = self._models_to_score()
        for some in self._passes(sequences):
            lengths = [sequence.num_trained for sequence in some]
            for name, model in models.items():
                with torch.no_grad():
                    parts = torch.split(self._logprobs(model, some), lengths)
                for sequence, part in zip(some, parts, strict=True):
                    self.scores.setdefault(sequence.rollout, {})[name] = part.clone()

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """Add these samples to the batch and their gradient to the parameters, or leave that to a deterministic step."""
        sequences = read_samples(samples)
        if self.config.deterministic:
            self.batch.waiting += sequences
            return {"tokens": sum(s.num_trained for s in sequences), "rollouts": len(sequences)}
        self._check_scored(sequences)
        return self._accumulate(sequences)

    def _accumulate(self, sequences: list[TokenSequence]) -> dict[str, float]:
        computed = [s for s in sequences if s.advantage != 0 or self.reference is not None]
        whole, self.batch.whole = self.batch.whole, False
        sums: Counter[str] = Counter()
        for some in self._passes(computed):
            sums.update(self._backward(some))
        for sequence in sequences:
            self.scores.pop(sequence.rollout, None)
        added = Accumulated(sum(s.num_trained for s in sequences), len(sequences), sums)
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
        count = batch.num_tokens if self.config.loss_mean == "token" else batch.num_rollouts
        grad_norm = losses.average_gradients(self.model, count, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.version, self.batch = version, Accumulated()
        return {"grad_norm": grad_norm, "loss": batch.sums["loss"] / count, **batch.summary()}

    def push(self, version: int, directory: Path) -> Manifest:
        """Write the weights in the dtype that rollouts compute in."""
        if version != self.version:
            raise ValueError(f"push must write the current version {self.version}, got {version}")
        tensors = cast_tensors(self.model.state_dict(), DTYPES[self.config.dtype])
        return write_buckets(tensors, directory, version)

    def save(self, path: Path) -> None:
        """Write weights, optimizer and version, the model's other files beside them, and checksums of all."""
        with replaced_directory(path) as partial:
            for file in Path(self.config.model).iterdir():
                if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                    shutil.copy(file, partial)
            self.model.save_pretrained(partial)
            state = {"optimizer": self.optimizer.state_dict(), "version": self.version}
            torch.save(state, partial / STATE_FILE)
            write_checksums(partial)

    def move(self, device: str) -> None:
        """Take everything that lies on a device to another one, and give the memory back that it leaves."""
        models: list[Any] = [self.model, self.reference]
        for model in models:
            if model is not None:
                model.to(device)  # gradients too
        for held in (*self.optimizer.state.values(), *self.scores.values()):
            held.update({name: tensor.to(device) for name, tensor in held.items()})
        torch.cuda.empty_cache()  # nothing where there is no GPU

    def _models_to_score(self) -> dict[str, PreTrainedModel]:
        models = {"proximal": self.model} if self.config.correction == "decoupled" else {}
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
        scored = [self.scores.get(sequence.rollout, {}) for sequence in sequences]
        proximal = torch.cat([s["proximal"] for s in scored]) if "proximal" in scored[0] else None
        logprobs = self._logprobs(self.model, sequences)
        tokens = losses.flatten_sequences(sequences, logprobs, proximal)
        bounds = {"clip": config.clip, "cap": config.tis_cap}
        per_token = losses.policy_losses(tokens, config.correction, **bounds)
        if "reference" in scored[0]:
            reference = torch.cat([s["reference"] for s in scored])
            per_token = per_token + config.kl_coefficient * losses.k3(reference, logprobs)
        shares = [1.0 if config.loss_mean == "token" else 1 / s.num_trained for s in sequences]
        loss = (per_token * torch.tensor(shares, device=config.device)[tokens.rollouts]).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return {"loss": loss.item(), **losses.diagnostic_sums(tokens, config.correction, **bounds)}

    def _passes(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        return passes(sequences, self.config.max_tokens_per_pass, self.config.packing)

    def _logprobs(self, model: PreTrainedModel, sequences: list[TokenSequence]) -> torch.Tensor:
        config, dtype = self.config, DTYPES[self.config.dtype]
        return output_logprobs(model, sequences, config.temperature, config.packing, dtype)


def in_turn(before: Event, work: Callable[[Learner], R], over: Event) -> Callable[[Learner], R]:
    """Return work that waits for `before`, in whatever thread it is done, and sets `over` at its end."""

    def do(learner: Learner) -> R:
        before.wait()
        try:
            return work(learner)
        finally:
            over.set()

    return do


def _load_learner(config: TrainerSettings, checkpoint: str | None) -> Learner:
    torch.manual_seed(config.seed)
    model = _load_model(checkpoint or config.model, config)
    reference = _load_model(config.model, config) if config.kl_coefficient > 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), betas=ADAM_BETAS, fused=True)
    for parameter in model.parameters():
        # Zeros, not None: a batch whose advantages are all 0 steps like any other zero gradient.
        parameter.grad = torch.zeros_like(parameter)
    version = 0
    if checkpoint is not None:
        state = torch.load(Path(checkpoint, STATE_FILE), config.device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        version = state["version"]
    for group in optimizer.param_groups:
        group.update(lr=config.learning_rate, weight_decay=config.weight_decay)
    return Learner(config, model, reference, optimizer, version)


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
