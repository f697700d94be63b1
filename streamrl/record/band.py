"""Compute the band of a figure: the range in which it may truly be, with sampling error and model error.

    band  =  95 % interval of the mean step  x  model error of the step

The model error is the one of `streamrl.hardware.step_errors`. It was made so that at least eight in ten published steps are within
it, at most one in ten is longer and at most one in ten shorter. Fewer steps of a source that was left out are within it: `checked_steps` has
how many of each system. A recorded run was measured by a clock and has no model error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, hypot, log
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from streamrl.engine.trace import Trace
from streamrl.hardware.efficiency import scaled_errors
from streamrl.hardware.step_errors import (
    MEASURED_PATH,
    SPREAD_OF_NORMAL,
    STAGES,
    Basis,
    Stage,
    StepErrors,
    checked_text,
    step_errors,
)
from streamrl.hardware.tiers import DATASHEETS, PARTITION, SPREADS, TIERS, Tier, datasheet_share
from streamrl.record.attribution import SidesAttribution
from streamrl.record.step_stages import STAGE_OF_OPERATION, stage_shares
from streamrl.record.uncertainty import MOST_UNMEASURED, OPERATION_OF_ACTIVITY
from streamrl.runfile.formatting import OptionalInterval, format_share, listing
from streamrl.runfile.recorded_numbers import NotNegative, Number

NINE_IN_TEN = 1.645
"""90 % of a normal distribution is within this many standard deviations."""
MEASURED = log(1.21)
"""Spread of seconds that were measured on the machine itself: 80 % of 12 runs on two CPU cores were this close to their
simulation before the run (`make bench-reality`, docs/fidelity.md).
"""
ROOFLINE = log(1.69)
"""Spread of rooflines: 80 % of the measured seconds of operators are this close to theirs (benchmarks/bench_roofline.py)."""


CostFacts: TypeAlias = Mapping[str, str | float | dict[str, float] | list[str]]
"""What costs record in a trace: by operation its shares by tier, and the partition."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """The range in which a figure may truly be."""

    low: Number
    high: Number


class StageError(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a step, and its error."""

    share: Number
    """By how much of a step this stage moves it: 1 % more of the stage is `share` % more of the step."""
    low: Number
    """Lowest ratio of true to simulated seconds."""
    high: Number
    """Highest ratio of true to simulated seconds."""

    @property
    def text(self) -> str:
        """Return the error: "-22 to +28 %"."""
        return error_text(self.low, self.high)


class StepBasis(msgspec.Struct, frozen=True, kw_only=True):
    """What a predicted step consists of, and what its seconds rest on."""

    replicas: dict[Stage, float]
    """Seconds of each stage of the replicas, relative to the step."""
    trainer: dict[Stage, float]
    """Seconds of each stage of the trainer, relative to the step; those on shared GPUs are here or in `replicas`."""
    tiers: dict[Stage, dict[Tier, float]] = {}
    """By stage: share of its seconds by tier."""
    factors: dict[Stage, float] = {}
    """By stage: further spread from factors of which few sources are known."""
    partition: tuple[str, ...] = ()
    """The kind of model, the silicon, and whether the framework is named; empty if they are not recorded."""

    @property
    def path(self) -> tuple[str, ...]:
        """The partition of its factor: measured seconds have their own, others go by kind of model and silicon."""
        return MEASURED_PATH if self.rests_on in MEASURED_PATH else self.partition[:2]

    @property
    def rests_on(self) -> Basis:
        """What most seconds of generation and training rest on."""
        tiers = self._shares_of_tiers()
        if tiers.get("measured", 0.0) > 0.5:
            return "measured"
        return "datasheets" if datasheet_share(tiers) > MOST_UNMEASURED else "tables"

    @property
    def roofline_share(self) -> float:
        """Return the share of the seconds of generation and training that are rooflines."""
        return self._shares_of_tiers().get("roofline", 0.0)

    def _shares_of_tiers(self) -> dict[Tier, float]:
        """Return the share of the seconds of generation and training by tier."""
        parts = [
            (stage, seconds)
            for side in (self.replicas, self.trainer)
            for stage, seconds in side.items()
            if stage != "sync"
        ]
        total = sum(seconds for _, seconds in parts) or 1.0
        tiers: dict[Tier, float] = {}
        for stage, seconds in parts:
            for tier, share in self.tiers.get(stage, {}).items():
                tiers[tier] = tiers.get(tier, 0.0) + share * seconds / total
        return tiers

    def spreads(self, errors: StepErrors, unchecked: Sequence[str] = ()) -> dict[Stage, float]:
        """Return the spread of each stage, with that of datasheets, of factors with few sources, and of unchecked seconds."""
        return {stage: self._spread(stage, errors, stage in unchecked) for stage in STAGES}

    def _spread(self, stage: Stage, errors: StepErrors, is_unchecked: bool) -> float:
        tiers, own = self.tiers.get(stage, {}), errors.spread(stage, self.partition)
        measured = tiers.get("measured", 0.0)
        spread = measured * MEASURED + (1 - measured) * own
        spread = hypot(spread, (1 - measured) * self.factors.get(stage, 0.0))
        if stage == "sync":  # published seconds of syncs are compared with rooflines
            return spread
        scaled = tiers.get("scaled", 0.0) + is_unchecked * tiers.get("composed", 0.0)
        beyond = max(0.0, tiers.get("roofline", 0.0) - errors.most_roofline)
        beyond /= (1 - errors.most_roofline) or 1.0
        return hypot(spread, scaled * scaled_spread(), beyond * ROOFLINE)


def scaled_spread() -> float:
    """Return the further spread of seconds that are scaled from GPUs of other generations, or were never checked."""
    errors = scaled_errors()
    return log(1 + max(errors.decode.p90, errors.training.p90)) * SPREAD_OF_NORMAL / NINE_IN_TEN


class ModelError(msgspec.Struct, frozen=True, kw_only=True):
    """The model error of simulated seconds."""

    low: Number
    """Lowest ratio of true to simulated seconds."""
    high: Number
    """Highest ratio of true to simulated seconds."""
    datasheet_share: NotNegative
    """Share of the seconds that come from datasheets alone."""
    unchecked: list[str] = []
    """Operations with composed seconds whose error was never checked."""
    datasheets: dict[str, NotNegative] = {}
    """Share of all seconds that come from datasheets, by what takes them, the largest first."""
    stages: dict[Stage, StageError] = {}
    """What the error is made of."""
    system: str = ""
    """The system of the run; "" where it is not known."""
    has_environments: bool = False
    """Whether the run has environments."""

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
        small = f"; {share}" if self.datasheet_share >= 0.005 else ""
        return f"band: {checked_text(self.system, self.has_environments)}{small}"

    @property
    def of_step(self) -> str:
        """Return the one error of the step: "-22 to +28 %"."""
        return error_text(self.low, self.high)

    @property
    def of_stages(self) -> str:
        """Return what the error is made of: "generation 62 % of the step, -17 to +28 %; train 30 % of the step, -9 to +15 %"."""
        told = [
            f"{stage} {format_share(part.share, 0)} of the step, {part.text}"
            for stage, part in self.stages.items()
            if part.share >= WORTH_A_NAME
        ]
        return "; ".join(told)

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


def model_error_of(
    basis: StepBasis,
    datasheet_part: float = 0.0,
    unchecked: Sequence[str] = (),
    datasheets: Mapping[str, float] = MappingProxyType({}),
    errors: StepErrors | None = None,
) -> ModelError:
    """Return the model error of a step: every report has it from here.

    Args:
        basis: what the step consists of.
        datasheet_part: share of the GPU-seconds from datasheets.
        unchecked: operations with composed seconds that were never compared with published ones.
        datasheets: share of the seconds from datasheets by what takes them.
        errors: the errors of stages; None for those of the profile.
    """
    errors = errors or step_errors()
    stages = [STAGE_OF_OPERATION[each] for each in unchecked if each in STAGE_OF_OPERATION]
    spreads = basis.spreads(errors, stages)
    shares = errors.critical(basis.replicas, basis.trainer, spreads)
    below, above = errors.factors_of_sides(basis.path)
    spread = errors.combined(shares, spreads)
    return ModelError(
        low=exp(-below * spread),
        high=exp(above * spread),
        datasheet_share=datasheet_part,
        unchecked=list(unchecked),
        datasheets=dict(datasheets),
        stages={
            stage: StageError(
                share=share, low=exp(-below * spreads[stage]), high=exp(above * spreads[stage])
            )
            for stage, share in shares.items()
            if share > 0
        },
    )


def error_text(low: float, high: float) -> str:
    """Return the ends of an error, as ratios of true to simulated seconds: "-22 to +28 %"."""
    return f"-{(1 - low) * 100:.0f} to +{(high - 1) * 100:.0f} %"


def basis_of(
    replicas: Mapping[Stage, float],
    trainer: Mapping[Stage, float],
    facts: CostFacts,
) -> StepBasis:
    """Return the basis of a step from its seconds by stage, and the facts that costs record in a trace."""
    tiers: dict[Stage, dict[Tier, float]] = {}
    for stage in STAGES:
        found = facts.get("decode" if stage == "generation" else stage)
        own = found if isinstance(found, Mapping) else {}
        tiers[stage] = {tier: own[tier] for tier in TIERS if tier in own}
    partition, found = facts.get(PARTITION, ()), facts.get(SPREADS)
    spreads = found if isinstance(found, Mapping) else {}
    return StepBasis(
        replicas=dict(replicas),
        trainer=dict(trainer),
        tiers=tiers,
        factors={stage: spreads[stage] for stage in STAGES if spreads.get(stage)},
        partition=tuple(partition) if isinstance(partition, list) else (),
    )


def read_basis(trace: Trace, shares: SidesAttribution) -> StepBasis:
    """Return the basis of the mean step of a simulated run.

    The time for which replicas wait for stragglers counts as generation, and their wait for weights as sync. Shared
    GPUs that wait for others to train count as training.

    Args:
        trace: the trace; only its header is read.
        shares: what its GPU-seconds were used for.
    """
    secondary = [follower.name for follower in trace.run.followers]
    working, training = stage_shares(shares, secondary)
    return basis_of(working, training, trace.facts)


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
    basis = read_basis(trace, shares)
    return msgspec.structs.replace(
        model_error_of(basis, datasheet_share(tiers), unchecked, named),
        system=trace.run.policies.system,
        has_environments=trace.run.environment is not None,
    )


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
