"""Compare the measured stages of a step with the predicted ones, and rank the changes worth most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from streamrl.hardware.step_errors import STAGES
from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps
from streamrl.record.assumed import assumed_of_hardware
from streamrl.record.band import Band, CostFacts, basis_of, model_error_of
from streamrl.record.charges import PaidGpus
from streamrl.runfile.config import Run
from streamrl.runfile.errors import shown
from streamrl.runfile.files import change_run, values_by_key
from streamrl.sim.calibration.disagreement import Disagreement, find_disagreements, takes_turns
from streamrl.sim.calibration.simulated_steps import simulate_steps
from streamrl.sim.costs.costs import Costs
from streamrl.sim.diagnosis.changes import CHANGES, Change, Sections, Settings
from streamrl.sim.diagnosis.result import Advice, Diagnosis, Stage, Verdict

SPREAD = 1.5
"""Ratio of measured to predicted seconds within which a stage is normal, beyond its model error. A choice: two of ten
published stages are outside of their model error, and few of them were run badly.
"""
SMALL = 0.1
"""Largest share of a step that a stage may waste and still not be the problem."""
IMPOSSIBLE = 0.25
"""Ratio of measured seconds to the lower end of a stage's normal range. Seconds below it are of other work. A choice."""
MOST_ADVICE = 3
"""Number of changes that are named."""
LEAST_GAIN = 0.01
"""Smallest gain that is worth a line, as a share of the step."""
LEAST_EFFECT = 0.05
"""Share by which a change must shorten a stage for its key to be doubtful."""
LENGTHS_KEY = "workload.lengths"
PROMPTS_KEY = "workload.lengths.prompt_tokens"
SKIPPED = 4
"""Number of steps from which on the first one is left out, because it compiles and warms up."""
SUSPECTS: dict[str, str] = {
    "generation": "the engine's concurrency (rollout.max_running) and memory share (rollout.memory_utilization), then "
    "CUDA graphs (eager mode) and the tensor parallelism of rollouts",
    "score": "packing (trainer.packing), tokens in a pass (trainer.max_tokens_per_pass) and offload",
    "train": "packing (trainer.packing), tokens in a pass (trainer.max_tokens_per_pass), kernels and offload",
    "sync": "the transport (sync.backend) and how models are moved between host and GPU memory",
}
"""What to look at first where a stage is slow."""


def mean_step(measured: MeasuredSteps) -> MeasuredStep:
    """Return the means of measured steps. With four steps or more, the first is left out."""
    steps = measured.steps[1:] if len(measured.steps) >= SKIPPED else measured.steps
    kept = msgspec.structs.replace(measured, steps=steps)
    columns = MeasuredStep.__struct_fields__[1:]
    means = {name: mean for name in columns if (mean := kept.mean(name)) is not None}
    return MeasuredStep(step=1, **means)


def diagnose(
    run: Run,
    measured: MeasuredSteps,
    watch: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Compare measured steps with the prediction of their run file, and try changes.

    Args:
        run: the run file of the measured steps.
        measured: the steps.
        watch: receives a text about the current simulation.

    Raises:
        ValueError: no step has seconds, the steps are of other work than the run file, or it does not fit its GPUs.
    """
    step = mean_step(measured)
    if not step.has_seconds:
        raise ValueError(f"{measured.source} has no seconds to judge; give --stage step=SECONDS")
    before, prompts = find_disagreements(run, measured), measured.mean("prompt_tokens")
    if prompts and any(each.key == PROMPTS_KEY for each in before):
        run = change_run(run, {PROMPTS_KEY: max(1, round(prompts))})
    found = find_disagreements(run, measured)
    _refuse_other_work(found, measured.source)
    watch("run file as it is")
    predicted = simulate_steps(run, [step.lengths]).steps[0]
    stages = list(_stages(predicted, step, Costs.load(run).facts))
    whole = _whole(predicted, step, stages)
    has_stages = any(stage.measured is not None for stage in stages)
    slow = [each for each in stages if each.verdict == "slow"]
    total = whole.measured or whole.predicted
    tried = list(_Trials(run, step, predicted, stages, total).best_of_each(watch))
    return Diagnosis(
        source=measured.source,
        step=whole,
        stages=stages,
        binds=max(stages, key=lambda each: each.seconds).name,
        is_normal=whole.verdict in ("normal", "unknown")
        and not _matter(slow, total)
        and not any(each.is_of_other_work for each in stages),
        has_stages=has_stages,
        causes=list(_causes(stages, whole, total, has_stages)),
        advice=_advice(tried, total),
        doubtful=list(_doubtful(values_by_key(run), tried, stages)),
        not_the_problem=list(_innocent(stages, total)),
        assumed=assumed_of_hardware(run.cluster, PaidGpus.of(run).used),
        notes=[*measured.notes, *_prompt_notes(before, found), *_notes(stages, whole, has_stages)],
    )


def _prompt_notes(before: list[Disagreement], after: list[Disagreement]) -> list[str]:
    """Say which tokens of a prompt are simulated if the run file's are not those that were measured.

    Args:
        before: differences of the run file as it is.
        after: differences with the measured tokens in `workload.lengths.prompt_tokens`.
    """
    has_own = any(each.key == PROMPTS_KEY for each in after)
    which = "run file's, which its source has," if has_own else "measured"
    return [
        f"{each.key}: {each.text}. The {which} tokens are simulated"
        for each in before
        if each.key == PROMPTS_KEY
    ]


def _refuse_other_work(found: list[Disagreement], source: str) -> None:
    """Raise `ValueError` if steps are of other work. Mean lengths may differ: the measured ones are simulated."""
    lengths = (LENGTHS_KEY, PROMPTS_KEY)
    texts = [f"{each.key}: {each.text}" for each in found if each.key not in lengths]
    if texts:
        raise ValueError(f"{source} is of other work than the run file. {'; '.join(texts)}")


def _matter(slow: list[Stage], total: float) -> bool:
    return any((stage.waste or 0.0) > SMALL * total for stage in slow)


def _stages(predicted: MeasuredStep, measured: MeasuredStep, facts: CostFacts) -> Iterator[Stage]:
    for name in STAGES:
        seconds, theirs = getattr(predicted, name), getattr(measured, name)
        if seconds is None:
            continue
        error = model_error_of(basis_of({name: 1.0}, {}, facts))
        band = Band(low=seconds * error.low / SPREAD, high=seconds * error.high * SPREAD)
        yield _judged(name, seconds, band, theirs)


def _judged(name: str, predicted: float, band: Band, measured: float | None) -> Stage:
    verdict: Verdict = "unknown"
    if measured is not None:
        verdict = "slow" if measured > band.high else "fast" if measured < band.low else "normal"
    return Stage(
        name=name,
        predicted=predicted,
        band=band,
        measured=measured,
        verdict=verdict,
        waste=None if measured is None else max(0.0, measured - band.high),
        is_of_other_work=measured is not None and measured < IMPOSSIBLE * band.low,
    )


def _whole(predicted: MeasuredStep, measured: MeasuredStep, stages: list[Stage]) -> Stage:
    """Return the whole step. Without its own seconds it is the sum of all stages, if all were measured."""
    assert predicted.step_time is not None, "a simulated step has a time"
    seconds, theirs = predicted.step_time, measured.step_time
    known = [each.measured for each in stages if each.measured is not None]
    if theirs is None and len(known) == len(stages):
        theirs = sum(known)
    inside = sum(each.predicted for each in stages)
    low = seconds * sum(each.band.low for each in stages) / inside
    high = seconds * sum(each.band.high for each in stages) / inside
    return _judged("step", seconds, Band(low=low, high=high), theirs)


def _causes(stages: list[Stage], whole: Stage, total: float, has_stages: bool) -> Iterator[str]:
    """Yield where seconds are lost for a reason that the simulation does not show."""
    for stage in stages:
        if stage.verdict == "slow" and _matter([stage], total):
            yield f"{stage.name} is {_times(stage)} slower than predicted: look at {SUSPECTS[stage.name]}"
    if not has_stages and whole.verdict == "slow":
        first = max(stages, key=lambda each: each.predicted)
        yield (
            f"a step is {_times(whole)} slower than predicted, and {first.name} is its longest stage by prediction: "
            f"look at {SUSPECTS[first.name]}"
        )


def _times(stage: Stage) -> str:
    assert stage.measured is not None, "it is slow"
    return f"{stage.measured / stage.predicted:.2g} times"


class _Tried(NamedTuple):
    """The best settings of one change."""

    change: Change
    settings: Settings
    seconds: float
    """Seconds by which a step becomes shorter."""
    effect: float
    """Largest share by which one of its stages becomes shorter, by prediction."""


@dataclass(frozen=True)
class _Trials:
    """Simulates changes of a run file."""

    run: Run
    step: MeasuredStep
    predicted: MeasuredStep
    stages: list[Stage]
    total: float
    """Seconds of a step: measured if known."""

    def best_of_each(self, watch: Callable[[str], None]) -> Iterator[_Tried]:
        """Yield the best settings of each change that can be simulated."""
        now = Sections(self.run.rollout, self.run.trainer, self.run.policies)
        for change in CHANGES:
            watch(change.what)
            found = [self._try(change, settings) for settings in change.propose(now)]
            if known := [each for each in found if each is not None]:
                yield max(known, key=lambda each: each.seconds)

    def _try(self, change: Change, settings: Settings) -> _Tried | None:
        """Return the effect of settings; None if they do not fit in memory, or degrees do not divide."""
        try:
            changed = change_run(self.run, settings)
            after = simulate_steps(changed, [self.step.lengths]).steps[0]
        except (ValueError, RuntimeError):
            return None
        if takes_turns(self.run.policies) and takes_turns(changed.policies):
            seconds = _gain(self.stages, after)
        else:
            assert self.predicted.step_time and after.step_time, "simulated steps have a time"
            seconds = self.total * (1 - after.step_time / self.predicted.step_time)
        return _Tried(change, settings, seconds, _effect(change, self.stages, after))


def _effect(change: Change, stages: list[Stage], after: MeasuredStep) -> float:
    own = [stage for stage in stages if stage.name in change.stages]
    return max((1 - (getattr(after, s.name) or 0.0) / s.predicted for s in own), default=0.0)


def _advice(tried: list[_Tried], total: float) -> list[Advice]:
    """Return the changes worth most."""
    best = sorted(tried, key=lambda each: -each.seconds)[:MOST_ADVICE]
    return [
        Advice(
            what=each.change.what,
            settings=each.settings,
            seconds=each.seconds,
            share=each.seconds / total,
        )
        for each in best
        if each.seconds > LEAST_GAIN * total
    ]


def _doubtful(
    values: Mapping[str, object], tried: list[_Tried], stages: list[Stage]
) -> Iterator[str]:
    """Yield settings that are not usual where they matter: in a slow stage, or by prediction."""
    slow = [each.name for each in stages if each.verdict == "slow"]
    for each in tried:
        key = each.change.key
        worse = [name for name in each.change.stages if name in slow]
        text = f"{key} is {shown(values.get(key))}"
        if each.effect >= LEAST_EFFECT and each.seconds > 0:
            better = shown(each.settings[key])
            names = " or ".join(each.change.stages)
            yield f"{text}: with {better}, {names} is {each.effect:.0%} shorter by prediction"
        elif worse:
            verb = "are" if len(worse) > 1 else "is"
            yield f"{text} while {' and '.join(worse)} {verb} slow: a framework may lose more by it than predicted"


def _gain(stages: list[Stage], after: MeasuredStep) -> float:
    """Return the seconds that stages lose together. A slow stage counts only up to the end of its band.

    The rest of it has another cause, which the simulation does not know.
    """
    gain = 0.0
    for stage in stages:
        seconds = getattr(after, stage.name) or 0.0
        base = stage.predicted if stage.measured is None else min(stage.measured, stage.band.high)
        gain += base * (1 - seconds / stage.predicted)
    return gain


def _innocent(stages: list[Stage], total: float) -> Iterator[str]:
    """Yield the measured stages that waste too little to be the problem."""
    for stage in stages:
        if stage.measured is None or (stage.waste or 0.0) > SMALL * total:
            continue
        share = stage.measured / total
        if stage.verdict == "slow":
            assert stage.waste is not None, "it was measured"
            yield (
                f"{stage.name}: slower than predicted, but making it normal saves at most "
                f"{stage.waste:.3g} s ({stage.waste / total:.0%} of a step)"
            )
        else:
            yield f"{stage.name}: {stage.verdict} at {stage.measured:.3g} s ({share:.0%} of a step)"


def _notes(stages: list[Stage], whole: Stage, has_stages: bool) -> Iterator[str]:
    if not has_stages:
        yield (
            "no stage was measured, so only the whole step is judged, and the stages are predictions; "
            "give --stage generation=SECONDS and others to learn which one is slow"
        )
    if whole.measured is None:
        yield "the whole step was not measured, so shares are of the predicted step"
    if fast := [stage.name for stage in stages if stage.verdict == "fast"]:
        yield (
            f"{', '.join(fast)}: faster than the hardware should allow; the run file may describe more work "
            "than the log (rollouts, lengths, passes)"
        )
