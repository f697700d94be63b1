"""Measure the connection between two machines: both call `measure_link`, one of them as the listener.

The side that connects chooses the backend: nccl between GPUs over RDMA, gloo over TCP. gloo opens one connection for each
of several groups, because the window of a single connection limits a long path. The listener listens on its address
alone, and gloo on the interface that has this address.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import msgspec
import psutil
import torch

from streamrl.executor.libc import die_with_parent
from streamrl.executor.transfer.broadcast import INTERFACE
from streamrl.hardware.node_readings import LinkReading

STREAMS = 8
PINGS, WARM_UP = 20, 3
PROBE_BYTES, MOST_BYTES = 2**23, 2**30
SECONDS = 2.0
"""Seconds that one direction is measured for."""
MEASURE_TIME = 60.0
"""Most seconds of the measurement, after the peer has come."""


class _Link(msgspec.Struct, frozen=True):
    """What `measure_link` is asked for."""

    host: str
    port: int
    listens: bool
    backend: str | None
    patience: float


def measure_link(
    host: str, port: int, *, listens: bool, backend: str | None, patience: float
) -> LinkReading:
    """Measure bandwidth and latency between this machine and a peer.

    This is done in a process of its own: some waits of torch never end, and none lets a signal through.

    Args:
        host: name or address of the listener, as the other side reaches it. The listener listens on this address
            alone.
        port: the listener's port.
        listens: whether this side is the listener.
        backend: gloo or nccl; None for the listener, which takes that of its peer.
        patience: seconds to wait for the peer.

    Raises:
        RuntimeError: the peer did not come, did not answer, or a transfer failed.
    """
    asked = msgspec.json.encode(_Link(host, port, listens, backend, patience)).decode()
    words = [sys.executable, "-m", __name__, asked]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=patience + MEASURE_TIME)
        except subprocess.TimeoutExpired:
            text = f"{host}:{port}: the peer accepted the connection, and then it did not answer"
            raise RuntimeError(text) from None
        finally:
            process.kill()
    if process.returncode:
        lines = errors.decode(errors="replace").splitlines() or ["the measurement was killed"]
        raise RuntimeError(lines[-1])
    return msgspec.json.decode(output, type=LinkReading)


def _measure_here(asked: _Link) -> LinkReading:
    """Measure in this process."""
    host, port, listens, patience = asked.host, asked.port, asked.listens, asked.patience
    if (interface := _interface_of(host, port, listens=listens)) is not None:
        os.environ.setdefault(INTERFACE, interface)
    dist: Any = torch.distributed  # its functions have no types
    limit, rank = timedelta(seconds=patience), 0 if listens else 1
    own: dict[str, Any] = {}
    if listens:  # without a socket of ours, the store listens on all addresses
        own["master_listen_fd"] = socket.create_server((host, port)).detach()
    try:
        store = dist.TCPStore(host, port, 2, listens, limit, wait_for_workers=False, **own)
        if asked.backend is not None:
            store.set("backend", asked.backend)
        chosen = store.get("backend").decode()
        dist.init_process_group(chosen, store=store, rank=rank, world_size=2, timeout=limit)
    except (RuntimeError, ValueError) as error:
        first, *_ = str(error).splitlines()
        raise RuntimeError(f"{host}:{port}: the peer did not answer: {first}") from None
    try:
        return _measure(dist, chosen, rank)
    except RuntimeError as error:
        first, *_ = str(error).splitlines()
        raise RuntimeError(f"{host}:{port}: the connection failed: {first}") from None
    finally:
        dist.destroy_process_group()


def _interface_of(host: str, port: int, *, listens: bool) -> str | None:
    """Return the network interface of this machine on the way to a host, or with its address; None if it is unknown."""
    try:
        ((family, kind, protocol, _, place), *_) = socket.getaddrinfo(
            host, port, socket.AF_INET, socket.SOCK_DGRAM
        )
        with socket.socket(family, kind, protocol) as probe:
            if listens:
                probe.bind((place[0], 0))
            else:
                probe.connect(place)  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def _measure(dist: Any, backend: str, rank: int) -> LinkReading:
    device = "cuda" if backend == "nccl" else "cpu"
    groups = [dist.new_group([0, 1]) for _ in range(1 if backend == "nccl" else STREAMS)]
    small = torch.zeros(1, device=device)

    def ping() -> None:
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(small, 1 - rank)

    times = [_seconds(ping, device) for _ in range(WARM_UP + PINGS)][WARM_UP:]
    rates = []
    for sender in (0, 1):
        probe = _sent(dist, groups, device, rank, sender, PROBE_BYTES)
        size = torch.tensor([min(MOST_BYTES, max(PROBE_BYTES, int(probe * SECONDS)))])
        size = size.to(device)
        dist.broadcast(size, sender)
        rates.append(_sent(dist, groups, device, rank, sender, int(size.item())))
    slower = torch.tensor([min(rates), median(times) / 2], dtype=torch.float64, device=device)
    dist.broadcast(slower, 0)  # both sides report the same
    bandwidth, latency = slower.tolist()
    return LinkReading(bandwidth=bandwidth, latency=latency, backend=backend)


def _sent(
    dist: Any, groups: list[Any], device: str, rank: int, sender: int, num_bytes: int
) -> float:
    """Return the bytes per second of a transfer over all streams, until the receiver's answer is back."""
    parts = [
        torch.zeros(num_bytes // len(groups), dtype=torch.uint8, device=device) for _ in groups
    ]
    answer = torch.zeros(1, device=device)

    def transfer() -> None:
        begin = dist.isend if rank == sender else dist.irecv
        pending = [
            begin(part, 1 - rank, group=group) for part, group in zip(parts, groups, strict=True)
        ]
        for each in pending:
            each.wait()
        (dist.recv if rank == sender else dist.send)(answer, 1 - rank)

    dist.barrier()
    return num_bytes / _seconds(transfer, device)


def _seconds(call: Callable[[], None], device: str) -> float:
    began_at = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_at


if __name__ == "__main__":
    die_with_parent()
    try:
        found = _measure_here(msgspec.json.decode(sys.argv[1], type=_Link))
    except RuntimeError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))
