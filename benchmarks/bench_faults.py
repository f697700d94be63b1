"""Chaos: every fault in every system on five seeds, simulated and executed; writes docs/reliability.md.

A simulated cell is a run with one fault at a random moment, against the same run without. An executed run of a system
meets all faults one after the other, in an order drawn by its seed, on a random two-layer model: a restart takes most of
the time, since a worker imports torch. Where the driver is killed, the run is resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, get_args

from msgspec.structs import replace

from benchmarks.fault_books import Books, balance
from benchmarks.fault_model import make_model
from executor.faults import StruckFault, read_struck
from sim.costs.costs import Costs
from sim.costs.fill import fill_policies
from sim.world import SimWorld
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
from streamrl.record.run_lines import read_metrics
from streamrl.record.trace import Trace, read_trace
from streamrl.runfile.faults_config import FaultConfig, FaultKind
from streamrl.runfile.reading import load_run
from streamrl.runfile.units import Duration
from streamrl.workload.workload import SimulatedWorkload

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reliability.md"
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
SEEDS = 5
SIMULATED = ("stream-sync", "one-step-async", "stream-async", "fully-async", "colocated")
EXECUTED = SIMULATED[:-1]  # the built-in back ends have no GPUs that both sides share
MOST_SECONDS = 240.0  # of one command; a run that takes longer hangs
APART = 4
"""Steps between two faults of an executed run: the first is mended before the next one strikes."""
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
"""Nats by which log-probabilities of replica and trainer may differ at staleness 0: their engines' rounding is a
hundredth of it, a step of this model's a hundred times it."""
COMMAND = "import sys; sys.argv[0] = 'streamrl'; from streamrl.cli import main; main()"


@dataclass(frozen=True)
class Cell:
    """What became of one run."""

    world: str
    system: str
    seed: int
    kind: str
    """The fault; "all" in an executed run, "none" where it is undisturbed."""
    is_complete: bool
    hung: bool
    seconds: float
    books: Books
    noticed: dict[str, float] = field(default_factory=dict)
    """Seconds from a fault to the event that tells of it, by kind."""
    mended: dict[str, float] = field(default_factory=dict)
    """Seconds from a fault to the next new step, and to a serving replacement of what was lost."""


def main() -> None:
    """Run what is asked for, print a line for each run and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--worlds", nargs="*", default=["simulated", "executed"])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    began_at = time.monotonic()
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as name:
        if "simulated" in arguments.worlds:
            cells += simulate_all(arguments.seeds, arguments.workers)
        if "executed" in arguments.worlds:
            cells += execute_all(Path(name), arguments.seeds, arguments.workers)
    for cell in cells:
        print(json.dumps({**cell.__dict__, "books": cell.books._asdict()}))
    minutes = (time.monotonic() - began_at) / 60
    arguments.page.write_text("\n".join(page(cells, arguments.seeds, minutes)) + "\n")
    bad = [cell for cell in cells if not is_sound(cell)]
    print(json.dumps({"name": "faults.runs", "value": len(cells), "unit": "runs"}))
    print(json.dumps({"name": "faults.unsound", "value": len(bad), "unit": "runs"}))
    sys.exit(1 if bad else 0)


def is_sound(cell: Cell) -> bool:
    """Whether a run came to its end with all rollouts accounted for and no wrong weights."""
    books = cell.books
    return cell.is_complete and not (cell.hung or books.lost or books.twice or books.wrong)


# Simulated ----------------------------------------------------------------------------------------


def simulate_all(seeds: int, workers: int) -> list[Cell]:
    """Simulate every cell."""
    kinds = ["none", *(kind for kind in KINDS if kind != "driver-dies")]
    cells = [
        (system, kind, seed) for system in SIMULATED for kind in kinds for seed in range(seeds)
    ]
    with make_progress() as progress, ProcessPoolExecutor(workers) as pool:
        task = progress.add_task("simulated", total=len(cells), facts="")
        found = []
        for cell in as_completed([pool.submit(simulate, *each) for each in cells]):
            found.append(cell.result())
            progress.advance(task)
    return sorted(found, key=lambda cell: (cell.system, cell.kind, cell.seed))


def simulate(system: str, kind: Any, seed: int) -> Cell:
    """Simulate a run with one fault, or with none."""
    changes = [f"seed={seed}", f"policies.system={system}"]
    if system == "colocated":
        changes.append("trainer.pool=h20")
    run = load_run(HERE / "faults.toml", changes)
    if kind != "none":
        said = SAID["simulated"].get(kind, {})
        run = replace(run, faults=(FaultConfig(kind=kind, count=1, **said),))
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
        world="simulated",
        system=system,
        seed=seed,
        kind=kind,
        is_complete=world.engine.has_all_steps,
        hung=hung,
        seconds=trace.entries[-1].time,
        books=balance([trace]),
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
"""The event that tells of a fault: its type, that of the command that fails, and a part of its reason."""


def _noticed(
    trace: Trace, strikes: Sequence[tuple[FaultKind, float]]
) -> Iterator[tuple[str, float]]:
    """Yield the seconds after which each fault was told of."""
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


def execute_all(directory: Path, seeds: int, workers: int) -> list[Cell]:
    """Execute every system without faults, and with all of them in an order by seed."""
    make_model(directory)
    wanted = [(system, None) for system in EXECUTED]
    wanted += [(system, seed) for seed in range(seeds) for system in EXECUTED]
    with make_progress() as progress, ThreadPoolExecutor(workers) as pool:
        task = progress.add_task("executed", total=len(wanted), facts="")
        found = []
        for cell in as_completed([pool.submit(execute, directory, *each) for each in wanted]):
            found.append(cell.result())
            progress.advance(task)
    return sorted(found, key=lambda cell: (cell.system, cell.kind, cell.seed))


def execute(directory: Path, system: str, seed: int | None) -> Cell:
    """Execute a run to its end, and resume it where its driver was killed."""
    place = directory / f"{system}-{seed}"
    place.mkdir()
    table = (HERE / "faults-executed.toml").read_text()
    (place / "run.toml").write_text(table + ("" if seed is None else _plan(seed)))
    begun = time.time()
    status = _run(place, system, seed)
    while status == -signal.SIGKILL:
        status = _run(place, system, seed, "--resume")
    output = place / "run"
    paths = [*sorted(output.glob("trace.*.jsonl")), output / "trace.jsonl"]
    legs = [read_trace(path) for path in paths]
    books = balance(legs)
    if (
        system == "stream-sync"
    ):  # each log-probability was sampled from the very weights that it is trained at
        gaps = [line.get("logprob_gap", 0.0) for line in read_metrics(output)]
        books = books._replace(wrong=books.wrong + sum(gap > LARGEST_GAP for gap in gaps))
    struck = read_struck(output)
    noticed, mended = {}, {}
    for leg, trace in enumerate(legs, start=1):
        own = [each for each in struck if each.leg == leg]
        noticed |= dict(_noticed(trace, [(each.kind, each.time) for each in own]))
        mended |= {
            each.kind: seconds for each in own if (seconds := _mended(trace, each)) is not None
        }
    for each in struck:
        if each.kind == "driver-dies":
            mended[each.kind] = _resumed(output, legs[each.leg]) - each.unix_time
    return Cell(
        world="executed",
        system=system,
        seed=seed or 0,
        kind="none" if seed is None else "all",
        is_complete=status == 0 and (seed is None or len(struck) == len(KINDS)),
        hung=status == HUNG,
        seconds=time.time() - begun,
        books=books,
        noticed=noticed,
        mended=mended,
    )


HUNG = 1000
"""Stands for the exit status of a command that came to no end."""


def _run(place: Path, system: str, seed: int | None, *more: str) -> int:
    changes = [f"policies.system={system}", f"seed={seed or 0}"]
    words = [sys.executable, "-c", COMMAND, "execute", str(place / "run.toml"), *more]
    words += [word for change in changes for word in ("--set", change)]
    with (place / "log").open("ab") as log:
        try:
            return subprocess.run(
                words, stdout=log, stderr=log, timeout=MOST_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return HUNG


def _plan(seed: int) -> str:
    """Return all faults as a run file has them, in an order of the seed's, each some steps after the one before."""
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
    """Return the seconds from a fault to the next new step, and to a replacement of the replica that it cost."""
    newest, stepped_at, started_at, is_lost = 0, None, struck.time, False
    for entry in trace.entries:
        event = entry.event
        if isinstance(event, Stepped) and entry.time <= struck.time:
            newest = max(newest, event.version)
        elif entry.time > struck.time:
            if isinstance(event, Stepped) and event.version > newest and stepped_at is None:
                stepped_at = entry.time
            is_lost = is_lost or isinstance(event, ReplicaLost)
            if is_lost and isinstance(event, ReplicaStarted) and started_at == struck.time:
                started_at = entry.time
        if stepped_at is not None and entry.time > stepped_at and not is_lost:
            break
    if stepped_at is None:
        return None
    is_of_replica = struck.kind in ("replica-dies", "replica-hangs")
    return max(stepped_at, started_at if is_of_replica else stepped_at) - struck.time


def _resumed(output: Path, leg: Trace) -> float:
    """Return when the leg after a killed driver made its first step, in seconds since 1970."""
    last = read_metrics(output)[-1]["time"]
    began_at = (output / "metrics.jsonl").stat().st_mtime - float(last)
    return began_at + next(e.time for e in leg.entries if isinstance(e.event, Stepped))


# The page -----------------------------------------------------------------------------------------

FAULTS: dict[FaultKind, str] = {
    "replica-dies": "A replica's process is killed. Its socket ends, so its rollouts go to others and another replica "
    "is started in its place, with the newest weights.",
    "replica-hangs": "A replica's process is stopped (SIGSTOP). It answers no ping and computes nothing for "
    "`execute.patience`; then it is killed and replaced.",
    "replica-garbles": "A replica answers with another rollout's id, with tokens that are not there, or does not say "
    "whose they are. The answer is refused before anything of it is entered, and the rollout is generated again.",
    "trainer-dies-training": "The trainer is killed between micro-batches. It comes up again at its last checkpoint; "
    "replicas that have newer weights load that, and what was sampled from those is dropped.",
    "trainer-dies-pushing": "The same while it writes weights: none of them is ever loaded, and what it wrote is removed.",
    "trainer-dies-saving": "The same while it writes a checkpoint, which is complete or not there: the one before counts.",
    "link-slows": "Pushes take 20 times as long for a while. Nothing is to be mended.",
    "link-drops": "A push is lost. It is made again, up to `policies.max_attempts` times in a row, with the newest weights.",
    "verifier-stalls": "The scoring processes are stopped for a while. Rewards wait; were it for longer than the limit "
    "of a command, the verifier would be killed and asked again.",
    "disk-full": "A checkpoint is written to a disk without room. It is tried again, up to `policies.max_attempts` times "
    "in a row, and the one before stays as it was.",
    "driver-dies": "The process that decides is killed (SIGKILL), which no simulation has. Its workers end, and "
    "`--resume` goes on from the newest checkpoint; faults that have struck do not strike again.",
}


def page(cells: list[Cell], seeds: int, minutes: float) -> Iterator[str]:
    """Yield the lines of docs/reliability.md."""
    yield "# What breaks, and what becomes of the run"
    yield ""
    yield (
        f"`make faults` wrote this page: {seeds} seeds, {len(cells)} runs, {minutes:.0f} minutes on "
        f"{os.cpu_count()} cores. Faults are planned in a run file (`[[faults]]`) and strike simulated and executed runs "
        "by the same plan. *Lost* are rollouts that were drawn and neither trained on nor dropped with a reason, *twice* "
        "those in two steps that count, *wrong* those trained on though their weights were taken back, and steps in which "
        "replica and trainer disagree about log-probabilities; *hung* is what came to no end by itself."
    )
    yield ""
    yield from (f"- **{kind}** {text}" for kind, text in FAULTS.items())
    simulated = [cell for cell in cells if cell.world == "simulated"]
    executed = [cell for cell in cells if cell.world == "executed"]
    if simulated:
        yield from _simulated_table(simulated)
    if executed:
        yield from _executed_tables(executed)


def _simulated_table(cells: list[Cell]) -> Iterator[str]:
    calm = {(c.system, c.seed): c for c in cells if c.kind == "none"}
    yield from ("", "## Simulated", "")
    yield (
        "Qwen2.5-7B, replicas on 8 H20 and a trainer on 8 H800 (colocated: both on 8 H20), `benchmarks/faults.toml`: "
        f"8 steps of {median(c.seconds for c in calm.values()) / 8:.0f} s in the median, a checkpoint every third. A cell "
        "is how many runs had all their steps, and the median of the seconds that they took longer than without the fault."
    )
    yield ""
    yield f"| fault | {' | '.join(SIMULATED)} | lost | twice | wrong | hung | noticed after |"
    yield f"|---{'|--:' * (len(SIMULATED) + 5)}|"
    for kind in KINDS:
        own = [cell for cell in cells if cell.kind == kind]
        if own:
            columns = (_cell([c for c in own if c.system == system], calm) for system in SIMULATED)
            yield f"| {kind} | {' | '.join(columns)} | {_sums(own)} | {_seconds(own, kind)} |"
    yield f"| none | {' | '.join(f'{_complete([c for c in calm.values() if c.system == s])}' for s in SIMULATED)} | {_sums([*calm.values()])} | |"


def _executed_tables(cells: list[Cell]) -> Iterator[str]:
    yield from ("", "## Executed", "")
    yield (
        "A random two-layer model on CPUs, two replicas and a trainer in processes of their own, "
        "`benchmarks/faults-executed.toml`: each run meets all eleven faults, and is resumed after the one that kills the driver. "
        "`execute.patience` is 2 s. *Mended* is when the next new step is made and what was lost serves again; starting a "
        "worker, which imports torch, is most of it."
    )
    yield ""
    yield "| system | complete | lost | twice | wrong | hung | dropped or rolled back | undisturbed | with all faults |"
    yield f"|---{'|--:' * 8}|"
    for system in EXECUTED:
        own = [c for c in cells if c.system == system and c.kind == "all"]
        (calm,) = (c for c in cells if c.system == system and c.kind == "none")
        dropped = sum(c.books.dropped + c.books.rolled_back for c in own) / max(1, len(own))
        drawn = sum(c.books.drawn for c in own) / max(1, len(own))
        yield (
            f"| {system} | {_complete(own)} | {_sums(own)} | {dropped:.0f} of {drawn:.0f} rollouts | "
            f"{calm.seconds:.0f} s | {median(c.seconds for c in own):.0f} s |"
        )
    yield from (
        "",
        "| fault | noticed after | at most | mended after | at most |",
        "|---|--:|--:|--:|--:|",
    )
    own = [c for c in cells if c.kind == "all"]
    for kind in KINDS:
        columns = (
            _range([getattr(c, name)[kind] for c in own if kind in getattr(c, name)])
            for name in ("noticed", "mended")
        )
        yield f"| {kind} | {' | '.join(columns)} |"


def _cell(cells: list[Cell], calm: dict[tuple[str, int], Cell]) -> str:
    lost = median(c.seconds - calm[c.system, c.seed].seconds for c in cells)
    return f"{_complete(cells)}, {lost:+.0f} s"


def _complete(cells: list[Cell]) -> str:
    return f"{sum(cell.is_complete for cell in cells)}/{len(cells)}"


def _sums(cells: list[Cell]) -> str:
    totals: Counter[str] = Counter()
    for cell in cells:
        totals.update(lost=cell.books.lost, twice=cell.books.twice, wrong=cell.books.wrong)
        totals.update(hung=cell.hung)
    return " | ".join(str(totals[name]) for name in ("lost", "twice", "wrong", "hung"))


def _seconds(cells: list[Cell], kind: str) -> str:
    found = [cell.noticed[kind] for cell in cells if kind in cell.noticed]
    return f"{median(found):.0f} s" if found else ""


def _range(found: list[float]) -> str:
    return f"{median(found):.2f} s | {max(found):.2f} s" if found else " | "


if __name__ == "__main__":
    main()
