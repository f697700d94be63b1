"""The environment "tools": it executes the tool calls of each turn. A turn without a call ends the episode.

A tool is a Python function, or belongs to an MCP server. The chat template shows its JSON schema to the model. For a
function the schema comes from its signature, type hints and docstring, or from its attribute `schema`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from streamrl.executor.environment.mcp_client import McpConnection, McpServerError, connect
from streamrl.executor.environment.tool_calls import ToolCall, ToolCallError, find_tool_calls
from streamrl.executor.verifier.scorers import import_function
from streamrl.runfile.environment_choice import MCP, class_of

Schema = dict[str, Any]
TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
ARGUMENT = re.compile(r"^\s+(\w+)(?: \([^)]*\))?: (.+)$")
MOST_SHOWN = 20_000
"""Maximum characters of a tool's result, about 5,000 tokens. The rest is cut off, with a remark."""


class Tool(NamedTuple):
    """A tool, and how it is called."""

    schema: Schema
    """In OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    call: Callable[[dict[str, Any]], str]
    server: str = ""
    """The MCP server that it belongs to."""

    @property
    def name(self) -> str:
        """Return the name that the model calls."""
        return str(self.schema["function"]["name"])


class ToolEnvironment:
    """Executes tool calls. The reward is that of the run's verifier.

    Your own environment may inherit from it: its methods can be tools, and `step` can return a reward.
    """

    def __init__(
        self, functions: Sequence[str | Callable[..., Any]], tool_format: str = "hermes"
    ) -> None:
        """Take the tools, and the format of tool calls.

        Args:
            functions: functions, or values of `environment.tools`.
            tool_format: a value of `environment.tool_format` other than "auto".
        """
        self._format = tool_format
        self._connections: list[Any] = []
        self.waits_for = ""
        """The MCP server of the newest call."""
        found = [tool for name in functions for tool in self._find(name)]
        self._tools = {tool.name: tool for tool in found}

    def _find(self, name: str | Callable[..., Any]) -> Iterator[Tool]:
        """Yield a function as a tool, or the tools that a value of `environment.tools` names."""
        if not isinstance(name, str):
            yield _tool_of(name)
            return
        if name.startswith(MCP):
            server = name.removeprefix(MCP)
            connection = connect(server)
            self._connections.append(connection)
            for schema in connection.schemas():
                own = schema["function"]["name"]
                yield Tool(schema, partial(_call_server, connection, own), server)
            return
        yield _tool_of(imported(name))

    @property
    def tools(self) -> list[Schema]:
        """Return the schemas of all tools, for the chat template."""
        return [tool.schema for tool in self._tools.values()]

    def reset(self, task: dict[str, Any]) -> None:
        """Begin an episode; the prompt of the record is all that the policy sees."""

    def step(self, action: str) -> tuple[list[dict[str, Any]] | None, float, bool]:
        """Execute the calls of a turn, and return their results as messages of tools."""
        schemas = {
            name: tool.schema["function"]["parameters"] for name, tool in self._tools.items()
        }
        try:
            calls = find_tool_calls(action, self._format, schemas)
        except ToolCallError as error:
            return [{"role": "tool", "name": "error", "content": f"Error: {error}"}], 0.0, False
        if not calls:
            return None, 0.0, True
        return [self._result(each) for each in calls], 0.0, False

    def _result(self, call: ToolCall) -> dict[str, Any]:
        tool = self._tools[call.name]
        self.waits_for = tool.server
        try:
            content = tool.call(call.arguments)
        except McpServerError:  # the episode is lost, as with its own process
            raise
        except Exception as error:  # the model reads it and may correct its call
            content = shown(f"Error: {type(error).__name__}: {error}")
        return {"role": "tool", "name": call.name, "content": content}

    def close(self) -> None:
        """End the connections to MCP servers."""
        for connection in self._connections:
            connection.close()


@cache
def imported(name: str) -> Callable[..., Any]:
    """Import a function. The host imports it once, because the sandbox of a worker does not allow to read its file.

    Raises:
        TypeError: the name is malformed, or there is no such function.
    """
    named = class_of(name)
    if named is None:
        raise TypeError(
            f"{name!r} is no tool: write python:FILE.py:FUNCTION, MODULE:FUNCTION or mcp:COMMAND"
        )
    return import_function(named)


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function with the arguments of a tool call.

    Raises:
        ToolCallError: an argument is missing or unknown.
    """
    try:
        bound = inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ToolCallError(str(error)) from None
    return function(*bound.args, **bound.kwargs)


def _tool_of(function: Callable[..., Any]) -> Tool:
    return Tool(schema_of(function), lambda arguments: shown(call(function, arguments)))


def _call_server(connection: McpConnection, name: str, arguments: dict[str, Any]) -> str:
    return shown(connection.call(name, arguments))


def shown(result: Any) -> str:
    """Return the result of a tool as text."""
    text = (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN]}\n[{len(text) - MOST_SHOWN} more characters are cut off]"


@cache
def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the schema of a function.

    Arguments are described in a section `Args:` of its docstring, in Google's style.
    """
    own: Schema | None = getattr(function, "schema", None)
    if own is not None:
        return own if "function" in own else {"type": "function", "function": own}
    hints = get_type_hints(function)
    doc = inspect.getdoc(function) or ""
    before, _, section = doc.partition("\nArgs:\n")
    matches = filter(None, map(ARGUMENT.match, section.splitlines()))
    described = {match[1]: match[2] for match in matches}
    parameters = inspect.signature(function).parameters.values()
    properties = {
        each.name: _type_schema(hints.get(each.name, str))
        | ({"description": described[each.name]} if each.name in described else {})
        for each in parameters
    }
    required = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": getattr(function, "__name__", "tool"),
            "description": before.strip(),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _type_schema(hint: Any) -> Schema:
    """Return the JSON schema of a type hint; a text for types that JSON lacks."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": TYPES.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        return _type_schema(kinds[0]) if len(kinds) == 1 else {"anyOf": [*map(_type_schema, kinds)]}
    kind = TYPES.get(origin or hint, "string")
    if kind == "array" and inner:
        return {"type": kind, "items": _type_schema(inner[0])}
    return {"type": kind}
