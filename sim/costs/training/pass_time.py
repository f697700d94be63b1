"""Seconds of a pass over a micro-batch, as a constant, so much a token, and so much a pair of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.hardware.tables import Floats
from streamrl.sim.costs.training.profile import GemmRate


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of a pass over one micro-batch."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    """For each pair of a token and one before it."""

    def __add__(self, other: Pass) -> Pass:
        """One after the other."""
        return Pass(
            fixed=self.fixed + other.fixed,
            per_token=self.per_token + other.per_token,
            per_pair=self.per_pair + other.per_pair,
        )

    def __mul__(self, times: float) -> Pass:
        """The same `times` over."""
        return Pass(
            fixed=self.fixed * times,
            per_token=self.per_token * times,
            per_pair=self.per_pair * times,
        )

    def shared(self, ranks: int) -> Pass:
        """Return the seconds of one of `ranks` that share the micro-batch; a product of few tokens is slow as before."""
        return Pass(
            fixed=self.fixed, per_token=self.per_token / ranks, per_pair=self.per_pair / ranks
        )

    def time(self, tokens: Floats, pairs: Floats) -> Floats:
        """Return the seconds of micro-batches of so many tokens and pairs."""
        return self.fixed + self.per_token * tokens + self.per_pair * pairs


def product(rate: GemmRate, columns: float, rows: float) -> Pass:
    """Return the seconds of (tokens, rows) times (rows, columns), at the rate of a product of that size."""
    seconds = 2 * columns * rows / rate.flops
    slower = 1 + rate.columns / columns + rate.rows / rows
    return Pass(fixed=seconds * rate.tokens, per_token=seconds * slower)
