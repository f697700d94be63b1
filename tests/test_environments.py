"""Environments of this package: another attempt after a wrong answer, and servers with OpenEnv's and NeMo Gym's protocols."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError, URLError

import pytest

from streamrl.executor.environment import http_environments
from streamrl.executor.environment.http_environments import (
    MOST_PAUSE,
    RESTART_TIME,
    HttpClient,
    NemoGym,
    OpenEnv,
)
from streamrl.executor.environment.retry import Retry
from streamrl.executor.environment.session import EnvironmentFaultError, Session
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from tests.runs import make_table


def test_a_wrong_answer_is_answered_with_feedback_and_costs_reward() -> None:
    retry = Retry(attempts=3, feedback="not {answer}; {prompt}", scorer="exact")
    retry.reset({"prompt": "2+2=", "answer": "4"})
    assert retry.step("5") == ("not 5; 2+2=", 0.0, False)
    assert retry.step("4") == (None, 0.5, True)


def test_the_last_attempt_ends_the_episode() -> None:
    retry = Retry(attempts=2, scorer="exact")
    retry.reset({"prompt": "2+2=", "answer": "4"})
    assert retry.step("5")[2] is False
    assert retry.step("6") == (None, 0.0, True)


class SayingHost:
    """Opens environments whose process says one line, whatever it is asked."""

    start_time_limit = 10.0

    def __init__(self, line: bytes) -> None:
        self._line = line

    async def open(self) -> tuple[int, asyncio.StreamReader, Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(self._line)
        return 1, reader, io.BytesIO()


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "\xff", "fault": "\xff"}\n',
        b'{"x":' + b"[" * 10_000 + b"\n",
        b'{"id": "a"}\n',
        b"7\n",
    ],
)
def test_whatever_an_environments_process_says_ends_its_own_episode_alone(line: bytes) -> None:
    session = Session(SayingHost(line))  # type: ignore[arg-type]  # only `open` is asked
    with pytest.raises(EnvironmentFaultError, match="answer"):
        asyncio.run(session.reset({"prompt": "a"}))


class Server(BaseHTTPRequestHandler):
    """Both protocols: OpenEnv's echoes, and NeMo Gym's has one tool and a session for each cookie."""

    sessions: ClassVar[dict[str, Any]] = {}
    num_steps = 0
    statuses: ClassVar[list[int]] = []
    """Status codes of the next answers, the last one first."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer, cookie = self.answer(body), self.headers.get("Cookie")
        self.send_response(Server.statuses.pop() if Server.statuses else 200)
        if cookie is None:
            self.send_header("Set-Cookie", f"session={len(Server.sessions)}")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def answer(self, body: dict[str, Any]) -> Any:
        match self.path:
            case "/reset":
                Server.num_steps = 0
                return {"observation": {"echoed": "hello", "n": 0}, "reward": None, "done": False}
            case "/step":
                Server.num_steps += 1
                told = {"echoed": body["action"]["message"], "n": Server.num_steps}
                return {"observation": told, "reward": 0.25, "done": Server.num_steps == 2}
            case "/seed_session":
                Server.sessions[f"session={len(Server.sessions) + 1}"] = body["answer"]
                return {}
            case "/lookup":
                return {"found": Server.sessions["session=1"], "key": body["key"]}
            case _:
                return {"reward": self.verified(body)}

    def verified(self, body: dict[str, Any]) -> float:
        """Check the whole request, and return 1 if the last message has the answer."""
        called, told, message = body["response"]["output"]
        assert body["responses_create_params"] == {"input": [{"role": "user", "content": "q"}]}
        assert (called["name"], called["arguments"]) == ("lookup", '{"key": "a"}')
        assert told["type"] == "function_call_output" and told["call_id"] == called["call_id"]
        return float(message["content"][0]["text"] == body["answer"])

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    """URL of a local server."""
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_openenv_server_is_reset_and_stepped(endpoint: str) -> None:
    environment = OpenEnv(endpoint, observation_field="echoed")
    assert environment.reset({}) == "hello"
    assert environment.step("one") == ("one", 0.25, False)
    assert environment.step("two") == ("two", 0.25, True)
    whole = OpenEnv(endpoint)
    assert whole.reset({}) is None
    assert whole.step("x")[0] == '{"echoed": "x", "n": 1}'


def test_a_nemo_gym_server_has_tools_and_verifies_the_episode(
    endpoint: str, tmp_path: Path
) -> None:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    schema = {"type": "function", "name": "lookup", "parameters": parameters}
    (tmp_path / "tools.json").write_text(json.dumps([schema]))
    environment = NemoGym(endpoint, "llama", str(tmp_path / "tools.json"))
    assert environment.tools[0]["function"]["name"] == "lookup"
    asked = {"input": [{"role": "user", "content": "q"}]}
    environment.reset({"responses_create_params": asked, "answer": "42"})
    messages, reward, is_over = environment.step('{"name": "lookup", "parameters": {"key": "a"}}')
    assert messages is not None and messages[0]["content"] == '{"found": "42", "key": "a"}'
    assert (reward, is_over) == (0.0, False)
    assert environment.step("42") == (None, 1.0, True)


def test_what_is_wrong_with_a_server_is_no_observation(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "name": "lookup"}]))
    environment = NemoGym(endpoint, "llama", str(tmp_path / "tools.json"))
    environment.reset({"prompt": "q", "answer": "42"})
    call = '{"name": "lookup", "parameters": {"key": "a"}}'
    Server.statuses[:] = [422]
    messages, *_ = environment.step(call)
    assert messages is not None and messages[0]["content"].startswith("Error: HTTP Error 422")
    Server.statuses[:] = [500]
    with pytest.raises(HTTPError, match="500"):
        environment.step(call)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def monotonic(self) -> float:
        return sum(self.pauses)


def test_a_request_waits_for_a_server_that_restarts(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(http_environments, "time", clock)
    Server.statuses[:] = [503, 502]
    assert HttpClient(endpoint).post("/reset", {})["done"] is False
    assert clock.pauses == [0.25, 0.5]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    clock.pauses.clear()
    with pytest.raises(URLError, match="refused"):
        HttpClient(f"http://127.0.0.1:{port}").post("/reset", {})
    assert max(clock.pauses) == MOST_PAUSE
    assert RESTART_TIME - MOST_PAUSE <= sum(clock.pauses) <= RESTART_TIME


@pytest.mark.parametrize("wrong", [{"reward": []}, {"reward": ""}, {"done": ""}, {"done": []}])
def test_answers_of_an_openenv_server_keep_wrong_types(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    answer = {"observation": "x", "reward": None, "done": None}
    monkeypatch.setattr(HttpClient, "post", lambda self, path, body: {**answer, **wrong})
    found = OpenEnv("http://localhost").step("a")
    assert found == ("x", wrong.get("reward", 0.0), wrong.get("done", False)), (
        "the process of the environment refuses them"
    )


AT = {"arguments": {"endpoint": "http://localhost"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "openenv", **AT}, "environment.sandboxes must be 1 for .* 'openenv'"),
        (
            {"implementation": "openenv", "sandboxes": 1, **AT},
            "environment.scores_in_sandbox must be true",
        ),
        ({"implementation": "nemo-gym", **AT}, "environment.sandbox must be false"),
        (
            {"implementation": "nemo-gym", "sandbox": False},
            "environment.arguments.endpoint is missing",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str) -> None:
    table = make_table({"environment": {"max_turns": 2, "max_context": 4096, **changes}})
    with pytest.raises(RunError, match=message):
        make_run(table)
