"""Fit a factor per stage, and the seconds per step outside all stages, to measured or recorded steps.

    run file + measured steps ─► disagreements? ─► simulate the same steps ─► factors ─► simulate again … ─► calibration

Overlapping stages depend on each other, so factors are fitted, applied and fitted again until they
are stable. Steps that are held out show how well the factors hold.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace
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
from streamrl.hardware.cost_model import cost_model_digest
from streamrl.hardware.profiles import load_model
from streamrl.logs.measured_steps import (
    MeasuredStep,
    MeasuredSteps,
    StepLengths,
    read_run_steps,
)
from streamrl.record.recorded_inputs import recorded_inputs
from streamrl.record.recorded_workload import informative_share
from streamrl.record.restarts import earlier_trace_path
from streamrl.record.steady_state import read_steps
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.formatting import listing
from streamrl.runfile.policies_config import PoliciesConfig, SystemName
from streamrl.runfile.recorded_numbers import LEAST_FACTOR, MOST_FACTOR
from streamrl.sim.calibration.disagreement import (
    LENGTHS,
    Disagreement,
    check_overhead,
    find_differences,
    find_disagreements,
    mean_tokens,
    takes_turns,
)
from streamrl.sim.calibration.simulated_steps import (
    SimulatedSteps,
    simulate_steps,
    without_failures,
)
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.steady_state import UnfinishedError
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload

BOUND_BY_GENERATION = 0.05
"""Least share of a step spent waiting. Above it, step times show the speed of generation."""
OUTSIDE = 0.05
"""Probability that a factor is outside its interval."""

OF_GENERATION = ("generation", "busy", "rollout_time")
"""Columns that show the speed of generation, best first. `rollout_time` is last, because the duration
of one rollout does not show how many run at once.
"""

Reader = Callable[[MeasuredStep], float | None]


class Target(NamedTuple):
    """Seconds that are both measured and simulated, and the stages whose factor makes them equal."""

    stages: tuple[StageName, ...]
    read: Reader
    fixed: Reader
    """Seconds of other stages. They are subtracted on both sides."""
    has_overhead: bool = False
    """Whether `read` includes the seconds per step outside all stages. They are then subtracted on
    both sides.
    """


def find_targets(
    policies: PoliciesConfig, needs_score: bool, measured: MeasuredSteps, notes: list[str]
) -> list[Target]:
    """Return the targets that factors can be fitted to.

    Args:
        policies: the section of the run file.
        needs_score: whether rollouts are scored before training.
        measured: the steps.
        notes: gets a line for each stage whose seconds are unknown.
    """
    columns = _own_columns(needs_score, measured)
    found = [Target((stage,), _column(name), no_seconds) for stage, name in columns.items()]
    passes: tuple[StageName, ...] = ("score",) if needs_score else ()
    wanted: tuple[StageName, ...] = ("generation", *passes, "train")
    missing = tuple(stage for stage in wanted if stage not in columns)
    if not missing:
        return found
    if not measured.has("step_time"):
        notes.append(
            f"{listing(list(missing))}: unknown, because neither these seconds nor whole steps were measured"
        )
        return found
    return found + _of_whole_steps(policies, measured, missing, columns, notes)


def _own_columns(needs_score: bool, measured: MeasuredSteps) -> dict[StageName, str]:
    """Return the column with the seconds of each stage that was measured alone."""
    columns: dict[StageName, str] = {"sync": "sync", "score": "score", "train": "train"}
    known = (name for name in OF_GENERATION if measured.has(name))
    columns["generation"] = next(known, OF_GENERATION[-1])
    if not needs_score:
        del columns["score"]
    return {stage: column for stage, column in columns.items() if measured.has(column)}


def _of_whole_steps(
    policies: PoliciesConfig,
    measured: MeasuredSteps,
    missing: tuple[StageName, ...],
    columns: dict[StageName, str],
    notes: list[str],
) -> list[Target]:
    """Return whole steps as the target of the stages that were not measured alone; empty if impossible."""
    what = listing(list(missing))
    is_all = set(missing) >= {"generation", "train"}
    if is_all or missing == ("generation",):
        if not is_all and not takes_turns(policies) and not _waits(measured):
            notes.append(
                f"generation: unknown, because the trainer waits for it less than {BOUND_BY_GENERATION:.0%} of a step"
            )
            return []
    elif overlaps(policies) or columns.get("generation", "generation") != "generation":
        notes.append(
            f"{what}: unknown, because its seconds cannot be separated from those of generation"
        )
        return []
    one = "one factor for all, " if len(missing) > 1 else ""
    if overlaps(policies):
        notes.append(
            f"{what}: {one}fitted to whole steps, because waiting time is not decoding time"
        )
        return [Target(missing, step_seconds, no_seconds)]
    notes.append(f"{what}: {one}fitted to whole steps minus the stages that were measured")
    return [Target(missing, step_seconds, _sum_of(*columns.values()), has_overhead=True)]


def overlaps(policies: PoliciesConfig) -> bool:
    """Return whether training runs at the same time as generation."""
    return not takes_turns(policies) or choose_system(policies).streaming == "stream"


def _waits(measured: MeasuredSteps) -> bool:
    wait, step = measured.mean("wait"), measured.mean("step_time")
    return bool(wait and step and wait / step >= BOUND_BY_GENERATION)


def _column(name: str) -> Reader:
    def read(step: MeasuredStep) -> float | None:
        value: float | None = getattr(step, name)
        return value

    return read


def _sum_of(*names: str) -> Reader:
    def read(step: MeasuredStep) -> float | None:
        return sum(getattr(step, name) or 0.0 for name in names)

    return read


def no_seconds(step: MeasuredStep) -> float | None:
    """Return 0 seconds for every step."""
    return 0.0


def step_seconds(step: MeasuredStep) -> float | None:
    """Return the seconds of a whole step."""
    return step.step_time


class StepPairs(NamedTuple):
    """Predicted and measured seconds of the same steps."""

    predicted: list[float]
    measured: list[float]

    @property
    def ratios(self) -> list[float]:
        """Predicted over measured seconds of each step."""
        return [p / m for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def ratio(self) -> float:
        """Median ratio, which corrects a factor. It ignores stalled steps, which do not show a stage's speed."""
        return median(self.ratios)

    @property
    def error(self) -> float:
        """Median of the absolute relative errors."""
        return median(abs(ratio - 1) for ratio in self.ratios)

    def interval(self, factor: float) -> tuple[float, float] | None:
        """Return the 95 % interval of a factor, computed from the scatter of its steps; None for fewer than six."""
        found = interval_of_median(self.ratios)
        return None if found is None else (factor * found[0], factor * found[1])


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that contains the median with at least 95 % probability; None for fewer than six values.

    It holds for every distribution. The values of rank k from either end enclose the median, unless
    at most k - 1 values are on one side of it (binomial distribution).
    """
    num, rank, outside = len(values), 0, 0.0
    while rank < num // 2 and outside + 2 * comb(num, rank) / 2**num <= OUTSIDE:
        outside += 2 * comb(num, rank) / 2**num
        rank += 1
    if not rank:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def pair(
    read: Reader,
    predicted: Sequence[MeasuredStep],
    measured: Sequence[MeasuredStep],
    fixed: Reader = no_seconds,
    overheads: tuple[float, float] = (0.0, 0.0),
) -> StepPairs | None:
    """Return both sides of each step without fixed seconds and overhead; None if no step has both."""
    both = [
        (_less(read, fixed, ours, overheads[0]), _less(read, fixed, theirs, overheads[1]))
        for ours, theirs in zip(predicted, measured, strict=True)
    ]
    known = [(p, m) for p, m in both if p is not None and m is not None and min(p, m) > 0]
    if not known:
        return None
    return StepPairs([p for p, _ in known], [m for _, m in known])


def _less(read: Reader, fixed: Reader, step: MeasuredStep, overhead: float) -> float | None:
    value = read(step)
    return None if value is None else value - (fixed(step) or 0.0) - overhead


ROUNDS, ENOUGH = 8, 0.002
"""Limit on repeated fits, and the relative change of factors below which the fit is done."""
MOST_STEPS = 40
"""Limit on simulated steps. The last steps are used: lengths drift, and later simulations need
current speeds.
"""
HELD_OUT = 0.4
"""Share of the steps that is not used in the fit: the last ones."""
FOR_HOLDING_OUT = 4
"""Least number of steps for a held-out part. From this number on, the first step is skipped too,
because it compiles and has no earlier work.
"""
UNLIKELY = (0.25, 4.0)
"""Plausible range of factors. Outside it, a key of the run file is probably wrong."""
MET = 0.05
"""Largest accepted relative difference of simulated and measured seconds after the last round."""
SUSPECTS: dict[StageName, str] = {
    "generation": "rollout.replicas, rollout.tensor_parallel, rollout.max_running, costs.engine, "
    "algorithm.dynamic_sampling with workload.informative_share",
    "score": "trainer's degrees, algorithm.old_log_probs, algorithm.kl_coefficient",
    "train": "trainer's degrees, trainer.recompute, trainer.packing, framework.optimizer_steps",
    "sync": "sync.backend, sync.mode, links, framework.switch_time",
}
WHOLE_STEP = Target((), step_seconds, no_seconds)
IN_MILLISECONDS, IN_MINUTES = 200.0, 1 / 10
"""Ratios of measured to simulated seconds. If that of every stage is above the first, or below the second, the unit must
be wrong. Profiles are near the peak of a GPU, so not all stages are ten times as fast.
"""
LARGE = 0.15
"""Error of a stage after its fit. Above it, one factor does not explain the steps of the stage."""

Simulator = Callable[[Run, Sequence[StepLengths]], SimulatedSteps]


class Calibrated(NamedTuple):
    """A calibration and its notes."""

    calibration: Calibration
    notes: list[str]


class _Used(NamedTuple):
    """Which steps are fitted and which are held out."""

    fitted: int
    """Number of first steps that are fitted."""
    steps: list[MeasuredStep]


def calibrate_steps(
    run: Run,
    measured: MeasuredSteps,
    held_out: float = HELD_OUT,
    watch: Callable[[str], None] = lambda what: None,
) -> Calibrated:
    """Fit a calibration to measured steps.

    Args:
        run: the run file of the measured steps; its own calibration is ignored.
        measured: the steps.
        held_out: share of the steps, the last ones, that are not used in the fit.
        watch: receives a text about the current simulation.

    Raises:
        ValueError: the run file disagrees with the measured work (the message has each key), or
            nothing can be fitted.
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
    """Fit a calibration to steps whose work agrees with the run file; see `calibrate_steps`."""
    used = _choose(measured, held_out)
    notes = list(measured.notes)
    targets = find_targets(run.policies, run.algorithm.needs_score, measured, notes)
    if not targets:
        raise ValueError(
            f"{measured.source} has no seconds of a stage or a whole step; add a column such as step_time, generation or train"
        )
    overhead, stated = _overhead(run.policies, used), run.framework.step_time
    if overhead is not None:
        wrong = check_overhead(stated, overhead.seconds, _mean_step(used))
        refuse([] if wrong is None else [wrong], measured.source)
        overhead = None if stated is not None else overhead

    def simulate(calibration: str | None) -> SimulatedSteps:
        return simulated(
            replace(run, costs=replace(run.costs, calibration=calibration)),
            [step.lengths for step in used.steps],
        )

    generates_on, trains_on = (
        run.cluster.pools[side.pool].gpu for side in (run.rollout, run.trainer)
    )
    fit = _Fit(used, overhead, _gpus_by_stage(generates_on, trains_on), simulate, watch)
    empty = _empty(run.model, run.policies.system, run.costs.profile, measured.source, used)
    made = fit.fit(targets, empty)
    return Calibrated(made, [*notes, *fit.notes, *_doubts(made)])


def refuse(found: Sequence[Disagreement], source: str) -> None:
    """Raise `ValueError` if a run file disagrees with the measurements."""
    if not found:
        return
    keys = "; ".join(f"{each.key}: {each.text}" for each in found)
    raise ValueError(
        f"the run file does not describe {source}, and a factor would hide the difference: {keys}"
    )


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


def _overhead(policies: PoliciesConfig, used: _Used) -> StepOverhead | None:
    """Return the seconds per step outside all stages; None if stages overlap or some were not measured."""
    turns = takes_turns(policies)
    waits = [step.generation if turns else step.wait for step in used.steps]
    if turns and overlaps(policies):
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
    """Adjusts factors from 1 on until simulated steps take the measured seconds."""

    def __init__(
        self,
        used: _Used,
        overhead: StepOverhead | None,
        gpus: Mapping[StageName, str],
        simulate: Callable[[str | None], SimulatedSteps],
        watch: Callable[[str], None],
    ) -> None:
        """Store the steps and their simulation.

        Args:
            used: the measured steps.
            overhead: seconds per step outside all stages, if they are fitted.
            gpus: the GPU of each stage.
            simulate: simulates these steps, with the calibration file at a path or without one.
            watch: receives a text about the current simulation.
        """
        self._used, self._overhead, self._gpus = used, overhead, gpus
        self._simulate, self._watch = simulate, watch
        self._factors: dict[StageName, float] = {}
        self.notes: list[str] = []

    def fit(self, targets: Sequence[Target], empty: Calibration) -> Calibration:
        """Return the calibration whose simulation meets the most targets."""
        self._factors = {stage: 1.0 for target in targets for stage in target.stages}
        self._watch("without a calibration")
        before = made = self._simulate(None)
        self._refuse_other_units(targets, before, empty.source)
        for number in range(1, ROUNDS + 1):
            change = self._adjust(targets, made)
            self._refuse_extreme(empty.source)
            self._watch(f"round {number}")
            made = self._calibrated(self._filled(targets, empty, made))
            if change < ENOUGH:
                break
        met = [target for target in targets if self._is_met(target, made)]
        if len(met) < len(targets):
            self._drop([target for target in targets if target not in met])
            made = self._calibrated(self._filled(met, empty, made))
        return self._with_errors(self._filled(met, empty, made), met, before, made)

    def _refuse_other_units(
        self, targets: Sequence[Target], made: SimulatedSteps, source: str
    ) -> None:
        """Raise `ValueError` if the measured seconds of every stage are of another order than its simulated ones."""
        found = [self._fitted(target, made) for target in targets]
        longer = [1 / pairs.ratio for pairs in found if pairs is not None]
        if longer and min(longer) > IN_MILLISECONDS:
            ratio, unit, end = min(longer), "milliseconds", "ms"
        elif longer and max(longer) < IN_MINUTES:
            ratio, unit, end = max(longer), "minutes or hours", "min"
        else:
            return
        raise ValueError(
            f"{source}: every stage took {ratio:,.3g} times as long as in the simulation. The file may be in {unit}; "
            f"convert it to seconds, or let the names of its columns end with the unit, such as step_time_{end}"
        )

    def _calibrated(self, calibration: Calibration) -> SimulatedSteps:
        """Simulate the steps with a calibration."""
        with TemporaryDirectory() as directory:
            path = Path(directory) / "calibration.toml"
            path.write_text(write_calibration(calibration), encoding="utf-8")
            return self._simulate(str(path))

    def _adjust(self, targets: Sequence[Target], made: SimulatedSteps) -> float:
        """Divide each factor by its prediction error, and return the largest relative change."""
        changes = [0.0]
        for target in targets:
            if (pairs := self._fitted(target, made)) is not None:
                changes.append(abs(pairs.ratio - 1))
                for stage in target.stages:
                    self._factors[stage] *= pairs.ratio
        return max(changes)

    def _refuse_extreme(self, source: str) -> None:
        """Raise `ValueError` if a factor is one that no calibration may have."""
        for stage, factor in self._factors.items():
            if not LEAST_FACTOR <= factor <= MOST_FACTOR:
                raise ValueError(
                    f"{source}: {stage} took {1 / factor:.3g} times as long as in the simulation; check its unit, and "
                    f"these keys of the run file: {SUSPECTS[stage]}"
                )

    def _is_met(self, target: Target, made: SimulatedSteps) -> bool:
        """Return whether simulated and measured seconds agree. They cannot if the stages do not affect them."""
        pairs = self._fitted(target, made)
        return pairs is not None and abs(pairs.ratio - 1) < MET

    def _drop(self, missed: Sequence[Target]) -> None:
        for target in missed:
            for stage in target.stages:
                del self._factors[stage]
                self.notes.append(
                    f"{stage}: no factor makes its simulated seconds equal to the measured ones"
                )

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
        """Return the calibration with the current factors."""
        factors: dict[str, StageFactor] = {}
        for target in targets:
            pairs = self._fitted(target, made)
            for stage in target.stages:
                factor = self._factors[stage]
                interval = None if pairs is None else pairs.interval(factor)
                gpu = self._gpus[stage]
                factors[stage] = StageFactor(gpu=gpu, factor=factor, interval=interval)
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


def _gpus_by_stage(generates_on: str, trains_on: str) -> dict[StageName, str]:
    """Return the GPU of each stage. A sync has the GPU of the replicas."""
    return {stage: trains_on if stage in ("score", "train") else generates_on for stage in STAGES}


def _empty(
    model: ModelConfig, system: SystemName, profile: str | None, source: str, used: _Used
) -> Calibration:
    """Return a calibration without factors, which names the model, system and measured costs of a run."""
    numbers = [step.step for step in used.steps]
    rest = numbers[used.fitted :]
    return Calibration(
        source=source,
        date=datetime.datetime.now(datetime.UTC).date(),
        model=load_model(model).name,
        system=system,
        profile=profile_digest(profile),
        cost_model=cost_model_digest(),
        fitted_steps=(numbers[0], numbers[used.fitted - 1]),
        held_out_steps=(rest[0], rest[-1]) if rest else None,
    )


def _doubts(made: Calibration) -> Iterator[str]:
    """Yield the reasons to doubt a factor."""
    for stage in STAGES:
        found = made.stage(stage)
        if found is None:
            continue
        least, most = UNLIKELY
        if not least <= found.factor <= most:
            yield (
                f"{stage}: {found.factor:.3g} of the profiles' speed is outside the plausible range; "
                f"check these keys of the run file: {SUSPECTS[stage]}"
            )
        if found.errors.after is not None and found.errors.after > LARGE:
            yield f"{stage}: its steps still have an error of {found.errors.after:.0%} with one factor. Something else differs between them"
    if made.step.after is not None and made.step.after > LARGE:
        yield (
            f"whole steps still have an error of {made.step.after:.0%} with all factors. Stages may overlap differently from "
            "the run file (policies.system, policies.max_staleness, algorithm.dynamic_sampling, framework.step_time)"
        )


def measured_steps(trace: Trace, name: str) -> MeasuredSteps:
    """Return the steps of a recorded run, without those in which its trainer was restarted.

    Raises:
        ValueError: it has no such step that is finished.
    """
    beside = 0.0 if trace.world == "real" else Costs.load(trace.run).training.overhead_time
    steps = read_run_steps(trace, beside, takes_turns=takes_turns(trace.run.policies))
    left_out = _restarted_steps(trace, steps)
    if not trace.run.algorithm.computes_all:
        share = informative_share(trace)
        steps = [replace(step, informative_share=share) for step in steps]
    if not steps:
        without = " without a restart of its trainer" if left_out else ""
        raise ValueError(
            f"{name} has no finished step{without}; calibrate from a run with at least one"
        )
    return MeasuredSteps(
        source=f"{name} ({trace.world} run)",
        framework="streamrl",
        steps=tuple(steps),
        notes=(
            *_notes_on_starts(trace),
            *(f"step {n} is left out: the trainer was restarted in it" for n in left_out),
        ),
    )


def _notes_on_starts(trace: Trace) -> tuple[str, ...]:
    """Say which steps of a run that was resumed are missing."""
    if trace.leg == 1:
        return ()
    before = read_steps(trace).num_before
    file = earlier_trace_path(Path(), trace.leg - 1)
    return (
        f"start {trace.leg} of the run alone, after its step {before}: earlier steps are in {file}",
    )


def _restarted_steps(trace: Trace, steps: Sequence[MeasuredStep]) -> list[int]:
    """Return the finished steps that `steps` lacks, since the trainer was restarted in them."""
    made, known = read_steps(trace), {step.step for step in steps}
    return [n for n in range(made.num_before + 1, made.version + 1) if n not in known]


def calibrate_recorded(
    run: Run,
    trace: Trace,
    file: Path,
    held_out: float = HELD_OUT,
    watch: Callable[[str], None] = lambda what: None,
) -> Calibrated:
    """Fit a calibration to an executed run.

    Args:
        run: the run file; its own calibration is ignored.
        trace: the recorded run.
        file: its trace file, which has the lengths.
        held_out: share of the steps, the last ones, that are not used in the fit.
        watch: receives a text about the current simulation.

    Raises:
        ValueError: the run file of the recorded run differs (the message has each key), or nothing
            can be fitted.
    """
    measured = measured_steps(trace, str(file.parent if file.name == "trace.jsonl" else file))
    refuse(find_differences(run, trace.run), measured.source)
    theirs = measured.mean("output_tokens")
    if run.workload.lengths is not None and theirs is not None:
        ours, _ = mean_tokens(SimulatedWorkload(run))
        measured = replace(measured, notes=(*measured.notes, *_note_lengths(ours, theirs)))
    num_steps = len(measured.steps)
    workload = recorded_inputs(trace, file).workload

    def simulated(seen: Run, steps: Sequence[StepLengths]) -> SimulatedSteps:
        algorithm = replace(seen.algorithm, steps=num_steps)
        seen = without_failures(replace(seen, algorithm=algorithm, workload=workload))
        costs = Costs.load(seen)
        filled = fill_policies(seen, costs)
        made = SimWorld(filled, costs, SimulatedWorkload(seen)).run()
        overhead = costs.training.overhead_time
        found = read_run_steps(made, overhead, takes_turns=takes_turns(seen.policies))
        by_number = {step.step: step for step in found}
        if missing := [step.step for step in steps if step.step not in by_number]:
            raise UnfinishedError(f"stopped before step {missing[0]} of {num_steps}")
        return SimulatedSteps([by_number[step.step] for step in steps], overhead)

    def simulated_apart(seen: Run, steps: Sequence[StepLengths]) -> SimulatedSteps:
        return simulate_steps(replace(seen, workload=workload), steps)

    # after a roll-back, steps have other groups than the first ones of the workload
    follows = simulated_apart if _restarted_steps(trace, measured.steps) else simulated
    return calibrate_checked(run, measured, held_out, follows, watch)


def _note_lengths(ours: float, theirs: float) -> list[str]:
    """Compare the mean output tokens of a run file and of its recorded run."""
    if abs(theirs / ours - 1) <= LENGTHS:
        return []
    return [
        f"workload.lengths has a mean of {ours:.4g} output tokens, the recorded run {theirs:.4g}. The fit uses the recorded "
        "lengths; `streamrl import` makes a workload from them"
    ]
