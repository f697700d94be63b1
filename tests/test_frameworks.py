"""What a framework's name fills in, what it takes of its own, and what it lets a plan choose among."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from streamrl.doctor.diagnosis import examine
from streamrl.hardware.memory import model_state
from streamrl.hardware.profiles import known_engines, load_model
from streamrl.hardware.resolved import resolve
from streamrl.report.page.assumptions import assumptions_of
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import change_run, load_run, make_run, write_run
from streamrl.runfile.findings import value_of
from streamrl.runfile.frameworks import load_framework, load_usual, returns_log_probs
from streamrl.runfile.keys import override
from streamrl.runfile.simulation_config import FrameworkConfig, FrameworkName
from streamrl.sim.costs.corrections import (
    Corrections,
    StatedTime,
    framework_sources,
    own_step_time,
    own_switch,
)
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.costs.weight_sync import SyncCosts
from streamrl.sim.planner.layouts import OF_FRAMEWORK
from streamrl.sim.planner.modes import find_modes, keep_to_framework
from streamrl.sim.planner.space import _logits, find_trainers
from tests.command_line import streamrl
from tests.runs import make_table, small_run

NAMES: tuple[FrameworkName, ...] = get_args(FrameworkName)
OTHERS = [name for name in NAMES if name != "streamrl"]
EXAMPLE = Path("examples/h20-h800.toml")
OFFER = Path("examples/plan-7b.toml")


def step_time_of(run: Run) -> StatedTime:
    return own_step_time(run.framework, Corrections.of(resolve(run)), run.costs.profile)


def of_framework(name: str, changes: dict[str, Any] | None = None) -> Run:
    """Return a small run of 16 rollouts a step whose framework takes what it takes."""
    table = make_table({"algorithm.prompts_per_step": 8, **(changes or {})})
    for key in ("step_time", "switch_time"):
        if f"framework.{key}" not in (changes or {}):
            del table["framework"][key]
    table["framework"]["name"] = name
    return make_run(table)


# Releases -----------------------------------------------------------------------------------------


def test_a_release_fills_in_its_own_values_and_the_file_keeps_the_release(tmp_path: Path) -> None:
    plain, newer = of_framework("nemo-rl"), of_framework("nemo-rl", {"framework.version": "0.7.1"})
    assert (plain.algorithm.old_log_probs, plain.costs.engine) == ("trainer", "vllm-0.11")
    assert (newer.algorithm.old_log_probs, newer.costs.engine) == ("engine", "vllm-0.19")
    assert newer.rollout.memory_utilization == plain.rollout.memory_utilization == 0.6
    write_run(newer, tmp_path / "run.toml")
    text = (tmp_path / "run.toml").read_text()
    assert 'version = "0.7.1"' in text and "old_log_probs" not in text
    assert any(
        "release 0.7 ships vLLM 0.20.0" in told for told in framework_sources(resolve(newer))
    )
    stated = of_framework("nemo-rl", {"framework.version": "0.7", "costs.engine": "vllm-0.11"})
    assert stated.costs.engine == "vllm-0.11"


def test_releases_with_vllm_before_0_11_launch_attention_in_each_layer() -> None:
    def step_time(version: str) -> float:
        resolved = resolve(of_framework("nemo-rl", {"framework.version": version}))
        return Costs.load(resolved.run).decode.base[1]

    assert step_time("0.3") == step_time("0.4")
    layers = resolve(of_framework("nemo-rl")).replica.model.num_layers
    engines = [load_engine(name).constants for name in ("vllm-0.9", "vllm-0.10")]
    apart, whole = (each.step + each.layer * layers for each in engines)
    assert step_time("0.4") - step_time("0.5") == pytest.approx(apart - whole)


def test_a_release_that_holds_for_one_back_end_leaves_the_others_as_they_are() -> None:
    for zero, packing in ((3, "padded"), (1, "packed")):
        run = of_framework("verl", {"framework.version": "0.5", "trainer.zero": zero})
        assert run.trainer.packing == packing
    for version, returned in (("0.5", False), ("0.9", True), (None, True)):
        config = FrameworkConfig(name="verl", version=version)
        changes = {"algorithm.old_log_probs": "trainer", "algorithm.correction": "none"}
        assert returns_log_probs(config, small_run(changes).algorithm) == returned


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"framework.name": "verl", "framework.version": "1.5"}, "0.5, 0.6, 0.7, 0.8, 0.9 of verl"),
        *(
            (
                {"framework.name": "nemo-rl", "framework.version": odd},
                "0.3, 0.4, 0.5, 0.6, 0.7 of nemo-rl",
            )
            for odd in ("0.6.zzz", "0.7.")
        ),
        ({"framework.name": "miles", "framework.version": "1"}, "no release is known of miles"),
        ({"framework.version": "0.7"}, "no framework is named; set framework.name"),
    ],
)
def test_an_unknown_release_is_refused_with_the_known_ones(
    changes: dict[str, str], told: str
) -> None:
    with pytest.raises(RunError, match=told):
        small_run(changes)


def test_a_version_on_the_command_line_is_a_text() -> None:
    table: dict[str, Any] = {}
    override(table, "framework.version=0.10")
    override(table, 'costs.engine_version="0.9"')
    assert table == {"framework": {"version": "0.10"}, "costs": {"engine_version": "0.9"}}


def test_the_page_lists_every_release() -> None:
    page = Path("docs/frameworks.md").read_text()
    page = page[page.index("## Plan for the release") : page.index("## Export launch")]
    for name in NAMES:
        for release in load_framework(name).releases:
            assert f" {release.version}" in page
            for setting in release.settings:
                assert f"`{setting.key}" in page


# The files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_framework_says_where_all_that_is_known_of_it_comes_from(name: FrameworkName) -> None:
    found = load_framework(name)
    assert found.name == name and (len(found.commit) == 40 or name == "streamrl")
    parts = [*found.settings, *found.passes, *found.systems, *found.sync, *found.layouts]
    figures = [each for each in (found.step_time, found.switch_time) if each is not None]
    assert all(part.source for part in [*parts, *figures])
    assert {each.name for each in found.passes} == {"old log-probs", "reference"}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_known_of_a_framework_is_said_to_be_unknown(name: FrameworkName) -> None:
    found = load_framework(name)
    for key in ("step_time", "switch_time"):
        assert (getattr(found, key) is None) == (f"framework.{key}" in found.unknown)


def test_the_page_of_frameworks_has_what_their_files_say() -> None:
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in Path("docs/frameworks.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    head = next(row for row in rows if row[0] == "verl")
    assert {*head} == {*NAMES}
    (steps,) = (row for row in rows if row[0] == "`framework.optimizer_steps`")
    (seconds,) = (row for row in rows if row[0].startswith("seconds of a step"))
    (switch,) = (row for row in rows if row[0].startswith("seconds of calls of a switch"))
    (offload,) = (row for row in rows if row[0].startswith("GB/s of optimizer states"))
    (sends,) = (row for row in rows if row[0].startswith("`sync.backend`"))
    (engines,) = (row for row in rows if row[0] == "`costs.engine`")
    (shares,) = (row for row in rows if row[0] == "`rollout.memory_utilization`")
    (returns,) = (row for row in rows if row[0].startswith("the engine returns"))
    for place, name in enumerate(head, start=1):
        found = load_framework(name)  # type: ignore[arg-type]
        (filled,) = [
            each.value for each in found.settings if each.key == "framework.optimizer_steps"
        ] or ["unknown: 1"]
        step = found.step_time or load_usual().step_time
        turn = found.switch_time or load_usual().switch_time
        stands_in = ["" if each else "unknown: " for each in (found.step_time, found.switch_time)]
        assert steps[place] == str(filled)
        assert seconds[place] == f"{stands_in[0]}{step.base:g}"
        assert switch[place] == f"{stands_in[1]}{turn.base:g}"
        slow = turn.offload_bandwidth
        assert offload[place] == ("only without room" if slow is None else f"{slow / 1e9:g}")
        run = of_framework(name)
        unknown = "unknown: " if "sync.backend" in found.unknown else ""
        assert sends[place] == f"{unknown}{run.sync.backend}"
        assert engines[place] == run.costs.engine
        (share,) = [
            each.value for each in found.settings if each.key == "rollout.memory_utilization"
        ] or [0.9]
        assert shares[place].split(" ")[0] == f"{share:g}"
        always = found.engine_log_probs is not None
        assert returns[place] == ("always" if always else "if the loss reads them")


# What a name fills in -----------------------------------------------------------------------------


def test_a_name_fills_in_the_passes_the_steps_and_the_packing_of_its_framework() -> None:
    run = of_framework("openrlhf")
    assert run.algorithm.old_log_probs == "trainer"
    assert run.framework.optimizer_steps == 8
    assert run.trainer.packing == "padded"
    assert small_run().framework.optimizer_steps == 1


def test_a_key_that_the_run_file_states_wins_over_the_framework() -> None:
    stated = {"algorithm.old_log_probs": "engine", "framework.optimizer_steps": 1}
    run = of_framework("verl", stated)
    assert (run.algorithm.old_log_probs, run.framework.optimizer_steps) == ("engine", 1)


def test_slime_scores_again_only_what_it_cannot_reuse() -> None:
    several = {"framework.optimizer_steps": 2}
    assert of_framework("slime").algorithm.old_log_probs == "engine"
    assert of_framework("slime", several).algorithm.old_log_probs == "trainer"
    assert of_framework("slime", {"algorithm.name": "ppo"}).algorithm.old_log_probs == "trainer"


@pytest.mark.parametrize(
    ("name", "zero", "kernels"),
    [
        ("nemo-rl", 1, "fused"),
        ("nemo-rl", 3, "eager"),
        ("verl", 1, "fused"),
        ("verl", 3, "eager"),
        ("slime", 1, "fused"),
        ("miles", 3, "eager"),
        ("prime-rl", 3, "fused"),
        ("skyrl", 1, "fused"),
        ("skyrl", 3, "eager"),
        ("openrlhf", 2, "eager"),
        ("trl", 3, "eager"),
    ],
)
def test_kernels_of_the_trainer_are_those_of_the_frameworks_back_end(
    name: str, zero: int, kernels: str
) -> None:
    run = of_framework(name, {"trainer.zero": zero})
    assert run.trainer.kernels == kernels
    stated = {"trainer.zero": zero, "trainer.kernels": "uncompiled"}
    assert of_framework(name, stated).trainer.kernels == "uncompiled"


def test_every_trainer_of_a_plan_has_the_kernels_of_its_back_end() -> None:
    run, _ = keep_to_framework(load_run(OFFER, ["framework.name=verl", "plan.zero=[1, 3]"]))
    (mode, *_), found = find_modes(run), find_trainers(run, Counter())
    assert run.trainer.kernels == "fused" and {each.zero for each in found} == {1, 3}
    for each in found:
        trainer = mode.apply(replace(run, trainer=each.change(run.trainer))).trainer
        assert trainer.kernels == ("fused" if each.zero == 1 else "eager")
        assert each.kernels == (None if each.zero == 1 else "eager")


def test_a_plan_may_chunk_logits_that_a_framework_fills_in_but_no_stated_ones() -> None:
    assert of_framework("verl").trainer.logits == "eager"
    assert _logits("eager", "eager") == ("eager", "chunked")
    assert _logits(None, None) == (None, "chunked")
    assert _logits("fused", "eager") == ("fused",)


def test_of_several_trainers_the_first_is_filled_in() -> None:
    follower = {"name": "second", "pool": "near"}
    run = of_framework("openrlhf", {"followers": [follower]})
    assert [trainer.packing for trainer in run.trainers] == ["padded", "packed"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "stated", [[], ["algorithm.old_log_probs=engine", "trainer.packing=padded"]]
)
def test_a_run_file_is_read_back_as_it_was_whatever_its_framework_fills_in(
    name: FrameworkName, stated: list[str], tmp_path: Path
) -> None:
    run = load_run(EXAMPLE, [f"framework.name={name}", *stated])
    write_run(run, tmp_path / "run.toml", base=EXAMPLE.parent)
    again = load_run(tmp_path / "run.toml")
    for setting in load_framework(name).settings:
        assert value_of(again, setting.key) == value_of(run, setting.key)


def test_another_name_takes_away_what_the_first_one_filled_in() -> None:
    run = change_run(of_framework("verl"), ["framework.name=streamrl"])
    assert (run.algorithm.old_log_probs, run.framework.optimizer_steps) == ("engine", 1)


# Seconds of its own -------------------------------------------------------------------------------


def test_a_frameworks_own_seconds_are_its_files_and_those_of_the_run_file_win() -> None:
    assert step_time_of(of_framework("verl")).seconds == 1.24
    assert TrainingCosts.load(resolve(of_framework("nemo-rl"))).overhead_time == 3.0
    stated = of_framework("verl", {"framework.step_time": "7 s"})
    assert step_time_of(stated).seconds == 7.0


def test_a_frameworks_own_switch_is_its_files_and_that_of_the_run_file_wins() -> None:
    found = own_switch(of_framework("nemo-rl").framework, "h100")
    assert found.seconds == 1.75 and found.per_gpu == load_framework("nemo-rl").switch_time
    assert "vLLM's sleep" in found.source
    usual = own_switch(of_framework("slime").framework, "h100")
    assert usual.per_gpu == load_usual().switch_time and "stand in" in usual.source
    stated = of_framework("nemo-rl", {"framework.switch_time": "7 s"})
    assert own_switch(stated.framework, "h100")[:2] == (7.0, None)
    on_cpus = own_switch(of_framework("verl").framework, "cpu")
    assert on_cpus[:2] == (0.0, None), "what was published is of GPUs"


@pytest.mark.parametrize("name", ["slime", "trl"])
def test_where_a_frameworks_seconds_are_unknown_the_usual_ones_stand_in_and_it_is_said(
    name: str,
) -> None:
    run = of_framework(name)
    found = step_time_of(run)
    assert found.seconds == load_usual().step_time.base == 2.5
    assert f"of framework {name} is unknown" in found.source and "stand in" in found.source


def test_a_simulation_names_the_framework_among_its_sources_and_without_one_says_nothing() -> None:
    run = of_framework("verl", {"algorithm.old_log_probs": "engine"})
    sources = Costs.load(run).facts["sources"]
    assert {*framework_sources(resolve(run))} <= {*sources}
    text = "\n".join(sources)
    assert "framework verl, 0.10.0.dev (verl-project/verl 1dda039)" in text
    assert "run file: algorithm.old_log_probs = engine, where framework verl has trainer" in text
    assert "framework.optimizer_steps = 4" in text
    assert not list(framework_sources(resolve(small_run())))


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_a_way_of_dynamic_sampling_that_is_not_simulated_is_told(name: str) -> None:
    keys = {"framework": {"name": name}, "algorithm.name": "grpo", "algorithm.group_size": 4}
    for is_dynamic in (True, False):
        run = small_run({**keys, "algorithm.dynamic_sampling": is_dynamic})
        told = "\n".join(framework_sources(resolve(run)))
        assert ("is not simulated as it is" in told) == is_dynamic


def test_a_report_takes_for_granted_what_a_framework_fills_in() -> None:
    run = of_framework("verl", {"algorithm.old_log_probs": "engine"})
    found = {each.what: each for each in assumptions_of(run, load_model(run.model), None, None)}
    assert found["framework"].value == "verl, 0.10.0.dev"
    assert found["framework.optimizer_steps"].value == "4"
    assert "ppo_mini_batch_size" in found["framework.optimizer_steps"].source
    assert found["algorithm.old_log_probs"].source == "run file: algorithm.old_log_probs"


def test_published_seconds_say_nothing_of_cpus() -> None:
    cpus = {"cluster.pools": {"far": {"gpu": "cpu"}, "near": {"gpu": "cpu"}}}
    assert step_time_of(of_framework("verl", cpus)).seconds == 0.0


def test_weights_leave_and_return_for_the_reference_over_the_host_link() -> None:
    link = 50e9  # profiles/gpus/h800.toml
    kl = {"algorithm.name": "grpo", "algorithm.group_size": 2, "algorithm.kl_coefficient": 0.1}
    for zero in (1, 3):
        run = of_framework("nemo-rl", {**kl, "trainer.zero": zero})
        resolved = resolve(run)
        trainer = resolved.trainer
        assert trainer.swaps_reference
        weights = model_state(trainer.model, trainer.config, trainer.dtype).weights
        swap_time = TrainingCosts.load(resolved).switches.reference_time
        assert swap_time == pytest.approx(3 * weights / link)


# How weights are sent, and what generates ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("verl", "nccl-buckets"),
        ("nemo-rl", "nccl-packed"),
        ("openrlhf", "nccl-broadcast"),
        ("trl", "nccl-broadcast"),
    ],
)
def test_a_framework_sends_weights_in_its_own_way_where_that_was_measured(
    name: str, backend: str
) -> None:
    link = {"between": ["far", "near"], "bandwidth": "80 Gbps", "transport": "rdma"}
    run = of_framework(name, {"cluster.links": [link]})
    assert run.sync.backend == backend and SyncCosts.load(resolve(run)).tier == "composed"
    told = "\n".join(framework_sources(resolve(run)))
    assert f"framework {name} has sync.backend = {backend}" in told and "roofline" not in told
    assert of_framework(name, {"sync.backend": "checkpoint-engine"}).sync.backend != backend


def test_verls_push_of_72b_takes_what_verl_measured() -> None:
    pools = {name: {"gpu": "h100", "nodes": 8} for name in ("far", "near")}
    changes = {"model": {"name": "qwen2.5-72b"}, "cluster.pools": pools}
    assert SyncCosts.load(resolve(of_framework("verl", changes))).push_time == pytest.approx(
        28.8, rel=0.1
    )


@pytest.mark.parametrize("name", ["slime"])
def test_a_sync_that_nobody_measured_is_told_to_be_a_roofline(name: str) -> None:
    run = of_framework(name)
    assert run.sync.backend == "broadcast-tree"
    (told,) = (each for each in framework_sources(resolve(run)) if each.startswith("sync.backend"))
    assert f"of framework {name} is unknown" in told and "a roofline" in told
    found = {each.name: each.text for each in examine(run)}
    assert "weight sync unknown, so broadcast-tree is used" in found["framework-seconds"]


@pytest.mark.parametrize(
    "changes", [{"policies.system": "colocated"}, {"sync.mode": "delta"}, {"sync.mode": "lora"}]
)
def test_a_way_of_sending_is_not_filled_in_for_what_it_was_not_measured_for(
    changes: dict[str, Any],
) -> None:
    shared = {"rollout.pool": "near"} if "policies.system" in changes else {}
    assert of_framework("verl", {**changes, **shared}).sync.backend == "broadcast-tree"


def test_every_mode_of_a_plan_sends_as_its_framework_does_for_that_mode() -> None:
    run, _ = keep_to_framework(load_run(OFFER, ["framework.name=verl", "costs.engine=sglang-0.5"]))
    sent = {(m.system, m.sync_mode): m.apply(run).sync.backend for m in find_modes(run)}
    assert sent == {
        ("colocated", "full"): "broadcast-tree",
        ("fully-async", "full"): "nccl-buckets",
        ("fully-async", "delta"): "broadcast-tree",
    }


def test_a_backend_that_the_run_file_states_stays_in_every_mode_of_a_plan() -> None:
    stated = load_run(OFFER, ["framework.name=verl", "sync.backend=checkpoint-engine"])
    run, _ = keep_to_framework(stated)
    assert {mode.apply(run).sync.backend for mode in find_modes(run)} == {"checkpoint-engine"}


def test_slime_generates_with_the_newest_sglang_and_a_stated_engine_wins() -> None:
    newest = max(name for name in known_engines() if name.startswith("sglang"))
    assert of_framework("slime").costs.engine == newest
    run = of_framework("slime", {"costs.engine": "vllm-0.11"})
    assert run.costs.engine == "vllm-0.11"
    told = "\n".join(framework_sources(resolve(run)))
    assert f"costs.engine = vllm-0.11, where framework slime has {newest}" in told


def test_an_engine_that_a_framework_has_not_is_told_warned_of_and_not_planned_with() -> None:
    run = of_framework("openrlhf", {"costs.engine": "sglang-0.5"})
    assert any(
        "framework openrlhf generates with vllm" in each for each in framework_sources(resolve(run))
    )
    found = {each.name: each for each in examine(run) if each.level == "warning"}
    assert found["framework-engine"].changes == {"costs.engine": "vllm-0.19"}
    offer = load_run(OFFER, ["framework.name=slime", "costs.engine=vllm-0.11"])
    line = r"costs\.engine 'vllm-0\.11': framework slime generates with sglang"
    with pytest.raises(RunError, match=line):
        keep_to_framework(offer)


# What a plan may choose among ---------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_has_only_modes_of_its_framework_and_says_what_it_left_out(
    name: FrameworkName,
) -> None:
    run, left_out = keep_to_framework(load_run(OFFER, [f"framework.name={name}"]))
    found, modes = load_framework(name), find_modes(run)
    assert {mode.system for mode in modes} == {way.name for way in found.systems}
    assert {mode.sync_mode for mode in modes} <= {*found.sync_modes(run.costs.engine)}
    assert {mode.order for mode in modes} == {"fifo"}
    assert not run.plan.mixes_replicas
    text = "; ".join(left_out)
    assert "stream-async" in text and "order longest-first" in text and "two kinds" in text


def test_without_a_framework_nothing_is_left_out() -> None:
    offer = load_run(OFFER)
    assert keep_to_framework(offer) == (offer, [])


def test_a_sync_mode_of_one_engine_alone_is_left_out_with_another() -> None:
    modes = load_framework("verl").sync_modes
    assert modes("sglang-0.5") == ["full", "delta"] and modes("vllm-0.11") == ["full"]


@pytest.mark.parametrize(("name", "degrees"), [("trl", {1}), ("openrlhf", {1, 2, 4})])
def test_a_plan_has_only_trainers_that_its_framework_splits_so(
    name: str, degrees: set[int]
) -> None:
    settings = [f"framework.name={name}", "plan.trainer_gpus=[16]", "plan.micro_batch=[4]"]
    cut: Counter[str] = Counter()
    trainers = find_trainers(load_run(OFFER, settings), cut)
    assert {each.tensor_parallel for each in trainers} <= degrees
    assert {each.pipeline_parallel for each in trainers} == {1}
    assert cut[OF_FRAMEWORK.format(name)] > 0


def test_what_a_plan_asks_for_and_its_framework_has_not_is_one_line() -> None:
    offer = load_run(OFFER, ["framework.name=trl", 'plan.systems=["stream-async"]'])
    with pytest.raises(RunError, match=r"plan\.systems \['stream-async'\]: framework trl has none"):
        keep_to_framework(offer)


# Doctor -------------------------------------------------------------------------------------------


def test_doctor_says_what_a_framework_fills_in_and_what_nobody_knows_of_it() -> None:
    texts = {each.name: each.text for each in examine(of_framework("slime"))}
    assert "framework slime, 0.3.x (THUDM/slime 624b824)" in texts["framework"]
    assert "step_time unknown" in texts["framework-seconds"]
    assert "--global-batch-size" in texts["framework-unknown"]


def test_doctor_finds_what_a_framework_has_not_with_a_change_that_was_tried() -> None:
    run = of_framework("trl", {"policies.order": "longest-first"})
    found = {each.name: each for each in examine(run) if each.level == "warning"}
    assert found["framework-system"].changes == {"policies.system": "disaggregated"}
    assert found["framework-order"].changes == {"policies.order": "fifo"}
    assert found["framework-layout"].changes["trainer.tensor_parallel"] == 1
    assert not [each for each in examine(small_run()) if each.name.startswith("framework")]


def test_a_framework_that_is_none_is_one_line_and_status_two() -> None:
    done = streamrl("simulate", EXAMPLE, "--set", "framework.name=megatron")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "framework.name must be one of streamrl, verl" in done.stderr
