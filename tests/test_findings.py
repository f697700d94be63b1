"""What is said of a study's rows, on rows made by hand."""

from __future__ import annotations

import pytest

from streamrl.report.study_table import (
    METRICS,
    Kind,
    MetricTable,
    Question,
    Spread,
    find,
    make_table,
)
from streamrl.runfile.sweep import Axis, parse_axis
from streamrl.sim.studies.results import StudyRow

X = parse_axis("rollout.replicas=1,2,4,8")
GPU = parse_axis("rollout.pool=h20,h800", "GPU", ["H20", "H800"])
LINK = parse_axis("cluster.links.0.bandwidth=1 Gbps,10 Gbps,100 Gbps")


def table_of(axes: list[Axis], values: list[list[float]], metric: str = "step_time") -> MetricTable:
    """Make a table of one or two axes from a list for each series, with one seed."""
    rows = []
    for series, found in enumerate(values):
        for at, value in enumerate(found):
            place = (at,) if len(axes) == 1 else (at, series)
            rows.append(StudyRow(place=place, seed=0, figures={metric: value}))
    return make_table(metric, axes, rows)


def said(kind: Kind, table: MetricTable, tolerance: float = 0.02) -> list[str]:
    return find(Question(kind=kind, tolerance=tolerance), table)


# best ---------------------------------------------------------------------------------------------


def test_best_names_the_least_time_what_is_alike_and_the_worst() -> None:
    table = table_of([X], [[300.0, 200.0, 203.0, 400.0]])
    assert said("best", table) == [
        "The least step time is 200 s, at 2 (within 2 %: 4); at 8 it is 400 s, 2.00 times as much."
    ]


def test_best_is_the_most_where_more_is_better() -> None:
    table = table_of([X], [[10.0, 20.0, 40.0, 30.0]], "goodput")
    (text,) = said("best", table)
    assert text.startswith("The most goodput is 40 tokens/s, at 4;")
    assert text.endswith("at 1 it is 10 tokens/s, 0.25 times as much.")


def test_best_of_several_series_says_which_of_them_wins() -> None:
    table = table_of([X, GPU], [[4.0, 3.0, 2.0, 3.0], [5.0, 4.0, 4.0, 8.0]])
    first, second, last = said("best", table)
    assert first.startswith("H20: the least step time is 2 s, at 4;")
    assert second.startswith("H800: the least step time is 4 s, at 2 (within 2 %: 4);")
    assert last == "Best of all is 2 s with H20; H800 comes to 4 s, 2.00 times as much."


def test_best_of_equal_points_names_no_worst() -> None:
    table = table_of([X], [[5.0, 5.0, 5.0, 5.0]])
    assert said("best", table) == ["The least step time is 5 s, at 1 (within 2 %: 2, 4, 8)."]


# knee ---------------------------------------------------------------------------------------------


def test_knee_names_from_where_on_a_metric_is_near_its_best() -> None:
    table = table_of([LINK], [[150.0, 101.0, 100.0]])
    assert said("knee", table) == [
        "Step time is within 2 % of its best (100 s) from 10 Gbps on; "
        "at 1 Gbps it is 150 s, 1.50 times as much."
    ]


def test_knee_names_up_to_where_a_metric_is_near_its_best() -> None:
    (text,) = said("knee", table_of([X], [[100.0, 101.0, 130.0, 200.0]]))
    assert "(100 s) up to 2; at 8 it is 200 s" in text


def test_knee_names_single_points_where_they_do_not_lie_at_one_end() -> None:
    (text,) = said("knee", table_of([X], [[200.0, 100.0, 150.0, 101.0]]))
    assert "(100 s) at 2, 8; at 1" in text


def test_knee_puts_the_series_that_stay_near_their_best_into_one_sentence() -> None:
    rows = [[150.0, 100.0, 100.0], [90.0, 90.0, 91.0]]
    (knee, flat) = said("knee", table_of([LINK, GPU], rows))
    assert knee.startswith("H20: step time is within 2 % of its best (100 s) from 10 Gbps on;")
    assert flat == "Step time stays within 2 % of its best everywhere: H800 90 s."


def test_the_tolerance_decides_what_is_near_and_counts_points_of_shares() -> None:
    times = table_of([X], [[100.0, 104.0, 109.0, 120.0]])
    assert "up to 2" in said("knee", times, 0.05)[0]
    assert "within 10 % of its best (100 s) up to 4" in said("knee", times, 0.1)[0]
    shares = table_of([X], [[0.001, 0.02, 0.08, 0.3]], "idle.skew")
    assert said("knee", shares, 0.05) == [
        "GPU time idle for skew is within 5 points of its best (0.1 %) up to 2; at 8 it is 30.0 %."
    ]


# crossover ----------------------------------------------------------------------------------------


def test_crossover_says_who_wins_where_and_where_the_lines_meet() -> None:
    rows = [[1.0, 2.0, 4.0, 8.0], [3.0, 3.0, 3.0, 3.0]]
    table = table_of([parse_axis("trainer.efficiency=0.1,0.2,0.4,0.8"), GPU], rows)
    assert said("crossover", table) == [
        "Step time is least with H20 up to 0.2, with H800 from 0.4 on; they cross at about 0.3."
    ]


def test_crossover_on_a_logarithmic_axis_meets_on_its_straight_line() -> None:
    rows = [[1.0, 3.0], [2.0, 2.0]]
    axis = parse_axis("rollout.replicas=1,100")
    assert said("crossover", table_of([axis, GPU], rows))[0].endswith("they cross at about 10.")


def test_crossover_between_values_with_units_names_both() -> None:
    rows = [[1.0, 3.0, 4.0], [2.0, 2.0, 2.0]]
    text = said("crossover", table_of([LINK, GPU], rows))[0]
    assert text.endswith("they cross between 1 Gbps and 10 Gbps.")


def test_crossover_without_one_says_by_how_much_the_winner_wins() -> None:
    rows = [[1.0, 2.0, 4.0, 8.0], [1.5, 2.2, 4.4, 16.0]]
    assert said("crossover", table_of([X, GPU], rows)) == [
        "Step time is least with H20 throughout, the next has 1.10 to 2.00 times as much."
    ]
    assert said("crossover", table_of([X, GPU], rows, "goodput")) == [
        "Goodput is most with H800 throughout, the next has 0.91 to 0.50 times as much."
    ]


def test_crossover_names_a_winner_in_between() -> None:
    rows = [[1.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
    (text,) = said("crossover", table_of([X, GPU], rows))
    assert "least with H20 up to 1, with H800 from 2 to 4, with H20 from 8 on;" in text
    assert text.endswith("they cross at about 1.25 and at about 7.")


def test_crossover_is_told_for_each_point_of_a_third_axis() -> None:
    price = parse_axis("cluster.pools.h800.price=1,2", labels=["cheap", "dear"])
    rows = [
        StudyRow(place=(at, gpu, dear), seed=0, figures={"cost_per_step": value})
        for dear, winners in enumerate([(1.0, 2.0), (2.0, 1.0)])
        for gpu, value in enumerate(winners)
        for at in range(2)
    ]
    axes = [parse_axis("rollout.replicas=1,2"), GPU, price]
    cheap, dear = said("crossover", make_table("cost_per_step", axes, rows))
    assert cheap.startswith("cheap: Cost per step is least with H20 throughout")
    assert dear.startswith("dear: Cost per step is least with H800 throughout")


# ratio --------------------------------------------------------------------------------------------


def test_ratio_says_how_much_a_metric_grows_and_what_series_are_to_the_first() -> None:
    table = table_of([X, GPU], [[10.0, 20.0, 30.0, 80.0], [9.0, 16.0, 21.0, 72.0]])
    assert said("ratio", table) == [
        "H20: from 1 to 8 step time goes from 10 s to 80 s, 8.00 times as much.",
        "H800: from 1 to 8 step time goes from 9 s to 72 s, 8.00 times as much.",
        "H800 has 0.90 times the step time of H20 at 1, 0.70 times at 4.",
    ]


def test_ratio_of_named_points_sets_each_beside_the_first() -> None:
    table = table_of([parse_axis("policies.system=stream-sync,stream-async")], [[100.0, 80.0]])
    assert said("ratio", table) == [
        "Step time: 100 s at stream-sync; 80 s at stream-async, 0.80 times as much."
    ]


def test_ratio_compares_shares_by_their_values() -> None:
    table = table_of([X, GPU], [[0.1, 0.1, 0.1, 0.1], [0.12, 0.1, 0.05, 0.01]], "idle")
    assert said("ratio", table) == [
        "H20: GPU time idle is 10.0 % throughout.",
        "H800: from 1 to 8 GPU time idle goes from 12.0 % to 1.0 %.",
        "GPU time idle: H800 has 12.0 % where H20 has 10.0 %, at 1; 1.0 % where H20 has 10.0 %, at 8.",
    ]


# Any of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["best", "knee", "crossover", "ratio"])
@pytest.mark.parametrize("metric", METRICS)
def test_every_finding_speaks_of_every_metric_zeros_and_gaps_included(
    kind: Kind, metric: str
) -> None:
    table = table_of([X, GPU], [[0.0, 0.0, 0.5, 1.0], [0.0, 0.25]], metric)
    for sentence in said(kind, table):
        assert sentence.endswith(".") and "nan" not in sentence and "inf" not in sentence


def test_the_median_over_seeds_is_what_is_spoken_of() -> None:
    rows = [
        StudyRow(place=(at,), seed=seed, figures={"step_time": value})
        for at, values in enumerate([[10.0, 11.0, 90.0], [20.0, 20.0, 20.0]])
        for seed, value in enumerate(values)
    ]
    table = make_table("step_time", [parse_axis("rollout.replicas=1,2")], rows)
    assert table.spreads[0,] == Spread(11.0, 10.0, 90.0)
    assert said("best", table)[0].startswith("The least step time is 11 s, at 1;")
