"""Models are loaded as their files say, also where several roles of one process load at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from executor.pretrained import load_pretrained
from tests.tiny_model import tiny_model


def test_models_that_load_at_the_same_time_keep_their_weights_tied(tmp_path: Path) -> None:
    tiny_model(40, tie_word_embeddings=True).save_pretrained(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(load_pretrained, [str(tmp_path)] * 6))
    for model in models:
        assert model.lm_head.weight is model.model.embed_tokens.weight
