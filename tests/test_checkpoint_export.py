"""Which checkpoints a run keeps, and what is exported of one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.cli.checkpoint import step_of
from streamrl.cli.evaluate import run_to_evaluate
from streamrl.engine.messages import SaveCheckpoint
from streamrl.executor.checkpoint_export import (
    check_export,
    choose_checkpoint,
    export_checkpoint,
    say_choice,
)
from streamrl.executor.checkpoints import POSITION, Checkpoints, Position, Retention
from streamrl.executor.checksums import CHECKSUMS, find_damage
from streamrl.executor.sampling import sampling_keys
from streamrl.record.evaluation import EVALUATIONS, EvaluationResult, Score
from streamrl.record.run_directory import RUN, TRACE
from streamrl.runfile.config import CheckpointsConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.files import encode_run
from streamrl.runfile.result_files import write_results
from streamrl.sim.world import simulate
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_resume import saved


def test_the_newest_and_the_best_are_kept() -> None:
    scores = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.1}
    found = Retention(last=2, best=1, scores=lambda: scores)
    assert found.kept([2, 4, 6, 8, 10]) == {6, 8, 10}
    assert Retention(last=2).kept([2, 4, 6]) == {4, 6}
    assert Retention(last=3, best=2, scores=lambda: scores).kept([2, 4, 6, 8, 10]) == {4, 6, 8, 10}


def test_a_version_that_waits_for_its_score_is_kept() -> None:
    found = Retention(last=1, best=1, scores=lambda: {2: 0.5}, awaits_score=lambda v: v % 2 == 0)
    assert found.kept([2, 3, 4, 5]) == {2, 4, 5}


def test_old_checkpoints_are_removed_when_a_better_one_has_its_score(tmp_path: Path) -> None:
    scores = {1: 0.7}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.retention = Retention(2, 1, lambda: scores, lambda version: True)
    for version in range(1, 6):
        (checkpoints.path_of(version)).mkdir()
        checkpoints.finish(Position(version=version, groups_done=version))
    assert checkpoints.versions() == [1, 2, 3, 4, 5]  # all but the first wait for a score
    scores |= {2: 0.1, 3: 0.8, 4: 0.2, 5: 0.3}
    checkpoints.remove_old()
    assert checkpoints.versions() == [3, 4, 5]


def test_each_evaluated_version_is_saved_where_the_best_is_kept() -> None:
    def steps(**keep: int) -> list[int]:
        evaluation = {"num_prompts": 2, "every": 2}
        changes = {"evaluation": evaluation, "execute": {"checkpoints": keep}, "algorithm.steps": 5}
        trace = simulate(small_run(changes))
        return [
            c.version for e in trace.entries for c in e.commands if isinstance(c, SaveCheckpoint)
        ]

    assert steps() == [5]
    assert steps(keep_best=1) == [2, 4, 5]


@pytest.mark.parametrize(
    ("checkpoints", "key"),
    [
        ({"keep_best": 1}, "keep_best"),
        ({"choice": "best"}, "choice"),
        ({"keep_last": 1}, "keep_last"),
    ],
)
def test_contradicting_keys_are_refused(checkpoints: dict[str, Any], key: str) -> None:
    with pytest.raises(RunError, match=f"execute.checkpoints.{key}"):
        small_run({"execute": {"checkpoints": checkpoints}})


def run_directory(path: Path, *versions: int) -> Path:
    """Write a run directory with checkpoints as trainers write them, of adapters too."""
    saved(path / "checkpoints", *versions)
    for each in (path / "checkpoints").iterdir():
        for name in ("model.safetensors", "config.json", "tokenizer.json", "trainer.pt"):
            (each / name).write_text(f"{name} of {each.name}")
        (each / "adapter").mkdir()
        (each / "adapter" / "adapter_model.safetensors").write_text("adapters")
    return path


def evaluated(path: Path, **scores: float) -> None:
    """Write evaluations with these scores of versions."""
    facts: dict[str, Any] = {"time": 0.0, "seconds": 1.0, "num_prompts": 1, "samples": 1}
    facts |= {"confidence": 0.95, "mean_tokens": 1.0, "truncated_share": 0.0}
    lines = [
        EvaluationResult(step=int(name[1:]), scores={"avg@1": Score(each, 0.0, 1.0)}, **facts)
        for name, each in scores.items()
    ]
    (path / EVALUATIONS).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))


def test_a_checkpoint_is_chosen_by_step_or_by_score(tmp_path: Path) -> None:
    run = run_directory(tmp_path, 4, 5)
    assert choose_checkpoint(run, "last").version == 5
    assert choose_checkpoint(run, 4).version == 4
    with pytest.raises(ValueError, match="no checkpoint of step 3; there are 4, 5"):
        choose_checkpoint(run, 3)
    with pytest.raises(ValueError, match="has an evaluation score"):
        choose_checkpoint(run, "best")
    evaluated(run, v2=0.9, v4=0.8, v5=0.1)  # that of step 2 is not kept
    assert choose_checkpoint(run, "best").version == 4


def test_an_export_has_no_state_of_a_resume_and_refuses_a_full_directory(tmp_path: Path) -> None:
    checkpoint = choose_checkpoint(run_directory(tmp_path / "run", 5), "last")
    merged, apart = tmp_path / "merged", tmp_path / "apart"
    export_checkpoint(checkpoint, str(merged), "merged")
    names = {"model.safetensors", "config.json", "tokenizer.json", "weights", CHECKSUMS}
    assert {file.name for file in merged.iterdir()} == names
    export_checkpoint(checkpoint, str(apart), "apart")
    assert "adapter_model.safetensors" in {file.name for file in apart.iterdir()}
    assert not (apart / "model.safetensors").exists()
    with pytest.raises(ValueError, match="is not empty"):
        export_checkpoint(checkpoint, str(merged), "merged")


def recorded(path: Path, run_id: str, *versions: int) -> Path:
    """Write a run directory with checkpoints, whose results have a run id."""
    write_results(run_directory(path, *versions), {TRACE: b""}, run_id)
    return path


@pytest.mark.parametrize("name", ["checkpoints/v000031", "checkpoints", "x/../checkpoints/mine"])
def test_nothing_is_exported_among_the_checkpoints_of_a_run(name: str, tmp_path: Path) -> None:
    checkpoint = choose_checkpoint(run_directory(tmp_path / "run", 5), "last")
    target = tmp_path / "run" / name
    with pytest.raises(ValueError, match="where the run removes checkpoints; choose another"):
        export_checkpoint(checkpoint, str(target), "merged")
    config = CheckpointsConfig(export=str(target))
    with pytest.raises(ValueError, match=r"execute\.checkpoints\.export: .* removes checkpoints"):
        check_export(config, tmp_path / "run")


def test_a_run_replaces_its_own_export_and_nothing_else(tmp_path: Path) -> None:
    run, target = recorded(tmp_path / "run", "a1", 4, 5), tmp_path / "model"
    config = CheckpointsConfig(export=str(target))

    def export(step: int, directory: Path = run) -> None:
        check_export(config, directory)
        export_checkpoint(choose_checkpoint(directory, step), str(target), "merged")

    export(4)
    export(5)
    assert (target / "model.safetensors").read_text() == "model.safetensors of v000005"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    other = recorded(tmp_path / "other", "b2", 5)
    with pytest.raises(ValueError, match=r"execute\.checkpoints\.export: .* is not empty"):
        check_export(config, other)
    with pytest.raises(ValueError, match="is not empty"):
        export(5, other)
    (target / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"an export of this run, but README.md was added"):
        check_export(config, run)
    (target / "README.md").unlink()
    (target / "config.json").write_text("mine")
    with pytest.raises(ValueError, match=r"config.json has 4 of \d+ bytes"):
        check_export(config, run)


def test_an_export_follows_a_link_and_keeps_it(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "one", "a1", 5)
    (tmp_path / "disk" / "model").mkdir(parents=True)
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "disk" / "model")
    for _ in range(2):
        export_checkpoint(choose_checkpoint(directory, 5), str(link), "merged")
        assert link.is_symlink() and (tmp_path / "disk" / "model" / CHECKSUMS).exists()
    assert {each.name for each in tmp_path.iterdir()} == {"one", "disk", "out"}
    for target in ("nowhere", "loop"):
        own = tmp_path / "loop"
        own.unlink(missing_ok=True)
        own.symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match="loop is a link to nothing"):
            export_checkpoint(choose_checkpoint(directory, 5), str(own), "merged")


def test_an_export_of_the_best_says_why_and_the_list_marks_it(tmp_path: Path) -> None:
    run, target = recorded(tmp_path / "run", "a1", 4, 5), tmp_path / "model"
    config = CheckpointsConfig(export=str(target), choice="best")
    recipe = small_run()
    recipe = replace(recipe, execute=replace(recipe.execute, checkpoints=config))
    (run / RUN).write_bytes(encode_run(recipe))
    evaluated(run, v4=0.8, v5=0.1)
    assert say_choice(run, "best", 4) == "best avg@1 of 2 scored checkpoints, 0.800"
    export_checkpoint(choose_checkpoint(run, "best"), str(target), "merged")
    found = json.loads(streamrl("checkpoint", "list", str(run), "--json").stdout)
    assert [(each["step"], each["best"], each["exported"]) for each in found] == [
        (4, True, True),
        (5, False, False),
    ]
    assert "best, exported to" in streamrl("checkpoint", "list", str(run)).stdout
    evaluated(run, v4=0.8, v5=0.8)
    assert say_choice(run, "best", 5).endswith("0.800, the newest of 2 equal ones")


def test_an_export_is_evaluated_with_the_sampling_of_its_run(tmp_path: Path) -> None:
    run, target = recorded(tmp_path / "run", "a1", 4), tmp_path / "model"
    own = {"rollout.stop": ["<end>"], "rollout.top_p": 0.95, "rollout.max_tokens": 32}
    recipe = small_run(own)
    cold = replace(recipe, evaluation=EvaluationConfig(prompts="a.jsonl", temperature=0.0))
    options = {"prompts": "a.jsonl", "scorer": "exact"}
    for each, temperature in ((recipe, 1.0), (cold, 0.0)):
        (run / RUN).write_bytes(encode_run(each))
        export_checkpoint(choose_checkpoint(run, "last"), str(target), "merged")
        found, _ = run_to_evaluate(target, "last", options, ())
        assert sampling_keys(found.evaluation, found.rollout) == {
            "temperature": temperature,
            "top_p": 0.95,
            "min_p": 0.0,
            "max_tokens": 32,
            "stop": ("<end>",),
        }
    found, _ = run_to_evaluate(target, "last", {**options, "temperature": 0.5}, ())
    assert found.evaluation is not None and found.evaluation.temperature == 0.5


def test_missing_parents_of_an_export_are_made(tmp_path: Path) -> None:
    run, target = recorded(tmp_path / "run", "a1", 5), tmp_path / "new" / "deep" / "model"
    check_export(CheckpointsConfig(export=str(target)), run)
    export_checkpoint(choose_checkpoint(run, 5), str(target), "merged")
    assert (target / "config.json").is_file()


@pytest.mark.parametrize(("readers", "mode"), [("owner", 0o700), ("everyone", 0o755)])
def test_an_export_has_checksums_and_the_readers_of_its_run(
    tmp_path: Path, readers: str, mode: int
) -> None:
    run, target = run_directory(tmp_path / "run", 5), tmp_path / "new" / "model"
    (run / RUN).write_bytes(encode_run(small_run({"execute": {"readers": readers}})))
    assert streamrl("checkpoint", "export", run, "--output", target).returncode == 0
    assert not find_damage(target, reads_all=True)
    (target / "weights").write_bytes(b"others")
    assert find_damage(target, reads_all=True)
    assert target.stat().st_mode & 0o777 == mode
    assert {file.stat().st_mode & 0o777 for file in target.iterdir()} == {mode & 0o666}


def test_damaged_weights_are_not_exported(tmp_path: Path) -> None:
    run, target = run_directory(tmp_path / "run", 4, 5), tmp_path / "model"
    (run / RUN).write_bytes(encode_run(small_run()))
    (run / "checkpoints" / "v000005" / "weights").write_bytes(bytes(256))
    done = streamrl("checkpoint", "export", run, "--output", target)
    assert done.returncode == 2 and "weights has other bytes than were written" in done.stderr
    assert list(tmp_path.iterdir()) == [run]
    assert streamrl("checkpoint", "export", run, "-o", target, "--step", "4").returncode == 0


@pytest.mark.parametrize("command", ["list", "export"])
def test_checkpoints_of_what_is_no_run_are_refused(tmp_path: Path, command: str) -> None:
    options = ["--output", str(tmp_path / "model")] if command == "export" else []
    done = streamrl("checkpoint", command, tmp_path, *options)
    assert done.returncode == 2 and "is no run directory" in done.stderr


def test_special_files_end_a_list_with_one_line_or_are_no_checkpoints(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 1, 2)
    (run / RUN).write_bytes(encode_run(small_run()))
    checkpoints = run / "checkpoints"
    (checkpoints / "vault").mkdir()
    (checkpoints / "v000007").mkdir()
    os.mkfifo(checkpoints / "v000007" / POSITION)
    os.mkfifo(checkpoints / "v000008")
    (checkpoints / "v000009").symlink_to(checkpoints / "v000009")
    (checkpoints / "v000010").symlink_to("/dev/zero")
    listed = streamrl("checkpoint", "list", run, "--json")
    assert [each["step"] for each in json.loads(listed.stdout)] == [1, 2]
    special = tmp_path / "pipe"
    os.mkfifo(special)
    for target in (special, tmp_path, Path("/dev/zero")):
        (run / EVALUATIONS).symlink_to(target)
        done = streamrl("checkpoint", "list", run)
        (run / EVALUATIONS).unlink()
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "is no regular file" in done.stderr


def test_weights_without_adapters_cannot_be_exported_apart(tmp_path: Path) -> None:
    checkpoint = choose_checkpoint(run_directory(tmp_path / "run", 5), "last")
    shutil.rmtree(checkpoint.path / "adapter")
    with pytest.raises(ValueError, match="has no adapters"):
        export_checkpoint(checkpoint, str(tmp_path / "out"), "apart")
    assert not (tmp_path / "out").exists()


class UnreachableError(Exception):
    """An error of the network as HTTP libraries have it: of no built-in kind."""


class LocalHub:
    """A hub in a local directory, with the calls that an export makes."""

    root = Path()

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert private and exist_ok
        if repo_id.startswith("far/"):
            raise UnreachableError("no route\nto the hub")
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, *, folder_path: Path, repo_id: str, commit_message: str) -> None:
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        (self.root / "messages").write_text(commit_message)


def test_a_checkpoint_is_pushed_to_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", LocalHub)
    monkeypatch.setattr(LocalHub, "root", tmp_path / "hub")
    checkpoint = choose_checkpoint(run_directory(tmp_path / "run", 5), "last")
    assert export_checkpoint(checkpoint, "hf://me/model", "merged") == "hf://me/model"
    assert (tmp_path / "hub" / "me" / "model" / "model.safetensors").exists()
    assert (tmp_path / "hub" / "messages").read_text() == "Upload step 5"
    with pytest.raises(
        ValueError, match=r"must be hf://OWNER/NAME or a directory, got 'hf://model'"
    ):
        export_checkpoint(checkpoint, "hf://model", "merged")
    with pytest.raises(RuntimeError, match="hub does not take the checkpoint: no route to the hub"):
        export_checkpoint(checkpoint, "hf://far/model", "merged")


def test_a_step_of_thousands_of_digits_is_no_step() -> None:
    with pytest.raises(ValueError, match=r"^--step is '9+\.\.\.; write last, best, or"):
        step_of("9" * 5000)
