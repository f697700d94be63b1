"""Published seconds of weights that replicas get, and the constants that rest on them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import model_state
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.frameworks import load_framework, load_usual
from streamrl.sim.costs.colocation import PhaseChange
from streamrl.sim.costs.corrections import OwnSwitch, own_switch
from streamrl.sim.costs.sync_profiles import load_backend, load_hand_over
from streamrl.sim.costs.weight_sync import num_tensors
from streamrl.sim.fidelity.switches import (
    Switch,
    fitted_constant,
    predict,
    read_switches,
    run_of,
    switch_rows,
)

ROWS = read_switches()
V3 = next(row for row in ROWS if row.model == "deepseek-v3" and row.kind == "transfer")


def rows_of(constant: str) -> list[Switch]:
    return [row for row in ROWS if row.constant == constant]


def change_of(row: Switch) -> PhaseChange:
    return PhaseChange.load(resolve(run_of(row)))


@pytest.mark.parametrize("constant", ["hand_over", "verl", "packed"])
def test_the_constants_of_the_profiles_are_the_means_of_what_their_rows_ask_for(
    constant: str,
) -> None:
    verl = load_framework("verl").switch_time
    sender = load_backend("nccl-packed").sender_bandwidth
    assert verl is not None and sender is not None
    known = {
        "hand_over": load_hand_over("cuda-ipc").tensor_time,
        "verl": verl.base,
        "packed": 1 / sender,
    }
    assert known[constant] == pytest.approx(fitted_constant(rows_of(constant)), rel=0.01)


def test_a_fitted_row_is_judged_by_constants_of_other_sources() -> None:
    rows = switch_rows()
    assert all((row.left_out is not None) == row.is_fitted for row in rows)
    assert sum(row.is_fitted for row in rows) == len(rows_of("verl") + rows_of("packed"))


def test_the_only_source_of_a_constant_is_not_compared() -> None:
    (alone,) = rows_of("hand_over")
    compared = [row for row in switch_rows() if row.source == alone.source]
    assert alone.kind == "transfer" and all("transfer" not in row.name for row in compared)


def test_readings_of_one_figure_are_one_row_with_a_range() -> None:
    own = [row for row in switch_rows() if row.source == "NVIDIA-NeMo/RL pull request 3294"]
    lines = [row for row in ROWS if row.source == "NVIDIA-NeMo/RL pull request 3294"]
    assert (len(own), len(lines)) == (6, 12)
    assert all("b200" in row.name and " or " in row.name for row in own)
    seconds = sorted(predict(row).seconds for row in lines[:2])
    assert list(own[0].predicted) == seconds and seconds[0] < seconds[1]


def test_weights_of_671_billion_parameters_take_the_network_and_calls_for_every_tensor() -> None:
    change, model = change_of(V3), load_model(run_of(V3).model)
    network = load_gpu("h100").network * 0.97  # profiles/transports/rdma.toml
    gathered = 2.0 * model.num_parameters * 255 / 256
    assert change.reshard_time == pytest.approx(gathered / network)
    assert change.num_tensors == num_tensors(model) > 45_000
    tensor_time = load_hand_over("cuda-ipc").tensor_time
    assert change.hand_over_time == pytest.approx(change.num_tensors * tensor_time)
    assert predict(V3).seconds == pytest.approx(35, rel=0.05)


def test_ranks_of_one_node_gather_over_nvlink() -> None:
    row = next(row for row in ROWS if row.model == "llama-3.1-8b" and row.zero == 1)
    model = load_model(run_of(row).model)
    assert change_of(row).reshard_time == pytest.approx(
        model.num_parameters / load_gpu("h100").nvlink
    )


def test_engines_that_keep_their_weights_copy_them_out_and_back_in_every_switch() -> None:
    row = next(row for row in ROWS if row.model == "llama-3.1-70b" and row.pipeline_parallel == 4)
    resolved = resolve(run_of(row))
    change, own = PhaseChange.load(resolved), own_switch(resolved.run.framework, "h100")
    assert own.per_gpu is not None and own.per_gpu.keeps_weights
    dropped = own._replace(per_gpu=replace(own.per_gpu, keeps_weights=False))
    without = PhaseChange.of(resolved.replica, resolved.trainer, dropped)
    shard = 2.0 * load_model(resolved.run.model).num_parameters / 4  # tensor ranks of a replica
    copied = shard / load_gpu("h100").host_link
    assert without.kept_time == 0
    assert change.kept_time == pytest.approx(copied, rel=0.01)
    assert change.push_time - without.push_time == pytest.approx(2 * change.kept_time)
    assert change.lend_time - without.lend_time == pytest.approx(change.kept_time)
    assert change.return_time - without.return_time == pytest.approx(change.kept_time)


def test_a_framework_that_offloads_moves_its_optimizer_slowly_at_every_switch() -> None:
    row = next(row for row in ROWS if row.model == "llama-3.1-8b" and row.zero == 1)
    resolved = resolve(run_of(row))
    trainer = resolved.trainer
    state = model_state(trainer.model, trainer.config, trainer.dtype)
    change = PhaseChange.load(resolved)
    assert change.offload_time >= state.optimizer / 1.8e9
    in_host_memory = replace(trainer, config=replace(trainer.config, offload=True))
    own = own_switch(resolved.run.framework, "h100")
    assert PhaseChange.of(resolved.replica, in_host_memory, own).offload_time < 1.0
    usual = OwnSwitch(0.0, load_usual().switch_time, "")
    assert PhaseChange.of(resolved.replica, trainer, usual).offload_time < 1.0


def test_an_optimizer_returns_from_pageable_memory_slower_than_the_host_link() -> None:
    row = next(row for row in ROWS if row.model == "llama-3.1-8b" and row.zero == 1)
    resolved = resolve(run_of(row))
    trainer, own = resolved.trainer, own_switch(resolved.run.framework, "h100")
    moved = model_state(trainer.model, trainer.config, trainer.dtype).optimizer
    change = PhaseChange.load(resolved)
    assert change.onload_time == pytest.approx(moved / 16.1e9)
    assert own.per_gpu is not None
    pinned = own._replace(per_gpu=replace(own.per_gpu, onload_bandwidth=None))
    fast = PhaseChange.of(resolved.replica, trainer, pinned)
    assert fast.onload_time == pytest.approx(moved / load_gpu("h100").host_link)


def test_a_stated_switch_time_stands_for_all_but_the_bytes_that_a_gpu_lacks() -> None:
    resolved = resolve(run_of(V3))
    alone = PhaseChange.of(resolved.replica, resolved.trainer, OwnSwitch(7.0, None, ""))
    assert (alone.switch_time, alone.hand_over_time) == (7.0, 0.0)
    assert alone.reshard_time < 1.0 < change_of(V3).reshard_time


def test_a_push_of_nemo_rl_takes_what_was_measured() -> None:
    for row in rows_of("packed"):
        assert predict(row).seconds == pytest.approx((row.low + row.high) / 2, rel=0.1)
