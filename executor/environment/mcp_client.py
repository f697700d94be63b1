"""Call the tools of MCP servers: processes that speak JSON-RPC in lines, or servers with streamable HTTP.

The messages are those of the Model Context Protocol, version 2025-06-18 (modelcontextprotocol.io/specification):
`initialize`, `notifications/initialized`, `tools/list` and `tools/call`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import select
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from streamrl.executor.http_deadline import limited_opener
from streamrl.runfile.reading import parse_json

PROTOCOL = "2025-06-18"
REQUEST_TIME = 60.0
"""Seconds for an answer of a server; an action's own limit may be shorter. A process may take longer for a call."""
MOST_BYTES = 2**24
"""Bytes of an answer."""
MOST_PAGES = 100
"""Pages of a server's list of tools."""
SHOWN = 100
"""Maximum characters of a line that an error shows."""
END_TIME = 2.0
"""Seconds that a server's process has to end after its input is closed."""

Message = dict[str, Any]
_Kind = TypeVar("_Kind")


class McpError(RuntimeError):
    """A tool or its server reported an error, which the policy reads."""


class McpServerError(McpError):
    """A server ended, or did not answer in time or by the protocol: no result of the policy."""


class _Tool(msgspec.Struct, rename="camel"):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class _Page(msgspec.Struct, rename="camel"):
    tools: list[_Tool]
    next_cursor: str | None = None


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Result(msgspec.Struct, rename="camel"):
    content: list[_Part] = []
    is_error: bool = False


class Channel(Protocol):
    """Exchanges messages with a server."""

    def ask(self, message: Message) -> Message:
        """Send a request, and return the answer with its id."""

    def tell(self, message: Message) -> None:
        """Send a notification."""

    def close(self) -> None:
        """End the connection."""


class McpConnection:
    """A connection to one server, which is initialized."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ids = itertools.count(1)
        client = {"name": "streamrl", "version": "1"}
        self._ask(dict, "initialize", protocolVersion=PROTOCOL, capabilities={}, clientInfo=client)
        channel.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def schemas(self) -> Iterator[dict[str, Any]]:
        """Yield the schema of each tool, in OpenAI's form.

        Raises:
            McpServerError: the list is malformed, or has more than `MOST_PAGES` pages.
        """
        cursor: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            page = self._ask(_Page, "tools/list", **cursor)
            for tool in page.tools:
                own = {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                }
                yield {"type": "function", "function": own}
            if not page.next_cursor:
                return
            cursor = {"cursor": page.next_cursor}
        raise McpServerError(f"the MCP server's list of tools has more than {MOST_PAGES} pages")

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return the text of its result.

        Raises:
            McpError: the tool reports an error.
            McpServerError: the server does not answer, or its result is malformed.
        """
        result = self._ask(_Result, "tools/call", name=name, arguments=arguments)
        parts = [f"[{part.type}]" if part.text is None else part.text for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise McpError(text)
        return text

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _ask(self, kind: type[_Kind], method: str, **parameters: Any) -> _Kind:
        """Send a request, and return its result as an object of some kind."""
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": parameters}
        answer = self._channel.ask(request)
        error = answer.get("error")
        if error is not None:
            raise McpError(str(error.get("message", error) if isinstance(error, dict) else error))
        try:
            return msgspec.convert(answer.get("result"), kind)
        except msgspec.ValidationError as wrong:
            raise McpServerError(
                f"the MCP server's answer to {method} is malformed: {wrong}"
            ) from None


class StdioChannel:
    """A server that is a process of its own; messages are lines."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._unread = b""
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, message: Message) -> Message:
        """Send a request, and return its answer; answers to requests that timed out are skipped.

        Raises:
            McpServerError: the server ends, prints something else, or does not answer in time.
        """
        self.tell(message)
        for line in self._lines(None if message["method"] == "tools/call" else REQUEST_TIME):
            answer = self._parsed(line)
            if answer.get("id") == message["id"] and "method" not in answer:
                return answer
        status = self._process.wait()
        raise McpServerError(f"the MCP server {self._command!r} ended with status {status}")

    def _parsed(self, line: bytes) -> Message:
        found = read_message(line)
        if found is None:
            text = line.decode(errors="replace")[:SHOWN]
            raise McpServerError(
                f"the MCP server {self._command!r} printed {text!r}, which is no JSON-RPC message; "
                "let it print other text to standard error"
            )
        return found

    def _lines(self, seconds: float | None) -> Iterator[bytes]:
        """Yield the lines that the server prints, until it ends or has printed none for some seconds."""
        assert self._process.stdout is not None, "it is a pipe"
        file, poll = self._process.stdout.fileno(), select.poll()
        poll.register(file, select.POLLIN)
        while True:
            line, end, rest = self._unread.partition(b"\n")
            if end:
                self._unread = rest
                yield line
                continue
            if not poll.poll(None if seconds is None else 1000 * seconds):
                raise McpServerError(
                    f"the MCP server {self._command!r} did not answer within {seconds:g} s"
                )
            more = os.read(file, 1 << 16)
            if not more:
                return
            self._unread += more
            if len(self._unread) > MOST_BYTES and b"\n" not in self._unread:
                raise McpServerError(
                    f"the MCP server {self._command!r} printed a line of more than {MOST_BYTES >> 20} MiB"
                )

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):  # the server has ended; the next answer says so
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Close the server's input, and kill it if it does not end."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(END_TIME)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class HttpChannel:
    """A server with streamable HTTP; an answer is JSON, or an event of a stream."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": PROTOCOL,
        }

    def ask(self, message: Message) -> Message:
        """Send a request, and return its answer."""
        for answer in self._post(message):
            if answer.get("id") == message["id"]:
                return answer
        raise McpServerError("the server sent no answer")

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        list(self._post(message))

    def close(self) -> None:
        """Do nothing: the server forgets a session by itself."""

    def _post(self, message: Message) -> Iterator[Message]:
        """Send a message, and yield those of the answer.

        Raises:
            McpServerError: the server cannot be reached, or the whole answer takes longer than `REQUEST_TIME` or is too
                long.
        """
        try:
            yield from self._answers(message)
        except TimeoutError:
            raise McpServerError(
                f"the MCP server {self._url} did not complete an answer within {REQUEST_TIME:g} s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise McpServerError(f"the MCP server {self._url}: {error}") from None

    def _answers(self, message: Message) -> Iterator[Message]:
        data = json.dumps(message).encode()
        request = urllib.request.Request(self._url, data, self._headers)
        with limited_opener().open(request, timeout=REQUEST_TIME) as response:
            session = response.headers.get("Mcp-Session-Id")
            if session:
                self._headers["Mcp-Session-Id"] = session
            if response.headers.get_content_type() != "text/event-stream":
                text = b"".join(self._pieces(response))
                if text.strip():
                    yield _decoded(text)
                return
            unread = b""
            for piece in self._pieces(response):
                *lines, unread = (unread + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip():
                        yield _decoded(line[5:])

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Yield an answer in pieces; it may have `MOST_BYTES`.

        Raises:
            McpServerError: it has more.
        """
        num_bytes = 0
        while piece := response.read1(1 << 16):
            num_bytes += len(piece)
            if num_bytes > MOST_BYTES:
                raise McpServerError(
                    f"the MCP server {self._url} answers with more than {MOST_BYTES >> 20} MiB"
                )
            yield piece


def read_message(text: bytes) -> Message | None:
    """Return a message of a server; None if the text is none."""
    try:
        found = parse_json(text.decode())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _decoded(text: bytes) -> Message:
    """Return a message of a server; raise `McpServerError` if it is none."""
    found = read_message(text)
    if found is None:
        raise McpServerError(f"the server sent {text[:SHOWN]!r}, which is no JSON-RPC message")
    return found


def connect(where: str) -> McpConnection:
    """Return a connection to a server: a URL, or a command that starts it."""
    is_url = where.startswith(("http://", "https://"))
    return McpConnection(HttpChannel(where) if is_url else StdioChannel(where))
