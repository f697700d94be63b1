"""GPUs that generate and train in turn: what a change of phase costs, who waits for what, and who pays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.messages import Stepped
from streamrl.executor.launchers.handles import Handle, InProcess
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import Place, PlacedRoles
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.hardware.memory import model_state
from streamrl.hardware.model_shape import lora_parameters
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.hardware.tiers import Provenance
from streamrl.record.metrics import measure
from streamrl.record.timeline import read_timeline
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.sim.costs.colocation import PhaseBytes, PhaseChange, count_moved
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.modes import find_modes
from streamrl.sim.world import simulate
from streamrl.targets.execute_limits import check_back_ends
from tests.runs import make_table, small_run

H800 = load_gpu("h800")
QWEN = load_model(small_run().model)
WEIGHTS = 2.0 * QWEN.num_parameters


def moved_by(run: Run) -> PhaseBytes:
    resolved = resolve(run)
    return count_moved(resolved.replica, resolved.trainer)


def shared_run(**changes: Any) -> Run:
    """Return a run whose GPUs, 8 H800 a node, generate and train in turn; `__` stands for the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run(
        {
            "policies.system": "colocated",
            "rollout.pool": "near",
            "rollout.replicas": 8,
            "trainer.data_parallel": 2,
            "trainer.tensor_parallel": 4,
            **keys,
        }
    )


PPO = {
    "algorithm__name": "ppo",
    "algorithm__group_size": 1,
    "algorithm__kl_coefficient": 0.001,
    "algorithm__prompts_per_step": 8,
}


# What a change of phase costs ---------------------------------------------------------------------


def test_critic_free_states_that_fit_beside_the_generator_stay_where_they_are() -> None:
    run = shared_run(rollout__memory_utilization=0.4)
    moved = moved_by(run)
    assert moved.onloaded == moved.offloaded == 0
    assert moved.resharded > 0


def test_what_does_not_fit_beside_the_generator_goes_to_host_memory_and_comes_back() -> None:
    run = shared_run(rollout__memory_utilization=1.0, **PPO)
    state = model_state(QWEN, run.trainer, "bfloat16")
    trained = 2 * (state.weights + state.optimizer)  # actor and critic
    moved = moved_by(run)
    assert moved.offloaded == pytest.approx(trained)
    assert moved.onloaded == pytest.approx(trained + state.weights)  # the reference never changed
    change = PhaseChange.load(resolve(run))
    assert change.offload_time == pytest.approx(moved.offloaded / 50e9)
    assert change.onload_time == pytest.approx(moved.onloaded / 50e9)


def test_the_room_beside_the_generator_keeps_that_many_bytes_from_moving() -> None:
    full = moved_by(shared_run(rollout__memory_utilization=1.0, **PPO))
    most = moved_by(shared_run(rollout__memory_utilization=0.9, **PPO))
    assert full.offloaded - most.offloaded == pytest.approx(0.1 * H800.usable_memory)
    assert full.onloaded - most.onloaded == pytest.approx(0.1 * H800.usable_memory)


def test_models_that_take_turns_on_the_gpus_are_moved_by_their_turns_alone() -> None:
    run = shared_run(rollout__memory_utilization=1.0, trainer__offload=True, **PPO)
    moved = moved_by(run)
    assert moved.onloaded == moved.offloaded == 0


def test_one_model_has_no_turns_to_take_and_moves_with_the_phase() -> None:
    run = shared_run(rollout__memory_utilization=1.0, trainer__offload=True)
    assert moved_by(run).offloaded > 0


def test_an_optimizer_that_comes_for_the_step_alone_moves_with_no_phase() -> None:
    resident, offloading = (
        shared_run(rollout__memory_utilization=1.0, trainer__offload=each) for each in (False, True)
    )
    state = model_state(QWEN, resident.trainer, "bfloat16")
    saved = moved_by(resident).offloaded - moved_by(offloading).offloaded
    assert saved == pytest.approx(state.optimizer)


def test_a_gpu_is_sent_what_its_replica_has_beyond_its_own_shard() -> None:
    run = shared_run()
    moved = moved_by(run)
    assert moved.resharded == pytest.approx(WEIGHTS - WEIGHTS / 4, rel=1e-3)
    assert PhaseChange.load(resolve(run)).reshard_time == pytest.approx(moved.resharded / 200e9)


def test_gpus_that_generate_with_the_shard_they_train_are_sent_nothing() -> None:
    run = shared_run(rollout__replicas=2, rollout__tensor_parallel=4)
    assert moved_by(run).resharded == pytest.approx(0)


def test_ranks_of_several_nodes_send_each_other_weights_over_the_network() -> None:
    changes = {"cluster.pools.near": {"gpu": "h800", "nodes": 2}, "trainer.pipeline_parallel": 4}
    run = shared_run(rollout__replicas=16, trainer__data_parallel=1, **changes)
    moved = moved_by(run)
    network = 25e9 * 0.97  # profiles/transports/rdma.toml
    assert moved.resharded == pytest.approx(WEIGHTS * 15 / 16, rel=1e-3)
    assert PhaseChange.load(resolve(run)).reshard_time == pytest.approx(moved.resharded / network)


def test_full_shards_are_gathered_from_all_ranks() -> None:
    moved = moved_by(shared_run(trainer__zero=3))
    assert moved.resharded == pytest.approx(WEIGHTS * 7 / 8, rel=1e-3)


def test_replicas_on_gpus_that_the_trainer_leaves_out_are_sent_all_they_need() -> None:
    moved = moved_by(shared_run(trainer__data_parallel=1))
    assert moved.resharded == pytest.approx(WEIGHTS, rel=1e-3)


def test_a_step_has_one_push_of_everything_that_moves_and_one_load() -> None:
    run = shared_run(rollout__memory_utilization=0.9, **PPO)
    change, costs = PhaseChange.load(resolve(run)), Costs.load(run)
    assert change.push_time > 0 and change.wake_time > 0
    assert costs.sync.push_time == pytest.approx(change.push_time)
    assert costs.load_time == pytest.approx(change.wake_time)
    assert change.wake_time == pytest.approx(2 * WEIGHTS / (3.35e12 * 0.8), rel=1e-3)
    assert costs.provenance["sync"].tier == "roofline"
    assert costs.facts["sources"].count("profiles/gpus/h800.toml") == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "group_size", "kl"),
    [("ppo", 1, 0.001), ("grpo", 4, 0.0), ("rloo", 4, 0.001), ("reinforce++", 1, 0.0)],
)
def test_a_step_is_generation_then_forward_passes_then_training_then_the_change(
    name: str, group_size: int, kl: float
) -> None:
    changes = {"algorithm__name": name, "algorithm__kl_coefficient": kl}
    run = shared_run(algorithm__group_size=group_size, algorithm__prompts_per_step=8, **changes)
    trace, costs = simulate(run), Costs.load(run)
    timeline, metrics = read_timeline(trace), measure(trace, (1, run.algorithm.steps))
    stepped = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
    began = stepped[0] + costs.sync.push_time + costs.load_time
    lasts = [
        max(span.end for spans in timeline.rollouts.values() for span in spans if span.end < end)
        for end in stepped
    ]
    work = [s for s in timeline.trainers[0] if s.start >= stepped[0] and s.end <= stepped[1] + 1e-9]
    passes = sum(span.end - span.start for span in work)
    generation = lasts[1] - began
    assert {s.activity for s in work} == {"train"} | (
        {"score"} if run.algorithm.needs_score else set()
    )
    assert metrics.step_times[1] == pytest.approx(
        generation + passes + costs.sync.push_time + costs.load_time
    )
    assert metrics.staleness == {0: run.algorithm.steps * 8 * group_size}


# Factors ------------------------------------------------------------------------------------------


def test_factors_divide_the_seconds_of_their_side_and_are_named_among_the_sources() -> None:
    plain = Costs.load(shared_run(**PPO))
    slow = Costs.load(shared_run(costs__generation_factor=0.5, costs__training_factor=0.25, **PPO))
    lengths = [300, 500]
    assert slow.decode.step_time(3, 900) == pytest.approx(2 * plain.decode.step_time(3, 900))
    assert slow.prefill_time(400, 9e4, 0) == pytest.approx(2 * plain.prefill_time(400, 9e4, 0))
    slowly, plainly = slow.line(), plain.line()
    assert slowly.score(lengths, 4.0) == pytest.approx(4 * plainly.score(lengths, 1.0))
    assert slowly.train(lengths, 40.0) == pytest.approx(4 * plainly.train(lengths, 10.0))
    assert slowly.finish(0.0) == pytest.approx(4 * plainly.finish(0.0))
    assert slow.step_time == pytest.approx(4 * plain.step_time)
    assert slow.sync == plain.sync
    for operation, source in (
        ("prefill", "run file: costs.generation_factor=0.5"),
        ("decode", "run file: costs.generation_factor=0.5"),
        ("score", "run file: costs.training_factor=0.25"),
        ("train", "run file: costs.training_factor=0.25"),
    ):
        assert slow.provenance[operation].sources[-1] == source
        assert source not in plain.provenance[operation].sources


def test_what_was_measured_is_composed_once_a_factor_changes_it() -> None:
    measured = Provenance(shares={"measured": 0.5, "composed": 0.25, "roofline": 0.25})
    assert measured.adjusted("x").shares == {"composed": 0.75, "roofline": 0.25}


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_must_be_a_positive_number(factor: float) -> None:
    with pytest.raises(ValueError, match=r"costs\.training_factor must be in"):
        shared_run(costs__training_factor=factor)


# The run file -------------------------------------------------------------------------------------


def test_each_side_may_have_all_gpus_of_the_pool() -> None:
    run = shared_run()
    assert (run.rollout.num_gpus, run.trainer.num_gpus, run.num_gpus) == (8, 8, 8)
    with pytest.raises(ValueError, match=r"pool 'near' has 8 GPUs, but .* need 9"):
        shared_run(rollout__replicas=9)
    with pytest.raises(ValueError, match=r"pool 'near' has 8 GPUs, but .* need 16"):
        small_run({"rollout.pool": "near", "rollout.replicas": 8, "trainer.data_parallel": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policies__max_staleness", 1),
        ("policies__streaming", "stream"),
        ("policies__weight_sync", "drain-then-load"),
        ("policies__resize", "adjust"),
        ("sync__mode", "delta"),
        ("sync__backend", "nccl-buckets"),
    ],
)
def test_what_would_overlap_the_phases_or_needs_a_wire_is_refused(key: str, value: object) -> None:
    dotted = key.replace("__", ".")
    with pytest.raises(ValueError, match=f"{dotted} must be .* 'colocated', got {value!r}"):
        shared_run(**{key: value})


def test_sides_in_two_pools_share_nothing() -> None:
    table = make_table({"policies.system": "colocated"})
    table["trainer"]["pool"] = "near"
    with pytest.raises(ValueError, match=r"trainer\.pool must be rollout\.pool 'far', got 'near'"):
        make_run(table)


@pytest.mark.parametrize(("system", "gpus"), [("colocated", [0, 0]), ("stream-sync", [0, 1])])
def test_a_colocated_trainer_is_launched_on_the_gpu_of_the_first_replica(
    tmp_path: Path, system: str, gpus: list[int]
) -> None:
    started: list[int] = []

    class NotingLauncher(LocalLauncher):
        async def _start(
            self, role: str, config: dict[str, object], name: str, place: Place
        ) -> Handle:
            started.extend(place.gpus)
            return InProcess("tests.scripted_roles:ScriptedTrainer", {"seed": 0})

    async def launch() -> None:
        degrees = {f"trainer.{name}_parallel": 1 for name in ("data", "tensor", "pipeline")}
        sides = {"policies.system": system, "rollout.replicas": 1, "trainer.pool": "far"}
        run = small_run({**sides, **degrees})
        launcher = NotingLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path))
        await launcher.replica(0, 0, "model")
        await launcher.trainer(0)

    asyncio.run(launch())
    assert started == gpus


# Adapters on shared GPUs --------------------------------------------------------------------------

ADAPTERS = {"sync__mode": "lora", "sync__lora_rank": 16}
RANK = 16


def test_a_trainer_of_adapters_moves_its_frozen_weights_only_one_way() -> None:
    run = shared_run(rollout__memory_utilization=1.0, sync__merge_adapters=True, **ADAPTERS)
    state, moved = model_state(QWEN, run.trainer, "bfloat16"), moved_by(run)
    share = lora_parameters(QWEN, RANK) / QWEN.num_parameters
    assert 0 < share < 0.02
    assert moved.offloaded == pytest.approx(share * (state.weights + state.optimizer))
    assert moved.onloaded == pytest.approx(state.weights + share * state.optimizer)
    whole = moved_by(shared_run(rollout__memory_utilization=1.0))
    assert (moved.resharded, moved.woken) == (whole.resharded, whole.woken)


def test_replicas_that_keep_their_weights_swap_them_and_receive_adapters() -> None:
    settings = {"rollout__memory_utilization": 1.0, **ADAPTERS}
    beside = moved_by(shared_run(sync__merge_adapters=False, **settings))
    merged = moved_by(shared_run(sync__merge_adapters=True, **settings))
    assert beside.resharded == beside.woken == 2.0 * lora_parameters(QWEN, RANK)
    assert beside.offloaded - merged.offloaded == pytest.approx(WEIGHTS)
    assert beside.onloaded - merged.onloaded == pytest.approx(WEIGHTS)


def test_a_run_with_adapters_on_shared_gpus_is_simulated_and_planned() -> None:
    lora, full = shared_run(**ADAPTERS, sync__merge_adapters=True), shared_run()
    steps = [measure(simulate(run)).step_time for run in (lora, full)]
    assert 0 < steps[0] < steps[1]  # a small optimizer, and products for weight gradients left out
    assert "colocated" in {mode.system for mode in find_modes(lora)}


def test_adapters_on_shared_gpus_are_not_executed() -> None:
    run = shared_run(trainer__tensor_parallel=1, trainer__data_parallel=1, **ADAPTERS)
    with pytest.raises(
        RunError, match=r"^sync.mode must be 'full' for policies.system 'colocated'"
    ):
        check_back_ends(run)
