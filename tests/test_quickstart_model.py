"""How `examples/make_quickstart.py` teaches the model of the quickstart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from examples.make_quickstart import (
    BOS,
    EOS,
    IGNORED,
    TASKS,
    THREADS,
    batches,
    build_model,
    build_tokenizer,
    examples,
    set_gradients,
)

TASK = TASKS["even"]


def test_threads_together_compute_the_gradients_of_the_whole_batch() -> None:
    tokenizer = build_tokenizer(TASK)
    torch.manual_seed(0)
    model = build_model(tokenizer, TASK)
    batch = next(batches(examples(tokenizer, 0, 0.0, TASK), 5, 0))
    with ThreadPoolExecutor(THREADS) as threads:
        loss = set_gradients(model, batch, threads)
    in_threads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in batch])
    whole = model(input_ids=ids, labels=labels).loss
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for ours, parameter in zip(in_threads, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)


def test_demonstrations_have_the_tokens_that_the_tokenizer_gives_to_their_text() -> None:
    tokenizer = build_tokenizer(TASK)
    for ids, labels in islice(examples(tokenizer, 0, 0.2, TASK), 20):
        text = tokenizer.decode(ids)
        assert text.startswith(BOS) and text.endswith(EOS)
        assert tokenizer.encode(text.removeprefix(BOS)) == ids
        taught = [label for label in labels if label != IGNORED]
        assert ids[-len(taught) :] == taught
