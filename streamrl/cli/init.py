"""`streamrl init`, and the options that stand for a run file: model, GPUs, rollouts of a step, lengths, steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.shared import Overrides, claim_file, stdout_console
from streamrl.runfile.files import make_run, write_run
from streamrl.runfile.formatting import format_dollars, format_duration, listing, long_time
from streamrl.runfile.keys import override
from streamrl.runfile.short_forms import count_of, model_name, read_offer

if TYPE_CHECKING:
    from streamrl.runfile.config import Run
    from streamrl.sim.planner.first_answer import FirstAnswer, Question
    from streamrl.sim.planner.space import Candidate


MOST_SECONDS = 7.0
"""Seconds after which a first answer simulates nothing more."""


COUNTS = ("prompts", "group", "mean_tokens", "max_tokens", "prompt_tokens", "steps")
"""Answers that are whole numbers, such as 32k."""
ANSWERS = ("model", "gpus", "algorithm", *COUNTS, "link", "deadline", "budget")
"""Parameters of `init` and `plan` that are the fields of a `Question`."""

HARDWARE, TRAINING, LIMITS = "Model and GPUs", "Training", "Limits"
"""Panels of the answers in the help of a command."""
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        rich_help_panel=HARDWARE,
        help="A model profile or Hugging Face name, such as Qwen/Qwen3-8B.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        rich_help_panel=HARDWARE,
        metavar="OFFER",
        help="GPUs you may rent, with dollars per GPU-hour: 16xH100@2.20,8xH20@1.10. Add /1 where single GPUs are rented.",
    ),
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option("--algorithm", rich_help_panel=TRAINING, help="The algorithm; grpo where absent."),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        rich_help_panel=TRAINING,
        metavar="N",
        help="Prompts of a step; 64 where absent.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        rich_help_panel=TRAINING,
        metavar="N",
        help="Rollouts of each prompt; 16 where absent.",
    ),
]
MeanTokens = Annotated[
    str | None,
    typer.Option(
        "--mean-tokens",
        rich_help_panel=TRAINING,
        metavar="N",
        help="Mean output tokens, such as 6k; 4k where absent.",
    ),
]
MaxTokens = Annotated[
    str | None,
    typer.Option(
        "--max-tokens",
        rich_help_panel=TRAINING,
        metavar="N",
        help="Output tokens at which a rollout is cut off; 16k where absent.",
    ),
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens",
        rich_help_panel=TRAINING,
        metavar="N",
        help="Tokens of a prompt; 400 where absent.",
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(
        "--steps",
        rich_help_panel=TRAINING,
        metavar="N",
        help="Steps of the training; 200 where absent.",
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        rich_help_panel=HARDWARE,
        metavar="RATE",
        help="Bandwidth between pools; '100 Gbps' where absent.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(
        "--deadline", rich_help_panel=LIMITS, metavar="TIME", help="Latest end, such as '3 days'."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", rich_help_panel=LIMITS, metavar="DOLLARS", help="Most dollars of the whole run."
    ),
]


def stated_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers among a command's parameters that were given, numbers written out.

    Raises:
        ValueError: a number cannot be read.
    """
    stated = {name: parameters[name] for name in ANSWERS if parameters[name] is not None}
    return {name: _answer(name, value) for name, value in stated.items()}


def _answer(name: str, value: str) -> str | int | float:
    """Return the answer to a question of one name."""
    try:
        if name == "budget":
            return float(value.lstrip("$").replace(",", ""))
        return count_of(value) if name in COUNTS else value
    except ValueError as error:
        text = f"{value!r} is no number of dollars" if name == "budget" else error
        raise ValueError(f"--{name.replace('_', '-')}: {text}") from None


def check_answers(stated: Mapping[str, Any]) -> None:
    """Check each answer on its own, before any other is asked for.

    Raises:
        ValueError: there is no such model or GPU, or a value cannot be.
    """
    from streamrl.sim.planner.first_answer import check_lengths, check_units

    if "model" in stated:
        _check_known("model", "models", model_name(stated["model"]))
    for pool in read_offer(stated["gpus"]).values() if "gpus" in stated else ():
        _check_known("gpus", "gpus", pool["gpu"])
    for name in COUNTS:
        if stated.get(name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {stated[name]}")
    if "mean_tokens" in stated and "max_tokens" in stated:
        check_lengths(stated["mean_tokens"], stated["max_tokens"])
    check_units(stated.get("link"), stated.get("deadline"))


def _check_known(option: str, folder: str, name: str) -> None:
    from streamrl.hardware.profiles import find_profile

    try:
        find_profile(folder, name, ".toml")
    except ValueError as error:
        raise ValueError(f"--{option}: {error}") from None


def question_of(stated: dict[str, Any]) -> Question:
    """Return the question that the options ask.

    Raises:
        ValueError: there is no model or no GPU.
    """
    from streamrl.sim.planner.first_answer import Question

    for name, example in (("model", "Qwen/Qwen3-8B"), ("gpus", "16xH100@2.20")):
        if name not in stated:
            raise ValueError(
                f"--{name} is missing, such as --{name} {example}; without a run file, --model and --gpus are needed"
            )
    check_answers(stated)
    return Question(**stated)


def run_of(question: Question, overrides: Iterable[str]) -> Run:
    """Return the run of a question, with `--set` applied."""
    from streamrl.sim.planner.first_answer import run_table_of

    table = run_table_of(question)
    for change in overrides:
        override(table, change)
    return make_run(table)


def check_alone(run_file: Path | None, stated: Iterable[str]) -> None:
    """Refuse options that stand for a run file beside one."""
    if run_file is not None and stated:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in stated)
        raise ValueError(
            f"{options}: a run file says this; change it there, or use --set KEY=VALUE"
        )


def estimate(run: Run) -> FirstAnswer:
    """Estimate the plans that a decision is between."""
    from streamrl.sim.planner.first_answer import first_answer

    with ProcessPoolExecutor() as pool:
        return first_answer(run, pool, MOST_SECONDS)


def print_first_answer(answer: FirstAnswer, question: Question, stated: Iterable[str]) -> None:
    """Print the plans that a decision is between, and what they rest on."""
    from streamrl.sim.planner.first_answer import assumptions_of

    lines = list(assumptions_of(question, set(stated)))
    if not answer.keeps_limits:
        lines.insert(0, "by estimate no plan keeps the deadline and the budget: set aside here")
    console = stdout_console()
    console.print(
        f"First answer: {answer.num_plans:,} plans estimated in {answer.seconds:.0f} s",
        style="bold",
    )
    console.print(_table(answer))
    for line in [f"recommended: {answer.rule}", *lines]:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    console.print()


def _table(answer: FirstAnswer) -> Table:
    """Lay out the plans to decide between; one that is best in two ways has one row."""
    table = Table("", "whole run", "takes", "a step", "from", "plan", box=None, pad_edge=False)
    names: dict[Candidate, list[str]] = {}
    for plan in answer.plans:
        names.setdefault(plan.candidate, []).append(plan.what)
    for candidate, alike in names.items():
        plan = next(each for each in answer.plans if each.candidate == candidate)
        steps = f"{plan.simulated_steps} steps" if plan.simulated_steps else "estimate"
        dollars, seconds = format_dollars(plan.dollars), format_duration(plan.step_time)
        name = listing(alike)
        table.add_row(name, dollars, long_time(plan.seconds), seconds, steps, plan.choice)
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table


# The command -------------------------------------------------------------------------------------


ASKED: tuple[tuple[str, str, str | None], ...] = (
    ("model", "Model (a profile, or a Hugging Face name)", None),
    ("gpus", "GPUs you may rent, with dollars per GPU-hour (16xH100@2.20,8xH20@1.10)", None),
    ("prompts", "Prompts of a step", "64"),
    ("group", "Rollouts of each prompt", "16"),
    ("mean_tokens", "Mean output tokens", "4k"),
    ("max_tokens", "Output tokens at which a rollout is cut off", "16k"),
    ("steps", "Steps of the training", "200"),
)
"""Field, question and default of what a terminal is asked for."""
NOTES = {
    "model": "For `streamrl execute`, replace name by path: a Hugging Face directory.",
    "cluster.pools": "What you may rent: `nodes` is the most; `unit` GPUs at a time; `price` in dollars per GPU-hour.",
    "cluster.links": "What connects two pools.",
    "rollout": "Generation. `streamrl plan` chooses the pool, the replicas and their degrees.",
    "trainer": "Training. `streamrl plan` chooses the pool and the degrees.",
    "algorithm": "One step trains on prompts_per_step x group_size rollouts.",
    "workload.lengths": "Simulated output lengths. Use your own: `streamrl import` makes them from a log or from rollouts.",
    "policies": "In which order the roles work; `streamrl plan` chooses it.",
    "plan": "Limits of the search.",
}
"""Comment above the first table of each section."""


def init(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The file to write.")],
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
    overrides: Overrides = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Write a run file from a few answers.

    On a terminal, init asks for what is not given. The layout is the first answer's: the fastest plan by estimates
    that costs at most 10 % more than the cheapest. `streamrl plan` on the file then compares plans by simulation.

    Example: streamrl init run.toml --model Qwen/Qwen3-8B --gpus 16xH100@2.20 --mean-tokens 6k --max-tokens 32k
    """
    if run_file.exists() and not force:
        raise ValueError(f"{run_file} exists already; use --force to replace it")
    claim_file(run_file)
    stated = stated_of(locals())
    check_answers(stated)
    if sys.stdin.isatty():
        _ask_for_rest(stated)
    question = question_of(stated)
    run = run_of(question, overrides or ())
    answer = estimate(run)
    chosen = answer.recommended
    laid_out = replace(chosen.candidate.apply(run), cluster=run.cluster, plan=run.plan)
    run_file.parent.mkdir(parents=True, exist_ok=True)
    write_run(laid_out, run_file, _notes(question, chosen.choice))
    run_file.write_text(_commented(run_file.read_text(encoding="utf-8")), encoding="utf-8")
    print_first_answer(answer, question, stated)
    typer.echo(f"written to {run_file}; next:")
    typer.echo(f"  streamrl plan {run_file} -o DIR    # compare plans by simulation")
    typer.echo(f"  streamrl simulate {run_file}       # predict the layout of this file")


def _notes(question: Question, choice: str) -> list[str]:
    """Return the head of a run file: what was asked, and which layout it has."""
    return [
        f"{question.model} on {question.gpus}: {question.prompts} x {question.group} rollouts a step, mean output "
        f"{question.mean_tokens:,} tokens, at most {question.max_tokens:,}.",
        f"Layout by a first answer, not yet by a search: {choice}.",
    ]


def _ask_for_rest(stated: dict[str, Any]) -> None:
    """Ask for each answer that is not given, again after a wrong one."""
    for name, text, default in ASKED:
        while name not in stated:
            written = typer.prompt(text, default=default)
            try:
                answer = _answer(name, written.strip())
                check_answers({**stated, name: answer})
            except ValueError as error:
                typer.echo(f"  {error}")
            else:
                stated[name] = answer


def _commented(text: str) -> str:
    """Return a run file with a comment above the first table of each section."""
    return "\n".join(_with_notes(text.splitlines())) + "\n"


def _with_notes(lines: list[str]) -> Iterable[str]:
    left = dict(NOTES)
    for line in lines:
        if line.startswith("["):
            table = line.strip("[]")
            for section in [each for each in left if table == each or table.startswith(f"{each}.")]:
                yield f"# {left.pop(section)}"
        yield line
