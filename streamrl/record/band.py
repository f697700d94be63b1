"""Compute the band of a figure: the range in which it may truly be, with sampling error and model error.

    band  =  95 % interval of the mean step  x  model error of the seconds

The model error is a worst case: every second of a tier is wrong by as much as that tier may be, all in
the same direction. A recorded run was measured by a clock and has no model error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import assert_never

import msgspec

from streamrl.engine.trace import Trace
from streamrl.hardware.efficiency import scaled_errors
from streamrl.hardware.tiers import DATASHEETS, TIERS, Tier, datasheet_share
from streamrl.record.attribution import SidesAttribution
from streamrl.record.uncertainty import MOST_UNMEASURED, OPERATION_OF_ACTIVITY
from streamrl.runfile.formatting import OptionalInterval, format_share, listing

MEASURED, ROOFLINE = (0.89, 1.11), (0.70, 3.00)
"""Lowest and highest ratio of true to simulated seconds."""
UNCHECKED = 0.32
"""Bound of nine in ten errors of composed seconds, if the errors of an operation are unknown. It is the widest that
a profile states, for training mixtures (profiles/measured/training.toml).
"""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """The range in which a figure may truly be."""

    low: float
    high: float


class ModelError(msgspec.Struct, frozen=True, kw_only=True):
    """The model error of simulated seconds."""

    low: float
    """Lowest ratio of true to simulated seconds."""
    high: float
    """Highest ratio of true to simulated seconds."""
    datasheet_share: float
    """Share of the seconds that come from datasheets alone."""
    unchecked: list[str] = []
    """Operations with composed seconds whose error was never checked."""
    datasheets: dict[str, float] = {}
    """Share of all seconds that come from datasheets, by what takes them, the largest first."""

    @property
    def is_guess(self) -> bool:
        """Return whether the band is that of a guess: too many seconds are from datasheets or were never checked."""
        return self.datasheet_share > MOST_UNMEASURED or bool(self.unchecked)

    @property
    def note(self) -> str:
        """Return what the band rests on, for the end of a sentence."""
        share = f"{format_share(self.datasheet_share, 0)} of the seconds are from datasheets"
        if self.datasheet_share > MOST_UNMEASURED:
            return f"band of a guess: {share}{self._parts()}"
        if self.unchecked:
            return f"band of a guess: errors of {listing(self.unchecked)} were never checked"
        return f"band: model error included{f'; {share}' if self.datasheet_share >= 0.005 else ''}"

    def _parts(self) -> str:
        """Return what takes most of the seconds from datasheets: " (12 % attention of decode on A100)"."""
        large = [(name, share) for name, share in self.datasheets.items() if share >= WORTH_A_NAME]
        told = [f"{format_share(share, 0)} {name}" for name, share in large[:MOST_NAMES]]
        return f" ({listing(told)})" if told else ""


WORTH_A_NAME, MOST_NAMES = 0.02, 3
"""Least share of the seconds for which a part is named, and most parts."""


def named_datasheets(
    weights: Mapping[str, float],
    shares: Mapping[str, Mapping[str, float]],
    parts: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Return the share of all seconds from datasheets by what takes them, the largest first.

    Args:
        weights: seconds by operation.
        shares: by operation, the share of its seconds by tier.
        parts: by operation, the share of its seconds by what takes them, as far as it is known.
    """
    total = sum(weights.values()) or 1.0
    found: dict[str, float] = {}
    for operation, weight in weights.items():
        named = parts.get(operation, {})
        rest = datasheet_share(shares[operation]) - sum(named.values())
        whole = {OPERATION_WORDS.get(operation, operation): max(0.0, rest)}
        for name, share in [*named.items(), *whole.items()]:
            found[name] = found.get(name, 0.0) + share * weight / total
    order = sorted(found.items(), key=lambda part: -part[1])
    return {name: share for name, share in order if share > 0}


OPERATION_WORDS = {"train": "training", "score": "scores", "sync": "weight sync"}
"""Operations in the words of a sentence."""


def factors_of(tier: Tier, p90: Iterable[float]) -> tuple[float, float]:
    """Return the lowest and highest ratio of true to simulated seconds of a tier.

    Args:
        tier: the source of the seconds.
        p90: bounds of nine in ten errors of composed seconds, by operation. The widest is taken for all.
    """
    match tier:
        case "measured":
            return MEASURED
        case "roofline":
            return ROOFLINE
        case "scaled":
            errors = scaled_errors()
            return _within(max(errors.decode.p90, errors.training.p90))
        case "composed":
            return _within(max(p90, default=UNCHECKED))
        case _:
            assert_never(tier)


def _within(error: float) -> tuple[float, float]:
    """Return the lowest and highest true value of a prediction of 1 whose relative error is at most `error`."""
    return 1 / (1 + error), 1 / (1 - error)


def bounds_of(p90: Iterable[float], unchecked: Sequence[str]) -> list[float]:
    """Return the bounds of all errors of composed seconds, with the widest known one for what was never checked."""
    return [*p90, *([UNCHECKED] if unchecked else [])]


def model_error_of(
    tiers: Mapping[str, float],
    p90: Iterable[float],
    unchecked: Sequence[str] = (),
    datasheets: Mapping[str, float] = MappingProxyType({}),
) -> ModelError:
    """Return the model error of seconds.

    Args:
        tiers: share of the seconds by tier.
        p90: bounds of nine in ten errors, of the operations that were checked.
        unchecked: operations with composed seconds that were not.
        datasheets: share of the seconds from datasheets by what takes them.
    """
    bounds = bounds_of(p90, unchecked)
    parts = [(factors_of(tier, bounds), tiers[tier]) for tier in TIERS if tiers.get(tier)]
    low, high = (sum(share * factors[end] for factors, share in parts) for end in (0, 1))
    return ModelError(
        low=low,
        high=high,
        datasheet_share=datasheet_share(tiers),
        unchecked=list(unchecked),
        datasheets=dict(datasheets),
    )


def mixed_basis(shares: Mapping[str, float]) -> str:
    """Return that plans which are compared do not rest on datasheets to the same degree; "" if they do.

    Args:
        shares: by plan, the share of its seconds that rest on a datasheet.
    """
    if not shares or max(shares.values()) - min(shares.values()) <= MOST_UNMEASURED:
        return ""
    told = [f"{format_share(share, 0)} of {name}" for name, share in shares.items()]
    return (
        f"measured GPUs are compared with datasheets: seconds from datasheets are {listing(told)}"
    )


def read_model_error(
    trace: Trace,
    shares: SidesAttribution,
    tiers: Mapping[str, float],
    weights: Mapping[str, float],
) -> ModelError | None:
    """Return the model error of a simulated run; None for a real run, whose seconds are measured.

    Args:
        trace: the trace; only its header is read.
        shares: what its GPU-seconds were used for.
        tiers: share of its seconds by tier.
        weights: its seconds by operation.
    """
    if trace.world == "real":
        return None
    p90, busy = trace.facts.get("p90", {}), shares.whole.busy
    assert isinstance(p90, Mapping), "it is by operation"
    used = {OPERATION_OF_ACTIVITY[a]: None for a in OPERATION_OF_ACTIVITY if busy.get(a, 0.0) > 0}
    composed = [operation for operation in used if _is_composed(trace.facts[operation])]
    unchecked = [operation for operation in composed if operation not in p90]
    parts: dict[str, dict[str, float]] = {}
    recorded = trace.facts.get(DATASHEETS, {})
    assert isinstance(recorded, Mapping), "it is by operation and part"
    for key, share in recorded.items():
        operation, _, part = key.partition(": ")
        parts.setdefault(operation, {})[part] = share
    tiers_of = {each: found for each in weights if isinstance(found := trace.facts[each], Mapping)}
    named = named_datasheets(weights, tiers_of, parts)
    return model_error_of(tiers, [p90[o] for o in used if o in p90], unchecked, named)


def _is_composed(shares: object) -> bool:
    return isinstance(shares, Mapping) and shares.get("composed", 0.0) > 0


def ends_of(band: Band | None) -> OptionalInterval:
    """Return the ends of a band, to format it; None without a band."""
    return None if band is None else (band.low, band.high)


def band_of(
    value: float, interval: OptionalInterval, error: ModelError | None, fixed: float = 0.0
) -> Band:
    """Return the band of a figure that grows with seconds.

    Args:
        value: the figure.
        interval: its 95 % interval; None if it is unknown.
        error: the model error of its seconds; None if they are measured.
        fixed: the part of the figure that does not grow with seconds.
    """
    least, most = interval or (value, value)
    low, high = (1.0, 1.0) if error is None else (error.low, error.high)
    return Band(low=fixed + (least - fixed) * low, high=fixed + (most - fixed) * high)


def hull(bands: Sequence[Band]) -> Band:
    """Return the band that holds all of these, such as those of several seeds."""
    return Band(low=min(band.low for band in bands), high=max(band.high for band in bands))
