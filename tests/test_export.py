"""What was planned as the launch arguments of other frameworks: names and rules are those that are kept as data."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import asdict, replace

from streamrl.export.launch_file import check_relations, find_arguments, launch_script
from streamrl.export.option_table import ExportName, Relation, export_name, load_options
from streamrl.export.planned_values import ASSUMED, conditions, planned_values
from streamrl.hardware.parallelism import end_stage_layers, stage_layers
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run
from streamrl.runfile.frameworks import load_framework
from tests.command_line import streamrl
from tests.runs import small_run

NAMES: tuple[ExportName, ...] = get_args(ExportName)
MAIN = Path("examples/h20-h800.toml")
EXPORTS = Path("examples/exports")
CRITICS = ("critic.megatron", "value.")
"""Prefixes of options for the layout of a critic."""
SHARDED = ["trainer.zero=3", "trainer.tensor_parallel=1", "trainer.data_parallel=16"]
"""A trainer of FSDP, which slime does not have."""
RUNS = [
    (MAIN, []),
    (Path("examples/colocated.toml"), []),
    (MAIN, ["policies.system=disaggregated", "sync.mode=delta", "costs.engine=sglang-0.5"]),
    (MAIN, ["algorithm.name=grpo", "algorithm.group_size=8", "framework.optimizer_steps=4"]),
    (MAIN, SHARDED),
]


def script_of(run: Run, name: ExportName) -> str:
    """Return the script that starts a framework with a run file."""
    return launch_script(find_arguments(run, name))


def read_script(text: str) -> tuple[dict[str, str], str, list[str]]:
    """Return the options of a script with their values, its command, and the comments after it."""
    before, _, after = text.partition("\nargs=(\n")
    lines, _, rest = after.partition("\n)\n")
    command, _, comments = rest.partition("\n")
    found = {}
    for line in lines.splitlines():
        words = shlex.split(line, comments=True)
        if words[0].startswith("--"):
            found[words[0]] = words[1] if len(words) > 1 else "true"
        else:
            name, _, value = words[0].partition("=")
            found[name.lstrip("+")] = value
    assert before.startswith("#!/usr/bin/env bash")
    return found, command, [line.removeprefix("#").strip() for line in comments.splitlines()]


# The exported files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_the_exported_examples_are_what_export_writes(name: ExportName) -> None:
    assert (EXPORTS / f"{name}.sh").read_text() == script_of(load_run(MAIN), name)


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_every_option_of_the_exported_examples_is_kept_as_data_and_has_its_source_beside_it(
    name: ExportName,
) -> None:
    table = load_options(name)
    sources = {(option.name, option.source) for option in table.options}
    lines = (EXPORTS / f"{name}.sh").read_text().partition("args=(\n")[2].partition("\n)")[0]
    for line in lines.splitlines():
        text, _, origin = line.strip().partition("  # ")
        option = text.strip('"').partition("=")[0].lstrip("+")
        assert any(origin.endswith(source) for known, source in sources if known == option), line


def test_the_exported_verl_file_keeps_to_what_verl_asserts_at_its_start() -> None:
    found, command, _ = read_script((EXPORTS / "verl.sh").read_text())
    run = load_run(MAIN)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert command.startswith("python3 -m verl.trainer.main_ppo")
    assert found["trainer.v1.trainer_mode"] == "separate_async"
    batch, mini = int(found["data.train_batch_size"]), int(found[f"{actor}.ppo_mini_batch_size"])
    assert batch == int(found["trainer.v1.separate_async.parameter_sync_step"]) * mini
    generate = int(found[f"{rollout}.nnodes"]) * int(found[f"{rollout}.n_gpus_per_node"])
    assert generate == run.rollout.num_gpus > 0
    assert found[f"{rollout}.checkpoint_engine.backend"] != "naive"
    train = int(found["trainer.nnodes"]) * int(found["trainer.n_gpus_per_node"])
    assert train == run.trainer.num_gpus
    assert train % int(found[f"{actor}.megatron.tensor_model_parallel_size"]) == 0
    longest = int(found["data.max_prompt_length"]) + int(found["data.max_response_length"])
    assert int(found[f"{actor}.ppo_max_token_len_per_gpu"]) >= longest


def test_weights_that_are_pushed_every_few_steps_make_one_step_of_verl_of_these() -> None:
    late = {"policies.sync_every": 2, "policies.consumption": "greedy"}
    late |= {"policies.over_staleness": "drop", "algorithm.steps": 7}
    found, _, rest = read_script(script_of(small_run(late), "verl"))
    assert found["data.train_batch_size"] == "4"
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == "2"
    assert found["trainer.v1.separate_async.parameter_sync_step"] == "2"
    assert found["trainer.total_training_steps"] == "4"
    assert found["trainer.v1.sampler.max_off_policy_strategy"] == "drop"
    assert not any("over_staleness" in line or "sync_every" in line for line in rest)


def test_groups_too_many_and_partial_rollouts_are_options_of_slime() -> None:
    late = {"policies.consumption": "greedy", "policies.oversampling": 1.5}
    late |= {"policies.left_over": "keep", "policies.sync_every": 2}
    found, _, rest = read_script(script_of(small_run(late), "slime"))
    assert found["--over-sampling-batch-size"] == "3"
    assert found["--partial-rollout"] == "true"
    assert found["--update-weights-interval"] == "2"
    assert not any("oversampling" in line or "left_over" in line for line in rest)
    _, _, rest = read_script(script_of(small_run(late), "verl"))
    assert any("policies.oversampling = 1.5" in line for line in rest)


def test_the_exported_nemo_rl_file_takes_the_nodes_that_generate_out_of_the_cluster() -> None:
    found, command, _ = read_script((EXPORTS / "nemo-rl.sh").read_text())
    run = load_run(MAIN)
    assert "examples/run_ppo.py" in command
    nodes, per_node = int(found["cluster.num_nodes"]), int(found["cluster.gpus_per_node"])
    generate = int(found["policy.generation.colocated.resources.num_nodes"])
    assert (nodes - generate) * per_node == run.trainer.num_gpus
    assert generate * per_node == run.rollout.num_gpus
    rollouts = int(found["ppo.num_prompts_per_step"]) * int(found["ppo.num_generations_per_prompt"])
    assert rollouts % int(found["policy.train_global_batch_size"]) == 0
    assert found["policy.generation.colocated.enabled"] == "false"
    for needed in ("vllm_cfg.async_engine", "colocated.enabled"):
        assert f"policy.generation.{needed}" in found
    assert found["policy.generation.vllm_cfg.async_engine"] == "true"
    assert found["loss_fn.use_importance_sampling_correction"] == "true"


# Placement ----------------------------------------------------------------------------------------


def two_sides(
    replicas: int, tensor_parallel: int, trains: int, split: int = 1, per_node: int = 8
) -> Run:
    """Return a run of two sides in one pool of two nodes; `split` is the trainer's tensor parallelism."""
    run = load_run(Path("examples/colocated.toml"))
    pool = replace(run.cluster.pools[run.trainer.pool], nodes=2, gpus_per_node=per_node)
    run = replace(run, cluster=replace(run.cluster, pools={run.trainer.pool: pool}))
    trainer = replace(
        run.trainer,
        tensor_parallel=split,
        data_parallel=trains // split,
        **dict.fromkeys(("pipeline_parallel", "context_parallel", "expert_parallel"), 1),
    )
    rollout = replace(run.rollout, replicas=replicas, tensor_parallel=tensor_parallel)
    policies = replace(run.policies, system="one-step-async")
    return replace(run, rollout=rollout, trainer=trainer, policies=policies)


SIDES = [(6, 2, 4, 1), (3, 4, 4, 1), (1, 4, 12, 4), (1, 4, 12, 1), (2, 2, 12, 2), (10, 1, 6, 2)]


def parts_of(run: Run) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the count and the GPUs of verl's parts of nodes, for the replicas and the trainer."""
    found, _, _ = read_script(script_of(run, "verl"))
    of_rollout = "actor_rollout_ref.rollout."
    rollout, trainer = (
        (int(found[f"{side}nnodes"]), int(found[f"{side}n_gpus_per_node"]))
        for side in (of_rollout, "trainer.")
    )
    return rollout, trainer


@pytest.mark.parametrize("sides", SIDES)
def test_the_parts_of_nodes_that_verl_is_given_fit_on_the_nodes(sides: tuple[int, ...]) -> None:
    run = two_sides(*sides)
    rollout, trainer = parts_of(run)
    assert rollout[0] * rollout[1] == run.rollout.num_gpus
    assert trainer[0] * trainer[1] == run.trainer.num_gpus
    assert rollout[1] % run.rollout.gpus_per_replica == 0
    assert trainer[1] % run.trainer.tensor_parallel == 0
    free = [8, 8]
    for size in sorted([rollout[1]] * rollout[0] + [trainer[1]] * trainer[0], reverse=True):
        node = next((place for place, left in enumerate(free) if left >= size), None)
        assert node is not None, f"no node has {size} GPUs left: {rollout}, {trainer}"
        free[node] -= size


def test_sides_that_would_split_a_replica_over_nodes_have_no_script() -> None:
    run = two_sides(1, 8, 8)
    assert parts_of(run) == ((1, 8), (1, 8))
    with pytest.raises(RunError, match=r"verl cannot place the plan: .* split over nodes"):
        script_of(two_sides(1, 4, 8, 4, per_node=6), "verl")
    with pytest.raises(RunError, match="after the 2 GPUs of the trainer"):
        script_of(two_sides(3, 4, 2), "slime")


def test_slime_is_told_how_many_gpus_a_node_has_not_how_many_a_side_uses() -> None:
    found, _, _ = read_script(script_of(two_sides(3, 4, 4), "slime"))
    assert found["--num-gpus-per-node"] == "8"


def test_nemo_rl_shares_only_a_single_node_between_the_sides() -> None:
    found, _, _ = read_script(script_of(two_sides(1, 4, 4), "nemo-rl"))
    resources = "policy.generation.colocated.resources"
    assert (found["cluster.num_nodes"], found["cluster.gpus_per_node"]) == ("1", "8")
    assert (found[f"{resources}.num_nodes"], found[f"{resources}.gpus_per_node"]) == ("1", "4")
    found, _, _ = read_script(script_of(two_sides(2, 4, 8), "nemo-rl"))
    assert (found["cluster.num_nodes"], found[f"{resources}.num_nodes"]) == ("2", "1")
    with pytest.raises(RunError, match=r"nemo-rl cannot place the plan: .* whole nodes"):
        script_of(two_sides(6, 2, 4), "nemo-rl")


# Every framework ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_options_refer_to_values_and_facts_that_plans_have(name: ExportName) -> None:
    run, table, framework = load_run(MAIN), load_options(name), load_framework(name)
    values = planned_values(run)
    facts = conditions(run.policies, run.algorithm, run.model, run.rollout, run.trainer)
    kinds = ("algorithm", "correction", "dtype", "layout", "recompute", "sends", "serves", "sync")
    layouts = {layout.name for layout in framework.layouts}
    for option in table.options:
        assert option.of == "" or option.of in values, option.name
        assert {*option.covers} <= {*values}, option.name
    for entry in (*table.launch, *table.options, *table.notes):
        for fact in (each.removeprefix("!") for each in entry.when):
            kind, _, which = fact.partition(":")
            assert (
                kind in (*kinds, "system", "zero")
                if which
                else fact in {*facts, "packed", "padded"}
            ), fact
            assert kind != "layout" or which in layouts, fact
    names = {option.name for option in table.options}
    for relation in table.relations:
        assert {*relation.product, *relation.equals, *relation.divides} <= names


@pytest.mark.parametrize(
    ("name", "path", "settings"),
    [(name, *run) for run in RUNS for name in NAMES if (name, run[1]) != ("slime", SHARDED)],
)
def test_a_script_is_one_that_a_shell_reads_and_names_no_option_twice(
    name: ExportName, path: Path, settings: list[str]
) -> None:
    run = load_run(path, settings)
    arguments = find_arguments(run, name).arguments
    names = [argument.option.name for argument in arguments]
    assert len(names) == len({*names})
    script = script_of(run, name)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    found, _, _ = read_script(script)
    off = {arg.option.name for arg in arguments if arg.value is False}
    style = load_options(name).style
    assert {*found} == {*names} - (off if style == "flag" else set())


@pytest.mark.parametrize("name", NAMES)
def test_what_a_framework_has_no_option_for_stands_in_a_comment(name: ExportName) -> None:
    settings = ["policies.dispatch=round-robin", "policies.group_placement=together"]
    settings += ["lending.replicas=1", "lending.tensor_parallel=2"]
    _, _, comments = read_script(script_of(load_run(MAIN, settings), name))
    assert "[lending] = 1 x TP2 on the trainer's GPUs" in comments
    assert "policies.order = longest-first" in comments
    assert "policies.dispatch = round-robin" in comments
    assert "policies.group_placement = together" in comments


@pytest.mark.parametrize("name", NAMES)
def test_no_name_or_path_of_a_run_file_is_a_command_in_the_script(
    name: ExportName, tmp_path: Path
) -> None:
    hostile = f'x\ntouch {tmp_path}/a\n#"$(touch {tmp_path}/b)`touch {tmp_path}/c`'
    found = find_arguments(load_run(MAIN), name)
    argument = found.arguments[0]._replace(value=hostile)
    found = found._replace(arguments=[argument, *found.arguments[1:]], command="true")
    untold = [each._replace(value=hostile) for each in found.find_untold()]
    script = launch_script(found._replace(notes=[hostile], find_untold=lambda: untold))
    variables = dict.fromkeys(found.table.variables, "1")
    subprocess.run(["bash"], input=script, text=True, check=True, env={"PATH": "/bin", **variables})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["a\ntouch x", "a\tb", "a\u2028b"])
def test_the_name_of_a_pool_has_one_line(name: str) -> None:
    pools = {name: {"gpu": "h100", "nodes": 1, "gpus_per_node": 8}}
    with pytest.raises(RunError, match=r"^cluster\.pools: a name has one line"):
        small_run({"cluster": {"pools": pools}, "rollout.pool": name, "trainer.pool": name})


@pytest.mark.parametrize("name", NAMES)
def test_every_degree_of_a_back_end_has_an_option(name: ExportName) -> None:
    options = load_options(name).options
    for layout in load_framework(name).layouts:
        own = [each for each in options if f"layout:{layout.name}" in each.when]
        assert {*layout.splits} <= {each.of for each in own if "critic" not in each.when}
        if any(each.name.startswith(CRITICS) for each in options):
            assert {*layout.splits} <= {each.of for each in own if "critic" in each.when}


@pytest.mark.parametrize(("context", "multiple"), [(1, "4"), (2, "16")])
def test_sequences_of_nemo_rl_divide_over_tensor_and_context_ranks(
    context: int, multiple: str
) -> None:
    """Sequence parallelism splits a sequence over tensor ranks; each context rank has two parts of one."""
    degrees = [f"trainer.context_parallel={context}", f"trainer.data_parallel={4 // context}"]
    found = read_script(script_of(load_run(MAIN, degrees), "nemo-rl"))[0]
    for role in ("policy", "value"):
        assert found[f"{role}.make_sequence_length_divisible_by"] == multiple
        assert found[f"{role}.megatron_cfg.sequence_parallel"] == "true"


def test_passes_that_score_may_have_more_tokens_in_nemo_rl() -> None:
    run = load_run(MAIN, ["trainer.max_tokens_per_scoring_pass=65536"])
    found, _, left_out = read_script(script_of(run, "nemo-rl"))
    assert found["policy.sequence_packing.logprob_mb_tokens"] == "65536"
    assert found["policy.sequence_packing.train_mb_tokens"] != "65536"
    assert not any("max_tokens_per_scoring_pass" in line for line in left_out)
    assert any(
        "max_tokens_per_scoring_pass" in line for line in read_script(script_of(run, "verl"))[2]
    )


def test_an_optimizer_in_host_memory_has_what_megatron_needs_beside_it() -> None:
    run = load_run(MAIN, ["trainer.offload=true"])
    prefix = "policy.megatron_cfg.optimizer.optimizer_"
    found = read_script(script_of(run, "nemo-rl"))[0]
    assert found[f"{prefix}cpu_offload"] == "true" and found[f"{prefix}offload_fraction"] == "1"
    found = read_script(script_of(run, "slime"))[0]
    needed = {"--use-precision-aware-optimizer", "--overlap-cpu-optimizer-d2h-h2d"}
    assert {"--optimizer-cpu-offload", *needed} <= {*found}
    for name in ("nemo-rl", "slime"):
        assert "trainer.offload = true" not in read_script(script_of(run, name))[2]
        plain = read_script(script_of(load_run(MAIN), name))[0]
        assert not any("offload" in option or option in needed for option in plain)


DRAFTS = [
    *("model.name=mimo-7b", "rollout.speculative.tokens=2"),
    "rollout.speculative.acceptance=0.7",
]


@pytest.mark.parametrize(
    ("name", "engine", "steps", "checked", "trains"),
    [
        (
            "verl",
            "sglang-0.5",
            ".speculative_num_steps",
            ".speculative_num_draft_tokens",
            ".enable_train",
        ),
        ("verl", "vllm-0.24", ".num_speculative_tokens", "", ".enable_train"),
        (
            "slime",
            "sglang-0.5",
            "--sglang-speculative-num-steps",
            "--sglang-speculative-num-draft-tokens",
            "--enable-mtp-training",
        ),
    ],
)
def test_a_draft_layer_is_told_to_frameworks_that_train_it(
    name: ExportName, engine: str, steps: str, checked: str, trains: str
) -> None:
    prefix = "actor_rollout_ref.model.mtp" if name == "verl" else ""
    frozen, trained = (
        read_script(script_of(load_run(MAIN, [*DRAFTS, f"costs.engine={engine}", *more]), name))
        for more in ([], ["rollout.speculative.trained=true"])
    )
    assert trained[0][prefix + steps] == frozen[0][prefix + steps] == "2"
    assert not checked or trained[0][prefix + checked] == "3"
    assert trained[0][prefix + trains] == "true" and prefix + trains not in frozen[0]
    assert not any("speculative" in line for line in trained[2])


def test_a_trained_draft_layer_is_a_comment_for_a_framework_without_an_option() -> None:
    run = load_run(MAIN, [*DRAFTS, "rollout.speculative.trained=true"])
    comments = " ".join(read_script(script_of(run, "nemo-rl"))[2])
    assert "rollout.speculative.trained" in comments


def test_verl_gets_the_version_of_fsdp_and_what_it_frees() -> None:
    prefix = "actor_rollout_ref.actor.fsdp_config."
    for sharding, frees in (("fsdp2", "true"), ("fsdp", "false")):
        changes = [f"trainer.sharding={sharding}", f"trainer.reshard_after_forward={frees}"]
        found = read_script(script_of(load_run(MAIN, [*SHARDED, *changes]), "verl"))[0]
        assert found[f"{prefix}strategy"] == sharding
        assert found[f"{prefix}reshard_after_forward"] == frees


def test_sharding_groups_are_verls_fsdp_size_and_a_comment_elsewhere() -> None:
    groups = [*SHARDED, "trainer.shard_ranks=2"]
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    assert read_script(script_of(load_run(MAIN, groups), "verl"))[0][key] == "2"
    assert key not in read_script(script_of(load_run(MAIN, SHARDED), "verl"))[0]
    comments = " ".join(read_script(script_of(load_run(MAIN, groups), "nemo-rl"))[2])
    assert "trainer.shard_ranks" in comments


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_a_framework_without_a_way_of_sharding_has_no_script(name: ExportName) -> None:
    run = load_run(MAIN, [*SHARDED, "trainer.sharding=deepspeed"])
    with pytest.raises(RunError, match=r"has no trainer\.sharding=deepspeed"):
        script_of(run, name)


@pytest.mark.parametrize("name", ["verl", "nemo-rl", "slime", "openrlhf"])
def test_an_optimizer_on_nvme_has_no_script(name: ExportName) -> None:
    keys = ["trainer.offload=true", "trainer.offload_to=nvme", "trainer.zero=3"]
    run = load_run(MAIN, [*keys, "trainer.tensor_parallel=1", "trainer.data_parallel=8"])
    with pytest.raises(RunError, match=r"has no trainer\.offload_to=nvme"):
        script_of(run, name)


def test_a_way_of_sending_weights_that_verl_has_an_option_for_is_in_no_comment() -> None:
    option = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    for stated, named in (("nccl-buckets", "nccl"), ("checkpoint-engine", "kimi_ckpt_engine")):
        run = load_run(MAIN, [f"sync.backend={stated}"])
        found, _, comments = read_script(script_of(run, "verl"))
        assert found[option] == named and "sync.backend" not in comments
    comments = read_script(script_of(load_run(MAIN, ["sync.backend=nccl-reshard"]), "verl"))[2]
    assert "sync.backend = nccl-reshard" in comments


def test_slime_keeps_its_relation_of_batch_and_steps() -> None:
    settings = ["algorithm.name=grpo", "algorithm.group_size=8", "framework.optimizer_steps=4"]
    found, command, _ = read_script(script_of(load_run(MAIN, settings), "slime"))
    rollouts = int(found["--rollout-batch-size"]) * int(found["--n-samples-per-prompt"])
    assert rollouts == int(found["--global-batch-size"]) * int(found["--num-steps-per-rollout"])
    assert command.startswith("python3 train_async.py") and "--colocate" not in found


@pytest.mark.parametrize(
    ("name", "weighs"),
    [
        ("verl", ("algorithm.rollout_correction.rollout_is", "token")),
        ("slime", ("--use-tis", "true")),
        ("openrlhf", ("--algo.advantage.is_correction_type", "tis")),
    ],
)
def test_a_decoupled_clip_is_the_importance_correction_of_others_beside_their_clip(
    name: ExportName, weighs: tuple[str, str]
) -> None:
    settings = ["algorithm.correction=decoupled", "algorithm.clip_high=0.28"]
    text = script_of(load_run(MAIN, settings), name)
    option, value = weighs
    assert read_script(text)[0][option] == value and "0.28" in text


# Pipeline stages that do not divide the layers ----------------------------------------------------


def staged_run(model: str, stages: int, **changes: object) -> Run:
    """Return a run that trains a model in pipeline stages."""
    trainer = {"pool": "near", "data_parallel": 8, "pipeline_parallel": stages}
    nodes = {"cluster.pools.near": {"gpu": "h800", "nodes": stages}}
    far = {"cluster.pools.far": {"gpu": "h20", "nodes": 1}, "rollout.replicas": 1}
    whole = {**nodes, **far, "rollout.tensor_parallel": 8, "trainer": {**trainer, **changes}}
    return small_run({"model.name": model, **whole, "algorithm.prompts_per_step": 64})


ENDS: dict[ExportName, str] = {
    "verl": "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_{}_pipeline_stage",
    "nemo-rl": "policy.megatron_cfg.num_layers_in_{}_pipeline_stage",
    "slime": "--decoder-{}-pipeline-num-layers",
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(
    ("model", "stages", "ends"),
    [
        ("qwen3-235b-a22b", 4, ("23", "23")),
        ("qwen3-235b-a22b", 8, ("11", "11")),
        ("qwen3-235b-a22b", 16, ("5", "5")),
        ("deepseek-v3", 2, ("31", "30")),
        ("deepseek-v3", 16, ("3", "2")),
        ("qwen3-235b-a22b", 2, (None, None)),
        ("qwen3-30b-a3b", 1, (None, None)),
    ],
)
def test_the_first_and_last_stage_have_the_layers_that_equal_stages_between_them_leave(
    name: ExportName, model: str, stages: int, ends: tuple[str | None, str | None]
) -> None:
    found = read_script(script_of(staged_run(model, stages), name))[0]
    assert tuple(found.get(ENDS[name].format(end)) for end in ("first", "last")) == ends


@pytest.mark.parametrize("stages", range(2, 17))
@pytest.mark.parametrize("layers", [27, 61, 94])
def test_stages_with_layers_of_their_own_keep_to_megatrons_rule_and_the_fullest_stage_of_the_plan(
    layers: int, stages: int
) -> None:
    ends, fullest = end_stage_layers(layers, stages), max(stage_layers(layers, stages))
    if ends is None:
        assert layers - (stages - 2) * fullest < 2
        return
    middle, middle_stages = layers - sum(ends), stages - 2
    assert min(ends) > 0 and max(ends) <= fullest
    assert middle == middle_stages * fullest


def test_a_critic_has_the_stages_of_the_actor() -> None:
    run = staged_run("moonlight-16b-a3b", 2)
    run = replace(run, algorithm=replace(run.algorithm, name="ppo", group_size=1))
    for name, prefix in (
        ("verl", "critic.megatron.override_transformer_config."),
        ("nemo-rl", "value.megatron_cfg."),
    ):
        found = read_script(script_of(run, export_name(name, "")))[0]
        assert found[f"{prefix}num_layers_in_first_pipeline_stage"] == "14"
        assert found[f"{prefix}num_layers_in_last_pipeline_stage"] == "13"


@pytest.mark.parametrize(
    ("model", "stages", "changes", "line"),
    [
        (
            "qwen3-235b-a22b",
            2,
            {"virtual_stages": 3},
            "virtual_stages=3 x trainer.pipeline_parallel=2 = 6 must divide the 94 layers of Qwen3-235B-A22B",
        ),
        (
            "moonlight-16b-a3b",
            16,
            {},
            "distribute the 27 layers of Moonlight-16B-A3B over trainer.pipeline_parallel=16",
        ),
    ],
)
def test_layers_that_megatron_cannot_distribute_are_refused(
    model: str, stages: int, changes: dict[str, object], line: str
) -> None:
    with pytest.raises(RunError, match=line):
        script_of(staged_run(model, stages, **changes), "verl")


# What cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "key", "part"),
    [
        (
            "openrlhf",
            ["trainer.pipeline_parallel=2", "trainer.data_parallel=2"],
            "trainer.pipeline_parallel",
            "deepspeed has no trainer.pipeline_parallel=2. ",
        ),
        (
            "verl",
            ["trainer.zero=3", "trainer.context_parallel=2", "trainer.data_parallel=2"],
            "trainer.zero",
            "megatron has no trainer.zero=3, "
            "fsdp has no trainer.tensor_parallel=4 and no trainer.context_parallel=2. ",
        ),
        (
            "nemo-rl",
            ["trainer.pipeline_parallel=2", "trainer.data_parallel=2", "trainer.virtual_stages=2"],
            "trainer.virtual_stages",
            "megatron has no trainer.virtual_stages=2, dtensor has no",
        ),
        ("slime", ["trainer.zero=2"], "trainer.zero", "megatron has no trainer.zero=2. "),
        ("slime", ["trainer.zero=0"], "trainer.zero", "megatron has no trainer.zero=0. "),
    ],
)
def test_a_layout_that_a_framework_does_not_have_is_refused_with_the_remedy(
    name: ExportName, settings: list[str], key: str, part: str
) -> None:
    with pytest.raises(RunError) as caught:
        find_arguments(load_run(MAIN, settings), name)
    assert caught.value.key == key and part in str(caught.value)
    assert f"Plan again with --for {name}: " in str(caught.value)


def test_a_refused_layout_is_one_line_and_status_two(tmp_path: Path) -> None:
    stages = ["--set", "trainer.pipeline_parallel=2", "--set", "trainer.data_parallel=2"]
    path = tmp_path / "script.sh"
    done = streamrl("export", MAIN, "--framework", "openrlhf", *stages, "-o", path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not path.exists()
    assert "trainer.pipeline_parallel=2" in done.stderr and "Plan again" in done.stderr


def test_a_mini_batch_that_does_not_come_out_even_is_one_line() -> None:
    run = load_run(MAIN, ["framework.optimizer_steps=3"])
    line = r"ppo_mini_batch_size of verl has no value for the plan: .*optimizer_steps=3 is no whole number"
    with pytest.raises(RunError, match=line):
        script_of(run, "verl")


def test_options_that_contradict_each_other_are_refused() -> None:
    rules = [
        Relation(product=("a", "b"), equals=("c",), source="x.py"),
        Relation(product=("a",), divides=("c",), source="y.py"),
        Relation(product=("b",), equals=("c",), beside="d", source="z.py"),
    ]
    check_relations(rules, {"a": 2, "b": 3, "c": 6})
    with pytest.raises(RunError, match=r"a x b = 6 must be c = 8 \(x\.py\)"):
        check_relations(rules, {"a": 2, "b": 3, "c": 8})
    with pytest.raises(RunError, match=r"a = 4 must divide c = 6 \(y\.py\)"):
        check_relations(rules, {"a": 4, "c": 6})
    with pytest.raises(RunError, match=r"b = 3 must be c = 6"):
        check_relations(rules, {"b": 3, "c": 6, "d": True})


# The command --------------------------------------------------------------------------------------


def test_export_writes_a_script_and_never_replaces_one_unasked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "verl.sh"
    done = streamrl("export", MAIN, "--framework", "verl", "-o", path, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["script"] == path.read_text()
    again = streamrl("export", MAIN, "--framework", "verl", "-o", path)
    assert again.returncode == 2 and "--force" in again.stderr
    named = streamrl("export", MAIN, "--set", "framework.name=verl")
    assert "ppo_mini_batch_size=256" in named.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--framework", "trl"], "--framework must be one of verl, nemo-rl, slime, openrlhf"),
        (["--set", "framework.name=trl"], "framework.name must be one of verl, nemo-rl"),
        ([], "--framework is missing"),
    ],
)
def test_a_framework_that_nothing_is_written_for_is_one_line_and_status_two(
    arguments: list[str], part: str, tmp_path: Path
) -> None:
    done = streamrl("export", MAIN, *arguments, "-o", tmp_path / "script.sh")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and part in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", get_args(ExportName))
def test_what_a_plan_has_beyond_plain_layouts_is_an_option_or_said_to_be_none(
    name: ExportName,
) -> None:
    changes = {
        "rollout.replicas": 4,
        "rollout.pipeline_parallel": 2,
        "rollout.dtype": "fp8",
        "rollout.kv_dtype": "fp8",
        "rollout.speculative": {"tokens": 2, "acceptance": 0.7},
        "trainer.context_parallel": 2,
        "trainer.dtype": "fp8",
        "cluster.pools.near.nodes": 2,
    }
    staged = {*changes} if name != "openrlhf" else {*changes} - {"rollout.pipeline_parallel"}
    found = find_arguments(small_run({key: changes[key] for key in staged}), name)
    keys = {argument.key for argument in found.arguments} | {
        each.key for each in found.find_untold()
    }
    assert keys >= {
        *("rollout.dtype", "rollout.kv_dtype", "trainer.dtype"),
        *("rollout.speculative.tokens", "trainer.context_parallel"),
        *(staged & {"rollout.pipeline_parallel"}),
    }


def test_stages_of_replicas_that_a_framework_has_no_option_for_are_refused() -> None:
    run = small_run({"rollout.pipeline_parallel": 2, "policies.system": "disaggregated"})
    with pytest.raises(RunError, match=r"rollout\.pipeline_parallel is 2, and openrlhf has no"):
        find_arguments(run, "openrlhf")


NOTHING_PACKED = "trainer.micro_batch"
"""A key that says nothing about packed passes."""


@pytest.mark.parametrize("name", NAMES)
def test_no_switch_or_number_of_a_plan_is_lost_in_silence(name: ExportName) -> None:
    grouped = ["algorithm.name=grpo", "algorithm.group_size=8", "algorithm.kl_coefficient=0.01"]
    run, lost, tried = load_run(MAIN, grouped), [], 0
    before = script_of(run, name)
    for section in ("algorithm", "rollout", "trainer", "policies", "workload"):
        for key, value in asdict(getattr(run, section)).items():
            key = f"{section}.{key}"
            if key in (*ASSUMED, NOTHING_PACKED) or not isinstance(value, (bool, int, float)):
                continue
            other = not value if isinstance(value, bool) else type(value)(2 * value or 1)
            try:
                after = script_of(load_run(MAIN, [*grouped, f"{key}={str(other).lower()}"]), name)
            except RunError:  # refused aloud
                continue
            tried += 1
            lost += [key] * (after == before)
    assert tried > 25 and lost == []


def test_an_export_tells_what_has_no_option_and_leaves_out_what_the_framework_fills_in() -> None:
    changed = ["seed=7", "algorithm.entropy_coefficient=0.01", "execute.checkpoint_every=5"]
    changed += ["model.dtype=float16"]
    comments = read_script(script_of(load_run(MAIN, changed), "nemo-rl"))[2]
    for line in changed:
        assert line.replace("=", " = ") in comments
    filled = load_run(MAIN, ["framework.name=nemo-rl"])
    assert filled.trainer.kernels != load_run(MAIN).trainer.kernels
    assert "trainer.kernels" not in script_of(filled, "nemo-rl")
    own = load_run(
        MAIN, ["framework.name=nemo-rl", "trainer.kernels=eager", "trainer.order=sorted"]
    )
    assert own.trainer.kernels == "eager"


def test_numbers_of_a_script_are_those_of_the_plan() -> None:
    run = load_run(MAIN, ["algorithm.learning_rate=1.23456789e-6", "sync.bucket_size=400 KB"])
    options = read_script(script_of(run, "verl"))[0]
    assert options["actor_rollout_ref.actor.optim.lr"] == "1.23456789e-06"
    bucket = [value for name, value in options.items() if name.endswith("bucket_megabytes")]
    assert bucket == ["1"]


@pytest.mark.parametrize("correction", ["none", "topr", "cispo", "m2po"])
def test_nemo_rl_says_that_it_corrects_otherwise(correction: str) -> None:
    run = load_run(MAIN, [f"algorithm.correction={correction}"])
    text = script_of(run, "nemo-rl")
    assert "whatever algorithm.correction is" in text
    assert (f"algorithm.correction = {correction}" in text) == (correction != "none")
    assert "whatever algorithm.correction is" not in script_of(load_run(MAIN), "nemo-rl")


def test_a_loss_that_a_switch_cannot_name_is_told_as_it_is() -> None:
    line = r"token_level_loss of nemo-rl has no value for the plan: .*'constant' is neither"
    with pytest.raises(RunError, match=line):
        script_of(load_run(MAIN, ["algorithm.loss_mean=constant"]), "nemo-rl")
