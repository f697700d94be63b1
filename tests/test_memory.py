"""What fits: closed forms of every item, and plans that are known to fit or not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.hardware.activations import SCORED_SHARE, activation_bytes, tokens_in_pass
from streamrl.hardware.engine_memory import load_engine_memory
from streamrl.hardware.memory import (
    PassMemory,
    bytes_in_ways,
    check_host_memory,
    check_memory,
    check_sync_buffer,
    check_trainer_memory,
    host_memory,
    kv_capacity,
    model_states,
    offloaded_bytes,
    replica_memory,
    shard_parameters,
    stage_parameters,
    trainer_memory,
    weight_bytes,
)
from streamrl.hardware.model_shape import lora_parameters
from streamrl.hardware.nvme import check_nvme, swapped_bytes
from streamrl.hardware.parallelism import stage_layers
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import ResolvedRun, resolve
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run, make_run
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.weight_sync import Payload
from tests.runs import make_table, small_run

EXAMPLES = Path(__file__).parent.parent / "examples"
PPO = {"algorithm.name": "ppo", "algorithm.kl_coefficient": 0.001}
SEVEN = load_model(ModelConfig(name="qwen2.5-7b"))


def large_run(gpus: int, **trainer: Any) -> Run:
    """Return PPO of the 72B model on some H800, as StreamRL trains it."""
    table = make_table({**PPO, "model.name": "qwen2.5-72b", "rollout.tensor_parallel": 4})
    table["cluster"]["pools"]["near"]["nodes"] = gpus // 8
    table["rollout"] |= {"replicas": 1, "max_tokens": 20000}
    table["algorithm"]["prompts_per_step"] = 1024
    table["trainer"] = {"pool": "near", **trainer}
    return make_run(table)


# The trainer's models -----------------------------------------------------------------------------


def test_weights_and_gradients_are_split_over_a_rank_and_the_optimizer_over_all() -> None:
    items = trainer_memory(
        resolve(small_run({"trainer.tensor_parallel": 2, "trainer.data_parallel": 4})).trainer
    )
    half = SEVEN.shard_parameters(2)
    assert items["weights"] == pytest.approx(2 * half)
    assert items["gradients"] == pytest.approx(4 * half)
    assert items["optimizer"] == pytest.approx(12 * half / 4)


def test_pipeline_stages_split_weights_evenly() -> None:
    trainer = TrainerConfig(pool="near", pipeline_parallel=4)
    assert shard_parameters(SEVEN, trainer) == pytest.approx(SEVEN.num_parameters / 4)


def test_the_first_stage_has_the_embedding_and_the_last_the_head() -> None:
    trainer = TrainerConfig(pool="near", pipeline_parallel=8)
    stages, table = stage_parameters(SEVEN, trainer), 152064 * 3584
    layer = (SEVEN.num_parameters - 2 * table) / 28
    layers = [3, 4, 4, 4, 4, 3, 3, 3]
    tables = [table, *[0] * 6, table]
    expected = [count * layer + more for count, more in zip(layers, tables, strict=True)]
    assert stages == pytest.approx(expected)


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b", "qwen2.5-1.5b"])
def test_stages_have_all_parameters_between_them_and_a_tied_table_at_both_ends(
    name: str, stages: int
) -> None:
    model = load_model(ModelConfig(name=name))
    found = stage_parameters(model, TrainerConfig(pool="near", pipeline_parallel=stages))
    twice = model.num_embedding_parameters if model.has_tied_embeddings and stages > 1 else 0
    assert sum(found) == pytest.approx(model.num_parameters + twice)
    assert len(found) == stages


@given(st.integers(1, 130), st.integers(1, 32))
def test_layers_are_dealt_out_whole_and_evenly_and_ends_have_no_more_than_others(
    num_layers: int, stages: int
) -> None:
    if stages > num_layers + 2:
        with pytest.raises(
            ValueError, match=f"{stages} pipeline stages are more than {num_layers} layers"
        ):
            stage_layers(num_layers, stages)
        return
    layers = stage_layers(num_layers, stages)
    assert sum(layers) == num_layers and len(layers) == stages
    assert max(layers) - min(layers) <= 1
    if stages > 2:
        assert max(layers[0], layers[-1]) <= min(layers[1:-1]) + (num_layers % stages > stages - 2)


def test_a_gpu_is_as_full_as_the_fullest_stage() -> None:
    run = small_run(
        {
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "trainer": {"pool": "near", "pipeline_parallel": 4, "micro_batch": 2},
        }
    )
    items, trainer = trainer_memory(resolve(run).trainer), run.trainer
    num_tokens = tokens_in_pass(trainer, 256 + 2048)
    last = model_states(SEVEN, trainer, "bfloat16")[-1]
    assert items["weights"] == last.weights and items["optimizer"] == last.optimizer
    assert items["logits"] == num_tokens * 152064 * 16
    found = activation_bytes(SEVEN, trainer, "bfloat16", num_tokens)
    assert items["activations"] == found[-1] < found[0]
    long = msgspec.structs.replace(trainer, recompute="none", max_tokens_per_pass=2**16)
    long = msgspec.structs.replace(long, micro_batch=16)
    first = trainer_memory(resolve(msgspec.structs.replace(run, trainer=long)).trainer)
    assert first["logits"] == 0.0  # its four micro-batches take more than those of the last


def test_zero_3_splits_weights_and_gradients_over_data_parallel_ranks_too() -> None:
    changes = {"trainer.tensor_parallel": 1, "trainer.data_parallel": 4, "trainer.zero": 3}
    items = trainer_memory(resolve(small_run(changes)).trainer)
    gathered = 2 / 28  # layers
    assert items["weights"] == pytest.approx(2 * SEVEN.num_parameters * (1 / 4 + gathered))
    assert items["gradients"] == pytest.approx(4 * SEVEN.num_parameters / 4)
    assert items["optimizer"] == pytest.approx(10 * SEVEN.num_parameters / 4)
    # with weights that is 16 bytes a parameter: those in float32 are gathered in 16 bits


@pytest.mark.parametrize(("zero", "ways"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4))])
def test_what_data_parallel_ranks_split_goes_by_the_stage(
    zero: int, ways: tuple[int, int, int]
) -> None:
    changes = {"trainer.tensor_parallel": 1, "trainer.data_parallel": 4, "trainer.zero": zero}
    items = trainer_memory(resolve(small_run(changes)).trainer)
    names, widths = ("weights", "gradients", "optimizer"), (2, 4, 12)
    for name, width, split in zip(names, widths, ways, strict=True):
        assert items[name] == pytest.approx(width * SEVEN.num_parameters / split)


def test_a_trainer_that_cannot_be_split_is_told_by_the_key_of_its_own_section() -> None:
    pool = {"cluster.pools.near.nodes": 16}
    for changes, key in (
        ({"trainer.pipeline_parallel": 29}, "pipeline_parallel"),
        ({"trainer.expert_parallel": 2, "trainer.data_parallel": 2}, "expert_parallel"),
        ({"trainer.pipeline_parallel": 4, "trainer.virtual_stages": 8}, "virtual_stages"),
    ):
        for section in ("trainer", "trainer.2"):
            with pytest.raises(RunError, match=rf"^{section}\.{key}") as caught:
                trainer = resolve(small_run({**pool, **changes})).trainer
                check_trainer_memory(msgspec.structs.replace(trainer, key=section))
            assert caught.value.key == f"{section}.{key}"


def test_actor_critic_and_reference_are_all_there_unless_they_take_turns() -> None:
    actor = trainer_memory(resolve(small_run()).trainer)
    three = trainer_memory(resolve(small_run(PPO)).trainer)
    assert three["weights"] == pytest.approx(3 * actor["weights"])
    assert three["gradients"] == pytest.approx(2 * actor["gradients"])
    assert three["optimizer"] == pytest.approx(2 * actor["optimizer"])
    assert three["activations"] == actor["activations"]
    taking_turns = trainer_memory(resolve(small_run({**PPO, "trainer.offload": True})).trainer)
    assert taking_turns["weights"] == pytest.approx(actor["weights"])
    assert "optimizer" in taking_turns
    assert "activations" not in taking_turns


def test_a_reference_in_host_memory_leaves_its_room_and_takes_time_for_its_pass() -> None:
    kl = {"algorithm.kl_coefficient": 0.1}
    both, swapped = (
        resolve(small_run({**kl, "trainer.offload_reference": each})) for each in (False, True)
    )
    weights = trainer_memory(swapped.trainer)["weights"]
    assert trainer_memory(both.trainer)["weights"] == pytest.approx(2 * weights)
    assert offloaded_bytes(both.trainer) == 0
    assert offloaded_bytes(swapped.trainer) == pytest.approx(4 * weights)
    kept, moved = (
        Costs.load(each.run).training.line().score([64], 0.0) for each in (both, swapped)
    )
    assert moved - kept == pytest.approx(3 * weights / load_gpu("h800").host_link)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.pipeline_parallel": 4},
        {**PPO, "trainer.offload": True},
        {"trainer.data_parallel": 4, "trainer.zero": 3, "trainer.sharding": "fsdp"},
    ],
)
def test_ways_to_save_memory_need_what_a_trainer_with_these_settings_needs(
    changes: dict[str, Any],
) -> None:
    near = {"gpu": "h800", "nodes": 4}
    trainer = resolve(small_run({"cluster.pools.near": near, **changes})).trainer
    ways = [PassMemory("none", None), PassMemory("full", None), PassMemory("full", "chunked")]
    expected = []
    for way in ways:
        config = msgspec.structs.replace(trainer.config, **way._asdict())
        items = trainer_memory(msgspec.structs.replace(trainer, config=config))
        expected.append(sum(items.values()))
    assert list(bytes_in_ways(trainer, ways)) == expected
    assert expected == sorted(expected, reverse=True)


def test_gradients_in_16_bits_take_half_the_room() -> None:
    wide, narrow = (
        trainer_memory(resolve(small_run({"trainer.gradient_dtype": each})).trainer)
        for each in ("float32", "bfloat16")
    )
    assert narrow["gradients"] == pytest.approx(wide["gradients"] / 2)
    assert narrow["optimizer"] == wide["optimizer"]


def test_an_optimizer_that_keeps_remainders_of_weights_takes_ten_bytes_a_parameter() -> None:
    whole, less = (
        trainer_memory(resolve(small_run({"trainer.master_weights": each})).trainer)
        for each in ("float32", "remainders")
    )
    assert less["optimizer"] == pytest.approx(whole["optimizer"] * 10 / 12)


def test_a_large_scoring_pass_holds_its_logits() -> None:
    eager = {"trainer.logits": "eager", "trainer.micro_batch": 64}
    trained, scored = (
        trainer_memory(
            resolve(small_run({**eager, **more, "algorithm.kl_coefficient": 0.1})).trainer
        )
        for more in ({}, {"trainer.max_tokens_per_scoring_pass": 65536})
    )
    passes = 65536 / 16384 * SCORED_SHARE
    assert scored["logits"] == pytest.approx(trained["logits"] * passes)


@pytest.mark.parametrize(
    ("model", "nodes", "trainer"),
    [
        ("llama-3.1-8b", 1, {"data_parallel": 8, "recompute": "full"}),
        ("qwen3-30b-a3b", 4, {"data_parallel": 32, "expert_parallel": 8, "recompute": "none"}),
    ],
)
def test_layouts_of_published_recipes_fit(model: str, nodes: int, trainer: dict[str, Any]) -> None:
    """NeMo-RL v0.5.0, examples/configs/recipes/llm/performance: passes of 4,096 tokens on H100."""
    changes = {"framework.name": "nemo-rl", "model.name": model, "algorithm.kl_coefficient": 0.01}
    table = make_table({**changes, "rollout.max_tokens": 3072, "workload.max_prompt_tokens": 1024})
    table["cluster"]["pools"]["near"] = {"gpu": "h100", "nodes": nodes}
    table["algorithm"]["prompts_per_step"] = 64
    table["trainer"] = {"pool": "near", "max_tokens_per_pass": 4096, **trainer}
    check_trainer_memory(resolve(make_run(table)).trainer)


def test_adapters_alone_have_gradients_and_an_optimizer_and_a_critic_has_all() -> None:
    lora = {"sync.mode": "lora", "sync.lora_rank": 16}
    share = lora_parameters(SEVEN, 16) / SEVEN.num_parameters
    plain, adapted = (
        trainer_memory(resolve(small_run()).trainer),
        trainer_memory(resolve(small_run(lora)).trainer),
    )
    assert adapted["weights"] == plain["weights"]
    critic = trainer_memory(resolve(small_run({**PPO, **lora})).trainer)
    assert critic["weights"] == pytest.approx(2 * plain["weights"])  # no reference of its own
    waiting = {**PPO, **lora, "trainer.offload": True}
    turns = trainer_memory(resolve(small_run(waiting)).trainer)
    for name in ("gradients", "optimizer"):
        assert adapted[name] == pytest.approx(share * plain[name])
        assert critic[name] == pytest.approx((1 + share) * plain[name])
        assert turns[name] == pytest.approx(plain[name]), "while the critic steps"
    run, optimizers = small_run(waiting), (1 + share) * plain["optimizer"]
    each = offloaded_bytes(resolve(run).trainer) / run.trainer.num_gpus
    assert each == pytest.approx(plain["weights"] + optimizers)


def test_where_passes_are_what_fills_an_offloaded_gpu_they_are_what_counts() -> None:
    changes = {**PPO, "trainer.offload": True, "trainer.recompute": "none"}
    items = trainer_memory(resolve(small_run({**changes, "rollout.max_tokens": 20000})).trainer)
    assert set(items) == {"weights", "gradients", "activations", "logits"}


def test_experts_are_shared_out_over_expert_parallel_ranks() -> None:
    model = load_model(ModelConfig(name="qwen3-30b-a3b"))
    whole = shard_parameters(model, TrainerConfig(pool="near", data_parallel=8))
    shared = shard_parameters(model, TrainerConfig(pool="near", data_parallel=8, expert_parallel=8))
    experts = 48 * 128 * 3 * 2048 * 768
    assert whole - shared == pytest.approx(experts * 7 / 8)


# What fits ----------------------------------------------------------------------------------------


def test_the_example_of_two_datacenters_fits() -> None:
    run = load_run(EXAMPLES / "h20-h800.toml")
    check_memory(resolve(run))
    assert sum(trainer_memory(resolve(run).trainer).values()) == pytest.approx(44e9, rel=0.05)


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor_parallel": 8, "pipeline_parallel": 6},
        {"tensor_parallel": 8, "pipeline_parallel": 2, "data_parallel": 3, "offload": True},
    ],
)
def test_a_72b_model_trains_on_48_h800(degrees: dict[str, Any]) -> None:
    check_memory(resolve(large_run(48, **degrees)))


@pytest.mark.parametrize("offload", [False, True])
def test_a_72b_model_on_8_h800_is_refused_with_its_numbers(offload: bool) -> None:
    with pytest.raises(ValueError, match=r"trainer: \d+\.\d GB a GPU") as caught:
        check_memory(resolve(large_run(8, tensor_parallel=8, offload=offload)))
    text = str(caught.value)
    assert f"{72.7e9 * 12 / 8 * (1 if offload else 2) / 1e9:.1f}"[:3] in text
    assert "of optimizer" in text
    assert "tensor_parallel=8" in text
    assert "H800 80 GB has 85.0 GB for tensors" in text
    assert ("trainer.offload=true" in text) is not offload


def test_a_plan_that_keeps_every_activation_of_a_long_rollout_is_told_what_would_help() -> None:
    run = small_run({"trainer.recompute": "none", "rollout.max_tokens": 60000})
    with pytest.raises(ValueError, match=r"of activations.*trainer.recompute=\"full\""):
        check_memory(resolve(run))
    check_memory(resolve(small_run({"rollout.max_tokens": 60000})))


def test_a_plan_whose_logits_take_much_is_told_to_chunk_them() -> None:
    changes = {"trainer.tensor_parallel": 1, "rollout.max_tokens": 20000}
    with pytest.raises(ValueError, match=r"of logits.*; trainer.logits=\"chunked\" keeps few"):
        check_memory(resolve(small_run(changes)))
    with pytest.raises(ValueError) as caught:
        check_memory(resolve(small_run({**changes, "trainer.logits": "chunked"})))
    assert "chunked" not in str(caught.value)


def test_a_plan_of_32b_whose_end_stages_do_not_fit_is_refused() -> None:
    def plan(**trainer: Any) -> Run:
        return small_run(
            {
                "model.name": "qwen2.5-32b",
                "rollout.tensor_parallel": 4,
                "cluster.pools.near": {"gpu": "h800", "nodes": 4},
                "trainer": {"pool": "near", "pipeline_parallel": 8, "micro_batch": 1, **trainer},
            }
        )

    run = plan()
    items = trainer_memory(resolve(run).trainer)
    model = load_model(run.model)
    middle = model_states(model, run.trainer, "bfloat16")[3]
    held = middle.weights + middle.gradients + middle.optimizer
    assert held < load_gpu("h800").memory < sum(items.values())
    with pytest.raises(ValueError, match=r"trainer: \d+\.\d GB a GPU .*pipeline_parallel=8"):
        check_memory(resolve(run))
    check_memory(resolve(plan(pipeline_parallel=16)))
    check_memory(resolve(plan(tensor_parallel=2)))


# Replicas -----------------------------------------------------------------------------------------


def test_a_replica_is_its_weights_and_its_cache_and_what_stays_unused() -> None:
    run = small_run({"rollout.memory_utilization": 0.8})
    items, gpu = replica_memory(resolve(run).replica), load_gpu("h20")
    assert sum(items.values()) == pytest.approx(gpu.memory)
    assert items["weights"] == 2 * SEVEN.num_parameters
    assert items["kv_cache"] == kv_capacity(resolve(run).replica) * 56 * 1024
    assert items["unused"] == pytest.approx(0.2 * gpu.usable_memory, abs=56 * 1024)
    assert items["reserve"] == 2**29


def test_the_cache_gets_what_the_driver_reports_less_reserve_weights_and_workspace() -> None:
    run = small_run({"rollout.memory_utilization": 0.8, "rollout.max_running": 64})
    reported = 97_871 * 2**20
    weights = 2 * 7_615_616_512
    a_pass = 8192 * (2 * 3584 + 3 * 18_944) * 2
    engine = load_engine_memory("vllm-0.11")
    assert a_pass > 64 * 152_064 * engine.logit  # bytes of sampling
    room = 0.8 * (reported - 2**29) - weights - a_pass - engine.fixed - engine.single
    assert kv_capacity(resolve(run).replica) == int(room // (2 * 28 * 4 * 128 * 2))


def test_a_replica_of_many_rollouts_gives_room_to_sampling() -> None:
    few, many = (
        kv_capacity(resolve(small_run({"rollout.max_running": number})).replica)
        for number in (512, 2048)
    )
    sampling = (2048 - 512) * 152_064 * load_engine_memory("vllm-0.11").logit
    assert (few - many) * 56 * 1024 == pytest.approx(sampling, abs=2 * 56 * 1024)


def test_models_that_wait_in_host_memory_must_fit_a_node() -> None:
    offloaded = {**PPO, "trainer.offload": True}
    waits = (
        2 * 7_615_616_512 / 4 * 2 + 2 * 7_615_616_512 * 12 / 8
    )  # two models' weights, two optimizers
    run = small_run({**offloaded, "trainer.tensor_parallel": 4, "trainer.data_parallel": 2})
    assert offloaded_bytes(resolve(run).trainer) == pytest.approx(8 * waits, rel=0.01)
    assert host_memory(resolve(run).trainer.pool) == 8 * 250e9
    check_host_memory(resolve(run).trainer)
    tight = {**offloaded, "cluster.pools.near.host_memory": "100 GB"}
    with pytest.raises(
        ValueError, match=r"trainer\.offload moves \d+ GB .*near\.host_memory is 100"
    ):
        check_host_memory(resolve(small_run(tight)).trainer)
    check_host_memory(resolve(small_run({"cluster.pools.near.host_memory": "100 GB"})).trainer)


def test_an_optimizer_on_nvme_needs_no_gpu_memory_little_host_memory_and_room_on_the_drives() -> (
    None
):
    changes = {
        **{"trainer.offload": True, "trainer.zero": 3, "trainer.data_parallel": 8},
        **{"trainer.tensor_parallel": 1, "algorithm.prompts_per_step": 8},
    }
    on_nvme = {**changes, "trainer.offload_to": "nvme"}
    host, nvme = (resolve(small_run(each)).trainer for each in (changes, on_nvme))
    model = host.model.num_parameters
    state = trainer_memory(host)
    assert trainer_memory(nvme)["weights"] == state["weights"]
    assert "optimizer" not in trainer_memory(nvme)
    assert offloaded_bytes(nvme) == pytest.approx(16 * model), "a rank's whole share is one group"
    assert offloaded_bytes(host) == pytest.approx(10 * model)
    assert swapped_bytes(nvme) == pytest.approx(16 * model) and swapped_bytes(host) == 0
    check_nvme(nvme)
    with pytest.raises(RunError, match=r"near\.nvme is 100 GB"):
        check_nvme(resolve(small_run({**on_nvme, "cluster.pools.near.nvme": "100 GB"})).trainer)
    with pytest.raises(RunError, match=r"^trainer\.zero must be 3 with trainer\.offload_to nvme"):
        Costs.load(small_run({**on_nvme, "trainer.zero": 1}))


def test_shards_of_fsdp2_have_one_copy_and_those_of_deepspeed_two() -> None:
    layout = {"trainer.zero": 3, "trainer.data_parallel": 8, "trainer.tensor_parallel": 1}
    layout |= {"algorithm.prompts_per_step": 8}
    two, flat, deepspeed, kept = (
        trainer_memory(resolve(small_run({**layout, **changes})).trainer)
        for changes in (
            {},
            {"trainer.sharding": "fsdp"},
            {"trainer.sharding": "deepspeed"},
            {"trainer.reshard_after_forward": False},
        )
    )
    model, layers = SEVEN.num_parameters, SEVEN.num_layers
    assert two["weights"] == pytest.approx(2 * (model / 8 + model * 2 / layers))
    assert two["optimizer"] == pytest.approx(10 * model / 8)
    assert deepspeed["optimizer"] == pytest.approx(12 * model / 8)
    assert deepspeed["weights"] == two["weights"]
    assert kept["weights"] == pytest.approx(2 * (model / 8 + model))
    assert sum(two.values()) == pytest.approx(0.93 * sum(flat.values()))


def test_each_sharding_group_has_a_copy_of_weights_and_optimizer() -> None:
    ranks = {"trainer.zero": 3, "trainer.data_parallel": 4, "trainer.tensor_parallel": 1}
    flat, pairs = (
        trainer_memory(resolve(small_run({**ranks, "trainer.shard_ranks": each})).trainer)
        for each in (None, 2)
    )
    assert pairs["optimizer"] == pytest.approx(2 * flat["optimizer"])
    assert pairs["weights"] > 1.5 * flat["weights"]


def test_a_way_of_sharding_matters_with_zero_3_only() -> None:
    changes = {"trainer.sharding": "fsdp", "trainer.reshard_after_forward": False}
    plain, other = (resolve(small_run(each)).trainer for each in ({}, changes))
    assert trainer_memory(plain) == trainer_memory(other)


def test_a_vision_tower_takes_memory_on_both_sides_unless_it_is_not_loaded() -> None:
    def of(**changes: Any) -> ResolvedRun:
        return resolve(small_run({"model.name": "qwen3-vl-4b", **changes}))

    tower = 2 * load_model(ModelConfig(name="qwen3-vl-4b")).num_vision_parameters
    assert tower == pytest.approx(0.8e9, rel=0.05)
    without = {"model.vision_tower": "none"}
    split = {"rollout.tensor_parallel": 2}
    assert replica_memory(of(**split).replica)["weights"] - replica_memory(
        of(**split, **without).replica
    )["weights"] == pytest.approx(tower / 2)
    for layout, share in (
        ({"trainer.tensor_parallel": 4}, 4),
        ({"trainer.tensor_parallel": 1, "trainer.data_parallel": 2}, 1),
        ({"trainer.tensor_parallel": 1, "trainer.data_parallel": 2, "trainer.zero": 3}, 2),
    ):
        held, bare = (trainer_memory(of(**layout, **more).trainer) for more in ({}, without))
        assert held["weights"] - bare["weights"] == pytest.approx(tower / share)
        assert held["optimizer"] == bare["optimizer"] and held["gradients"] == bare["gradients"]
    config = msgspec.structs.replace(of().trainer.config, pipeline_parallel=2)
    own, plain = (
        [state.weights for state in model_states(of(**more).trainer.model, config, "bfloat16")]
        for more in ({}, without)
    )
    extra = [one - other for one, other in zip(own, plain, strict=True)]
    assert extra == pytest.approx([tower / 4, 0])


def test_full_syncs_send_a_frozen_vision_tower_and_deltas_do_not() -> None:
    def sent(**changes: Any) -> int:
        run = small_run({"model.name": "qwen3-vl-4b", **changes})
        return Payload.of(resolve(run).replica, run.sync).num_bytes

    without = {"model.vision_tower": "none"}
    tower = 2 * load_model(ModelConfig(name="qwen3-vl-4b")).num_vision_parameters
    assert sent() - sent(**without) == tower
    own = {"sync.quantise_at": "replica"}
    assert sent(**own) - sent(**own, **without) == tower
    assert sent(**{"sync.mode": "delta"}) == sent(**{"sync.mode": "delta"}, **without)
    assert weight_bytes(resolve(small_run({"model.name": "qwen3-vl-4b"})).replica) == sent()


def test_a_large_share_of_a_model_passes_host_memory_in_groups() -> None:
    alone = {"trainer.offload": True, "trainer.zero": 3, "trainer.offload_to": "nvme"}
    trainer = resolve(small_run({**alone, "trainer.tensor_parallel": 1})).trainer
    assert offloaded_bytes(trainer) == trainer.config.num_gpus * 1e9 * 16


def test_a_bucket_of_weights_must_fit_beside_what_a_replica_holds() -> None:
    room = 0.1 * (97_871 * 2**20 - 2**29)

    def check(changes: dict[str, str]) -> None:
        run = small_run(changes)
        check_sync_buffer(resolve(run).replica, run.sync)

    check({"sync.bucket_size": f"{room * 0.99 / 1e9} GB"})
    large = {"sync.bucket_size": f"{room * 1.01 / 1e9} GB"}
    with pytest.raises(ValueError, match=r"sync\.bucket_size must fit .* leaves 10\.2\d GB"):
        check(large)
    check({**large, "sync.mode": "delta"})


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("h100", 81_559),
        ("h800", 81_559),
        ("a100", 81_920),
        ("h20", 97_871),
        ("h200", 143_771),
        ("h20-3e", 143_771),
    ],
)
def test_the_memory_of_a_gpu_is_what_its_driver_reports(name: str, mebibytes: int) -> None:
    gpu = load_gpu(name)
    assert gpu.memory == mebibytes * 2**20
    assert gpu.usable_memory == gpu.memory - 2**29


def test_gpus_past_the_number_of_key_value_heads_hold_the_same_heads() -> None:
    four, eight = (
        replica_memory(
            resolve(small_run({"rollout.tensor_parallel": degree, "rollout.replicas": 1})).replica
        )
        for degree in (4, 8)
    )
    tokens = [
        kv_capacity(
            resolve(small_run({"rollout.tensor_parallel": degree, "rollout.replicas": 1})).replica
        )
        for degree in (4, 8)
    ]
    assert four["kv_cache"] / tokens[0] == eight["kv_cache"] / tokens[1] == 14 * 1024


def test_a_replica_whose_gpus_share_out_the_experts_holds_each_of_them_once() -> None:
    changes = {"model.name": "qwen3-30b-a3b", "rollout.tensor_parallel": 8, "rollout.replicas": 1}
    sliced, shared = (
        replica_memory(resolve(small_run({**changes, "rollout.expert_parallel": degree})).replica)
        for degree in (1, 8)
    )
    assert sliced["weights"] == pytest.approx(shared["weights"])
    model = load_model(ModelConfig(name="qwen3-30b-a3b"))
    assert shared["weights"] == 2 * model.shard_parameters(8, 8)
