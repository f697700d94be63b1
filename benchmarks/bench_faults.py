"""Inject every fault in every system on five seeds, simulated and executed; write docs/reliability.md.

A simulated cell compares a run with one fault at a random moment with the same run without faults.
An executed run of a system has all faults one after the other. Its seed draws their order. It trains
a random two-layer model. Restarts take most of the time, because a worker imports torch. If the
driver is killed, the run is resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from benchmarks.fault_model import make_model
from benchmarks.fault_page import page
from benchmarks.fault_results import (
    EXECUTED,
    KINDS,
    RAY,
    SIMULATED,
    Cell,
    Key,
    balance,
    read_traces,
)
from streamrl.cli.progress import make_progress
from streamrl.engine.messages import (
    Event,
    Failed,
    Generate,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    SaveCheckpoint,
    Stepped,
    TrainerLost,
)
from streamrl.engine.trace import Trace
from streamrl.executor.faults import StruckFault, read_struck
from streamrl.record.ledger import describe_faults
from streamrl.record.restarts import ledger_of_traces
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.files import load_run
from streamrl.runfile.simulation_config import FaultConfig, FaultKind
from streamrl.runfile.units import Duration
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reliability.md"
END = "<!-- end of faults -->"
"""Mark of the page after the results; the text below it is kept."""
SEEDS = 5
MOST_SECONDS = 420.0  # time limit of one command; a run that takes longer counts as hung
APART = 4
"""Steps between two faults of an executed run, so that a fault is repaired before the next one."""
SAID: dict[str, dict[FaultKind, dict[str, Any]]] = {
    "simulated": {
        "link-slows": {"factor": 20.0, "duration": Duration(600.0)},
        "verifier-stalls": {"duration": Duration(300.0)},
    },
    "executed": {
        "link-slows": {"factor": 20.0, "duration": Duration(1.0)},
        "verifier-stalls": {"duration": Duration(2.0)},
    },
}
LARGEST_GAP = 1e-3
"""Largest difference, in nats, between log-probabilities of replica and trainer at staleness 0.

Rounding of the engines causes a hundredth of it. One optimizer step of this model causes a hundred
times as much.
"""
COMMAND = """
import sys
from streamrl.executor.execute import execute
from streamrl.runfile.files import load_run
path, what, *changes = sys.argv[1:]
execute(load_run(path, changes), what == "resume")
"""
"""The same as `streamrl execute`, without its figures."""


def main() -> None:
    """Run the requested cells, print a line for each run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--worlds", nargs="*", default=["simulated", "executed"])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--cells", type=Path, help="file that keeps finished cells; cells in it are not run again"
    )
    arguments = parser.parse_args()
    matrix = Matrix(arguments.cells)
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as name:
        if "simulated" in arguments.worlds:
            matrix.fill(
                simulated_keys(arguments.seeds), simulate, ProcessPoolExecutor(arguments.workers)
            )
        if "executed" in arguments.worlds:
            make_model(Path(name))
            run = partial(execute, Path(name))
            with ray_cluster():
                matrix.fill(
                    executed_keys(arguments.seeds), run, ThreadPoolExecutor(arguments.workers)
                )
    cells = sorted(matrix.cells.values(), key=lambda cell: cell.key)
    for cell in cells:
        print(json.dumps(asdict(cell)))
    kept = arguments.page.read_text().partition(END)[2] if arguments.page.exists() else "\n"
    arguments.page.write_text("\n".join([*page(cells), "", END]) + kept)
    bad = [cell for cell in cells if not is_sound(cell)]
    print(json.dumps({"name": "faults.runs", "value": len(cells), "unit": "runs"}))
    print(json.dumps({"name": "faults.unsound", "value": len(bad), "unit": "runs"}))
    sys.exit(1 if bad else 0)


class Matrix:
    """The finished cells. They are also in a file, so an interrupted benchmark can continue."""

    def __init__(self, path: Path | None) -> None:
        self.cells: dict[Key, Cell] = {}
        self._path = path
        if path is not None and path.exists():
            found = (
                msgspec.json.decode(line, type=Cell) for line in path.read_bytes().splitlines()
            )
            self.cells = {cell.key: cell for cell in found}

    def fill(self, keys: list[Key], run: Callable[[Key], Cell], pool: Executor) -> None:
        """Run the cells that are not finished."""
        left = [key for key in keys if key not in self.cells]
        with make_progress() as progress, pool:
            task = progress.add_task(
                keys[0].world, total=len(keys), completed=len(keys) - len(left), facts=""
            )
            for done in as_completed([pool.submit(run, key) for key in left]):
                cell = done.result()
                self.cells[cell.key] = cell
                progress.advance(task)
                if self._path is not None:
                    with self._path.open("ab") as file:
                        file.write(msgspec.json.encode(cell) + b"\n")


def is_sound(cell: Cell) -> bool:
    """Return whether a run ended by itself with a balanced ledger, all rollouts and no wrong weights."""
    return cell.is_complete and cell.books.is_clean and not cell.ledger and not cell.hung


# Simulated ----------------------------------------------------------------------------------------


def simulated_keys(seeds: int) -> list[Key]:
    """Return the keys of all simulated cells."""
    kinds = ["none", *(kind for kind in KINDS if kind != "driver-dies")]
    return [
        Key("simulated", system, kind, seed)
        for system in SIMULATED
        for kind in kinds
        for seed in range(seeds)
    ]


def simulate(key: Key) -> Cell:
    """Simulate a run with one fault or without faults."""
    _, system, kind, seed = key
    changes = [f"seed={seed}", f"policies.system={system}"]
    if system == "colocated":
        changes.append("trainer.pool=h20")
    run = load_run(HERE / "faults.toml", changes)
    if kind != "none":
        said = SAID["simulated"].get(cast(FaultKind, kind), {})
        run = replace(run, faults=(FaultConfig(kind=cast(FaultKind, kind), count=1, **said),))
    costs = Costs.load(run)
    world = SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run))
    hung = False
    try:
        world.run()
    except RuntimeError:
        hung = True
    trace = world.trace
    strikes = () if world.faults is None else world.faults.strikes
    noticed = [(strike.fault.config.kind, strike.time) for strike in strikes]
    return Cell(
        key=key,
        is_complete=world.engine.has_all_steps,
        hung=hung,
        seconds=trace.entries[-1].time,
        books=balance([trace]),
        ledger=describe_faults(ledger_of_traces([trace])),
        noticed=dict(_noticed(trace, noticed)),
    )


TELLS: dict[FaultKind, tuple[type[Event], type | None, str]] = {
    "replica-dies": (ReplicaLost, None, ""),
    "replica-hangs": (ReplicaLost, None, "no sign of life"),
    "replica-garbles": (Failed, Generate, "answer"),
    "trainer-dies-training": (TrainerLost, None, ""),
    "trainer-dies-pushing": (TrainerLost, None, ""),
    "trainer-dies-saving": (TrainerLost, None, ""),
    "link-drops": (Failed, PushWeights, ""),
    "disk-full": (Failed, SaveCheckpoint, ""),
}
"""How a fault is detected: type of the event, type of the command that fails, and a part of the
reason.
"""


def _noticed(
    trace: Trace, strikes: Sequence[tuple[FaultKind, float]]
) -> Iterator[tuple[str, float]]:
    """Yield each detected fault's kind, and the seconds until its detection."""
    for kind, struck_at in strikes:
        if kind not in TELLS:
            continue
        event_type, command_type, words = TELLS[kind]
        for entry in trace.entries:
            event: Any = entry.event
            if entry.time < struck_at or not isinstance(event, event_type):
                continue
            fits = command_type is None or isinstance(event.command, command_type)
            if fits and words in event.reason:
                yield kind, entry.time - struck_at
                break


# Executed -----------------------------------------------------------------------------------------


@contextmanager
def ray_cluster() -> Iterator[int | None]:
    """Run a Ray cluster on this machine, if Ray is installed; yield the process id of its head."""
    if find_spec("ray") is None:
        yield None
        return
    words = ["start", "--head", "--block", f"--port={RAY.partition(':')[2]}", "--num-cpus=16"]
    words += ["--include-dashboard=false"]
    words += ['--resources={"pool-local": 1}', f"--object-store-memory={200 * 2**20}"]
    command = [str(Path(sys.executable).parent / "ray"), *words]
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
        try:
            yield head.pid
        finally:
            head.terminate()


def executed_keys(seeds: int) -> list[Key]:
    """Return one run without faults for each installed setting, and one run with all faults for each seed.

    Settings with a back end whose workers start slowly get one order of faults only.
    """
    found = {
        name: setup
        for name, setup in EXECUTED.items()
        if setup.needs is None or find_spec(setup.needs)
    }
    for name in EXECUTED.keys() - found.keys():
        print(f"left out: {name}: {EXECUTED[name].needs} is not installed", file=sys.stderr)
    calm = [Key("executed", name, "none", 0) for name in found]
    return calm + [
        Key("executed", name, "all", seed)
        for name, setup in found.items()
        for seed in range(seeds if setup.is_plain else 1)
    ]


def execute(directory: Path, key: Key) -> Cell:
    """Execute a run to its end. Resume it if its driver was killed."""
    _, system, kind, seed = key
    place = directory / f"{system}-{kind}-{seed}"
    place.mkdir()
    table = (HERE / "faults-executed.toml").read_text()
    (place / "run.toml").write_text(table + ("" if kind == "none" else _plan(seed)))
    begun = time.monotonic()
    status = _run(place, system, seed, "begin")
    while status == -signal.SIGKILL:
        status = _run(place, system, seed, "resume")
    output = place / "run"
    traces = read_traces(output)
    books = balance(traces)
    if (
        system == "stream-sync"
    ):  # staleness 0: rollouts are sampled from the weights that they are trained with
        gaps = [line.get("logprob_gap", 0.0) for line in read_metrics(output)]
        books = books._replace(wrong=books.wrong + sum(gap > LARGEST_GAP for gap in gaps))
    struck = read_struck(output)
    noticed, mended = {}, {}
    for number, trace in enumerate(traces, start=1):
        own = [each for each in struck if each.leg == number]
        noticed |= dict(_noticed(trace, [(each.kind, each.time) for each in own]))
        mended |= {
            each.kind: seconds for each in own if (seconds := _mended(trace, each)) is not None
        }
    for each in struck:
        if each.kind == "driver-dies":
            mended[each.kind] = _resumed(output, traces[each.leg]) - each.unix_time
    return Cell(
        key=key,
        is_complete=status == 0 and (kind == "none" or len(struck) == len(KINDS)),
        hung=status == HUNG,
        seconds=time.monotonic() - begun,
        books=books,
        ledger=describe_faults(ledger_of_traces(traces)),
        noticed=noticed,
        mended=mended,
    )


HUNG = 1000
"""Exit status of a command that was killed because it did not end."""


def _run(place: Path, system: str, seed: int, what: str) -> int:
    changes = [*EXECUTED[system].settings, f"seed={seed}"]
    words = [sys.executable, "-c", COMMAND, str(place / "run.toml"), what, *changes]
    with (place / "log").open("ab") as log:
        try:
            return subprocess.run(
                words, stdout=log, stderr=log, timeout=MOST_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return HUNG


def _plan(seed: int) -> str:
    """Return all faults as text of a run file, in the order of the seed, some steps apart."""
    kinds = Random(seed).sample(KINDS, len(KINDS))
    lines = []
    for place, kind in enumerate(kinds):
        lines += ["", "[[faults]]", f'kind = "{kind}"', f"step = {APART // 2 + APART * place}"]
        said = SAID["executed"].get(kind, {})
        lines += [
            f'{name} = "{value} s"' if name == "duration" else f"{name} = {value}"
            for name, value in said.items()
        ]
    return "\n".join(lines) + "\n"


def _mended(trace: Trace, struck: StruckFault) -> float | None:
    """Return the seconds from a fault until it is repaired; None if this start of the run ends earlier.

    A fault is repaired when the next new step is made, and a lost replica has been replaced.
    """
    made = [(e.time, e.event.version) for e in trace.entries if isinstance(e.event, Stepped)]
    newest = max((version for time, version in made if time <= struck.time), default=0)
    ends = [next((t for t, version in made if t > struck.time and version > newest), None)]
    if struck.kind in ("replica-dies", "replica-hangs"):
        lost_at = _first(trace, ReplicaLost, struck.time)
        ends.append(None if lost_at is None else _first(trace, ReplicaStarted, lost_at))
    known = [end for end in ends if end is not None]
    return max(known) - struck.time if len(known) == len(ends) else None


def _first(trace: Trace, kind: type[Event], after: float) -> float | None:
    """Return the time of the first event of a kind after an instant."""
    times = (e.time for e in trace.entries if e.time > after and isinstance(e.event, kind))
    return next(times, None)


def _resumed(output: Path, trace: Trace) -> float:
    """Return the time of the first step after the driver was killed and resumed, in seconds since 1970."""
    last = read_metrics(output)[-1]["time"]
    began_at = (output / "metrics.jsonl").stat().st_mtime - float(last)
    return began_at + next(e.time for e in trace.entries if isinstance(e.event, Stepped))


if __name__ == "__main__":
    main()
