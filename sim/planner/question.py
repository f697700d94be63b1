"""Make a run file from the few facts of a question: model, GPUs, rollouts, lengths, steps.

All other values are assumptions. `assumptions_of` lists them, so that the user can correct them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from streamrl.logs.imported_workload import scale_to_mean
from streamrl.runfile.offer import read_offer
from streamrl.runfile.short_forms import model_name
from streamrl.runfile.units import Bandwidth, Duration
from streamrl.runfile.workload_config import LengthsConfig

SHAPE = "streamrl-codemath-20k"
"""The profile whose distribution of output lengths is scaled to the mean: DeepSeek-R1 on mathematics and code."""
MOST_CAPPED = 0.95
"""Largest mean as a share of the cap. Above it, most outputs would be cut off."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The training and the GPUs to plan for."""

    model: str
    """Name of a profile, or of a model on the Hugging Face hub."""
    gpus: str
    """The offer, in the syntax of `streamrl.runfile.offer`."""
    algorithm: str = "grpo"
    prompts: int = 64
    """Prompts per step."""
    group: int = 16
    """Rollouts per prompt."""
    mean_tokens: int = 4_000
    """Mean output tokens of a rollout."""
    max_tokens: int = 16_000
    """Output tokens after which a rollout is cut off."""
    prompt_tokens: int = 400
    steps: int = 200
    link: str = "100 Gbps"
    """Bandwidth between any two pools."""
    deadline: str | None = None
    budget: float | None = None


def run_table_of(question: Question) -> dict[str, Any]:
    """Return the run file of a question, in the form of a TOML table.

    Its layout is only a start, which the plan replaces.

    Raises:
        ValueError: a value cannot be read, or the mean is too near the cap.
    """
    pools = read_offer(question.gpus)
    first, *_ = pools
    plan = {"deadline": question.deadline, "budget": question.budget}
    return {
        "model": {"name": model_name(question.model)},
        "cluster": {"pools": pools, "links": _links(list(pools), question.link)},
        "plan": {key: value for key, value in plan.items() if value is not None},
        "rollout": {"pool": first, "replicas": 1, "max_tokens": question.max_tokens},
        "trainer": {"pool": first},
        "algorithm": {
            "name": question.algorithm,
            "steps": question.steps,
            "prompts_per_step": question.prompts,
            "group_size": question.group,
        },
        "workload": {"lengths": _lengths(question)},
        "policies": {"system": "colocated"},
    }


def _links(pools: list[str], bandwidth: str) -> list[dict[str, Any]]:
    return [{"between": list(pair), "bandwidth": bandwidth} for pair in combinations(pools, 2)]


def _lengths(question: Question) -> dict[str, Any]:
    mean, cap = question.mean_tokens, question.max_tokens
    if not 1 <= mean <= MOST_CAPPED * cap:
        raise ValueError(
            f"--mean-tokens must be from 1 to {MOST_CAPPED:.0%} of --max-tokens ({cap:,}), got {mean:,}"
        )
    shape = LengthsConfig(kind="histogram", source=SHAPE)
    return {
        "kind": shape.kind,
        "source": SHAPE,
        "scale": float(f"{scale_to_mean(shape, mean, cap):.4g}"),
        "prompt_tokens": question.prompt_tokens,
    }


def assumptions_of(question: Question, stated: set[str]) -> list[str]:
    """Return the assumptions of a question, one per line.

    Args:
        question: the question.
        stated: the fields that the user set.
    """
    told = [
        f"lengths have the shape of {SHAPE} (DeepSeek-R1 on mathematics and code), scaled to the mean of "
        f"{question.mean_tokens:,} tokens under a cap of {question.max_tokens:,}"
    ]
    names = {
        "algorithm": question.algorithm,
        "prompts": f"{question.prompts} prompts a step",
        "group": f"{question.group} rollouts a prompt",
        "steps": f"{question.steps} steps",
        "prompt_tokens": f"{question.prompt_tokens} tokens a prompt",
    }
    if "," in question.gpus:
        names["link"] = f"{question.link} between pools"
    assumed = [text for name, text in names.items() if name not in stated]
    return [*told, *([f"not stated, so assumed: {', '.join(assumed)}"] if assumed else [])]


def check_units(link: str, deadline: str | None) -> None:
    """Raise `ValueError` if a quantity of a question has no unit or cannot be read."""
    for option, kind, text in (("--link", Bandwidth, link), ("--deadline", Duration, deadline)):
        try:
            if text is not None:
                kind.parse(text)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
