"""What a connection over a long link takes beside its bytes: TCP begins slowly, and begins anew after each pause.

A sender has ten segments under way at first (RFC 6928) and twice as many with every round trip, until the link is full; a
connection that rested for longer than a retransmission timeout starts from there again (RFC 5681, section 4.1), as that
between two pushes of weights does.
"""

from __future__ import annotations

INITIAL_WINDOW = 10 * 1448.0
"""Bytes under way at first, in segments of an MTU of 1500."""


def sending_time(num_bytes: float, bandwidth: float, round_trip: float) -> float:
    """Return the seconds until the last byte has left over one connection that rested.

    Args:
        num_bytes: what is sent.
        bandwidth: bytes a second that the link carries.
        round_trip: seconds to the other end and back.
    """
    seconds, sent, window = 0.0, 0.0, INITIAL_WINDOW
    while sent + window < num_bytes and window < bandwidth * round_trip:
        seconds += round_trip
        sent += window
        window *= 2
    return seconds + (num_bytes - sent) / bandwidth
