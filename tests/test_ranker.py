"""What a ranker says of lengths that a simulation knows."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.simulated_ranker import Noisy, Resampled, length_at, place, recall_at
from streamrl.workload.workload import SimulatedWorkload, load_source
from tests.runs import SINGLE, small_run

SHARED = Path(__file__).parents[2] / "shared" / "data" / "workloads"
NEW = np.zeros(1)


def histogram(seed: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    source = load_source(LengthsConfig(kind="histogram", source="streamrl-codemath-20k"))
    return source.sample(np.random.default_rng(seed), size, 1)[0].ravel()  # type: ignore[union-attr]


def drawn(**lengths: Any) -> tuple[list[int], list[int]]:
    """Return true and expected lengths of a run of 2,048 rollouts."""
    changes = {f"workload.lengths.{key}": value for key, value in lengths.items()}
    run = small_run(
        {"workload.lengths.scale": 1.0, "rollout.max_tokens": 20000, **SINGLE, **changes}
    )
    draws = SimulatedWorkload(run).draw(0, 2048)
    return (
        [length for draw in draws for length in draw.lengths],
        [expected for draw in draws for expected in draw.drawn.expected_tokens],
    )


# Recall -------------------------------------------------------------------------------------------


def test_recall_counts_what_both_have_among_their_longest() -> None:
    lengths = np.array([10, 20, 30, 40, 50])
    assert recall_at(np.array([1, 2, 3, 4, 5]), lengths, 0.4) == 1.0
    assert recall_at(np.array([1, 2, 5, 4, 3]), lengths, 0.4) == 0.5
    assert recall_at(np.array([5, 4, 3, 2, 1]), lengths, 0.4) == 0.0
    assert recall_at(np.array([0, 9, 8, 0, 0]), np.array([1, 50, 50, 50, 2]), 0.2) == 1.0
    with pytest.raises(ValueError, match="a score for each length, got 2, 3"):
        recall_at(np.array([1, 2]), np.array([1, 2, 3]), 0.2)


def test_an_oracle_recalls_everything_and_no_ranker_only_its_share() -> None:
    lengths = histogram(0, 20000)
    assert recall_at(lengths, lengths, 0.2) == 1.0
    random = np.random.default_rng(1).random(20000)
    assert recall_at(random, lengths, 0.2) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("target", [0.3, 0.5, 0.87, 0.97])
def test_a_noisy_ranker_meets_its_recall_on_the_lengths_it_is_meant_for(target: float) -> None:
    ranker, fresh = Noisy(histogram(0, 65536), target, seed=3), histogram(1, 65536)
    expected = ranker.expect(0, fresh[:, None], np.zeros(len(fresh))).ravel()
    assert recall_at(expected, fresh, 0.2) == pytest.approx(target, abs=0.005)


def test_a_noisy_ranker_errs_in_the_tail_as_the_papers_does() -> None:
    lengths = histogram(0, 65536)
    expected = Noisy(lengths, 0.87, seed=0).expect(0, lengths[:, None], np.zeros(65536)).ravel()
    for share, paper in ((0.1, 0.82), (0.05, 0.76)):  # StreamRL (arXiv 2504.15930), Table 4
        assert recall_at(expected, lengths, share) == pytest.approx(paper, abs=0.06)


def test_expected_lengths_are_as_skewed_as_true_ones() -> None:
    lengths = histogram(0, 65536)
    expected = Noisy(lengths, 0.5, seed=0).expect(0, lengths[:, None], np.zeros(65536))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(expected, share) == pytest.approx(np.quantile(lengths, share), rel=0.02)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=40, unique=True))
@settings(max_examples=50, deadline=None)
def test_a_length_has_its_own_place(lengths: list[int]) -> None:
    ordered = np.sort(np.array(lengths))
    assert length_at(place(ordered, ordered), ordered) == pytest.approx(ordered)


def test_siblings_err_together_as_far_as_the_noise_is_correlated() -> None:
    lengths = histogram(0, 8192)
    same = np.repeat(lengths[:, None], 4, axis=1)
    age = np.zeros(len(same))
    together = Noisy(lengths, 0.6, seed=0, correlation=1.0).expect(0, same, age)
    apart = Noisy(lengths, 0.6, seed=0).expect(0, same, age)
    assert np.ptp(together, axis=1).max() == pytest.approx(0)
    assert np.ptp(apart, axis=1).mean() > 1000


def test_a_ranker_goes_stale_with_age() -> None:
    lengths = histogram(0, 65536)
    ranker = Noisy(lengths, 0.9, seed=0, recall_to=0.4)
    for age, recall in ((0.0, 0.9), (1.0, 0.4)):
        expected = ranker.expect(0, lengths[:, None], np.full(65536, age)).ravel()
        assert recall_at(expected, lengths, 0.2) == pytest.approx(recall, abs=0.01)


# In a run -----------------------------------------------------------------------------------------


def test_a_run_has_the_same_true_lengths_whatever_its_ranker() -> None:
    lengths = {ranker: drawn(ranker=ranker)[0] for ranker in ("none", "oracle", "recall")}
    assert lengths["none"] == lengths["oracle"] == lengths["recall"]


def test_each_ranker_has_the_recall_it_is_meant_to_have() -> None:
    for ranker, recall in (("oracle", 1.0), ("recall", 0.87)):
        true, expected = drawn(ranker=ranker)
        found = recall_at(np.array(expected), np.array(true), 0.2)
        assert found == pytest.approx(recall, abs=0.03)
    assert len(set(drawn(ranker="none")[1])) == 1


def test_a_recall_below_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranker_recall must be in \[0.2, 1\], got 0.1"):
        drawn(ranker="recall", ranker_recall=0.1)


# Real scores --------------------------------------------------------------------------------------


def test_real_scores_are_resampled_with_their_recall(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    true = rng.lognormal(7, 1, 2000)
    scores = np.log(true) + rng.normal(0, 0.5, 2000) * (1 + (true > np.quantile(true, 0.8)))
    path = tmp_path / "scores.csv"
    rows = "\n".join(f"{score},{length}" for score, length in zip(scores, true, strict=True))
    path.write_text(f"score,output_tokens\n{rows}\n")
    lengths, expected = drawn(ranker="scores", ranker_scores=str(path))
    for share in (0.1, 0.2, 0.5):
        real = recall_at(scores, true.astype(np.int64), share)
        assert recall_at(np.array(expected), np.array(lengths), share) == pytest.approx(
            real, abs=0.05
        )


def test_real_scores_on_real_lengths_keep_their_recall() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no measured lengths in {SHARED}")
    with gzip.open(SHARED / "aime_r1distill1p5b_n8_lengths.csv.gz", "rt") as file:
        lengths = {
            row["prompt_id"]: int(row["output_tokens"])
            for row in csv.DictReader(file)
            if row["sample_idx"] == "0"
        }
    with gzip.open(SHARED / "oof_ranker_scores.csv.gz", "rt") as file:
        scores = {
            row["prompt_id"]: float(row["GBM svd+hand"])
            for row in csv.DictReader(file)
            if row["source"] == "aime_r1distill1p5b_n8"
        }
    true = np.array([lengths[prompt] for prompt in scores])
    given_scores = np.array(list(scores.values()))
    real = recall_at(given_scores, true, 0.2)
    assert 0.25 < real < 0.45  # AIME: text tells little
    resampled = np.repeat(true, 50)
    expected = Resampled(true, given_scores, true.astype(float), 0).expect(
        0, resampled[:, None], NEW
    )
    assert recall_at(expected.ravel(), resampled, 0.2) == pytest.approx(real, abs=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score,tokens\n1,2\n", "needs columns score and output_tokens"),
        ("score,output_tokens\n1,\n", "with a number in every row"),
        ("score,output_tokens\n1,2\n", "two or more rows of finite numbers"),
    ],
)
def test_a_file_of_scores_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        drawn(ranker="scores", ranker_scores=str(path))


def test_scores_without_a_file_are_refused() -> None:
    with pytest.raises(ValueError, match="ranker_scores is missing"):
        drawn(ranker="scores")


# History ------------------------------------------------------------------------------------------


def prompts(path: Path, num_samples: int) -> str:
    rng = np.random.default_rng(0)
    means = np.exp(rng.normal(7, 0.8, 400))
    rows = [
        f"{prompt},{max(1, int(mean * np.exp(rng.normal(0, 0.6))))}"
        for prompt, mean in enumerate(means)
        for _ in range(num_samples)
    ]
    path.write_text("prompt_id,output_tokens\n" + "\n".join(rows) + "\n")
    return str(path)


def test_history_expects_the_mean_of_other_samples_of_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "groups.csv"
    path.write_text("prompt_id,output_tokens\na,10\na,20\na,60\nb,7\nb,8\nb,9\n")
    true, expected = drawn(kind="groups", source=str(path), ranker="history", ranker_history=2)
    rest = {10: 40, 20: 35, 60: 15, 7: 8, 8: 8, 9: 8}  # 8.5 and 7.5 round to even
    assert {(t, e) for t, e in zip(true, expected, strict=True)} == set(rest.items())


def test_more_history_recalls_more_and_none_of_it_is_the_sample_itself(tmp_path: Path) -> None:
    source = prompts(tmp_path / "groups.csv", 9)
    recalls = []
    for num_samples in (1, 4, 8):
        true, expected = drawn(
            kind="groups", source=source, ranker="history", ranker_history=num_samples
        )
        recalls.append(recall_at(np.array(expected), np.array(true), 0.2))
    assert 0.4 < recalls[0] < recalls[1] < recalls[2] + 0.03 < 0.75


def test_history_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs kind 'groups'.*got 'histogram'"):
        drawn(ranker="history")
    source = prompts(tmp_path / "groups.csv", 3)
    with pytest.raises(ValueError, match="but one has 3"):
        drawn(kind="groups", source=source, ranker="history", ranker_history=3)
