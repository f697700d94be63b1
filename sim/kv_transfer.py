"""KV caches on their way from prefill replicas to decode replicas, and the network that they share.

A prefill replica keeps the cache of a context until a decode replica has all of it. The decode
replica reads it once it has room for the rollout, as with the NixlConnector of vLLM. The transfer
does not overlap with the prefill.

Transfers that share a port share its bandwidth evenly, so

    tokens per second of a transfer = least of (tokens per second of a port / transfers at that port)

Its ports are the network cards, or NVLink, of both replicas, and the link if their pools differ.
Latency passes before the first byte. Cards that one transfer leaves idle are not given to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

import simpy

from streamrl.sim.costs.cache_transfer import CacheRoute

INSTANT = 1e-9
"""Seconds within which transfers end together: more than what rounding changes, and less than any latency."""


class Port:
    """A part of the network that transfers share."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        """Tokens per second."""
        self.transfers: dict[Transfer, None] = {}
        """Transfers that use it now."""

    def enter(self, transfer: Transfer) -> None:
        """Add a transfer."""
        self.transfers[transfer] = None

    def leave(self, transfer: Transfer) -> None:
        """Remove a transfer, if it is there."""
        self.transfers.pop(transfer, None)


class Transfer:
    """A context that crosses the network."""

    def __init__(self, ports: tuple[Port, ...], tokens: float, arrive: Callable[[], None]) -> None:
        self.ports = ports
        self.tokens = tokens
        self.arrive = arrive
        """Called when all tokens have arrived."""
        self.number = 0
        """Number of its newest entry among the coming ends; 0 if it has none."""
        self.is_over = False
        """Whether it has ended, or was cancelled."""
        self._left, self._rate, self._since = tokens, 0.0, 0.0
        """Tokens that had not arrived at an instant, and the tokens per second since then."""

    def ends_by(self, now: float) -> bool:
        """Return whether all tokens have arrived, except for rounding."""
        return self._left_at(now) <= INSTANT * self._rate

    def share(self, now: float, number: int) -> float:
        """Set the rate by the number of transfers at each port, and return the instant of the end."""
        self._left, self._since = self._left_at(now), now
        self._rate = min(port.rate / len(port.transfers) for port in self.ports)
        self.number = number
        return now + self._left / self._rate

    def end(self) -> None:
        """Leave all ports."""
        self.is_over, self.number = True, 0
        for port in self.ports:
            port.leave(self)

    def _left_at(self, now: float) -> float:
        return max(0.0, self._left - self._rate * (now - self._since))


class Network:
    """Lets transfers share ports."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._ends: list[tuple[float, int, Transfer]] = []
        """Heap of (instant, number, transfer) of coming ends. Those of another number are outdated."""
        self._num_entries = 0

    def send(self, transfer: Transfer, latency: float) -> None:
        """Begin a transfer, whose first byte takes `latency` seconds."""
        self._after(latency, lambda _: self._begin(transfer))

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer before all of it has arrived."""
        transfer.end()
        self._share(transfer.ports)

    def _begin(self, transfer: Transfer) -> None:
        if transfer.is_over:
            return
        if not transfer.tokens:
            transfer.end()
            transfer.arrive()
            return
        for port in transfer.ports:
            port.enter(transfer)
        self._share(transfer.ports)

    def _share(self, ports: Iterable[Port]) -> None:
        """Set the rates of all transfers at some ports, and wait for the first end."""
        now = self._env.now
        for transfer in dict.fromkeys(each for port in ports for each in port.transfers):
            self._num_entries += 1
            end = transfer.share(now, self._num_entries)
            heappush(self._ends, (end, self._num_entries, transfer))
        self._wait()

    def _wait(self) -> None:
        """Look again at the first coming end."""
        ends = self._ends
        while ends and ends[0][2].number != ends[0][1]:
            heappop(ends)
        if ends:
            end, number, transfer = ends[0]
            self._after(end - self._env.now, lambda _: self._end(transfer, number))

    def _end(self, transfer: Transfer, number: int) -> None:
        """End a transfer, and those at its ports that end at the same instant except for rounding."""
        if transfer.number != number:
            return
        now = self._env.now
        beside = dict.fromkeys(each for port in transfer.ports for each in port.transfers)
        ended = [each for each in beside if each is transfer or each.ends_by(now)]
        for each in ended:
            each.end()
        self._share(port for each in ended for port in each.ports)
        for each in ended:
            each.arrive()

    def _after(self, seconds: float, act: Callable[[simpy.Event], None]) -> None:
        callbacks = self._env.timeout(max(0.0, seconds)).callbacks
        assert callbacks is not None, "it has not happened yet"
        callbacks.append(act)


class _Kept:
    """The cache of a rollout on a prefill replica."""

    def __init__(self, replica: tuple[int, int], release: Callable[[], None]) -> None:
        self.replica, self.kind = replica
        self.release = release
        """Frees the cache."""
        self.transfer: Transfer | None = None
        """How it is sent; None before a decode replica reads it."""
        self.lose: Callable[[], None] = release
        """Tells the decode replica that the rest will not arrive."""

    def begin(self, transfer: Transfer, lose: Callable[[], None]) -> None:
        """Record that a decode replica reads it."""
        self.transfer, self.lose = transfer, lose


class Handover:
    """The caches that prefill replicas keep for decode replicas, by rollout."""

    def __init__(
        self, env: simpy.Environment, routes: Mapping[tuple[int, int], CacheRoute]
    ) -> None:
        """Take the route from each kind of prefill replica to each kind of decode replica."""
        self._network = Network(env)
        self._routes = routes
        self._kept: dict[int, _Kept] = {}
        self._ports: dict[tuple[str, object], Port] = {}

    def keep(self, rollout: int, replica: tuple[int, int], release: Callable[[], None]) -> None:
        """Record that a prefill replica has computed the context of a rollout.

        Args:
            rollout: the rollout.
            replica: the prefill replica, and its kind.
            release: frees the cache of the rollout there.
        """
        self.drop(rollout)
        self._kept[rollout] = _Kept(replica, release)

    def has(self, rollout: int, replica: int) -> bool:
        """Return whether a prefill replica still has the cache of a rollout, and nobody reads it."""
        kept = self._kept.get(rollout)
        return kept is not None and kept.replica == replica and kept.transfer is None

    def send(
        self,
        rollout: int,
        tokens: int,
        to: tuple[int, int],
        arrive: Callable[[], None],
        lose: Callable[[], None],
    ) -> None:
        """Send the cache of a rollout to a decode replica.

        Args:
            rollout: a rollout whose cache is kept.
            tokens: tokens of its context that the decode replica lacks.
            to: the decode replica, and its kind.
            arrive: called when all have arrived; the prefill replica frees the cache then.
            lose: called if the prefill replica is lost before.
        """
        kept = self._kept[rollout]
        route = self._routes[kept.kind, to[1]]
        ports = [
            self._port("from", kept.replica, route.send_rate),
            self._port("to", to[0], route.receive_rate),
        ]
        if route.link is not None:
            ports.append(self._port("link", route.link, route.link_rate))

        def end() -> None:
            del self._kept[rollout]
            kept.release()
            arrive()

        transfer = Transfer(tuple(ports), float(tokens), end)
        kept.begin(transfer, lose)
        self._network.send(transfer, route.latency)

    def drop(self, rollout: int) -> None:
        """Free the cache of a rollout, because no decode replica wants it any more."""
        kept = self._kept.pop(rollout, None)
        if kept is not None:
            if kept.transfer is not None:
                self._network.cancel(kept.transfer)
            kept.release()

    def flush(self, replica: int) -> None:
        """Free the caches of a prefill replica that nobody reads, because its weights have changed."""
        for rollout, kept in list(self._kept.items()):
            if kept.replica == replica and kept.transfer is None:
                self.drop(rollout)

    def lose(self, replica: int) -> None:
        """Forget the caches of a prefill replica that has stopped."""
        lost = {n: kept for n, kept in self._kept.items() if kept.replica == replica}
        for rollout in lost:
            del self._kept[rollout]
        for kept in lost.values():
            if kept.transfer is not None and not kept.transfer.is_over:
                self._network.cancel(kept.transfer)
                kept.lose()

    def _port(self, side: str, which: object, rate: float) -> Port:
        found = self._ports.get((side, which))
        if found is None:
            found = self._ports[side, which] = Port(rate)
        return found


class Arrivals:
    """The rollouts whose contexts a decode replica receives.

    The first rollout of a group brings the prompt. Its siblings wait for it too.
    """

    def __init__(
        self,
        handover: Handover,
        replica: tuple[int, int],
        notice: Callable[[], None],
        lose: Callable[[int], None],
    ) -> None:
        """Receive contexts for a replica.

        Args:
            handover: the caches of prefill replicas.
            replica: the replica, and its kind.
            notice: called when the context of a rollout is complete.
            lose: called with a rollout whose context will not arrive.
        """
        self._handover, self._replica = handover, replica
        self._notice, self._lose = notice, lose
        self._missing: dict[int, int] = {}
        """By rollout: the number of transfers that it waits for."""
        self._brings: dict[int, int] = {}
        """By rollout: the key of the prompt that it brings."""
        self._waiting: dict[int, list[int]] = {}
        """By key of a prompt that is under way: the other rollouts that wait for it."""
        self._complete: list[int] = []

    def __len__(self) -> int:
        return len(self._missing)

    def __contains__(self, rollout: int) -> bool:
        return rollout in self._missing

    def begin(self, rollout: int, prefix: int, tokens: int, *, brings_prompt: bool) -> None:
        """Receive the `tokens` that a rollout lacks, and its prompt, whose key is `prefix`."""
        self._missing[rollout] = 1
        if brings_prompt:
            self._brings[rollout], self._waiting[prefix] = prefix, []
        elif prefix in self._waiting:
            self._waiting[prefix].append(rollout)
            self._missing[rollout] = 2
        self._handover.send(
            rollout,
            tokens,
            self._replica,
            lambda: self._arrive(rollout),
            lambda: self._lose(rollout),
        )

    def take(self) -> list[int]:
        """Return the rollouts whose contexts have become complete."""
        complete, self._complete = self._complete, []
        for rollout in complete:
            del self._missing[rollout]
        return complete

    def give_up(self, rollout: int) -> list[int]:
        """Receive a rollout no more; return its siblings that waited for the prompt that it brings."""
        siblings = (
            self._waiting.pop(self._brings.pop(rollout), []) if rollout in self._brings else []
        )
        for waiting in self._waiting.values():
            if rollout in waiting:
                waiting.remove(rollout)
        if rollout in self._complete:
            self._complete.remove(rollout)
        for each in (rollout, *siblings):
            del self._missing[each]
            self._handover.drop(each)
        return siblings

    def _arrive(self, rollout: int) -> None:
        siblings = (
            self._waiting.pop(self._brings.pop(rollout), []) if rollout in self._brings else []
        )
        for each in (rollout, *siblings):
            self._missing[each] -= 1
            if not self._missing[each]:
                self._complete.append(each)
        self._notice()
