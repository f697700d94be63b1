"""Follow the machines of spot replicas that are taken away: nobody pays for them, and nothing waits on them."""

from __future__ import annotations


class MachinesAway:
    """Follows spot machines that are taken away after a notice, until they are replaced."""

    def __init__(self) -> None:
        self._kinds: dict[int, int] = {}
        """Kind of each replica that was started and has not ended."""
        self._leaving: set[int] = set()
        self._away: dict[int, int] = {}
        """Kind of each replica whose machine is away."""

    def begin(self, replica: int, kind: int) -> None:
        """Record that a replica is started."""
        self._kinds[replica] = kind

    def leave(self, replica: int) -> None:
        """Record a notice."""
        if replica in self._kinds:
            self._leaving.add(replica)

    def end(self, replica: int) -> int | None:
        """Record that a replica has ended; return its kind if its machine is away from now on."""
        kind = self._kinds.pop(replica, None)
        if replica not in self._leaving or kind is None:
            return None
        self._leaving.discard(replica)
        self._away[replica] = kind
        return kind

    def replace(self, replica: int) -> int | None:
        """Record a replacement; return the kind of the replica if its machine was away until now."""
        self._leaving.discard(replica)
        return self._away.pop(replica, None)
