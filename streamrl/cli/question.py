"""The options that stand for a run file: which model, on which GPUs, with how many rollouts of which length."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from streamrl.cli.shared import stdout_console
from streamrl.runfile.files import make_run
from streamrl.runfile.formatting import format_dollars, format_duration, long_time
from streamrl.runfile.keys import override
from streamrl.runfile.short_forms import count_of

if TYPE_CHECKING:
    from streamrl.runfile.config import Run
    from streamrl.sim.planner.first_answer import FirstAnswer
    from streamrl.sim.planner.question import Question


MOST_SECONDS = 7.0
"""Seconds after which a first answer simulates nothing more."""


def _count(name: str) -> Any:
    """Return the reader of an option that holds a whole number, such as 32k."""

    def read(value: str | int) -> int:
        try:
            return value if isinstance(value, int) else count_of(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=name) from None

    return read


def _number(name: str, text: str) -> Any:
    return Annotated[int | None, typer.Option(name, metavar="N", parser=_count(name), help=text)]


Model = Annotated[
    str | None,
    typer.Option("--model", help="A model profile or Hugging Face name, such as Qwen/Qwen3-8B."),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="OFFER",
        help="GPUs you may rent, with dollars per GPU-hour: 16xH100@2.20,8xH20@1.10. Add /1 where single GPUs are rented.",
    ),
]
AlgorithmOption = Annotated[
    str | None, typer.Option("--algorithm", help="The algorithm; grpo where absent.")
]
Prompts = _number("--prompts", "Prompts of a step; 64 where absent.")
Group = _number("--group", "Rollouts of each prompt; 16 where absent.")
MeanTokens = _number("--mean-tokens", "Mean output tokens, such as 6k; 4k where absent.")
MaxTokens = _number(
    "--max-tokens", "Output tokens at which a rollout is cut off; 16k where absent."
)
PromptTokens = _number("--prompt-tokens", "Tokens of a prompt; 400 where absent.")
Steps = _number("--steps", "Steps of the training; 200 where absent.")
Link = Annotated[
    str | None,
    typer.Option(
        "--link", metavar="RATE", help="Bandwidth between pools; '100 Gbps' where absent."
    ),
]
Deadline = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="Latest end, such as '3 days'.")
]
Budget = Annotated[
    float | None, typer.Option("--budget", metavar="DOLLARS", help="Most dollars of the whole run.")
]


def stated_of(**answers: Any) -> dict[str, Any]:
    """Return the answers that were given."""
    return {name: value for name, value in answers.items() if value is not None}


def question_of(stated: dict[str, Any]) -> Question:
    """Return the question that the options ask.

    Raises:
        ValueError: there is no model or no GPU.
    """
    from streamrl.sim.planner.question import Question, check_units

    for name, example in (("model", "Qwen/Qwen3-8B"), ("gpus", "16xH100@2.20")):
        if name not in stated:
            raise ValueError(
                f"--{name} is missing: give a run file, or --model and --gpus, such as --{name} {example}"
            )
    question = Question(**stated)
    check_units(question.link, question.deadline)
    return question


def run_of(question: Question, overrides: Iterable[str]) -> Run:
    """Return the run of a question, with `--set` applied."""
    from streamrl.sim.planner.question import run_table_of

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


def print_first_answer(run: Run, question: Question, stated: Iterable[str]) -> FirstAnswer:
    """Estimate the plans that a decision is between; print them, and what they rest on."""
    from streamrl.sim.planner.first_answer import first_answer
    from streamrl.sim.planner.question import assumptions_of

    with ProcessPoolExecutor() as pool:
        answer = first_answer(run, pool, MOST_SECONDS)
    console = stdout_console()
    console.print(_table(answer))
    for line in assumptions_of(question, set(stated)):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    return answer


def _table(answer: FirstAnswer) -> Table:
    title = f"first answer, {answer.num_plans:,} plans estimated in {answer.seconds:.0f} s"
    table = Table(title, "whole run", "takes", "a step", "simulated", box=None, pad_edge=False)
    for plan in answer.plans:
        steps = f"{plan.simulated_steps} steps" if plan.simulated_steps else "not yet"
        dollars, seconds = format_dollars(plan.dollars), format_duration(plan.step_time)
        name = f"{plan.what}: {plan.choice}"
        table.add_row(name, dollars, long_time(plan.seconds), seconds, steps)
    return table
