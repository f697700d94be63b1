"""Render chats with the template of a model, which may be anybody's program, within a time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.workload.render_limit import render_limit

TEMPLATE = "the chat template of a chat"
REMEDY = "Check chat_template.jinja or tokenizer_config.json in model.path"


def render_text(tokenizer: Any, chat: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """Return the text of a chat; see `render` for the error."""
    with render_limit(TEMPLATE, REMEDY):
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **arguments))


def render(tokenizer: Any, chat: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
    """Return the token ids of a chat.

    Raises:
        ValueError: the template does not end within `RENDER_TIME` seconds.
    """
    with render_limit(TEMPLATE, REMEDY):
        encoded = tokenizer.apply_chat_template(list(chat), return_dict=True, **arguments)
    return list(encoded["input_ids"])
