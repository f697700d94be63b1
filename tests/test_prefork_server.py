"""Workers that are forked from a process which has imported what they need: as those that are started, only sooner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from streamrl.executor.launchers import prefork_server as prefork_server
from streamrl.executor.launchers import processes, worker
from streamrl.executor.launchers.handles import LocalProcess, WorkerLostError
from streamrl.executor.launchers.launcher import worker_environment
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import PlacedRoles, Placement
from streamrl.executor.launchers.processes import Forked, begin_for, begin_imports, fork, spawn
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.runfile.backend_choice import Vllm
from streamrl.runfile.files import make_run
from tests.patients import local_table
from tests.small_roles import NAME, RARE, RARER, Seen
from tests.verifying import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")
ROLE = "tests.small_roles:Witness"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nurseries import nothing that takes seconds."""
    monkeypatch.setattr(processes, "COMMON", (RARE,))


def with_worker(
    log: Path,
    check: Callable[[LocalProcess, Seen], Awaitable[None]],
    begin: processes.Begin = fork,
    **environment: str,
) -> None:
    """Fork a witness and let somebody look at it."""

    async def go() -> None:
        handle = await LocalProcess.start(ROLE, {}, log, environment, begin=begin)
        try:
            await check(handle, await handle.call("look", returns=Seen))
        finally:
            await handle.close()

    asyncio.run(go())


def test_a_worker_has_its_own_environment_directory_log_and_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(NAME, "before")

    async def check(handle: LocalProcess, seen: Seen) -> None:
        assert seen.directory == str(tmp_path) and seen.session == handle.pid
        assert seen.had == ["torch"] and seen.parent != os.getpid()
        assert (tmp_path / "log").read_text().strip() == "seen"
        assert len(seen.descriptors) < 10
        assert seen.collects_garbage
        assert worker.MODULE in psutil.Process(handle.pid).cmdline()
        assert ROLE in psutil.Process(handle.pid).cmdline()

    async def before(handle: LocalProcess, seen: Seen) -> None:
        assert seen.variable == "before" and seen.umask == 0o022
        await check(handle, seen)
        (tmp_path / "log").unlink()

    async def after(handle: LocalProcess, seen: Seen) -> None:
        assert seen.variable == "after" and seen.umask == 0o077
        await check(handle, seen)

    common = worker_environment(
        1
    )  # as other tests have: they share the prefork_server, which has torch
    mask = os.umask(0o022)
    try:
        with_worker(tmp_path / "log", before, **common)
        os.umask(0o077)
        with_worker(tmp_path / "log", after, **common, **{NAME: "after"})
    finally:
        os.umask(mask)


@pytest.mark.usefixtures("bare")
def test_workers_share_a_nursery_where_libraries_read_the_same(tmp_path: Path) -> None:
    parents: list[int] = []

    async def note(handle: LocalProcess, seen: Seen) -> None:
        parents.append(seen.parent)

    for threads in ("1", "1", "2"):
        with_worker(tmp_path / "log", note, OMP_NUM_THREADS=threads)
    first, same, other = parents
    assert first == same != other


@pytest.mark.usefixtures("bare")
def test_workers_of_a_back_end_are_forked_from_a_nursery_that_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vllm, "preload", (RARER,))
    seen: dict[str, Seen] = {}
    for backend in ("vllm", "transformers", "vllm"):

        async def note(handle: LocalProcess, found: Seen, name: str = backend) -> None:
            assert seen.setdefault(name, found).parent == found.parent

        with_worker(tmp_path / "log", note, begin_for("cpu", backend))
    assert seen["vllm"].had == [RARE, RARER] and seen["transformers"].had == [RARE]
    assert seen["vllm"].parent != seen["transformers"].parent


@pytest.mark.usefixtures("bare")
def test_a_run_can_begin_imports_before_its_first_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_prefork_servers", {})
    run = make_run(local_table(tmp_path))
    roles = PlacedRoles.of(run)
    launcher = LocalLauncher(RoleConfigs(run), roles, RunDirectory(tmp_path / "run"))
    launcher.begin_imports()
    ((server,),) = processes._prefork_servers.values()

    async def check(handle: LocalProcess, seen: Seen) -> None:
        assert seen.parent == server.process.pid and seen.had == [RARE]

    with_worker(tmp_path / "log", check, **launcher.environment(Placement(roles).replica(0)))
    assert len(processes._prefork_servers) == 1


@pytest.mark.usefixtures("bare")
def test_imports_begin_with_those_of_a_back_end_and_not_at_all_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_prefork_servers", {})
    monkeypatch.setattr(Vllm, "preload", (RARER,))
    for device, backend in (("cpu", "vllm"), ("cpu", "transformers"), ("cuda", "vllm")):
        begin_imports({}, device, backend)
    imports = [dict(key)["imports"] for key in processes._prefork_servers]
    assert imports == [f"{RARE} {RARER}", RARE]


@pytest.mark.usefixtures("bare")
def test_who_kills_a_nursery_kills_its_workers_and_the_next_has_another(tmp_path: Path) -> None:
    parents: list[int] = []

    async def kill(handle: LocalProcess, seen: Seen) -> None:
        parents.append(seen.parent)
        os.kill(seen.parent, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="status -9"):
            while time.sleep(0.01) is None:
                await handle.call("look", returns=Seen)
        wait_until_gone([handle.pid], 5)

    for _ in range(2):
        with_worker(tmp_path / "log", kill)
    assert parents[0] != parents[1]


def test_a_nursery_without_work_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_prefork_servers", {})
    short = f"import {prefork_server.__name__} as n, socket, sys; n.IDLE_TIME = 0.5; "
    short += "n.main(socket.socket(fileno=int(sys.argv[1])), ())"
    parents: list[int] = []

    async def note(handle: LocalProcess, seen: Seen) -> None:
        await asyncio.sleep(1.0)  # with a worker it does not
        parents.append(seen.parent)
        assert await handle.call("look", returns=Seen) == seen

    original = processes.subprocess.Popen

    def begin(words: list[str], **options: object) -> object:
        return original([words[0], "-c", short, *words[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(processes.subprocess, "Popen", begin)
    for _ in range(2):
        with_worker(tmp_path / "log", note)
        wait_until_gone([parents[-1]], 5)
    assert parents[0] != parents[1]


@pytest.mark.usefixtures("bare")
def test_a_nursery_that_is_ending_still_is_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_prefork_servers", {})
    parents: list[int] = []

    async def end(handle: LocalProcess, seen: Seen) -> None:
        parents.append(seen.parent)
        for (server,) in processes._prefork_servers.values():
            server.process.kill()
            monkeypatch.setattr(server.process, "poll", lambda: None)  # it has not quite gone

    for _ in range(2):
        with_worker(tmp_path / "log", end)
    assert parents[0] != parents[1]


def test_a_nursery_that_cannot_begin_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_prefork_servers", {})
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    with pytest.raises(
        ChildProcessError, match="prefork server, from which workers are forked, has died"
    ):
        asyncio.run(LocalProcess.start(ROLE, {}, tmp_path / "log", {}, begin=fork))


def test_who_has_died_this_moment_is_killed_without_a_word() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:  # which has told nothing yet
        Forked(gone.pid, ours).kill()


def test_the_descriptors_of_a_worker_are_closed_when_it_has_ended() -> None:
    worker = subprocess.Popen(["sleep", "60"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forked = Forked(worker.pid, ours)
    with theirs:
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.0)
        theirs.send(b"3")
        assert [forked.wait(1.0), forked.wait(1.0)] == [3, 3]
    assert ours.fileno() == processes.CLOSED and forked._process is None
    forked.kill()
    worker.kill()
    worker.wait()


@pytest.mark.usefixtures("bare")
def test_a_worker_that_nobody_asks_after_does_not_end_its_nursery(tmp_path: Path) -> None:
    parents: list[int] = []

    async def forget(handle: LocalProcess, seen: Seen) -> None:
        parents.append(seen.parent)
        process = handle._process
        assert isinstance(process, Forked)
        process._answers.shutdown(socket.SHUT_RDWR)
        os.kill(handle.pid, signal.SIGKILL)
        wait_until_gone([handle.pid], 5)

    async def note(handle: LocalProcess, seen: Seen) -> None:
        parents.append(seen.parent)

    with_worker(tmp_path / "log", forget)
    with_worker(tmp_path / "log", note)
    assert parents[0] == parents[1]


def test_a_nursery_whose_modules_start_threads_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "COMMON", ("tests.thread_at_import",))
    with pytest.raises(
        ChildProcessError, match="prefork server, from which workers are forked, has died"
    ):
        asyncio.run(LocalProcess.start(ROLE, {}, tmp_path / "log", {}, begin=fork))
    assert "tests.thread_at_import started 1 threads" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("bare")
def test_a_stopped_nursery_delays_no_end_and_the_next_worker_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOOK_TIME", 0.2)
    parents: list[int] = []

    async def stop(handle: LocalProcess, seen: Seen) -> None:
        parents.append(seen.parent)
        if len(parents) > 1:
            return
        os.kill(seen.parent, signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match="does not start: the prefork server gave no"):
            await LocalProcess.start(ROLE, {}, tmp_path / "other", {}, patience=1.0, begin=fork)
        assert await handle.call("look", returns=Seen) == seen  # its own worker goes on

    for _ in range(2):
        began_at = time.monotonic()
        with_worker(tmp_path / "log", stop)
        assert time.monotonic() - began_at < 20
    assert parents[0] != parents[1]
    os.kill(parents[0], signal.SIGKILL)


def test_others_run_while_a_server_has_no_room_for_a_request() -> None:
    control, theirs = socket.socketpair()
    control.setblocking(False)
    theirs.settimeout(0.2)
    with contextlib.suppress(BlockingIOError):
        while True:
            control.send(bytes(1 << 16))

    async def go() -> bytes:
        server = processes.PreforkServer(None, control)  # type: ignore[arg-type]  # no process is asked
        sending = asyncio.create_task(processes._send(server, b"request", [0]))
        await asyncio.sleep(0.05)
        assert not sending.done() and server.is_sending
        received = bytearray()
        with contextlib.suppress(TimeoutError):
            while True:
                received += await asyncio.to_thread(theirs.recv, 1 << 16)
        await sending
        assert not server.is_sending and not server.is_stuck
        return bytes(received)

    with control, theirs:
        assert asyncio.run(asyncio.wait_for(go(), timeout=20)).endswith(b"request")


def test_what_computes_on_gpus_is_not_forked() -> None:
    assert begin_for("cpu", "transformers") is fork
    for backend in ("transformers", "deepspeed", "vllm"):
        assert begin_for("cpu", backend) is not spawn
        assert begin_for("cuda", backend) is spawn


def test_a_server_whose_parent_has_died_before_it_began_imports_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        words = [sys.executable, "-m", prefork_server.__name__, str(theirs.fileno())]
        done = subprocess.run(
            [*words, "no_such_module", "padding"], pass_fds=[theirs.fileno()], check=False
        )
    assert done.returncode == 0


KERNELS = """
import subprocess, sys, tempfile
from pathlib import Path
from streamrl.executor.launchers.processes import whole_environment
subprocess.run([sys.executable, "-c", "import torch._dynamo"], env=whole_environment({}), check=True)
print(sorted(path.name.partition("-")[0] for path in Path(tempfile.gettempdir()).iterdir()))
"""


def test_torch_leaves_no_directory_for_kernels(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "['streamrl']\n", done.stderr
    assert not [*tmp_path.iterdir()]
