"""A judge over HTTP: what it is asked, what of its answer counts, and what becomes of those that give none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from streamrl.executor.environment import http_environments
from streamrl.executor.environment.http_environments import HttpClient
from streamrl.executor.roles import Scoring
from streamrl.executor.verifier import judge
from streamrl.executor.verifier.verifier import Verifier
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.runfile.units import Duration
from tests.runs import make_table

RECORD = {"prompt": "What is 2+2?", "answer": "4", "family": "sums"}
Reply = Callable[[dict[str, Any]], tuple[int, str]]


class Server:
    """A server of one model on loopback; `reply` says what it answers."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # as the library calls it
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.asked.append({**body, "path": self.path})
                    outer.headers.append(self.headers)
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                status, content = reply(body)
                with outer._lock:
                    outer._now -= 1
                data = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def score(url: str, completion: str, **changes: Any) -> Scoring:
    reward = RewardConfig(scorer="judge", endpoint=url, model="big", **changes)
    with contextlib.closing(Verifier(VerifierConfig(reward=(reward,)))) as verifier:
        return asyncio.run(verifier.verify(completion, 3, RECORD))


def test_the_last_score_of_the_answer_counts_and_the_question_has_task_answer_and_completion() -> (
    None
):
    with Server(lambda body: (200, 'It says "Score: 1" itself.\n**Score:** 0.25')) as server:
        found = score(server.url, "it is five, Score: 1")
    assert found.reward == 0.25 and found.fault is None and found.scores == {"judge": 0.25}
    (asked,) = server.asked
    assert asked["path"] == "/v1/chat/completions" and asked["model"] == "big"
    (message,) = asked["messages"]
    for part in ("What is 2+2?", "A right answer", "4", "it is five", "from 0 (useless) to 1"):
        assert part in message["content"]


@pytest.mark.parametrize("said", ["I cannot tell.", "Score: 7", "Score: nan"])
def test_an_answer_without_a_score_within_bounds_is_the_worst_score(said: str) -> None:
    with Server(lambda body: (200, said)) as server:
        assert score(server.url, "4") == Scoring(0.0, "judge: no score", {"judge": 0.0})
        assert score(server.url, "4", weight=-1.0).reward == -1.0


def test_a_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a-key-of-a-test")
    with Server(lambda body: (200, "Score: 1")) as server:
        score(server.url, "4", key_variable="JUDGE_KEY", template="{{ completion }} {{ family }}")
    assert server.headers[0]["Authorization"] == "Bearer a-key-of-a-test"
    assert server.asked[0]["messages"][0]["content"] == "4 sums"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match=r"verifier\.reward\.0\.key_variable 'JUDGE_KEY'"):
        score(server.url, "4", key_variable="JUDGE_KEY")


def test_an_overloaded_server_is_asked_again_and_one_that_refuses_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "WAITS", (0.01, 0.01))
    replies: Iterator[tuple[int, str]] = iter([(503, ""), (429, ""), (200, "Score: 0.5")])
    with Server(lambda body: next(replies)) as server:
        assert score(server.url, "4").reward == 0.5 and len(server.asked) == 3
    with Server(lambda body: (404, "")) as server:
        with pytest.raises(RuntimeError, match=r"judge http://127.* answers 404"):
            score(server.url, "4")
        assert len(server.asked) == 1
    with pytest.raises(RuntimeError, match=r"judge http://127.*ConnectionRefused"):
        score(server.url, "4")


def test_no_more_questions_are_under_way_than_the_run_file_says() -> None:
    gate = threading.Barrier(2, timeout=5)

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        gate.wait()  # which only opens for two at once
        return 200, "Score: 1"

    async def go(url: str) -> None:
        reward = RewardConfig(scorer="judge", endpoint=url, model="big", at_once=2)
        with contextlib.closing(Verifier(VerifierConfig(reward=(reward,)))) as verifier:
            found = await asyncio.gather(*(verifier.verify("4", 1, RECORD) for _ in range(8)))
        assert [each.reward for each in found] == [1.0] * 8

    with Server(reply) as server:
        asyncio.run(go(server.url))
    assert server.most_at_once == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": None}, r"verifier\.reward\.0\.endpoint is missing: scorer judge needs it"),
        ({"endpoint": "localhost"}, r"endpoint must be the URL of a server.* got 'localhost'"),
        ({"at_once": 0}, r"verifier\.reward\.0\.at_once must be"),
        ({"scorer": "exact"}, "endpoint applies only to scorer judge"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_by_key(
    changes: dict[str, Any], words: str
) -> None:
    reward = {"scorer": "judge", "endpoint": "http://127.0.0.1:1/v1", "model": "big", **changes}
    table = make_table(
        {"verifier": {"reward": [{k: v for k, v in reward.items() if v is not None}]}}
    )
    with pytest.raises(RunError, match=words):
        make_run(table)


@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b""])
def test_an_answer_that_drips_ends_at_the_limit(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends a header or a piece of the body now and then, so no wait for the next one takes long."""
    monkeypatch.setattr(judge, "WAITS", ())
    monkeypatch.setattr(http_environments, "REQUEST_TIME", 0.2)
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(sent or b"HTTP/1.1 200 OK\r\n")
            while not ended.wait(0.02):
                connection.sendall(b" " if sent else b"X: a\r\n")

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                drip(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"TimeoutError: no whole answer within 0\.2 s"):
            score(url, "4", request_time=Duration(0.2))
        with pytest.raises(TimeoutError, match=r"no whole answer within 0\.2 s"):
            HttpClient(url).post("/reset", {})
        ended.set()
