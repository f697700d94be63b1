"""Words of the report: figures with units, names of sides, and the meaning of terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.record.band import Band, ends_of
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.formatting import format_dollars, format_step_time, listing
from streamrl.runfile.roles_config import (
    RolloutConfig,
    SecondaryTrainerConfig,
    TrainerConfig,
    VerifierConfig,
)
from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from streamrl.sim.planner.plan import SHORT, Choice, PlannedSide, in_brackets

NBSP = "\N{NO-BREAK SPACE}"
CAUSES = {
    "start-up": "a replica or a trainer is coming up",
    "failure": "a lost replica is being replaced, or a lost trainer is coming up again",
    "sync": "weights are on their way or being loaded",
    "switch": "GPUs of the trainer are being lent to replicas or taken back",
    "kv-transfer": "KV caches are on their way from prefill replicas, and nothing is decoded meanwhile",
    "skew": "the longest rollouts of a step still run while other replicas are done (stragglers)",
    "pipeline": "one side waits for the work of the other",
    "staleness": "generation is as far ahead of training as it may be",
    "tool": "tools of the environments run, and their episodes wait",
    "environment-start": "environments are starting, and none of them acts",
    "verifier": "rewards are being computed",
    "checkpoint": "a trainer writes a checkpoint",
    "resize": "ranks are added to the trainer or removed",
    "backpressure": "there is no room for finished rollouts",
    "evaluation": "training waits for an evaluation on held-out prompts",
    "wind-down": "nothing is left to generate at the end of the run; a longer run has less of it",
}
"""What an idle GPU waits for."""
ACTIVITIES = {
    "prefill": "reading prompts",
    "recomputed-prefix": "reading contexts again that the prefix cache lost while a tool ran",
    "decode": "generating tokens",
    "underfilled": "generating too, in batches so small that full ones would not have needed these seconds",
    "evaluate": "generating on held-out prompts",
    "score": "forward passes of critic and reference",
    "train": "forward and backward passes, and the optimizer",
    "verify": "computing rewards, on GPUs of the verifiers' own",
}
ENDS = {"stop": "ended by itself", "length": "cut off"}
"""How a rollout ended."""
TIERS = {
    "measured": "this model was timed on this hardware",
    "composed": "put together from operators, training runs and transfers that were measured",
    "scaled": "unmeasured: measured on other GPUs, in proportion to datasheets",
    "roofline": "unmeasured: from the datasheet's peak and an assumed efficiency",
}
SYSTEMS = {
    "colocated": "the same GPUs generate and train in turn",
    "disaggregated": "some GPUs generate, then others train, in turn",
    "stream-sync": "training starts while the last rollouts are generated; none is stale",
    "one-step-async": "both sides work at the same time, and rollouts are one update behind",
    "stream-async": "both sides work at the same time, and rollouts are at most one update behind",
    "fully-async": "both sides work at the same time, and rollouts may be several updates behind",
}
"""How generation and training take turns."""
EXPLAINED = {
    **{re.escape(name): meaning for name, meaning in SYSTEMS.items()},
    "staleness|[Ss]tale": "how many updates a rollout lags behind the weights that it trains",
    "[Rr]ollouts?": "responses that the model generates for a prompt, to be scored and trained on",
    "[Rr]eplicas?": "copies of the model that generate, each on its own GPUs",
    "[Rr]oofline": "seconds from the datasheet and an assumed efficiency, not measured",
    r"TP\d*": "tensor parallel: each layer is split over this many GPUs",
    r"PP\d*": "pipeline parallel: the layers are split over this many groups of GPUs",
    r"DP\d*": "data parallel: this many copies share the batch",
    r"CP\d*": "context parallel: each sequence is split over this many GPUs",
    r"EP\d*": "expert parallel: the experts of a mixture are split over this many GPUs",
    "ZeRO 3": "weights, gradients and optimizer state are split over the copies",
    "offload": "the optimizer state is kept in host memory",
    "dispatch": "which replica gets which prompt",
    "band": "the range in which a figure may truly lie: sampling error and model error, in the worst case",
    "weight sync": "sending updated weights to the replicas",
    "goodput": "tokens trained on per second",
    "KL": "distance between two policies, in nats a token",
    "[Ee]ntropy": "how undecided the model is at each token",
    "datasheets?": "the maker's peak figures, with an assumed efficiency; not measured",
}
"""Meanings of words, by the pattern of the word."""
PAGE_WORDS = {
    r"\d+ x TP\d+": "replicas, which are copies of the model that generate, times the GPUs that share each layer of one (tensor parallel)",
    "[Bb]ands?": EXPLAINED["band"],
    "[Pp]ools?": "GPUs of one kind in one place",
    "(?:optimizer |training )?[Ss]teps?": "updates of the weights, each from a batch of rollouts",
    "tokens trained on": "output tokens of rollouts that went into an update: what the money is for",
    "[Tt]rainers?": "the GPUs that compute updates; of several, the first one decides on each step",
    "full batch": "as many rollouts as a replica's memory, or its run file, lets it generate at once",
    "groups of one reward": "prompts whose rollouts all got the same reward: they teach nothing",
    "tokens clipped": "tokens whose update was limited, because the policy had moved too far",
    "[Gg]radient": "the direction and size of an update of the weights",
    "[Uu]nderfilled": ACTIVITIES["underfilled"],
    "[Ll]edger": "the account of every rollout: generated, trained on, or left out",
    "MFU": "model FLOPs utilisation: the share of the GPUs' peak arithmetic that training uses",
    "[Cc]omposed": TIERS["composed"],
    "Pareto front": "the plans that no other plan beats in both time and cost",
    "delta sync": "only changed weights are sent to the replicas",
    "[Pp]refill": "reading a prompt, before the first token is generated",
    "[Dd]ecode": "generating tokens one after another",
    "[Ss]eeds?": "the start of the random numbers; another one draws other lengths",
    **EXPLAINED,
}
"""Meanings that a page shows below the part that has a word first, by the pattern of the word."""


def dollars(value: float) -> str:
    """Return dollars as text: with cents, or three digits below one dollar, as in terminal tables."""
    if value >= 1000:
        return f"${value:,.0f}"
    return "$0.00" if value == 0 else format_dollars(value)


def round_dollars(value: float) -> str:
    """Return the dollars of a mark on an axis: "$175", "$0.4"; cents only where there are some."""
    return f"${value:,.0f}" if value == round(value) else dollars(value)


FEW_DAYS = 2
"""Days from which a time is shown in days."""


def money(value: float) -> str:
    """Return dollars of a whole run: "$441", "$9.27"; cents matter only below a hundred dollars."""
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"


def time_in_words(seconds: float) -> str:
    """Return a time of a whole run with three digits: "2.09 days", "31.4 hours", "42 minutes", "45.9 seconds"."""
    for word, size in (("days", SECONDS_PER_DAY), ("hours", SECONDS_PER_HOUR)):
        if seconds >= (FEW_DAYS * size if word == "days" else size):
            return f"{seconds / size:.3g}{NBSP}{word}"
    word, size = ("minutes", 60.0) if seconds >= 60 else ("seconds", 1.0)
    return f"{seconds / size:.3g}{NBSP}{word}"


def seconds(value: float) -> str:
    """Return seconds as text: "13.5 ms", "9.25 s", "243 s"."""
    if 0 < value < 1:
        return f"{value * 1e3:.3g}{NBSP}ms"
    return f"{value:,.0f}{NBSP}s" if value >= 100 else f"{value:.3g}{NBSP}s"


def step_seconds(value: float, band: Band | None) -> str:
    """Return the seconds of a step with their band: "243.1 s (195 to 331)"."""
    return format_step_time(value, None, ends_of(band)).replace(" ", NBSP)


def rounded(value: float) -> str:
    """Return a large number with three digits: "20,700"."""
    digits = max(0, len(f"{value:.0f}") - 3)
    return f"{round(value, -digits):,.0f}"


def tokens_per_second(value: float) -> str:
    """Return a rate: "20,700 tokens/s"."""
    return f"{rounded(value)}{NBSP}tokens/s"


def percent(share: float, digits: int = 0) -> str:
    """Return a share: "14 %", and "0.4 %" rather than "0 %"."""
    if 0 < abs(share) < 0.01 and digits == 0:
        digits = 1
    return f"{share * 100:.{digits}f}{NBSP}%"


def change(share: float) -> str:
    """Return a relative change with its sign: "+64 %"; less than 0.05 % counts as none."""
    if abs(share) < 0.0005:
        return f"±0{NBSP}%"
    digits = 1 if abs(share) < 0.1 else 0
    return f"{share * 100:+.{digits}f}{NBSP}%"


def tiers_text(tiers: Mapping[str, float] | None) -> str:
    """Return the sources of seconds: "97 % composed, 3 % unmeasured"."""
    if tiers is None:
        return "tiers not recorded"
    names = {"scaled": "scaled from other GPUs", "roofline": "unmeasured"}
    found = [f"{percent(s)} {names.get(tier, tier)}" for tier, s in tiers.items() if s > 0.0005]
    return ", ".join(found)


class PlannedSides(NamedTuple):
    """The sides of a plan: who generates, who trains, and further sides."""

    rollout: PlannedSide
    trainer: PlannedSide
    others: dict[str, PlannedSide]
    """By task, in the words of a sentence."""


def planned_sides_of(
    pools: dict[str, PoolConfig],
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    followers: tuple[SecondaryTrainerConfig, ...],
    verifier: VerifierConfig,
) -> PlannedSides:
    """Return all sides of a run file: a plan has the first two."""
    others = {f"train {each.name}": _trainer_side(pools, each) for each in followers}
    if verifier.pool is not None and verifier.num_gpus:
        others["compute rewards"] = _side(pools, verifier.pool, verifier.num_gpus, {})
    generating, *more = (_rollout_side(pools, kind) for kind in reversed(rollout.kinds))
    for kind in more:
        generating = replace(kind, beside=generating)
    return PlannedSides(generating, _trainer_side(pools, trainer), others)


def sides_of_plan(choice: Choice) -> PlannedSides:
    """Return all sides of a plan."""
    others = {} if choice.verifier is None else {"compute rewards": choice.verifier}
    return PlannedSides(choice.rollout, choice.trainer, others)


def _rollout_side(pools: dict[str, PoolConfig], rollout: RolloutConfig) -> PlannedSide:
    keys = (
        *("replicas", "tensor_parallel", "expert_parallel"),
        *("pipeline_parallel", "data_parallel"),
    )
    degrees = {key: int(getattr(rollout, key)) for key in keys}
    return _side(pools, rollout.pool, rollout.num_gpus, degrees)


def _trainer_side(pools: dict[str, PoolConfig], trainer: TrainerConfig) -> PlannedSide:
    keys = (*SHORT, "zero", "micro_batch", "offload")
    degrees = {key: int(own) for key in keys if (own := getattr(trainer, key)) is not None}
    if trainer.steps_on_nvme:
        degrees["offload_to_nvme"] = 1
    return _side(pools, trainer.pool, trainer.num_gpus, degrees)


def _side(
    pools: dict[str, PoolConfig], pool: str, num_gpus: int, degrees: dict[str, int]
) -> PlannedSide:
    return PlannedSide(pool=pool, gpu=pools[pool].gpu, num_gpus=num_gpus, degrees=degrees)


def gpus_text(side: PlannedSide) -> str:
    """Return the GPUs of a side: "8 H20", with the pool if its name adds information; of all kinds of replicas."""
    return listing([_own_gpus_text(kind) for kind in side.kinds])


def _own_gpus_text(side: PlannedSide) -> str:
    place = "" if side.pool in (side.gpu, "local") else f" in {side.pool}"
    word = gpu_word(side.gpu)
    return f"{side.num_gpus}{NBSP}{word.removesuffix('s') if side.num_gpus == 1 else word}{place}"


def gpu_word(gpu: str) -> str:
    """Return the name of a GPU for a sentence: "H20"."""
    return "CPU workers" if gpu == "cpu" else gpu.upper()


def pool_words(gpus: Mapping[str, str]) -> dict[str, str]:
    """Return what a page calls the pools that are named after their GPU: "H20" for "h20"."""
    return {pool: gpu_word(gpu) for pool, gpu in gpus.items() if pool == gpu != "cpu"}


def with_pool_words(text: str, words: Mapping[str, str]) -> str:
    """Return a text in which pools have their words; keys, settings and file names keep the pool's name."""
    if not words:
        return text
    names = "|".join(map(re.escape, words))
    pattern = rf"(?<![\w.=/-])(?:{names})(?![\w=/-]|\.\w)"
    return re.sub(pattern, lambda match: words[match[0]], text)


def share_text(follower: SecondaryTrainerConfig) -> str:
    """Return which complete groups a trainer takes: "one in 2 with staleness at most 2"."""
    limits = [f"of {listing(list(follower.families))}"] if follower.families else []
    for what in ("staleness", "reward"):
        least, most = getattr(follower, f"min_{what}"), getattr(follower, f"max_{what}")
        limits += [f"with {what} at least {least:g}"] if least is not None else []
        limits += [f"with {what} at most {most:g}"] if most is not None else []
    which = "every one" if follower.every == 1 else f"one in {follower.every}"
    return f"{which} {', '.join(limits)}" if limits else which


def rent_text(team: PlannedSides, system: str) -> str:
    """Return the rented GPUs for a sentence: "8 H20 to generate and 8 H800 to train"."""
    rollout, trainer, others = team
    parts = [f"{gpus_text(rollout)} to generate", f"{gpus_text(trainer)} to train"]
    if system == "colocated":
        most = max(rollout, trainer, key=lambda side: side.num_gpus)
        parts = [f"{gpus_text(most)} to generate and train in turn"]
    *first, last = [*parts, *(f"{gpus_text(side)} to {what}" for what, side in others.items())]
    comma = "," if any(" and " in part for part in first) else ""
    return f"{', '.join(first)}{comma} and {last}" if first else last


def sides_text(team: PlannedSides, system: str) -> str:
    """Return all sides and the mode for a table."""
    rollout, trainer, others = team
    parts = [f"{_layout_text(rollout)} generate", f"{_layout_text(trainer)} train"]
    if system == "colocated":
        parts = [f"{_layout_text(rollout)} generate and train{in_brackets(trainer)}"]
    parts += [f"{_layout_text(side)} {what}" for what, side in others.items()]
    return f"{', '.join(parts)}; {system}"


def _layout_text(side: PlannedSide) -> str:
    """Return the GPUs of a side with their degrees: "8 H20 in far (4 x TP2)"."""
    return listing([f"{_own_gpus_text(kind)}{in_brackets(kind)}" for kind in side.kinds])
