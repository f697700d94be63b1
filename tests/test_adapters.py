"""LoRA: what a replica merges is what the trainer computes with, and nothing else of the model ever changes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from streamrl.executor.adapter_layers import ADAPTERS
from streamrl.executor.launchers.handles import InProcess
from streamrl.executor.launchers.launcher import RELAY
from streamrl.executor.roles import Arrived, Manifest, Parcel
from streamrl.executor.tokens import ID
from streamrl.executor.trainer.adapters import (
    adapters_of,
    add_adapters,
    load_adapters,
    save_model,
    without_adapters,
)
from streamrl.executor.trainer.learner import load_learner
from streamrl.executor.trainer.optimizers import make_optimizer
from streamrl.executor.trainer.sequences import NOTHING
from streamrl.executor.transfer.bucket_check import verify_buckets
from streamrl.executor.transfer.shared_memory import read_buckets, write_buckets
from tests.test_end_to_end import SYMBOLS
from tests.test_trainer import make_config
from tests.tiny_model import reference, save_tiny_model

RANK = 4
ALPHA = 6.0
SCALE = ALPHA / RANK
IDS = torch.arange(2, 12).unsqueeze(0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", SYMBOLS)
    return tmp_path / "model"


def adapted(directory: Path) -> torch.nn.Module:
    """Return a model whose adapters say something."""
    model: torch.nn.Module = reference(directory)
    add_adapters(model, RANK, ALPHA)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


async def arrived(directory: Path, manifest: Manifest, *, merges: bool) -> dict[str, torch.Tensor]:
    """Return what a relay makes of adapters."""
    config = {"model": str(directory), "dtype": "float32", "merges_adapters": merges}
    relay = InProcess(RELAY, config)
    await relay.call("start", returns=str)
    try:
        parcel = await relay.call("pack", manifest, "lora", None, returns=Parcel)
        came = await relay.call("unpack", parcel, True, returns=Arrived)
        assert verify_buckets(came.manifest) == manifest.checksum
        return {name: each.clone() for name, each in read_buckets(came.manifest)}
    finally:
        await relay.close()


def test_fresh_adapters_change_nothing_and_alone_are_trained(directory: Path) -> None:
    plain, model = reference(directory), reference(directory)
    add_adapters(model, RANK, ALPHA)
    assert torch.equal(logits(plain), logits(model))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    layers = [name for name, each in plain.named_modules() if isinstance(each, torch.nn.Linear)]
    assert len(trained) == 2 * (len(layers) - 1)
    config = make_config(str(directory), adapter_rank=RANK)
    (group,) = make_optimizer(config, model).param_groups
    assert len(group["params"]) == len(trained)


def test_what_a_relay_merges_computes_what_the_trainer_does(
    directory: Path, tmp_path: Path
) -> None:
    model = adapted(directory)
    manifest = write_buckets(adapters_of(model.state_dict().items(), SCALE), tmp_path, 1)
    whole = (directory / "model.safetensors").stat().st_size
    assert manifest.num_bytes < whole
    served = reference(directory)
    served.load_state_dict(asyncio.run(arrived(directory, manifest, merges=True)), strict=False)
    assert not torch.allclose(logits(reference(directory)), logits(model), atol=1e-3)
    assert torch.allclose(logits(served), logits(model), atol=1e-5)


def test_a_relay_leaves_adapters_alone_where_replicas_compute_with_them(
    directory: Path, tmp_path: Path
) -> None:
    tensors = dict(adapters_of(adapted(directory).state_dict().items(), SCALE))
    manifest = write_buckets(tensors.items(), tmp_path, 1)
    found = asyncio.run(arrived(directory, manifest, merges=False))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], each) for name, each in tensors.items())


def test_a_checkpoint_is_a_model_and_goes_on_with_its_adapters(
    directory: Path, tmp_path: Path
) -> None:
    model = adapted(directory)
    save_model(model, model.state_dict().items(), tmp_path / "saved")
    assert torch.allclose(logits(reference(tmp_path / "saved")), logits(model), atol=1e-5)
    from peft import PeftModel

    weights = {path.name for path in (tmp_path / "saved").glob("*.safetensors")}
    assert weights == {"model.safetensors"}, "an engine takes all of them for the model's"
    as_peft_has_it = PeftModel.from_pretrained(reference(directory), tmp_path / "saved" / ADAPTERS)
    assert torch.allclose(logits(as_peft_has_it), logits(model), atol=1e-6)
    again = reference(directory)
    add_adapters(again, RANK, ALPHA)
    load_adapters(again, tmp_path / "saved", RANK)
    assert torch.allclose(logits(again), logits(model), atol=1e-6)
    scaled = reference(directory)
    add_adapters(scaled, RANK, 3 * ALPHA)
    load_adapters(scaled, tmp_path / "saved", RANK)
    assert torch.allclose(logits(scaled), logits(model), atol=1e-6)
    other = reference(directory)
    add_adapters(other, RANK + 1, ALPHA)
    with pytest.raises(ValueError, match="no adapters of rank 5"):
        load_adapters(other, tmp_path / "saved", RANK + 1)
    with pytest.raises(ValueError, match="no checkpoint of adapters"):
        load_adapters(other, directory, RANK)


def test_adapters_of_another_model_are_refused(directory: Path, tmp_path: Path) -> None:
    model = adapted(directory)
    renamed = [(f"x.{name}", each) for name, each in adapters_of(model.state_dict().items(), SCALE)]
    manifest = write_buckets(renamed, tmp_path, 1)
    with pytest.raises(ValueError, match=r"no weights for the adapters of x\.model"):
        asyncio.run(arrived(directory, manifest, merges=True))


def test_weights_beside_adapters_are_in_the_format_of_passes_and_adapters_learn_in_float32(
    directory: Path, tmp_path: Path
) -> None:
    settings = make_config(str(directory), adapter_rank=RANK, dtype="bfloat16")
    model = load_learner(settings, None).backend.model
    formats = {each.requires_grad: each.dtype for each in model.parameters()}
    assert formats == {True: torch.float32, False: torch.bfloat16}
    save_model(model, model.state_dict().items(), tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {each.dtype for each in saved.values()} == {torch.float32}
    assert saved.keys() == load_file(directory / "model.safetensors").keys(), "tied ones once"


def test_the_reference_is_the_model_without_its_adapters(directory: Path) -> None:
    model = adapted(directory)
    plain, own = logits(reference(directory)), logits(model)
    with without_adapters(model):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), own)
    assert all(each.requires_grad == ("lora_" in name) for name, each in model.named_parameters())


def test_adapters_are_held_against_the_initial_weights_without_a_second_model(
    directory: Path,
) -> None:
    settings = make_config(str(directory), adapter_rank=RANK, kl_coefficient=0.1)
    learner, second = load_learner(settings, None), load_learner(make_config(str(directory)), None)
    rollout = dataclasses.replace(NOTHING, prompt=np.array([3], ID), tokens=np.array([5], ID))
    assert learner.reference is None
    with torch.no_grad():
        for name, parameter in learner.backend.model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    found = learner._of_reference([rollout])
    assert torch.equal(found, second._logprobs(second.backend.model, [rollout]))
    assert not torch.allclose(found, learner._logprobs(learner.backend.model, [rollout]))
