"""A small server that speaks SGLang's HTTP API with a real model, on a thread of the test.

Its answers have the fields of SGLang 0.5.23 (srt/entrypoints/http_server.py, srt/managers/tokenizer_manager.py).
"""

from __future__ import annotations

import json
import math
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed import Backend, PrefixStore
from torch.distributed.distributed_c10d import _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from tests.tiny_model import reference


class SglangServer:
    """Serves a model directory until the block ends; its attributes may change at any time."""

    def __init__(self, model: Path, key: str | None = None) -> None:
        self.model_path = model
        self.key = key
        self.token_time = 0.0
        """Seconds of each token."""
        self.is_hung = False
        """Whether it answers nothing."""
        self.is_broken = False
        """Whether it closes each stream after its first part."""
        self.is_incremental = False
        """Whether a part has only new tokens (--incremental-streaming-output)."""
        self.has_plain_logprobs = False
        """Whether log-probabilities are those before the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB)."""
        self.own_ends: tuple[int, ...] = ()
        """End tokens of its tokenizer."""
        self.answers: dict[str, bytes] = {}
        """What it answers to a path as JSON, instead of the right answer."""
        self.spoil: Callable[[dict[str, Any]], Any] | None = None
        """Returns what a stream has instead of one of its parts."""
        self.requests: list[tuple[str, Any]] = []
        """Path and body of each request."""
        self.num_running = 0
        self.num_sent = 0
        """Parts of streams that were sent."""
        self.is_paused = False
        self.group_time = 10.0
        """Seconds of each wait for the members of a group."""
        self._groups: dict[str, Any] = {}
        self._weights = "default"
        self._model = reference(model)
        self._random = torch.Generator().manual_seed(0)
        self._lock = threading.Lock()
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> SglangServer:
        self.start(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, port: int) -> None:
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = _Http(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> int:
        """End the server as if it was killed; return its port."""
        assert self._http is not None
        self.is_broken = True
        self._http.shutdown()
        self._http.server_close()
        return self._http.server_port

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and answer of a request that is no stream."""
        match path:
            case "/pause_generation":
                self.is_paused = True
                while self.num_running:
                    time.sleep(0.001)
                return 200, {"status": "ok"}
            case "/continue_generation":
                self.is_paused = False
                return 200, {"status": "ok"}
            case "/update_weights_from_disk":
                return self._update(body)
            case "/init_weights_update_group":
                return self._join(body)
            case "/update_weights_from_distributed":
                return self._receive(body)
            case "/destroy_weights_update_group":
                del self._groups[body["group_name"]]
                return 200, {"success": True, "message": ""}
            case "/generate":
                *_, last = self.generate(body)
                return 200, last
            case _:
                return 404, {"detail": "Not Found"}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.is_paused and self.num_running == 0, "an update while requests run"
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            message = f"Cannot find any model weights with `{body['model_path']}`"
            return 400, {"success": False, "message": message, "num_paused_requests": 0}
        own = self._model.state_dict()
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    own[name].copy_(tensors.get_tensor(name))
        self._weights = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    def _join(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Join a group with torch's own functions, as SGLang does (srt/utils/common.py, init_custom_process_group)."""
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        limit = timedelta(seconds=self.group_time)
        name, rank, size = body["group_name"], body["rank_offset"], body["world_size"]
        store, rank, size = next(rendezvous(address, rank, size, timeout=limit))
        group, _ = _new_process_group_helper(
            size, rank, [], Backend(body["backend"]), PrefixStore(name, store), name, timeout=limit
        )
        self._groups[name] = group
        return 200, {"success": True, "message": "Succeeded"}

    def _receive(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.is_paused and self.num_running == 0, "an update while requests run"
        own, group = self._model.state_dict(), self._groups[body["group_name"]]
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(tensor, 0).wait()
            own[name].copy_(tensor)
        self._weights = body.get("weight_version", self._weights)
        return 200, {"success": True, "message": "Succeeded"}

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an answer after each `stream_interval` tokens, the last one with the reason of the end."""
        sampling = body["sampling_params"]
        ends = () if sampling["ignore_eos"] else (*sampling["stop_token_ids"], *self.own_ends)
        tokens: list[int] = []
        triples: list[tuple[float, int, None]] = []
        top: list[list[tuple[float, int, None]]] = []
        num_sent, finish = 0, None
        while finish is None:
            time.sleep(self.token_time)
            if self.is_paused:
                return  # the client has closed the connection before
            values, logprobs = self._step([*body["input_ids"], *tokens], sampling)
            token = int(torch.multinomial(values.exp(), 1, generator=self._random))
            tokens.append(token)
            triples.append((float(logprobs[token]), token, None))
            best = logprobs.topk(max(1, body.get("top_logprobs_num", 0)))
            top.append(
                [(float(v), int(i), None) for v, i in zip(best.values, best.indices, strict=True)]
            )
            if token in ends:
                finish = {"type": "stop", "matched": token}
            elif len(tokens) == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": len(tokens)}
            if finish is None and len(tokens) % sampling["stream_interval"]:
                continue
            shown = triples[num_sent:] if self.is_incremental else triples
            num_sent = len(triples)
            yield {
                "output_ids": [each for _, each, _ in shown],
                "meta_info": {
                    "completion_tokens": len(tokens),
                    "output_token_logprobs": list(shown),
                    "output_top_logprobs": top,
                    "finish_reason": finish,
                    "weight_version": self._weights,
                },
            }

    @torch.no_grad()
    def _step(self, ids: list[int], sampling: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities to sample by, and those to report."""
        with self._lock:
            logits = self._model(torch.tensor([ids])).logits[0, -1]
        values = torch.log_softmax(logits / sampling["temperature"], -1)
        plain = torch.log_softmax(logits, -1) if self.has_plain_logprobs else values
        if 0 < sampling["top_k"] < len(values):  # as SGLang, it reports those of all tokens
            values = values.masked_fill(values < values.topk(sampling["top_k"])[0][-1], -math.inf)
        return values, plain


class _Http(ThreadingHTTPServer):
    """A server that clients may leave at any time."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of this file only, not those of closed connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_of: SglangServer

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve(json.loads(body or b"{}"))

    def _serve(self, body: dict[str, Any]) -> None:
        mine = self.server_of
        while mine.is_hung:
            time.sleep(0.01)
        mine.requests.append((self.path, body))
        if mine.key is not None and self.headers.get("Authorization") != f"Bearer {mine.key}":
            self._answer(401, {"error": "Unauthorized"})
        elif self.path in mine.answers:
            self._send(200, mine.answers[self.path])
        elif self.path == "/health":
            self._answer(200, {})
        elif self.path == "/model_info":
            self._answer(200, {"model_path": str(mine.model_path), "is_generation": True})
        elif self.path == "/generate" and body.get("stream"):
            self._stream(body)
        else:
            self._answer(*mine.post(self.path, body))

    def _answer(self, status: int, content: Any) -> None:
        self._send(status, json.dumps(content).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        mine = self.server_of
        mine.num_running += 1
        try:
            for part in mine.generate(body):
                shown = json.dumps(part if mine.spoil is None else mine.spoil(part))
                self._chunk(f"data: {shown}\n\n")
                mine.num_sent += 1
                if mine.is_broken:
                    self.close_connection = True
                    self.connection.close()
                    return
                if self._is_closed():
                    return
            self._chunk("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client has ended the request
            self.close_connection = True
        finally:
            mine.num_running -= 1

    def _is_closed(self) -> bool:
        """Return whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, 2)  # MSG_PEEK

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
