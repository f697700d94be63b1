"""A template may be anybody's program: one that loops is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.chat_template import render
from streamrl.executor.environment.observation_tokens import ObservationEncoder
from streamrl.executor.verifier.judge import Judge
from streamrl.runfile.roles_config import RewardConfig
from streamrl.runfile.workload_config import SourceConfig, TemplateConfig
from streamrl.workload import render_limit
from streamrl.workload.prompt_records import read_source


class LoopingTokenizer:
    """Its template does not end for a long time."""

    def apply_chat_template(self, chat: list[Any], **_: Any) -> dict[str, list[int]]:
        if chat[0]["content"] == "loop":
            end = time.monotonic() + 30
            while time.monotonic() < end:
                pass
        return {"input_ids": [len(chat)]}


def test_a_template_that_loops_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limit, "RENDER_TIME", 0.2)
    began_at = time.monotonic()
    with pytest.raises(ValueError, match=r"takes more than 0\.2 s; it may loop\.") as error:
        render(LoopingTokenizer(), [{"role": "user", "content": "loop"}])
    assert time.monotonic() - began_at < 5 and "\n" not in str(error.value)
    assert render(LoopingTokenizer(), [{"role": "user", "content": "short"}]) == [1]
    time.sleep(0.3)  # no alarm is left


def test_a_template_that_loops_over_an_observation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render_limit, "RENDER_TIME", 0.2)
    encoder = ObservationEncoder(LoopingTokenizer(), (), has_chats=True)
    with pytest.raises(ValueError, match=r"observation: .* takes more than 0\.2 s; it may loop\."):
        encoder.first([{"role": "user", "content": "loop"}], "seen")


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ prompt }}"


def test_a_prompts_template_that_loops_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_limit, "RENDER_TIME", 0.2)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n')
    source = SourceConfig(prompts=str(tmp_path / "p.jsonl"), template=TemplateConfig(user=LOOP))
    with pytest.raises(
        ValueError, match=r"p\.jsonl:1: .* 0\.2 s; it may loop\. .* workload\.template\.user"
    ):
        read_source(source)


def test_a_judges_template_that_loops_is_an_error_with_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render_limit, "RENDER_TIME", 0.2)
    reward = RewardConfig(scorer="judge", endpoint="http://127.0.0.1:9", model="m", template=LOOP)
    judge = Judge(reward, "verifier.reward.0")
    with pytest.raises(RuntimeError, match=r"it may loop\. .* verifier\.reward\.0\.template"):
        asyncio.run(judge.score("4", {"prompt": "2+2="}))
