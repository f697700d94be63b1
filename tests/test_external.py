"""Replicas whose tokens come from servers that someone else runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from streamrl.engine.messages import ReplicaLost, WeightsLoaded
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.roles import Completion, Request, RoleLostError
from streamrl.executor.rollout import external_engine, sglang_engine
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.rollout.server_api import (
    AnswerError,
    Post,
    ServerSettings,
    make_api,
    read_part,
)
from streamrl.executor.rollout.server_client import ServerClient
from streamrl.executor.rollout.server_group import ServerGroup
from streamrl.executor.rollout.vllm_settings import environment
from streamrl.executor.sampling import Truncation
from streamrl.executor.tokens import encode_ids, read_block
from streamrl.executor.transfer.shared_memory import write_buckets
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.roles_config import WeightsWay
from tests.command_line import streamrl
from tests.sglang_server import SglangServer
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.test_engine_runs import EASY, SCORER
from tests.tiny_model import changed_weights, reference, save_tiny_model, tiny_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

VOCABULARY = 32
PROMPT = [3, 4, 5]
PATIENCE, SHORT = 10.0, 0.4
"""Seconds in which a server must answer, and those in tests of servers that do not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = {"max_position_embeddings": 512, "initializer_range": 0.2}
    tiny_model(VOCABULARY, eos_token_id=None, **shape).save_pretrained(path)
    return path


@pytest.fixture
def server(model: Path) -> Iterator[SglangServer]:
    with SglangServer(model) as server:
        yield server


def worker(
    server: SglangServer,
    *,
    key: str | None = None,
    timeout: float = PATIENCE,
    weights: WeightsWay = "disk",
    **changes: Any,
) -> ReplicaWorker:
    connection = ServerSettings(
        url=server.url, api="sglang", timeout=timeout, key=key, weights=weights
    )
    limits = {"max_running": 4, "max_tokens": 200, "max_prompt_tokens": 16, "seed": 0}
    settings = {**limits, "model": str(server.model_path), "temperature": 1.0, **changes}
    return ReplicaWorker(ReplicaSettings(backend="external", server=connection, **settings))


def ask(rollout: int, max_tokens: int = 20) -> Request:
    return Request(rollout=rollout, prompt=encode_ids(PROMPT), priority=0, max_tokens=max_tokens)


def serve(
    replica: ReplicaWorker, scenario: Callable[[ReplicaWorker], Coroutine[Any, Any, None]]
) -> None:
    async def go() -> None:
        await replica.start(None, 0)
        try:
            await scenario(replica)
        finally:
            await replica.stop()

    asyncio.run(asyncio.wait_for(go(), 30))


@torch.no_grad()
def gap(model: Any, done: Completion, first: int = 0, temperature: float = 1.0) -> float:
    """Return how far log-probabilities of tokens from `first` on are from those of a full forward pass."""
    ids, logprobs = read_block(done.output)
    logits = model(torch.tensor([PROMPT + ids.tolist()])).logits[0, len(PROMPT) - 1 : -1]
    values = torch.log_softmax(logits / temperature, -1)
    expected = values[torch.arange(len(ids)), torch.tensor(ids.tolist())]
    return float((expected - torch.tensor(logprobs.tolist())).abs()[first:].max())


async def parts_of(server: SglangServer, count: int) -> None:
    """Wait until the server has sent this many more parts of streams, and a moment until they are read."""
    wanted = server.num_sent + count
    while server.num_sent < wanted:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)


def test_a_server_takes_weights_over_a_group_without_files(
    server: SglangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_engine, "BUCKET_BYTES", 4096)
    new = changed_weights(server.model_path)
    server._model.load_state_dict(new)  # an earlier run has left other weights

    async def go(replica: ReplicaWorker) -> None:
        assert gap(reference(server.model_path), await replica.generate(ask(0))) < 1e-5
        server.token_time = 0.005
        during = asyncio.ensure_future(replica.generate(ask(1, max_tokens=60)))
        await parts_of(server, 2)
        await replica.load(write_buckets(new.items(), tmp_path, 1), drain=False)
        done = await during
        (_, _), (version, start) = done.versions
        assert version == 1 and 0 < start < 60 == done.output.num_tokens
        assert gap(reference(server.model_path, new), done, start) < 1e-5

    serve(worker(server, weights="distributed"), go)
    paths = [path for path, _ in server.requests]
    assert "/update_weights_from_disk" not in paths and not server._groups
    received = [
        body for path, body in server.requests if path == "/update_weights_from_distributed"
    ]
    assert len(received) > 4 and sum(body["flush_cache"] for body in received) == 2


@pytest.mark.parametrize("how", ["refuses", "dies", "is short of a rank"])
def test_a_server_that_does_not_take_weights_ends_the_start_with_a_remedy(
    server: SglangServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(replica: ReplicaWorker) -> None:
        raise AssertionError("it started")

    # what waits for a member ends at once after its patience, not before
    monkeypatch.setattr(
        external_engine,
        "ServerGroup",
        lambda name, ranks, time: ServerGroup(name, ranks + (how == "is short of a rank"), SHORT),
    )
    server.group_time = SHORT
    message = "cannot join a group"
    if how == "refuses":
        answer = b'{"success": false, "message": "no such backend"}'
        server.answers["/init_weights_update_group"] = answer
        message = r"cannot join a group at 127\.0\.0\.1:\d+: no such backend; .*GLOO_SOCKET_IFNAME"
    elif how == "dies":
        server.answers["/update_weights_from_distributed"] = (
            b'{"success": false, "message": "full"}'
        )
        message = "cannot load version 0: full"
    with pytest.raises(RuntimeError, match=message):
        serve(worker(server, weights="distributed"), nothing)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_each_token_has_its_id_its_log_probability_and_one_version(
    server: SglangServer, tmp_path: Path, is_incremental: bool
) -> None:
    server.is_incremental = is_incremental
    new = changed_weights(server.model_path)

    async def go(replica: ReplicaWorker) -> None:
        done = await replica.generate(ask(0))
        assert done.output.num_tokens == 20 and done.finish == "length"
        assert gap(reference(server.model_path), done, temperature=0.7) < 1e-5
        server.token_time = 0.005
        during = asyncio.ensure_future(replica.generate(ask(1, max_tokens=60)))
        await parts_of(server, 2)
        loaded = await replica.load(write_buckets(new.items(), tmp_path, 1), drain=False)
        done = await during
        assert loaded.checksum and loaded.load_time > 0
        (old, zero), (version, start) = done.versions
        assert (old, zero, version) == (0, 0, 1) and 0 < start < 60 == done.output.num_tokens
        assert gap(reference(server.model_path, new), done, start, temperature=0.7) < 1e-5
        assert gap(reference(server.model_path, new), done, temperature=0.7) > 1e-3
        assert not list(tmp_path.rglob("weights-*")), "the directory of a load is left"

    serve(worker(server, temperature=0.7), go)
    paths = [path for path, _ in server.requests]
    assert paths.count("/update_weights_from_disk") == 2  # the initial weights are loaded too
    sent = next(body for path, body in server.requests if body.get("stream"))
    penalties = [key for key in sent["sampling_params"] if key.endswith("_penalty")]
    assert len(penalties) == 3  # else the defaults of the model's files would apply


def test_an_aborted_rollout_keeps_its_tokens_and_ends_at_the_server(server: SglangServer) -> None:
    async def go(replica: ReplicaWorker) -> None:
        server.token_time = 0.005
        during = asyncio.ensure_future(replica.generate(ask(0, max_tokens=200)))
        await parts_of(server, 2)
        await replica.abort(0)
        done = await during
        assert done.finish == "aborted" and 0 < done.output.num_tokens < 200
        assert gap(reference(server.model_path), done) < 1e-5
        while server.num_running:
            await asyncio.sleep(0.01)

    serve(worker(server), go)


def test_a_rollout_goes_on_past_end_tokens_that_only_the_server_has(server: SglangServer) -> None:
    server.own_ends = tuple(range(0, VOCABULARY, 2))

    async def go(replica: ReplicaWorker) -> None:
        done = await replica.generate(ask(0, max_tokens=40))
        ids, _ = read_block(done.output)
        assert done.finish == "stop" and set(ids[:-1].tolist()).isdisjoint({7, 9, 11})
        assert ids[-1] in (7, 9, 11) and gap(reference(server.model_path), done) < 1e-5

    serve(worker(server, end_tokens=(7, 9, 11)), go)
    assert sum(body.get("stream", False) for _, body in server.requests) > 1


@pytest.mark.parametrize("how", ["dies", "hangs", "breaks"])
def test_a_dead_or_silent_server_is_a_lost_role(server: SglangServer, how: str) -> None:
    async def go(replica: ReplicaWorker) -> None:
        server.token_time = 0.01
        during = asyncio.ensure_future(replica.generate(ask(0, max_tokens=200)))
        await parts_of(server, 1)
        if how == "dies":
            server.stop()
        elif how == "hangs":
            server.is_hung, server.token_time = True, 5.0
        else:
            server.is_broken = True
        with pytest.raises(RoleLostError, match=r"the server http://127\.0\.0\.1:\d+ is lost"):
            await during
        with pytest.raises(RoleLostError):
            replica.check_alive()

    serve(worker(server, timeout=SHORT), go)
    server.is_hung = False


BAD_PARTS: list[Any] = [5, None, [], {}, {"meta_info": 7}, {"meta_info": {}}, "text"]
BAD_TOKENS = [True, 1.0, "1", -1, VOCABULARY, 10**30, None, [1]]
BAD_LOGPROBS = [0.01, float("nan"), float("-inf"), -1e39, -(10**400), None, True, "-1"]


def _sglang_event(token: Any, logprob: Any) -> dict[str, Any]:
    return {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[logprob, token]]}}


def _vllm_event(token: Any, logprob: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}}]}


BAD_CHOICES: list[Any] = [
    {"choices": 5},
    {"choices": [7]},
    {"choices": [{"token_ids": 5, "logprobs": {"token_logprobs": [-1.0]}}]},
    {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": []}}]},
    {"choices": [{"token_ids": [5], "logprobs": 3}]},
]


@pytest.mark.parametrize(
    ("api", "event_of", "more"),
    [("sglang", _sglang_event, BAD_PARTS), ("vllm", _vllm_event, [*BAD_PARTS, *BAD_CHOICES])],
)
def test_no_value_of_an_unexpected_form_enters_an_output(
    api: str, event_of: Callable[[Any, Any], Any], more: list[Any]
) -> None:
    part = read_part(make_api(api), event_of(VOCABULARY - 1, 1e-4), 0, VOCABULARY)
    assert part.tokens == [VOCABULARY - 1] and part.logprobs == [1e-4]
    bad = [event_of(token, -1.0) for token in BAD_TOKENS]
    bad += [event_of(1, logprob) for logprob in BAD_LOGPROBS]
    for event in [*bad, *more]:
        with pytest.raises(AnswerError, match=r"it sent|it returns no"):
            read_part(make_api(api), event, 0, VOCABULARY)


@pytest.mark.parametrize(
    "spoiled", [5, {"meta_info": 7}, _sglang_event(VOCABULARY, -1.0), _sglang_event(1, 0.5)]
)
def test_a_server_that_sends_an_unexpected_event_is_a_lost_role(
    server: SglangServer, spoiled: Any
) -> None:
    async def go(replica: ReplicaWorker) -> None:
        server.spoil = lambda part: spoiled
        with pytest.raises(RoleLostError, match=r"the server http://\S+ is lost: it sent"):
            await asyncio.wait_for(replica.generate(ask(0)), 5)
        with pytest.raises(RoleLostError):
            replica.check_alive()

    serve(worker(server), go)


@pytest.mark.parametrize("path", ["/model_info", "/generate"])
@pytest.mark.parametrize("answer", [b"{", b"5", b"[]", b'"text"'])
def test_a_malformed_answer_at_the_start_is_one_line_with_the_url(
    server: SglangServer, path: str, answer: bytes
) -> None:
    async def nothing(replica: ReplicaWorker) -> None:
        raise AssertionError("it started")

    server.answers[path] = answer
    with pytest.raises(RuntimeError, match=f"^{server.url}{path} answers [^\\n]*$"):
        serve(worker(server), nothing)


@pytest.mark.parametrize("model", [5, [], {}, {"data": []}, {"data": [{"id": 5}]}])
def test_the_models_of_vllm_must_have_a_name(model: Any) -> None:
    with pytest.raises((LookupError, TypeError, AttributeError)):
        make_api("vllm").see_models(model)


def test_an_update_that_fails_with_status_200_is_a_failed_load(server: SglangServer) -> None:
    async def nothing(replica: ReplicaWorker) -> None:
        raise AssertionError("it started")

    server.answers["/update_weights_from_disk"] = b'{"success": false, "message": "no room"}'
    with pytest.raises(RuntimeError, match=r"cannot load .*: no room"):
        serve(worker(server), nothing)


def test_an_answer_that_drips_and_a_line_without_end_are_errors() -> None:
    async def serve_drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).split()[0]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: ")
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" " if asked == b"GET" else b" " * 2**20)
                await writer.drain()
                await asyncio.sleep(SHORT / 8 if asked == b"GET" else 0)

    async def go() -> None:
        async with await asyncio.start_server(serve_drip, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            client = ServerClient(ServerSettings(url=url, api="sglang", timeout=SHORT))
            with pytest.raises(httpx.ReadTimeout, match=r"no whole answer within 0\.4 s"):
                await asyncio.wait_for(client.get("/health", SHORT), 5)
            with pytest.raises(AnswerError, match="a line of more than 16 MiB"):
                await asyncio.wait_for(anext(client.stream(Post("/generate", {}))), 10)
            with pytest.raises(AnswerError, match="answers with more than 16 MiB"):
                await asyncio.wait_for(client.post(Post("/load", {}), 9), 10)
            await client.close()

    asyncio.run(go())


@pytest.mark.parametrize("times", [2, None])
def test_a_busy_server_is_asked_again_until_its_timeout(
    server: SglangServer, times: int | None
) -> None:
    num_refused = 0

    def refuse(part: dict[str, Any]) -> Any:
        nonlocal num_refused
        if times is not None and num_refused >= times:
            return part
        num_refused += 1
        return {"error": {"message": "too many requests", "code": 429}}

    async def go(replica: ReplicaWorker) -> None:
        server.spoil = refuse
        if times is not None:
            done = await asyncio.wait_for(replica.generate(ask(0)), 10)
            assert done.output.num_tokens and num_refused == times
            return
        with pytest.raises(RuntimeError, match="the server rejects a request: too many requests"):
            await asyncio.wait_for(replica.generate(ask(0)), 10)
        assert num_refused > 1
        replica.check_alive()

    serve(worker(server, timeout=PATIENCE if times is not None else 3 * SHORT), go)


def test_a_malformed_answer_about_health_is_no_sign_of_life(server: SglangServer) -> None:
    async def go(replica: ReplicaWorker) -> None:
        server.answers["/health"] = b"{"
        await asyncio.sleep(SHORT / 2)
        del server.answers["/health"]
        await asyncio.sleep(SHORT)
        replica.check_alive()
        server.answers["/health"] = b"{"
        await asyncio.sleep(2 * SHORT)
        with pytest.raises(RoleLostError):
            replica.check_alive()

    serve(worker(server, timeout=SHORT), go)


def test_a_server_that_is_absent_or_unlike_the_run_is_refused_with_a_remedy(
    server: SglangServer, model: Path
) -> None:
    async def nothing(replica: ReplicaWorker) -> None:
        raise AssertionError("it started")

    for change, settings, message in (
        (
            {"has_plain_logprobs": True},
            {"temperature": 0.7},
            "log-probabilities before temperature",
        ),
        ({"has_plain_logprobs": False}, {"truncation": Truncation(top_k=4)}, "before top_k, top_p"),
        ({"key": "secret"}, {"key": "wrong"}, "401.*set rollout.external.key"),
    ):
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(RuntimeError, match=message) as caught:
            serve(worker(server, **settings), nothing)
        assert "wrong" not in str(caught.value)
    server.stop()
    with pytest.raises(RuntimeError, match=r"did not answer within 0.4 s: ConnectError"):
        serve(worker(server, timeout=SHORT), nothing)


def test_the_key_of_a_server_of_ones_own_is_in_no_command_line(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import json, os, sys\n"
        "shown = open('/proc/self/cmdline').read()\n"
        "json.dump([sys.argv[1:], shown, list(os.environ)], open('seen.json', 'w'))\n"
    )
    settings = ReplicaSettings(
        backend="sglang",
        model="m",
        max_running=1,
        max_tokens=1,
        max_prompt_tokens=1,
        seed=0,
        temperature=1.0,
    )
    own = {**os.environ, "PYTHONPATH": str(tmp_path), sglang_engine.KEY: "s3cr3t"}
    subprocess.run(sglang_engine.command(settings, 1), env=own, cwd=tmp_path, check=True)
    arguments, shown, variables = json.loads((tmp_path / "seen.json").read_text())
    assert arguments[-2:] == ["--api-key", "s3cr3t"] and "--port" in arguments
    assert "s3cr3t" not in shown and sglang_engine.KEY not in variables


# Whole runs ---------------------------------------------------------------------------------------


def write_run(directory: Path, endpoints: Sequence[str], **external: str) -> Path:
    """Write the run of `test_engine_runs` with external replicas, and return it."""
    save_tiny_model(directory / "model", SYMBOLS)
    (directory / "prompts.jsonl").write_text(json.dumps(EASY) + "\n")
    (directory / "scorer.py").write_text(SCORER)
    scored = RUN_FILE.replace('scorer = "exact"', 'scorer = "python:scorer.py:starts_low"')
    section = "".join(f'{key} = "{value}"\n' for key, value in external.items())
    section = f"[rollout.external]\nendpoints = {json.dumps(list(endpoints))}\n{section}"
    (directory / "run.toml").write_text(f"{scored}\n{section}")
    return directory / "run.toml"


def options(*settings: str) -> list[str]:
    return [part for each in ("rollout.backend=external", *settings) for part in ("--set", each)]


def check_run(directory: Path, num_steps: int) -> Trace:
    trace = read_trace(directory / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    steps = [line for line in read_metrics(directory / "run") if "step" in line]
    assert len(steps) == num_steps
    gaps = [line["logprob_gap"] for line in steps if "logprob_gap" in line]
    assert gaps and max(gaps) < 1e-3
    return trace


def test_a_run_generates_on_external_servers_and_replaces_a_dead_one_by_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_API_KEY", "s3cr3t")
    save_tiny_model(tmp_path / "model", SYMBOLS)
    with (
        SglangServer(tmp_path / "model", key="s3cr3t") as first,
        SglangServer(tmp_path / "model", key="s3cr3t") as spare,
    ):
        first.token_time = 0.005
        file = write_run(tmp_path, [first.url, spare.url], api="sglang", key="${SERVER_API_KEY}")
        report = streamrl("doctor", file, "--json", *options("rollout.replicas=1"))
        assert f"the server {spare.url} is healthy" in report.stdout

        def kill() -> None:
            while not first.num_running:
                time.sleep(0.01)
            first.stop()

        threading.Thread(target=kill, daemon=True).start()
        own = ("rollout.replicas=1", "policies.system=stream-sync", "execute.launcher=in-process")
        done = streamrl("execute", file, "--json", *options(*own))
        assert done.returncode == 0, done.stderr
        report = streamrl("doctor", file, "--json", *options("rollout.replicas=1"))
        assert f"{first.url} does not answer: ConnectError" in report.stdout
    trace = check_run(tmp_path, 3)
    assert any(isinstance(entry.event, ReplicaLost) for entry in trace.entries)
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path
    assert "s3cr3t" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["rollout.replicas=3", "cluster.pools.local.gpus_per_node=4"],
            "rollout.replicas must be at most 2, the number of rollout.external",
        ),
        (["rollout.top_k=5"], "rollout.top_k must be left out for rollout.external.api sglang"),
        (["policies.system=colocated"], "policies.system must be another than 'colocated'"),
        (["rollout.external.key=plain"], r"rollout.external.key must be an environment variable"),
        (["rollout.external.endpoints=['node']"], "endpoints.0 must be the URL of a server"),
        (["rollout.external.endpoints=['http://a:b@c:1']"], "must not have a user name"),
        (["rollout.external.endpoints=['http://c:1','http://c:1']"], "endpoints.1 must differ"),
        (["rollout.backend=vllm"], "rollout.external applies only to rollout.backend 'external'"),
    ],
)
def test_what_servers_cannot_do_is_refused(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    file = write_run(tmp_path, ["http://127.0.0.1:1", "http://127.0.0.1:2"], api="sglang")
    done = streamrl("execute", file, *options(*settings))
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_backend_external_needs_its_section(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    text = (tmp_path / "run.toml").read_text().partition("[rollout.external]")[0]
    (tmp_path / "run.toml").write_text(text)
    done = streamrl("execute", tmp_path / "run.toml", *options())
    assert done.returncode == 2 and "rollout.external.endpoints is missing" in done.stderr


# vLLM ---------------------------------------------------------------------------------------------


@contextmanager
def vllm_server(model: Path, log: Path, *more: str) -> Iterator[str]:
    """Run `vllm serve` on the CPU, and yield its URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--dtype",
        "float32",
    ]
    words += [
        "--port",
        str(port),
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--max-num-seqs",
        "8",
    ]
    words += ["--logprobs-mode", "processed_logprobs", "--block-size", "32", *more]
    variables = {**environment(ReplicaSettings(**SMALL, model=str(model), backend="vllm"))}
    variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


SMALL: dict[str, Any] = {
    "max_running": 4,
    "max_tokens": 12,
    "max_prompt_tokens": 16,
    "temperature": 1.0,
    "seed": 0,
}


@pytest.mark.vllm
def test_a_run_generates_on_a_server_of_vllm(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", SYMBOLS)
    with vllm_server(tmp_path / "model", tmp_path / "log") as url:
        file = write_run(tmp_path, [url], timeout="200 s")
        own = (
            "rollout.replicas=1",
            "policies.system=stream-sync",
            "rollout.temperature=0.7",
            "rollout.top_k=9",
        )
        done = streamrl("execute", file, "--json", *options(*own))
        assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()[-3000:]
    trace = check_run(tmp_path, 3)
    loaded = [e.event for e in trace.entries if isinstance(e.event, WeightsLoaded)]
    assert len({event.checksum for event in loaded}) >= 2
