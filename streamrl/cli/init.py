"""`streamrl init`, and the options that stand for a run file: model, GPUs, rollouts of a step, lengths, steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.shared import ANY, Overrides, claim_file, stdout_console
from streamrl.runfile.result_files import write_file

if TYPE_CHECKING:
    from streamrl.sim.planner.first_answer import FirstAnswer, Question


HARDWARE, TRAINING, LIMITS, BILL = "Model and GPUs", "Training", "Limits", "Bill"
"""Panels of the answers in the help of a command."""
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        rich_help_panel=HARDWARE,
        help="A model profile or Hugging Face name, such as Qwen/Qwen3-8B, or a directory with config.json.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        rich_help_panel=HARDWARE,
        metavar="OFFER",
        help="GPUs you may rent, with dollars per GPU-hour: 16xH100@2.20,8xH20@1.10. Add /1 where single GPUs are rented, and the bandwidth between nodes as 16xH20@1.10 with 1600Gbps. "
        "Your own GPUs: 16xH100@owned.",
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
SetupTime = Annotated[
    str | None,
    typer.Option(
        "--setup-time",
        rich_help_panel=BILL,
        metavar="TIME",
        help="Time for which GPUs are rented before the first step, such as '2 h'.",
    ),
]
MinimumTerm = Annotated[
    str | None,
    typer.Option(
        "--minimum-term",
        rich_help_panel=BILL,
        metavar="TIME",
        help="Shortest time that rented GPUs are billed for, such as '24 h'.",
    ),
]


def check_alone(run_file: Path | None, stated: Iterable[str]) -> None:
    """Refuse options that stand for a run file beside one."""
    if run_file is not None and stated:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in stated)
        raise ValueError(
            f"{options}: a run file says this; change it there, or use --set KEY=VALUE"
        )


def print_first_answer(answer: FirstAnswer, question: Question, stated: Iterable[str]) -> None:
    """Print the plans that a decision is between, and what they rest on."""
    from streamrl.report.plan_report import terms_text
    from streamrl.sim.planner.first_answer import LIMITS_ASIDE, assumptions_of

    lines = list(assumptions_of(question, set(stated)))
    if not answer.keeps_limits:
        lines.insert(0, LIMITS_ASIDE)
    console = stdout_console()
    console.print(answer.title, style="bold")
    console.print(_table(answer))
    terms = f"terms: {terms_text(plan.choice for plan in answer.plans)}"
    for line in [f"recommended: {answer.rule}", *answer.band_notes(), *lines, terms]:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    console.print()


def _table(answer: FirstAnswer) -> Table:
    """Lay out the plans to decide between."""
    head, *rows = answer.table_rows()
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table


# The command -------------------------------------------------------------------------------------


ASKED: tuple[tuple[str, str, str | None], ...] = (
    ("model", "Model (a profile, a Hugging Face name, or a directory with config.json)", None),
    (
        "gpus",
        "GPUs you may rent, with dollars per GPU-hour, or own (16xH100@2.20,8xH20@owned)",
        None,
    ),
    ("prompts", "Prompts of a step", "64"),
    ("group", "Rollouts of each prompt", "16"),
    ("mean_tokens", "Mean output tokens", "4k"),
    ("max_tokens", "Output tokens at which a rollout is cut off", "16k"),
    ("steps", "Steps of the training", "200"),
)
"""Field, question and default of what a terminal is asked for."""
NOTES = {
    "model": "`streamrl execute` needs a path: a Hugging Face directory with weights.",
    "cluster.pools": "What you may rent, or own: `nodes` is the most; `unit` GPUs at a time; `price` in dollars per GPU-hour.",
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
    setup_time: SetupTime = None,
    minimum_term: MinimumTerm = None,
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
    from streamrl.runfile.files import run_text
    from streamrl.sim.planner.answers import (
        check_answers,
        estimate,
        question_of,
        run_of,
        stated_of,
    )

    claim_file(run_file, ANY)
    if run_file.exists() and not force:
        raise ValueError(f"{run_file} exists already; use --force to replace it")
    stated = stated_of(locals())
    check_answers(stated)
    if sys.stdin.isatty():
        _ask_for_rest(stated)
    question = question_of(stated)
    run = run_of(question, overrides or ())
    answer = estimate(run)
    text = run_text(answer.run, run_file, _notes(question, answer.recommended.choice))
    write_file(run_file, _commented(text))
    print_first_answer(answer, question, stated)
    echo(f"written to {run_file}; next:")
    echo(f"  streamrl plan {run_file} -o DIR    # compare plans by simulation")
    echo(f"  streamrl simulate {run_file}       # predict the layout of this file")


def _notes(question: Question, choice: str) -> list[str]:
    """Return the head of a run file: what was asked, and which layout it has."""
    return [
        f"{question.model} on {question.gpus}: {question.prompts} x {question.group} rollouts a step, mean output "
        f"{question.mean_tokens:,} tokens, at most {question.max_tokens:,}.",
        f"Layout by a first answer, not yet by a search: {choice}.",
    ]


def _ask_for_rest(stated: dict[str, Any]) -> None:
    """Ask for each answer that is not given, again after a wrong one."""
    from streamrl.sim.planner.answers import check_answers, read_answer

    for name, text, default in ASKED:
        while name not in stated:
            written = typer.prompt(text, default=default)
            try:
                answer = read_answer(name, written.strip())
                check_answers({**stated, name: answer})
            except ValueError as error:
                echo(f"  {error}")
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
