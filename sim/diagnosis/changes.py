"""The changes of a run file that a diagnosis tries by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.sim.calibration.disagreement import takes_turns

Settings = dict[str, object]
"""New values of a run file, by dotted key."""
TOKENS_PER_PASS = 32_768
"""Tokens of a pass that keep an H100 busy; a pass of fewer tokens waits for weights and launches."""
MEMORY = (0.6, 0.75, 0.9)
"""Shares of GPU memory for an engine. The largest is vLLM's own default."""
RUNNING = (256, 1024)
"""Rollouts that a replica decodes at once. The smaller is vLLM's own default."""


MICRO_BATCH = 64
"""Rollouts of a micro-batch that leave the limit of a pass to its tokens."""


class Sections(NamedTuple):
    """The sections of a run file that changes read."""

    rollout: RolloutConfig
    trainer: TrainerConfig
    policies: PoliciesConfig


TRAINING, GENERATION = ("score", "train"), ("generation",)


class Change(NamedTuple):
    """One change that may make a step shorter."""

    what: str
    """What to do, in words."""
    key: str
    """The key of the run file that it is about."""
    stages: tuple[str, ...]
    """Stages that it may make shorter."""
    propose: Callable[[Sections], Iterator[Settings]]
    """Yield the settings to try; none if they do not apply to the run."""


def _pack(now: Sections) -> Iterator[Settings]:
    if now.trainer.packing != "packed":
        yield {"trainer.packing": "packed"}


def _lengthen_passes(now: Sections) -> Iterator[Settings]:
    tokens = 2 * now.trainer.max_tokens_per_pass
    while tokens <= TOKENS_PER_PASS:
        yield {
            "trainer.max_tokens_per_pass": tokens,
            "trainer.micro_batch": max(now.trainer.micro_batch, MICRO_BATCH),
        }
        tokens *= 2


def _narrow_replicas(now: Sections) -> Iterator[Settings]:
    degree = now.rollout.tensor_parallel
    if now.rollout.others or now.rollout.expert_parallel > 1:
        return
    while degree > 1 and degree % 2 == 0:
        degree //= 2
        num = now.rollout.replicas * now.rollout.tensor_parallel // degree
        yield {"rollout.tensor_parallel": degree, "rollout.replicas": num}


def _narrow_trainer(now: Sections) -> Iterator[Settings]:
    degree, ranks = now.trainer.tensor_parallel, now.trainer.data_parallel
    if now.trainer.expert_parallel > 1:
        return
    while degree > 1 and degree % 2 == 0:
        degree, ranks = degree // 2, 2 * ranks
        yield {"trainer.tensor_parallel": degree, "trainer.data_parallel": ranks}


def _give_memory(now: Sections) -> Iterator[Settings]:
    for share in MEMORY:
        if share > now.rollout.memory_utilization:
            yield {"rollout.memory_utilization": share}


def _run_more(now: Sections) -> Iterator[Settings]:
    for most in RUNNING:
        if most > now.rollout.max_running:
            yield {"rollout.max_running": most}


def _recompute_less(now: Sections) -> Iterator[Settings]:
    if now.trainer.recompute == "full":
        yield {"trainer.recompute": "selective"}
    if now.trainer.recompute != "none":
        yield {"trainer.recompute": "none"}


def _keep_on_gpu(now: Sections) -> Iterator[Settings]:
    if now.trainer.offload:
        yield {"trainer.offload": False}


def _fuse(now: Sections) -> Iterator[Settings]:
    if now.trainer.kernels != "fused":
        yield {"trainer.kernels": "fused"}


def _overlap(now: Sections) -> Iterator[Settings]:
    if now.rollout.pool != now.trainer.pool and takes_turns(now.policies):
        yield {"policies.system": "one-step-async"}


CHANGES = (
    Change("pack rollouts instead of padding them", "trainer.packing", TRAINING, _pack),
    Change(
        "allow more tokens in a pass of the trainer",
        "trainer.max_tokens_per_pass",
        TRAINING,
        _lengthen_passes,
    ),
    Change(
        "use less tensor parallelism and more replicas for rollouts",
        "rollout.tensor_parallel",
        GENERATION,
        _narrow_replicas,
    ),
    Change(
        "use less tensor parallelism and more data parallelism in training",
        "trainer.tensor_parallel",
        TRAINING,
        _narrow_trainer,
    ),
    Change(
        "give the inference engine more GPU memory",
        "rollout.memory_utilization",
        GENERATION,
        _give_memory,
    ),
    Change(
        "let the inference engine run more rollouts at once",
        "rollout.max_running",
        GENERATION,
        _run_more,
    ),
    Change("recompute fewer activations", "trainer.recompute", ("train",), _recompute_less),
    Change("keep optimizer and weights on the GPUs", "trainer.offload", TRAINING, _keep_on_gpu),
    Change("fuse elementwise kernels of the trainer", "trainer.kernels", TRAINING, _fuse),
    Change(
        "generate the next batch while the trainer trains", "policies.system", GENERATION, _overlap
    ),
)
