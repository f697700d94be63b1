"""Output lengths: what they are drawn from, and that the same group always has the same."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.engine.messages import Generated
from streamrl.runfile.config import Run
from streamrl.sim.world import simulate
from streamrl.workload.workload import BLOCK, SimulatedWorkload
from tests.runs import small_run


def run_of(**lengths: Any) -> Run:
    """Return a run of groups of 2 whose lengths nothing caps."""
    return small_run(
        {
            "rollout.max_tokens": 30000,
            "workload.lengths": {"kind": "histogram", "source": "streamrl-codemath-20k", **lengths},
        }
    )


def lengths_of(run: Run, num_groups: int) -> list[int]:
    return [n for draw in SimulatedWorkload(run).draw(0, num_groups) for n in draw.lengths]


def test_the_histogram_has_the_moments_of_the_paper() -> None:
    lengths = lengths_of(run_of(), 10_000)
    percentiles = statistics.quantiles(lengths, n=100)
    assert statistics.mean(lengths) == pytest.approx(4930, rel=0.03)
    assert percentiles[49] == pytest.approx(3200, rel=0.03)
    assert percentiles[89] == pytest.approx(13_100, rel=0.03)
    assert min(lengths) >= 809
    assert max(lengths) <= 19_869


def test_scale_multiplies_every_length_and_max_tokens_caps_it() -> None:
    plain, half = lengths_of(run_of(), 500), lengths_of(run_of(scale=0.5), 500)
    assert all(abs(b - a / 2) <= 0.5 for a, b in zip(plain, half, strict=True))
    capped = lengths_of(small_run({"workload.lengths.scale": 1.0}), 500)
    assert set(capped) == {256}


def drifted(steps: int, **lengths: Any) -> list[float]:
    """Return by how much the first length of each step has grown over that of a run that does not drift."""

    def firsts(**lengths: Any) -> list[int]:
        run = run_of(**lengths)
        algorithm = replace(run.algorithm, steps=steps, prompts_per_step=3)
        rollout = replace(run.rollout, max_tokens=90_000)
        run = replace(run, algorithm=algorithm, rollout=rollout)
        return [draw.lengths[0] for draw in SimulatedWorkload(run).draw(0, 3 * steps)]

    still = firsts(scale=lengths.get("scale", 1.0))
    growth = [b / a for a, b in zip(still, firsts(**lengths), strict=True)]
    assert growth[::3] == pytest.approx(growth[2::3], abs=0.002)  # a step's prompts grow alike
    return growth[::3]


def test_lengths_grow_linearly_from_the_first_step_to_the_last() -> None:
    expected = [1.0, 1.25, 1.5, 1.75, 2.0]
    assert drifted(5, scale_to=2.0) == pytest.approx(expected, abs=0.002)
    assert drifted(5, scale=2.0, scale_to=1.0) == pytest.approx(
        [1.0, 0.875, 0.75, 0.625, 0.5], abs=0.002
    )


def test_drift_ends_at_its_last_step_and_goes_no_further() -> None:
    expected = [1.0, 1.5, 2.0, 2.0, 2.0]
    assert drifted(5, scale_to=2.0, drift_steps=3) == pytest.approx(expected, abs=0.002)


def test_a_run_without_drift_draws_what_it_always_did() -> None:
    assert lengths_of(run_of(scale_to=1.0), 50) == lengths_of(run_of(), 50)


@pytest.mark.parametrize(
    ("key", "value"), [("scale_to", 0.0), ("scale_to", -1.0), ("drift_steps", 1)]
)
def test_a_drift_that_goes_nowhere_is_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"workload.lengths.{key} must be .*, got {value}"):
        run_of(**{key: value})


def test_groups_are_resampled_whole(tmp_path: Path) -> None:
    path = tmp_path / "groups.csv"
    rows = [f"p{prompt},{prompt * 100 + i}" for prompt in range(1, 8) for i in range(4)]
    path.write_text("\n".join(["prompt_id,output_tokens", *rows]))
    draws = SimulatedWorkload(run_of(kind="groups", source=str(path))).draw(0, 200)
    prompts = [{length // 100 for length in draw.lengths} for draw in draws]
    assert all(len(prompt) == 1 for prompt in prompts)
    assert set.union(*prompts) == set(range(1, 8))
    assert all(len(set(draw.lengths)) == 2 for draw in draws)  # enough samples: none twice


def test_empirical_lengths_are_drawn_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("output_tokens\n" + "\n".join(str(n) for n in (10, 20, 30)))
    assert set(lengths_of(run_of(kind="empirical", source=str(path)), 100)) == {10, 20, 30}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(1, 40)), min_size=1, max_size=6))
def test_the_same_group_has_the_same_lengths_however_it_is_drawn(
    portions: list[tuple[int, int]],
) -> None:
    workload = SimulatedWorkload(run_of())
    for first, num in portions:
        draws = workload.draw(first, num)
        assert draws == SimulatedWorkload(run_of()).draw(first, num)
        assert draws == [workload.draw(group, 1)[0] for group in range(first, first + num)]


def test_a_shared_workload_draws_the_same_groups_and_keeps_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run({})
    monkeypatch.setattr("streamrl.workload.workload.KEPT_ROLLOUTS", 5 * run.algorithm.group_size)
    shared, fresh = SimulatedWorkload(run, keeps_draws=True), SimulatedWorkload(run)
    first = shared.draw(0, BLOCK + 3)
    again = shared.draw(0, BLOCK + 3)
    assert first == again == fresh.draw(0, BLOCK + 3)
    assert [one is other for one, other in zip(first, again, strict=True)][:7] == [True] * 5 + [
        False
    ] * 2


def test_groups_that_depend_on_earlier_ones_are_drawn_again() -> None:
    run = small_run({"policies.tail_batching": "defer", "workload.lengths.ranker": "oracle"})
    shared = SimulatedWorkload(run, keeps_draws=True)
    assert shared.draw(0, 1)[0] is not shared.draw(0, 1)[0]


def test_seeds_give_lengths_of_their_own() -> None:
    def first(seed: int) -> tuple[int, ...]:
        return SimulatedWorkload(small_run({"seed": seed})).draw(0, 1)[0].lengths

    assert len({first(seed) for seed in range(5)}) > 1


def test_an_oracle_expects_the_true_lengths_and_no_ranker_expects_all_alike() -> None:
    for draw in SimulatedWorkload(run_of(ranker="oracle")).draw(0, 20):
        assert draw.drawn.expected_tokens == draw.lengths
    expected = {
        draw.drawn.expected_tokens for draw in SimulatedWorkload(run_of(ranker="none")).draw(0, 20)
    }
    assert len(expected) == 1


def test_rollout_ids_follow_draw_order() -> None:
    draws = SimulatedWorkload(run_of()).draw(3, 4)
    assert [draw.drawn.group for draw in draws] == [3, 4, 5, 6]
    assert [r for draw in draws for r in draw.drawn.rollouts] == list(range(6, 14))


def test_a_recorded_trace_gives_the_recorded_lengths(tmp_path: Path) -> None:
    recorded = simulate(small_run({"seed": 5}))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(recorded.encode())
    again = simulate(small_run({"workload.lengths": {"kind": "trace", "source": str(path)}}))

    def lengths(trace: Any) -> dict[int, int]:
        events = [entry.event for entry in trace.entries]
        return {e.rollout: e.tokens for e in events if isinstance(e, Generated)}

    assert lengths(again) == lengths(recorded)
    assert lengths(again) != lengths(simulate(small_run({"seed": 6})))


def test_a_recorded_trace_of_other_groups_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(simulate(small_run({"algorithm.group_size": 3})).encode())
    with pytest.raises(ValueError, match=r"group_size is 2, but .*trace.jsonl .* groups of 3"):
        lengths_of(run_of(kind="trace", source=str(path)), 1)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("empirical", "output_tokens\n12\nmany\n", "'many'"),
        ("empirical", "output_tokens\n12\n-3\n", "'-3'"),
        ("empirical", "output_tokens\nnan\n", "'nan'"),
        ("empirical", "tokens\n12\n", "output_tokens"),
        ("empirical", "output_tokens\n", "no rows"),
        ("groups", "prompt_id,output_tokens\na,\n", "'a'"),
        ("histogram", "start,end,density\n1,2\n", "'1'"),
        ("histogram", "start,end,density\n1,inf,3\n", "'inf'"),
        ("histogram", "start,end,density\n5,2,1\n", "'5'"),
        ("histogram", "start,end,density\n1,2,0\n", "density"),
        ("groups", "output_tokens\n12\n", "prompt_id"),
        ("empirical", "output_tokens\n12\n0\n", "row 2, {'output_tokens': '0'}"),
        ("empirical", "output_tokens\n12.5\n", "a whole number of tokens from 1"),
        (
            "empirical",
            "output_tokens\n\uff11\uff12\n",
            "got '\uff11\uff12'; correct the row or remove it",
        ),
        ("empirical", "output_tokens\n1_2\n", "got '1_2'"),
        ("empirical", "prompt_tokens,output_tokens\n0,12\n", "prompt_tokens must be"),
        ("empirical", "output_tokens,output_tokens\n12,13\n", "'output_tokens' appears twice"),
        ("groups", "prompt_id,output_tokens\na,0\n", "a whole number of tokens from 1"),
        ("groups", "prompt_id,output_tokens\n,12\n", "prompt_id"),
        ("groups", "prompt_id,prompt_tokens,output_tokens\na,2.5,12\n", "got '2.5'"),
        ("histogram", "start,end,density\n1,5,1\n4,8,1\n", "the bins 1 to 5 and 4 to 8 overlap"),
        ("histogram", "start,end,density\n4,8,1\n1,9,1\n", "the bins 1 to 9 and 4 to 8 overlap"),
        ("histogram", "start,end,density\n1,\uff15,1\n", "numbers in columns"),
    ],
)
def test_a_bad_row_is_refused_naming_file_and_row(
    tmp_path: Path, kind: str, text: str, part: str
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        SimulatedWorkload(run_of(kind=kind, source=str(path)))
    assert "lengths.csv" in str(caught.value)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_of_requests_are_drawn_beside_their_outputs(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n10,3\n20,4\n")
    draws = SimulatedWorkload(run_of(kind="empirical", source=str(path))).draw(0, 500)
    assert {draw.drawn.prompt_tokens for draw in draws} == {10, 20}
    assert any(len(set(draw.lengths)) > 1 for draw in draws), "siblings differ"


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no/such\.csv"):
        SimulatedWorkload(run_of(kind="empirical", source="no/such.csv"))
