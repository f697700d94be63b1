"""Compare simulations of multi-turn runs with executed ones on this machine: `make bench-episodes`.

    tools   examples/agentic-tools.toml: sums with two tools
    retry   benchmarks/agentic-retry.toml: reasoning-gym's chain_sum, with another attempt after a wrong answer
    slow    the sums with tools that take seconds and stall, a time limit, 32 sandboxes, and a synchronous trainer

The costs come from a profile of this machine, which is measured before all runs. Each run file is executed once
with another seed. Then it is executed `--rounds` times and compared with two simulations:

    before      draws from the episodes of the run with the other seed
    recorded    has the episodes of the run itself

As in `make bench-reality`, a few points of the profile are measured again around each run, here also beside
environments. Simulated seconds are scaled by the slowdown. Finished profiles and runs are kept in build/episodes, and an interrupted benchmark continues
there. Beside each trace, cpu.json has the CPU seconds of each role. No other program may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.bench_agents import OUT as MODELS
from benchmarks.bench_agents import make as make_model
from benchmarks.reality_runs import as_recorded, pace_of, profile, with_profile
from streamrl.engine.messages import Event, Stepped
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace
from streamrl.executor.environment.session import BOOT
from streamrl.executor.execute import execute
from streamrl.executor.launchers import launcher, worker
from streamrl.executor.profiling.environment_times import MeasuredEnvironment
from streamrl.executor.profiling.measurements import Limits
from streamrl.record.metrics import Metrics, measure
from streamrl.record.recorded_workload import informative_share
from streamrl.report.fidelity import with_section
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.fidelity.scorecard import stamp
from streamrl.sim.world import simulate

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "episodes"
STEPS, ROUNDS = 16, 3
LEARNING_RATE = 1e-6
"""So low that lengths do not drift within a run. With a rate of 4e-4, the output tokens of an episode of *retry* doubled
within 16 steps: 102, 143 and 190 in the mean of three runs. No simulation before a run can know them.
"""
SECTION = "Simulated and executed"
SLOW_TOOLS = [
    f"python:{ROOT / 'benchmarks' / 'slow_tools.py'}:{name}" for name in ("add", "subtract")
]
SLOW = (
    f"environment.tools={json.dumps(SLOW_TOOLS)}",
    "environment.sandboxes=32",
    "environment.action_time_limit=2 s",
    "policies.system=stream-sync",
)
CAUSES = {"tool": "tool", "environment-start": "environment start"}
"""Causes of idle time that have a row among the stages."""
LEAST = 0.02
"""Share of a step below which a stage has no error in the table."""
SOURCES = ("measured", "before", "recorded")


class Case(NamedTuple):
    """A run file that is executed and simulated."""

    run_file: str
    model: str
    """Kind of its model and prompts, in benchmarks/bench_agents.py."""
    changes: tuple[str, ...] = ()


CASES = {
    "tools": Case("examples/agentic-tools.toml", "agent"),
    "retry": Case("benchmarks/agentic-retry.toml", "quickstart"),
    "slow": Case("examples/agentic-tools.toml", "agent", SLOW),
}


class Stages(msgspec.Struct, frozen=True):
    """Seconds of a mean step, and of its stages."""

    step: float
    stages: dict[str, float]

    @classmethod
    def of(cls, found: Metrics) -> Stages:
        """Return those of a run. A cause of idle time counts with its GPU-seconds."""
        gpus = sum(found.num_gpus.values())
        idle = {name: found.idle.get(each, 0.0) for each, name in CAUSES.items()}
        waits = {name: share * gpus * found.step_time for name, share in idle.items()}
        return cls(found.step_time, {**found.stages, **waits})


class Repeat(msgspec.Struct, frozen=True):
    """One execution and its simulations."""

    measured: Stages
    before: Stages
    recorded: Stages
    pace: float
    """Slowdown of the machine around the run, relative to its profile."""


def make_run(case: Case, seed: int, output: Path) -> Run:
    """Return the run of a case."""
    folder = make_model(case.model, 0)
    keys = {
        "seed": seed,
        "model.path": folder / "model",
        "workload.prompts": folder / "prompts.jsonl",
        "algorithm.steps": STEPS,
        "algorithm.learning_rate": LEARNING_RATE,
        "execute.output": output,
        "execute.checkpoint_every": 10**6,
    }
    settings = [f"{key}={value}" for key, value in keys.items()]
    return load_run(ROOT / case.run_file, [*settings, *case.changes])


def limits_of(run: Run) -> Limits:
    """Return the limits of a profile for a run; a turn is prefilled with its whole context."""
    assert run.environment is not None, "all cases have turns"
    return Limits(
        max_running=run.rollout.max_running,
        max_context=run.environment.max_context,
        max_tokens_per_pass=run.trainer.max_tokens_per_pass,
    )


def run_case(name: str, rounds: int, *, is_quick: bool) -> list[Repeat]:
    """Profile the model of a case, execute it, and return its repeats; keep them in files."""
    case, home = CASES[name], OUT / name
    first = make_run(case, 1, home / "first")
    limits, costs = limits_of(first), OUT / f"{case.model}.toml"
    folder = make_model(case.model, 0)
    if not costs.exists():
        own = MeasuredEnvironment.of(first.environment, first.workload)
        profile(MODELS, folder.name, costs, is_quick=is_quick, limits=limits, environment=own)
    statistics = execute_once(first)
    return [
        _repeat(case, home / str(number), statistics, costs, limits) for number in range(rounds)
    ]


def _repeat(case: Case, home: Path, first: Path, costs: Path, limits: Limits) -> Repeat:
    kept = home / "repeat.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Repeat)
    run, model = make_run(case, 0, home / "run"), make_model(case.model, 0).name
    own = MeasuredEnvironment.of(run.environment, run.workload)
    pace_before = pace_of(MODELS, model, costs, limits, own)
    file = execute_once(run)
    pace = (pace_before + pace_of(MODELS, model, costs, limits, own)) / 2
    found = compare(read_trace(file), file, first, costs, pace)
    kept.write_bytes(msgspec.json.encode(found))
    return found


def compare(trace: Trace, file: Path, first: Path, costs: Path, pace: float) -> Repeat:
    """Simulate an executed run, with the episodes of the run at `first` and with its own."""
    measured = measure(trace)
    before = simulate(with_profile(with_first(trace.run, first), costs, pace))
    recorded = as_recorded(trace, file, costs, measured.counted_steps, pace)
    return Repeat(Stages.of(measured), Stages.of(measure(before)), Stages.of(recorded), pace)


def execute_once(run: Run) -> Path:
    """Execute a run unless it has been executed, and return its trace file."""
    output = Path(run.execute.output)
    if not (output / "done").exists():
        shutil.rmtree(output, ignore_errors=True)
        clock = CpuClock()
        execute(run, watch=clock)
        (output / "cpu.json").write_text(json.dumps(clock.steps))
        shutil.rmtree(output / "checkpoints")
        (output / "done").touch()
    return output / "trace.jsonl"


class CpuClock:
    """Reads the CPU seconds of each role since its start, after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def __call__(self, event: Event, state: State, now: float) -> None:
        """Take an event of the run."""
        if isinstance(event, Stepped):
            self.steps.append({"time": now, **cpu_times()})


def cpu_times() -> Counter[str]:
    """Return the CPU seconds of this process and its children by role; the thread that serves a replica is apart."""
    found = Counter(controller=sum(os.times()[:2]))
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process has ended
            words, whole = process.cmdline(), sum(process.cpu_times()[:4])
            if launcher.REPLICA in words:
                first = process.threads()[0]
                served = first.user_time + first.system_time
                found.update(server=served, replica=whole - served)
            elif BOOT in words:
                found["environments"] += whole
            else:
                found["trainer" if worker.MODULE in words else "other"] += whole
    return found


def with_first(run: Run, first: Path) -> Run:
    """Return a run whose simulation draws from the episodes of an executed run."""
    lengths = LengthsConfig(kind="episodes", source=str(first.parent))
    share = informative_share(read_trace(first))
    workload = msgspec.structs.replace(run.workload, lengths=lengths, informative_share=share)
    changed: Run = msgspec.structs.replace(run, workload=workload)
    return changed


def error(repeats: Sequence[Repeat], source: str) -> float:
    """Return the relative error of the median simulated step against the median executed one."""
    return middle(repeats, source) / middle(repeats, "measured") - 1


def middle(repeats: Sequence[Repeat], source: str, stage: str | None = None) -> float:
    """Return the median seconds of a step, or of one of its stages."""
    found = [getattr(one, source) for one in repeats]
    return median(one.step if stage is None else one.stages.get(stage, 0.0) for one in found)


def spread(repeats: Sequence[Repeat]) -> float:
    """Return the step time of the slowest execution over the fastest, less 1."""
    steps = [one.measured.step for one in repeats]
    return max(steps) / min(steps) - 1


def section(found: Mapping[str, Sequence[Repeat]]) -> list[str]:
    """Return the lines of the page's section."""
    most = max(map(len, found.values()))
    lines = [
        f"`make bench-episodes` writes this section ({stamp()}). It executes three run files on the CPU cores of one",
        f"machine, {most} times each, with models of half a million parameters:",
        "",
        "- *tools*: sums with two tools;",
        "- *retry*: sums with three attempts;",
        "- *slow*: tools that take 0.15 s in the median and stall in 2 % of calls, a limit of 2 s, 32 sandboxes, and a",
        "  trainer that waits for all episodes of a step.",
        "",
        "Costs come from a profile that was measured before. *Before* draws from the episodes of an earlier run with",
        "another seed. *Recorded* has the episodes of the run itself. The learning rate is 1e-6, with which lengths do",
        "not drift. Simulated seconds are scaled by the pace of the machine around each run, which is measured for roles alone and",
        "beside environments: the speed of its cores changes within minutes. Values are medians. Waits for tools and for starts of",
        "environments are idle GPU-seconds of a step. Stages overlap, so they do not sum to the step. Training passes are",
        "simulated too short: they are short calls, and other roles empty the caches between them.",
        "",
        "| run | stage | executed | before | | recorded | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, repeats in found.items():
        stages = dict.fromkeys(stage for one in repeats for stage in one.measured.stages)
        lines += [_row(f"**{name}**", "step", repeats, None)]
        lines += [_row("", stage, repeats, stage) for stage in stages]
    rows = [
        f"{name}: {spread(repeats):.1%}, pace {median(one.pace for one in repeats):.2f}"
        for name, repeats in found.items()
    ]
    return [
        *lines,
        "",
        f"The slowest step of repeated runs over the fastest, less 1, and the pace of the machine: {'; '.join(rows)}.",
    ]


def _row(name: str, label: str, repeats: Sequence[Repeat], stage: str | None) -> str:
    measured, *others = (middle(repeats, source, stage) for source in SOURCES)
    cells = [f"{measured:.3f} s"]
    for value in others:
        is_clear = measured >= LEAST * middle(repeats, "measured")
        cells += [f"{value:.3f} s", f"{value / measured - 1:+.1%}" if is_clear else ""]
    return f"| {name} | {label} | {' | '.join(cells)} |"


def main() -> None:
    """Print one JSON object per figure; with --page, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="profiles of few points")
    parser.add_argument("--page", type=Path, help="docs/agentic.md, whose section is written")
    args = parser.parse_args()
    found = {name: run_case(name, args.rounds, is_quick=args.quick) for name in args.cases}
    for name, repeats in found.items():
        for source in SOURCES[1:]:
            value = error(repeats, source)
            figure = {"name": f"{name}: error of the step, {source}", "value": value}
            print(json.dumps({**figure, "unit": "ratio"}))
    print("\n".join(section(found)), file=sys.stderr)
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_section(page, SECTION, section(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
