"""A trainer that only counts: it takes groups as any that follows does, learns nothing, and takes nobody any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.doctor.diagnosis import diagnose
from streamrl.engine.messages import Stepped
from streamrl.engine.trace import read_trace, replay
from streamrl.executor.launchers.placement import PlacedRoles, roles_on_cores
from streamrl.executor.subscribers.counting_trainer import COUNTS, Tally
from streamrl.record.metrics import measure
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import read_metrics, secondary_trainer_directory
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run
from tests.command_line import streamrl
from tests.runs import checked_world, small_run
from tests.test_deterministic import IN_PROCESS, project
from tests.test_ledger import balance_of

__all__ = ["project"]  # a fixture
COUNTER: dict[str, Any] = {"name": "counter", "pool": "aside", "counts_only": True, "backlog": 9}
ASIDE: dict[str, Any] = {"cluster.pools.aside": {"gpu": "h20"}, "algorithm.steps": 6}
SECTION = """
[[trainer]]
name = "counter"
pool = "local"
counts_only = true
backlog = 9
algorithm.prompts_per_step = 2
"""


def test_simulated_it_takes_no_time_and_no_memory_and_gets_all_that_it_has_room_for() -> None:
    run = small_run({**ASIDE, "followers": [COUNTER]})
    trace = checked_world(run).run()
    alone = checked_world(small_run(ASIDE)).run()
    ends = [[e.time for e in t.entries if e.event == Stepped(6, 0)] for t in (trace, alone)]
    assert ends[0] == ends[1]
    leader, counter = balance_of(trace).trainers
    assert counter.trained == leader.trained and replay(trace) is None
    assert not any("counter" in finding.text for finding in diagnose(run))
    with pytest.raises(ValueError, match=r"trainer\.1: .* GB a GPU"):
        checked_world(small_run({**ASIDE, "followers": [{**COUNTER, "counts_only": False}]}))


@pytest.fixture(scope="module")
def counted(project: Path) -> Path:
    """The run directory of a run that a counter follows, of three steps."""
    text = (project / "run.toml").read_text().replace("[trainer]", "[[trainer]]")
    text = text.replace("[algorithm]", f"{SECTION}[algorithm]", 1)
    (project / "counted.toml").write_text(text.replace("gpus_per_node = 3", "gpus_per_node = 4"))
    output = project / "counted"
    words = ("--set", f"execute.output={output}", "--set", "algorithm.steps=3", *IN_PROCESS)
    done = streamrl("execute", project / "counted.toml", *words)
    assert done.returncode == 0, done.stderr
    return output


def test_executed_it_counts_what_the_ledger_has_and_goes_on_counting_after_a_resume(
    counted: Path,
) -> None:
    own = secondary_trainer_directory(counted, 1, "counter")
    first = newest(own)
    assert first.version == len(read_metrics(own)) and first.tokens > first.rollouts > 0
    words = ("--set", f"execute.output={counted}", "--set", "algorithm.steps=4", *IN_PROCESS)
    done = streamrl("execute", counted.parent / "counted.toml", "--resume", *words)
    assert done.returncode == 0, done.stderr
    balance = ledger_of_run(read_trace(counted / "trace.jsonl"), counted)
    assert balance.is_balanced, balance.faults
    assert newest(own).rollouts == balance.trainers[1].trained > first.rollouts
    report = streamrl("report", counted)
    assert report.returncode == 0, report.stderr
    assert "it only counts" in (counted / "report.html").read_text()


def newest(directory: Path) -> Tally:
    *_, last = sorted((directory / "checkpoints").glob("v*"))
    return msgspec.json.decode((last / COUNTS).read_bytes(), type=Tally)


def test_where_its_seconds_come_from_nobody_asks() -> None:
    metrics = measure(checked_world(small_run({**ASIDE, "followers": [COUNTER]})).run())
    alone = measure(checked_world(small_run(ASIDE)).run())
    assert [trainer.name for trainer in metrics.trainers] == ["trainer", "counter"]
    assert (
        sum(metrics.tiers.values()) == pytest.approx(1)
        and metrics.tiers.keys() == alone.tiers.keys()
    )


def test_threads_are_dealt_to_those_who_compute(counted: Path) -> None:
    run = load_run(counted.parent / "counted.toml", ["execute.deterministic=false"])
    assert roles_on_cores(PlacedRoles.of(run)) == 2 + 1


def test_who_only_counts_leads_nobody_and_has_one_place() -> None:
    with pytest.raises(RunError, match=r"trainer\.counts_only is not a key of a run file"):
        small_run({"trainer.counts_only": True})
    with pytest.raises(RunError, match=r"trainer\.1\.counts_only must be false for 2 GPUs"):
        small_run({**ASIDE, "followers": [{**COUNTER, "data_parallel": 2}]})
