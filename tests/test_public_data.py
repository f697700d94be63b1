"""Data sets as public ones are: chats with their answers, answers that show work, files of other layouts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.verifier.reward_checks import check_prompts, check_sources
from streamrl.executor.verifier.scorers import first_group
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.runfile.workload_config import SourceConfig, WorkloadConfig
from streamrl.workload.prompt_records import PromptSource, read_source
from tests.verifying import config, score, verdicts

QUESTION = {"role": "user", "content": "1+2?"}
ANSWER = {"role": "assistant", "content": "The answer is 3."}


def saved(directory: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    path = directory / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(path: Path, **fields: str) -> PromptSource:
    return read_source(SourceConfig(prompts=str(path), fields=fields))


def refusal(path: Path, verifier: VerifierConfig, **fields: str) -> str:
    """Return why a run does not begin; empty if it does."""
    try:
        check_prompts(verifier, WorkloadConfig(prompts=str(path), fields=fields))
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


# Chats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chat",
    [
        [QUESTION, ANSWER],
        [QUESTION, ANSWER, {"role": "assistant", "content": "Really."}],
        [{"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "It is 3."}],
        [{"role": "human", "content": "1+2?"}, {"role": "model", "content": "It is 3."}],
        [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}, ANSWER],
        [{"role": "user", "content": ["1+", {"type": "text", "text": "2?"}]}, ANSWER],
        json.dumps([QUESTION, ANSWER]),
        str([QUESTION, ANSWER]),
    ],
    ids=range(8),
)
def test_an_answer_at_the_end_of_a_chat_is_cut_off_and_named(chat: Any, tmp_path: Path) -> None:
    found = read(saved(tmp_path, {"c": [QUESTION]}, {"c": chat}), prompt="c")
    assert [record["prompt"] for record in found.records] == [[QUESTION]] * 2
    (note,) = found.notes
    assert "1 of 2 chats" in note and "(first: row 2)" in note


def test_earlier_turns_of_the_assistant_stay(tmp_path: Path) -> None:
    chat = [QUESTION, ANSWER, {"role": "user", "content": "And 1+3?"}]
    found = read(saved(tmp_path, {"prompt": chat}))
    assert found.records[0]["prompt"] == chat and not found.notes


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([ANSWER], "only turns of the assistant"),
        ([{"role": "user", "content": None}], "content of a user message must be a text, got None"),
        ([{"role": "user", "content": 3}], "must be a text, got 3"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "images"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "got the part"),
        ([{"text": "1+2?"}], '"from" and "value"'),
    ],
    ids=range(6),
)
def test_a_chat_without_text_is_refused_by_its_line(chat: Any, says: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {"prompt": chat})
    with pytest.raises(ValueError, match=f"^{path}:1: ") as found:
        read(path)
    assert says in str(found.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"conversations": [], "answer": "3"},
            'a ShareGPT chat: set workload.fields.prompt = "conv',
        ),
        ({"problem": "1+2?"}, 'its column "problem" has a text'),
        (
            {"q": "1+2?", "a": "3"},
            "name the column with workload.fields.prompt; its columns are q, a",
        ),
    ],
)
def test_data_without_a_prompt_says_which_column_may_be_it(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r'needs a "prompt"') as found:
        read(saved(tmp_path, row))
    assert says in str(found.value)


# Files --------------------------------------------------------------------------------------------


def test_a_json_array_is_read_as_its_lines_would_be(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(3)]
    path = tmp_path / "data.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=1), f"\n {json.dumps(rows)}"):
        path.write_text(text)
        assert read(path).records == rows
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert read(tmp_path / "data.jsonl.gz").records == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('["a", "b"]', "not a JSON object"),
        ('{\n "data": [{"prompt": "a"}]}', r"jq -c '\.data\[\]' data\.json"),
        ('{\n "prompt": "a"}', r"jq -c '\.' data\.json"),
        ('{"prompt": "a", "answer": "1", "answer": "2"}', "the key 'answer' appears twice"),
        ('[{"prompt": "a", "prompt": "2"}]', "the key 'prompt' appears twice"),
    ],
)
def test_json_of_another_layout_is_refused_with_what_to_do(
    text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(ValueError, match=says) as found:
        read(tmp_path / "data.json")
    assert "\n" not in str(found.value)


def test_a_table_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt,answer\n1+1=,2\n")
    with pytest.raises(ValueError, match="convert a table to JSON lines"):
        read(tmp_path / "data.csv")


# Answers ------------------------------------------------------------------------------------------

WORK = "We add. <<1+2=3>>\n#### 3"


@pytest.mark.parametrize("scorer", ["exact", "math-verify"])
@pytest.mark.parametrize(
    "answer",
    [WORK, "#### 3", "So\nThe answer: 3", "3", 3, 3.0, ["3", "3.0"], ["x = 3", WORK]],
    ids=range(8),
)
def test_a_records_own_answer_scores_one(scorer: str, answer: Any, tmp_path: Path) -> None:
    record = {"prompt": "1+2?", "answer": answer}
    assert refusal(saved(tmp_path, record), config(scorer)) == ""
    assert score(scorer, "1+2 is\n#### 3", record) == 1.0
    assert score(scorer, "1+2 is\n#### 4", record) == 0.0
    (sandboxed,) = verdicts(scorer, [("#### 3", record)])
    assert getattr(sandboxed, "reward", None) == 1.0


def test_the_first_group_of_a_regex_is_compared_with_the_final_answer(tmp_path: Path) -> None:
    reward = RewardConfig(scorer="regex", pattern=r"boxed\{(\d+)\}")
    (sandboxed,) = verdicts([reward], [(r"\boxed{3}", {"prompt": "?", "answer": WORK})])
    assert getattr(sandboxed, "reward", None) == 1.0


def test_a_whole_number_of_many_digits_is_an_answer(tmp_path: Path) -> None:
    row = {"prompt": "10^400?", "answer": 10**400}
    assert refusal(saved(tmp_path, row), config("exact")) == ""


@pytest.mark.parametrize(
    ("scorer", "answer", "says"),
    [
        ("exact", "We add.\nIt is \\boxed{3}", "own answer 0: it has 2 lines"),
        ("exact", "We add.\n#### ", "every empty completion would be right"),
        ("exact", " ", "every empty completion would be right"),
        ("math-verify", ["3", ""], "every empty completion would be right"),
        ("regex", "", "every empty completion would be right"),
        ("exact", float("nan"), "must be a text, a number, or a list of them"),
        ("exact", float("inf"), "must be a text, a number, or a list of them"),
        ("exact", True, "must be a text, a number, or a list of them"),
        ("exact", [], "an empty list"),
        ("exact", {"value": "3"}, "must be a text, a number, or a list of them"),
        ("math-verify", {"value": "3"}, "must be a text, a number, or a list of them"),
        ("regex", "C", "the group ([0-9]+) of the pattern cannot match 'C'"),
    ],
)
def test_an_answer_that_cannot_win_is_refused_before_the_run(
    scorer: str, answer: Any, says: str, tmp_path: Path
) -> None:
    good = {"prompt": "1+2?", "answer": "3"}
    path = saved(tmp_path, good, {**good, "answer": answer})
    reward = {"pattern": "#([0-9]+)"} if scorer == "regex" else {}
    text = refusal(path, config(RewardConfig(scorer=scorer, **reward)))
    assert f"{path}:2: " in text and says in text and "workload.fields.answer" in text


@pytest.mark.parametrize(
    ("pattern", "group"),
    [
        (r"\\boxed\{(.*?)\}", ".*?"),
        (r"(?:answer|Answer): ([A-D])", "[A-D]"),
        (r"[(](?P<choice>[)(]|\)x)[)]", r"[)(]|\)x"),
        (r"<a>((?:a|(b))+)</a>", "(?:a|(b))+"),
        (r"(\d+(?=x))", None),
        (r"(?<=x)(\d+)", None),
        (r"(x)(\1)", "x"),
    ],
)
def test_the_first_group_is_found_unless_it_depends_on_the_text_around(
    pattern: str, group: str | None
) -> None:
    assert first_group(pattern) == group


def test_a_record_that_its_task_scores_zero_is_refused_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    entry = {"answer": "x", "metadata": {"integrand": "2*x", "variable": "x"}}
    row = {"prompt": "Integrate 2x.", "task": "simple_integration", "entry": entry}
    text = refusal(saved(tmp_path, row), config("reasoning-gym", time_limit=10.0))
    assert "cannot score" in text and "scores the record's own answer 'x' 0" in text
    right = {**row, "entry": {**entry, "answer": "x**2 + C"}}
    assert refusal(saved(tmp_path, right), config("reasoning-gym", time_limit=10.0)) == ""


def test_a_solution_that_fails_its_tests_is_refused_before_the_run(tmp_path: Path) -> None:
    row = {"prompt": "Write f.", "tests": ["assert f() == 1"], "solution": "def f(): return 2"}
    assert "own answer" in refusal(saved(tmp_path, row), config("unit-tests"))
    row["solution"] = "def f(): return 1"
    assert refusal(saved(tmp_path, row), config("unit-tests")) == ""


@pytest.mark.parametrize("record", [{"solution": "3"}, {"answer": "3\nthen 4"}])
def test_a_remedy_names_the_columns_of_its_own_data_set(record: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, {"prompt": "1+2?", **record})
    held_out = read(path)._replace(key="evaluation.prompts")
    with pytest.raises(ValueError, match=r"in evaluation\.fields\.answer") as told:
        check_sources(config("exact"), [held_out])
    assert "workload.fields" not in str(told.value)


def test_a_missing_answer_names_the_columns(tmp_path: Path) -> None:
    text = refusal(saved(tmp_path, {"prompt": "1+2?", "solution": "3"}), config("exact"))
    assert "name its column in workload.fields.answer (columns: prompt, solution)" in text
