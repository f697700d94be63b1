"""Give 1,000 random notices in simulated runs, 1,000 in executed runs of scripted roles, and some to real workers.

Each run must end with all steps or a reason, lose no rollout, train none twice, and be decided alike by a fresh engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from streamrl.engine.messages import Event, ReplicaLeaving
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.execute import execute as execute_file
from streamrl.executor.subscribers.attach_requests import Notice, ask
from streamrl.runfile.files import load_run
from tests.runs import checked_world
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.test_execute import real_run
from tests.test_spot import check, notice_at, spot_run
from tests.test_spot_executed import RandomNotices, execute
from tests.tiny_model import save_tiny_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

APART = sorted(set(SYSTEMS) - {"colocated"})
LENT: dict[str, Any] = {"lending": {"share": 1.0, "replicas": 1}, "policies__system": "stream-sync"}
KINDS: tuple[dict[str, Any], ...] = (
    *({"policies__system": system} for system in APART),
    {"execute__checkpoint_every": 1},
    {"rollout__start_time": "2 s", "rollout__replicas": 4},
    LENT,
)


def main() -> None:
    """Print one JSON object per world: the notices that were given, and the runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notices", type=int, default=1000)
    parser.add_argument("--real", type=int, default=20, help="notices to real workers")
    args = parser.parse_args()
    for name, one_run, most in (
        ("simulated", simulated, args.notices),
        ("executed, scripted roles", scripted, args.notices),
        ("executed, transformers and torch", real, args.real),
    ):
        given, runs = 0, 0
        while given < most:
            given += one_run(runs)
            runs += 1
        print(json.dumps({"name": f"notices, {name}", "value": given, "runs": runs}), flush=True)


def simulated(seed: int) -> int:
    """Simulate a run with random notices, some to every replica at once; return how many reached a replica."""
    source = random.Random(seed)
    changes = {**KINDS[seed % len(KINDS)], "seed": seed, "policies__max_restarts": 0}
    world = checked_world(spot_run(**changes))
    for _ in range(source.randint(1, 10)):
        time, warning = source.uniform(0, 25), source.choice((0.0, 0.3, 2.0, 30.0))
        for which in range(source.choice((1, 1, 1, 4))):
            notice_at(world, time, source.randint(0, 3) + which, warning)
    trace = world.run()
    check(trace)
    return num_given(trace)


def scripted(seed: int) -> int:
    """Execute a run of scripted roles with random notices; return how many there were."""
    changes = {**KINDS[seed % len(KINDS)], "seed": seed, "policies__max_restarts": 0}
    changes.pop("rollout__start_time", None)
    with tempfile.TemporaryDirectory() as scratch:
        run = real_run(Path(scratch), algorithm__steps=12, **changes)
        trace = execute(run, RandomNotices(seed, 0.15, 100))
        check_books(trace, Path(scratch) / "run")
    return num_given(trace)


def real(seed: int) -> int:
    """Execute a run with model workers, and give notices through its run directory; return how many there were."""
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        save_tiny_model(directory / "model", SYMBOLS)
        lines = ({"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(5))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "prompts.jsonl").write_text(text)
        (directory / "run.toml").write_text(RUN_FILE)
        changes = ("algorithm.steps=12", "policies.max_restarts=0", "rollout.max_tokens=64")
        run = load_run(directory / "run.toml", changes)
        asked: list[asyncio.Future[str]] = []

        def watch(event: Event, state: State, now: float) -> None:
            serving = [replica.id for replica in state.fleet.serving()]
            if serving and not state.is_stopping and source.random() < 0.02:
                notice = Notice((source.choice(serving),), source.choice((0.0, 0.5, 3.0)), 0.0)
                loop = asyncio.get_running_loop()
                asked.append(loop.run_in_executor(None, _ask, directory / "run", notice))

        execute_file(run, watch=watch)
        trace = read_trace(directory / "run" / "trace.jsonl")
        check_books(trace, directory / "run")
    return num_given(trace)


def _ask(directory: Path, notice: Notice) -> str:
    try:
        return ask(directory, notice)
    except (ValueError, RuntimeError) as error:  # the replica or the run has ended meanwhile
        return str(error)


def check_books(trace: Trace, directory: Path) -> None:
    """Raise `AssertionError` if a rollout is lost or trained twice, or the replay decides otherwise."""
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(read_trace(directory / "trace.jsonl"), checks_invariants=True) is None


def num_given(trace: Trace) -> int:
    """Return the notices in a trace."""
    return sum(isinstance(entry.event, ReplicaLeaving) for entry in trace.entries)


if __name__ == "__main__":
    main()
