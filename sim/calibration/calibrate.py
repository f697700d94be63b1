"""Fit factors by stage and the seconds of a step to steps that were measured, and say how well they hold.

    run file + measured steps ─► disagreements? ─► simulate the same steps ─► factors ─► simulate again … ─► calibration

Stages depend on each other where they overlap, so factors are fitted, applied and fitted again until they stay.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.hardware.calibration_file import (
    STAGES,
    Calibration,
    StageErrors,
    StageFactor,
    StageName,
    StepOverhead,
    profile_digest,
    write_calibration,
)
from streamrl.hardware.profiles import load_model
from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps
from streamrl.runfile.config import Run
from streamrl.sim.calibration.disagreement import (
    Disagreement,
    check_overhead,
    find_disagreements,
    takes_turns,
)
from streamrl.sim.calibration.stepwise import SimulatedSteps, simulate_steps
from streamrl.sim.calibration.targets import (
    StepPairs,
    Target,
    find_targets,
    interval_of_median,
    no_seconds,
    overlaps,
    pair,
    step_seconds,
)

ROUNDS, ENOUGH = 8, 0.002
"""Fits in a row at most, and the share of itself by which a factor may still change at the last."""
MOST_STEPS = 40
"""That are simulated; of more the last, as lengths drift and a later simulation asks what a step takes now."""
HELD_OUT = 0.4
"""Share of the steps, the last ones, that nothing is fitted to."""
FOR_HOLDING_OUT = 4
"""Steps from which on some are held out, and the first is skipped: it compiles, and waits for what came before none."""
UNLIKELY = (0.25, 4.0)
"""Factors beyond which hardware and frameworks do not differ: more likely the run file is of something else."""
MET = 0.05
"""Share by which simulated and measured seconds may still differ after the last round."""
SUSPECTS: dict[StageName, str] = {
    "generation": "rollout.replicas, rollout.tensor_parallel, rollout.max_running, costs.engine, "
    "algorithm.dynamic_sampling with workload.informative_share",
    "score": "trainer's degrees, algorithm.old_log_probs, algorithm.kl_coefficient",
    "train": "trainer's degrees, trainer.recompute, trainer.packing, framework.optimizer_steps",
    "sync": "sync.backend, sync.mode, links, framework.switch_time",
}
WHOLE_STEP = Target((), step_seconds, no_seconds)
IN_OTHER_UNITS = 200.0
"""Measured over simulated seconds of every stage from which on those are no seconds: no machine is so much slower."""
LARGE = 0.15
"""Error of a stage after its factor from which on one factor does not explain its steps."""

Simulator = Callable[[Run, Sequence[MeasuredStep]], SimulatedSteps]


class Calibrated(NamedTuple):
    """A calibration, and what there is to say about it."""

    calibration: Calibration
    notes: list[str]


class _Used(NamedTuple):
    """Which steps are for what."""

    fitted: int
    """The first so many."""
    steps: list[MeasuredStep]


def calibrate_steps(
    run: Run,
    measured: MeasuredSteps,
    held_out: float = HELD_OUT,
    watch: Callable[[str], None] = lambda what: None,
) -> Calibrated:
    """Fit a calibration to measured steps.

    Args:
        run: the run file that they were measured of; a calibration that it names is left out of account.
        measured: the steps.
        held_out: share of the steps, the last ones, that nothing is fitted to.
        watch: told what is simulated.

    Raises:
        ValueError: the run file disagrees with the work of the steps, naming each key, or nothing can be fitted.
    """
    refuse(find_disagreements(run, measured), measured.source)
    return calibrate_checked(run, measured, held_out, simulate_steps, watch)


def calibrate_checked(
    run: Run,
    measured: MeasuredSteps,
    held_out: float,
    simulated: Simulator,
    watch: Callable[[str], None],
) -> Calibrated:
    """Fit a calibration to steps whose work the run file agrees with; see `calibrate_steps`."""
    run = replace(run, costs=replace(run.costs, calibration=None))
    used = _choose(measured, held_out)
    notes = list(measured.notes)
    targets = find_targets(run, measured, notes)
    if not targets:
        raise ValueError(f"{measured.source}: nothing in it tells how long a stage takes")
    overhead = _overhead(run, used)
    if overhead is not None:
        wrong = check_overhead(run, overhead.seconds, _mean_step(used))
        refuse([] if wrong is None else [wrong], measured.source)
        overhead = None if run.framework.step_time is not None else overhead
    fit = _Fit(run, used, overhead, simulated, watch)
    made = fit.fit(targets, _empty(run, measured, used))
    return Calibrated(made, [*notes, *fit.notes, *_doubts(made)])


def refuse(found: Sequence[Disagreement], source: str) -> None:
    """Raise `ValueError` where a run file disagrees with what was measured."""
    if not found:
        return
    told = "; ".join(f"{each.key}: {each.text}" for each in found)
    raise ValueError(f"the run file is not of {source}, and a factor would hide it: {told}")


def _choose(measured: MeasuredSteps, held_out: float) -> _Used:
    steps = list(measured.steps)
    if len(steps) >= FOR_HOLDING_OUT:
        steps = steps[1:]
    steps = steps[-MOST_STEPS:]
    num = round(held_out * len(steps)) if len(steps) >= FOR_HOLDING_OUT - 1 else 0
    return _Used(max(1, len(steps) - num), steps)


def _mean_step(used: _Used) -> float:
    times = [step.step_time for step in used.steps if step.step_time is not None]
    return fmean(times) if times else 0.0


def _overhead(run: Run, used: _Used) -> StepOverhead | None:
    """Return the seconds of a step that are of no stage, where stages do not overlap and all were measured."""
    waits = [step.wait if not takes_turns(run) else step.generation for step in used.steps]
    if takes_turns(run) and overlaps(run):
        return None
    rest = [
        step.step_time - first - (step.score or 0.0) - step.train - (step.sync or 0.0)
        for step, first in zip(used.steps[: used.fitted], waits, strict=False)
        if first is not None and step.step_time is not None and step.train is not None
    ]
    if not rest:
        return None
    found = interval_of_median(rest)
    interval = None if found is None else (max(0.0, found[0]), max(0.0, found[1]))
    return StepOverhead(seconds=max(0.0, median(rest)), interval=interval)


class _Fit:
    """Factors that grow from 1 until simulated steps take what was measured."""

    def __init__(
        self,
        run: Run,
        used: _Used,
        overhead: StepOverhead | None,
        simulated: Simulator,
        watch: Callable[[str], None],
    ) -> None:
        self._run, self._used, self._overhead = run, used, overhead
        self._simulated, self._watch = simulated, watch
        self._factors: dict[StageName, float] = {}
        self.notes: list[str] = []

    def fit(self, targets: Sequence[Target], empty: Calibration) -> Calibration:
        """Return the calibration that brings the targets together, as far as any factor does."""
        self._factors = {stage: 1.0 for target in targets for stage in target.stages}
        self._watch("without a calibration")
        before = made = self._simulated(self._run, self._used.steps)
        self._refuse_other_units(targets, before, empty.source)
        for number in range(1, ROUNDS + 1):
            change = self._adjust(targets, made)
            self._watch(f"round {number}")
            made = self._simulate(self._filled(targets, empty, made))
            if change < ENOUGH:
                break
        met = [target for target in targets if self._is_met(target, made)]
        if len(met) < len(targets):
            self._drop([target for target in targets if target not in met])
            made = self._simulate(self._filled(met, empty, made))
        return self._with_errors(self._filled(met, empty, made), met, before, made)

    def _refuse_other_units(
        self, targets: Sequence[Target], made: SimulatedSteps, source: str
    ) -> None:
        """Raise `ValueError` where every stage was measured to take hundreds of times what it is simulated to."""
        found = [pairs for target in targets if (pairs := self._fitted(target, made)) is not None]
        slower = min((1 / pairs.ratio for pairs in found), default=0.0)
        if slower > IN_OTHER_UNITS:
            raise ValueError(
                f"{source}: every stage took {slower:,.0f} times as long as the run file is simulated to: "
                "are its seconds milliseconds?"
            )

    def _simulate(self, calibration: Calibration) -> SimulatedSteps:
        with TemporaryDirectory() as directory:
            path = Path(directory) / "calibration.toml"
            path.write_text(write_calibration(calibration), encoding="utf-8")
            costs = replace(self._run.costs, calibration=str(path))
            return self._simulated(replace(self._run, costs=costs), self._used.steps)

    def _adjust(self, targets: Sequence[Target], made: SimulatedSteps) -> float:
        """Let each factor grow by what its seconds are predicted too long; return the largest change."""
        changes = [0.0]
        for target in targets:
            if (pairs := self._fitted(target, made)) is not None:
                changes.append(abs(pairs.ratio - 1))
                for stage in target.stages:
                    self._factors[stage] *= pairs.ratio
        return max(changes)

    def _is_met(self, target: Target, made: SimulatedSteps) -> bool:
        """Return whether a factor brought both sides together: not where its stages bound nothing."""
        pairs = self._fitted(target, made)
        return pairs is not None and abs(pairs.ratio - 1) < MET

    def _drop(self, missed: Sequence[Target]) -> None:
        for target in missed:
            for stage in target.stages:
                del self._factors[stage]
                self.notes.append(f"{stage}: no factor brings its seconds to what was measured")

    def _fitted(self, target: Target, made: SimulatedSteps) -> StepPairs | None:
        return self._pairs(target, made, slice(None, self._used.fitted))

    def _pairs(self, target: Target, made: SimulatedSteps, which: slice) -> StepPairs | None:
        beside = made.overhead if self._overhead is None else self._overhead.seconds
        overheads = (made.overhead, beside) if target.has_overhead else (0.0, 0.0)
        ours, theirs = made.steps[which], self._used.steps[which]
        return pair(target.read, ours, theirs, target.fixed, overheads)

    def _filled(
        self, targets: Sequence[Target], empty: Calibration, made: SimulatedSteps
    ) -> Calibration:
        """Return the calibration with the factors as they are now."""
        factors: dict[str, StageFactor] = {}
        for target in targets:
            pairs = self._fitted(target, made)
            for stage in target.stages:
                factor = self._factors[stage]
                interval = None if pairs is None else pairs.interval(factor)
                factors[stage] = StageFactor(
                    gpu=gpu_of(self._run, stage), factor=factor, interval=interval
                )
        return replace(empty, overhead=self._overhead, **factors)

    def _with_errors(
        self,
        calibration: Calibration,
        targets: Sequence[Target],
        before: SimulatedSteps,
        after: SimulatedSteps,
    ) -> Calibration:
        errors: dict[str, StageFactor] = {}
        for target in targets:
            for stage in target.stages:
                found = calibration.stage(stage)
                assert found is not None, "every target that is met has its factors"
                errors[stage] = replace(found, errors=self._errors(target, before, after))
        return replace(calibration, **errors, step=self._errors(WHOLE_STEP, before, after))

    def _errors(self, target: Target, before: SimulatedSteps, after: SimulatedSteps) -> StageErrors:
        fitted, rest = slice(None, self._used.fitted), slice(self._used.fitted, None)
        found = [
            self._pairs(target, made, which)
            for made, which in ((before, fitted), (after, fitted), (after, rest))
        ]
        return StageErrors(
            **{
                name: pairs.error
                for name, pairs in zip(("before", "after", "held_out"), found, strict=True)
                if pairs is not None
            }
        )


def gpu_of(run: Run, stage: StageName) -> str:
    """Return the GPU that a stage runs on; of a sync that of the replicas."""
    side = run.trainer if stage in ("score", "train") else run.rollout
    return run.cluster.pools[side.pool].gpu


def _empty(run: Run, measured: MeasuredSteps, used: _Used) -> Calibration:
    numbers = [step.step for step in used.steps]
    rest = numbers[used.fitted :]
    return Calibration(
        source=measured.source,
        date=datetime.datetime.now(datetime.UTC).date(),
        model=load_model(run.model).name,
        system=run.policies.system,
        profile=profile_digest(run),
        fitted_steps=(numbers[0], numbers[used.fitted - 1]),
        held_out_steps=(rest[0], rest[-1]) if rest else None,
    )


def _doubts(made: Calibration) -> Iterator[str]:
    """Yield what makes a factor doubtful."""
    for stage in STAGES:
        found = made.stage(stage)
        if found is None:
            continue
        least, most = UNLIKELY
        if not least <= found.factor <= most:
            yield (
                f"{stage}: {found.factor:.3g} of the profiles' speed is more than hardware and frameworks differ by: "
                f"look for a key of the run file that is of something else ({SUSPECTS[stage]})"
            )
        if found.errors.after is not None and found.errors.after > LARGE:
            yield f"{stage}: one factor leaves its steps off by {found.errors.after:.0%}: something else differs between them"
    if made.step.after is not None and made.step.after > LARGE:
        yield (
            f"whole steps are off by {made.step.after:.0%} after all factors: stages follow each other otherwise than the "
            "run file says (policies.system, policies.max_staleness, algorithm.dynamic_sampling, framework.step_time)"
        )
