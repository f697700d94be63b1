"""Prompts from JSONL, Parquet and data sets of `datasets`, with columns renamed and prompts made by templates."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.doctor import examine
from streamrl.executor.evaluation import held_out_prompts
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.tokens import decode_ids
from streamrl.executor.verifier.reward_checks import check_prompts
from streamrl.ranker.score_files import read_known
from streamrl.record.prompt_tokens import check_prompt_tokens, write_prompt_tokens
from streamrl.runfile.files import encode_run, load_run, make_run, write_run
from streamrl.runfile.workload_config import SourceConfig, TemplateConfig
from streamrl.workload import data_files
from streamrl.workload.prompt_records import read_source
from tests.command_line import streamrl
from tests.patients import NOWHERE, local_table
from tests.runs import make_table, small_run
from tests.scripted import ScriptedTokenizer

ROWS = [
    {"question": f"{a}+{a}=", "reward_model": {"ground_truth": str(2 * a)}, "level": a}
    for a in range(5)
]
FIELDS = {"prompt": "question", "answer": "reward_model.ground_truth"}


def as_jsonl(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def as_parquet(directory: Path, rows: list[dict[str, Any]]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), directory / "data.parquet")
    return directory / "data.parquet"


def as_data_set(directory: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(directory / "data"))
    return directory / "data"


Save = Callable[[Path, list[dict[str, Any]]], Path]
SAVES = (as_jsonl, as_parquet, as_data_set)


@pytest.mark.parametrize("save", SAVES)
def test_rows_are_records_in_their_order_whatever_holds_them(save: Save, tmp_path: Path) -> None:
    source = SourceConfig(prompts=str(save(tmp_path, ROWS)), fields=FIELDS)
    found = read_source(source).records
    assert [record["prompt"] for record in found] == [row["question"] for row in ROWS]
    assert [record["answer"] for record in found] == ["0", "2", "4", "6", "8"]
    assert found[3]["level"] == 3, "what is not named stays under its own name"


@pytest.mark.parametrize("save", [as_jsonl, as_parquet])
def test_chats_of_a_data_set_stay_chats(save: Save, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    (record,) = read_source(SourceConfig(prompts=str(save(tmp_path, [{"prompt": chat}])))).records
    assert record["prompt"] == chat


def test_a_column_with_dots_in_its_name_is_found_before_a_nested_one(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [{"a.b": "flat", "a": {"b": "nested"}}])
    (record,) = read_source(SourceConfig(prompts=str(path), fields={"prompt": "a.b"})).records
    assert record["prompt"] == "flat"


def test_values_that_json_does_not_have_are_texts(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "at": datetime.date(2024, 5, 6), "image": b"\x00\xff"}]
    (record,) = read_source(SourceConfig(prompts=str(as_parquet(tmp_path, rows)))).records
    assert json.loads(json.dumps(record)) == {"prompt": "p", "at": "2024-05-06", "image": "AP8="}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "q"}, r":1: has no field 'q', which fields\.prompt names"),
        (
            {"prompt": "question", "answer": "reward_model.gold"},
            r":1: has no field 'reward_model\.gold'",
        ),
        ({"prompt": "level"}, r':1: needs a "prompt"'),
        ({}, r':1: needs a "prompt"'),
    ],
)
def test_a_field_that_is_not_there_is_refused_by_line_and_name(
    save: Save, fields: dict[str, str], says: str, tmp_path: Path
) -> None:
    path = save(tmp_path, ROWS)
    with pytest.raises(ValueError, match=rf"^{path}{says}") as found:
        read_source(SourceConfig(prompts=str(path), fields=fields))
    assert "\n" not in str(found.value)


# What cannot be read ------------------------------------------------------------------------------


def test_texts_that_parquet_marks_as_bytes_are_texts(tmp_path: Path) -> None:
    rows = [{"prompt": "é".encode(), "image": b"\xff\xfe"}]
    (record,) = read_source(SourceConfig(prompts=str(as_parquet(tmp_path, rows)))).records
    assert record == {"prompt": "é", "image": "//4="}


def test_dates_with_nanoseconds_are_texts(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dates = arrow.array([1], arrow.timestamp("ns"))
    parquet.write_table(arrow.table({"prompt": ["a"], "made": dates}), tmp_path / "data.parquet")
    (record,) = read_source(SourceConfig(prompts=str(tmp_path / "data.parquet"))).records
    assert str(record["made"]).startswith("1970-01-01 00:00:00")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = as_parquet(tmp_path, ROWS)
    data = path.read_bytes()
    for damaged in (b"", data[: len(data) // 2], b"PAR1" + b"\x00" * 20 + b"PAR1"):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"^workload\.prompts: {path} cannot be read: "
        ) as found:
            read_source(SourceConfig(prompts=str(path)))
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("save", [as_jsonl, as_parquet])
def test_no_rows_are_no_prompts(save: Save, tmp_path: Path) -> None:
    path = save(tmp_path, [])
    with pytest.raises(ValueError, match=r"^workload\.prompts: .*data.* has no (rows|lines)"):
        read_source(SourceConfig(prompts=str(path)))


def test_a_directory_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match=rf"^workload\.prompts: {tmp_path} cannot be loaded: "
    ) as found:
        read_source(SourceConfig(prompts=str(tmp_path)))
    assert "\n" not in str(found.value)


def test_a_data_set_of_the_hub_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    source = SourceConfig(prompts="hf://nobody/nothing", split="train")
    with pytest.raises(
        ValueError, match=r"^workload\.prompts: hf://nobody/nothing cannot be loaded"
    ):
        read_source(source)


def test_a_split_is_chosen_by_name_or_is_the_only_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    path = str(tmp_path / "both")
    datasets.DatasetDict(parts).save_to_disk(path)
    for name in parts:
        (record,) = read_source(SourceConfig(prompts=path, split=name)).records
        assert record["prompt"] == name
    for wrong in (None, "dev"):
        says = rf"^workload\.split must be one of train, test of .*, got {wrong!r}"
        with pytest.raises(ValueError, match=says):
            read_source(SourceConfig(prompts=path, split=wrong))
    datasets.DatasetDict({"train": parts["train"]}).save_to_disk(str(tmp_path / "one"))
    assert len(read_source(SourceConfig(prompts=str(tmp_path / "one"))).records) == 1


@pytest.mark.parametrize("key", ["split", "subset"])
def test_a_file_has_no_parts(key: str, tmp_path: Path) -> None:
    source = SourceConfig(prompts=str(as_jsonl(tmp_path, ROWS)), **{key: "train"})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=rf"^workload\.{key} applies only to data sets .*, got 'train'"
    ):
        read_source(source)


@pytest.mark.parametrize(
    ("name", "module"), [("data.parquet", "pyarrow"), ("", "datasets"), ("hf://a/b", "datasets")]
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files.importlib.util, "find_spec", lambda name: None)
    path = name if name.startswith("hf:") else str(tmp_path / name)
    says = rf"read with {module}, which is not installed: pip install 'streamrl\[data\]'"
    with pytest.raises(ValueError, match=says):
        read_source(SourceConfig(prompts=path))


# Templates ----------------------------------------------------------------------------------------


def templated(directory: Path, **template: str) -> SourceConfig:
    path = as_jsonl(directory, ROWS)
    return SourceConfig(prompts=str(path), fields=FIELDS, template=TemplateConfig(**template))


def test_a_template_makes_a_chat_of_a_records_fields(tmp_path: Path) -> None:
    user = "{{ prompt }} Level {{ level }}.{% if level > 3 %} Think.{% endif %}"
    found = read_source(templated(tmp_path, user=user, system="Be brief."))
    assert found.is_templated
    chats = [record["prompt"] for record in found.records]
    system = {"role": "system", "content": "Be brief."}
    assert chats[0] == [system, {"role": "user", "content": "0+0= Level 0."}]
    assert chats[4] == [system, {"role": "user", "content": "4+4= Level 4. Think."}]


@pytest.mark.parametrize(
    ("user", "says"),
    [
        (
            "{{ promt }}",
            r"data\.jsonl:1: workload\.template\.user cannot be filled in: 'promt' is undefined",
        ),
        (
            "{{ reward_model }}",
            r"data\.jsonl:1: workload\.template\.user .* must be a text or a number",
        ),
        ("{{ 1 / level }}", r"data\.jsonl:1: workload\.template\.user .*division by zero"),
        ("{{ prompt.__class__.mro() }}", r"data\.jsonl:1: workload\.template\.user .*unsafe"),
        (
            "Solve: {prompt}",
            r"^workload\.template\.user 'Solve: \{prompt\}' has no field of a record",
        ),
        ("{{ prompt", r"^workload\.template\.user is not a Jinja template: .*, got '\{\{ prompt'"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused_by_line(
    user: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says) as found:
        read_source(templated(tmp_path, user=user))
    assert "\n" not in str(found.value)


class Chatty(ScriptedTokenizer):
    """Has a chat template, which tells roles."""

    chat_template = "roles"

    def apply_chat_template(self, prompt: list[Any], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode("|".join(f"{m['role']}:{m['content']}" for m in prompt))}


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(Chatty(), "system:S|user:0+0="), (ScriptedTokenizer(), "S\n\n0+0=")],
)
def test_a_templated_prompt_goes_through_the_models_chat_template_where_it_has_one(
    tokenizer: ScriptedTokenizer, text: str, tmp_path: Path
) -> None:
    path = str(as_jsonl(tmp_path, ROWS))
    template = {"user": "{{ prompt }}", "system": "S"}
    keys = {"workload.prompts": path, "workload.fields": FIELDS, "workload.template": template}
    workload = PromptWorkload(small_run(keys), tokenizer)
    assert decode_ids(workload.prompts[0]).tolist() == tokenizer.encode(text)


class Told(Chatty):
    """Its template tells whether the policy's turn begins, and which tools there are."""

    def apply_chat_template(self, prompt: list[Any], **told: Any) -> dict[str, list[int]]:
        tools = ",".join(each["name"] for each in told.get("tools", ()))
        begins = ">" if told.get("add_generation_prompt") else ""
        return {"input_ids": self.encode(f"{tools}{prompt[-1]['content']}{begins}{told['thinks']}")}


@pytest.mark.parametrize("tools", [[], [{"name": "add"}, {"name": "subtract"}]])
def test_held_out_chats_are_rendered_as_those_of_the_run(
    tools: list[dict[str, str]], tmp_path: Path
) -> None:
    chats = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": "3"} for n in range(4)]
    path = str(as_jsonl(tmp_path, chats))
    keys = {
        "workload.prompts": path,
        "evaluation.prompts": path,
        "workload.template_arguments": {"thinks": False},
    }
    run = small_run(keys)
    assert run.evaluation is not None
    workload = PromptWorkload(run, Told(), tools)
    held_out = held_out_prompts(run.evaluation, run.workload, workload)
    assert [each.tokens for each in held_out] == workload.prompts
    named = ",".join(each["name"] for each in tools)
    assert decode_ids(held_out[0].tokens).tolist() == Told().encode(f"{named}0+1=>False")


# One reader ---------------------------------------------------------------------------------------


def test_doctor_and_execute_read_what_the_run_file_names(tmp_path: Path) -> None:
    table = local_table(tmp_path, {"workload.prompts": str(as_parquet(tmp_path, ROWS))})
    table["workload"]["fields"] = FIELDS
    check_prompts(make_run(table).verifier, make_run(table).workload)
    (sound,) = [f for f in examine(table, NOWHERE).findings if f.name == "prompts"]
    assert sound.level == "ok" and "5 prompts" in sound.text
    del table["workload"]["fields"]["answer"]
    with pytest.raises(ValueError, match=r"^workload\.prompts: 5 lines .* no 'answer'"):
        check_prompts(make_run(table).verifier, make_run(table).workload)
    (wrong,) = [f for f in examine(table, NOWHERE).findings if f.name == "prompts"]
    assert (
        wrong.level == "error" and "workload.fields" in wrong.text and "the text names" in wrong.fix
    )


def test_a_ranker_reads_a_runs_prompts_as_the_run_did(tmp_path: Path) -> None:
    source = templated(tmp_path, user="{{ prompt }}?")
    run = small_run(
        {
            "workload.prompts": source.prompts,
            "workload.fields": FIELDS,
            "workload.template": {"user": "{{ prompt }}?"},
        }
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes(encode_run(run))
    lines = [{"line": line, "num_tokens": 10 + line} for line in (3, 1, 3)]
    rollouts = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "run" / "rollouts.jsonl").write_text(rollouts)
    found = read_known(tmp_path / "run")
    assert [(each.text, each.family, each.lengths) for each in found] == [
        ("1+1=?", "data", [11]),
        ("3+3=?", "data", [13, 13]),
    ]


def test_prompts_of_a_run_file_are_scored_as_the_run_makes_them(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    source = templated(tmp_path, user="{{ prompt }} please")
    workload = {
        "prompts": source.prompts,
        "fields": FIELDS,
        "template": {"user": "{{ prompt }} please"},
    }
    table = make_table({f"workload.{key}": value for key, value in workload.items()})
    write_run(make_run(table), tmp_path / "run.toml")
    csv = "prompt_id,prompt,output_tokens\n"
    csv += "".join(f"{n},{'word ' * n}please,{10 * (n + 1)}\n" for n in range(20))
    (tmp_path / "known.csv").write_text(csv)
    ranker, out = tmp_path / "ranker.npz", tmp_path / "scored.jsonl"
    assert streamrl("ranker", "fit", tmp_path / "known.csv", "-o", ranker).returncode == 0
    done = streamrl("ranker", "score", tmp_path / "run.toml", "--ranker", ranker, "-o", out)
    assert done.returncode == 0, done.stderr
    records = read_source(SourceConfig(prompts=str(out))).records
    assert records[2]["prompt"] == [{"role": "user", "content": "2+2= please"}]
    assert all(record["expected_tokens"] >= 1 for record in records)


def test_a_run_resumes_from_another_file_of_the_same_prompts_and_from_no_other(
    tmp_path: Path,
) -> None:
    def prompts(path: Path) -> list[Any]:
        run = small_run({"workload.prompts": str(path), "workload.fields": FIELDS})
        return [decode_ids(ids) for ids in PromptWorkload(run, ScriptedTokenizer()).prompts]

    write_prompt_tokens(tmp_path, prompts(as_jsonl(tmp_path, ROWS)))
    check_prompt_tokens(tmp_path, prompts(as_parquet(tmp_path, ROWS)))
    with pytest.raises(ValueError, match="line 1 differs"):
        check_prompt_tokens(tmp_path, prompts(as_parquet(tmp_path, ROWS[::-1])))


def test_data_sets_of_the_hub_are_no_paths_and_all_others_are_seen_from_the_run_file(
    tmp_path: Path,
) -> None:
    sources = [{"prompts": "hf://openai/gsm8k"}, {"prompts": "data/a.parquet"}]
    run = make_run(make_table({"workload.source": sources}), tmp_path)
    names = [source.prompts for source in run.workload.sources]
    assert names == ["hf://openai/gsm8k", str(tmp_path / "data" / "a.parquet")]
    write_run(run, tmp_path / "run.toml")
    assert 'prompts = "data/a.parquet"' in (tmp_path / "run.toml").read_text()
    assert load_run(tmp_path / "run.toml").workload == run.workload


def test_a_missing_file_is_answered_with_the_names_that_are_like_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    missing = tmp_path / "promts.jsonl"
    says = f"workload.prompts: {missing} does not exist; did you mean {tmp_path / 'prompts.jsonl'}?"
    with pytest.raises(ValueError, match=re.escape(says)):
        read_source(SourceConfig(prompts=str(missing)))
