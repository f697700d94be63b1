"""A chat template may be anybody's program: one that loops is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from streamrl.executor import chat_template
from streamrl.executor.chat_template import render


class LoopingTokenizer:
    """Its template does not end for a long time."""

    def apply_chat_template(self, chat: list[Any], **_: Any) -> dict[str, list[int]]:
        if chat[0]["content"] == "loop":
            end = time.monotonic() + 30
            while time.monotonic() < end:
                pass
        return {"input_ids": [len(chat)]}


def test_a_template_that_loops_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_TIME", 0.2)
    began_at = time.monotonic()
    with pytest.raises(ValueError, match=r"takes more than 0\.2 s for one chat") as error:
        render(LoopingTokenizer(), [{"role": "user", "content": "loop"}])
    assert time.monotonic() - began_at < 5 and "\n" not in str(error.value)
    assert render(LoopingTokenizer(), [{"role": "user", "content": "short"}]) == [1]
    time.sleep(0.3)  # no alarm is left
