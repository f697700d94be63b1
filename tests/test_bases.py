"""Run files that build on others, and environment variables in their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from streamrl.runfile.bases import read_merged, secret_of
from streamrl.runfile.files import decode_run, encode_run, load_run, write_run

BASE: dict[str, Any] = {
    "model": {"path": "models/a"},
    "cluster": {"pools": {"box": {"gpu": "cpu", "nodes": 1, "gpus_per_node": 4}}},
    "rollout": {"pool": "box", "replicas": 1, "max_tokens": 8, "temperature": 0.7},
    "trainer": {"pool": "box"},
    "algorithm": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
    "workload": {
        "prompts": "data/a.jsonl",
        "lengths": {"kind": "empirical", "source": "data/lengths.csv"},
    },
    "verifier": {
        "reward": [
            {"scorer": "python:rewards.py:score"},
            {"scorer": "exact", "weight": 0.5},
        ]
    },
}


def write(path: Path, table: dict[str, Any], base: object = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps({**({} if base is None else {"base": base}), **table}))
    return path


def test_tables_merge_and_other_values_replace(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", {**BASE, "seed": 3})
    middle = {"rollout": {"max_tokens": 16}, "algorithm": {"steps": 5}}
    write(tmp_path / "middle.toml", middle, "base.toml")
    top = {"algorithm": {"steps": 7}, "verifier": {"reward": [{"scorer": "exact"}]}}
    run = load_run(write(tmp_path / "top.toml", top, "middle.toml"), ["rollout.replicas=2"])
    assert (run.seed, run.rollout.max_tokens, run.rollout.temperature) == (3, 16, 0.7)
    assert (run.algorithm.steps, run.algorithm.group_size, run.rollout.replicas) == (7, 2, 2)
    assert [reward.scorer for reward in run.verifier.rewards] == ["exact"]


def test_paths_belong_to_the_file_that_wrote_them(tmp_path: Path) -> None:
    write(tmp_path / "shared" / "base.toml", BASE)
    mixed = {"source": [{"prompts": "b.jsonl"}, {"prompts": "hf://org/set"}]}
    middle = {"workload": {**mixed, "prompts": "c.jsonl"}}
    del middle["workload"]["prompts"]
    table = {**BASE, "workload": {"lengths": BASE["workload"]["lengths"]}}
    write(tmp_path / "shared" / "base.toml", table)
    write(tmp_path / "mine" / "middle.toml", middle, "../shared/base.toml")
    run = load_run(write(tmp_path / "top.toml", {"execute": {"output": "out"}}, "mine/middle.toml"))
    assert run.model.path == str(tmp_path / "shared" / "models" / "a")
    assert [source.prompts for source in run.workload.source] == [
        str(tmp_path / "mine" / "b.jsonl"),
        "hf://org/set",
    ]
    assert run.workload.lengths is not None
    assert run.workload.lengths.source == str(tmp_path / "shared" / "data" / "lengths.csv")
    first, second = (reward.scorer for reward in run.verifier.rewards)
    assert first == f"python:{tmp_path / 'shared' / 'rewards.py'}:score" and second == "exact"
    assert run.execute.output == str(tmp_path / "out")


def test_tools_and_short_lengths_belong_to_the_file_that_wrote_them(tmp_path: Path) -> None:
    environment = {"implementation": "tools", "tools": ["python:tools.py:add", "json:loads"]}
    workload = {"prompts": "data/a.jsonl", "lengths": "data/lengths.csv"}
    table = {**BASE, "environment": environment, "workload": workload}
    write(tmp_path / "shared" / "base.toml", table)
    found = read_merged(write(tmp_path / "top.toml", {}, "shared/base.toml"))
    assert found["environment"]["tools"] == ["python:shared/tools.py:add", "json:loads"]
    assert found["workload"]["lengths"]["source"] == "shared/data/lengths.csv"


@pytest.mark.parametrize(
    ("base", "text"),
    [
        ("top.toml", "base: run files build on each other: top.toml -> top.toml"),
        ("other.toml", "top.toml -> other.toml -> top.toml"),
        (["a.toml", "b.toml"], "base must be the path of one run file"),
        ("absent.toml", "absent.toml: no such run file"),
        ("", "base must be the path of one run file"),
    ],
)
def test_bases_that_make_no_chain_are_refused(tmp_path: Path, base: object, text: str) -> None:
    write(tmp_path / "other.toml", BASE, "top.toml")
    with pytest.raises(ValueError, match=text):
        load_run(write(tmp_path / "top.toml", BASE, base))


def test_a_base_comes_from_a_file_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="base is not a key"):
        load_run(write(tmp_path / "run.toml", BASE), ["base=other.toml"])


def test_texts_take_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", str(tmp_path / "weights"))
    monkeypatch.setenv("SYSTEM", "stream-sync")
    table = {**BASE, "model": {"path": "${MODELS}/a"}, "policies": {"system": "${SYSTEM}"}}
    write(tmp_path / "below" / "base.toml", table)
    run = load_run(write(tmp_path / "run.toml", {}, "below/base.toml"))
    assert run.model.path == str(tmp_path / "weights" / "a")
    assert run.policies.system == "stream-sync"
    assert b"${" not in encode_run(run)
    monkeypatch.delenv("MODELS")
    with pytest.raises(
        ValueError, match=r"^model.path: the environment variable MODELS is not set: export"
    ):
        load_run(tmp_path / "run.toml")


EXTERNAL = {"endpoints": ["http://127.0.0.1:1"], "key": "${SERVER_API_KEY}"}


def test_no_record_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_API_KEY", "s3cr3t")
    table = {**BASE, "rollout": {**BASE["rollout"], "backend": "external", "external": EXTERNAL}}
    run = load_run(write(tmp_path / "run.toml", table))
    assert run.rollout.external is not None
    data = encode_run(run)
    write_run(run, tmp_path / "written.toml")
    for text in (data.decode(), (tmp_path / "written.toml").read_text()):
        assert "s3cr3t" not in text and "${SERVER_API_KEY}" in text
    monkeypatch.setenv("SERVER_API_KEY", "other")
    assert decode_run(data) == run
    assert secret_of(run.rollout.external.key) == "other"
    monkeypatch.delenv("SERVER_API_KEY")
    assert decode_run(data) == run  # a record can be read where the variable is not set
    with pytest.raises(ValueError, match=r"^rollout.external.key: .* SERVER_API_KEY is not set"):
        secret_of(run.rollout.external.key)


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "AWS_ACCESS_KEY_ID", "WANDB_APIKEY"])
def test_a_secret_that_records_would_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "s3cr3t")
    for key in ("execute.output", "verifier.scorer", "workload.prompts"):
        with pytest.raises(ValueError, match=rf"^{key}: .* {name} is named like a secret"):
            load_run(write(tmp_path / "run.toml", BASE), {key: f"python:${{{name}}}/x.py:f"})


def test_a_number_of_tokens_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run.toml", BASE)
    changes = {
        "workload.lengths": {"kind": "stated", "source": "mean ${MEAN_TOKENS}, p95 3000, max 4096"}
    }
    runs = []
    for value in ("900", "1600"):
        monkeypatch.setenv("MEAN_TOKENS", value)
        runs.append(encode_run(load_run(tmp_path / "run.toml", changes)))
    assert runs[0] != runs[1] and b"mean 900" in runs[0]  # so a study sees the change


def test_nothing_in_a_record_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_run(load_run(write(tmp_path / "run.toml", BASE)))
    monkeypatch.setenv("FOREIGN", "value")
    path = str(tmp_path / "models" / "a")
    changed = data.replace(path.encode(), b"${FOREIGN}")
    assert decode_run(changed).model.path == "${FOREIGN}"
