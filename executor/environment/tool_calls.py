"""Find the tool calls in a turn of the policy, in the format of the model's chat template.

| format  | a call                                                                          | models                   |
|---------|---------------------------------------------------------------------------------|--------------------------|
| hermes  | `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`                 | Hermes, Qwen2.5, Qwen3   |
| xml     | `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`    | Qwen3-Coder, Qwen3.5     |
| llama   | `{"name": "add", "parameters": {"a": 1}}`; several are separated by `;`         | Llama 3.1 and later      |
| mistral | `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`                          | Mistral                  |

Text before `</think>` is not searched. Special tokens may be missing from the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from streamrl.runfile.reading import parse_json

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool, by name."""


class ToolCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


class ToolCallError(ValueError):
    """A call that cannot be read; the message is for the model."""


TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
MARKS = (
    ("xml", "<function="),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama", '"parameters"'),
)
"""Texts of chat templates that tell the format; the first one that a template has counts."""


def format_of(template: str | None) -> str | None:
    """Return the format of tool calls that a chat template describes; None if it describes none."""
    return next((name for name, mark in MARKS if mark in (template or "")), None)


def find_tool_calls(text: str, name: str, schemas: Schemas) -> list[ToolCall]:
    """Return the tool calls in the text of a turn; an empty list if there is none.

    Raises:
        ToolCallError: a call is malformed, or calls an unknown tool.
    """
    calls = list(FORMATS[name](text.rpartition("</think>")[2], schemas))
    for call in calls:
        if call.name not in schemas:
            raise ToolCallError(
                f"there is no tool {call.name!r}; the tools are {', '.join(sorted(schemas))}"
            )
        _check_text(call)
    return calls


def _check_text(call: ToolCall) -> None:
    """Raise `ToolCallError` if an argument has half of a surrogate pair, which no text may have."""
    try:
        json.dumps(call.arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ToolCallError(
            "an argument has half of a surrogate pair, such as \\ud800; write the whole character"
        ) from None


def _hermes(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for content, end in TAGGED.findall(text):
        if not end:
            raise ToolCallError("a tool call does not end with </tool_call>")
        yield _from_json(_decoded(content), "arguments")


def _xml(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for content, end in TAGGED.findall(text):
        found = FUNCTION.search(_until_last("</function>", content))
        if not end or found is None:
            raise ToolCallError(
                "a tool call must be <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
            )
        name, inner = found.groups()
        types = schemas.get(name, {}).get("properties", {})
        values = {
            key: _typed(value, types.get(key, {}))
            for key, value in PARAMETER.findall(_until_last("</parameter>", inner))
        }
        yield ToolCall(name, values)


def _until_last(tag: str, text: str) -> str:
    """Return a text up to its last closing tag; each search for a later one would read all the rest."""
    return text[: text.rfind(tag) + len(tag)] if tag in text else ""


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return a value of an XML call: a text, unless its schema has another type."""
    if schema.get("type") == "string":
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _llama(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    rest = text.strip().removeprefix("<|python_tag|>").lstrip()
    if not rest.startswith("{") or '"name"' not in rest:
        return
    decoder = json.JSONDecoder()
    while rest:
        try:
            found, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"a tool call is not valid JSON: {error}") from None
        yield _from_json(found, "parameters", "arguments")
        rest = rest[end:].lstrip().removeprefix(";").lstrip()


def _mistral(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    _, mark, after = text.rpartition("[TOOL_CALLS]")
    rest = after.strip()
    if not mark and not rest.startswith("[{"):
        return
    found = _decoded(rest)
    if not isinstance(found, list):
        raise ToolCallError("tool calls must be a JSON list")
    for each in found:
        yield _from_json(each, "arguments")


FORMATS: dict[str, Callable[[str, Schemas], Iterator[ToolCall]]] = {
    "hermes": _hermes,
    "xml": _xml,
    "llama": _llama,
    "mistral": _mistral,
}


def _decoded(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ToolCallError(f"a tool call is not valid JSON: {error}") from None


def _from_json(found: Any, *keys: str) -> ToolCall:
    """Return the call of a JSON object whose arguments are below one of the keys."""
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        raise ToolCallError(f'a tool call must be a JSON object with "name" and "{keys[0]}"')
    arguments: Any = next((found[key] for key in keys if key in found), {})
    if isinstance(arguments, str):  # some models write the arguments as a JSON text
        arguments = _decoded(arguments)
    if not isinstance(arguments, dict):
        raise ToolCallError(f'"{keys[0]}" of a tool call must be a JSON object')
    return ToolCall(name, arguments)
