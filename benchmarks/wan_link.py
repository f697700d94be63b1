"""Emulate a link between two datacenters on one machine: two network namespaces, and a process that delays packets.

    python -m benchmarks.wan_link --rate 200e6 --delay 0.02 -- COMMAND ...

This runs COMMAND in the near namespace, at 10.77.0.1, and ends the link with it. The far namespace is
`FAR`, at 10.77.0.2. Packets are those of the kernel's own TCP, over a TUN device on each side. Each
direction has a rate, a one-way delay and a queue that drops packets at its end. It needs root,
/dev/net/tun and iproute2, but no traffic control of the kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import multiprocessing
import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NEAR, FAR = "streamrl-near", "streamrl-far"
ADDRESSES = {NEAR: "10.77.0.1", FAR: "10.77.0.2"}
FILES = Path("/etc/netns")
"""Files in a folder here with a namespace's name replace those in /etc for its processes. So a process
that resolves this machine's address gets the address of its own end.
"""
DEVICE = "wan0"
TUN = Path("/dev/net/tun")
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500
"""Packet size of most networks, in bytes. This process takes about 10 us per packet."""
CONTROL = "net.ipv4.tcp_congestion_control=reno"
"""Congestion control that every kernel has. It starts slowly, like most, and like the simulation.
BBR would not restart slowly after a pause.
"""
QUEUE_TIME = 0.25
"""Seconds of the link's rate that the queue holds before it drops packets, besides packets in
transit.
"""
MOST_AT_ONCE = 64


def missing() -> str | None:
    """Return why no link can be emulated here; None if one can."""
    if os.geteuid() != 0:
        return "not root"
    if not TUN.exists():
        return f"no {TUN}"
    if shutil.which("ip") is None:
        return "no iproute2"
    return None


@contextmanager
def wan_link(rate: float, delay: float) -> Iterator[None]:
    """Run a link between two namespaces, of `rate` bits per second and `delay` seconds one way.

    Raises:
        RuntimeError: this machine cannot emulate a link.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(f"no link can be emulated here: {reason}")
    _remove()
    carrier = None
    try:
        for name, address in ADDRESSES.items():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            hosts = FILES / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        ends = [_open_tun(name) for name in ADDRESSES]
        for name, address in ADDRESSES.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU), "up")
            _ip("netns", "exec", name, "sysctl", "-qw", CONTROL)
        context = multiprocessing.get_context("fork")
        carrier = context.Process(target=_carry, args=(*ends, rate, delay), daemon=True)
        carrier.start()
        for end in ends:
            os.close(end)
        yield
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.join()
        _remove()


def inside(name: str) -> list[str]:
    """Return the prefix of a command that runs in a namespace."""
    return ["ip", "netns", "exec", name]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _remove() -> None:
    for name in ADDRESSES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(FILES / name, ignore_errors=True)


def _open_tun(namespace: str) -> int:
    """Return the file descriptor of a new TUN device in a namespace."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(theirs, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        try:
            end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            flags = IFF_TUN | IFF_NO_PI
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22s", DEVICE.encode(), flags, b""))
        finally:
            libc.setns(own, CLONE_NEWNET)
    finally:
        os.close(own)
        os.close(theirs)
    return end


class Direction:
    """Packets in transit from one end to the other."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self._source, self._target = source, target
        self._rate, self._delay = rate, delay
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    @property
    def next_at(self) -> float:
        """Return the time at which the next packet arrives; infinity if none is in transit."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def take(self) -> None:
        """Read the packets that the source has sent."""
        now = time.monotonic()
        for _ in range(MOST_AT_ONCE):
            try:
                packet = os.read(self._source, 65536)
            except BlockingIOError:
                return
            if self._free_at - now > QUEUE_TIME:
                continue  # the queue is full
            self._free_at = max(self._free_at, now) + 8 * len(packet) / self._rate
            self._under_way.append((self._free_at + self._delay, packet))

    def give(self) -> None:
        """Write the packets that have arrived."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            with suppress(BlockingIOError):
                os.write(self._target, self._under_way.popleft()[1])


def _carry(near: int, far: int, rate: float, delay: float) -> None:
    """Carry packets in both directions until this process is killed."""
    directions = [Direction(near, far, rate, delay), Direction(far, near, rate, delay)]
    with selectors.DefaultSelector() as ready:
        for source, direction in zip((near, far), directions, strict=True):
            ready.register(source, selectors.EVENT_READ, direction)
        while True:
            due = min(direction.next_at for direction in directions)
            wait = None if due == float("inf") else max(0.0, due - time.monotonic())
            for key, _ in ready.select(wait):
                key.data.take()
            for direction in directions:
                direction.give()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command at one end of a link."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=200e6, help="bits a second")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds one way")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    with wan_link(options.rate, options.delay):
        sys.exit(subprocess.run([*inside(NEAR), *command], check=False).returncode)


if __name__ == "__main__":
    main()
