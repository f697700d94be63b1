"""Files and tables gone wrong: a valid one, altered here and there."""

from __future__ import annotations

import copy
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Inputs for each test; few, and always the same ones, where the variable is not set."""
FEW = 60

MOST_SECONDS = 10.0
"""CPU seconds in which an input must be read or refused. Time in which other processes run does not count."""
MOST_MEMORY = 2 << 30
"""Bytes that a process may have had in memory after any input."""

inputs: Counter[str] = Counter()
"""Inputs of each test of this process."""

T = TypeVar("T", bound=Callable[..., None])


def fuzzed(share: float = 1.0) -> Callable[[T], T]:
    """Return what gives a test its inputs, a share of the usual number where each takes long."""
    decorate = settings(
        max_examples=max(1, round(share * (EXAMPLES or FEW))),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    def limited(test: T) -> T:
        test.hypothesis.inner_test = _within_limits(test.hypothesis.inner_test)  # type: ignore[attr-defined]  # of `given`
        return decorate(test)

    return limited


def _within_limits(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test that fails if one input takes too long or too much memory."""

    @wraps(test)
    def run(*values: Any, **named: Any) -> None:
        inputs[test.__name__] += 1
        with cpu_limit():
            test(*values, **named)
        for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            peak = resource.getrusage(whose).ru_maxrss << 10
            assert peak <= MOST_MEMORY, f"{peak} bytes of memory"

    return run


@contextmanager
def cpu_limit() -> Iterator[None]:
    """Fail after `MOST_SECONDS`."""

    def stop(*_: object) -> None:
        raise AssertionError(f"not done after {MOST_SECONDS} CPU seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            "",
            "nan",
            "inf",
            "-1",
            "\ud800",
            "\x00",
            "\u2028",
            "../..",
            "/proc/self/mem",
            "1e999",
            "a" * 5000,
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 10**30, -(2**63)]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-300, 1e300, float("nan"), float("inf")]),
)
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every table or list in a value, with each of its keys."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(entries):
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


@st.composite
def altered(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """Return a table or list of which a few entries are others, gone, or somewhere else too."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(value))
        if not places:
            break
        place, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["junk", "junk", "gone", "elsewhere", "number", "new"])):
            case "junk":
                place[key] = draw(JUNK)
            case "number":
                place[key] = draw(NUMBERS)
            case "gone":
                del place[key]
            case "elsewhere":
                other, name = draw(st.sampled_from(places))
                place[key] = copy.deepcopy(other[name])
            case _ if isinstance(place, dict):
                place[draw(TEXTS)] = draw(JUNK)
    return value


@st.composite
def mangled(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes of which some are others, gone, or there twice."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        middle = draw(
            st.sampled_from(
                [b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n\n", b'"', b"{", b"[" * 3000]
            )
            | st.binary(max_size=6)
            | st.just(data[start:end] * 2)
        )
        data = data[:start] + middle + data[end:]
    return data


def check_said(error: Exception) -> None:
    """Assert that an error says something."""
    assert str(error).strip(), repr(error)
