"""`streamrl diagnose`: say whether a run that happened is normal for its hardware."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from streamrl.cli.init import (
    AlgorithmOption,
    Gpus,
    Group,
    Link,
    MaxTokens,
    MeanTokens,
    Model,
    Prompts,
    PromptTokens,
    check_alone,
)
from streamrl.cli.output import echo
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import (
    AsJson,
    Overrides,
    holds_run,
    open_trace,
    print_json,
    stdout_console,
    trace_file,
)
from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps
from streamrl.record.recorded_inputs import recorded_inputs
from streamrl.report.diagnosis_table import diagnosis_lines, diagnosis_table
from streamrl.runfile.config import Run
from streamrl.runfile.files import change_run, load_run
from streamrl.sim.calibration.calibrate import measured_steps
from streamrl.sim.diagnosis.diagnosis import diagnose as find_diagnosis
from streamrl.sim.planner.answers import estimate, question_of, run_of, stated_of

STAGES = {
    "generation": "generation",
    "rollout": "generation",
    "score": "score",
    "old-log-probs": "score",
    "reference": "score",
    "train": "train",
    "sync": "sync",
    "step": "step_time",
}
"""Names of `--stage`, each with the column that it adds to."""
BESIDE_NO_OTHER_STEP = ("score", "train", "sync")
"""Stages that are part of one step; generation may overlap several."""
PARTS_OF_SCORE = ("old-log-probs", "reference")
"""Names that add up to "score"."""
LAYOUT = (
    "the layout is the one that `streamrl init` would choose, not yours: --run RUN.toml gives yours"
)


def diagnose(
    log: Annotated[
        Path | None,
        typer.Argument(
            metavar="LOG",
            help="A log or a CSV that `calibrate` reads, or a run directory. Or give --stage.",
        ),
    ] = None,
    run_file: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml", help="The run file of that run."),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            metavar="NAME=SECONDS",
            help="Seconds of a stage instead of a log: generation (or rollout), score (or old-log-probs and reference, "
            "which add up), train, sync, step. Repeat for more stages.",
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option("--format", help="Format of the log, as for `calibrate`. Default: detect it."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    model: Model = None,
    gpus: Gpus = None,
    algorithm: AlgorithmOption = None,
    prompts: Prompts = None,
    group: Group = None,
    mean_tokens: MeanTokens = None,
    max_tokens: MaxTokens = None,
    prompt_tokens: PromptTokens = None,
    link: Link = None,
) -> None:
    """Say whether a run is normal for its hardware.

    It reads a framework's log, or seconds that you give, and simulates the run file of that run. A run directory has its
    run file and its lengths, so it needs no --run. The command shows measured and
    predicted seconds by stage, the longest stage, the three changes worth most, and which stages are not the problem.

    Nothing is fitted: `calibrate` fits a run that is normal. `doctor` checks a run file before a run.

    Example: streamrl diagnose verl.log --run run.toml
    Example: streamrl diagnose runs/quickstart
    Example: streamrl diagnose --run run.toml --stage rollout=29 --stage train=91 --stage step=290
    """
    stated = stated_of(locals())
    check_alone(run_file, stated)
    if (log is None) == (not stage):
        raise ValueError("give either LOG or --stage NAME=SECONDS")
    is_recorded = run_file is None and not stated and log is not None and holds_run(log)
    if is_recorded and log is not None:
        run = change_run(_recorded_run(log), tuple(overrides or ()))
    else:
        run = _run_of(run_file, stated, overrides or ())
    measured = _stated_steps(stage) if stage else _read(log or Path(), log_format)
    with make_progress() as progress:
        task = progress.add_task("simulating", total=None, facts="")
        found = find_diagnosis(run, measured, lambda what: progress.update(task, facts=what))
    if run_file is None and not is_recorded:
        found = msgspec.structs.replace(found, notes=[*found.notes, LAYOUT])
    if as_json:
        print_json(found)
        return
    stdout_console().print(diagnosis_table(found))
    for line in diagnosis_lines(found):
        echo(line)


def _run_of(run_file: Path | None, stated: dict[str, object], overrides: Iterable[str]) -> Run:
    if run_file is not None:
        return load_run(run_file, tuple(overrides))
    run = run_of(question_of(stated), tuple(overrides))
    return estimate(run).run


def _recorded_run(directory: Path) -> Run:
    """Return the run file of a run directory or a trace, with the lengths that were recorded."""
    file = trace_file(directory)
    recorded = recorded_inputs(open_trace(file), file)
    return replace(recorded.manifest.run, workload=recorded.workload, faults=())


def _stated_steps(stages: Iterable[str]) -> MeasuredSteps:
    """Return one step with the seconds of `--stage`."""
    given: dict[str, float] = {}
    for text in stages:
        name, _, value = text.partition("=")
        if name not in STAGES:
            raise ValueError(f"--stage must be one of {', '.join(STAGES)}, got {name!r}")
        if again := next((each for each in given if each in _same_as(name)), None):
            raise ValueError(f"--stage {text}: it has the seconds of --stage {again} already")
        given[name] = _seconds(text, value)
    seconds: dict[str, float] = {}
    for name, taken in given.items():
        seconds[STAGES[name]] = seconds.get(STAGES[name], 0.0) + taken
    longest = seconds.get("step_time", float("inf"))
    for column in BESIDE_NO_OTHER_STEP:
        if (own := seconds.get(column, 0.0)) > longest:
            text = f"{column} takes {own:g} s, and no stage is longer than its step"
            raise ValueError(f"--stage step={longest:g}: {text}")
    if (both := seconds.get("score", 0.0) + seconds.get("train", 0.0)) > longest:
        text = f"score and train follow each other on the trainer's GPUs, and take {both:g} s"
        raise ValueError(f"--stage step={longest:g}: {text}")
    return MeasuredSteps(
        source="--stage", framework="csv", steps=(MeasuredStep(step=1, **seconds),)
    )


def _same_as(name: str) -> set[str]:
    """Return the names that exclude a name: those of the same seconds, or of a part of them."""
    if name in PARTS_OF_SCORE:
        return {name, "score"}
    return {each for each, column in STAGES.items() if column == STAGES[name]}


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--stage {text}: write NAME=SECONDS, with seconds above 0")
    return seconds


def _read(log: Path, log_format: str | None) -> MeasuredSteps:
    """Read a log, or a run directory."""
    if holds_run(log):
        return measured_steps(open_trace(log), str(log))
    return read_measured_file(log, log_format)
