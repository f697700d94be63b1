"""Read what the directories of a report hold: a trace, a plan, a study, a run set against another, or several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamrl.engine.trace import Trace, read_trace
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.record.metrics import Metrics, measure
from streamrl.record.run_directory import (
    CONFIG,
    METRICS,
    SAMPLES,
    TRACE,
    Line,
    kept_names,
    read_metrics,
    secondary_trainer_directory,
    with_kept_inputs,
)
from streamrl.record.samples import SampledGroup, read_completions
from streamrl.report.against_report import AGAINST_JSON, AgainstFile, read_comparison
from streamrl.report.study_report import STUDY_CSV, RecordedStudy, read_study
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.planner.plan import PLAN_JSON, PLAN_TOML, Plan, read_plan

REPORTED = (TRACE, PLAN_JSON, STUDY_CSV, AGAINST_JSON)


class Learned(NamedTuple):
    """What a trainer of an executed run left of its steps."""

    who: str
    """The run's name of the trainer that leads, its own of one that follows."""
    steps: Sequence[Line]
    """The figures of each step that stayed; see `streamrl.executor.trainer.step_record`."""
    samples: Sequence[SampledGroup]
    """What was generated for the first, a middle and the last step of the one that leads."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A simulated or executed run."""

    name: str
    path: Path
    trace: Trace
    metrics: Metrics
    model: ModelShape
    inputs: Mapping[str, str]
    """Names of the files that it was read from, by key of the run file; see `streamrl.record.run_directory`."""
    learned: Sequence[Learned] = ()
    """Of an executed run: by trainer that has made a step, the one that leads first."""

    @property
    def run(self) -> Run:
        """The run file, as it was recorded."""
        return self.trace.run

    @property
    def is_under_way(self) -> bool:
        """Whether some of its steps are made, and nothing says that it came to an end: it goes on, or was killed."""
        is_left = 0 < self.newest_step < self.run.algorithm.steps
        return is_left and not self.metrics.unfinished

    @property
    def newest_step(self) -> int:
        """The last step that was executed; 0 of a simulated run."""
        return int(self.learned[0].steps[-1]["step"]) if self.learned else 0


@dataclass(frozen=True, kw_only=True)
class PlanMade:
    """What `streamrl plan` chose."""

    name: str
    path: Path
    plan: Plan
    run: Run
    """The run file with the allocation filled in."""
    model: ModelShape
    inputs: Mapping[str, str]
    """As of a recorded run."""


class RecordedComparison(NamedTuple):
    """A run that was set against another."""

    name: str
    found: AgainstFile


@dataclass(frozen=True)
class Sources:
    """Everything that a report is about, in the order of its directories."""

    runs: list[RecordedRun]
    plans: list[PlanMade]
    studies: list[RecordedStudy]
    comparisons: list[RecordedComparison]


def read_sources(directories: Sequence[Path]) -> Sources:
    """Read every directory.

    Raises:
        ValueError: a directory is missing or named twice, holds nothing that can be reported, or a file in it cannot be read.
    """
    sources = Sources([], [], [], [])
    for directory, name in zip(directories, _names(directories), strict=True):
        _read_directory(directory, name, sources)
    return sources


def _names(directories: Sequence[Path]) -> list[str]:
    """Name each directory by as many of its last parts as tell it from the others."""
    resolved = [directory.resolve() for directory in directories]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise ValueError(f"{directories[index]} is named twice")
    most = max((len(path.parts) for path in resolved), default=1)
    for count in range(1, most + 1):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]


def _read_directory(directory: Path, name: str, sources: Sources) -> None:
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory")
    trace, plan, study, against = (directory / file for file in REPORTED)
    if not any(path.exists() for path in (trace, plan, study, against)):
        raise ValueError(f"{directory} holds nothing to report: neither {' nor '.join(REPORTED)}")
    if plan.exists():
        sources.plans.append(_read_plan(plan, name))
    if trace.exists():
        sources.runs.append(_read_run(trace, name))
    if study.exists():
        sources.studies.append(read_study(study, name))
    if against.exists():
        sources.comparisons.append(RecordedComparison(name, read_comparison(against)))


def _read_plan(path: Path, name: str) -> PlanMade:
    run, directory = load_run(path.parent / PLAN_TOML), path.parent
    return PlanMade(
        name=name,
        path=path,
        plan=read_plan(path),
        run=run,
        model=_model_of(run, directory),
        inputs=kept_names(run, directory),
    )


def _read_run(path: Path, name: str) -> RecordedRun:
    trace = read_trace(path)
    metrics = measure(trace)
    return RecordedRun(
        name=name,
        path=path,
        trace=trace,
        metrics=metrics,
        model=_model_of(trace.run, path.parent),
        inputs=kept_names(trace.run, path.parent),
        learned=list(_read_learned(trace, path.parent, name)),
    )


def _read_learned(trace: Trace, directory: Path, name: str) -> Iterator[Learned]:
    """Yield what the trainers of an executed run left beside its trace, where the one that leads has made a step."""
    if trace.world != "real" or not (directory / METRICS).exists():
        return
    steps = read_metrics(directory)
    if not steps:
        return
    yield Learned(name, steps, _read_samples(directory))
    for number, follower in enumerate(trace.run.secondary_trainer_names, start=1):
        own = secondary_trainer_directory(directory, number, follower)
        if (own / METRICS).exists() and (steps := read_metrics(own)):
            yield Learned(follower, steps, ())


def _read_samples(directory: Path) -> Sequence[SampledGroup]:
    if not (directory / SAMPLES).exists():
        return ()
    groups = read_completions(directory)
    shown = sorted({0, len(groups) // 2, len(groups) - 1}) if groups else []
    return [groups[place] for place in shown]


def _model_of(run: Run, directory: Path) -> ModelShape:
    """Load the shape of the model, which says where it came from, not where it is kept."""
    model = load_model(with_kept_inputs(run, directory).model)
    if run.model.path is None:
        return model
    return msgspec.structs.replace(model, source=str(Path(run.model.path, CONFIG)))
