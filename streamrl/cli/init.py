"""`streamrl init`: write a run file from a few answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from streamrl.cli.question import (
    AlgorithmOption,
    Budget,
    Deadline,
    Gpus,
    Group,
    Link,
    MaxTokens,
    MeanTokens,
    Model,
    Prompts,
    PromptTokens,
    Steps,
    print_first_answer,
    question_of,
    run_of,
    stated_of,
)
from streamrl.cli.shared import Overrides, claim_file
from streamrl.runfile.files import write_run
from streamrl.runfile.short_forms import count_of

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
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a run file from a few answers.

    On a terminal, init asks for what is not given. The layout is the first answer's: the fastest plan by estimates
    that costs at most 10 % more than the cheapest. `streamrl plan` on the file then compares plans by simulation.

    Example: streamrl init run.toml --model Qwen/Qwen3-8B --gpus 16xH100@2.20 --mean-tokens 6k --max-tokens 32k
    """
    if run_file.exists() and not force:
        raise ValueError(f"{run_file} exists already; use --force to replace it")
    claim_file(run_file)
    stated = stated_of(
        **{
            "model": model,
            "gpus": gpus,
            "algorithm": algorithm,
            "prompts": prompts,
            "group": group,
        },
        **{"mean_tokens": mean_tokens, "max_tokens": max_tokens, "prompt_tokens": prompt_tokens},
        **{"steps": steps, "link": link, "deadline": deadline, "budget": budget},
    )
    if sys.stdin.isatty():
        _ask_for_rest(stated)
    question = question_of(stated)
    run = run_of(question, overrides or ())
    answer = print_first_answer(run, question, stated)
    chosen = answer.recommended
    laid_out = replace(chosen.candidate.apply(run), cluster=run.cluster)
    write_run(laid_out, run_file, [f"By estimates the {chosen.what}: {chosen.choice}."])
    run_file.write_text(_commented(run_file.read_text(encoding="utf-8")), encoding="utf-8")
    typer.echo(
        f"written to {run_file}; next: streamrl plan {run_file}, or streamrl simulate {run_file}"
    )


def _ask_for_rest(stated: dict[str, Any]) -> None:
    for name, text, default in ASKED:
        if name not in stated:
            answer = typer.prompt(text, default=default)
            stated[name] = answer if name in ("model", "gpus") else count_of(answer)


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
