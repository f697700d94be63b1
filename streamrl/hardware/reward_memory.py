"""The reward model of a run: its shape, and whether a GPU of the verifier's pool holds it."""

from __future__ import annotations

from pathlib import Path

from streamrl.hardware.config_json import read_config_json
from streamrl.hardware.memory import longest_sequence
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profiles import load_gpu
from streamrl.hardware.workspace import CHUNK, workspace_bytes
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.reward_config import REWARD_MODEL
from streamrl.runfile.workload_config import HUB


def reward_model_key(run: Run) -> str:
    """Return the key of a run's reward model."""
    places = (at for at, each in enumerate(run.verifier.reward) if each.scorer == REWARD_MODEL)
    return f"verifier.reward.{next(places)}.model"


def reward_shape(run: Run) -> ModelShape | None:
    """Return the shape of a run's reward model; None where it has none, or one of the hub, whose shape is not here.

    Raises:
        RunError: its directory has no config.json that is known.
    """
    reward = run.verifier.reward_model
    if reward is None or reward.model is None or reward.model.startswith(HUB):
        return None
    try:
        return read_config_json(Path(reward.model) / "config.json")
    except RunError as error:
        key = reward_model_key(run)
        text = str(error).replace("model.path", key, 1)
        raise RunError(key, reward.model, text=text) from None


def reward_model_bytes(run: Run) -> dict[str, float]:
    """Return the bytes on a GPU of the verifier's, by what takes them; nothing where the shape is not known.

    Its head has one output in place of one for each token, which takes next to nothing.
    """
    shape = reward_shape(run)
    if shape is None:
        return {}
    verifier, dtype = run.verifier, run.model.dtype
    degree = max(1, verifier.gpus_per_worker)
    parameters = shape.num_parameters
    if not shape.has_tied_embeddings:
        parameters -= shape.vocab_size * shape.hidden_size
    chunks = max(verifier.max_tokens_per_pass, longest_sequence(run)) / CHUNK
    return {
        "weights": parameters * BYTES[dtype] / degree,
        "workspace": workspace_bytes(shape, dtype, 0, degree) * chunks,
    }


def check_reward_memory(run: Run) -> None:
    """Raise `RunError` where a GPU of the verifier's pool does not hold the reward model, with the numbers."""
    items, pool = reward_model_bytes(run), run.verifier.pool
    if not items or pool is None:
        return
    gpu = load_gpu(run.cluster.pools[pool].gpu)
    need = sum(items.values())
    if need > gpu.usable_memory:
        listed = " + ".join(f"{size / 1e9:.1f} of {name}" for name, size in items.items())
        degree = run.verifier.gpus_per_worker
        raise RunError(
            "verifier.gpus_per_worker",
            degree,
            None,
            f"verifier: {need / 1e9:.1f} GB a GPU ({listed}) of the reward model with gpus_per_worker={degree}, but "
            f"{gpu.name} has {gpu.usable_memory / 1e9:.1f} GB for tensors",
            ("verifier.pool", "verifier.max_tokens_per_pass"),
        )
