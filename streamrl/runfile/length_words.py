"""Read output lengths in words: "math reasoning", or { mean = "6k", p95 = "20k", max = "32k" }.

Both are short forms of the keys `kind` and `source` of `[workload.lengths]`. A name stands for a histogram of
profiles/lengths. Stated figures become a text, "mean 6000, p95 20000, max 32000", of kind stated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from streamrl.runfile.errors import RunError
from streamrl.runfile.units import count_of

CATALOGUE = {
    "math reasoning": "r1-distill-aime",
    "short math": "skythought-math500",
    "code": "qwen3-lcb",
    "math and code": "streamrl-codemath-20k",
    "chat": "servegen-r1",
}
"""Names of kinds of work, and their histogram in profiles/lengths."""
FIGURES = ("mean", "p95", "max")
KEY = "workload.lengths"


class StatedFigures(NamedTuple):
    """Figures of output lengths, in tokens."""

    mean: int
    p95: int | None
    """95 % of outputs have at most this many; None if it is not stated."""
    max: int | None
    """Outputs are cut off here; None: only at `rollout.max_tokens`."""


def lengths_in_full(value: Any) -> Any:
    """Return the table of `workload.lengths` for lengths in words; everything else as it is."""
    if isinstance(value, str):
        return {"kind": "histogram", "source": CATALOGUE.get(value.strip().lower(), value)}
    if not isinstance(value, dict) or "mean" not in value or {"kind", "source"} & set(value):
        return value
    stated = {name: value[name] for name in FIGURES if name in value}
    rest = {name: each for name, each in value.items() if name not in FIGURES}
    source = ", ".join(f"{name} {each}" for name, each in stated.items())
    return {"kind": "stated", "source": source, **rest}


MOST_TOKENS = 10**9
"""Maximum of a figure: far above every context, and small enough for sums of many rollouts in 64 bits."""


def stated_figures(source: str) -> StatedFigures:
    """Return the figures in a text such as "mean 6k, p95 20k, max 32k".

    Raises:
        RunError: a figure is missing, unknown, no whole number, or too large or too small beside the others.
    """
    found: dict[str, int] = {}
    for part in source.split(","):
        name, _, value = part.strip().partition(" ")
        if name not in FIGURES or name in found:
            raise _wrong(source, f"has {part.strip()!r}; write mean, p95 and max, each once")
        try:
            found[name] = count_of(value)
        except ValueError as error:
            raise _wrong(source, f"{name}: {error}") from None
        if found[name] < 1:
            raise _wrong(source, f"{name} must be at least 1 token, got {value!r}")
        if found[name] > MOST_TOKENS:
            raise _wrong(source, f"{name} must be at most {MOST_TOKENS:,} tokens, got {value!r}")
    if "mean" not in found:
        raise _wrong(source, "has no mean; write one, such as mean = '6k'")
    figures = StatedFigures(found["mean"], found.get("p95"), found.get("max"))
    ordered = [each for each in figures if each is not None]
    if ordered != sorted(ordered) or len(set(ordered[:2])) < len(ordered[:2]):
        raise _wrong(source, "needs mean < p95 <= max")
    return figures


def _wrong(source: str, reason: str) -> RunError:
    return RunError(KEY, source, text=f"{KEY} {source!r} {reason}")
