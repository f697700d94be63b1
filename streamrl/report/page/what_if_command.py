"""The parts of the command that plans again with the values of the sliders; the script of the page joins them.

A plan made from answers (`--gpus`) gets other answers: `--deadline`, `--mean-tokens`, `--max-tokens`, `--link`, and the
prices in `--gpus`. A plan made from a run file gets `--set`. The settings of `changes_of` then keep the search to the
plan that was clicked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd

import msgspec

from streamrl.logs.imported_workload import mean_of_shape
from streamrl.report.page.plan_command import (
    command_words,
    directory_beside,
    directory_of,
)
from streamrl.report.page.sources import PlanMade
from streamrl.runfile.keys import pool_key
from streamrl.runfile.short_forms import read_offer
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.planner.plan import GpuShare, WhatIf, WhatIfPlan

SEARCHED = {
    "trainer.tensor_parallel": "trainer_tensor_parallel",
    "trainer.zero": "zero",
    "sync.mode": "sync_modes",
    "policies.max_staleness": "max_staleness",
    "policies.dispatch": "dispatch",
    "policies.order": "order",
}
"""Keys that a plan sets, and the list of [plan] that limits each."""
SPLITS = {
    "trainer.pipeline_parallel": "pipeline_parallel",
    "trainer.expert_parallel": "expert_parallel",
    "trainer.context_parallel": "context_parallel",
}
"""The same for degrees that are named only if they split anything."""
PRICE = re.compile(
    r"\s*@\s*(?!owned\b)(?:\$?\d+(?:\.\d+)?|[A-Za-z][\w\-]*(?:/[A-Za-z][\w.\-]*)*)", re.IGNORECASE
)
"""The price in a part of an offer."""
TWO_KINDS = (
    "Keys of [plan] cannot ask for two kinds of replicas. The command searches plans of these GPUs, "
    "with one kind or two."
)


def command_parts(made: PlanMade, grid: WhatIf) -> dict[str, object]:
    """Return what the commands of all plans share: the words of the question, and what its answers stand for."""
    words = command_words(made) or ["RUN.toml"]
    lengths = made.run.workload.lengths
    return {
        "words": words,
        "directory": directory_of(made),
        "changed_directory": directory_beside(made, "changed"),
        "offer": _offer(words),
        "mean_tokens": _means(words, lengths, grid),
        "scale": {} if lengths is None else _scale(lengths),
        "price_keys": {pool: pool_key(pool, "price") for pool in grid.prices},
    }


def _scale(lengths: LengthsConfig) -> dict[str, float]:
    """Return the key that scales output lengths, with its value in the plan."""
    if lengths.scale_to is not None:
        return {"workload.lengths.scale_to": lengths.scale_to}
    return {"workload.lengths.scale": lengths.scale}


def _offer(words: list[str]) -> list[dict[str, str]]:
    """Return each part of `--gpus` with its pool, and its text without the price."""
    if "--gpus" not in words:
        return []
    parts = words[words.index("--gpus") + 1].split(",")
    pools = zip(read_offer(",".join(parts)), parts, strict=True)
    return [{"pool": pool, "text": text, "unpriced": PRICE.sub("", text)} for pool, text in pools]


def _means(words: list[str], lengths: LengthsConfig | None, grid: WhatIf) -> list[list[int]]:
    """Return the mean output tokens by lengths and cap, as `--mean-tokens` asks for them.

    The mean of a plan's own lengths is the one that was asked for. A plan from a run file has the
    means of the sample that the planner drew.
    """
    if lengths is None or "--gpus" not in words:
        return [[round(mean) for mean in row] for row in grid.mean_tokens]
    rows = [
        [_rounded(mean_of_shape(lengths, factor, cap)) for cap in grid.caps]
        for factor in grid.lengths
    ]
    if "--mean-tokens" in words:
        own, cap, _ = grid.unchanged
        rows[own][cap] = int(words[words.index("--mean-tokens") + 1])
    return rows


def _rounded(tokens: float) -> int:
    """Return tokens rounded to tens."""
    return 10 * round(tokens / 10)


def changes_of(plan: WhatIfPlan) -> dict[str, str]:
    """Return the settings that search only one plan, as far as keys of [plan] and of its pools can say it."""
    kinds, trainer_pool = plan.generate, str(plan.settings["trainer.pool"])
    found: dict[str, object] = {
        "plan.systems": [plan.settings["policies.system"]],
        "plan.rollout_pools": list(dict.fromkeys(kind.pool for kind in kinds)),
        "plan.trainer_pools": [trainer_pool],
        "plan.trainer_gpus": [plan.trainer_gpus],
        "plan.rollout_tensor_parallel": sorted({kind.tensor_parallel for kind in kinds}),
    }
    if len(kinds) == 1:
        found["plan.rollout_gpus"] = [plan.rollout_gpus]
    else:
        found |= _units(kinds, (trainer_pool, plan.trainer_gpus))
    if plan.rewards is not None:
        found["plan.reward_pools"] = [plan.rewards.pool]
        found["plan.reward_gpus"] = [plan.rewards.num_gpus]
    for key, name in SEARCHED.items():
        if key in plan.settings:
            found[f"plan.{name}"] = [plan.settings[key]]
    for key, name in SPLITS.items():
        if plan.settings.get(key, 1) not in (None, 1):
            found[f"plan.{name}"] = [plan.settings[key]]
    return {key: msgspec.json.encode(value).decode() for key, value in found.items()}


def _units(kinds: Sequence[GpuShare], trainer: tuple[str, int]) -> dict[str, object]:
    """Return a unit for each pool that divides every side in it. Two kinds allow no list of GPUs that generate."""
    units: dict[str, int] = {}
    for pool, count in [*((kind.pool, kind.num_gpus) for kind in kinds), trainer]:
        units[pool] = gcd(units.get(pool, 0), count)
    return {pool_key(pool, "unit"): unit for pool, unit in units.items()}


def note_of(plan: WhatIfPlan) -> str:
    """Return what the command cannot say of a plan; empty if it says all."""
    return TWO_KINDS if len(plan.generate) > 1 else ""
