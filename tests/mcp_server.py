"""An MCP server for tests: it adds and divides.

With the argument "http" it serves HTTP and prints its port. With "hang" it answers no call. With "fork" each call starts a
process in a session of its own, and returns its id.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
MODE = sys.argv[1:]
TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": NUMBERS},
    {"name": "divide", "description": "Divide two numbers.", "inputSchema": NUMBERS},
]


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message; None for a notification."""
    if "id" not in message:
        return None
    parameters = message["params"]
    match message["method"]:
        case "initialize":
            result: Any = {"protocolVersion": parameters["protocolVersion"], "capabilities": {}}
        case "tools/list" if not parameters:
            result = {"tools": TOOLS[:1], "nextCursor": "1"}
        case "tools/list":
            result = {"tools": TOOLS[1:]}
        case _:
            result = called(parameters["name"], **parameters["arguments"])
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def called(name: str, a: float, b: float) -> dict[str, Any]:
    if MODE == ["hang"]:
        time.sleep(600)
    if MODE == ["fork"]:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return {"content": [{"type": "text", "text": str(child.pid)}]}
    if name == "divide" and not b:
        return {"content": [{"type": "text", "text": "division by zero"}], "isError": True}
    return {"content": [{"type": "text", "text": str(a + b if name == "add" else a / b)}]}


class Handler(BaseHTTPRequestHandler):
    """Answers messages that are posted."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = answer(message)
        if message["method"] != "initialize" and self.headers["Mcp-Session-Id"] != "s1":
            self.send_error(400)
            return
        self.send_response(200 if found else 202)
        self.send_header("Mcp-Session-Id", "s1")
        self.send_header("Content-Type", "text/event-stream" if found else "application/json")
        self.end_headers()
        if found:
            self.wfile.write(b"event: message\ndata: " + json.dumps(found).encode() + b"\n\n")

    def log_message(self, *words: object) -> None:
        pass


if __name__ == "__main__":
    if MODE == ["http"]:
        server = HTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_port, flush=True)
        server.serve_forever()
    for line in sys.stdin:
        if (found := answer(json.loads(line))) is not None:
            print(json.dumps({"jsonrpc": "2.0", "method": "log", "params": {}}), flush=True)
            print(json.dumps(found), flush=True)
