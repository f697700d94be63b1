"""Published ratios of one run in two modes: what is read, and that their form is predicted."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.runfile.files import make_run
from streamrl.sim.fidelity.published_rows import Row
from streamrl.sim.fidelity.ratios import (
    DOUBLED,
    DOUBLED_ASYNCHRONOUS,
    doubled_of,
    load_ratios,
    meets,
    num_reversed,
    pairs_of,
    ratio_rows,
)
from streamrl.sim.fidelity.rl_steps import load_published, with_keys

GROUPS = load_ratios()


def test_every_variant_is_a_run_file_and_every_ratio_has_two_variants_and_a_range() -> None:
    steps = {step.name: step for step in load_published()}
    for group in GROUPS:
        assert group.source
        for keys in group.variants.values():
            run = make_run(with_keys(steps[group.step], keys).table)
            sides = run.trainer.num_gpus + run.rollout.num_gpus * (not run.policies.shares_gpus)
            (pool,) = run.cluster.pools.values()
            assert sides == pool.num_gpus
        for ratio in group.ratios:
            assert {ratio.over, ratio.under} <= group.variants.keys()
            assert 0 < ratio.published[0] < ratio.published[1]


@pytest.mark.gate
def test_ratios_are_in_their_published_range_unless_a_miss_is_explained_and_have_its_form() -> None:
    check({row.name.partition(": ")[2]: row for row in ratio_rows()})


def check(rows: dict[str, Row]) -> None:
    for ratio in (each for group in GROUPS for each in group.ratios):
        row = rows[ratio.name]
        assert meets(row) == (not ratio.missed), row
        assert ratio.missed in row.note
    sweep = [rows[f"staleness 0 over {most}, 128 H20"].predicted[1] - 1 for most in (0.1, 0.3, 0.5)]
    assert 0 < sweep[0] < sweep[1] < sweep[2], "more staleness is faster"
    assert sweep[2] - sweep[1] < sweep[1] - sweep[0], "it saturates"
    names = [f"synchronous over asynchronous, {gpus} H20" for gpus in (32, 64, 128)]
    low, middle, high = (rows[name].predicted[0] for name in names)
    assert 1 < low < middle < high, "more GPUs gain more"


def step(name: str, published: float, predicted: float) -> Row:
    (num_gpus,) = (int(word) for word in name.split() if word.isdigit() and int(word) > 1)
    return Row(
        name=f"{name}: step",
        group="whole steps",
        shape="a",
        unit="s",
        published=(published,) * 2,
        predicted=(predicted,) * 2,
        stage="step",
        num_gpus=num_gpus,
        source="a page",
    )


def test_a_step_on_twice_the_gpus_is_a_pair_of_the_same_mode_or_of_the_asynchronous_one() -> None:
    rows = [step("A on 8 H100, on policy", 10, 10), step("A on 16 H100, on policy", 12, 6)]
    rows += [step("A on 16 H100, 1 step off", 5, 4), step("A on 16 GB200, on policy", 3, 3)]
    rows += [
        step("A on 32 H100, 1 step off", 4, 3),
        step("B on 8 H20", 9, 9),
        step("B on 16 H20", 3, 6),
    ]
    pairs = {row.name: row for row in doubled_of(rows)}
    assert list(pairs) == [
        "A: 8 H100, on policy to 16 H100, on policy",
        "A: 8 H100, on policy to 16 H100, 1 step off",
        "A: 16 H100, on policy to 32 H100, 1 step off",
        "A: 16 H100, 1 step off to 32 H100, 1 step off",
        "B: 8 H20 to 16 H20",
    ]
    groups = [row.group for row in pairs.values()]
    assert [group == DOUBLED for group in groups] == [True, False, False, True, True]
    assert set(groups) == {DOUBLED, DOUBLED_ASYNCHRONOUS}
    slower, *_, last = pairs.values()
    assert (slower.published[0], slower.predicted[0]) == (10 / 12, 10 / 6)
    assert last.published[0] == 3.0 and num_reversed(list(pairs.values())) == 1


def test_a_synchronous_and_an_asynchronous_step_of_one_run_are_a_pair() -> None:
    rows = [step("A on 8 H100, on policy", 10, 10), step("A on 8 H100, 1 step off", 8, 12)]
    rows += [step("A on 16 H100, on policy", 5, 5), step("B on 8 H100, 1 step off", 5, 5)]
    (pair,) = pairs_of(rows)
    assert pair.name == "A on 8 H100: synchronous over asynchronous"
    assert pair.published[0] == 10 / 8 and pair.predicted[0] == 10 / 12
    assert num_reversed([pair]) == 1
    assert num_reversed([msgspec.structs.replace(pair, predicted=(1.1, 1.1))]) == 0
