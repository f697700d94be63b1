"""Every role is replaced if it dies, hangs or gets stuck at any of its commands, and none if it is only slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace, replay
from streamrl.executor.launchers.handles import Handle
from streamrl.executor.watchdog import FACTOR
from streamrl.record.metrics import measure
from tests.fault_matrix import AT_START, CASES, LOSSES, METHODS, NEEDS, Case, Strike
from tests.scripted import ScriptedLauncher, make_world
from tests.test_execute import real_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

PATIENCE = 0.4
LIMIT = 90.0
"""Seconds that a run may take: far more than each loss that is noticed, far less than a test session."""
STEPS = 5


def cases() -> list[tuple[Case, str]]:
    """Return each command with one fault, and each fault with several commands, in systems by turns."""
    systems = sorted(SYSTEMS)
    found = []
    for number, (role, method) in enumerate((r, m) for r, ms in METHODS.items() for m in ms):
        possible = [case for case in CASES if (case.role, case.method) == (role, method)]
        chosen = {possible[3 * number % len(possible)]}
        chosen |= {case for case in possible if case.fault == "broken"}
        found += [(case, systems[number % len(systems)]) for case in sorted(chosen)]
    return found


def run_case(directory: Path, case: Case, system: str) -> tuple[Trace, Strike]:
    """Execute a run of scripted roles in processes of their own, one of which gets a fault."""
    changes = {
        "policies.system": system,
        "algorithm.steps": STEPS,
        "execute.patience": f"{PATIENCE} s",
        "execute.checkpoint_every": 1,
        "rollout.max_tokens": 16,
        **NEEDS.get(case.method, {}),
    }
    run = real_run(directory, **{key.replace(".", "__"): value for key, value in changes.items()})

    async def break_engine(process: Handle) -> None:
        await process.call("break_engine", returns=type(None))

    strike = Strike(case, break_engine)

    class Launcher(ScriptedLauncher):
        async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
            return strike.expose("replica", await super().replica(replica_id, kind, model))

        async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
            return strike.expose("trainer", await super().trainer(number, data_parallel))

    options: dict[str, Any] = {"is_local": True, "slowest": 0.02, "cache_tokens": 1000}
    if case.method == "abort":  # rollouts must be running when weights come
        options["generation_time"] = 0.1

    async def go() -> Trace:
        return await make_world(run, options, launcher_class=Launcher).run()

    return asyncio.run(asyncio.wait_for(go(), LIMIT)), strike


@pytest.mark.parametrize(("case", "system"), cases(), ids=str)
def test_a_role_with_a_fault_costs_neither_the_run_nor_a_rollout(
    tmp_path: Path, case: Case, system: str
) -> None:
    trace, strike = run_case(tmp_path, case, system)
    assert strike.has_struck, "the run never sent this command"
    losses = [e.event for e in trace.entries if isinstance(e.event, LOSSES[case.role])]
    if case.method in AT_START and case.role == "replica":
        assert not losses  # it never came up: its start has failed
    else:
        assert len(losses) == case.is_lost, losses
    assert measure(trace).num_steps == STEPS
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None


def test_the_cases_name_every_command_of_a_role_and_every_fault_of_each_role() -> None:
    from inspect import getmembers, iscoroutinefunction

    from streamrl.executor.roles import ReplicaRole, TrainerRole

    for role, contract in (("replica", ReplicaRole), ("trainer", TrainerRole)):
        named = {name for name, _ in getmembers(contract, iscoroutinefunction)} - {"stop"}
        assert named == {case.method for case, _ in cases() if case.role == role} - {"ping"}
        possible = {case.fault for case in CASES if case.role == role}
        assert {case.fault for case, _ in cases() if case.role == role} == possible
    assert FACTOR * PATIENCE < LIMIT / 4
