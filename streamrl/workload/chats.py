"""Read chats in the layouts that data sets have: role and content, ShareGPT turns, content in parts, chats as text.

A chat becomes a list of messages with a role and a text, up to the turn that the model must write. A data set for
supervised training ends each chat with the assistant's answer. A prompt must not contain it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from streamrl.runfile.errors import shown

Message = dict[str, Any]

ASSISTANT = "assistant"
ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
}
"""Roles of ShareGPT and similar data sets, and the roles that chat templates know."""
STARTS = ("[{", "[ {")
"""First characters of a chat that a data set stores as text."""


class Chat(NamedTuple):
    """The messages of a prompt."""

    messages: list[Message]
    num_cut: int
    """Messages of the assistant at the end that were cut off."""


def read_prompt(prompt: object, line: str) -> str | Chat:
    """Return a prompt as a text or as a chat.

    Args:
        prompt: the value of the field `prompt`.
        line: its file and line, for errors.

    Raises:
        ValueError: it is no text and no chat, or a message has no text.
    """
    prompt = _unquoted(prompt)
    if isinstance(prompt, str):
        return prompt
    if not _is_list_of_objects(prompt):
        raise ValueError(f'{line}: needs a "prompt": a text, or a list of chat messages')
    messages = [_read_message(message, line) for message in prompt]
    kept = _without_answer(messages)
    if not kept:
        raise ValueError(f"{line}: the chat has only turns of the assistant, so it is no prompt")
    return Chat(kept, len(messages) - len(kept))


def _unquoted(prompt: object) -> object:
    """Return the chat that a text contains as JSON or as a Python literal; everything else as it is."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith(STARTS):
        return prompt
    for parse in (json.loads, ast.literal_eval):
        try:
            found: object = parse(prompt.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if _is_list_of_objects(found) and all(_role_of(message) for message in found):
            return found
    return prompt


def _is_list_of_objects(value: object) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _read_message(message: Message, line: str) -> Message:
    role = _role_of(message)
    if not role:
        raise ValueError(
            f'{line}: needs a "prompt": a text, or a list of chat messages with "role" and "content" '
            f'or, as in ShareGPT, "from" and "value"; got {shown(message)}'
        )
    if "role" in message:
        content = message.get("content")
        return {**message, "role": role, "content": _text_of(content, role, line)}
    return {"role": role, "content": _text_of(message.get("value"), role, line)}


def _role_of(message: Mapping[str, object]) -> str | None:
    """Return the role of a message under the name that chat templates use; None if it has none."""
    role = message.get("role", message.get("from"))
    return ROLES.get(role, role) if isinstance(role, str) else None


def _text_of(content: object, role: str, line: str) -> str | None:
    """Return the text of a message. A message of the assistant may have none, if it calls tools."""
    if isinstance(content, str) or (content is None and role == ASSISTANT):
        return content
    if isinstance(content, list):
        return "".join(_text_of_part(part, role, line) for part in content)
    raise ValueError(
        f"{line}: the content of a {role} message must be a text, got {shown(content)}"
    )


def _text_of_part(part: object, role: str, line: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(text := part.get("text"), str):
        return text
    raise ValueError(
        f"{line}: a {role} message must consist of text, because images and sound are not supported; "
        f"got the part {shown(part)}"
    )


def _without_answer(messages: list[Message]) -> list[Message]:
    """Return the messages without the assistant's turns at the end."""
    num = len(messages)
    while num and messages[num - 1]["role"] == ASSISTANT:
        num -= 1
    return messages[:num]
