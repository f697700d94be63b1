"""What `execute` refuses because its back ends would do less than the run file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.executor.checkup import readiness, run_paths
from streamrl.executor.execute import execute
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.vllm_settings import device_arguments
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.files import make_run
from streamrl.targets.execute_limits import check_back_ends, limits_of_vllm
from tests.patients import NOWHERE, bad, local_table
from tests.scripted import ScriptedTokenizer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model.dtype": "float16"}, "model.dtype=bfloat16"),
    ({"rollout.admission": "reserve"}, "rollout.admission=on-demand"),
    ({"algorithm.old_log_probs": "trainer"}, "algorithm.old_log_probs=engine"),
    ({"framework.name": "slime"}, "framework.name=streamrl"),
    ({"framework.optimizer_steps": 4, "algorithm.name": "dpo"}, "framework.optimizer_steps=1"),
    ({"framework.epochs": 2}, "framework.epochs=1"),
    ({"trainer.kernels": "fused"}, "trainer.kernels=eager"),
    ({"trainer.order": "arrival"}, "trainer.order=sorted"),
    ({"rollout.chunked_prefill": False}, "rollout.chunked_prefill=true"),
    ({"trainer.offload": True, "algorithm.kl_coefficient": 0.1}, "trainer.offload=false"),
    ({"trainer.reshard_after_forward": False}, "trainer.reshard_after_forward=true"),
    ({"trainer.gradient_dtype": "bfloat16"}, "trainer.gradient_dtype=float32"),
    ({"trainer.master_weights": "remainders"}, "trainer.master_weights=float32"),
    ({"trainer.max_tokens_per_scoring_pass": 65536}, "remove trainer.max_tokens_per_scoring_pass"),
    ({"trainer.sharding": "fsdp"}, "trainer.sharding=fsdp2"),
    (
        {
            **{"trainer.offload_to": "nvme", "trainer.offload": True},
            **{"policies.system": "colocated", "trainer.pool": "local"},
        },
        "trainer.offload_to=host",
    ),
    (
        {"policies.concurrency": "kv-pressure", "rollout.backend": "static"},
        "policies.concurrency=fixed",
    ),
]


LATENT = {
    **{"model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
}


@pytest.mark.parametrize(("changes", "fix"), REFUSED)
def test_what_would_be_executed_as_less_than_it_says_is_refused_before_anything_is_written(
    changes: dict[str, Any], fix: str, tmp_path: Path
) -> None:
    run = make_run(local_table(tmp_path, changes), NOWHERE.parent)
    key, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=rf"^{key} must be .*, got {value!r}") as refusal:
        execute(run)
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()
    finding = bad(list(readiness.find(run)))["back-end"]
    assert finding.level == "error" and finding.fix in (fix, f"set {fix}")


def test_logits_in_chunks_are_refused_to_ranks_that_gather_the_output_layer(tmp_path: Path) -> None:
    split = {"trainer.backend": "deepspeed", "trainer.zero": 3, "trainer.data_parallel": 2}
    room = {"cluster.pools.here.gpus_per_node": 3, "trainer.logits": "chunked"}
    run = make_run(local_table(tmp_path, {**split, **room}))
    with pytest.raises(ValueError, match=r"^trainer\.logits must be 'eager' .*, got 'chunked'"):
        check_back_ends(run)
    check_back_ends(make_run(local_table(tmp_path, {**split, **room, "trainer.zero": 2})))


def test_adapters_are_refused_beside_experts(tmp_path: Path) -> None:
    table = local_table(tmp_path, {"sync.mode": "lora"})
    path = Path(table["model"]["path"], "config.json")
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {**json.loads(path.read_text()), **mixture, "head_dim": 16, "model_type": "qwen3_moe"}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^sync\.mode must be 'full' or 'delta' .*, got 'lora'"):
        check_back_ends(make_run(table))


def test_latent_attention_is_refused_to_the_paged_cache_of_transformers(tmp_path: Path) -> None:
    table = local_table(tmp_path, {})
    path = Path(table["model"]["path"], "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **LATENT}))
    with pytest.raises(
        ValueError, match=r"^rollout\.backend must be 'vllm' or 'static' for latent"
    ):
        check_back_ends(make_run(table))
    table["rollout"]["backend"] = "static"
    check_back_ends(make_run(table))


def test_adapters_are_merged_where_an_engine_computes_with_none_beside_weights(
    tmp_path: Path,
) -> None:
    lora = {"sync.mode": "lora", "sync.merge_adapters": False}
    run = make_run(local_table(tmp_path, lora), NOWHERE.parent)
    with pytest.raises(ValueError, match=r"^sync\.merge_adapters must be true, .* got False$"):
        check_back_ends(run)
    assert bad(list(readiness.find(run)))["back-end"].fix == "set sync.merge_adapters=true"
    check_back_ends(make_run(local_table(tmp_path, {**lora, "sync.merge_adapters": True})))


@pytest.mark.parametrize(
    ("rank", "merges", "is_met"), [(512, None, True), (513, None, False), (513, True, True)]
)
def test_vllm_has_places_for_ranks_up_to_a_limit(
    rank: int, merges: bool | None, is_met: bool, tmp_path: Path
) -> None:
    sync = {"sync.mode": "lora", "sync.lora_rank": rank, "sync.merge_adapters": merges}
    run = make_run(local_table(tmp_path, {**sync, "rollout.backend": "vllm"}))
    own_rank = rank if run.serves_adapters else None
    limits = limits_of_vllm(run.rollout, run.model, run.workload, own_rank)
    assert [each.is_met for each in limits if each.key == "sync.lora_rank"] == [is_met]


def test_adapters_need_safetensors_to_be_merged_with(tmp_path: Path) -> None:
    run = make_run(local_table(tmp_path, {"sync.mode": "lora"}))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"sync\.mode 'lora' .* has no model\*\.safetensors"):
        execute(run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer.data_parallel": 2}, "where trainer has 2 ranks"),
        (
            {"rollout.tensor_parallel": 2, "rollout.backend": "vllm"},
            "where rollout.tensor_parallel is 2",
        ),
    ],
)
def test_one_gpu_by_name_is_refused_to_who_needs_several(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pools = {"cluster.pools": {"here": {"gpu": "h100", "gpus_per_node": 8}}}
    run = make_run(local_table(tmp_path, {"execute.device": "cuda:1", **pools, **changes}))
    with pytest.raises(ValueError, match=rf"execute\.device must be .* {words}"):
        check_back_ends(run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies.system": "colocated"}, "must be 'local' when replicas and trainer share"),
        ({"execute.device": "cuda:1"}, "for launcher ray, which chooses GPUs itself"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run = make_run(local_table(tmp_path, {"execute.launcher": "ray", **changes}))
    with pytest.raises(ValueError, match=words):
        check_back_ends(run)


@pytest.mark.parametrize(
    "policy",
    [{"dispatch": "skewness-aware"}, {"order": "longest-first"}, {"tail_batching": "defer"}],
)
def test_a_policy_that_goes_by_expected_lengths_needs_them_of_every_prompt(
    policy: dict[str, str], tmp_path: Path
) -> None:
    changes = {f"policies.{key}": value for key, value in policy.items()}
    table = local_table(tmp_path, {**changes, "workload.lengths.ranker": "oracle"})
    run = make_run(table)
    ((key, value),) = policy.items()
    with pytest.raises(
        ValueError, match=rf"policies\.{key} '{value}' .*:1 has no 'expected_tokens'"
    ):
        PromptWorkload(run, ScriptedTokenizer())
    finding = bad(list(run_paths.find(run)))["prompts"]
    assert finding.level == "error" and f"policies.{key}" in finding.fix
    line = '{"prompt": "1+1=", "answer": "2", "expected_tokens": 5}\n'
    (tmp_path / "prompts.jsonl").write_text(line * 3)
    assert PromptWorkload(run, ScriptedTokenizer()).draw(0, 1)[0].drawn.expected_tokens == (5, 5)
    assert "prompts" not in bad(list(run_paths.find(run)))


def test_what_siblings_tell_needs_no_expected_lengths(tmp_path: Path) -> None:
    changes = {"policies.order": "longest-first", "policies.learns_from_siblings": True}
    run = make_run(local_table(tmp_path, changes))
    assert len(PromptWorkload(run, ScriptedTokenizer()).draw(0, 2)) == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensor_parallel": 2}, r"tensor_parallel must be 1 for backend torch, got 2"),
        ({"context_parallel": 2}, r"context_parallel must be 1 for backend torch, .*backend=fsdp2"),
        (
            {"context_parallel": 2, "backend": "fsdp2", "zero": 3},
            r"context_exchange must be 'all-gather' for backend fsdp2.*context_exchange=all-gather",
        ),
        (
            {"zero": 1, "data_parallel": 2},
            r"zero must be 0 .*: --set trainer\.2\.zero=0 does so, --set trainer\.2\.backend=deepspeed",
        ),
    ],
)
def test_what_a_trainer_that_follows_cannot_do_is_refused_by_its_own_key(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    table = local_table(tmp_path, {})
    pool = table["trainer"]["pool"]
    table["cluster"]["pools"][pool]["gpus_per_node"] = 8
    table["model"]["dtype"] = "bfloat16"
    second, third = {"name": "second", "pool": pool}, {"name": "third", "pool": pool, **changes}
    check_back_ends(make_run({**table, "trainer": [table["trainer"], second]}, NOWHERE.parent))
    several = {**table, "trainer": [table["trainer"], second, third]}
    with pytest.raises(ValueError, match=rf"^trainer\.2\.{text}"):
        check_back_ends(make_run(several, NOWHERE.parent))


def test_verifiers_on_gpus_are_simulated_only(tmp_path: Path) -> None:
    table = local_table(tmp_path, {})
    table["cluster"]["pools"][table["trainer"]["pool"]]["gpus_per_node"] = 8
    on_gpus = {**table, "verifier": {"pool": table["trainer"]["pool"], "gpus_per_worker": 1}}
    with pytest.raises(ValueError, match=r"^verifier.pool must be left out for an executed run"):
        check_back_ends(make_run(on_gpus, NOWHERE.parent))


def test_a_model_with_sinks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = make_run(local_table(tmp_path, {"model.dtype": "bfloat16"}), NOWHERE.parent)
    config = tmp_path / "model" / "config.json"
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}
    sinks = {"model_type": "gpt_oss", "tie_word_embeddings": False, **experts}
    config.write_text(json.dumps({**json.loads(config.read_text()), **sinks}))
    with pytest.raises(ValueError, match=r"^rollout\.backend must be 'vllm' for .*sinks") as told:
        execute(run)
    assert "\n" not in str(told.value) and not (tmp_path / "run").exists()
    vllm = replace(run, rollout=replace(run.rollout, backend="vllm"))
    vllm = replace(vllm, cluster=replace(run.cluster, pools={"here": PoolConfig(gpu="h100")}))
    with pytest.raises(ValueError, match=r"^trainer\.packing must be 'padded' for .*sinks"):
        check_back_ends(vllm)
    check_back_ends(replace(vllm, trainer=replace(vllm.trainer, packing="padded")))


def test_vllm_on_cpus_refuses_heads_that_its_kernels_do_not_compute(tmp_path: Path) -> None:
    run = make_run(local_table(tmp_path, {"rollout.backend": "vllm"}), NOWHERE.parent)
    with pytest.raises(ValueError, match=r"^model\.path must be .* heads have 32, .*have 16"):
        check_back_ends(run)
    config = tmp_path / "model" / "config.json"
    wide = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config.write_text(json.dumps({**json.loads(config.read_text()), **wide}))
    check_back_ends(run)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "rollout.temperature",
            0.005,
            r"^rollout\.temperature must be from 0\.01 to 2 .* got 0\.005",
        ),
        ("rollout.temperature", 2.5, r"^rollout\.temperature must be from 0\.01 to 2 .* got 2\.5"),
        (
            "rollout.max_tokens",
            5000,
            r"max_tokens must be at most the model's \d+ positions .* got 7048",
        ),
    ],
)
def test_what_vllm_would_do_otherwise_or_not_start_with_is_refused_before(
    key: str, value: float, message: str, tmp_path: Path
) -> None:
    changes = {
        "cluster": {"pools": {"here": {"gpu": "h100", "gpus_per_node": 8}}},
        "rollout.backend": "vllm",
        key: value,
    }
    run = make_run(local_table(tmp_path, changes), NOWHERE.parent)
    config = tmp_path / "model" / "config.json"
    known = {**json.loads(config.read_text()), "max_position_embeddings": 4096}
    config.write_text(json.dumps(known))
    with pytest.raises(ValueError, match=message):
        check_back_ends(run)
    check_back_ends(replace(run, rollout=replace(run.rollout, backend="transformers")))


def test_several_gpus_a_replica_are_executed_by_vllm_alone(tmp_path: Path) -> None:
    pools = {"here": {"gpu": "h100", "gpus_per_node": 8}}
    changes = {"cluster": {"pools": pools}, "rollout.tensor_parallel": 2}
    with pytest.raises(ValueError, match=r"^rollout\.tensor_parallel must be 1.*backend=vllm"):
        check_back_ends(make_run(local_table(tmp_path, changes), NOWHERE.parent))
    changes["rollout.backend"] = "vllm"
    check_back_ends(make_run(local_table(tmp_path, changes), NOWHERE.parent))


def test_vllm_shares_gpus_with_the_trainer(tmp_path: Path) -> None:
    changes = {
        "cluster": {"pools": {"here": {"gpu": "h100", "gpus_per_node": 1}}},
        "policies.system": "colocated",
        "rollout.backend": "vllm",
    }
    check_back_ends(make_run(local_table(tmp_path, changes), NOWHERE.parent))


def test_vllm_on_a_gpu_takes_prefixes_as_its_server_does_beside_all_that_may_decode() -> None:
    assert place_on_gpus(64)["max_num_batched_tokens"] == 8256
    assert place_on_gpus(10_000)["max_num_batched_tokens"] == 18_192


def test_vllm_starts_its_workers_itself_also_in_a_ray_actor() -> None:
    assert place_on_gpus(1)["distributed_executor_backend"] == "uni"
    assert place_on_gpus(1, tensor_parallel=4)["distributed_executor_backend"] == "mp"


def place_on_gpus(max_running: int, **others: Any) -> dict[str, Any]:
    """Return the arguments of vLLM for GPUs."""
    limits = {"max_running": max_running, "max_tokens": 8, "max_prompt_tokens": 8, **others}
    settings = {"model": "m", "temperature": 1.0, "seed": 0, "device": "cuda", **limits}
    return device_arguments(ReplicaSettings(**settings))
