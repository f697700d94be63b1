"""What makes a run cost as much as another: the price of its GPUs, the bandwidth of its link."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.record.run_comparison import Against
from streamrl.runfile.config import Run
from streamrl.runfile.units import Bandwidth
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.studies.comparison import FREE_BANDWIDTH, LEAST_BANDWIDTH, compare_runs
from tests.against_pair import COLOCATED, FAR, SOME, colocated, disaggregated
from tests.runs import small_run


@pytest.fixture(scope="module")
def found() -> Against:
    """A disaggregated run against a colocated one."""
    return compare_runs(disaggregated(FAR), colocated())


def test_with_the_break_even_price_a_token_costs_the_same(found: Against) -> None:
    (price,) = found.prices
    assert (price.pool, price.num_gpus, price.price) == ("far", 2, 20.0)
    assert price.break_even is None and found.cost_ratio.value > 1
    dear = small_run({**SOME, **COLOCATED, "cluster.pools.near.price": 5.2725})
    cheap = disaggregated({"cluster.pools.near.price": 0.5})
    (price,) = compare_runs(cheap, dear).prices
    assert price.break_even is not None and price.break_even.interval is not None
    assert price.break_even.interval[0] < price.break_even.value < price.break_even.interval[1]
    changes = {"cluster.pools.near.price": 0.5, "cluster.pools.far.price": price.break_even.value}
    even = compare_runs(disaggregated(changes), dear)
    assert even.cost_ratio.value == pytest.approx(1, abs=1e-6)
    assert even.outcome == "may be chance"


def test_of_a_pool_that_both_rent_the_break_even_price_is_that_of_what_a_has_more() -> None:
    a, b = (disaggregated({"rollout.replicas": replicas}) for replicas in (4, 1))
    against = compare_runs(a, b)
    (price,) = against.prices
    assert price.break_even is not None and price.num_gpus == 3
    dollars = 1 * 1.85 + 3 * price.break_even.value + 4 * 5.2725
    tokens = against.a.cost_per_million_tokens / against.a.dollars_per_hour
    assert tokens * dollars == pytest.approx(against.b.cost_per_million_tokens, rel=1e-9)


def cheap_beside(bandwidth: str = "8 Gbps") -> Run:
    """Return a disaggregated run that is cheap, and waits for its link."""
    link = {"between": ["far", "near"], "bandwidth": bandwidth, "latency": "10 ms"}
    return disaggregated({"cluster.pools.near.price": 2.0, "cluster.links": [link]})


def _of_one_length(run: Run, directory: Path) -> Run:
    """Return a run whose rollouts are all of one length, so that few steps tell what a token costs."""
    path = directory / "one.csv"
    path.write_text("output_tokens\n100\n")
    lengths = LengthsConfig(kind="empirical", source=str(path))
    return replace(run, workload=replace(run.workload, lengths=lengths))


def with_bandwidth(run: Run, bandwidth: float) -> Run:
    """Return a run whose link has another bandwidth."""
    links = [replace(run.cluster.links[0], bandwidth=Bandwidth(bandwidth))]
    return replace(run, cluster=replace(run.cluster, links=links))


@pytest.mark.parametrize("bandwidth", ["0.2 Gbps", "400 Gbps"])
def test_with_the_break_even_bandwidth_a_token_costs_the_same(
    bandwidth: str, tmp_path: Path
) -> None:
    trials: list[int] = []
    one, other = (_of_one_length(run, tmp_path) for run in (cheap_beside(bandwidth), colocated()))

    def watch(what: str, done: int, most: int) -> None:
        trials.extend([done] * (what == "bandwidth"))

    against = compare_runs(one, other, watch)
    (found,) = against.bandwidths
    assert found.break_even is not None and 1 < len(trials) <= 16
    even = compare_runs(with_bandwidth(one, found.break_even), other)
    assert even.cost_ratio.value == pytest.approx(1, abs=0.2 * one.simulate.interval)
    assert abs(against.cost_ratio.value - 1) > 0.1


def test_a_link_that_does_not_help_even_free_is_tried_once(found: Against) -> None:
    (bandwidth,) = found.bandwidths
    assert bandwidth.break_even is None and not bandwidth.is_cheaper
    free = compare_runs(with_bandwidth(disaggregated(FAR), FREE_BANDWIDTH), colocated())
    assert free.cost_ratio.value > 1
    tried: list[str] = []
    compare_runs(disaggregated(FAR), colocated(), lambda what, done, most: tried.append(what))
    assert tried.count("bandwidth") == 1


def test_a_run_that_is_cheaper_over_any_link_says_so() -> None:
    cheap = {"cluster.pools.near.price": 1e-4, "cluster.pools.far.price": 1e-4}
    (bandwidth,) = compare_runs(disaggregated(cheap), colocated()).bandwidths
    assert bandwidth.break_even is None and bandwidth.is_cheaper
    assert bandwidth.least == LEAST_BANDWIDTH
