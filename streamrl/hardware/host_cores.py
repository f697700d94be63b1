"""How many cores of a host each role gets that computes on them."""

from __future__ import annotations


def threads_of_each(cores: int, num_roles: int) -> int:
    """Return the threads of each of so many roles: cores are dealt evenly, and none has less than one."""
    return max(1, cores // max(1, num_roles))
