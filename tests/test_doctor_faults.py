"""What doctor says of faults that a run file plans, and of spot machines: those that end the run, with what it takes to survive them."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.doctor.diagnosis import examine
from streamrl.engine.messages import Stepped
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, changed
from streamrl.sim.world import simulate
from tests.runs import small_run


def run_with(*faults: dict[str, Any], **changes: Any) -> Run:
    policies = {f"policies.{key}": value for key, value in changes.items()}
    return small_run({"faults": list(faults), "algorithm.steps": 8, **policies})


def found(run: Run) -> dict[str, Finding]:
    return {each.name: each for each in examine(run) if each.name.startswith(("faults", "spot"))}


def versions(run: Run) -> int:
    """Return how many steps a run makes; one that a lost trainer takes back counts once."""
    return len({e.version for _, e, _ in simulate(run).entries if isinstance(e, Stepped)})


@pytest.mark.parametrize("kind", ["replica-dies", "trainer-dies-training"])
def test_faults_that_end_the_run_are_an_error_that_more_restarts_mend(kind: str) -> None:
    run = run_with({"kind": kind, "count": 3}, max_restarts=2)
    finding = found(run)["faults-stop"]
    assert finding.level == "error" and "stops at loss 3" in finding.text
    assert "policies.max_restarts=2" in finding.text
    assert finding.changes == {"policies.max_restarts": 3}
    assert versions(run) < 8
    mended = changed(run, finding.changes)
    assert not found(mended)
    assert versions(mended) == 8


def test_losses_of_replicas_and_of_the_trainer_are_counted_apart() -> None:
    faults = [{"kind": kind, "count": 2} for kind in ("replica-hangs", "trainer-dies-pushing")]
    assert not found(run_with(*faults, max_restarts=2))
    assert not found(run_with({"kind": "link-slows", "count": 9, "factor": 2.0, "duration": "1 s"}))


def test_a_driver_that_dies_is_said_to_be_nothing_for_a_simulation() -> None:
    finding = found(run_with({"kind": "driver-dies", "step": 2}))["faults-of-the-driver"]
    assert finding.level == "warning" and "killed 1 time," in finding.text
    assert "driver-dies" in finding.fix and not finding.changes


def test_spot_machines_without_a_notice_and_those_of_a_trainer_are_named() -> None:
    spot = {"spot_failures_per_gpu_day": 0.5}
    run = small_run(
        {f"cluster.pools.{pool}.{key}": v for pool in ("far", "near") for key, v in spot.items()}
    )
    findings = found(run)
    assert "continue from their last saved tokens" in findings["spot-without-notice"].text
    assert "'near'" in findings["spot-trainer"].text
    changes = findings["spot-without-notice"].changes
    assert changes == {"cluster.pools.far.spot_warning": "30 s"}
    assert list(found(changed(run, changes))) == ["spot-trainer"]
