"""Check that a long run does not grow: 20,000 simulated steps with failures, and an hour under random faults.

    python -m benchmarks.bench_soak                    both
    python -m benchmarks.bench_soak --steps 0 --minutes 5 --setups stream-async

Each part is a separate command, whose memory is read every second. The memory of its last tenth is
compared with that of its second tenth, by role. A lost worker starts again with little memory, so a
role counts by the mean of its processes. Both parts must end with a balanced ledger, and must leave
no file in shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.fault_model import make_model
from benchmarks.fault_results import EXECUTED, KINDS
from benchmarks.processes import processes_of
from streamrl.record.run_directory import read_metrics

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
MOST_GROWTH = 0.02
"""Largest accepted growth of a role's memory after the first tenth, as a share."""
SETUPS = [
    name for name in EXECUTED if name.startswith("stream-async") and not name.endswith("on Ray")
]
"""Back ends that run without a cluster."""
PROBE_STEPS = 400
"""Steps of the run that measures steps per minute on this machine. Its first half does not count.
"""
MINUTES_A_FAULT = 7
"""Minutes between two faults of one kind. A repair takes up to half a minute."""
SLOW = {"link-slows": 'factor = 20.0\nduration = "2 s"', "verifier-stalls": 'duration = "2 s"'}
COMMAND = (sys.executable, "-c", "from streamrl.cli import main; main()")


class Sample(NamedTuple):
    """Memory at one time."""

    time: float
    rss: dict[str, float]
    """Mean bytes of a process, by role."""


def main() -> None:
    """Run both parts, and print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="number of simulated steps")
    parser.add_argument(
        "--minutes", type=int, default=60, help="approximate duration of each executed run"
    )
    parser.add_argument(
        "--setups",
        nargs="*",
        default=SETUPS,
        choices=SETUPS,
        help="executed runs; those whose packages are not installed are left out",
    )
    arguments = parser.parse_args()
    before = _shared_memory()
    is_sound = True
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as name:
        if arguments.steps:
            is_sound &= _soak("simulated", simulate(arguments.steps), Path(name))
        for number, setup in enumerate(arguments.setups if arguments.minutes else ()):
            needs = EXECUTED[setup].needs
            if needs is not None and find_spec(needs) is None:
                print(json.dumps({"name": f"soak.executed.{setup}", "left out": needs}))
                continue
            directory = Path(name) / str(number)
            directory.mkdir()
            make_model(directory)
            command = execute(arguments.minutes, directory, EXECUTED[setup].settings)
            is_sound &= _soak(f"executed.{setup}", command, directory)
    left = sorted(_shared_memory() - before)
    print(json.dumps({"name": "soak.shared_memory", "value": len(left), "unit": "files left"}))
    sys.exit(0 if is_sound and not left else 1)


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


def execute(minutes: int, directory: Path, setup: Sequence[str]) -> list[str]:
    """Return the command that executes a run for about `minutes`, with all faults that do not kill the driver.

    `setup` are the changes of a back end, such as "rollout.backend=vllm".
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
        "algorithm.steps": round(60 * minutes / _step_time(directory / "run.toml", own)),
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


def _soak(what: str, command: list[str], directory: Path) -> bool:
    """Run a command and print its growth; return whether it ended correctly and did not grow."""
    log = directory / f"{what}.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*COMMAND, *command], stdout=output, stderr=output)
        samples = list(_watch(process))
    text = log.read_text()
    ledger_line = re.search(r"ledger: .*", text.replace("\n", " "))
    is_balanced = ledger_line is not None and "does not balance" not in ledger_line[0]
    growth = {role: round(share, 4) for role, share in _growth(samples)}
    found = {
        "name": f"soak.{what}.growth",
        "value": max(growth.values(), default=0.0),
        "unit": "share",
        "by_role": growth,
        "seconds": round(samples[-1].time, 1),
        "status": process.returncode,
        "ledger": ledger_line[0][:200] if ledger_line is not None else None,
    }
    print(json.dumps(found), flush=True)
    if process.returncode:
        print(text[-2000:], file=sys.stderr)
    return not process.returncode and is_balanced and found["value"] <= MOST_GROWTH


def _watch(process: subprocess.Popen[bytes]) -> Iterator[Sample]:
    """Yield the memory of a command every second until it ends."""
    began_at = time.monotonic()
    while process.poll() is None:
        yield Sample(time.monotonic() - began_at, _memory(process.pid))
        time.sleep(1.0)


def _memory(driver: int) -> dict[str, float]:
    """Return the mean bytes of a process, by role."""
    return {role: mean(map(_rss, pids)) for role, pids in processes_of(driver).items()}


def _rss(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _growth(samples: list[Sample]) -> Iterator[tuple[str, float]]:
    """Yield the relative growth of each role from the second tenth to the last."""
    end = samples[-1].time
    for role in {role for sample in samples for role in sample.rss}:
        second, last = (
            [s.rss[role] for s in samples if role in s.rss and least <= s.time / end <= most]
            for least, most in ((0.1, 0.2), (0.9, 1.0))
        )
        if second and last:
            yield role, median(last) / median(second) - 1


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


if __name__ == "__main__":
    main()
