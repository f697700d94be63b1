"""A ranker of texts: fitted, kept in a file, and honest about prompts that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from streamrl.ranker.evaluation import POOLED, rank_all
from streamrl.ranker.score_files import KnownPrompt, read_known
from streamrl.ranker.text_ranker import (
    NAMES,
    fit_text,
    held_out,
    read_ranker,
    text_features,
    write_ranker,
)
from tests.command_line import streamrl

pytest.importorskip("sklearn", reason="the text ranker is an extra: pip install 'streamrl[ranker]'")

NUM = 120


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit a tenth of the trees, and resample a quarter as often: what is said of figures does not hang on either."""
    monkeypatch.setattr("streamrl.ranker.text_ranker.NUM_TREES", 20)
    monkeypatch.setattr("streamrl.ranker.evaluation.RESAMPLES", 50)


def prompts(num: int = NUM, seed: int = 0, family: str = "maths") -> list[KnownPrompt]:
    """Return prompts whose words and numbers tell how long outputs are, up to a factor."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(num):
        kind, count = rng.choice(["add", "prove", "integrate"]), int(rng.integers(1, 200))
        base = {"add": 4.0, "prove": 7.0, "integrate": 6.0}[str(kind)] + 0.3 * np.log(count)
        own = base + rng.normal(0, 0.3)
        lengths = np.exp(own + rng.normal(0, 0.3, 4)).round().astype(int).tolist()
        found.append(
            KnownPrompt(f"{family}-{index}", family, f"{kind} the number {count} please", lengths)
        )
    return found


def targets(
    known: list[KnownPrompt],
) -> tuple[list[str], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    return [p.text or "" for p in known], np.array([np.mean(np.log(p.lengths)) for p in known])


def test_shape_counts_what_is_there() -> None:
    (found,) = np.expm1(text_features(["Sum 3 and 41?\nA = 2"]))
    named = dict(zip(NAMES, found.round(6).tolist(), strict=True))
    assert named["words"] == 7 and named["numbers"] == 3
    assert (named["largest"], named["last"], named["sum"]) == (41, 2, 46)
    assert (named["upper"], named["?"], named["\n"], named["+-*/=^<>"]) == (2, 1, 1, 1)
    assert text_features(["", "9" * 400]).shape == (2, len(NAMES))
    assert np.isfinite(text_features(["9" * 400])).all()


def test_a_fitted_ranker_tells_prompts_that_it_has_not_seen() -> None:
    texts, lengths = targets(prompts())
    unseen, later = targets(prompts(seed=1))
    ranker = fit_text(texts, lengths)
    assert np.corrcoef(np.log(ranker.score(unseen)), later)[0, 1] > 0.9


def test_held_out_scores_know_nothing_of_their_own_prompt(few_trees: None) -> None:
    rng = np.random.default_rng(2)
    texts = [f"word{index} other{index}" for index in range(NUM)]
    lengths = rng.normal(size=NUM)
    assert abs(np.corrcoef(held_out(texts, lengths), lengths)[0, 1]) < 0.25


@pytest.mark.parametrize("kind", ["ridge", "boosting"])
def test_what_is_read_back_scores_alike(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([1.0] * 5 + [0.0 if kind == "boosting" else 2.0])
    monkeypatch.setattr("streamrl.ranker.text_ranker._error", lambda *_: next(errors))
    texts, lengths = targets(prompts())
    ranker = fit_text(texts, lengths)
    assert ranker.kind.startswith(kind)
    path = tmp_path / "ranker"
    write_ranker(path, ranker)
    again = read_ranker(path)
    assert again.kind == ranker.kind
    np.testing.assert_allclose(again.score(texts), ranker.score(texts), rtol=1e-9)


def test_trees_say_what_scikit_learn_says() -> None:
    from sklearn.ensemble import GradientBoostingRegressor

    from streamrl.ranker.text_ranker import DEPTH, NUM_TREES, RATE, SHARE, boost

    rng = np.random.default_rng(0)
    columns, values = rng.normal(size=(80, 5)), rng.normal(size=80)
    start, trees = boost(columns, values)
    own = GradientBoostingRegressor(
        n_estimators=NUM_TREES, max_depth=DEPTH, learning_rate=RATE, subsample=SHARE, random_state=0
    ).fit(columns, values)
    unseen = rng.normal(size=(50, 5))
    np.testing.assert_allclose(start + trees.predict(unseen), own.predict(unseen), rtol=1e-9)


@pytest.mark.parametrize(
    "content", [b"", b"no ranker", b"PK\x03\x04 cut short", b"\x80\x04\x95pickle"]
)
def test_what_is_no_ranker_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ranker.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"ranker\.npz: not a ranker"):
        read_ranker(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_ranker(tmp_path / "absent.npz")


# Evaluation ---------------------------------------------------------------------------------------


def test_prior_and_past_together_are_no_worse_than_either(few_trees: None) -> None:
    found = {e.ranker: e for e in rank_all(prompts(200), [1, 3])}
    assert [*found] == [
        *("prompt length", "text", "1 past", "text + 1 past", "3 past", "text + 3 past"),
        "hindsight",
    ]
    recall = {name: e.recall["maths"]["0.2"] for name, e in found.items()}
    error = {name: e.recall_error["maths"]["0.2"] for name, e in found.items()}
    for past in ("1 past", "3 past"):
        alone = max(recall["text"], recall[past])
        assert recall[f"text + {past}"] >= alone - error[f"text + {past}"]
    assert recall["hindsight"] >= recall["3 past"] > recall["1 past"] - error["1 past"]
    assert 0.01 < error["text"] < 0.1
    assert found["text + 3 past"].calibration["maths"] == pytest.approx(1.0, abs=0.15)
    assert found["prompt length"].calibration["maths"] is None


def test_families_are_apart_and_their_mixture_is_called_one(few_trees: None) -> None:
    short = prompts(60, family="maths")
    long = [
        KnownPrompt(f"c{p.id}", "code", p.text, [50 * n for n in p.lengths])
        for p in prompts(60, seed=3)
    ]
    found = {e.ranker: e for e in rank_all([*short, *long], [])}
    assert set(found["text"].recall) == {"maths", "code", POOLED}
    assert set(found["family"].recall) == {POOLED}
    flattered = found["family"].recall[POOLED]["0.2"]
    assert flattered > 0.3  # by telling families apart alone


def test_past_outputs_may_be_another_models(few_trees: None) -> None:
    known = prompts(200)
    past = {p.id: [2 * p.lengths[0]] for p in known}
    alone = [KnownPrompt(p.id, p.family, None, p.lengths[1:2]) for p in known]
    found = {e.ranker: e.recall["maths"]["0.2"] for e in rank_all(alone, [1], past)}
    assert found["1 past"] > 0.5
    with pytest.raises(ValueError, match=r"2 past samples need 2 outputs of each prompt.*with 1"):
        list(rank_all(alone, [2], past))


# From the shell -----------------------------------------------------------------------------------


def write_csv(path: Path, known: list[KnownPrompt]) -> Path:
    rows = ["prompt_id,prompt,output_tokens,family"]
    rows += [f"{p.id},{p.text},{tokens},{p.family}" for p in known for tokens in p.lengths]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_fit_then_score_then_a_run_file_that_names_the_ranker(tmp_path: Path) -> None:
    lengths = write_csv(tmp_path / "lengths.csv", prompts())
    ranker = tmp_path / "ranker.npz"
    done = streamrl("ranker", "fit", lengths, "-o", ranker, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompts"] == NUM
    asked, unseen = tmp_path / "prompts.jsonl", prompts(seed=1)
    asked.write_text("".join(json.dumps({"prompt": p.text, "answer": "x"}) + "\n" for p in unseen))
    scored = tmp_path / "scored.jsonl"
    done = streamrl("ranker", "score", asked, "--ranker", ranker, "-o", scored)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in scored.read_text().splitlines()]
    assert all(line["answer"] == "x" for line in found)
    expected = np.log([line["expected_tokens"] for line in found])
    assert np.corrcoef(expected, targets(unseen)[1])[0, 1] > 0.9


def test_eval_prints_every_ranker_with_its_error(few_trees: None, tmp_path: Path) -> None:
    lengths = write_csv(tmp_path / "lengths.csv", prompts())
    done = streamrl("ranker", "eval", lengths, "--history", "1")
    assert done.returncode == 0, done.stderr
    for name in ("at random", "prompt length", "text", "1 past", "text + 1 past", "hindsight", "±"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("prompt_id,output_tokens\na,5\n", "fitted to texts"),
        ("prompt_id,prompt,output_tokens\na,hello,5\n", "at least 10 prompts"),
        ("prompt_id,prompt,output_tokens\na,hello,five\n", "must be a number, got 'five'"),
        ("prompt,output_tokens\nhello,5\n", "no column 'prompt_id'"),
    ],
)
def test_what_cannot_be_fitted_to_is_refused_in_a_line(
    tmp_path: Path, rows: str, says: str
) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(rows)
    done = streamrl("ranker", "fit", file, "-o", tmp_path / "ranker.npz")
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "ranker.npz").exists()


def test_a_run_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the directory of an executed run"):
        read_known(tmp_path)
