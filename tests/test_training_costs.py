"""What training costs: closed forms of each term, the choice of source, and the fit to measured training."""

from __future__ import annotations

import importlib.util
import math
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sim.costs.training_profile import PATH, load_training_profile

from sim.costs.costs import Costs
from sim.costs.training import TrainingCosts, ranks_of
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.runfile.config import Run
from tests.runs import small_run

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parents[2] / "shared" / "data" / "training" / "mpt_train_mfu.csv"
PPO = {"algorithm.name": "ppo", "algorithm.kl_coefficient": 0.001}
H800 = load_gpu("h800")
FIT = load_training_profile()


def train_run(changes: dict[str, Any] | None = None, **trainer: Any) -> Run:
    """Return the small run on four nodes of H800, one GPU training alone unless told otherwise."""
    return small_run(
        {
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "algorithm.prompts_per_step": 64,
            "trainer": {"pool": "near", "micro_batch": 2, "offload": False, **trainer},
            **(changes or {}),
        }
    )


def train_costs(changes: dict[str, Any] | None = None, **trainer: Any) -> TrainingCosts:
    return TrainingCosts.load(train_run(changes, **trainer))


# Passes -------------------------------------------------------------------------------------------


def test_data_parallel_ranks_divide_the_time_of_equal_rollouts() -> None:
    lengths = [1000] * 16
    one, two = (train_costs(data_parallel=ranks) for ranks in (1, 2))
    assert two.train_time(lengths) == pytest.approx(one.train_time(lengths) / 2)
    assert two.score_time(lengths) == pytest.approx(one.score_time(lengths) / 2)


def test_a_rank_with_one_long_rollout_is_what_a_pass_waits_for() -> None:
    costs = train_costs(data_parallel=4)
    alone = costs.train_time([9000])
    assert costs.train_time([9000, 1000, 1000, 1000]) == alone
    assert costs.train_time([9000] * 5) == pytest.approx(1.25 * alone)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("num_micro", [1, 2, 6])
def test_a_pipeline_takes_one_turn_for_each_micro_batch_and_for_each_stage_but_one(
    stages: int, num_micro: int
) -> None:
    costs = train_costs(pipeline_parallel=stages)
    turn = costs.train_time([1000] * 2) / stages  # one micro-batch of 2 passes through every stage
    total = costs.train_time([1000] * 2 * num_micro)
    assert total == pytest.approx((num_micro + stages - 1) * turn)
    bubble = 1 - num_micro * turn / total
    assert bubble == pytest.approx((stages - 1) / (num_micro + stages - 1))


def test_a_micro_batch_ends_at_its_rollouts_or_at_its_tokens() -> None:
    costs = train_costs(max_tokens_per_pass=3000, data_parallel=2)
    assert costs.num_micro_batches([100] * 8) == 2
    assert costs.num_micro_batches([2900] * 8) == 4
    assert costs.num_micro_batches([9000] * 2) == 1


def test_recomputation_adds_exactly_one_forward_pass_of_the_layers() -> None:
    none, full = (train_costs(recompute=mode) for mode in ("none", "full"))
    model = load_model(train_run().model)
    head = 2 * model.num_embedding_parameters / FIT.gemm["h800"].flops
    assert full.forward == none.forward
    assert full.train.per_pair / none.train.per_pair == pytest.approx(4 / 3)
    without_head = [costs.train.per_token - 3 * head for costs in (full, none)]
    assert without_head[0] / without_head[1] == pytest.approx(4 / 3)
    added = full.train.per_token - none.train.per_token
    assert added == pytest.approx(full.forward.per_token - head)


def test_a_token_costs_its_flops_at_the_measured_rate_and_its_activations_through_memory() -> None:
    model, forward = load_model(train_run().model), train_costs().forward
    compute = model.forward_flops(1, 0) / FIT.gemm["h800"].flops
    values = 28 * (4 * 3584 + 2 * 32 * 128 + 3 * 18944)
    memory = FIT.constants.activation_traffic * 2 * values / H800.memory_bandwidth
    assert forward.per_token == pytest.approx(compute + memory)
    softmax = FIT.constants.attention_traffic * 28 * 3584 / H800.memory_bandwidth
    pair = 4 * 28 * 3584 / FIT.gemm["h800"].flops + softmax
    assert forward.per_pair == pytest.approx(pair)


# What ranks send ----------------------------------------------------------------------------------


def test_tensor_ranks_reduce_the_hidden_state_twice_a_layer_and_direction() -> None:
    one, four = (train_costs(tensor_parallel=degree) for degree in (1, 4))
    num_bytes = (
        28 * 2 * 2 * (3 / 4) * 3584 * 2
    )  # layers, reduces, there and back, ring, values, bytes
    wire = FIT.constants.collective * num_bytes / H800.nvlink
    assert four.forward.per_token - one.forward.per_token / 4 == pytest.approx(wire)
    assert four.train.per_token - one.train.per_token / 4 == pytest.approx(3 * wire)
    assert four.forward.per_pair == pytest.approx(one.forward.per_pair / 4)


@pytest.mark.parametrize(("ranks", "wire"), [(8, H800.nvlink), (16, 8 * H800.network)])
def test_a_step_sums_gradients_over_nvlink_in_a_node_and_over_its_ports_beyond(
    ranks: int, wire: float
) -> None:
    run = train_run(data_parallel=ranks)
    model = load_model(run.model)
    ring = (ranks - 1) / ranks * (4 + 2) * model.num_parameters / wire  # gradients, then weights
    update = 28 * model.num_parameters / ranks / (0.8 * H800.memory_bandwidth)
    expected = FIT.constants.collective * ring + update
    assert TrainingCosts.load(run).optimizer_time == pytest.approx(expected)


def test_ranks_of_a_whole_node_each_have_one_port() -> None:
    ranks = ranks_of(train_run(data_parallel=4, tensor_parallel=8))
    assert ranks.ring_time(1e9, 4, 8) == pytest.approx(3 / 4 * 1e9 / H800.network)


def test_zero_3_gathers_weights_and_scatters_gradients_for_every_micro_batch() -> None:
    one, three = (train_costs(data_parallel=8, zero=stage) for stage in (1, 3))
    parameters = load_model(train_run().model).num_parameters
    gather = FIT.constants.collective * 7 / 8 * parameters / H800.nvlink
    lengths = [1000] * 16 * 3
    assert three.num_micro_batches(lengths) == 3
    added = three.train_time(lengths) - one.train_time(lengths)
    assert added == pytest.approx(3 * 8 * gather)  # 2 bytes forward, 2 backward, gradients of 4
    assert three.forward.per_micro_batch == pytest.approx(2 * gather)
    assert three.optimizer_time < one.optimizer_time


def test_expert_ranks_trade_each_token_for_each_expert_that_is_elsewhere() -> None:
    moe = {"model.name": "qwen3-30b-a3b"}
    alone, shared = (train_costs(moe, data_parallel=8, expert_parallel=e) for e in (1, 8))
    num_bytes = (
        48 * 2 * 8 * (7 / 8) * 2048 * 2
    )  # layers, there and back, experts, elsewhere, values
    wire = FIT.constants.collective * num_bytes / H800.nvlink
    assert shared.forward.per_token - alone.forward.per_token == pytest.approx(wire)
    experts = 48 * 128 * 3 * 2048 * 768  # no other rank has the same ones, so none are summed
    summed = FIT.constants.collective * 7 / 8 * (4 + 2) * experts / H800.nvlink
    assert alone.optimizer_time - shared.optimizer_time == pytest.approx(summed)


# Models that take turns ---------------------------------------------------------------------------


def test_offloading_costs_its_bytes_over_the_link_to_the_host() -> None:
    resident, offloaded = (
        train_costs(PPO, tensor_parallel=4, data_parallel=2, offload=offload)
        for offload in (False, True)
    )
    model = load_model(train_run().model)
    shard = model.shard_parameters(4)
    weights, gradients, optimizer = 2 * shard, 4 * shard, 12 * model.num_parameters / 8
    link, lengths = H800.host_link, [1000, 2000]
    score = offloaded.score_time(lengths) - resident.score_time(lengths)
    train = offloaded.train_time(lengths) - resident.train_time(lengths)
    step = offloaded.optimizer_time - resident.optimizer_time
    assert score == pytest.approx(2 * weights / link)
    assert train == pytest.approx(2 * (weights + 2 * gradients) / link)
    assert step == pytest.approx(2 * (weights + gradients + 2 * optimizer) / link)


def test_a_model_that_is_alone_never_leaves() -> None:
    resident, offloaded = (train_costs(tensor_parallel=4, offload=o) for o in (False, True))
    assert offloaded.train_time([1000]) == resident.train_time([1000])
    assert offloaded.optimizer_time == resident.optimizer_time


def test_a_critic_is_trained_and_a_reference_only_scores() -> None:
    actor, ppo = train_costs(), train_costs(PPO)
    assert ppo.train_time([1000]) == pytest.approx(2 * actor.train_time([1000]))
    assert ppo.score_time([1000]) == pytest.approx(2 * ppo.forward.rollout_time(1000))
    assert actor.score_time([1000]) == 0


# Where the figures come from ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "tier"),
    [(gpu, "composed") for gpu in ("h100", "h800", "h200", "a100")]
    + [(gpu, "roofline") for gpu in ("h20", "h20-3e", "cpu")],
)
def test_only_gpus_like_those_that_were_measured_are_more_than_a_roofline(
    gpu: str, tier: str
) -> None:
    run = train_run({"cluster.pools.near": {"gpu": gpu, "nodes": 4}}, tensor_parallel=4)
    costs = TrainingCosts.load(run)
    assert costs.tier == tier
    assert ("llm-foundry" in costs.sources[0]) == (gpu != "cpu")
    assert ("unmeasured" in costs.sources[0]) == (gpu == "cpu")
    assert ("no training was measured" in costs.sources[0]) == (gpu in ("h20", "h20-3e"))


def test_a_stated_efficiency_is_used_as_it_is_and_says_that_the_run_file_states_it() -> None:
    run = train_run(efficiency=0.3, tensor_parallel=4, recompute="full")
    costs, model = TrainingCosts.load(run), load_model(run.model)
    flops = 3 * model.forward_flops(1000, 1000**2 / 2)
    assert costs.train_time([1000]) == pytest.approx(flops / (0.3 * 4 * 989.5e12))
    assert costs.tier == "roofline"
    assert costs.sources == ["run file: trainer.efficiency=0.3 of peak FLOP/s"]


def test_32_bit_training_was_not_measured() -> None:
    costs = train_costs({"model.dtype": "float32"}, tensor_parallel=4)
    assert costs.tier == "roofline"
    assert "training_efficiency=0.4" in costs.sources[0]


def test_a_run_takes_its_training_seconds_and_tiers_from_here() -> None:
    run = train_run(PPO, tensor_parallel=4)
    costs, training = Costs.load(run), TrainingCosts.load(run)
    assert costs.train_time([900, 80]) == training.train_time([900, 80])
    assert costs.score_time([900, 80]) == training.score_time([900, 80])
    assert costs.optimizer_time == training.optimizer_time
    assert costs.provenance["train"].tier == costs.provenance["score"].tier == "composed"


@pytest.mark.parametrize(
    ("changes", "trainer", "parts"),
    [
        ({}, {"tensor_parallel": 16}, ["trainer.tensor_parallel", "8 GPUs of a node", "16"]),
        ({}, {"tensor_parallel": 3}, ["trainer.tensor_parallel", "8 GPUs of a node", "3"]),
        ({}, {"pipeline_parallel": 32}, ["trainer.pipeline_parallel", "28 layers", "32"]),
        ({}, {"expert_parallel": 4}, ["trainer.expert_parallel", "= 1", "4"]),
        (
            {},
            {"expert_parallel": 4, "data_parallel": 4},
            ["trainer.expert_parallel", "no experts", "4"],
        ),
        ({}, {"efficiency": 1.5}, ["trainer.efficiency", "(0, 1]", "1.5"]),
        ({}, {"zero": 2}, ["trainer.zero", "1, 3", "2"]),
        ({}, {"recompute": "some"}, ["trainer.recompute", "none, full", "'some'"]),
    ],
)
def test_degrees_that_no_trainer_can_have_are_refused_by_key_and_value(
    changes: dict[str, Any], trainer: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        Costs.load(train_run(changes, **trainer))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_profile_with_a_wrong_figure_is_refused_by_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "training.toml"
    path.write_text(PATH.read_text().replace("collective = ", "collective = -", 1))
    with pytest.raises(ValueError, match=r"training\.toml: collective must be positive"):
        load_training_profile(path)


# The fit ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    """The script that fits the constants."""
    path = ROOT / "benchmarks" / "fit_training.py"
    spec = importlib.util.spec_from_file_location("fit_training", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mfu_of_models_that_the_fit_has_not_seen_is_predicted_within_a_tenth(
    fitting: ModuleType,
) -> None:
    halves = fitting.halves(fitting.read_rows())
    assert {row.model for row in halves[0]}.isdisjoint(row.model for row in halves[1])
    for train, test in (halves, halves[::-1]):
        errors = np.abs(fitting.relative_errors(test, fitting.fit(train)))
        assert np.median(errors) < 0.05
        for gpu in ("h100", "a100", "a100-40"):
            assert np.median(errors[[row.gpu == gpu for row in test]]) < 0.1, gpu


def test_the_shipped_constants_are_those_that_the_fit_finds(fitting: ModuleType) -> None:
    fitted = tomllib.loads(fitting.fit_profile(fitting.read_rows()))
    shipped = tomllib.loads(PATH.read_text())
    for section in ("constants", "held_out"):
        assert shipped.pop(section) == pytest.approx(fitted.pop(section), rel=1e-2)
    assert {**shipped, "spread": {}} == {**fitted, "spread": {}}


def test_a_published_mfu_is_seconds_and_back(fitting: ModuleType) -> None:
    row = fitting.read_rows()[2]  # 70B on 128 H100, 1,058 tokens a second and GPU
    assert (row.model, row.gpus) == ("mpt-70b", 128)
    seconds = row.micro_batch * row.sequence / 1058
    assert fitting.mfu(row, seconds) == pytest.approx(row.mfu, rel=1e-3)


def test_every_training_run_that_was_measured_fits_in_memory_and_the_fullest_nearly_fills_it(
    fitting: ModuleType,
) -> None:
    shares = [fitting.memory_share(row) for row in fitting.read_rows()]
    assert 0.9 < max(shares) <= 1


def test_the_table_holds_every_16_bit_row_that_was_published(fitting: ModuleType) -> None:
    if not DATA.is_file():
        pytest.skip("the published table is not on this machine")
    assert fitting.read_published(DATA) == fitting.read_rows()


def test_a_gpu_with_little_arithmetic_and_much_bandwidth_comes_closer_to_its_peak() -> None:
    def share_of_peak(gpu: str) -> float:
        run = train_run({"cluster.pools.near": {"gpu": gpu, "nodes": 4}}, tensor_parallel=4)
        flops = load_model(run.model).forward_flops(3 * 1000, 0)
        peak = 4 * load_gpu(gpu).flops["bfloat16"]
        return flops / peak / (1000 * TrainingCosts.load(run).train.per_token)

    shares = {gpu: share_of_peak(gpu) for gpu in ("h800", "h100", "a100", "h20")}
    assert sorted(shares, key=lambda gpu: shares[gpu]) == ["h800", "h100", "a100", "h20"]
    assert all(math.isfinite(share) and share < 0.75 for share in shares.values())


def test_rollouts_without_an_advantage_cost_a_gradient_only_where_a_kl_term_gives_them_one() -> (
    None
):
    lengths = [900, 80]
    everything = train_costs().train_time(lengths)
    half = train_costs({"workload.informative_share": 0.5}).train_time(lengths)
    assert half == pytest.approx(everything / 2)
    kl = {"algorithm.kl_coefficient": 0.001}
    with_kl = train_costs(kl).train_time(lengths)
    assert train_costs({**kl, "workload.informative_share": 0.5}).train_time(lengths) == with_kl


@pytest.mark.parametrize(("stages", "fullest"), [(1, 28), (4, 7), (8, 4), (16, 2)])
def test_a_pass_waits_for_the_stage_with_most_layers(stages: int, fullest: int) -> None:
    even = train_costs(pipeline_parallel=1, data_parallel=1).train
    split = train_costs(pipeline_parallel=stages, data_parallel=1).train
    assert split.per_pair == pytest.approx(even.per_pair / stages * (fullest * stages / 28))
