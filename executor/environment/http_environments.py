"""Environments behind HTTP servers: OpenEnv's and NeMo Gym's protocols.

| server   | requests                                             | source                                              |
|----------|------------------------------------------------------|-----------------------------------------------------|
| OpenEnv  | `POST /reset`, `POST /step` with `{"action": {...}}` | meta-pytorch/OpenEnv, src/core/http_env_client.py   |
| NeMo Gym | `POST /seed_session`, `/TOOL`, `/verify`; a cookie   | NVIDIA-NeMo/Gym, nemo_gym/base_resources_server.py  |

An OpenEnv server of this protocol has one environment, so it runs one episode at a time. A NeMo Gym server has a session
for each cookie.
"""

from __future__ import annotations

import json
import time
import urllib.request
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError, URLError

from streamrl.executor.environment.tool_calls import ToolCall, ToolCallError, find_tool_calls
from streamrl.executor.environment.tools import shown
from streamrl.executor.http_deadline import limited_opener
from streamrl.runfile.reading import parse_json, read_json

REQUEST_TIME = 300.0
"""Seconds for a whole answer of a server; `environment.action_time_limit` may be shorter."""
MOST_BYTES = 1 << 24
"""Bytes of an answer."""
RESTART_TIME = 60.0
"""Seconds for which a request waits for a server that refuses connections, as one that restarts does."""
FIRST_PAUSE, MOST_PAUSE = 0.25, 4.0
"""Seconds until the request is sent again; each pause is twice as long as the last one."""
DOWN = (502, 503)
"""Status codes of a gateway whose server is not there."""
FIRST_FAULT = 500
"""Least status code of a server's own fault; those below tell what is wrong with the request."""

Json = dict[str, Any]


class HttpClient:
    """Posts JSON to a server, and keeps its cookies."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint.rstrip("/")
        cookies = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = limited_opener(cookies)

    def post(self, path: str, body: Json) -> Any:
        """Return the decoded answer; a text if it is no JSON."""
        request = urllib.request.Request(
            f"{self._endpoint}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        data, pause = None, FIRST_PAUSE
        ends_at = time.monotonic() + RESTART_TIME
        while data is None:
            try:
                with self._opener.open(request, timeout=REQUEST_TIME) as response:
                    data = response.read(MOST_BYTES + 1)
            except URLError as error:
                if not _is_down(error) or time.monotonic() + pause > ends_at:
                    raise
                time.sleep(pause)
                pause = min(MOST_PAUSE, 2 * pause)
        if len(data) > MOST_BYTES:
            raise ValueError(f"{self._endpoint} answers with more than {MOST_BYTES >> 20} MiB")
        return read_answer(data.decode())


def _is_down(error: URLError) -> bool:
    """Return whether a request has not reached its server, so that it may be sent again."""
    if isinstance(error, HTTPError):
        return error.code in DOWN
    return isinstance(error.reason, ConnectionRefusedError)


def read_answer(text: str) -> Any:
    """Return the decoded answer of a server; the text itself if it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return text


class OpenEnv:
    """An environment of an OpenEnv server."""

    def __init__(
        self, endpoint: str, action_field: str = "message", observation_field: str = ""
    ) -> None:
        """Connect to a server.

        Args:
            endpoint: its URL.
            action_field: field of the server's action that gets the text of a turn.
            observation_field: field of its observation that the policy reads; empty: all fields, as JSON.
        """
        self._client = HttpClient(endpoint)
        self._action_field = action_field
        self._observation_field = observation_field

    def reset(self, task: Json) -> str | None:
        """Begin an episode. What the server shows first is read by the policy, if `observation_field` is set."""
        result = self._client.post("/reset", {})
        return self._text(result) if self._observation_field else None

    def step(self, action: str) -> tuple[str, float, bool]:
        """Send a turn as the action."""
        result = self._client.post("/step", {"action": {self._action_field: action}})
        reward, is_over = result.get("reward"), result.get("done")
        return (
            self._text(result),
            0.0 if reward is None else reward,
            False if is_over is None else is_over,
        )

    def _text(self, result: Json) -> str:
        found = result["observation"]
        return shown(found[self._observation_field] if self._observation_field else found)


class NemoGym:
    """A session of a NeMo Gym resources server: its tools, and its verification of the whole episode."""

    def __init__(self, endpoint: str, tool_format: str, tools: str = "") -> None:
        """Connect to a server.

        Args:
            endpoint: its URL.
            tool_format: format of tool calls.
            tools: a JSON file with the schemas of its tools, as `responses_create_params.tools` of a data set has them.
        """
        self._client = HttpClient(endpoint)
        self._format = tool_format
        found = read_json(tools) if tools else []
        self._schemas = {tool["name"]: tool for tool in found}
        self._task: Json = {}
        self._output: list[Json] = []

    @property
    def tools(self) -> list[Json]:
        """Return the schemas of the tools, for the chat template."""
        keys = ("name", "description", "parameters")
        return [
            {"type": "function", "function": {key: tool.get(key, "") for key in keys}}
            for tool in self._schemas.values()
        ]

    def reset(self, task: Json) -> None:
        """Begin a session with the fields of the record."""
        self._task = task
        self._client.post("/seed_session", task)

    def step(self, action: str) -> tuple[list[Json] | None, float, bool]:
        """Call the tools of a turn; a turn without a call ends the episode, and the server verifies it."""
        schemas = {name: tool.get("parameters") or {} for name, tool in self._schemas.items()}
        try:
            calls = find_tool_calls(action, self._format, schemas)
        except ToolCallError as error:
            return [{"role": "tool", "name": "error", "content": f"Error: {error}"}], 0.0, False
        if not calls:
            content = {"type": "output_text", "text": action, "annotations": []}
            message = {"type": "message", "role": "assistant", "status": "completed"}
            self._output.append({**message, "id": self._next_id("msg"), "content": [content]})
            return None, self._verify(), True
        return [self._result(call) for call in calls], 0.0, False

    def _result(self, call: ToolCall) -> Json:
        called = {"name": call.name, "call_id": self._next_id("call")}
        self._output.append(
            {
                **called,
                "type": "function_call",
                "id": called["call_id"],
                "arguments": json.dumps(call.arguments),
                "status": "completed",
            }
        )
        try:
            content = shown(self._client.post(f"/{call.name}", call.arguments))
        except HTTPError as error:
            if error.code >= FIRST_FAULT:
                raise
            # the model reads it and may correct its call
            content = f"Error: {error}"
        answered = {"type": "function_call_output", "call_id": called["call_id"]}
        self._output.append({**answered, "output": content})
        return {"role": "tool", "name": call.name, "content": content}

    def _next_id(self, kind: str) -> str:
        return f"{kind}_{len(self._output)}"

    def _verify(self) -> float:
        """Return the reward of the episode."""
        asked = self._task.get("responses_create_params") or {"input": self._task["prompt"]}
        response = {
            "id": "resp_1",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "output": self._output,
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": list(self._schemas.values()),
        }
        body = {**self._task, "responses_create_params": asked, "response": response}
        return float(self._client.post("/verify", body)["reward"])
