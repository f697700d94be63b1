"""Rows of the cache: what a sequence attends to lies in its own row, whoever had that before, and whoever is beside it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from streamrl.executor.roles import Completion, Request
from streamrl.executor.rollout import transformers_engine as row_attention
from streamrl.executor.rollout.inference_engine import PREFILL_TOKENS, ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.tokens import encode_ids, read_block
from tests.tiny_model import reference, tiny_model

VOCABULARY, MAX_RUNNING = 60, 8
LONG_PROMPT = 2 * PREFILL_TOKENS + 3  # in three chunks, beside those that decode


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads share keys and values in pairs, and that never ends a rollout."""
    path = tmp_path_factory.mktemp("model")
    options = {"initializer_range": 0.2, "max_position_embeddings": 2048, "eos_token_id": None}
    tiny_model(VOCABULARY, **options).save_pretrained(path)
    return path


def make_requests() -> list[Request]:
    """Prompts of 1 to 40 tokens and two long ones; outputs that end at many different steps, two of them late."""
    draw = random.Random(3)
    prompts = [draw.randint(1, 40) for _ in range(24)]
    outputs = [draw.randint(1, 40) for _ in range(24)]
    prompts[5] = prompts[20] = LONG_PROMPT
    outputs[0] = outputs[7] = 150  # when all others are done, their rows are far apart
    return [
        Request(
            rollout=rollout,
            prompt=encode_ids([draw.randrange(VOCABULARY) for _ in range(prompt)]),
            priority=rollout,
            max_tokens=output,
        )
        for rollout, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


async def generate(path: Path, requests: list[Request]) -> list[Completion]:
    worker = ReplicaWorker(
        ReplicaSettings(
            model=str(path),
            max_running=MAX_RUNNING,
            max_tokens=150,
            max_prompt_tokens=LONG_PROMPT,
            temperature=1.0,
            seed=0,
        )
    )
    await worker.start(None, 0)
    try:
        return list(await asyncio.gather(*map(worker.generate, requests)))
    finally:
        await worker.stop()


@pytest.mark.parametrize("dense", [0.0, row_attention.DENSE, 2.0])
@torch.no_grad()
def test_rows_are_attended_to_where_they_lie_or_copied_together_with_the_same_result(
    model_path: Path, dense: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_attention, "DENSE", dense)
    requests, model = make_requests(), reference(model_path)
    for asked, done in zip(requests, asyncio.run(generate(model_path, requests)), strict=True):
        tokens, logprobs = read_block(done.output)
        prompt = torch.frombuffer(bytearray(asked.prompt), dtype=torch.int32).tolist()
        context = torch.tensor([[*prompt, *tokens.tolist()]])
        expected = model(context).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        sampled = expected.gather(1, torch.tensor(tokens.tolist())[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs.copy()), sampled, atol=5e-5, rtol=1e-5)


def test_sparse_rows_are_copied_and_dense_ones_are_not() -> None:
    def decoding(rows: list[int]) -> slice:
        count = len(rows)
        found = row_attention._decoding(
            torch.arange(count), torch.tensor(rows), torch.arange(1, count + 1)
        )
        assert found[4].shape[0] == (found[2].stop - found[2].start or count)
        return found[2]

    assert decoding([4, 2, 3]) == slice(2, 5)
    assert decoding([2, 5]) == slice(2, 6)
    assert decoding([2, 6]) == slice(0, 0)
    assert decoding([9]) == slice(9, 10)
