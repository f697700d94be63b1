"""Check that the rollouts of a step divide evenly over ranks, micro-batches, passes and replicas."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm

from streamrl.engine.systems import rollouts_that_fill
from streamrl.hardware.resolved import longest_sequence
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.workload.replica_batch import mean_lengths, rollouts_under_way

MOST_BUBBLE = 0.1
"""Share of a pass that a pipeline may be empty before a warning."""
MOST_UNEVEN = 0.05
"""Share of a step that ranks may wait because rollouts do not divide evenly, before a warning."""
MOST_CUT_OFF, LEAST_CUT_OFF = 0.1, 0.01
"""Shares of outputs cut off at `rollout.max_tokens`: above the first a warning, above the second a note."""
MOST_MICRO_BATCH = 64
MOST_FACTOR = 2.0
"""Largest factor by which a fix may change the batch or the micro-batch before it tries anything else."""


def find(run: Run) -> Iterator[Finding]:
    """Find idle ranks, passes and replicas of a step."""
    yield _finding("ok", "batch", _sum_up(run))
    yield from find_trainer(run)
    yield from _find_replicas(run)
    yield from _find_cut_off(run)
    if run.algorithm.leaves_out_uniform:
        yield _find_left_out(run)


def find_trainer(run: Run) -> Iterator[Finding]:
    """Find idle ranks and passes of the trainer in a step."""
    yield from _find_ranks(run)
    yield from _find_fills(run)
    yield from _find_tokens(run)
    yield from _find_bubble(run)


def _sum_up(run: Run) -> str:
    trainer, total = run.trainer, run.algorithm.rollouts_per_step
    per_replica = total / run.rollout.num_replicas
    return (
        f"{run.algorithm.prompts_per_step} prompts x {run.algorithm.group_size} = {total:,} rollouts a step: "
        f"{total / trainer.data_parallel:,.6g} a data-parallel rank, {_num_fills(run):,} fills of "
        f"{rollouts_that_fill(run)} "
        f"({trainer.data_parallel} x {trainer.micro_batch}); {per_replica:,.6g} a replica, "
        f"{max(1, ceil(per_replica / run.rollout.max_running))} x max_running {run.rollout.max_running}"
    )


def _find_ranks(run: Run) -> Iterator[Finding]:
    total, ranks = run.algorithm.rollouts_per_step, run.trainer.data_parallel
    if (rest := total % ranks) and (ranks - rest) / total > MOST_UNEVEN:
        text = (
            f"{total:,} rollouts a step do not divide by trainer.data_parallel={ranks}: {ranks - rest} of them "
            f"have one less, and wait"
        )
        yield _finding("warning", "uneven-ranks", text)


def _find_fills(run: Run) -> Iterator[Finding]:
    total, fill = run.algorithm.rollouts_per_step, rollouts_that_fill(run)
    is_loss = (fill - total % fill) / total > MOST_UNEVEN
    if (rest := total % fill) and is_loss and total % run.trainer.data_parallel == 0:
        text = (
            f"the last fill of a step has {rest} of {fill} rollouts (trainer.data_parallel="
            f"{run.trainer.data_parallel} x micro_batch={run.trainer.micro_batch})"
        )
        yield _finding("warning", "partial-fill", text)


def _find_tokens(run: Run) -> Iterator[Finding]:
    """Report passes that `max_tokens_per_pass` bounds before `micro_batch` does: full passes lose nothing."""
    trainer, mean = run.trainer, mean_lengths(run)
    longest = longest_sequence(run.rollout, run.workload)
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


def _find_bubble(run: Run) -> Iterator[Finding]:
    """Find pipelines with too few micro-batches.

    The bubble is (p - 1) / (m + p - 1) of a pass, with p stages and m micro-batches (Huang et al.
    2019, GPipe).
    """
    stages, passes = run.trainer.pipeline_parallel, _num_fills(run)
    bubble = (stages - 1) / (passes + stages - 1)
    if bubble > MOST_BUBBLE:
        text = (
            f"{passes} micro-batches a step in trainer.pipeline_parallel={stages} stages leave the pipeline "
            f"empty for {bubble:.0%} of a step's passes"
        )
        yield _finding("warning", "pipeline-bubble", text)


def _find_replicas(run: Run) -> Iterator[Finding]:
    """Find replicas that are idle under every dispatch policy, because there are fewer rollouts than replicas."""
    most, replicas = rollouts_under_way(run), run.rollout.num_replicas
    if most < replicas:
        text = (
            f"rollout.replicas={replicas}, but at most {most} rollouts are under way: {replicas - most} "
            f"replicas have nothing to do"
        )
        yield _finding("warning", "idle-replicas", text)


def _find_cut_off(run: Run) -> Iterator[Finding]:
    """Find outputs that are cut off at `rollout.max_tokens`."""
    mean = mean_lengths(run)
    if mean is None or mean.cut_off < LEAST_CUT_OFF:
        return
    text = (
        f"{mean.cut_off:.0%} of the outputs of workload.lengths would be longer than "
        f"rollout.max_tokens={run.rollout.max_tokens:,}, and end there"
    )
    yield _finding("warning" if mean.cut_off > MOST_CUT_OFF else "ok", "cut-off", text)


def _find_left_out(run: Run) -> Finding:
    """Report the cost of groups with uniform rewards, or that their share is not set."""
    share, most = run.workload.informative_share, run.algorithm.max_gen_batches
    key = f"workload.informative_share={share:.3g}"
    if share == 1:
        text = f"algorithm.dynamic_sampling rejects no group in a simulation with {key}, so it costs nothing there"
        return _finding("warning", "nothing-left-out", text)
    if share * most < 1:
        text = (
            f"{key} gives a step of {run.algorithm.prompts_per_step} groups too few of them within "
            f"algorithm.max_gen_batches={most}: it trains on groups of one reward too"
        )
        return _finding("warning", "too-few-batches", text)
    return _finding(
        "ok",
        "left-out",
        f"{key}: {1 / share:,.3g} groups are generated for each that is trained on",
    )


def _num_fills(run: Run) -> int:
    return -(-run.algorithm.rollouts_per_step // rollouts_that_fill(run))


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="batch", name=name, text=text)


# Fixes --------------------------------------------------------------------------------------------


def _micro_batches(run: Run, most_factor: float = MOST_MICRO_BATCH) -> Iterator[Changes]:
    """Yield other micro-batches up to a factor away. The nearest comes first, the smaller one on a tie."""
    now = run.trainer.micro_batch
    others = [
        size
        for size in range(1, MOST_MICRO_BATCH + 1)
        if size != now and 1 / most_factor <= size / now <= most_factor
    ]
    for size in sorted(others, key=lambda other: (abs(other - now), other)):
        yield {"trainer.micro_batch": size}


def _prompts(run: Run) -> Iterator[Changes]:
    """Yield the nearest numbers of prompts whose rollouts divide evenly by one fill of all ranks."""
    algorithm, fill = run.algorithm, rollouts_that_fill(run)
    unit = lcm(fill, algorithm.group_size) // algorithm.group_size
    below = algorithm.prompts_per_step // unit * unit
    for prompts in sorted((below, below + unit), key=lambda n: abs(n - algorithm.prompts_per_step)):
        if 1 / MOST_FACTOR <= prompts / algorithm.prompts_per_step <= MOST_FACTOR:
            yield {"algorithm.prompts_per_step": prompts}


def _even_ranks(run: Run) -> Iterator[Changes]:
    yield from _prompts(run)
    for ranks in range(run.trainer.data_parallel - 1, 0, -1):
        yield {"trainer.data_parallel": ranks}


def _even_fills(run: Run) -> Iterator[Changes]:
    yield from _micro_batches(run, MOST_FACTOR)
    yield from _prompts(run)
    yield from _micro_batches(run)


def _nothing(run: Run) -> Iterator[Changes]:
    """Yield nothing: the right value depends on the model and its prompts."""
    yield from ()


def _more_batches(run: Run) -> Iterator[Changes]:
    if run.workload.informative_share:
        yield {"algorithm.max_gen_batches": ceil(2 / run.workload.informative_share)}


def _fewer_replicas(run: Run) -> Iterator[Changes]:
    yield {"rollout.replicas": rollouts_under_way(run)}


FIXES = {
    "uneven-ranks": Fix(_even_ranks, "choose rollouts a step that divide by trainer.data_parallel"),
    "partial-fill": Fix(_even_fills, "choose rollouts a step that divide by a fill"),
    "pipeline-bubble": Fix(_micro_batches, "train on more rollouts a step, or in fewer stages"),
    "nothing-left-out": Fix(
        _nothing,
        "set workload.informative_share to the share of groups whose rewards differ: 1 - uniform_groups of metrics.jsonl",
    ),
    "too-few-batches": Fix(_more_batches, "choose prompts that the model sometimes solves"),
    "cut-off": Fix(
        _nothing, "raise rollout.max_tokens, or accept rollouts that end without an answer"
    ),
    "idle-replicas": Fix(_fewer_replicas, "generate on fewer replicas"),
}
