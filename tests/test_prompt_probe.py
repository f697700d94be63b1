"""A probe of what a language model makes of prompts, which says how long their outputs will be."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import pytest

from streamrl.executor.prompt_probe import (
    fit_probe,
    read_activations,
    read_probe,
    ridge,
    write_probe,
)
from streamrl.executor.prompts import PromptWorkload
from streamrl.ranker.text_ranker import read_ranker
from tests.command_line import streamrl
from tests.runs import small_run
from tests.scripted import ScriptedTokenizer
from tests.tiny_model import save_tiny_model

SYMBOLS = ["<pad>", "<eos>", *string.ascii_lowercase, *string.digits]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("probe") / "model"
    save_tiny_model(path, SYMBOLS)
    return str(path)


def prompts(
    num: int, seed: int
) -> tuple[list[str], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Return prompts whose last letter says how long outputs are."""
    rng = np.random.default_rng(seed)
    letters = rng.choice(list("abcdef"), (num, 6))
    texts = ["".join(row) for row in letters.tolist()]
    return texts, np.array([4 + (ord(text[-1]) - ord("a")) / 2 for text in texts])


def test_a_probe_tells_prompts_that_it_has_not_seen(model: str) -> None:
    texts, lengths = prompts(120, seed=0)
    unseen, later = prompts(60, seed=1)
    found = np.log(fit_probe(model, texts, lengths).score(unseen))
    assert np.corrcoef(found, later)[0, 1] > 0.9


def test_padding_and_the_order_of_prompts_change_nothing(model: str) -> None:
    texts = ["ab", "abcdefgh", "c", "0123456789abc"]
    together = read_activations(model, texts)
    for row, text in zip(together, texts, strict=True):
        np.testing.assert_allclose(row, read_activations(model, [text])[0], atol=1e-5)


def test_ridge_is_held_back_as_far_as_it_must_be() -> None:
    rng = np.random.default_rng(0)
    columns, unseen = rng.normal(size=(2, 100, 80))
    noisy, true = columns[:, 0] + 2 * rng.normal(size=100), unseen[:, 0]
    errors = [
        float(np.mean((unseen @ weights - true) ** 2))
        for weights in (ridge(columns, noisy), np.linalg.pinv(columns) @ noisy)
    ]
    assert errors[0] < 0.2 * errors[1]
    few = rng.normal(size=(400, 5))
    np.testing.assert_allclose(ridge(few, few @ np.arange(5.0)), np.arange(5.0), atol=0.01)


def test_a_probe_is_kept_in_a_file_and_asked_ahead_of_a_run_alone(
    model: str, tmp_path: Path
) -> None:
    texts, lengths = prompts(40, seed=0)
    probe = fit_probe(model, texts, lengths)
    path = tmp_path / "probe.npz"
    write_probe(path, probe)
    again = read_probe(path)
    assert again is not None
    np.testing.assert_allclose(again.score(texts), probe.score(texts))
    with pytest.raises(ValueError, match="not a ranker"):
        read_ranker(path)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text('{"prompt": "1+1="}\n')
    run = small_run({"workload.prompts": str(asked), "workload.ranker.path": str(path)})
    with pytest.raises(ValueError, match=r"workload\.ranker\.path: .*before the run"):
        PromptWorkload(run, ScriptedTokenizer())


def test_fit_and_score_from_the_shell(model: str, tmp_path: Path) -> None:
    texts, lengths = prompts(60, seed=0)
    file, probe = tmp_path / "lengths.csv", tmp_path / "probe.npz"
    rows = [
        f"{n},{text},{round(np.exp(log))}"
        for n, (text, log) in enumerate(zip(texts, lengths, strict=True))
    ]
    file.write_text("\n".join(["prompt_id,prompt,output_tokens", *rows]) + "\n")
    done = streamrl("ranker", "fit", file, "--lm", model, "-o", probe)
    assert done.returncode == 0 and "a probe of" in done.stdout, done.stderr
    asked, scored = tmp_path / "prompts.jsonl", tmp_path / "scored.jsonl"
    asked.write_text('{"prompt": "aaaaaf"}\n{"prompt": "ffffaa"}\n')
    done = streamrl("ranker", "score", asked, "--ranker", probe, "-o", scored)
    assert done.returncode == 0, done.stderr
    long, short = (json.loads(line)["expected_tokens"] for line in scored.read_text().splitlines())
    assert long > 2 * short
    wrong = streamrl("ranker", "fit", file, "--lm", tmp_path, "-o", tmp_path / "no.npz")
    assert wrong.returncode == 2 and "no model directory" in wrong.stderr
