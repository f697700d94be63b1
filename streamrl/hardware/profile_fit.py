"""Lines through a measured profile: seconds of any batch, context and length from those that were measured.

    decode step of b rollouts with S tokens     a(b) + c(b) * S
    the same where one has m, more than others  a(b) + c(b) * (p * b * m + (1 - p) * S)
    pass that computes r prefixes, t tokens     the decode step beside it + u r + v t + w p
    training pass over n rollouts, t tokens     k + u n + v t + w p

p counts pairs of a token and one that it attends to. Fits are least squares of relative errors, no term
below 0. Between measured batches a and c are linear in b; beyond them the last slope goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.hardware.measured_profile import DecodeRow, JoinRow, MixedRow, PassRow, PrefillRow

MEDIAN = 1
"""Index of the median in `seconds`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class DecodeFit:
    """`base[b] + per_context_token[b] * S` seconds for b rollouts with S tokens in all."""

    base: list[float]
    per_context_token: list[float]
    most_running: int
    """Largest measured batch; what is above is extrapolated."""
    longest_context: float
    """Most measured tokens of a rollout."""

    def step_time(self, num_running: int, context_tokens: float) -> float:
        """Return the seconds of one decode step."""
        return self.base[num_running] + self.per_context_token[num_running] * context_tokens


@dataclass(frozen=True)
class PassFit:
    """Seconds of a pass: so much for itself, a rollout, a token, and a pair of tokens."""

    alone: float
    per_rollout: float
    per_token: float
    per_pair: float

    def time(self, num_rollouts: float, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds of a pass."""
        return self.alone + self.beside(num_rollouts, num_tokens, num_pairs)

    def at(self, factor: float) -> PassFit:
        """Return the fit of passes that are so many times as fast."""
        return PassFit(
            self.alone / factor,
            self.per_rollout / factor,
            self.per_token / factor,
            self.per_pair / factor,
        )

    def beside(self, num_rollouts: float, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds that it adds to a pass that is made anyway."""
        return (
            self.per_rollout * num_rollouts
            + self.per_token * num_tokens
            + self.per_pair * num_pairs
        )


def fit_decode(rows: Sequence[DecodeRow], max_running: int) -> DecodeFit:
    """Fit a line in the context at every measured batch, and return it for all batches up to `max_running`."""
    measured = sorted({row.running for row in rows})
    lines = [_decode_line([row for row in rows if row.running == b]) for b in measured]
    batches = np.arange(1, max_running + 1)
    base, slope = (
        _interpolate(batches, measured, [line[term] for line in lines]) for term in (0, 1)
    )
    return DecodeFit(
        base=[0.0, *base],
        per_context_token=[slope[0], *slope],
        most_running=measured[-1],
        longest_context=max(row.context for row in rows),
    )


def fit_padded_share(rows: Sequence[MixedRow], decode: DecodeFit) -> float:
    """Fit the share of a token's cost that a rollout causes for every token of the longest one, not its own.

    Kernels compute what is padded, but need not fetch it: between 0, nothing is padded, and 1, all costs the same.
    """
    padding = [row.running * (row.longest - row.context) for row in rows]
    slopes = [decode.per_context_token[row.running] for row in rows]
    known = [decode.step_time(row.running, row.running * row.context) for row in rows]
    seconds = np.array([row.seconds[MEDIAN] for row in rows])
    cost = np.array(slopes) * np.array(padding) / seconds
    square = float(cost @ cost)
    share = float(cost @ ((seconds - np.array(known)) / seconds)) / square if square else 1.0
    return min(1.0, max(0.0, share))


def fit_prefill(prefill: Sequence[PrefillRow], join: Sequence[JoinRow]) -> PassFit:
    """Fit what prefixes take: `alone` counts only where nothing decodes in the same pass."""
    rows: list[PrefillRow | JoinRow] = [*prefill, *join]
    terms = [
        (float(isinstance(row, PrefillRow)), row.rollouts, *_sizes(row.rollouts, row.tokens))
        for row in rows
    ]
    whole = np.array([row.seconds[MEDIAN] for row in rows])
    steps = np.array([row.step[MEDIAN] if isinstance(row, JoinRow) else 0.0 for row in rows])
    return PassFit(*fit_positive(np.array(terms), whole - steps, 1 / whole))


def fit_passes(rows: Sequence[PassRow]) -> PassFit:
    """Fit the seconds of the trainer's passes."""
    terms = [(1.0, row.rollouts, *_sizes(row.rollouts, row.tokens)) for row in rows]
    seconds = np.array([row.seconds[MEDIAN] for row in rows])
    return PassFit(*fit_positive(np.array(terms), seconds, 1 / seconds))


def fit_line(places: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = first + second * place, both at least 0."""
    terms = np.stack([np.ones(len(places)), np.array(places, dtype=float)], axis=1)
    values = np.array(seconds, dtype=float)
    first, second = fit_positive(terms, values, 1 / values)
    return first, second


def fit_positive(terms: Floats, values: Floats, weights: Floats) -> list[float]:
    """Return the factors, none below 0, that bring weighted `terms` closest to `values`.

    Terms whose factor would be negative leave the fit one by one, the most negative share first: with the
    four terms of a pass this finds what an active-set method finds, in as many lines.
    """
    kept = list(range(terms.shape[1]))
    while kept:
        scaled = terms[:, kept] * weights[:, None]
        norms = np.maximum(np.linalg.norm(scaled, axis=0), np.finfo(float).tiny)
        factors = np.linalg.lstsq(scaled / norms, values * weights, rcond=None)[0]
        if factors.min() >= 0:
            found = dict(zip(kept, (factors / norms).tolist(), strict=True))
            return [found.get(term, 0.0) for term in range(terms.shape[1])]
        kept.pop(int(np.argmin(factors)))
    return [0.0] * terms.shape[1]


def _decode_line(rows: Sequence[DecodeRow]) -> tuple[float, float]:
    contexts = [row.running * row.context for row in rows]
    return fit_line(contexts, [row.seconds[MEDIAN] for row in rows])


def _interpolate(batches: NDArray[np.int_], known: list[int], values: list[float]) -> list[float]:
    """Linear between the known batches; beyond the last one its slope goes on, never below 0."""
    inside = np.interp(batches, known, values)
    if len(known) > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        beyond = values[-1] + slope * (batches - known[-1])
        inside = np.where(batches > known[-1], np.maximum(beyond, 0.0), inside)
    return [float(value) for value in inside]


def _sizes(num_rollouts: int, length: float) -> tuple[float, float]:
    """Tokens, and pairs of a token and one up to it."""
    return num_rollouts * length, num_rollouts * length * length / 2
