"""Prompts of a trace: numbers there, token ids beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.tokens import decode_ids
from streamrl.record.prompt_tokens import read_prompt_tokens, write_prompt_tokens
from tests.scripted import ScriptedTokenizer
from tests.test_execute import real_run


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1), min_size=1, max_size=9))
def test_token_ids_come_back_prompt_by_prompt(prompts: list[list[int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        write_prompt_tokens(Path(directory), [np.array(ids, np.int32) for ids in prompts])
        assert [ids.tolist() for ids in read_prompt_tokens(Path(directory))] == prompts


def test_a_directory_without_them_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts\.npz: cannot read token ids of prompts"):
        read_prompt_tokens(tmp_path)
    (tmp_path / "prompts.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"prompts\.npz: cannot read token ids of prompts"):
        read_prompt_tokens(tmp_path)


def test_a_drawn_group_says_which_prompt_it_is(tmp_path: Path) -> None:
    workload = PromptWorkload(real_run(tmp_path), ScriptedTokenizer())
    write_prompt_tokens(tmp_path, [decode_ids(prompt) for prompt in workload.prompts])
    kept = read_prompt_tokens(tmp_path)
    for draw in workload.draw(0, 20):
        assert draw.drawn.prompt is not None
        assert len(kept[draw.drawn.prompt]) == draw.drawn.prompt_tokens
        assert draw.drawn.prompt == workload.line(draw.drawn.group)
