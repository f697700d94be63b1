"""Names and numbers as people write them, and offers in one line."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.runfile.errors import RunError
from streamrl.runfile.gpu_names import gpu_name
from streamrl.runfile.short_forms import in_full, model_name, read_offer
from streamrl.runfile.units import Bandwidth, Duration, count_of
from tests.runs import small_run


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100"),
        ("h100-sxm", "h100"),
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H20-3e", "h20-3e"),
        ("A100-SXM4-80GB", "a100"),
        ("A100-80G", "a100"),
        ("H100-PCIe", "h100-pcie"),  # other hardware
        ("A100-40GB", "a100-40gb"),
        ("A100-40G", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("H100-PCIe-80GB", "h100-pcie"),
        ("NVIDIA H100 NVL 94GB", "h100-nvl"),
        ("GB200-NVL72", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("B200-180GB", "b200"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090 24GB", "rtx-4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("L40S-48GB", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Cloud TPU v5p", "tpu-v5p"),
        ("Trillium", "tpu-v6e"),
        ("H20-141GB", "h20-141gb"),
        ("H20-96GB", "h20"),
        ("H200-141GB", "h200"),
        ("H200-96GB", "h200-96gb"),
        ("H100 NVL", "h100-nvl"),
    ],
)
def test_a_gpu_has_one_name_however_it_is_written(text: str, name: str) -> None:
    assert gpu_name(text) == name


def test_a_rack_has_its_nodes_and_its_nvlink_domain_unless_the_file_says_otherwise() -> None:
    pools = {"a": {"gpu": "GB200-NVL72"}, "b": {"gpu": "gb300", "gpus_per_node": 2}}
    assert in_full({"cluster": {"pools": pools}})["cluster"]["pools"] == {
        "a": {"gpu": "gb200", "gpus_per_node": 4, "nvlink_domain": 72},
        "b": {"gpu": "gb300", "gpus_per_node": 2, "nvlink_domain": 72},
    }
    assert read_offer("16xGB200")["gb200"] == {
        **{"gpu": "gb200", "nodes": 4, "gpus_per_node": 4, "nvlink_domain": 72}
    }


def test_a_pool_smaller_than_its_rack_is_one_nvlink_domain() -> None:
    changes = {"cluster.pools.far": {"gpu": "gb200", "nodes": 8}, "rollout.tensor_parallel": 16}
    run = small_run(changes)
    assert run.cluster.pools["far"].domain == 32


def test_a_rack_of_72_holds_four_groups_of_16_tensor_ranks_and_no_more() -> None:
    changes = {"cluster.pools.far": {"gpu": "gb200", "nodes": 36}, "rollout.pool": "far"}
    run = small_run({**changes, "rollout.tensor_parallel": 16, "rollout.replicas": 8})
    assert run.cluster.pools["far"].domain == 72
    with pytest.raises(RunError, match=r"has 9 groups .* 2 NVLink domains of 72 GPUs hold 4 each"):
        small_run({**changes, "rollout.tensor_parallel": 16, "rollout.replicas": 9})
    with pytest.raises(RunError, match=r"72 GPUs .*, be a multiple of them or be whole nodes of 4"):
        small_run({**changes, "rollout.tensor_parallel": 10})
    split = {**changes, "cluster.pools.far.nvlink_domain": 64}
    run = small_run({**split, "rollout.tensor_parallel": 16, "rollout.replicas": 9})
    assert run.cluster.pools["far"].num_domains == 3


def test_a_model_has_the_name_of_its_profile() -> None:
    assert model_name("Qwen/Qwen3-8B") == model_name("qwen3-8b") == "qwen3-8b"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("32k", 32_000),
        ("32K", 32_000),
        ("32Ki", 32_768),
        ("1.5k", 1_500),
        ("2m", 2_000_000),
        ("1,024", 1024),
        ("1,234,567", 1_234_567),
    ],
)
def test_a_number_may_be_short(text: str, count: int) -> None:
    assert count_of(text) == count


def test_a_large_number_is_exact() -> None:
    assert count_of("9" * 25) == int("9" * 25)
    assert count_of("9" * 400) == int("9" * 400)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "1.5",
        "32q",
        "-3k",
        "1.0001k",
        "1e3",
        "nan",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "1,5k",
        "3,2Ki",
        "1,5",
        "12,34",
        "1234,567",
        "1,000,5",
        "1.5,000",
    ],
)
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        count_of(text)


def test_a_run_file_may_hold_short_forms_where_it_wants_a_number_or_a_name() -> None:
    table: dict[str, Any] = {
        "model": {"name": "Qwen/Qwen3-8B"},
        "rollout": {"max_tokens": "32k", "pool": "8k", "replicas": "4"},
        "cluster": {"pools": {"A": {"gpu": "H100-SXM"}}},
        "plan": {"max_running": ["1k", 2], "zero": "one"},
        "trainer": 3,
    }
    assert in_full(table) == {
        "model": {"name": "qwen3-8b"},
        "rollout": {"max_tokens": 32_000, "pool": "8k", "replicas": "4"},
        "cluster": {"pools": {"A": {"gpu": "h100"}}},
        "plan": {"max_running": [1000, 2], "zero": "one"},
        "trainer": 3,
    }
    assert table["rollout"]["max_tokens"] == "32k"


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("algorithm.group_size", "4", "a whole number"),
        ("rollout.max_tokens", "32_000", "a whole number"),
        ("algorithm.learning_rate", "1e-6", "a number"),
        ("cluster.pools.far.price", "2.20", "a number"),
    ],
)
def test_a_number_in_quotes_is_refused_with_a_remedy(key: str, value: str, wanted: str) -> None:
    with pytest.raises(
        RunError, match=f"^{key} must be {wanted}.*got '{value}'; remove the quotes$"
    ):
        small_run({key: value})


def test_a_whole_number_that_is_too_large_is_told_the_largest() -> None:
    with pytest.raises(RunError, match=f"got {2**63}; the largest is {2**63 - 1}$"):
        small_run({"seed": 2**63})
    assert small_run({"seed": 2**63 - 1}).seed == 2**63 - 1


def test_a_text_that_is_no_number_has_no_such_remedy() -> None:
    with pytest.raises(RunError, match=r"must be a whole number, got 'four'$"):
        small_run({"algorithm.group_size": "four"})


def test_quantities_have_the_units_that_people_write() -> None:
    assert Duration.parse("3 days") == Duration.parse("3d") == Duration.parse("72 hours")
    for text in ("1 day 2 h", "1d2h", "26h", "1 day, 2 hours", "1 day and 120 min"):
        assert Duration.parse(text) == 26 * 3600
    assert Duration.parse("2 weeks") == 14 * 86_400
    rates = ("80 Gbps", "80Gbit/s", "80 Gb/s", "80 gbps")
    assert {Bandwidth.parse(rate) for rate in rates} == {1e10}
    assert Bandwidth.parse("80 GB/s") == 8e10


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2026-12-03", "is a date: write a duration"),
        ("3.12.2026", "is a date"),
        ("2 h 1 day", "the largest first"),
        ("2 h 2 h", "each unit once"),
        ("1 day 2", "needs a unit"),
        ("1 h -2 min", "is below 0"),
        ("2 months", "units are"),
    ],
)
def test_a_duration_that_may_be_misread_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        (
            "16xH100@2.20,8xH20@1.10",
            {
                "h100": {"gpu": "h100", "nodes": 2, "price": 2.2},
                "h20": {"gpu": "h20", "nodes": 1, "price": 1.1},
            },
        ),
        ("4 x a100", {"a100": {"gpu": "a100", "nodes": 1, "gpus_per_node": 4}}),
        ("3x4xH100", {"h100": {"gpu": "h100", "nodes": 3, "gpus_per_node": 4}}),
        ("16xH100/1@2", {"h100": {"gpu": "h100", "nodes": 2, "price": 2.0, "unit": 1}}),
        ("16xH100@$2/8", {"h100": {"gpu": "h100", "nodes": 2, "price": 2.0, "unit": 8}}),
        (
            "8xH100@owned,4xH20@OWNED",
            {
                "h100": {"gpu": "h100", "nodes": 1, "price": 0.0, "owned": True},
                "h20": {
                    **{"gpu": "h20", "nodes": 1, "gpus_per_node": 4},
                    **{"price": 0.0, "owned": True},
                },
            },
        ),
        (
            "8xH100 owned,8xH20@1",
            {
                "h100": {"gpu": "h100", "nodes": 1, "owned": True},
                "h20": {"gpu": "h20", "nodes": 1, "price": 1.0},
            },
        ),
        (
            "16xH20@1.1/1 with 400 Gbps",
            {
                "h20": {
                    **{"gpu": "h20", "nodes": 2, "price": 1.1},
                    **{"unit": 1, "node_bandwidth": "400 Gbps"},
                }
            },
        ),
        (
            "16xH100@owned@0.50/1",
            {"h100": {"gpu": "h100", "nodes": 2, "price": 0.5, "unit": 1, "owned": True}},
        ),
        (
            "8xH100@2,8xH100@1",
            {
                "h100": {"gpu": "h100", "nodes": 1, "price": 2.0},
                "h100-2": {"gpu": "h100", "nodes": 1, "price": 1.0},
            },
        ),
    ],
)
def test_an_offer_is_a_line(text: str, pools: dict[str, dict[str, Any]]) -> None:
    assert read_offer(text) == pools


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no offer"),
        ("H100", "is no offer"),
        ("8xH100@", "is no offer"),
        ("8xH100,", "is no offer"),
        ("8xH100@2 with 400", "needs a unit|bandwidth"),
        ("4xH100@2@3", "has two prices"),
        ("4xH100@owned@2@3", "has two prices"),
        ("4xH100@owned owned", "says 'owned' twice"),
        ("0xH100", "has no GPU"),
        ("0x8xH100", "has no GPU"),
        ("8xH100/0", "has no GPU"),
        ("8xH100/16", "is rented by more GPUs than it has"),
        ("12xH100", "does not fill nodes of 8"),
    ],
)
def test_an_offer_that_cannot_be_read_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_offer(text)
