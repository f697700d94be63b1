"""What held-out data says of rankers: recall by family, from scores or from a prompt's past."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from streamrl.ranker.evaluation import evaluate_scores, rank_all, spearman
from streamrl.ranker.score_files import (
    lengths_by_prompt,
    read_known,
    read_table,
    score_columns,
    scores_by_prompt,
)
from streamrl.workload.simulated_ranker import read_scores
from streamrl.workload.workload import SimulatedWorkload
from tests.command_line import streamrl
from tests.runs import small_run

SHARED = Path(__file__).parents[2] / "shared" / "data" / "workloads"


def write(path: Path, text: str) -> Path:
    """Write a file, compressed where its name says so."""
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def ranked(num: int, family: str = "", is_right: bool = True) -> str:
    """Return rows of `num` rollouts that a ranker puts in the right order, or in the opposite one."""
    rows = ((place if is_right else -place, 100 + place) for place in range(num))
    return "".join(f"{score},{tokens}{family and ',' + family}\n" for score, tokens in rows)


# Scores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scores.csv", "scores.csv.gz"])
def test_recall_is_of_each_family_alone(tmp_path: Path, name: str) -> None:
    rows = ranked(40, "maths") + ranked(60, "code", is_right=False)
    file = write(tmp_path / name, "# held out\nscore,output_tokens,family\n" + rows)
    found = evaluate_scores(read_table(file), "score", None)
    perfect, reversed_ = ({"0.2": r, "0.1": r, "0.05": r} for r in (1.0, 0.0))
    assert found.recall == {"maths": perfect, "code": reversed_}
    assert found.spearman == pytest.approx({"maths": 1.0, "code": -1.0})
    assert found.num_prompts == {"maths": 40, "code": 60}


def test_a_mixture_would_flatter_a_ranker_that_knows_only_the_family(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long, short = rng.integers(900, 1000, 200), rng.integers(10, 100, 800)
    rows = [(1 + rng.random() / 9, tokens, "long") for tokens in long]
    rows += [(rng.random() / 9, tokens, "short") for tokens in short]
    text = "".join(f"{score},{tokens},{family}\n" for score, tokens, family in rows)
    apart = evaluate_scores(
        read_table(write(tmp_path / "a.csv", "score,output_tokens,family\n" + text)), "score", None
    )
    mixed = evaluate_scores(
        read_table(write(tmp_path / "b.csv", "score,output_tokens,other\n" + text)), "score", None
    )
    assert mixed.recall["b"]["0.2"] == 1.0
    assert all(recall["0.2"] < 0.35 for recall in apart.recall.values())


def test_lengths_may_be_in_files_of_their_own_with_several_samples(tmp_path: Path) -> None:
    scores = write(tmp_path / "scores.csv", "prompt_id,good,bad\na,3,1\nb,2,2\nc,1,3\nd,9,\n")
    lengths = write(
        tmp_path / "l.csv.gz", "prompt_id,output_tokens\na,30\nb,20\nc,10\na,31\nb,20\nc,99\nx,5\n"
    )
    table = read_table(scores)
    known = lengths_by_prompt([read_table(lengths)])
    assert known == {"a": [30, 31], "b": [20, 20], "c": [10, 99], "x": [5]}
    assert score_columns(table, (), True) == ["good", "bad"]
    good, bad = (evaluate_scores(table, column, known) for column in ("good", "bad"))
    assert (
        good.recall["scores"]["0.2"] == 0.5
    )  # a is the longest of the first samples, c of the second
    assert (good.num_prompts, bad.num_prompts) == ({"scores": 3}, {"scores": 3})
    assert good.spearman["scores"] == pytest.approx((1.0 - 0.5) / 2)
    assert bad.spearman["scores"] == pytest.approx((-1.0 + 0.5) / 2)


def test_ranks_of_ties_are_their_mean() -> None:
    assert spearman(np.array([1, 2, 2, 3]), np.array([10, 20, 20, 90])) == pytest.approx(1.0)
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5 over sqrt(4.5 x 5)
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 2, 3, 4])) == pytest.approx(0.9**0.5)
    assert spearman(np.array([1, 1]), np.array([1, 2])) == 0.0


# History ------------------------------------------------------------------------------------------


def test_history_ranks_by_the_other_samples_of_a_prompt(tmp_path: Path) -> None:
    text = "prompt_id,output_tokens\n" + "".join(
        f"{prompt},{tokens}\n"
        for prompt, both in enumerate([(1, 9), (2, 1), (9, 2)])
        for tokens in both
    )
    found, hindsight = rank_all(read_known(write(tmp_path / "groups.csv", text)), [1])
    assert found.recall["groups"]["0.2"] == 0.0  # the longest once was short the other time
    assert (found.ranker, hindsight.ranker) == ("1 past", "hindsight")
    assert hindsight.recall == found.recall  # of two outputs the other one is all there is to know


def test_history_without_enough_samples_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "groups.csv", "prompt_id,output_tokens\na,1\na,2\nb,1\n")
    with pytest.raises(ValueError, match=r"1 past samples .*need 2 .*'b' with 1"):
        list(rank_all(read_known(file), [1]))


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scores,output_tokens\n1,2\n", r"no column 'score'; did you mean scores\?"),
        ("score,tokens\n1,2\n", r"no column 'output_tokens'"),
        (
            "score,output_tokens\n1,2\n3,many\n",
            r"row 2, output_tokens must be a number, got 'many'",
        ),
        ("score,output_tokens\nnan,2\n", r"row 1, score must be a number, got 'nan'"),
        (
            "score,output_tokens\n1,1e300\n",
            r"row 1, output_tokens must be a number from 0 to 1e\+15, got 1e\+300",
        ),
        (
            "score,output_tokens\n1,2\n3,-1\n",
            r"row 2, output_tokens must be a number from 0 to 1e\+15, got -1",
        ),
        ("score,output_tokens\n", r"has no rows"),
        ("score,output_tokens\n,2\n", r"no prompt has both a score and a length"),
        ("score,output_tokens,model\n1,2,a\n1,2,b\n", r"2 models, such as 'a'; name one"),
    ],
)
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "scores.csv", text)
    with pytest.raises(ValueError, match=message):
        table = read_table(file)
        evaluate_scores(table, *score_columns(table, (), False), None)


def test_files_that_cannot_be_read_or_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no.csv: No such file"):
        read_table(tmp_path / "no.csv")
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress(b"score,output_tokens\n" * 999)[:-9])
    with pytest.raises(ValueError, match=r"torn.csv.gz: "):
        read_table(torn)
    twice = read_table(write(tmp_path / "l.csv", "prompt_id,output_tokens\na,1\n"))
    with pytest.raises(
        ValueError, match="has lengths of prompt 'a', but another file has them too"
    ):
        lengths_by_prompt([twice, twice])
    with pytest.raises(ValueError, match=r"no rows of model 'c'"):
        read_table(write(tmp_path / "m.csv", "model,score\na,1\nb,2\n"), "c")


# Compressed files in a run ------------------------------------------------------------------------


def test_a_run_reads_compressed_lengths_and_scores(tmp_path: Path) -> None:
    scores = write(tmp_path / "s.csv.gz", "score,output_tokens\n" + ranked(50))
    assert [len(column) for column in read_scores(scores)] == [50, 50]
    lengths = write(tmp_path / "l.csv.gz", "prompt_id,output_tokens\na,7\na,7\n")
    run = small_run(
        {"workload.lengths": {"kind": "groups", "source": str(lengths), "prompt_tokens": 40}}
    )
    assert SimulatedWorkload(run).draw(0, 1)[0].lengths == (7, 7)


# The command --------------------------------------------------------------------------------------


def test_the_command_gives_recall_by_family_and_share(tmp_path: Path) -> None:
    rows = "score,output_tokens,family\n" + ranked(40, "maths")
    file = write(tmp_path / "scores.csv.gz", rows)
    done = streamrl("ranker", "eval", file, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recall"] == {"maths": {"0.2": 1.0, "0.1": 1.0, "0.05": 1.0}}
    shown = streamrl("ranker", "eval", file)
    assert shown.returncode == 0 and "maths" in shown.stdout and "recall@20%" in shown.stdout
    wrong = streamrl("ranker", "eval", file, "--history", "1", "--score", "x")
    assert wrong.returncode == 2 and "--history" in wrong.stderr


def test_real_rankers_on_real_lengths_have_the_recall_that_was_published_of_them() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no measured lengths in {SHARED}")
    lengths = read_table(SHARED / "aime_r1distill1p5b_n8_lengths.csv.gz")
    scores = read_table(SHARED / "oof_ranker_scores.csv.gz")
    known = lengths_by_prompt([lengths])
    recalls = {
        column: evaluate_scores(scores, column, known).recall["aime_r1distill1p5b_n8"]["0.2"]
        for column in ("prompt length", "GBM svd+hand", "ExtraTrees + difficulty label")
    }
    assert list(recalls.values()) == pytest.approx([0.24, 0.31, 0.34], abs=0.015)
    groups = read_known(SHARED / "aime_r1distill1p5b_n8_lengths.csv.gz")
    priors = scores_by_prompt(scores, ["ensemble"])
    found = {e.ranker: e for e in rank_all(groups, [1, 4], None, priors)}
    (family,) = found["1 past"].recall
    recall = {name: e.recall[family]["0.2"] for name, e in found.items()}
    assert [recall["1 past"], recall["4 past"]] == pytest.approx([0.40, 0.47], abs=0.025)
    assert recall["4 past"] >= 0.45
    for num in ("1 past", "4 past"):
        both = found[f"ensemble + {num}"]
        error = both.recall_error[family]["0.2"]
        assert both.recall[family]["0.2"] >= max(recall["ensemble"], recall[num]) - error


def test_prompts_that_are_too_few_for_a_text_ranker_leave_out_this_ranker_alone(
    tmp_path: Path,
) -> None:
    rows = "".join(f"{n},{100 + n},number {n}\n" for n in range(5) for _ in range(2))
    path = write(tmp_path / "lengths.csv", f"prompt_id,output_tokens,text\n{rows}")
    done = streamrl("ranker", "eval", path, "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["ranker"] for line in done.stdout.splitlines()] == [
        "prompt length",
        "hindsight",
    ]
    assert "ranker 'text' is left out: it needs 20 prompts of one family, got at most 5" in (
        done.stderr
    )
