"""What may not stand together in a run file."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import ceil
from typing import get_args

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.bounds import POSITIVE, SHARE, check_bounds
from streamrl.runfile.config import DEVICE, Run
from streamrl.runfile.dtypes import NARROW
from streamrl.runfile.errors import Bounds, OneOf, RunError, shown
from streamrl.runfile.fault_checks import check_faults
from streamrl.runfile.paths import paths_of
from streamrl.runfile.plan_checks import check_plan
from streamrl.runfile.policy_checks import POLICY_CHECKS
from streamrl.runfile.pools import POOL_CHECKS
from streamrl.runfile.prompt_checks import check_prompt_sources
from streamrl.runfile.reward_checks import check_rewards
from streamrl.runfile.share_checks import check_shares
from streamrl.runfile.sides import kind_key
from streamrl.runfile.trainers import trainer_key
from streamrl.runfile.workload_config import FreeRanker

MOST_ROLLOUTS = 10**7
"""Of one step; every rollout under way is held in memory."""

LONGEST_PATH, LONGEST_NAME = 4095, 255
"""Bytes, on Linux (linux/limits.h)."""


def check_run(run: Run) -> None:
    """Raise `RunError` where a value is out of bounds, or values contradict each other."""
    for check in CHECKS:
        check(run)


def _check_model(run: Run) -> None:
    model = run.model
    if (model.name is None) == (model.path is None):
        found = f"both {model.name!r} and {shown(model.path)}" if model.name else "neither"
        text = f"model needs exactly one of name and path, got {found}"
        raise RunError("model.name", model.name, text=text, others=("model.path",))


def _check_algorithms(run: Run) -> None:
    for number in range(run.num_trainers):
        key = f"{trainer_key(number)}.algorithm" if number else "algorithm"
        _check_algorithm(run.as_seen_by(number).algorithm, key)


def _check_algorithm(algorithm: AlgorithmConfig, key: str) -> None:
    if algorithm.dynamic_sampling and not algorithm.trains_whole_groups:
        raise RunError(
            f"{key}.dynamic_sampling",
            algorithm.dynamic_sampling,
            OneOf([False]),
            f"{key}.dynamic_sampling leaves out groups of one reward, which {algorithm.name} learns from",
            (f"{key}.name",),
        )
    if algorithm.kl_in == "reward" and not algorithm.has_rewards_of_tokens:
        raise RunError(
            f"{key}.kl_in",
            algorithm.kl_in,
            OneOf(["loss"]),
            f"{key}.kl_in 'reward' takes the KL term off the reward of each token, and {algorithm.name} has but one "
            "reward for a rollout: reinforce++ and ppo can",
            (f"{key}.name",),
        )
    if algorithm.imitates and algorithm.correction is not None:
        raise RunError(
            f"{key}.correction",
            algorithm.correction,
            OneOf([None]),
            f"{key}.correction must be absent for {algorithm.name}, which learns from chosen rollouts whoever made "
            f"them, got {algorithm.correction!r}",
            (f"{key}.name",),
        )
    if algorithm.trains_whole_groups and algorithm.group_size < 2:
        raise RunError(
            "algorithm.group_size",
            algorithm.group_size,
            Bounds(2),
            f"algorithm.group_size must be at least 2 for {algorithm.name}, "
            f"got {algorithm.group_size}",
            (f"{key}.name",),
        )


def _check_batch(run: Run) -> None:
    algorithm, ranks = run.algorithm, run.trainer.data_parallel
    if algorithm.rollouts_per_step < ranks:
        raise RunError(
            "algorithm.prompts_per_step",
            algorithm.prompts_per_step,
            Bounds(ceil(ranks / algorithm.group_size)),
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} x group_size="
            f"{algorithm.group_size} gives {algorithm.rollouts_per_step} rollouts, fewer than "
            f"trainer.data_parallel={ranks}",
            ("algorithm.group_size", "trainer.data_parallel"),
        )


def _check_optimizer_steps(run: Run) -> None:
    steps, rollouts = run.framework.optimizer_steps, run.algorithm.rollouts_per_step
    if steps > rollouts:
        raise RunError(
            "framework.optimizer_steps",
            steps,
            Bounds(1, rollouts),
            f"framework.optimizer_steps must be at most the {rollouts} rollouts of a step, got {steps}",
            ("algorithm.prompts_per_step",),
        )


def _check_step(run: Run) -> None:
    algorithm = run.algorithm
    if algorithm.rollouts_per_step > MOST_ROLLOUTS:
        raise RunError(
            "algorithm.prompts_per_step",
            algorithm.prompts_per_step,
            Bounds(1, MOST_ROLLOUTS // algorithm.group_size),
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} x group_size="
            f"{algorithm.group_size} must be at most {MOST_ROLLOUTS} rollouts",
            ("algorithm.group_size",),
        )


def _check_lengths(run: Run) -> None:
    lengths, most = run.workload.lengths, run.workload.max_prompt_tokens
    if lengths is not None and not 1 <= lengths.prompt_tokens <= most:
        raise RunError(
            "workload.lengths.prompt_tokens",
            lengths.prompt_tokens,
            Bounds(1, most),
            f"workload.lengths.prompt_tokens must be between 1 and workload.max_prompt_tokens="
            f"{most}, got {lengths.prompt_tokens}",
            ("workload.max_prompt_tokens",),
        )


def _check_ranker(run: Run) -> None:
    lengths = run.workload.lengths
    if lengths is None:
        return
    if lengths.ranker == "scores" and lengths.ranker_scores is None:
        text = "workload.lengths.ranker_scores is missing: ranker is 'scores'"
        others = ("workload.lengths.ranker",)
        raise RunError("workload.lengths.ranker_scores", None, str, text, others)
    for ranker, kind, what in (
        ("history", "groups", "which knows the samples of a prompt"),
        ("recorded", "trace", "which holds what was expected"),
    ):
        if lengths.ranker == ranker and lengths.kind != kind:
            raise RunError(
                "workload.lengths.ranker",
                lengths.ranker,
                OneOf(get_args(FreeRanker)),
                f"workload.lengths.ranker {ranker!r} needs kind {kind!r}, {what}, got {lengths.kind!r}",
                ("workload.lengths.kind",),
            )


def _check_speculative(run: Run) -> None:
    if run.rollout.speculative is not None and run.rollout.speculative.acceptance is None:
        key = "rollout.speculative.acceptance"
        text = f"{key} is missing: nobody knows but you how many drafted tokens are accepted"
        raise RunError(key, None, SHARE, text)


def _check_sync(run: Run) -> None:
    sync = run.sync
    if sync.mode == "delta" and run.model.dtype == "float32":
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full", "lora"]),
            "sync.mode 'delta' needs a model.dtype of 16 bits, got 'float32', "
            "in which a step changes nearly every value",
            ("model.dtype",),
        )
    if sync.mode == "delta" and run.rollout.dtype in NARROW:
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full", "lora"]),
            f"sync.mode 'delta' sends what changes in 16 bits, so rollout.dtype must be no narrower, got "
            f"{run.rollout.dtype!r}",
            ("rollout.dtype",),
        )
    if sync.backend == "nccl-reshard" and sync.mode != "full":
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full"]),
            f"sync.backend 'nccl-reshard' moves shards of all weights, so sync.mode must be 'full', "
            f"got {sync.mode!r}",
            ("sync.backend",),
        )


def _check_precision(run: Run) -> None:
    rollout = run.rollout
    if rollout.weight_only and rollout.dtype not in NARROW:
        raise RunError(
            "rollout.weight_only",
            rollout.weight_only,
            OneOf([False]),
            f"rollout.weight_only is for weights of {', '.join(NARROW)}, got rollout.dtype {rollout.dtype!r}",
            ("rollout.dtype",),
        )


def _check_latencies(run: Run) -> None:
    _check_latency("policies.latency", run.policies.latency)
    for place, other in enumerate(run.rollout.others):
        _check_latency(f"{kind_key(place + 1)}.latency", other.latency)


def _check_latency(key: str, points: tuple[tuple[int, float], ...] | None) -> None:
    if points is None:
        return
    batches = [batch for batch, _ in points]
    if not batches or batches != sorted(set(batches)) or batches[0] < 1:
        text = f"{key} must hold batches in rising order from 1, got {batches}"
        raise RunError(key, points, list, text)
    for batch, seconds in points:
        if not POSITIVE.hold(seconds):
            text = f"{key} at batch {batch} must be {POSITIVE}, got {seconds}"
            raise RunError(key, points, list, text)


def _check_paths(run: Run) -> None:
    for key, path in paths_of(run).items():
        names = os.fsencode(path).split(b"/")
        is_long = len(os.fsencode(path)) > LONGEST_PATH or max(map(len, names)) > LONGEST_NAME
        if is_long or "\0" in path:
            raise RunError(key, path, None, f"{key} is no path that can be: {shown(path)}")


def _check_device(run: Run) -> None:
    device = run.execute.device
    if not DEVICE.fullmatch(device):
        text = f"execute.device must be auto, cpu, cuda or cuda:N, got {device!r}"
        raise RunError("execute.device", device, OneOf(["auto", "cpu", "cuda"]), text)


CHECKS: tuple[Callable[[Run], None], ...] = (
    *(
        _check_model,
        check_bounds,
        *POOL_CHECKS,
        _check_algorithms,
        _check_batch,
        _check_step,
        _check_optimizer_steps,
        _check_lengths,
    ),
    *(
        _check_ranker,
        _check_speculative,
        _check_sync,
        _check_precision,
        _check_latencies,
        *POLICY_CHECKS,
        check_plan,
        check_faults,
        check_rewards,
        check_prompt_sources,
        check_shares,
        _check_paths,
        _check_device,
    ),
)
"""Each raises `RunError`; later ones rely on earlier ones."""
