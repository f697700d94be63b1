r"""Make the token ids of observations: the text that the model's chat template puts between two turns of the policy.

The turns themselves are never tokenized again. To find the text between turns, the template renders a short chat in
which the policy's turn is a marker. The text after the marker's end-of-turn token is the observation, with the start of
the next turn:

    <|im_start|>assistant\nMARKER<|im_end|> \n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n
                                            └──────────────── tokens of the observation ────────────────┘

Without chats an observation is a text, and its tokens follow the policy's turn directly.

An observation is cut before the template and the tokenizer read it, so that a huge one cannot block the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from streamrl.executor.chat_template import render_text

Messages = list[dict[str, Any]]
MARKER = "q7Zk-turn-of-the-policy"
"""Content of the policy's turn in the rendered chat; no template has this text."""
QUESTION = {"role": "user", "content": "a"}
CALL = {"type": "function", "id": "call00000", "function": {"name": "a", "arguments": {}}}
"""A tool call, because templates refuse the answer of a tool that was not called. Mistral wants nine letters as id."""


ROLES = ("user", "tool", "system", "developer", "function", "ipython", "observation")
"""Roles of messages that an environment writes: OpenAI's, `ipython` of Llama 3 and `observation` of GLM-4. The policy alone
writes as the assistant.
"""
CHARACTERS_OF_TOKEN = 16
"""Characters of an observation that are kept for each token of the context. Assumption: a token of text has fewer."""
LEAST_CHARACTERS = 20_000
"""Characters of an observation that are kept in any case."""
SHORT = 64
"""Texts up to this length are never cut, such as the role of a message."""


class ObservationEncoder:
    """Tokenizes observations for one model."""

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: Iterable[int],
        arguments: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        has_chats: bool,
        max_context: int = 0,
    ) -> None:
        """Take the tokenizer, the tokens that end a turn, and the arguments and tools of the chat template.

        Without `has_chats`, prompts and observations are texts. An observation is cut to 16 characters for each of the
        `max_context` tokens of a context, but not below 20,000 characters.
        """
        self._most_characters = max(CHARACTERS_OF_TOKEN * max_context, LEAST_CHARACTERS)
        self._tokenizer = tokenizer
        self._ends = frozenset(end_tokens)
        self._arguments = dict(arguments) | ({"tools": list(tools)} if tools else {})
        self._has_chats = has_chats

    def first(self, prompt: Any, observation: str | Messages | None) -> list[int]:
        """Return the tokens before the first turn: those of the environment's observation, and the start of the turn.

        Without chats and an observation there are none. The tokens of the prompt itself are not included.
        """
        observation = self._cut(observation)
        if not self._has_chats:
            return self._encode(_joined(observation)) if observation else []
        before = self._render(prompt, add_generation_prompt=False)
        whole = self._render([*prompt, *_messages(observation)], add_generation_prompt=True)
        if not whole.startswith(before):
            raise ValueError(
                "the model's chat template changes the prompt when messages follow, so they cannot be appended"
            )
        return self._encode(whole[len(before) :])

    def next(self, observation: str | Messages, last_token: int) -> list[int]:
        """Return the tokens of an observation after a turn that ended with `last_token`.

        Raises:
            ValueError: the observation is empty, or the template does not accept it.
        """
        if not observation:
            raise ValueError(
                "the environment's observation is empty; return a text, or done = True to end the episode"
            )
        observation = self._cut(observation)
        if not self._has_chats:
            return self._encode(_joined(observation))
        messages = _messages(observation)
        called = any(each.get("role") == "tool" for each in messages)
        turn = {"role": "assistant", "content": MARKER} | ({"tool_calls": [CALL]} if called else {})
        whole = self._render([QUESTION, turn, *messages], add_generation_prompt=True)
        after = whole.rpartition(MARKER)[2]
        return self._encode(self._after_turn(after, has_ended=last_token in self._ends))

    def _cut(self, observation: Any) -> Any:
        return _Cut(self._most_characters).shortened(observation)

    def _after_turn(self, text: str, *, has_ended: bool) -> str:
        """Return the text after the end of the policy's turn; with that end, unless the policy has sampled one."""
        ends = [self._tokenizer.decode([each]) for each in sorted(self._ends)]
        places = [(text.index(end), end) for end in ends if end and end in text]
        if not places:
            return text
        place, end = min(places)
        return text[place + len(end) if has_ended else place :]

    def _render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        try:
            return render_text(
                self._tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except (TemplateError, TypeError, LookupError, ValueError) as error:
            raise ValueError(
                f"the model's chat template does not accept an observation: {error}"
            ) from None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class _Cut:
    """Shortens the texts in an observation to a number of characters in all."""

    def __init__(self, room: int) -> None:
        self._room = room

    def shortened(self, value: Any) -> Any:
        """Return the beginning of a text, a list or a table; other values and short texts stay."""
        if isinstance(value, str):
            kept = value[: max(self._room, SHORT)]
            self._room -= len(kept)
            return kept
        if isinstance(value, list):
            return [self.shortened(each) for each in takewhile(lambda _: self._room > 0, value)]
        if isinstance(value, dict):
            return {key: self.shortened(each) for key, each in value.items()}
        self._room -= 1
        return value


def _messages(observation: str | Messages | None) -> Messages:
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    for message in observation:
        role = message.get("role")
        if role not in ROLES:
            what = "no role" if role is None else f"the role {str(role)[:40]!r}"
            raise ValueError(
                f"a message of the environment's observation has {what}: {str(message)[:40]}; write one of "
                f"{', '.join(ROLES)}, because turns of the assistant are the policy's"
            )
    return observation


def _joined(observation: str | Messages) -> str:
    """Return an observation as one text, for models without a chat template."""
    if isinstance(observation, str):
        return observation
    return "\n\n".join(str(each.get("content", "")) for each in observation)
