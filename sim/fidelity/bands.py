"""Compute the errors of steps from published rows, and check the bands on rows whose source was left out.

A residual is the logarithm of published over predicted seconds. All errors come from residuals:

1. Residuals of one source are alike. A source of n rows counts as n / (1 + (n - 1) c) rows, where c is their
   measured correlation (the design effect of Kish 1965, Survey Sampling).
2. The spread of a stage is the size that 80 % of its residuals stay below, by kind of model. It is pulled towards the
   spread of all stages (partial pooling).
3. The spreads of stages are combined with their shares of a step and with their measured correlation.
4. Residuals of whole steps, relative to that, have a factor that 80 % stay below. This is split conformal
   prediction with a normalised score (Lei et al. 2018, Distribution-free predictive inference for regression). There
   is a factor for each partition; one with few rows is pulled towards the larger one that it is part of.

5. Bands of rows are computed without their source. Two factors scale the lower and the upper half of all bands, so that
   10 % of these rows are below and 10 % above (the idea of the jackknife+, Barber et al. 2021). Bands of reports rest on
   all sources. Their factors are larger if more than 10 % of the rows are beyond an end.

The coverage that is reported leaves a source out of all five steps, the two factors included (`nested_bands`).

The strength of pooling has the lowest mean interval score of left-out sources (Gneiting and Raftery 2007, Strictly
proper scoring rules, prediction and estimation). The score is the width of bands, plus ten times the distance of
figures outside them.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, exp, log, sqrt
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from streamrl.hardware.step_errors import (
    ALL,
    PAPER,
    STAGES,
    Checked,
    Kind,
    Stage,
    StageErrors,
    StepErrors,
)
from streamrl.hardware.tiers import Tier
from streamrl.record.band import StepBasis, model_error_of
from streamrl.runfile.result_files import replacing
from streamrl.sim.fidelity.published_rows import AT_DEFAULTS, Row, middle

RESIDUALS = "fidelity-residuals.csv"
COVERAGE = 0.8
PRIORS = tuple((stages, steps) for stages in (8.0, 32.0, 128.0, 512.0) for steps in (4.0, 16.0))
"""Rows that a larger partition may count as, beside the rows of a smaller one: for stages, and for steps."""
DATASHEET_TIERS: tuple[Tier, ...] = ("scaled", "roofline")
BEYOND = (1 - COVERAGE) / 2
"""Share of steps beyond either end of their band."""
Sides = tuple[float, float]
"""Of a band: its lower and its upper half. Distances are of logarithms, and positive."""
LEAST = 0.02
"""Least spread: published seconds are rounded."""


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure of a stage or step, and what its prediction rests on."""

    stage: str
    name: str
    source: str
    kind: Kind
    silicon: str
    framework: str
    predicted: float
    """Seconds, by constants that do not rest on the row or its model."""
    published: float
    width: float
    """Highest over lowest prediction, minus 1, if the source does not state an input."""
    generation: float = 0.0
    """Of a step: seconds of each stage of the replicas, relative to the step."""
    score: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    trainer_score: float = 0.0
    """Of a step: seconds of each stage of a trainer with GPUs of its own, relative to the step."""
    trainer_train: float = 0.0
    generation_scaled: float = 0.0
    """Share of the seconds of generation that is scaled from other GPUs."""
    generation_roofline: float = 0.0
    train_scaled: float = 0.0
    train_roofline: float = 0.0
    train_factors: float = 0.0
    """Further spread of scoring and training passes from factors of which few sources are known."""
    at_defaults: float = 0.0
    """Seconds with racks at defaults; 0 for what is not on racks."""

    @property
    def error(self) -> float:
        """The logarithm of published over predicted seconds."""
        return log(self.published / self.predicted)

    @property
    def basis(self) -> StepBasis:
        """What the prediction of a step rests on."""
        generating = _tiers(self.generation_scaled, self.generation_roofline)
        training = _tiers(self.train_scaled, self.train_roofline)
        return StepBasis(
            replicas={stage: getattr(self, stage) for stage in STAGES},
            trainer={"score": self.trainer_score, "train": self.trainer_train},
            tiers={"generation": generating, "score": training, "train": training},
            factors={"score": self.train_factors, "train": self.train_factors},
            partition=(self.kind, self.silicon, self.framework),
        )


def _tiers(scaled: float, roofline: float) -> dict[Tier, float]:
    return {"composed": 1 - scaled - roofline, "scaled": scaled, "roofline": roofline}


def residuals_of(rows: Iterable[Row]) -> list[Residual]:
    """Return the residuals of stages and steps, of rows that are not in the sample of a fit of that stage.

    A fitted whole step stays: its fitted part is the few seconds besides the stages.
    """
    return [
        _residual(row)
        for row in rows
        if row.stage is not None and (row.evidence != "in sample" or row.stage == "step")
    ]


def _residual(row: Row) -> Residual:
    basis = row.basis
    assert basis is not None and row.stage is not None, "a stage has a basis"
    kind, silicon, framework = basis.partition
    shares: dict[str, float] = {stage: basis.replicas.get(stage, 0.0) for stage in STAGES}
    shares |= {f"trainer_{stage}": share for stage, share in basis.trainer.items()}
    shares |= {
        f"{stage}_{tier}": tiers.get(tier, 0.0)
        for stage, tiers in basis.tiers.items()
        if stage in ("generation", "train")
        for tier in DATASHEET_TIERS
    }
    shares["train_factors"] = basis.factors.get("train", 0.0)
    default = row.readings.get(AT_DEFAULTS, 0.0)
    return msgspec.convert(
        {
            "stage": row.stage,
            "name": row.name,
            "source": row.source,
            "kind": kind,
            "silicon": silicon,
            "framework": framework,
            "predicted": float(f"{row.best:.5g}"),
            "published": float(f"{middle(row.published):.5g}"),
            "width": round(row.width, 4),
            **{name: round(share, 4) for name, share in shares.items()},
            "at_defaults": float(f"{default:.5g}"),
        },
        Residual,
    )


def derive(residuals: Sequence[Residual]) -> StepErrors:
    """Return the errors of steps that residuals show."""
    sides = {prior: _left_out_sides(residuals, prior) for prior in PRIORS}
    scores = {
        prior: _score(residuals, left_out_bands(residuals, prior, of))
        for prior, of in sides.items()
    }
    best = min(scores, key=lambda prior: scores[prior])
    shown = _derive(residuals, best, (1.0, 1.0))
    bands = {
        (each.source, each.name): _half_bands(each, shown)
        for each in residuals
        if each.stage == "step"
    }
    below, above = map(max, zip(sides[best], _sides_of(residuals, bands), strict=True))
    return _derive(residuals, best, (below, above))


def nested_bands(residuals: Sequence[Residual]) -> dict[tuple[str, str], Sides]:
    """Return by source and name of a step both halves of the band that reports would show if its source were unknown."""
    found: dict[tuple[str, str], Sides] = {}
    steps = [each for each in residuals if each.stage == "step"]
    for source in dict.fromkeys(each.source for each in steps):
        errors = derive([each for each in residuals if each.source != source])
        for each in steps:
            if each.source == source:
                found[source, each.name] = _half_bands(each, errors)
    return found


def _left_out_sides(residuals: Sequence[Residual], prior: tuple[float, float]) -> Sides:
    """Return the factors with which `BEYOND` of the steps of left-out sources is beyond either end of their bands."""
    return _sides_of(residuals, left_out_bands(residuals, prior))


def _sides_of(residuals: Sequence[Residual], bands: Mapping[tuple[str, str], Sides]) -> Sides:
    """Return the factors of both sides of these bands with which at most `BEYOND` of the published steps is beyond either end."""
    steps = [each for each in residuals if each.stage == "step"]
    if not steps:
        return 1.0, 1.0
    below, above = (
        np.quantile(
            [sign * each.error / bands[each.source, each.name][side] for each in steps],
            1 - BEYOND,
            method="higher",  # an interpolated factor leaves one step more beyond the end
        )
        for side, sign in enumerate((-1, 1))
    )
    return max(LEAST, _rounded_up(float(below))), max(LEAST, _rounded_up(float(above)))


def _rounded_up(factor: float) -> float:
    """Return a factor with four digits that is not smaller, so that the step at an end stays within."""
    return ceil(factor * 1e4) / 1e4


def left_out_bands(
    residuals: Sequence[Residual], prior: tuple[float, float], sides: Sides = (1.0, 1.0)
) -> dict[tuple[str, str], Sides]:
    """Return by source and name of a step both halves of its band, computed without its source.

    The band is from exp(-lower) to exp(upper), times the prediction.
    """
    found: dict[tuple[str, str], Sides] = {}
    steps = [each for each in residuals if each.stage == "step"]
    for source in dict.fromkeys(each.source for each in steps):
        errors = _derive([each for each in residuals if each.source != source], prior, sides)
        for each in steps:
            if each.source == source:
                found[source, each.name] = _half_bands(each, errors)
    return found


def _half_bands(step: Residual, errors: StepErrors) -> Sides:
    """Return both halves of the band of a published step."""
    found = model_error_of(step.basis, errors=errors)
    return -log(found.low), log(found.high)


def with_bands(steps: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Return published rows with the bands of whole steps, each computed without the row's source.

    Args:
        steps: rows of RL steps and their stages.
        others: further rows of stages, such as training steps.
    """
    bands = nested_bands(residuals_of([*steps, *others]))
    found = []
    for row in steps:
        if row.stage == "step":
            below, above = bands[row.source, row.name]
            row = msgspec.structs.replace(row, band=(row.best * exp(-below), row.best * exp(above)))
        found.append(row)
    return found


def with_reported_bands(steps: Iterable[Row], errors: StepErrors | None = None) -> list[Row]:
    """Return published steps with the bands that reports show, which rest on all sources.

    Args:
        steps: published rows of whole steps.
        errors: the errors of stages; None for those of the profile.
    """
    found = []
    for row in steps:
        assert row.basis is not None, "a step has a basis"
        error = model_error_of(row.basis, errors=errors)
        band = (row.best * error.low, row.best * error.high)
        found.append(msgspec.structs.replace(row, band=band))
    return found


def checked_of(steps: Iterable[Row], figure: Mapping[str, Sequence[bool]]) -> list[Checked]:
    """Return how many published steps of each system are within their bands.

    Args:
        steps: published rows with bands.
        figure: by system, whether each step of the StreamRL paper is within its band.
    """
    runs: dict[str, list[bool]] = defaultdict(list)
    for row in steps:
        if row.stage == "step" and row.is_in_band is not None:
            runs[row.system].append(row.is_in_band)
    return [
        Checked(group, system, len(some), sum(some))
        for group, found in (("published", runs), (PAPER, figure))
        for system, some in found.items()
    ]


def write_checked(found: Iterable[Checked], path: Path) -> None:
    """Write profiles/errors/checked.csv."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        file.write(
            f"# source: docs/{RESIDUALS}\n# streamrl validate --output docs writes this file.\n"
        )
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Checked._fields)
        table.writerows(found)


def _score(residuals: Sequence[Residual], bands: Mapping[tuple[str, str], Sides]) -> float:
    """Return the mean interval score of bands, on a logarithmic scale. Every source has the same weight."""
    of_sources = []
    for steps in _grouped((e for e in residuals if e.stage == "step"), lambda each: each.source):
        halves = [bands[each.source, each.name] for each in steps]
        misses = [
            max(0.0, each.error - above, -each.error - below)
            for each, (below, above) in zip(steps, halves, strict=True)
        ]
        of_sources.append(fmean(map(sum, halves)) + fmean(misses) / BEYOND)
    return fmean(of_sources)


def _derive(residuals: Sequence[Residual], prior: tuple[float, float], sides: Sides) -> StepErrors:
    """Return the errors of steps for one strength of pooling, and factors of both sides of bands."""
    steps = [each for each in residuals if each.stage == "step"]
    alike = _within_source(residuals)
    stages = {stage: _stage(residuals, stage, prior[0], alike) for stage in STAGES}
    found = StepErrors(
        name="errors of predicted steps",
        source=f"docs/{RESIDUALS}",
        coverage=COVERAGE,
        rows=len(steps),
        sources=len({each.source for each in steps}),
        within_source=alike,
        priors=prior,
        most_roofline=max(
            (max(e.generation_roofline, e.train_roofline) for e in residuals if e.stage != "step"),
            default=0.0,
        ),
        stages=stages,
        correlation=_correlations(residuals, alike),
        sides=(1.0, 1.0),
        factors={ALL: 1.0},
    )
    return msgspec.structs.replace(found, sides=sides, factors=_factors(steps, found))


def _within_source(residuals: Sequence[Residual]) -> float:
    """Return the correlation of two residuals of one stage and source, between 0 and 1."""
    pairs = squares = 0.0
    for errors in _grouped(residuals, lambda each: (each.stage, each.source)):
        values = np.array([each.error for each in errors])
        if len(values) > 1:
            square = float(np.mean(values**2))
            pairs += (values.sum() ** 2 - len(values) * square) / (len(values) * (len(values) - 1))
            squares += square
    return round(min(1.0, max(0.0, pairs / squares)), 4) if squares else 1.0


def _weights(residuals: Sequence[Residual], alike: float) -> list[float]:
    """Return the weight of each residual: those of a source count less together than alone."""
    counts: dict[str, int] = defaultdict(int)
    for each in residuals:
        counts[each.source] += 1
    return [1 / (1 + (counts[each.source] - 1) * alike) for each in residuals]


def _stage(residuals: Sequence[Residual], stage: Stage, prior: float, alike: float) -> StageErrors:
    every = [each for each in residuals if each.stage != "step"]
    own = [each for each in every if each.stage == stage]
    sizes = [abs(each.error) for each in own]
    top = _spread(every, [abs(each.error) for each in every], alike)
    whole = _pooled(own, sizes, top, prior, alike)
    by_kind = _by_partition(own, sizes, [(each.kind,) for each in own], whole, prior, alike)
    sources = len({each.source for each in own})
    alone = round(_spread(own, sizes, alike), 4) if own else None
    return StageErrors(rows=len(own), sources=sources, own=alone, spread={ALL: whole, **by_kind})


def _by_partition(
    residuals: Sequence[Residual],
    sizes: Sequence[float],
    paths: Sequence[tuple[str, ...]],
    top: float,
    prior: float,
    alike: float,
) -> dict[str, float]:
    """Return the spread of each partition, pulled towards the larger one that it is part of."""
    found: dict[tuple[str, ...], float] = {(): top}
    for length in range(1, max(map(len, paths), default=0) + 1):
        for path in sorted({each[:length] for each in paths}):
            places = [place for place, each in enumerate(paths) if each[:length] == path]
            own, of = [residuals[place] for place in places], [sizes[place] for place in places]
            found[path] = _pooled(own, of, found[path[:-1]], prior, alike)
    return {", ".join(path): spread for path, spread in found.items() if path}


def _spread(residuals: Sequence[Residual], sizes: Sequence[float], alike: float) -> float:
    """Return the size that `COVERAGE` of the residuals stay below, with their weights."""
    if not residuals:
        return LEAST
    order = np.argsort(sizes)
    reached = np.cumsum(np.array(_weights(residuals, alike))[order])
    return max(LEAST, float(sizes[order[np.searchsorted(reached, COVERAGE * reached[-1])]]))


def _pooled(
    residuals: Sequence[Residual],
    sizes: Sequence[float],
    parent: float,
    prior: float,
    alike: float,
) -> float:
    """Return the spread of a partition, pulled towards that of the larger one: partial pooling of logarithms."""
    if not residuals:
        return round(parent, 4)
    rows = sum(_weights(residuals, alike))
    own = log(_spread(residuals, sizes, alike))
    return round(exp((rows * own + prior * log(parent)) / (rows + prior)), 4)


def _correlations(residuals: Sequence[Residual], alike: float) -> dict[str, float]:
    """Return the correlation of two stages' residuals over published steps that have both."""
    by_step: dict[tuple[str, str], dict[str, Residual]] = defaultdict(dict)
    for each in residuals:
        by_step[each.source, each.name.rpartition(": ")[0]][each.stage] = each
    found: dict[str, float] = {}
    for place, one in enumerate(STAGES):
        for two in STAGES[place + 1 :]:
            both = [
                (step[one], step[two]) for step in by_step.values() if {one, two} <= step.keys()
            ]
            weights = np.array(_weights([first for first, _ in both], alike))
            if len(both) < 2:
                continue
            first, second = (np.array([each[side].error for each in both]) for side in (0, 1))
            product = np.sum(weights * first * second)
            size = sqrt(np.sum(weights * first**2) * np.sum(weights * second**2))
            rows = float(np.sum(weights))
            found[f"{one} {two}"] = round(float(product / size) * rows / (rows + 1), 4)
    return found


def _factors(steps: Sequence[Residual], errors: StepErrors) -> dict[str, float]:
    """Return the factor of each partition of steps."""
    bases, alike = [each.basis for each in steps], errors.within_source
    predicted = [log(model_error_of(basis, errors=errors).high) for basis in bases]
    sizes = [abs(each.error) / size for each, size in zip(steps, predicted, strict=True)]
    paths = [basis.path for basis in bases]
    top = round(_spread(steps, sizes, alike), 4)
    found = _by_partition(steps, sizes, paths, top, errors.priors[1], alike)
    return {ALL: top, **found}


def _grouped(
    residuals: Iterable[Residual], key: Callable[[Residual], object]
) -> list[list[Residual]]:
    groups: dict[object, list[Residual]] = defaultdict(list)
    for each in residuals:
        groups[key(each)].append(each)
    return list(groups.values())


def write_residuals(residuals: Sequence[Residual], path: Path) -> None:
    """Write residuals as a CSV table."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, Residual.__struct_fields__, lineterminator="\n")
        table.writeheader()
        table.writerows(msgspec.structs.asdict(each) for each in residuals)


def read_residuals(path: Path) -> list[Residual]:
    """Read a table of `write_residuals`."""
    with path.open(encoding="utf-8", newline="") as file:
        return [msgspec.convert(line, Residual, strict=False) for line in csv.DictReader(file)]


def errors_text(errors: StepErrors) -> str:
    """Return the text of profiles/errors/steps.toml."""
    lines = [
        "# streamrl validate --output docs writes this file. Errors are logarithms of published over predicted seconds.",
        f'name = "{errors.name}"',
        f'source = "{errors.source}"',
        f"coverage = {errors.coverage}",
        f"rows = {errors.rows}",
        f"sources = {errors.sources}",
        f"within_source = {errors.within_source}",
        f"priors = {list(errors.priors)}",
        f"most_roofline = {errors.most_roofline}",
        f"sides = {list(errors.sides)}",
    ]
    for stage, of in errors.stages.items():
        lines += ["", f"[stages.{stage}]", f"rows = {of.rows}", f"sources = {of.sources}"]
        lines += [] if of.own is None else [f"own = {of.own}"]
    tables = {f"stages.{stage}.spread": of.spread for stage, of in errors.stages.items()}
    tables |= {"correlation": errors.correlation, "factors": errors.factors}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f'"{key}" = {value}' for key, value in table.items())]
    return "\n".join(lines) + "\n"
