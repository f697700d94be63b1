"""What can be watched while a run goes on: figures of each step, and where they go."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.executor import monitoring as trackers
from streamrl.executor.buffer import BufferedRollout
from streamrl.executor.execute import check_executable
from streamrl.executor.monitoring import Trackers
from streamrl.executor.trainer.step_record import step_figures
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from tests.patients import NOWHERE, local_table
from tests.scripted import make_world
from tests.test_execute import real_run


def rollout(group: int, reward: float, num_tokens: int, born: int, **more: Any) -> BufferedRollout:
    siblings = (2 * group, 2 * group + 1)
    return BufferedRollout(
        siblings, 0, num_tokens=num_tokens, versions=[(born, 0)], reward=reward, **more
    )


def test_the_figures_of_a_step_are_those_of_its_rollouts() -> None:
    trained = [
        rollout(0, 1.0, 10, 3, verify_time=0.2),
        rollout(0, 0.0, 20, 2),
        rollout(1, 0.0, 40, 1, fault="time limit"),
        rollout(1, 0.0, 30, 3),
    ]
    assert step_figures(trained, [0, 1, 2, 0], max_tokens=40) == {
        "reward": 0.25,
        "reward_std": pytest.approx(0.4330127),
        "uniform_groups": 0.5,
        "output_tokens": 100,
        "length_mean": 25.0,
        "length_max": 40,
        "cut_off": 0.25,
        "staleness_mean": 0.75,
        "staleness_max": 2,
        "unscored": 1,
        "verify_time": pytest.approx(0.05),
    }


def execute(run: Run) -> list[dict[str, Any]]:
    """Execute with scripted roles; return the lines of its steps."""

    async def go() -> None:
        world = make_world(run, {})
        with contextlib.closing(world._directory):
            await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=60))
    return read_metrics(Path(run.execute.output))


def test_every_step_says_what_it_took_and_learned_from(tmp_path: Path) -> None:
    run = real_run(tmp_path, policies__system="stream-async", algorithm__steps=8)
    lines = execute(run)
    seconds = [line["train_time"] for line in lines]
    assert seconds != sorted(seconds), "each step has its own"
    assert [line["step"] for line in lines] == list(range(1, run.algorithm.steps + 1))
    assert sum(line["step_time"] for line in lines) == pytest.approx(lines[-1]["time"])
    for line in lines:
        assert line["step_time"] >= line["train_time"] + line["optimizer_time"]
        assert line["train_time"] > 0 and line["optimizer_time"] > 0
        assert line["learning_rate"] == run.algorithm.learning_rate
        assert 0 <= line["staleness_mean"] <= line["staleness_max"] <= 1
        assert line["length_mean"] <= line["length_max"] <= run.rollout.max_tokens


def test_figures_go_to_tensorboard_and_to_weights_and_biases_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = real_run(tmp_path, execute__trackers=["tensorboard", "wandb"])
    lines = execute(run)
    output = Path(run.execute.output)
    found = EventAccumulator(str(output / "tensorboard"))
    found.Reload()
    for key in ("reward", "length_max", "train_time"):
        points = [(point.step, point.value) for point in found.Scalars(key)]
        assert points == [(line["step"], pytest.approx(line[key])) for line in lines]
    assert list((output / "wandb").glob("offline-run-*/run-*.wandb"))


def test_figures_go_to_one_run_of_mlflow_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    for step, reward in ((1, 0.5), (2, 0.75)):
        tracker = trackers.open_tracker("mlflow", tmp_path)
        tracker.write(step, {"reward": reward, "dropped for a, b": 2.0})
        tracker.close()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("streamrl").experiment_id])
    points = client.get_metric_history(run.info.run_id, "reward")
    assert [(point.step, point.value) for point in points] == [(1, 0.5), (2, 0.75)]
    assert run.info.status == "FINISHED" and run.data.metrics["dropped for a_ b"] == 2.0


def test_a_tracker_that_fails_is_asked_no_more_and_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def write(self, step: int, figures: dict[str, float]) -> None:
            raise ConnectionError("no network")

        def close(self) -> None:
            raise AssertionError("it is not asked any more")

    monkeypatch.setattr(trackers, "open_tracker", lambda name, directory: Broken())
    run = real_run(tmp_path, execute__trackers=["wandb"])
    assert len(execute(run)) == run.algorithm.steps
    assert caplog.text.count("execute.trackers: wandb takes no more figures") == 1


def test_a_tracker_gets_numbers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, dict[str, float]]] = []

    class Kept:
        def write(self, step: int, figures: dict[str, float]) -> None:
            taken.append((step, figures))

        def close(self) -> None:
            pass

    monkeypatch.setattr(trackers, "open_tracker", lambda name, directory: Kept())
    Trackers(["wandb"], tmp_path).write(3, json.loads('{"step": 3, "reward": 1, "text": "no"}'))
    assert taken == [(3, {"reward": 1.0})]


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.MODULES, "wandb", ("nowhere_to_be_found",))
    run = make_run(local_table(tmp_path, {"execute.trackers": ["wandb"]}), NOWHERE.parent)
    with pytest.raises(ValueError, match=r"nowhere_to_be_found not installed.*streamrl\[wandb\]"):
        check_executable(run)
