"""What the trainer computes again in its backward pass: the same gradient, and fewer activations kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from msgspec.structs import replace

from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.profiling.measurements import Limits
from streamrl.executor.profiling.profile_file import make_setup
from streamrl.executor.record import RunDirectory
from streamrl.executor.trainer.model_loading import recompute
from streamrl.hardware.measured_profile import write_measured
from streamrl.runfile.files import make_run
from streamrl.runfile.roles_config import Recompute
from streamrl.sim.costs.costs import Costs
from tests.measured_profile import make_profile, measured_run, model_directory
from tests.patients import local_table
from tests.tiny_model import tiny_model

TOKENS = torch.arange(60)[None]


def gradients_and_kept(choice: Recompute, dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    """Return the gradient of a pass by parameter, and the bytes that it kept between forward and backward."""
    model = tiny_model(120).eval()
    recompute(model, choice)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    half = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with half, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(TOKENS, use_cache=False).logits.log_softmax(-1)[..., 0].sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_and_the_more_is_computed_again_the_less_is_kept(
    dtype: torch.dtype,
) -> None:
    found = {choice: gradients_and_kept(choice, dtype) for choice in get_args(Recompute)}
    plain, most = found["none"]
    for choice, (gradients, _) in found.items():
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain[name], msg=f"{choice}: {name}")
    assert found["full"][1] < found["mlp"][1] < most
    assert found["selective"][1] == found["mlp"][1], "as whole modules"


def test_a_model_of_one_s_own_is_refused_what_cannot_be_told_of_it() -> None:
    with pytest.raises(ValueError, match=r"trainer\.recompute must be 'none' .* got 'full'"):
        recompute(torch.nn.Linear(2, 2), "full")
    model = tiny_model(120)
    layer = model.model.layers[1]
    layer.another_name = layer.mlp
    del layer.mlp
    with pytest.raises(ValueError, match=r"must be 'full' or 'none' .* got 'mlp'"):
        recompute(model, "mlp")


def test_dropout_stays_off() -> None:
    model = tiny_model(120, attention_dropout=0.5).eval()
    recompute(model, "full")
    first, again = (model(TOKENS, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "mlp"), ("cpu", "none")])
def test_a_trainer_computes_again_what_its_run_file_says_on_a_gpu_and_nothing_on_a_cpu(
    device: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    async def start(_: LocalLauncher, number: int, config: dict[str, Any]) -> None:
        started.append(config)

    monkeypatch.setattr(LocalLauncher, "_start_trainer", start)
    run = make_run(local_table(tmp_path, {"execute.device": device, "trainer.recompute": "mlp"}))
    asyncio.run(
        LocalLauncher(
            RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path), ["0", "1"]
        ).trainer(0)
    )
    assert [config["recompute"] for config in started] == [expected]


def test_a_profile_is_measured_as_runs_train_and_says_how(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    limits = Limits(max_running=4, max_context=64, max_tokens_per_pass=128, longest_prefix=32)

    def setup(gpu: str, recompute: Recompute | None) -> Any:
        options: Any = {"dtype": "float32", "threads": 1, "limits": limits, "is_quick": True}
        return make_setup(model, gpu=gpu, recompute=recompute, **options)

    assert setup("h100", None).recompute == "full"
    assert setup("h100", "none").recompute == "none"
    assert setup("cpu", None).recompute == "none"
    with pytest.raises(ValueError, match=r"--recompute must be none on a CPU.* got 'full'"):
        setup("cpu", "full")
    path, said = tmp_path / "profile.toml", []
    for measured in ("none", "full"):
        profile = make_profile(model, gpu="h100", dtype="bfloat16")
        write_measured(replace(profile, recompute=measured), path)
        pools = {"local": {"gpu": "h100", "gpus_per_node": 2}}
        run = measured_run(model, path, cluster__pools=pools, model__dtype="bfloat16")
        said.append("; ".join(Costs.load(run).provenance["decode"].sources))
    assert "training measured with recompute none, not full" in said[0]
    assert "recompute" not in said[1]
