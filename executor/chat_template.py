"""Render chats with the template of a model, which may be anybody's program, within a time limit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

RENDER_TIME = 10.0
"""Seconds that one chat may take. Long chats of known templates take milliseconds."""


def render(tokenizer: Any, chat: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
    """Return the token ids of a chat.

    Raises:
        ValueError: the template does not end within `RENDER_TIME` seconds.
    """
    with _limited():
        encoded = tokenizer.apply_chat_template(list(chat), return_dict=True, **arguments)
    return list(encoded["input_ids"])


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt the block after `RENDER_TIME` seconds. Only the main thread of a process can be interrupted."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, RENDER_TIME)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise ValueError(
        f"the chat template takes more than {RENDER_TIME:g} s for one chat; it may loop. "
        "Check chat_template.jinja or tokenizer_config.json in model.path"
    )
