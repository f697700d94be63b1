"""Score completions with a reward model: the model, and the worker process of one replica.

| `verifier.reward` | model                                 | score                                                       |
|-------------------|---------------------------------------|-------------------------------------------------------------|
| without step_end  | a sequence classifier with one output | its output at the last token                                |
| with step_end     | a token classifier                    | a value at the last token of each step, reduced by over_steps |

With two outputs, the value of a step is the probability of the second one. The model reads a chat in its own chat
template. Without a template it reads the prompt, the completion, and its end-of-sequence token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple, assert_never

import msgspec
import torch

from streamrl.executor.chat_template import render
from streamrl.executor.pretrained import load_reward_model
from streamrl.executor.roles import Exchange, ModelScore, RewardRole
from streamrl.executor.trainer.trainer_settings import DTYPES
from streamrl.runfile.roles_config import OverSteps
from streamrl.runfile.workload_config import HUB


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one replica of a reward model."""

    model: str
    """Hugging Face directory, or "hf://NAME"."""
    step_end: str | None = None
    over_steps: OverSteps = "min"
    max_tokens_per_pass: int = 16384
    """Including padding; a longer exchange gets its own pass."""
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    deterministic: bool = False
    """No effect: results depend on which exchanges share a pass."""


class Read(NamedTuple):
    """An exchange as token ids for the model."""

    ids: list[int]
    positions: list[int]
    """Positions of the tokens whose outputs are the scores."""


class ScoringModel:
    """The model and its tokenizer."""

    def __init__(self, settings: RewardSettings) -> None:
        """Load the model.

        Raises:
            ValueError: the model has the wrong number of outputs, or no weights for them.
        """
        from transformers import AutoTokenizer

        self._settings = settings
        name = settings.model.removeprefix(HUB)
        by_token = settings.step_end is not None
        model = load_reward_model(name, by_token=by_token, dtype=DTYPES[settings.dtype])
        if model.config.num_labels not in ((1, 2) if by_token else (1,)):
            wanted = "one output or two" if by_token else "one output"
            raise ValueError(f"{name} must have {wanted}, got {model.config.num_labels}")
        self._model = model.to(torch.device(settings.device)).eval().requires_grad_(False)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        self._longest = getattr(model.config, "max_position_embeddings", None) or math.inf

    def score(self, exchanges: Sequence[Exchange]) -> list[ModelScore]:
        """Return the model's score of each exchange, in order."""
        reads = [self._read(each) for each in exchanges]
        results = {at: fault for at, read in enumerate(reads) if (fault := self._fault(read))}
        for batch in self._passes({at: r for at, r in enumerate(reads) if at not in results}):
            values = self._pass([reads[at] for at in batch])
            results |= {
                at: self._scored(reads[at], own) for at, own in zip(batch, values, strict=True)
            }
        return [results[at] for at in range(len(reads))]

    def _read(self, exchange: Exchange) -> Read:
        if self._settings.step_end is not None:
            return self._read_steps(exchange, self._settings.step_end)
        if self._tokenizer.chat_template:
            answer = {"role": "assistant", "content": exchange.completion}
            ids = self._chat([*_messages(exchange), answer], add_generation_prompt=False)
        else:
            ids = list(self._tokenizer.encode(_text(exchange) + exchange.completion))
            end = self._tokenizer.eos_token_id
            ids += [end] if end is not None and ids[-1:] != [end] else []
        return Read(ids, [len(ids) - 1])

    def _read_steps(self, exchange: Exchange, end: str) -> Read:
        if self._tokenizer.chat_template:
            ids = self._chat(_messages(exchange), add_generation_prompt=True)
        else:
            ids = list(self._tokenizer.encode(_text(exchange)))
        positions: list[int] = []
        for step in filter(str.strip, exchange.completion.split(end)):
            ids += self._tokenizer.encode(step + end, add_special_tokens=False)
            positions.append(len(ids) - 1)
        return Read(ids, positions)

    def _chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        return render(self._tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def _fault(self, read: Read) -> ModelScore | None:
        """Return why the model cannot score an exchange; None if it can."""
        num_tokens = len(read.ids)
        if num_tokens > self._longest:
            fault = f"{num_tokens} tokens, but the reward model reads at most {self._longest}"
            return ModelScore(num_tokens=num_tokens, fault=fault)
        if not read.positions or not num_tokens:
            return ModelScore(num_tokens=num_tokens, fault="nothing to score")
        return None

    def _passes(self, reads: dict[int, Read]) -> Iterator[list[int]]:
        """Yield the indices of each pass: in order of decreasing length, until the pass is full."""
        most, width = self._settings.max_tokens_per_pass, 0
        batch: list[int] = []
        for at in sorted(reads, key=lambda at: -len(reads[at].ids)):
            if batch and (len(batch) + 1) * width > most:
                yield batch
                batch = []
            width = width if batch else len(reads[at].ids)
            batch.append(at)
        if batch:
            yield batch

    @torch.inference_mode()
    def _pass(self, reads: list[Read]) -> list[list[float]]:
        """Return the values of each exchange at its positions."""
        width = max(len(read.ids) for read in reads)
        rows = [read.ids + [0] * (width - len(read.ids)) for read in reads]
        ids = torch.tensor(rows, device=self._model.device)
        lengths = torch.tensor([len(read.ids) for read in reads], device=ids.device)
        mask = (torch.arange(width, device=ids.device) < lengths[:, None]).long()
        outputs = self._outputs(ids, mask, reads).float()
        values = outputs[:, 0] if outputs.shape[-1] == 1 else outputs.softmax(-1)[:, 1]
        listed = iter(values.tolist())
        return [list(islice(listed, len(read.positions))) for read in reads]

    def _outputs(self, ids: torch.Tensor, mask: torch.Tensor, reads: list[Read]) -> torch.Tensor:
        """Compute the outputs at all positions of all rows, [positions, outputs]."""
        rows = [row for row, read in enumerate(reads) for _ in read.positions]
        positions = [position for read in reads for position in read.positions]
        model: Any = self._model
        if self._settings.step_end is not None:
            outputs: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
            return outputs[rows, positions]
        if not hasattr(model, "score"):  # an encoder, which scores at its first token
            outputs = model(input_ids=ids, attention_mask=mask).logits
            return outputs
        states = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        outputs = model.score(states[rows, positions])
        return outputs

    def _scored(self, read: Read, values: list[float]) -> ModelScore:
        score = _reduced(values, self._settings.over_steps)
        if not math.isfinite(score):
            return ModelScore(
                num_tokens=len(read.ids), fault=f"the reward model's score is {score}"
            )
        return ModelScore(num_tokens=len(read.ids), score=score)


def _reduced(values: list[float], over_steps: OverSteps) -> float:
    match over_steps:
        case "min":
            return min(values)
        case "mean":
            return fmean(values)
        case "last":
            return values[-1]
        case _:
            assert_never(over_steps)


def _messages(exchange: Exchange) -> list[dict[str, Any]]:
    if isinstance(exchange.prompt, str):
        return [{"role": "user", "content": exchange.prompt}]
    return exchange.prompt


def _text(exchange: Exchange) -> str:
    if isinstance(exchange.prompt, str):
        return exchange.prompt
    return "\n\n".join(str(message["content"]) for message in exchange.prompt)


class RewardWorker(RewardRole):
    """Computes in one thread, so that the event loop can answer heartbeats."""

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
        """Return the model's score of each exchange, in order."""
        if self._model is None:
            raise RuntimeError("the reward model is not loaded: call start first")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._model.score, exchanges)

    async def stop(self) -> None:
        """Finish pending work, and free the model."""
        await asyncio.to_thread(self._thread.shutdown)
        self._model = None
