"""Several scores of one completion: their weights, the scorers of texts and lengths, and functions of the user's."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.doctor import examine
from streamrl.executor.buffer import BufferedRollout
from streamrl.executor.roles import Scoring
from streamrl.executor.trainer.step_record import step_figures
from streamrl.executor.verifier.reward_checks import check_prompts, check_sources
from streamrl.executor.verifier.sandbox import find_gaps
from streamrl.executor.verifier.verifier import Verifier
from streamrl.runfile.config import Run
from streamrl.runfile.files import decode_run, encode_run, load_run, make_run, write_run
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.runfile.workload_config import SourceConfig
from streamrl.workload.prompt_records import read_source
from tests.patients import NOWHERE, local_table
from tests.runs import make_table, small_run
from tests.verifying import config, verdicts

THINKS = r"<think>.*</think>\s*<answer>.*</answer>"
RECORD = {"prompt": "1+1=", "answer": "2"}


def scored(
    rewards: list[RewardConfig],
    *texts: str,
    record: dict[str, Any] = RECORD,
    time_limit: float = 30.0,
) -> list[Any]:
    """Return what completions get, or the error."""
    return verdicts(rewards, [(text, record) for text in texts], time_limit=time_limit)


def only(text: str, record: dict[str, Any] = RECORD, **keys: Any) -> float:
    """Return the score of one completion by one reward."""
    (found,) = scored([RewardConfig(name="it", **keys)], text, record=record)
    assert isinstance(found, Scoring), found
    assert found.fault is None and found.reward == found.scores["it"]
    return found.reward


# Sums ---------------------------------------------------------------------------------------------


def test_a_reward_is_the_weighted_sum_of_its_scores_each_of_which_is_told() -> None:
    rewards = [
        RewardConfig(scorer="exact", weight=2.0),
        RewardConfig(scorer="format", pattern=".*####.*", weight=0.5),
        RewardConfig(scorer="regex", pattern="sorry", weight=-0.25, name="apology"),
    ]
    found = scored(rewards, "so #### 2", "2", "sorry #### 3")
    told = [
        {"exact": a, "format": b, "apology": c} for a, b, c in ((1, 1, 0), (1, 0, 0), (0, 1, 1))
    ]
    assert found == [Scoring(r, None, s) for r, s in zip((2.5, 2.0, 0.25), told, strict=True)]


def test_one_scorer_by_its_name_alone_gives_its_score_and_tells_no_parts() -> None:
    assert verdicts("exact", [("2", RECORD)]) == [Scoring(1.0, None)]


def test_a_reward_of_some_families_scores_no_others() -> None:
    rewards = [
        RewardConfig(scorer="exact", families=("sums",)),
        RewardConfig(scorer="regex", pattern="yes", families=("poems",)),
    ]
    work = [("2", {**RECORD, "family": "sums"}), ("yes", {"prompt": "?", "family": "poems"})]
    assert verdicts(rewards, work) == [
        Scoring(1.0, None, {"exact": 1.0}),
        Scoring(1.0, None, {"regex": 1.0}),
    ]


def test_what_a_scorer_cannot_digest_has_its_worst_score_whatever_the_sign_of_its_weight(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hangs = r"(a+)+b"  # looks at 2**n ways to take n letters
    rewards = [
        RewardConfig(scorer="regex", pattern=hangs, name="wanted"),
        RewardConfig(scorer="regex", pattern=hangs, name="unwanted", weight=-3.0),
        RewardConfig(scorer="exact"),
    ]
    found, again = scored(rewards, "a" * 40, "a" * 41, time_limit=1.0)
    faults = "wanted: time limit; unwanted: time limit"
    assert found == Scoring(-3.0, faults, {"wanted": 0.0, "unwanted": 1.0, "exact": 0.0})
    assert again.fault == faults
    assert caplog.messages == [
        f"a completion gets the worst score, {worst}, because {who} cannot score it: time limit"
        for who, worst in (("wanted", 0), ("unwanted", 1))
    ]


def test_metrics_have_the_mean_of_each_scorer_over_the_rollouts_that_it_scored() -> None:
    trained = [BufferedRollout((0, 1), 0, 3, versions=[(0, 0)]) for _ in range(2)]
    trained[0].enter(Scoring(1.5, None, {"exact": 1.0, "format": 0.5}))
    trained[1].enter(Scoring(0.0, None, {"exact": 0.0}))
    figures = step_figures(trained, [0, 0], 8)
    assert figures["reward"] == 0.75
    assert figures["reward/exact"] == 0.5 and figures["reward/format"] == 0.5


PENALTY = RewardConfig(scorer="length-penalty", beyond=10, until=20)


# Scorers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        ("(?i)yes", "well, YES", 1.0),
        ("^yes$", "well, yes", 0.0),
        (r"#### (\S+)", "#### 3 no #### 2", 1.0),
        (r"#### (\S+)", "#### 2 no #### 3", 0.0),
        (r"#### (\S+)", "2", 0.0),
        (r"(x)?2", "2", 0.0),
    ],
)
def test_regex_finds_a_pattern_or_by_its_group_the_answer(
    pattern: str, text: str, score: float
) -> None:
    assert only(text, scorer="regex", pattern=pattern) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\n<answer>2</answer>\n", 1.0),
        ("so <think></think><answer></answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_the_whole_completion_to_match(text: str, score: float) -> None:
    assert only(text, scorer="format", pattern=THINKS) == score


@pytest.mark.parametrize(
    ("num_tokens", "score"), [(0, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (20, -1.0), (99, -1.0)]
)
def test_the_length_penalty_falls_in_a_line_from_one_length_to_the_other(
    num_tokens: int, score: float
) -> None:
    assert only("x" * num_tokens, scorer="length-penalty", beyond=10, until=20) == score


def test_without_a_number_of_tokens_no_score_depends_on_the_length() -> None:
    rewards = (RewardConfig(scorer="exact"), PENALTY)

    async def go() -> list[Scoring]:
        with closing(Verifier(config(*rewards))) as verifier:
            record = {"answer": "2"}
            return [await verifier.verify("2", num, record) for num in (20, None)]

    with_length, without = asyncio.run(go())
    assert (with_length.reward, without.reward) == (0.0, 1.0)
    assert set(with_length.scores) == {"exact", "length-penalty"} and set(without.scores) == {
        "exact"
    }


def test_an_evaluation_needs_a_score_of_more_than_the_length() -> None:
    penalty = {"scorer": "length-penalty", "beyond": 10, "until": 20}
    own = {"evaluation": {"num_prompts": 2}}
    with pytest.raises(ValueError, match=r"^evaluation\.scorer is missing: every verifier\.reward"):
        run_of([penalty], **own)
    run_of([penalty], **{"evaluation": {"num_prompts": 2, "scorer": "exact"}})
    run_of([penalty, {"scorer": "exact"}], **own)


# Functions ----------------------------------------------------------------------------------------

MINE = """
import json, math, os
from dataclasses import dataclass
import beside

@dataclass
class Seen:
    text: "str"

def share(completion: str, record: dict) -> float:
    return beside.count(Seen(completion).text, record["answer"]) / 10

def whole(completion, record): return len(completion)
def nan(completion, record): return math.nan
def none(completion, record): return None
def text(completion, record): return "1.0"
def broken(completion, record): raise KeyError("no such thing")
def evaluates(completion, record): return eval(completion)
def reads(completion, record): return float(len(open(completion).read()) > 0)
SEVEN = 7
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("def count(text, what): return text.count(what)\n")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def function(mine: Path, name: str, **keys: Any) -> list[RewardConfig]:
    return [RewardConfig(scorer=f"python:{mine}:{name}", **keys)]


def test_a_function_of_a_file_or_a_module_scores(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scored(function(mine, "share"), "2 and 2 and 22", "none")
    assert found == [Scoring(0.4, None, {"share": 0.4}), Scoring(0.0, None, {"share": 0.0})]
    monkeypatch.syspath_prepend(str(mine.parent))
    (found,) = scored([RewardConfig(scorer="mine:share")], "2")
    assert found == Scoring(0.1, None, {"share": 0.1})


def test_the_path_of_a_function_may_begin_where_the_run_does(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    (found,) = scored([RewardConfig(scorer="python:mine.py:share")], "2")
    assert found == Scoring(0.1, None, {"share": 0.1})


def test_a_function_has_the_bounds_that_the_run_file_gives_it(mine: Path) -> None:
    wide = function(mine, "whole", bounds=(-5.0, 10.0))
    within, outside = scored(wide, "x" * 10, "x" * 11)
    assert within == Scoring(10.0, None, {"whole": 10.0})
    assert outside == Scoring(
        -5.0,
        "whole: error: ValueError: a reward must be in [-5.0, 10.0], got 11.0",
        {"whole": -5.0},
    )


@pytest.mark.parametrize("name", ["nan", "none", "text", "broken"])
def test_a_function_that_never_scores_is_an_error(name: str, mine: Path) -> None:
    (found,) = scored(function(mine, name), "2")
    assert isinstance(found, RuntimeError) and "the record's own answer" in str(found)


THEIRS = """
import os, subprocess
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", {"split": "train"})
    return {"score": float(solution_str == ground_truth), "acc": 1}

def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth and extra_info["answer"] == ground_truth)

def of_texts(completions, answer, **kwargs):
    assert kwargs["prompts"] == ["?"]
    return [float(text == right) for text, right in zip(completions, answer)]

def of_chats(prompts, completions, answer, **kwargs):
    return [float(said[0]["content"] == right) for said, right in zip(completions, answer)]

def calls_out(completion, record):
    (Path(__file__).parent / "written").write_text(completion)
    out = subprocess.run(["cat", Path(__file__).parent / "written"], capture_output=True, text=True)
    return float(out.stdout == completion and os.environ["MY_SETTING"] == "yes")

def sleeps(completion, record):
    subprocess.run(["sleep", completion])
    return 1.0
"""
CHAT = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("name", "signature", "record"),
    [
        (
            "compute_score",
            "verl",
            {
                "prompt": CHAT,
                "data_source": "gsm8k",
                "reward_model": {"style": "rule", "ground_truth": "21"},
                "extra_info": {"split": "train"},
            },
        ),
        ("exact", "verl", {"prompt": "?", "answer": "21"}),
        ("of_texts", "trl", {"prompt": "?", "answer": "21"}),
        ("of_chats", "trl", {"prompt": CHAT, "answer": "21"}),
    ],
)
def test_functions_of_verl_and_trl_score_as_they_are(
    tmp_path: Path, name: str, signature: Any, record: dict[str, Any]
) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    rewards = function(tmp_path / "theirs.py", name, signature=signature)
    right, wrong = scored(rewards, "21", "2", record=record)
    assert (right.reward, right.fault, wrong.reward, wrong.fault) == (1.0, None, 0.0, None)


@pytest.mark.parametrize("key", ["workload", "evaluation"])
def test_a_function_of_verl_needs_a_ground_truth_in_each_record(tmp_path: Path, key: str) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    complete = {"prompt": "?", "reward_model": {"ground_truth": "21"}}
    lacking = {"prompt": "?", "solution": "21", "reward_model": {"style": "rule"}}
    lines = [json.dumps(record) + "\n" for record in (complete, lacking)]
    (tmp_path / "held.jsonl").write_text("".join(lines))
    config = VerifierConfig(
        reward=tuple(function(tmp_path / "theirs.py", "exact", signature="verl"))
    )
    source = read_source(SourceConfig(prompts=str(tmp_path / "held.jsonl")), f"{key}.prompts")
    says = rf"^{key}\.prompts: 1 lines of .*held\.jsonl have no 'reward_model\.ground_truth' or 'answer' \(lines 2\): "
    with pytest.raises(ValueError, match=rf"{says}.* name its column in {key}\.fields\.answer "):
        check_sources(config, [source])
    check_sources(config, [source._replace(records=source.records[:1])])


def test_a_function_outside_the_sandbox_has_files_processes_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "yes")
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("def count(text, what): return text.count(what)\n")
    inside = function(tmp_path / "mine.py", "share")
    outside = function(tmp_path / "theirs.py", "calls_out", sandbox=False)
    (found,) = scored([*inside, *outside], "2")
    assert found == Scoring(1.1, None, {"share": 0.1, "calls_out": 1.0})
    assert (tmp_path / "written").read_text() == "2"
    (found,) = scored(function(tmp_path / "theirs.py", "calls_out"), "2", record={"prompt": "?"})
    assert "error" in str(found.fault), "the sandbox is the default"


def test_the_time_limit_holds_outside_the_sandbox_too(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    rewards = function(tmp_path / "theirs.py", "sleeps", sandbox=False)
    soon, late = scored(rewards, "0.01", "60", record={"prompt": "?"}, time_limit=2.0)
    assert soon.reward == 1.0 and "time limit" in str(late.fault)


@pytest.mark.skipif(bool(find_gaps()), reason="this system has no seccomp or no Landlock")
def test_what_a_function_runs_of_a_models_text_is_in_the_sandbox(mine: Path) -> None:
    hostile = [
        f"open({str(mine.parent / 'canary')!r}, 'w')",
        "__import__('os').fork()",
        "__import__('socket').socket()",
    ]
    found = scored(function(mine, "evaluates"), "0.5", *hostile, record={"prompt": "?"})
    assert [each.reward for each in found] == [0.5, 0.0, 0.0, 0.0]
    assert all(str(each.fault).startswith("evaluates: error: ") for each in found[1:])
    assert not (mine.parent / "canary").exists()
    (mine.parent / "key").write_text("secret")
    (read,) = scored(function(mine, "reads"), str(mine.parent / "key"), record={"prompt": "?"})
    assert str(read.fault).startswith("reads: error: "), (
        "files beside the user's own code are not a library's"
    )


# Run files ----------------------------------------------------------------------------------------


def run_of(rewards: list[dict[str, Any]], **changes: Any) -> Run:
    return small_run({"verifier.reward": rewards, **changes})


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"scorer": "regexp"}, r"reward\.0\.scorer must be one of exact, .*, got 'regexp'"),
        (
            {"scorer": "python:mine.py"},
            r"reward\.0\.scorer must be one of .* got 'python:mine\.py'",
        ),
        ({"scorer": "regex"}, r"reward\.0\.pattern is missing"),
        (
            {"scorer": "regex", "pattern": "(a"},
            r"reward\.0\.pattern is not a regular expression: .*'\(a'",
        ),
        (
            {"scorer": "exact", "pattern": "a"},
            r"reward\.0\.pattern applies only to scorer regex and format",
        ),
        ({"scorer": "length-penalty", "beyond": 4}, r"reward\.0\.until is missing"),
        (
            {"scorer": "length-penalty", "beyond": 4, "until": 4},
            r"reward\.0\.until must be at least 5, got 4",
        ),
        (
            {"scorer": "length-penalty", "beyond": 10**6, "until": 10**7},
            r"reward\.0\.beyond must be in \[0, \d+\], got 1000000",
        ),
        ({"scorer": "exact", "weight": 0.0}, r"reward\.0\.weight must be .* other than 0, got 0"),
        ({"scorer": "exact", "weight": math.inf}, r"reward\.0\.weight must be a finite .* got inf"),
        ({"scorer": "m:f", "bounds": [1.0, 0.0]}, r"reward\.0\.bounds must be .* \(1\.0, 0\.0\)"),
        ({"scorer": "exact", "credit": "some"}, r"reward\.0\.credit must be one of all, share"),
    ],
)
def test_a_reward_that_is_none_is_refused_by_its_key(reward: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^verifier\.{says}"):
        run_of([reward])


def test_one_scorer_stands_by_itself_and_each_reward_has_a_name_of_its_own() -> None:
    with pytest.raises(
        ValueError, match=r"verifier\.scorer 'exact' cannot be combined with 1 \[\[verifier"
    ):
        run_of([{"scorer": "exact"}], **{"verifier.scorer": "exact"})
    with pytest.raises(ValueError, match=r"verifier\.scorer 'regex' needs a pattern"):
        small_run({"verifier.scorer": "regex"})
    with pytest.raises(ValueError, match=r"reward\.1\.name must differ .* 'exact' twice"):
        run_of([{"scorer": "exact"}, {"scorer": "exact"}])
    assert (
        len(run_of([{"scorer": "exact"}, {"scorer": "exact", "name": "b"}]).verifier.rewards) == 2
    )


def test_the_file_of_a_function_is_found_from_the_run_file_and_written_as_seen_from_another(
    tmp_path: Path,
) -> None:
    rewards = [{"scorer": "python:../mine.py:share"}, {"scorer": "exact"}]
    read = make_run(make_table({"verifier.reward": rewards}), tmp_path / "runs")
    scorers = [reward.scorer for reward in read.verifier.rewards]
    assert scorers == [f"python:{tmp_path / 'mine.py'}:share", "exact"]
    write_run(read, tmp_path / "other.toml")
    assert '"python:mine.py:share"' in (tmp_path / "other.toml").read_text()
    assert load_run(tmp_path / "other.toml").verifier == read.verifier
    assert decode_run(encode_run(read)) == read


def local_run(tmp_path: Path, rewards: list[dict[str, Any]]) -> dict[str, Any]:
    return local_table(tmp_path, {"verifier": {"reward": rewards}})


@pytest.mark.parametrize(
    "value",
    ["float32(1)", "int64(1)", "bool_(True)", "array(1.0)", "array([True])", "ones(3).mean()"],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_function_may_use_numpy(tmp_path: Path, value: str, is_late: bool) -> None:
    late = "import numpy as np\n"
    body = f"def score(completion, record):\n {late if is_late else ''}\n return np.{value}\n"
    (tmp_path / "mine.py").write_text(body if is_late else late + body)
    (found,) = verdicts(
        [RewardConfig(scorer=f"python:{tmp_path / 'mine.py'}:score")],
        [("1", {"prompt": "1"})],
        time_limit=10.0,
    )
    assert isinstance(found, Scoring) and found.reward == 1.0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "def score(completion, record): return 2.0",
            r"a reward must be in \[0\.0, 1\.0\], got 2\.0",
        ),
        ("def score(completion, record): return record['gold']", "KeyError: 'gold'"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("score = 3", "has no function score"),
        ("raise SystemExit('gone')", "gone"),
        (
            "def score(completion, record): raise ValueError('\\x1b[31mred\\x1b[0m')",
            r"ValueError:  \[31mred \[0m",
        ),
        ("def score(completion, record): open('left', 'w')", "Function not implemented|Permission"),
        (
            "def score(completion, record):\n while True: pass",
            r"verifier.time_limit \(0.5 s\): raise",
        ),
        (
            "import os\ndef score(completion, record): os._exit(3)",
            r"process ended \(exit status 3\)",
        ),
        ("import ctypes\ndef score(c, record): ctypes.string_at(0)", r"process ended \(SIGSEGV\)"),
        ("def score(c, record):\n import os\n os.fork()", "the sandbox has no threads, processes"),
        ("def score(c, record): return [1.0, 1.0]", r"must be a number, got \[1.0, 1.0\]"),
        (
            "import numpy\ndef score(c, record): return numpy.ones(2)",
            r"must be a number, got array",
        ),
    ],
)
def test_a_function_is_tried_where_it_will_be_called_before_a_run(
    tmp_path: Path, source: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    table = local_run(tmp_path, [{"scorer": f"python:{tmp_path / 'mine.py'}:score"}])
    table["verifier"]["time_limit"] = "500 ms"
    run = make_run(table)
    with pytest.raises(
        ValueError, match=rf"(?s)verifier\.reward\.0\.scorer: .*jsonl:1: .*({says})"
    ):
        check_prompts(run.verifier, run.workload)
    texts = [f.text for f in examine(table, NOWHERE).findings if f.name == "prompts"]
    assert len(texts) == 1 and "verifier.reward.0.scorer" in texts[0]


def test_a_prompt_that_no_reward_scores_is_refused(tmp_path: Path) -> None:
    run = make_run(local_run(tmp_path, [{"scorer": "exact", "families": ["sums"]}]))
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl:1: no verifier\.reward applies to its family None"
    ):
        check_prompts(run.verifier, run.workload)


@pytest.mark.parametrize(
    "reward",
    [{"scorer": "regex"}, {"scorer": "length-penalty", "beyond": 9, "until": 9}, {"scorer": "no"}],
)
def test_doctor_tells_of_a_reward_that_is_none(reward: dict[str, Any], tmp_path: Path) -> None:
    found = examine(local_run(tmp_path, [reward]), NOWHERE)
    assert any("verifier.reward.0" in f.text for f in found.findings if f.level == "error")


def test_one_function_by_itself_is_found_from_the_run_file_too(tmp_path: Path) -> None:
    run = make_run(make_table({"verifier.scorer": "python:mine.py:share"}), tmp_path)
    assert run.verifier.scorer == f"python:{tmp_path / 'mine.py'}:share"
    assert [reward.label for reward in run.verifier.rewards] == ["share"]
