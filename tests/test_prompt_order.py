"""In which order prompts come: epochs, the order of a file, and mixtures of data sets by weight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.verifier.reward_checks import check_prompts
from streamrl.record.restarts import KEPT_BY_A_RESUME
from streamrl.runfile.files import change_run, make_run
from streamrl.workload.prompt_order import EpochOrder, MixedOrder, apportion, make_order
from streamrl.workload.workload import SimulatedWorkload
from tests.patients import local_table
from tests.runs import small_run
from tests.scripted import ScriptedTokenizer

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=5)
WEIGHTS = st.floats(0.01, 100)


def lines(path: Path, *prompts: str, **rest: Any) -> str:
    path.write_text("".join(f"{json.dumps({'prompt': each, **rest})}\n" for each in prompts))
    return str(path)


def test_prompts_come_in_the_order_of_their_file_where_the_run_file_says_so(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", *"abcde")
    run = small_run({"workload.prompts": path, "workload.order": "file", "seed": 9})
    workload = PromptWorkload(run, ScriptedTokenizer())
    assert [workload.line(group) for group in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    shuffled = PromptWorkload(change_run(run, ["workload.order=shuffled"]), ScriptedTokenizer())
    alone = EpochOrder(9, 5)
    assert [shuffled.line(group) for group in range(40)] == [alone.prompt(n) for n in range(40)]


def test_a_simulation_has_the_order_of_the_run_that_it_stands_for(tmp_path: Path) -> None:
    csv = "prompt_id,output_tokens\n" + "".join(f"{n},{10 * (n + 1)}\n" for n in range(6))
    (tmp_path / "groups.csv").write_text(csv)
    lengths = {"kind": "groups", "source": str(tmp_path / "groups.csv"), "epochs": True}
    run = small_run({"workload.lengths": lengths, "workload.order": "file"})
    drawn = SimulatedWorkload(run).draw(0, 12)
    assert [draw.lengths[0] for draw in drawn] == [10, 20, 30, 40, 50, 60] * 2


@settings(deadline=None)
@given(SIZES, st.data(), st.booleans(), st.integers(0, 5))
def test_every_data_set_of_a_mixture_goes_through_epochs_of_its_own(
    sizes: list[int], data: st.DataObject, is_shuffled: bool, seed: int
) -> None:
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    order = MixedOrder(seed, sizes, weights, is_shuffled)
    counts = apportion(sum(sizes), weights)
    taken = [order.prompt(place) for place in range(3 * sum(counts))]
    for each, size in enumerate(sizes):
        first = sum(sizes[:each])
        own = [line - first for line in taken if first <= line < first + size]
        assert len(own) == 3 * counts[each]
        epochs = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        if is_shuffled:  # places of one round are dealt out at random, so epochs hold as a whole
            assert max(Counter(own).values()) <= -(-len(own) // size) + 1
        else:
            assert all(epoch == list(range(size)) for epoch in epochs)


def test_the_same_place_has_the_same_prompt_wherever_a_run_begins() -> None:
    fresh, worn = (MixedOrder(3, [7, 20], [1.0, 2.0], True) for _ in range(2))
    taken = [worn.prompt(place) for place in range(500)]
    assert [fresh.prompt(place) for place in (499, 3, 250)] == [taken[499], taken[3], taken[250]]
    assert taken != [MixedOrder(4, [7, 20], [1.0, 2.0], True).prompt(n) for n in range(500)]


def test_shares_of_a_mixture_are_its_weights_however_many_prompts_each_has() -> None:
    order = MixedOrder(0, [10, 990], [3.0, 1.0], True)
    small = sum(order.prompt(place) < 10 for place in range(4000))
    assert small == 3000


def test_in_order_of_the_files_data_sets_take_turns_evenly() -> None:
    order = MixedOrder(0, [4, 4], [3.0, 1.0], False)
    assert [order.prompt(place) for place in range(8)] == [0, 1, 4, 2, 3, 0, 5, 1]


def test_weights_as_the_sizes_are_make_one_data_set_of_all() -> None:
    order = MixedOrder(1, [6, 3], [2.0, 1.0], True)
    for epoch in range(3):
        assert sorted(order.prompt(9 * epoch + n) for n in range(9)) == list(range(9))


# Run files ----------------------------------------------------------------------------------------


def mixture(directory: Path) -> list[dict[str, Any]]:
    easy = lines(directory / "easy.jsonl", "1+1=", "2+2=", answer="2")
    hard = lines(directory / "hard.jsonl", "write", tests="assert True")
    return [
        {"prompts": easy, "name": "sums", "weight": 3.0},
        {"prompts": hard, "name": "code", "fields": {"gold": "tests"}},
    ]


def test_a_mixture_has_the_records_of_all_with_their_families(tmp_path: Path) -> None:
    run = small_run({"workload.source": mixture(tmp_path)})
    workload = PromptWorkload(run, ScriptedTokenizer())
    assert [record["family"] for record in workload.records] == ["sums", "sums", "code"]
    assert workload.records[2]["gold"] == "assert True"
    order = make_order(run.workload, run.seed, [2, 1])
    assert [workload.line(group) for group in range(9)] == [order.prompt(n) for n in range(9)]


def test_rewards_are_chosen_by_family_and_what_they_read_is_looked_for_there_alone(
    tmp_path: Path,
) -> None:
    rewards = [
        {"scorer": "exact", "families": ["sums"]},
        {"scorer": "unit-tests", "families": ["code"]},
    ]
    table = local_table(tmp_path, {"verifier": {"reward": rewards}})
    table["workload"] = {"source": mixture(tmp_path), "lengths": table["workload"]["lengths"]}
    check_prompts(make_run(table).verifier, make_run(table).workload)
    rewards[1]["families"] = ["sums", "code"]
    with pytest.raises(
        ValueError,
        match=r"workload\.source\.0\.prompts: 2 lines of .*easy.* no 'tests' \(lines 1, 2\): verifier\.reward\.1",
    ):
        check_prompts(make_run(table).verifier, make_run(table).workload)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"workload.prompts": "p.jsonl"},
            r"workload\.prompts cannot be combined with \[\[workload\.source\]\]",
        ),
        ({"workload.fields": {"a": "b"}}, r"workload\.fields cannot be combined"),
        ({"workload.order": "sorted"}, r"workload\.order must be one of shuffled, file"),
        ({"workload.source.0.weight": 0.0}, r"workload\.source\.0\.weight must be above 0"),
        ({"workload.source.1.name": "sums"}, r"workload\.source\.0\.name .* 'sums' twice"),
        ({"workload.source.1.prompts": "hf://"}, r"source\.1\.prompts must name a data set"),
        (
            {"verifier.reward": [{"scorer": "exact", "families": ["maths"]}]},
            r"verifier\.reward\.0\.families must name one of sums, code, got 'maths'",
        ),
    ],
)
def test_a_mixture_that_is_none_is_refused_by_its_key(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    sources = mixture(tmp_path)
    for key in [key for key in changes if key.startswith("workload.source.")]:
        place, name = key.split(".")[2:]
        sources[int(place)][name] = changes.pop(key)
    with pytest.raises(ValueError, match=says):
        small_run({"workload.source": sources, **changes})


def test_a_resumed_run_keeps_its_order_and_its_weights() -> None:
    assert {"workload.order", "workload.source_weights"} <= set(KEPT_BY_A_RESUME)
