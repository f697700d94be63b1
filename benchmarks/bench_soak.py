"""Check that a long run does not grow: 20,000 simulated steps with failures, and an hour under random faults.

    python -m benchmarks.bench_soak                    both
    python -m benchmarks.bench_soak --steps 0 --minutes 5 --setups stream-async

Each part is a separate command. The anonymous memory of each of its processes is read every second. Pages of
files are left out, because the kernel drops them when memory is needed. Time counts from the first step to the
end of the last worker. The first steps of a process fill caches, so the first tenth of this time is left out of the
life of each process. There are two figures per role, each as a share of its mean memory and for this time:

- growth within processes: the common slope of the memory of all processes of the role over time;
- growth over restarts: the slope of the memory at one age over the times at which the processes started. A
  worker that is forked from a growing prefork server starts with more memory than the one before it.

Both parts must end with a balanced ledger, and must leave no file in shared memory.

The simulated part runs twice. `soak.engine` has the engine and the simulator without results. `soak.simulated` is
`streamrl simulate`, whose results have some 40 figures for each step. It writes them to temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.bench_faults import ray_cluster
from benchmarks.fault_model import make_model
from benchmarks.fault_results import EXECUTED, KINDS
from benchmarks.processes import WORKERS, processes_of
from streamrl.engine.invariants import check
from streamrl.executor.directory_lock import OWNER, PREFIX, is_abandoned
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.steady_state import open_world
from streamrl.sim.trace import StepTrace

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
MOST_GROWTH = 0.02
"""Largest accepted growth of a role's memory after the first tenth, as a share."""
EXTERNAL = "stream-async, external servers"
SETUPS = [*(name for name in EXECUTED if name.startswith("stream-async")), EXTERNAL]
"""Executed runs."""
NUM_SERVERS = 2
"""External servers, which are small ones of this process. Their memory does not count."""
PROBE_STEPS = 200
"""Steps of the run that measures steps per minute on this machine. Its first half does not count.
"""
LONGEST = 1.25
"""Longest duration of an executed run, as a multiple of the wanted one, if the machine is busier than in the probe."""
ENDED = 128 + signal.SIGTERM
"""Exit status of a run that saved itself after SIGTERM."""
MINUTES_A_FAULT = 7
"""Minutes between two faults of one kind. A repair takes up to half a minute."""
AGE = 20.0
"""Seconds after the start of a process at which restarts are compared. Imports and the first steps have ended then."""
FIRST_STEP = re.compile(rb"^step \d", re.MULTILINE)
"""Start of the line that a run prints after each step."""
FEWEST = 5
"""Samples of a process, or processes of a role, from which a slope is computed."""
SLOW = {"link-slows": 'factor = 20.0\nduration = "2 s"', "verifier-stalls": 'duration = "2 s"'}
COMMAND = (sys.executable, "-c", "from streamrl.cli import main; main()")
ALONE = (sys.executable, "-m", "benchmarks.bench_soak", "--engine-alone")


class Process(NamedTuple):
    """One process; the kernel may give its id to another one later."""

    role: str
    pid: int
    began: str
    """Clock ticks from the start of the machine."""


Lives = dict[Process, list[tuple[float, float]]]
"""Times in seconds since the start of the command, and bytes at these times, by process."""


def main() -> None:
    """Run both parts, and print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="number of simulated steps")
    parser.add_argument(
        "--minutes", type=int, default=60, help="approximate duration of each executed run"
    )
    parser.add_argument(
        "--executed-steps",
        type=int,
        help="number of steps of each executed run; by default as many as fit into --minutes on an idle machine",
    )
    parser.add_argument(
        "--engine-alone",
        nargs=argparse.REMAINDER,
        metavar="WORD",
        help="simulate with the words of a `simulate` command, and keep no results",
    )
    parser.add_argument(
        "--setups",
        nargs="*",
        default=SETUPS,
        choices=SETUPS,
        help="executed runs; those whose packages are not installed are left out",
    )
    arguments = parser.parse_args()
    if arguments.engine_alone:
        simulate_alone(arguments.engine_alone)
        return
    before = _shared_memory()
    is_sound = True
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as name:
        if arguments.steps:
            command = simulate(arguments.steps)
            is_sound &= _soak("engine", [*ALONE, *command], Path(name), arguments.steps)
            simulation = [*COMMAND, *command]
            is_sound &= _soak("simulated", simulation, Path(name), arguments.steps)
        for number, setup in enumerate(arguments.setups if arguments.minutes else ()):
            needs = None if setup == EXTERNAL else EXECUTED[setup].needs
            if needs is not None and find_spec(needs) is None:
                print(json.dumps({"name": f"soak.executed.{setup}", "left out": needs}))
                continue
            directory = Path(name) / str(number)
            directory.mkdir()
            make_model(directory)
            with _surroundings(setup, directory) as (settings, clusters):
                command = execute(arguments.minutes, directory, settings, arguments.executed_steps)
                most_time = None if arguments.executed_steps else 60 * LONGEST * arguments.minutes
                is_sound &= _soak(
                    f"executed.{setup}",
                    [*COMMAND, *command],
                    directory,
                    most_time=most_time,
                    clusters=clusters,
                )
    left = sorted(_shared_memory() - before)
    print(json.dumps({"name": "soak.shared_memory", "value": len(left), "unit": "files left"}))
    sys.exit(0 if is_sound and not left else 1)


@contextmanager
def _surroundings(setup: str, directory: Path) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
    """Yield the settings of an executed run, and the heads of its clusters, while what it connects to is there."""
    with ExitStack() as stack:
        if setup == EXTERNAL:
            from tests.sglang_server import SglangServer

            servers = [
                stack.enter_context(SglangServer(directory / "model")) for _ in range(NUM_SERVERS)
            ]
            urls = json.dumps([each.url for each in servers])
            yield (
                (
                    *("policies.system=stream-async", "rollout.backend=external"),
                    *("rollout.external.api=sglang", f"rollout.external.endpoints={urls}"),
                ),
                (),
            )
            return
        on_ray = EXECUTED[setup].needs == "ray"
        head = stack.enter_context(ray_cluster()) if on_ray else None
        yield EXECUTED[setup].settings, () if head is None else (head,)


def simulate(steps: int) -> list[str]:
    """Return the command that simulates `steps` steps, with frequent failures of a replica or the trainer."""
    changes = {
        "algorithm.prompts_per_step": 8,
        "simulate.max_steps": steps,
        "simulate.interval": 1e-9,
        "failures.per_gpu_day": 20,
        "failures.trainers": "true",
        "policies.max_restarts": 10**6,
        "policies.max_attempts": 10**6,
    }
    return ["simulate", str(HERE / "faults.toml"), *_settings(changes)]


def simulate_alone(command: Sequence[str]) -> None:
    """Simulate the run of a `simulate` command without its trace and results; raise `AssertionError` if the engine is wrong."""
    _, run_file, *settings = command
    run = load_run(Path(run_file), [word for word in settings if word != "--set"])
    world = open_world(run, trace_type=StepsOnly)
    world.run(is_enough=lambda: world.steps.num_made >= run.simulate.max_steps)
    check(world.engine.state)
    print(f"ledger: the invariants of the engine hold after {world.steps.num_made} steps")


class StepsOnly(StepTrace):
    """A trace that keeps when steps ended, and nothing else."""

    def __init__(self, run: Run, costs: Costs, *, is_endless: bool) -> None:
        """See `StepTrace`."""
        super().__init__(run, costs, is_endless=is_endless, keeps_entries=False)


def execute(
    minutes: int, directory: Path, setup: Sequence[str], num_steps: int | None
) -> list[str]:
    """Return the command that executes a run, with all faults that do not kill the driver.

    Args:
        minutes: approximate duration.
        directory: where the run file is written.
        setup: changes of a back end, such as "rollout.backend=vllm".
        num_steps: number of steps; None: as many as fit into `minutes`.
    """
    own = [word for change in setup for word in ("--set", change)]
    count = max(1, minutes // MINUTES_A_FAULT)
    faults = [
        f'\n[[faults]]\nkind = "{kind}"\ncount = {count}\n{SLOW.get(kind, "")}\n'
        for kind in KINDS
        if kind != "driver-dies"
    ]
    table = (HERE / "faults-executed.toml").read_text().replace("../", "")
    (directory / "run.toml").write_text(table + "".join(faults))
    changes = {
        "algorithm.steps": num_steps
        or round(60 * minutes / _step_time(directory / "run.toml", own)),
        "policies.max_restarts": 10**6,
    }
    return ["execute", str(directory / "run.toml"), *own, *_settings(changes)]


def _step_time(run_file: Path, own: Sequence[str]) -> float:
    """Return the seconds of a step without faults."""
    output = run_file.parent / "probe"
    changes = {"algorithm.steps": PROBE_STEPS, "faults": "[]", "execute.output": output}
    command = [*COMMAND, "execute", str(run_file), *own, *_settings(changes)]
    subprocess.run(command, check=True, capture_output=True)
    times = [line["time"] for line in read_metrics(output)]
    return (times[-1] - times[PROBE_STEPS // 2]) / (PROBE_STEPS - 1 - PROBE_STEPS // 2)


def _settings(changes: dict[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def _soak(
    what: str,
    command: Sequence[str],
    directory: Path,
    num_simulated: int = 0,
    *,
    most_time: float | None = None,
    clusters: Sequence[int] = (),
) -> bool:
    """Run a command and print its growth; return whether it ended correctly and did not grow.

    Args:
        what: name of the figure.
        command: the command line.
        directory: where its output is written.
        num_simulated: steps of a simulation; 0 for an executed run.
        most_time: seconds from its first step after which it is asked to end (SIGTERM); None for no limit.
        clusters: processes whose descendants also belong to the command.
    """
    log = directory / f"{what}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        lives, seconds = _watch(process, log, most_time or inf, clusters)
    text = log.read_text()
    told = _replay(directory / "run") if process.returncode == ENDED else text
    ledger_line = re.search(r"ledger: .*", told.replace("\n", " "))
    is_balanced = ledger_line is not None and "does not balance" not in ledger_line[0]
    growth = {name: round(share, 4) for name, share in growth_of(lives, seconds)}
    found = {
        "name": f"soak.{what}.growth",
        "value": max(growth.values(), default=0.0),
        "unit": "share",
        "by_role": growth,
        "processes": dict(sorted(Counter(each.role for each in lives).items())),
        "seconds": round(seconds, 1),
        "steps": num_simulated or len(re.findall(r"^step \d", text, re.MULTILINE)),
        "status": process.returncode,
        "ledger": ledger_line[0][:200] if ledger_line is not None else None,
    }
    has_ended = process.returncode in ((0, ENDED) if most_time else (0,))
    if num_simulated:
        size = mean(size for curve in lives.values() for _, size in curve)
        found["bytes_a_step"] = round(found["value"] * size / (0.9 * num_simulated))
    print(json.dumps(found), flush=True)
    if not has_ended:
        print(text[-2000:], file=sys.stderr)
    return has_ended and is_balanced and found["value"] <= MOST_GROWTH


def _replay(run: Path) -> str:
    """Return what `streamrl replay` says of a run that was asked to end: its ledger."""
    done = subprocess.run([*COMMAND, "replay", str(run)], capture_output=True, text=True)
    return done.stdout


def _watch(
    process: subprocess.Popen[bytes], log: Path, most_time: float, clusters: Sequence[int]
) -> tuple[Lives, float]:
    """Return the memory of each process of a command, read every second while it makes steps, and the seconds of these."""
    began_at, first_step_at, is_asked = time.monotonic(), 0.0, False
    lives: Lives = {}
    while process.poll() is None:
        now = time.monotonic() - began_at
        for role, pids in processes_of(process.pid, *clusters).items():
            for pid in pids:
                with suppress(OSError, ValueError, IndexError):
                    own = Process(role, pid, _began(pid))
                    if size := _anonymous_bytes(pid):  # one that is ending has none
                        lives.setdefault(own, []).append((now, size))
        if not first_step_at and FIRST_STEP.search(log.read_bytes()):
            first_step_at = now
        if first_step_at and now - first_step_at > most_time and not is_asked:
            process.terminate()
            is_asked = True
        time.sleep(1.0)
    ends = [(each.role in WORKERS, curve[-1][0]) for each, curve in lives.items()]
    end = max(at for is_worker, at in ends if is_worker or not any(each for each, _ in ends))
    kept = {
        each: [(at, size) for at, size in curve if first_step_at <= at <= end]
        for each, curve in lives.items()
    }
    return {each: curve for each, curve in kept.items() if curve}, end - first_step_at


def _began(pid: int) -> str:
    """Return the start time of a process (proc(5), field 22 of stat)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _anonymous_bytes(pid: int) -> float:
    """Return the bytes of a process that are in memory and are not pages of files."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def growth_of(lives: Lives, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the growth of each role in a run of `seconds`, as a share of its memory: within processes, and over restarts."""
    settled = seconds / 10
    for role in sorted({each.role for each in lives}):
        curves = [curve for each, curve in lives.items() if each.role == role]
        late = [[point for point in curve if point[0] - curve[0][0] >= settled] for curve in curves]
        long = [curve for curve in late if len(curve) >= FEWEST]
        if long:
            yield role, _relative_slope(long) * (seconds - settled)
        starts = [
            (curve[0][0], next(size for time, size in curve if time - curve[0][0] >= AGE))
            for curve in curves
            if curve[-1][0] - curve[0][0] >= AGE
        ]
        if len(starts) >= FEWEST:
            yield f"{role}, restarts", _relative_slope([starts]) * (seconds - settled)


def _relative_slope(curves: list[list[tuple[float, float]]]) -> float:
    """Return the common slope of curves that each have a level of their own, per second, as a share of the mean level."""
    above = below = 0.0
    for curve in curves:
        middle, level = (mean(values) for values in zip(*curve, strict=True))
        above += sum((time - middle) * (size - level) for time, size in curve)
        below += sum((time - middle) ** 2 for time, _ in curve)
    level = mean(size for curve in curves for _, size in curve)
    return above / below / level if below and level else 0.0


def _shared_memory() -> set[str]:
    """Return the directories of runs in shared memory whose owner has died."""
    return {path.name for path in SHARED_MEMORY.glob(f"{PREFIX}*") if is_abandoned(path, OWNER)}


if __name__ == "__main__":
    main()
