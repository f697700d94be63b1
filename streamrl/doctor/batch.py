"""Check that the rollouts of a step divide evenly over ranks, micro-batches, passes and replicas."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm

from streamrl.engine.systems import rollouts_that_fill
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.workload.replica_batch import MeanLengths, rollouts_under_way

MOST_BUBBLE = 0.1
"""Share of a pass that a pipeline may be empty before a warning."""
MOST_UNEVEN = 0.05
"""Share of a step that ranks may wait because rollouts do not divide evenly, before a warning."""
MOST_CUT_OFF, LEAST_CUT_OFF = 0.1, 0.01
"""Shares of outputs cut off at `rollout.max_tokens`: above the first a warning, above the second a note."""
MOST_MICRO_BATCH = 64
MOST_FACTOR = 2.0
"""Largest factor by which a fix may change the batch or the micro-batch before it tries anything else."""


def report_step(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, trainer: TrainerConfig
) -> Iterator[Finding]:
    """Report how the rollouts of a step divide over ranks, passes and replicas."""
    total = algorithm.rollouts_per_step
    per_replica = total / rollout.num_decode_replicas
    text = (
        f"{algorithm.prompts_per_step} prompts x {algorithm.group_size} = {total:,} rollouts a step: "
        f"{total / trainer.data_parallel:,.6g} a data-parallel rank, {_num_fills(total, trainer):,} fills of "
        f"{rollouts_that_fill(trainer)} "
        f"({trainer.data_parallel} x {trainer.micro_batch}); {per_replica:,.6g} a replica, "
        f"{max(1, ceil(per_replica / rollout.max_running))} x max_running {rollout.max_running}"
    )
    yield _finding("ok", "batch", text)


def find_trainer(
    total: int, trainer: TrainerConfig, mean: MeanLengths | None, longest: int
) -> Iterator[Finding]:
    """Find idle ranks and passes of a trainer in a step of `total` rollouts, the longest of `longest` tokens."""
    yield from _find_ranks(total, trainer.data_parallel)
    yield from _find_fills(total, trainer)
    yield from _find_tokens(trainer, mean, longest)
    yield from _find_bubble(total, trainer)


def _find_ranks(total: int, ranks: int) -> Iterator[Finding]:
    if (rest := total % ranks) and (ranks - rest) / total > MOST_UNEVEN:
        text = (
            f"{total:,} rollouts a step do not divide by trainer.data_parallel={ranks}: {ranks - rest} of them "
            f"have one less, and wait"
        )
        yield _finding("warning", "uneven-ranks", text)


def _find_fills(total: int, trainer: TrainerConfig) -> Iterator[Finding]:
    fill = rollouts_that_fill(trainer)
    is_loss = (fill - total % fill) / total > MOST_UNEVEN
    if (rest := total % fill) and is_loss and total % trainer.data_parallel == 0:
        text = (
            f"the last fill of a step has {rest} of {fill} rollouts (trainer.data_parallel="
            f"{trainer.data_parallel} x micro_batch={trainer.micro_batch})"
        )
        yield _finding("warning", "partial-fill", text)


def _find_tokens(
    trainer: TrainerConfig, mean: MeanLengths | None, longest: int
) -> Iterator[Finding]:
    """Report passes that `max_tokens_per_pass` bounds before `micro_batch` does: full passes lose nothing."""
    room = trainer.max_tokens_per_pass
    held = trainer.micro_batch if mean is None else max(1, int(room // mean.total))
    if mean is not None and held <= trainer.micro_batch / 2:
        text = (
            f"passes are bounded by trainer.max_tokens_per_pass={room:,} before micro_batch={trainer.micro_batch}: "
            f"a mean rollout has {mean.total:,.0f} tokens"
        )
        yield _finding("ok", "tokens-per-pass", text)
    elif longest > room:
        text = (
            f"a rollout of more than {room:,} tokens (max_tokens_per_pass) has a pass of its own; the longest "
            f"has {longest:,}"
        )
        yield _finding("ok", "tokens-per-pass", text)


def _find_bubble(total: int, trainer: TrainerConfig) -> Iterator[Finding]:
    """Find pipelines with too few micro-batches.

    The bubble is (p - 1) / (m + p - 1) of a pass, with p stages and m micro-batches (Huang et al.
    2019, GPipe).
    """
    stages, passes = trainer.pipeline_parallel, _num_fills(total, trainer)
    bubble = (stages - 1) / (passes + stages - 1)
    if bubble > MOST_BUBBLE:
        text = (
            f"{passes} micro-batches a step in trainer.pipeline_parallel={stages} stages leave the pipeline "
            f"empty for {bubble:.0%} of a step's passes"
        )
        yield _finding("warning", "pipeline-bubble", text)


def find_replicas(replicas: int, most: int) -> Iterator[Finding]:
    """Find replicas that are idle under every dispatch policy, because there are fewer rollouts than replicas."""
    if most < replicas:
        text = (
            f"rollout.replicas={replicas}, but at most {most} rollouts are under way: {replicas - most} "
            f"replicas have nothing to do"
        )
        yield _finding("warning", "idle-replicas", text)


def find_cut_off(mean: MeanLengths | None, max_tokens: int) -> Iterator[Finding]:
    """Find outputs that are cut off at `rollout.max_tokens`."""
    if mean is None or mean.cut_off < LEAST_CUT_OFF:
        return
    text = (
        f"{mean.cut_off:.0%} of the outputs of workload.lengths would be longer than "
        f"rollout.max_tokens={max_tokens:,}, and end there"
    )
    yield _finding("warning" if mean.cut_off > MOST_CUT_OFF else "ok", "cut-off", text)


def find_left_out(algorithm: AlgorithmConfig, share: float) -> Iterator[Finding]:
    """Report the cost of groups with uniform rewards, or that their share is not set."""
    if not algorithm.leaves_out_uniform:
        return
    most = algorithm.max_gen_batches
    key = f"workload.informative_share={share:.3g}"
    if share == 1:
        text = f"algorithm.dynamic_sampling rejects no group in a simulation with {key}, so it costs nothing there"
        yield _finding("warning", "nothing-left-out", text)
    elif share * most < 1:
        text = (
            f"{key} gives a step of {algorithm.prompts_per_step} groups too few of them within "
            f"algorithm.max_gen_batches={most}: it trains on groups of one reward too"
        )
        yield _finding("warning", "too-few-batches", text)
    else:
        text = f"{key}: {1 / share:,.3g} groups are generated for each that is trained on"
        yield _finding("ok", "left-out", text)


def _num_fills(total: int, trainer: TrainerConfig) -> int:
    return -(-total // rollouts_that_fill(trainer))


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="batch", name=name, text=text)


# Fixes --------------------------------------------------------------------------------------------


def _micro_batches(now: int, most_factor: float = MOST_MICRO_BATCH) -> Iterator[Changes]:
    """Yield other micro-batches up to a factor away. The nearest comes first, the smaller one on a tie."""
    others = [
        size
        for size in range(1, MOST_MICRO_BATCH + 1)
        if size != now and 1 / most_factor <= size / now <= most_factor
    ]
    for size in sorted(others, key=lambda other: (abs(other - now), other)):
        yield {"trainer.micro_batch": size}


def _prompts(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[Changes]:
    """Yield the nearest numbers of prompts whose rollouts divide evenly by one fill of all ranks."""
    unit = lcm(rollouts_that_fill(trainer), algorithm.group_size) // algorithm.group_size
    below = algorithm.prompts_per_step // unit * unit
    for prompts in sorted((below, below + unit), key=lambda n: abs(n - algorithm.prompts_per_step)):
        if 1 / MOST_FACTOR <= prompts / algorithm.prompts_per_step <= MOST_FACTOR:
            yield {"algorithm.prompts_per_step": prompts}


def _even_ranks(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[Changes]:
    yield from _prompts(algorithm, trainer)
    for ranks in range(trainer.data_parallel - 1, 0, -1):
        yield {"trainer.data_parallel": ranks}


def _even_fills(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[Changes]:
    yield from _micro_batches(trainer.micro_batch, MOST_FACTOR)
    yield from _prompts(algorithm, trainer)
    yield from _micro_batches(trainer.micro_batch)


def _more_batches(informative_share: float) -> Iterator[Changes]:
    if informative_share:
        yield {"algorithm.max_gen_batches": ceil(2 / informative_share)}


FIXES = {
    "uneven-ranks": Fix(
        lambda run: _even_ranks(run.algorithm, run.trainer),
        "choose rollouts a step that divide by trainer.data_parallel",
    ),
    "partial-fill": Fix(
        lambda run: _even_fills(run.algorithm, run.trainer),
        "choose rollouts a step that divide by a fill",
    ),
    "pipeline-bubble": Fix(
        lambda run: _micro_batches(run.trainer.micro_batch),
        "train on more rollouts a step, or in fewer stages",
    ),
    "nothing-left-out": Fix(
        lambda run: iter(()),
        "set workload.informative_share to the share of groups whose rewards differ: 1 - uniform_groups of metrics.jsonl",
    ),
    "too-few-batches": Fix(
        lambda run: _more_batches(run.workload.informative_share),
        "choose prompts that the model sometimes solves",
    ),
    "cut-off": Fix(
        lambda run: iter(()),
        "raise rollout.max_tokens, or accept rollouts that end without an answer",
    ),
    "idle-replicas": Fix(
        lambda run: iter([{"rollout.replicas": rollouts_under_way(run.policies, run.algorithm)}]),
        "generate on fewer replicas",
    ),
}
