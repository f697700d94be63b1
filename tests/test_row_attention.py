"""Rows of the cache: a sequence attends to its own tokens, whatever its row had before, and whatever is beside it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.executor.roles import Completion, Request
from streamrl.executor.rollout.inference_engine import PREFILL_TOKENS, ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.rollout.row_attention import attend_by_row
from streamrl.executor.rollout.row_batch import RowBatch, RowSequence
from streamrl.executor.rollout.stopwatch import PassLog
from streamrl.executor.rollout.torch_model import draw
from streamrl.executor.tokens import encode_ids, read_block
from tests.tiny_model import reference, tiny_model

VOCABULARY, MAX_RUNNING = 60, 8
LONG_PROMPT = 2 * PREFILL_TOKENS + 3  # in three chunks, beside those that decode


SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
"""The second layer attends to the last 16 tokens only."""


@pytest.fixture(scope="module", params=[{}, SLIDING], ids=["full", "sliding"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads share keys and values in pairs, and that never ends a rollout."""
    path = tmp_path_factory.mktemp("model")
    options = {"initializer_range": 0.2, "max_position_embeddings": 2048, "eos_token_id": None}
    tiny_model(VOCABULARY, **options, **request.param).save_pretrained(path)
    return path


def make_requests() -> list[Request]:
    """Prompts of 1 to 40 tokens and two long ones, each of three rollouts; outputs end at many different steps."""
    draw = random.Random(3)
    lengths = [draw.randint(1, 40) for _ in range(8)]
    lengths[2] = lengths[6] = LONG_PROMPT
    prompts = [encode_ids([draw.randrange(VOCABULARY) for _ in range(each)]) for each in lengths]
    outputs = [draw.randint(1, 40) for _ in range(24)]
    outputs[0] = outputs[7] = 150  # the last ones
    return [
        Request(rollout=rollout, prompt=prompts[rollout % 8], priority=rollout, max_tokens=output)
        for rollout, output in enumerate(outputs)
    ]


def settings(path: Path, *, shares_prefixes: bool = True) -> ReplicaSettings:
    return ReplicaSettings(
        model=str(path),
        max_running=MAX_RUNNING,
        max_tokens=150,
        max_prompt_tokens=LONG_PROMPT,
        temperature=1.0,
        seed=0,
        shares_prefixes=shares_prefixes,
    )


async def generate(path: Path, requests: list[Request], *, shares: bool) -> list[Completion]:
    worker = ReplicaWorker(settings(path, shares_prefixes=shares))
    await worker.start(None, 0)
    try:
        return list(await asyncio.gather(*map(worker.generate, requests)))
    finally:
        await worker.stop()


@pytest.mark.parametrize("shares", [True, False])
@torch.no_grad()
def test_each_sequence_attends_to_its_own_tokens_in_whatever_row_they_are(
    model_path: Path, shares: bool
) -> None:
    requests, model = make_requests(), reference(model_path)
    completions = asyncio.run(generate(model_path, requests, shares=shares))
    for asked, done in zip(requests, completions, strict=True):
        tokens, logprobs = read_block(done.output)
        assert len(tokens) == asked.max_tokens
        prompt = torch.frombuffer(bytearray(asked.prompt), dtype=torch.int32).tolist()
        context = torch.tensor([[*prompt, *tokens.tolist()]])
        expected = model(context).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        sampled = expected.gather(1, torch.tensor(tokens.tolist())[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs.copy()), sampled, atol=5e-5, rtol=1e-5)


def test_a_prefix_is_computed_once_until_the_weights_change(model_path: Path) -> None:
    model = reference(model_path)
    attend_by_row(model)
    batch, log = RowBatch(model, settings(model_path), []), PassLog("cpu")
    prefix = (1, 2, 3, 4, 5)

    def computed(*runs: str) -> list[list[int]]:
        """Prefix tokens of the passes that begin these runs."""
        for run in runs:
            batch.add(RowSequence(run, prefix, 100))
        for _ in range(3):
            batch.compute_pass(log)
        return [each.prefixes for each in log.take() if each.prefixes]

    assert computed("0", "1", "2") == [[5], [1, 1]]
    assert computed("3") == [[1]]
    batch.change_weights()
    assert computed("4", "5") == [[5], [1]]
    for run in "45":
        batch.cancel(run)
    assert computed("6") == [[5]]  # those that still run have keys of the old weights


def test_a_prefix_of_two_weights_is_not_shared(model_path: Path) -> None:
    model = reference(model_path)
    attend_by_row(model)
    batch, log = RowBatch(model, settings(model_path), []), PassLog("cpu")
    batch.add(RowSequence("0", (1,) * LONG_PROMPT, 100))
    batch.compute_pass()
    batch.change_weights()
    batch.compute_pass()
    batch.compute_pass()
    batch.add(RowSequence("1", (1,) * LONG_PROMPT, 100))
    batch.compute_pass(log)
    batch.compute_pass(log)
    assert [each.prefixes for each in log.take()] == [[PREFILL_TOKENS]]


def test_tokens_are_drawn_by_their_probability_and_never_without_one() -> None:
    shares = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    drawn = draw(shares.log().expand(20_000, -1), torch.Generator().manual_seed(0))
    found = torch.bincount(drawn[:, 0], minlength=5) / len(drawn)
    assert found[1] == found[4] == 0
    torch.testing.assert_close(found, shares, atol=0.015, rtol=0.0)
