"""Check that degrees of parallelism divide heads, layers and experts."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig

MOST_UNEVEN = 0.05
"""Share by which a stage may have more layers than the mean before a warning."""
MOST_DEGREE = 1024
"""Largest proposed degree of expert parallelism."""


def find(model: ModelShape, rollout: RolloutConfig, trainer: TrainerConfig) -> Iterator[Finding]:
    """Find dimensions of the model that the run file's degrees cannot split, or split unevenly."""
    before = [*find_replica(model, rollout), *find_trainer(model, trainer)]
    yield from before
    if not before:
        yield _finding("ok", "divides", _all_even(model, rollout.tensor_parallel, trainer))


def find_replica(model: ModelShape, rollout: RolloutConfig) -> Iterator[Finding]:
    """Find dimensions of the model that a replica cannot split."""
    yield from _find_heads(model, "rollout", rollout.tensor_parallel)
    yield from _find_kv_heads(model, rollout.tensor_parallel)
    yield from _find_experts(model, "rollout", rollout.expert_parallel)


def find_trainer(model: ModelShape, trainer: TrainerConfig) -> Iterator[Finding]:
    """Find dimensions of the model that the trainer cannot split, or splits unevenly."""
    yield from _find_heads(model, "trainer", trainer.tensor_parallel)
    yield from _find_layers(model, trainer.pipeline_parallel)
    yield from _find_experts(model, "trainer", trainer.expert_parallel)
    yield from _find_slices(model, trainer.expert_tensor_parallel or 1)


def _find_heads(model: ModelShape, side: str, degree: int) -> Iterator[Finding]:
    """Find tensor-parallel degrees that do not divide the heads or the MLP.

    vLLM rejects heads or MLPs that do not divide. It replicates key-value heads if there are fewer
    of them than ranks (vllm/config/model.py, verify_with_parallel_config; QKVParallelLinear).
    """
    key = f"{side}.tensor_parallel={degree}"
    for what, count in (
        ("attention heads", model.num_heads),
        ("channels of the MLP", _mlp_width(model)),
    ):
        if count % degree:
            text = f"{key} must divide the {count:,} {what} of {model.name}"
            yield _finding("error", f"{side}-heads", text)
            return
    heads = _num_kv_heads(model)
    if heads % degree and degree % heads:
        text = (
            f"{key} must divide, or be a multiple of, the {heads} key-value heads of {model.name}"
        )
        yield _finding("error", f"{side}-heads", text)


def _find_kv_heads(model: ModelShape, degree: int) -> Iterator[Finding]:
    """Report key-value heads that are replicated on several GPUs. This is valid, and memory counts it."""
    heads = _num_kv_heads(model)
    if degree > heads and degree % heads == 0:
        what = "one latent vector" if model.latent is not None else f"{heads} key-value heads"
        text = (
            f"rollout.tensor_parallel={degree}: {model.name} has {what} a token, so each is kept on "
            f"{degree // heads} GPUs"
        )
        yield _finding("ok", "rollout-kv-heads", text)


def _num_kv_heads(model: ModelShape) -> int:
    return 1 if model.latent is not None else model.num_kv_heads


def _mlp_width(model: ModelShape) -> int:
    """Return the channels that tensor ranks split: those of a dense MLP, else of one expert."""
    if model.num_dense_layers or model.experts is None:
        return model.intermediate_size
    return model.experts.intermediate_size


def _find_layers(model: ModelShape, stages: int) -> Iterator[Finding]:
    if stages > model.num_layers:
        text = f"trainer.pipeline_parallel={stages} is more than the {model.num_layers} layers of {model.name}"
        yield _finding("error", "trainer-layers", text)
        return
    fullest, mean = -(-model.num_layers // stages), model.num_layers / stages
    if fullest / mean - 1 > MOST_UNEVEN:
        text = (
            f"trainer.pipeline_parallel={stages} does not divide the {model.num_layers} layers of {model.name}: the "
            f"fullest stage has {fullest}, {fullest / mean - 1:.0%} more than the mean, and the others wait for it"
        )
        yield _finding("warning", "trainer-layers", text)


def _find_experts(model: ModelShape, side: str, degree: int) -> Iterator[Finding]:
    if degree == 1:
        return
    key = f"{side}.expert_parallel={degree}"
    if model.experts is None:
        yield _finding("error", f"{side}-experts", f"{key}, but {model.name} has no experts")
    elif model.experts.num_experts % degree:
        text = f"{key} must divide the {model.experts.num_experts} experts of {model.name}"
        yield _finding("error", f"{side}-experts", text)


def _find_slices(model: ModelShape, degree: int) -> Iterator[Finding]:
    """Find expert tensor-parallel degrees that do not divide the channels of an expert."""
    if degree == 1:
        return
    key = f"trainer.expert_tensor_parallel={degree}"
    if model.experts is None:
        yield _finding("error", "trainer-slices", f"{key}, but {model.name} has no experts")
    elif model.experts.intermediate_size % degree:
        width = model.experts.intermediate_size
        text = f"{key} must divide the {width:,} channels of an expert of {model.name}"
        yield _finding("error", "trainer-slices", text)


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="divisibility", name=name, text=text)


def _all_even(model: ModelShape, rollout_degree: int, trainer: TrainerConfig) -> str:
    experts = f", {model.experts.num_experts} experts" if model.experts is not None else ""
    stages = trainer.pipeline_parallel
    own = trainer.expert_tensor_parallel
    slices = "" if own is None else f" ETP{own}"
    fullest = f", the fullest stage with {-(-model.num_layers // stages)} layers"
    return (
        f"{model.name}: {model.num_heads} heads, {model.num_kv_heads} key-value heads, "
        f"{model.num_layers} layers{experts} divide over rollout TP{rollout_degree} and trainer "
        f"TP{trainer.tensor_parallel} PP{stages} EP{trainer.expert_parallel}{slices}"
        f"{fullest if model.num_layers % stages else ''}"
    )


# Fixes --------------------------------------------------------------------------------------------


def _rollout_degrees(rollout: RolloutConfig, most: int) -> Iterator[Changes]:
    """Yield other degrees, the nearest first, with as many replicas as the same GPUs make."""
    for degree in _nearest(rollout.tensor_parallel, most):
        changes: dict[str, object] = {"rollout.tensor_parallel": degree}
        others = rollout.pipeline_parallel * rollout.data_parallel
        if (replicas := max(1, rollout.num_gpus // degree // others)) != rollout.replicas:
            changes["rollout.replicas"] = replicas
        if rollout.expert_parallel > 1:
            changes["rollout.expert_parallel"] = degree * rollout.data_parallel
        yield changes


def _trainer_degrees(trainer: TrainerConfig, most: int) -> Iterator[Changes]:
    """Yield other tensor degrees on the same number of GPUs. Data-parallel ranks fill the rest, else stages do."""
    for degree in _nearest(trainer.tensor_parallel, most):
        for key, other in (
            ("data_parallel", trainer.pipeline_parallel),
            ("pipeline_parallel", trainer.data_parallel),
        ):
            ranks = trainer.num_gpus // trainer.context_parallel
            if ranks % (degree * other) == 0:
                rest = ranks // degree // other
                yield {"trainer.tensor_parallel": degree, f"trainer.{key}": rest}
        yield {"trainer.tensor_parallel": degree}


def _trainer_stages(trainer: TrainerConfig, num_layers: int) -> Iterator[Changes]:
    for stages in _nearest(trainer.pipeline_parallel, num_layers):
        for key, other in (
            ("data_parallel", trainer.tensor_parallel),
            ("tensor_parallel", trainer.data_parallel),
        ):
            ranks = trainer.num_gpus // trainer.context_parallel
            if ranks % (stages * other) == 0:
                rest = ranks // stages // other
                yield {"trainer.pipeline_parallel": stages, f"trainer.{key}": rest}
        yield {"trainer.pipeline_parallel": stages}


def _rollout_experts(rollout: RolloutConfig, most: int) -> Iterator[Changes]:
    yield {"rollout.expert_parallel": 1}
    yield from _rollout_degrees(rollout, most)


def _trainer_experts(now: int) -> Iterator[Changes]:
    for degree in _nearest(now, MOST_DEGREE):
        yield {"trainer.expert_parallel": degree}


def _trainer_slices(now: int) -> Iterator[Changes]:
    for degree in _nearest(now, MOST_DEGREE):
        yield {"trainer.expert_tensor_parallel": degree}
    yield {"trainer.expert_tensor_parallel": None}


def _gpus_per_node(cluster: ClusterConfig, pool: str) -> int:
    return cluster.pools[pool].gpus_per_node


def _nearest(degree: int, most: int) -> list[int]:
    """Return other degrees up to `most`, sorted by their factor from `degree`, the smaller one on a tie."""
    others = [other for other in range(1, most + 1) if other != degree]
    return sorted(others, key=lambda other: max(other / degree, degree / other))


FIXES = {
    "rollout-heads": Fix(
        lambda run: _rollout_degrees(run.rollout, _gpus_per_node(run.cluster, run.rollout.pool)),
        "choose a tensor_parallel that divides both heads and a node",
    ),
    "trainer-heads": Fix(
        lambda run: _trainer_degrees(run.trainer, _gpus_per_node(run.cluster, run.trainer.pool)),
        "choose a tensor_parallel that divides both heads and a node",
    ),
    "trainer-layers": Fix(
        lambda run: _trainer_stages(run.trainer, load_model(run.model).num_layers),
        "no other number of stages on these GPUs divides the layers and fits: let the back end distribute them "
        "unevenly, fewest to the first and the last stage",
    ),
    "rollout-experts": Fix(
        lambda run: _rollout_experts(run.rollout, _gpus_per_node(run.cluster, run.rollout.pool)),
        "choose an expert_parallel that divides the experts",
    ),
    "trainer-experts": Fix(
        lambda run: _trainer_experts(run.trainer.expert_parallel),
        "choose an expert_parallel that divides the experts",
    ),
    "trainer-slices": Fix(
        lambda run: _trainer_slices(run.trainer.expert_tensor_parallel or 1),
        "choose an expert_tensor_parallel that divides the channels of an expert",
    ),
}
