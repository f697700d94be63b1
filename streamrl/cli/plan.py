"""`streamrl plan`: choose GPUs, parallelism and system."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from streamrl import __version__
from streamrl.cli.consoles import SafeConsole
from streamrl.cli.init import (
    AlgorithmOption,
    Budget,
    Deadline,
    Gpus,
    Group,
    Link,
    MaxTokens,
    MeanTokens,
    MinimumTerm,
    Model,
    Prompts,
    PromptTokens,
    SetupTime,
    Steps,
    check_alone,
    print_first_answer,
)
from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.progress import plan_progress
from streamrl.cli.shared import (
    AsJson,
    Intervals,
    Overrides,
    RayAddress,
    print_json,
    simulating_on,
    sole_writer,
    stdout_console,
)
from streamrl.export.launch_file import find_arguments, launch_script
from streamrl.export.option_table import ExportName, export_name
from streamrl.record.run_directory import read_inputs
from streamrl.report.next_steps import next_lines, option_lines, verdict_lines
from streamrl.report.plan_report import head_lines, plan_report
from streamrl.report.run_tables import headline
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_offer, run_text
from streamrl.runfile.formatting import format_duration
from streamrl.runfile.jobs_file import is_cluster_file
from streamrl.runfile.paths import check_no_directory, paths_of
from streamrl.runfile.result_files import write_file, write_results
from streamrl.sim.planner.answers import estimate, question_of, run_of, stated_of
from streamrl.sim.planner.first_answer import Question
from streamrl.sim.planner.options import MOST_OPTIONS
from streamrl.sim.planner.plan import (
    PLAN_JSON,
    PLAN_TOML,
    Plan,
    PlanOption,
    plan_data,
    read_plan,
)
from streamrl.sim.planner.planner import Planned, make_plan
from streamrl.sim.planner.take import digest_of, take
from streamrl.targets.verdicts import TARGETS


def plan(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml",
            help="The run file, or a cluster file with several jobs; or give --model and --gpus.",
        ),
    ] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"Write {PLAN_TOML} and {PLAN_JSON} to this directory. Default: the current directory with a run file, "
            "else nothing is written.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="NAME",
            help="Also write NAME.sh, the launch arguments of verl, nemo-rl, slime or openrlhf. For a cluster file: "
            "its schedule for slurm, ray or kueue.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="NAME",
            help="Search only plans that NAME can run: execute, verl, nemo-rl, slime, openrlhf or trl.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--take",
            metavar="N",
            min=1,
            max=MOST_OPTIONS,
            help=f"Write option N to {PLAN_TOML} instead of option 1. An existing plan of the same run file is not made again.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing plan.", rich_help_panel=OUTPUT)
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            "-v",
            help="Also print the runners-up, the what-ifs, all facts and what was left out.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    intervals: Intervals = False,
    as_json: AsJson = False,
    model: Model = None,
    gpus: Gpus = None,
    algorithm: AlgorithmOption = None,
    prompts: Prompts = None,
    group: Group = None,
    mean_tokens: MeanTokens = None,
    max_tokens: MaxTokens = None,
    prompt_tokens: PromptTokens = None,
    steps: Steps = None,
    link: Link = None,
    deadline: Deadline = None,
    budget: Budget = None,
    setup_time: SetupTime = None,
    minimum_term: MinimumTerm = None,
    ray: RayAddress = None,
) -> None:
    """Choose GPUs, parallelism and system for a run, by cost or speed.

    The pools of the run file are your offer; `nodes` is the most that you may rent. Its section `plan` says what to
    search, what to minimize, and the limits (`budget`, `deadline`). plan.toml holds the chosen plan, for `simulate`
    and `execute`. The last lines say what can run it, and by which command.

    Without a run file, --model and --gpus are enough. A first answer then comes within seconds.

    A cluster file has several jobs that share GPUs. The plan says which job gets which GPUs when, and what each job
    takes and costs.

    Example: streamrl plan examples/plan-7b.toml --set plan.objective=step-time -o plans/7b
    Example: streamrl plan examples/plan-7b.toml --for verl -o plans/verl
    Example: streamrl plan examples/plan-7b.toml -o plans/7b --take 2
    Example: streamrl plan --model Qwen/Qwen3-8B --gpus 16xH100@2.20 --mean-tokens 6k --max-tokens 32k
    Example: streamrl plan examples/clusters/two-jobs.toml -o plans/jobs --export slurm
    """
    stated = stated_of(locals())
    check_alone(run_file, stated)
    if run_file is not None and is_cluster_file(run_file):
        refused = {
            "--for": target,
            "--take": number,
            "--details": details,
            "--intervals": intervals,
        }
        _check_run_alone(run_file, [name for name, value in refused.items() if value])
        from streamrl.cli.plan_jobs import plan_cluster

        changes = list(overrides or ())
        plan_cluster(run_file, changes, output, export, ray, force=force, as_json=as_json)
        return
    question = None if run_file else question_of(stated)
    changes = [*(overrides or ()), *_target_changes(target)]
    run, has_own = _offer_of(run_file, question, changes)
    other = None if export is None else export_name(export, "--export")
    if output is None and (run_file or other or number):
        output = Path()
    source = _source_of(run_file, {**stated, "for": target}, overrides or (), output)
    base = run_file.parent if run_file else Path()
    with nullcontext() if output is None else sole_writer(output):
        earlier = None
        if output is not None and number is not None and not force:
            earlier = _earlier(digest_of(run), output)
        if earlier is not None and number is not None:
            planned = Planned(*take(run, earlier, number))
        else:
            if output is not None:
                names = (PLAN_TOML, PLAN_JSON, *(() if other is None else (f"{other}.sh",)))
                _claim(output, names, force=force)
            first = None
            if question is not None and not as_json:
                answer = estimate(run)
                first = answer.recommended
                print_first_answer(answer, question, stated)
                limit = format_duration(run.plan.time_limit)
                echo(f"Comparing plans by simulation, in about {limit} at most:\n", err=True)
            with plan_progress() as watch, simulating_on(ray, make_plan.__module__):
                planned = make_plan(run, watch, shows_own=has_own, first=first)
            if not as_json:
                stdout_console().print(
                    plan_report(planned.plan, intervals=intervals, details=details)
                )
            if number is not None:
                planned = Planned(*take(run, planned.plan, number))
        if output is not None:
            planned = _write(planned, output, source, base)
        if as_json:
            print_json(planned.plan)
        if not as_json:
            _print_next(output, planned.plan, details=details)
        if other is not None and output is not None:
            _export(planned, other, output, as_json=as_json)


def _check_run_alone(path: Path, options: list[str]) -> None:
    """Refuse options that apply to a single run."""
    if options:
        raise ValueError(
            f"{options[0]} applies to a run file, and {path} is a cluster file; remove it"
        )


def _source_of(
    run_file: Path | None,
    stated: Mapping[str, object],
    overrides: Iterable[str],
    output: Path | None,
) -> str:
    """Return the words of a command that plans the same: the run file or the answers, the target, settings and directory."""
    words = [] if run_file is None else [str(run_file)]
    for name, value in stated.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += [word for change in overrides for word in ("--set", change)]
    words += [] if output is None else ["-o", str(output)]
    return shlex.join(words)


def _earlier(digest: str, output: Path) -> Plan | None:
    """Return the plan in a directory, or None.

    Raises:
        ValueError: it was made for another run file.
    """
    if not (output / PLAN_JSON).exists():
        return None
    plan = read_plan(output / PLAN_JSON)
    if plan.offer != digest:
        raise ValueError(
            f"{output / PLAN_JSON} is not a plan of this run file with these changes; use --force to plan again"
        )
    return plan


def _target_changes(target: str | None) -> Iterator[str]:
    """Yield the setting that `--for` stands for."""
    if target is not None and target not in TARGETS:
        raise ValueError(f"--for must be one of {', '.join(TARGETS)}, got {target!r}")
    if target is not None:
        yield f"plan.target={target}"


def _offer_of(
    run_file: Path | None, question: Question | None, changes: list[str]
) -> tuple[Run, bool]:
    """Return the run to plan for, and whether its layout is one that a user chose and that can run."""
    if question is not None:
        return run_of(question, changes), False
    offer = load_offer(run_file or "", changes)
    if offer.ignored:
        echo(
            f"ignored, because it does not fit and plans replace it: {', '.join(offer.ignored)}",
            err=True,
        )
    return offer.run, offer.has_layout


def _claim(output: Path, names: Iterable[str], *, force: bool) -> None:
    """Refuse to replace files of an earlier plan, before any work."""
    for name in names:
        check_no_directory(output / name, "--output")
        if (output / name).exists() and not force:
            raise ValueError(f"{output / name} exists already; use --force to replace it")


def _write(planned: Planned, output: Path, source: str, base: Path) -> Planned:
    """Write a plan and its run file; return the plan with the digest of that file."""
    plan = planned.plan
    settings = plan.allocation.settings
    notes = [f"Chosen by `streamrl plan {source}`:", *head_lines(plan)]
    if plan.taken != 1:
        option = plan.options[plan.taken - 1]
        settings, notes = option.choice.settings, list(_option_notes(option, source))
    text = run_text(planned.run, output / PLAN_TOML, notes, settings, base)
    written = replace(plan, run_file=sha256(text.encode()).hexdigest(), version=__version__)
    inputs = read_inputs(paths_of(planned.run), output)
    write_results(output, {**inputs, PLAN_TOML: text, PLAN_JSON: plan_data(written)})
    return planned._replace(plan=written)


def _option_notes(option: PlanOption, source: str) -> Iterator[str]:
    """Yield the head of the run file of an option that is not recommended."""
    yield f"Option {option.number} of `streamrl plan {source}`: {', '.join(option.labels)}"
    yield option.text
    yield f"whole run: {headline(option.whole_run, option.choice.model_error)}"
    yield f"Against the recommended plan: {option.relation}"


def _print_next(output: Path | None, plan: Plan, *, details: bool) -> None:
    """Say where the plan is, what can run it, and the commands that do so."""
    console = stdout_console()

    def say(*lines: str, soft_wrap: bool = False) -> None:
        for line in lines:
            console.print(line, highlight=False, soft_wrap=soft_wrap)

    console.print()
    say(*verdict_lines(plan.carried_by), *option_lines(plan))
    if output is None:
        say("nothing was written: -o DIR writes the plan")
    else:
        say(f"written to {output / PLAN_TOML}{_taken_text(plan)}", soft_wrap=True)
        say(*next_lines(plan, output / PLAN_TOML), soft_wrap=True)
        say(f"page: {shlex.join(['streamrl', 'report', str(output)])}", soft_wrap=True)
    if not details:
        say("more: --details adds runners-up, what-ifs, all facts and what was left out")


def _taken_text(plan: Plan) -> str:
    if plan.taken == 1:
        return ""
    option = plan.options[plan.taken - 1]
    return f": option {plan.taken} ({', '.join(option.labels)}), {option.relation}"


def _export(planned: Planned, other: ExportName, output: Path, *, as_json: bool) -> None:
    """Write the launch arguments of a framework next to the plan, which is already written."""
    path = output / f"{other}.sh"
    try:
        script = launch_script(find_arguments(planned.run, other))
    except ValueError as error:
        raise RuntimeError(f"the plan was written, but {path} was not: {error}") from None
    write_file(path, script)
    if not as_json:
        SafeConsole(highlight=False).print(f"written to {path}", soft_wrap=True)
