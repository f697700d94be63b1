"""Call the tools of MCP servers: processes that speak JSON-RPC in lines, or servers with streamable HTTP.

The messages are those of the Model Context Protocol, version 2025-06-18 (modelcontextprotocol.io/specification):
`initialize`, `notifications/initialized`, `tools/list` and `tools/call`.
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any, Protocol

PROTOCOL = "2025-06-18"
REQUEST_TIME = 60.0
"""Seconds for an answer of a server with HTTP; an action's own limit may be shorter."""
END_TIME = 2.0
"""Seconds that a server's process has to end after its input is closed."""

Message = dict[str, Any]


class McpError(RuntimeError):
    """A server answered with an error, or not at all."""


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
        self._ask("initialize", protocolVersion=PROTOCOL, capabilities={}, clientInfo=client)
        channel.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def schemas(self) -> Iterator[dict[str, Any]]:
        """Yield the schema of each tool, in OpenAI's form."""
        cursor: dict[str, Any] = {}
        while True:
            page = self._ask("tools/list", **cursor)
            for tool in page["tools"]:
                own = {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["inputSchema"],
                }
                yield {"type": "function", "function": own}
            if not page.get("nextCursor"):
                return
            cursor = {"cursor": page["nextCursor"]}

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return the text of its result.

        Raises:
            McpError: the tool reports an error.
        """
        result = self._ask("tools/call", name=name, arguments=arguments)
        parts = [part.get("text", f"[{part['type']}]") for part in result.get("content", ())]
        text = "\n".join(parts)
        if result.get("isError"):
            raise McpError(text)
        return text

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _ask(self, method: str, **parameters: Any) -> Message:
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": parameters}
        answer = self._channel.ask(request)
        if "error" in answer:
            raise McpError(str(answer["error"].get("message", answer["error"])))
        result: Message = answer["result"]
        return result


class StdioChannel:
    """A server that is a process of its own; messages are lines."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, message: Message) -> Message:
        """Send a request, and return its answer; answers to requests that timed out are skipped."""
        self.tell(message)
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            answer: Message = json.loads(line)
            if answer.get("id") == message["id"] and "method" not in answer:
                return answer
        raise McpError(f"the server ended with status {self._process.wait()}")

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Close the server's input, and kill it if it does not end."""
        if self._process.stdin is not None:
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
        raise McpError("the server sent no answer")

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        list(self._post(message))

    def close(self) -> None:
        """Do nothing: the server forgets a session by itself."""

    def _post(self, message: Message) -> Iterator[Message]:
        data = json.dumps(message).encode()
        request = urllib.request.Request(self._url, data, self._headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIME) as response:
            session = response.headers.get("Mcp-Session-Id")
            if session:
                self._headers["Mcp-Session-Id"] = session
            if response.headers.get_content_type() != "text/event-stream":
                text = response.read()
                if text.strip():
                    yield json.loads(text)
                return
            for line in response:
                if line.startswith(b"data:") and line[5:].strip():
                    yield json.loads(line[5:])


def connect(where: str) -> McpConnection:
    """Return a connection to a server: a URL, or a command that starts it."""
    is_url = where.startswith(("http://", "https://"))
    return McpConnection(HttpChannel(where) if is_url else StdioChannel(where))
