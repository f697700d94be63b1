"""Generate with a server of SGLang that this replica starts and ends; the rest is `ExternalEngine`.

It was started by hand on a CPU (0.5.23, float32, attention of torch), and never on a GPU. Tests use a small server that speaks
the same API (`tests/test_external.py`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys

from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.child_guard import ChildGuard
from streamrl.executor.rollout.external_engine import ExternalEngine
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.server_api import ServerSettings

HOST = "127.0.0.1"
PAGE = 64
"""Tokens of KV cache that a rollout may occupy beyond its own, on CPUs."""
START_TIME = 1200.0
"""Seconds in which the server must come up; it compiles kernels and captures CUDA graphs at its first start."""

KEY = "STREAMRL_SGLANG_KEY"
"""Environment variable with the API key of the server. Without a key any user of the machine could replace its weights."""
LAUNCH = (
    f"import os, runpy, sys; sys.argv[1:] += ['--api-key', os.environ.pop('{KEY}')]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
"""Starts the server with its key. Every user can read a command line, but only the owner the environment."""


class SglangEngine(ExternalEngine):
    """One server, which ends with this process."""

    def __init__(self, settings: ReplicaSettings) -> None:
        port = _free_port()
        url = f"http://{HOST}:{port}"
        self._key = secrets.token_hex(16)
        server = ServerSettings(url=url, api="sglang", timeout=START_TIME, key=self._key)
        super().__init__(settings, server)
        self._command = command(settings, port)
        self._guard: ChildGuard | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, manifest: Manifest | None) -> None:
        """Start the server, and wait until it has the weights."""
        self._guard = ChildGuard()
        own = {**os.environ, KEY: self._key}
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=own)
        self._guard.register_children()
        await super().start(manifest)
        self._guard.register_children()  # those that the server has started meanwhile

    async def stop(self) -> None:
        """End all runs and the server."""
        await super().stop()
        if self._guard is not None:
            guard, self._guard = self._guard, None
            await asyncio.to_thread(guard.kill_registered)

    async def _health(self) -> str | None:
        """Return why the server cannot generate.

        Raises:
            RuntimeError: its process has ended.
        """
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise RuntimeError(
                f"SGLang ended with status {status} (see the log of its replica): {' '.join(self._command)}"
            )
        return await super()._health()


def command(settings: ReplicaSettings, port: int) -> list[str]:
    """Return the command line of the server."""
    options: dict[str, object] = {
        "model-path": settings.model,
        "host": HOST,
        "port": port,
        "device": settings.device,
        "dtype": settings.dtype,
        "tp-size": settings.tensor_parallel,
        "ep-size": settings.expert_parallel,
        "mem-fraction-static": settings.memory_utilization,
        "max-running-requests": settings.max_running,
        "context-length": settings.max_length,
        "random-seed": settings.seed,
        "log-level": "warning",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if settings.device == "cpu":  # its own kernels for CPUs are in no package
        words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        words += ["--max-total-tokens", str(settings.max_running * (settings.max_length + PAGE))]
    if not settings.shares_prefixes:
        words.append("--disable-radix-cache")
    return [sys.executable, "-c", LAUNCH, *words]


def _free_port() -> int:
    """Return a port that is free now; a server that finds it taken ends, and the replica is replaced."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port
