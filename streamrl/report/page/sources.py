"""Read the directories of a report: traces, plans, studies, comparisons of runs, or several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.engine.trace import Trace, read_trace
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.record.evaluation import EvaluationResult, read_evaluations
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
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.paths import paths_of
from streamrl.sim.planner.plan import PLAN_JSON, PLAN_TOML, Plan, digest_of_file, read_plan

REPORTED = (TRACE, PLAN_JSON, STUDY_CSV, AGAINST_JSON)


class Learned(NamedTuple):
    """The record of a trainer's steps in an executed run."""

    who: str
    """The run's name for the primary trainer; its own name for a secondary trainer."""
    steps: Sequence[Line]
    """Figures of each step that was kept; see `streamrl.executor.trainer.step_record`."""
    samples: Sequence[SampledGroup]
    """Rollouts for the first, a middle and the last step of the primary trainer."""


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
    """Of an executed run: each trainer that has finished a step, the primary one first."""
    evaluations: Sequence[EvaluationResult] = ()
    """Of an executed run: its evaluations on held-out prompts, in order of their steps."""

    @property
    def run(self) -> Run:
        """Return the recorded run file."""
        return self.trace.run

    @property
    def is_under_way(self) -> bool:
        """Return whether it has finished steps but no recorded end: it is running, or was killed."""
        is_left = 0 < self.newest_step < self.run.algorithm.steps
        return is_left and not self.metrics.unfinished

    @property
    def newest_step(self) -> int:
        """Return the last executed step; 0 for a simulated run."""
        return int(self.learned[0].steps[-1]["step"]) if self.learned else 0


@dataclass(frozen=True, kw_only=True)
class PlanMade:
    """The result of `streamrl plan`."""

    name: str
    path: Path
    plan: Plan
    run: Run
    """The run file with the allocation filled in."""
    model: ModelShape
    inputs: Mapping[str, str]
    """As for a recorded run."""
    is_edited: bool = False
    """Whether plan.toml is another file than the one that was planned."""


class RecordedComparison(NamedTuple):
    """A comparison of two runs."""

    name: str
    found: AgainstFile


@dataclass(frozen=True)
class Sources:
    """All data of a report, in the order of its directories."""

    runs: list[RecordedRun]
    plans: list[PlanMade]
    studies: list[RecordedStudy]
    comparisons: list[RecordedComparison]


def read_sources(directories: Sequence[Path]) -> Sources:
    """Read every directory.

    Raises:
        ValueError: a directory is missing, named twice or empty, or a file in it cannot be read.
    """
    sources = Sources([], [], [], [])
    for directory, name in zip(directories, _names(directories), strict=True):
        _read_directory(directory, name, sources)
    return sources


def _names(directories: Sequence[Path]) -> list[str]:
    """Return a name for each directory: as many of its last parts as make it unique."""
    resolved = [directory.resolve() for directory in directories]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise ValueError(f"{directories[index]} is named twice; name each directory once")
    most = max((len(path.parts) for path in resolved), default=1)
    for count in range(1, most + 1):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]


def check_directory(directory: Path) -> None:
    """Raise `ValueError` if there is no such directory."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")


def _read_directory(directory: Path, name: str, sources: Sources) -> None:
    check_directory(directory)
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
    run, directory, plan = load_run(path.parent / PLAN_TOML), path.parent, read_plan(path)
    return PlanMade(
        name=name,
        path=path,
        plan=plan,
        run=run,
        model=_load_kept_model(with_kept_inputs(run, directory).model, run.model.path),
        inputs=kept_names(paths_of(run), directory),
        is_edited=plan.run_file not in ("", digest_of_file(directory / PLAN_TOML)),
    )


def _read_run(path: Path, name: str) -> RecordedRun:
    trace, directory = read_trace(path), path.parent
    run, metrics = trace.run, measure(trace)
    return RecordedRun(
        name=name,
        path=path,
        trace=trace,
        metrics=metrics,
        model=_load_kept_model(with_kept_inputs(run, directory).model, run.model.path),
        inputs=kept_names(paths_of(run), directory),
        learned=list(_read_learned(trace, directory, name)),
        evaluations=read_evaluations(directory) if trace.world == "real" else (),
    )


def _read_learned(trace: Trace, directory: Path, name: str) -> Iterator[Learned]:
    """Yield the records of all trainers of an executed run, if the primary trainer has finished a step."""
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


def _load_kept_model(model: ModelConfig, origin: str | None) -> ModelShape:
    """Load the shape of a model; the result names the directory that it came from, not its local path."""
    shape = load_model(model)
    return shape if origin is None else replace(shape, source=str(Path(origin, CONFIG)))
