"""Fit curves through a measured profile: the seconds of any batch, context and length.

    decode step of b rollouts with S tokens          a(b) + c(b) * S
    the same, padded to the longest with m tokens    a(b) + c(b) * (q * b * m + (1 - q) * S)
    pass that computes r prefixes with t tokens      the decode step in the same pass + u r + v t + w p
    training pass over n rollouts with t tokens      k + u n + v t + w p

p is the number of pairs of a token and a token that it attends to, and q the padded share
(`fit_padded_share`). Fits minimise the squares of relative errors, with no negative term. Between
measured batches, a and c are linear in b. Beyond the last one they continue with the last slope.
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
    """The seconds `base[b] + per_context_token[b] * S` of a decode step with b rollouts and S tokens in all."""

    base: list[float]
    per_context_token: list[float]
    most_running: int
    """Largest measured batch; larger ones are extrapolated."""
    longest_context: float
    """Largest measured number of tokens of a rollout."""

    def step_time(self, num_running: int, context_tokens: float) -> float:
        """Return the seconds of one decode step."""
        return self.base[num_running] + self.per_context_token[num_running] * context_tokens


@dataclass(frozen=True)
class PassFit:
    """The seconds of a pass: a constant, and seconds for each rollout, token and pair of tokens."""

    alone: float
    per_rollout: float
    per_token: float
    per_pair: float

    def time(self, num_rollouts: float, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds of a pass."""
        return self.alone + self.added_time(num_rollouts, num_tokens, num_pairs)

    def at(self, factor: float) -> PassFit:
        """Return the fit of passes that are `factor` times as fast."""
        return PassFit(
            self.alone / factor,
            self.per_rollout / factor,
            self.per_token / factor,
            self.per_pair / factor,
        )

    def added_time(self, num_rollouts: float, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds that the work adds to a pass that runs anyway: without the constant."""
        return (
            self.per_rollout * num_rollouts
            + self.per_token * num_tokens
            + self.per_pair * num_pairs
        )


def fit_decode(rows: Sequence[DecodeRow], max_running: int) -> DecodeFit:
    """Return a line in the context for each batch up to `max_running`, from fits at every measured batch."""
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
    """Return the cost of a padding token relative to a real one, from 0 (free) to 1 (the same cost).

    Kernels compute on padding tokens, but need not read them from memory.
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
    """Return the fit of passes that compute prefixes. Its constant counts only if nothing decodes in the same pass."""
    rows: list[PrefillRow | JoinRow] = [*prefill, *join]
    terms = [
        (float(isinstance(row, PrefillRow)), row.rollouts, *_sizes(row.rollouts, row.tokens))
        for row in rows
    ]
    whole = np.array([row.seconds[MEDIAN] for row in rows])
    steps = np.array([row.step[MEDIAN] if isinstance(row, JoinRow) else 0.0 for row in rows])
    return PassFit(*fit_positive(np.array(terms), whole - steps, 1 / whole))


def fit_passes(rows: Sequence[PassRow]) -> PassFit:
    """Return the fit of the trainer's passes."""
    terms = [(1.0, row.rollouts, *_sizes(row.rollouts, row.tokens)) for row in rows]
    seconds = np.array([row.seconds[MEDIAN] for row in rows])
    return PassFit(*fit_positive(np.array(terms), seconds, 1 / seconds))


def fit_line(inputs: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the factors of seconds = first + second * input, both at least 0."""
    terms = np.stack([np.ones(len(inputs)), np.array(inputs, dtype=float)], axis=1)
    values = np.array(seconds, dtype=float)
    first, second = fit_positive(terms, values, 1 / values)
    return first, second


def fit_positive(terms: Floats, values: Floats, weights: Floats) -> list[float]:
    """Return the non-negative factors for which the weighted sum of `terms` is closest to `values`.

    While a factor is negative, the term with the most negative share is removed and the fit repeated. For
    the four terms of a pass, the result is that of an active-set method.
    """
    kept = [term for term in range(terms.shape[1]) if terms[:, term].any()]
    while kept:
        scaled = terms[:, kept] * weights[:, None]
        norms = np.maximum(np.linalg.norm(scaled, axis=0), np.finfo(float).tiny)
        factors = np.linalg.lstsq(scaled / norms, values * weights, rcond=None)[0]
        if factors.min() >= 0:
            fitted = dict(zip(kept, (factors / norms).tolist(), strict=True))
            return [fitted.get(term, 0.0) for term in range(terms.shape[1])]
        kept.pop(int(np.argmin(factors)))
    return [0.0] * terms.shape[1]


def _decode_line(rows: Sequence[DecodeRow]) -> tuple[float, float]:
    contexts = [row.running * row.context for row in rows]
    return fit_line(contexts, [row.seconds[MEDIAN] for row in rows])


def _interpolate(batches: NDArray[np.int_], known: list[int], values: list[float]) -> list[float]:
    """Return values at all batches: linear between known batches, beyond them with the last slope, never below 0."""
    inside = np.interp(batches, known, values)
    if len(known) > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        beyond = values[-1] + slope * (batches - known[-1])
        inside = np.where(batches > known[-1], np.maximum(beyond, 0.0), inside)
    return [float(value) for value in inside]


def _sizes(num_rollouts: int, length: float) -> tuple[float, float]:
    """Return the number of tokens, and of pairs of a token and a token before it."""
    return num_rollouts * length, num_rollouts * length * length / 2
