"""Train small agents in environments, and score them on held-out prompts before and after: `make bench-agents`.

    tools      examples/agentic-tools.toml: sums with two tools
    retry      benchmarks/agentic-retry.toml: reasoning-gym's chain_sum, with another attempt after a wrong answer
    verifiers  benchmarks/agentic-verifiers.toml: the sums with two tools in a `ToolEnv` of the verifiers package

A score is the mean reward of 4 episodes of each of 128 held-out prompts, under fixed weights. The model has half a
million parameters; a supervised warm-up taught it the task and to stop too early (examples/make_agent.py,
examples/make_quickstart.py). Each seed has its own model, prompts and held-out prompts.

The interval of a seed's gain is that of the prompts: 95 %, normal approximation, of the paired differences of prompts'
means. The interval of an environment's gain is that of its seeds: 95 %, Student's t.

Finished trainings and scores are kept in build/agents, and an interrupted run continues there. One model is trained at
a time, and each process computes with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import msgspec

from streamrl.report.fidelity import section_of, with_section

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "agents"
NUM_PROMPTS, NUM_SAMPLES = 128, 4
MAKERS = {"agent": "make_agent.py", "quickstart": "make_quickstart.py"}
MODULES = ROOT / "tests"
"""Has the module two_tools, which the verifiers package loads by its name."""
SECTION = "Trained agents"
FEWEST_SEEDS = 3
"""Seeds from which a mean over seeds is given."""
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t, by the number of seeds."""


class Case(NamedTuple):
    """An environment to train in."""

    run_file: str
    data: str
    """Folder of its model and prompts, below build."""
    steps: int
    task: str


CASES = {
    "tools": Case("examples/agentic-tools.toml", "agent", 25, "sums with two tools"),
    "retry": Case(
        "benchmarks/agentic-retry.toml",
        "quickstart",
        60,
        "reasoning-gym's chain_sum, three attempts; each wrong one halves the reward",
    ),
    "verifiers": Case(
        "benchmarks/agentic-verifiers.toml",
        "agent",
        25,
        "the sums with two tools in a `ToolEnv` of `verifiers`",
    ),
}


class Gain(msgspec.Struct, frozen=True):
    """The scores of one seed before and after a training."""

    before: float
    after: float
    gain: float
    interval: float
    """Half the width of the gain's 95 % interval, over prompts."""
    minutes: float
    """Of the training."""
    cpu_minutes: float


def make(data: str, seed: int) -> Path:
    """Return the folder with the model and the prompts of a seed; make them if they are not there."""
    folder = OUT / f"{data}-{seed}"
    if not (folder / "prompts.jsonl").exists():
        words = [ROOT / "examples" / MAKERS[data], "--out", folder, "--seed", seed]
        subprocess.run([sys.executable, *map(str, words)], check=True, env=environment())
    held_out = folder / "held_out.jsonl"
    if not held_out.exists():  # the last prompts, which are then not trained on
        lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
        held_out.write_text("".join(lines[-NUM_PROMPTS:]))
        (folder / "prompts.jsonl").write_text("".join(lines[:-NUM_PROMPTS]))
    return folder


def environment() -> dict[str, str]:
    """Return the environment of a child process."""
    paths = [str(ROOT), str(MODULES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def execute(case: Case, output: Path, **settings: object) -> None:
    """Execute a run file, unless its run is there already. A run that was killed is made again."""
    if (output / "done").exists():
        return
    shutil.rmtree(output, ignore_errors=True)
    sets = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    words = ["execute", str(ROOT / case.run_file)]
    for each in [f"execute.output={output}", *sets]:
        words += ["--set", each]
    program = "import sys; from streamrl.cli import main; sys.exit(main())"
    subprocess.run(
        [sys.executable, "-c", program, *words],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
    (output / "done").touch()


def scores(case: Case, output: Path, folder: Path, model: Path, seed: int) -> dict[int, float]:
    """Return the mean reward of each held-out prompt under fixed weights."""
    execute(
        case,
        output,
        seed=seed,
        model__path=model,
        workload__prompts=folder / "held_out.jsonl",
        workload__order="file",
        algorithm__steps=1,
        algorithm__prompts_per_step=NUM_PROMPTS,
        algorithm__group_size=NUM_SAMPLES,
        policies__system="stream-sync",
        execute__checkpoint_every=1,
    )
    rewards = defaultdict(list)
    for line in (output / "rollouts.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        rewards[rollout["line"]].append(rollout["reward"])
    return {line: mean(found) for line, found in rewards.items()}


def measure(name: str, seed: int) -> Gain:
    """Train in one environment with one seed, and return the scores before and after; keep them in a file."""
    case, output = CASES[name], OUT / f"{name}-{seed}"
    kept = output / "gain.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Gain)
    folder = make(case.data, seed)
    before = scores(case, output / "before", folder, folder / "model", seed)
    began_at, began_with = time.monotonic(), cpu_seconds()
    trained = output / "trained"
    execute(
        case,
        trained,
        seed=seed,
        model__path=folder / "model",
        workload__prompts=folder / "prompts.jsonl",
        algorithm__steps=case.steps,
    )
    minutes = (time.monotonic() - began_at) / 60
    cpu_minutes = (cpu_seconds() - began_with) / 60
    newest = sorted((trained / "checkpoints").glob("v*"))[-1]
    after = scores(case, output / "after", folder, newest, seed)
    gains = [after[line] - before[line] for line in before.keys() & after.keys()]
    found = Gain(
        before=mean(before.values()),
        after=mean(after.values()),
        gain=mean(gains),
        interval=1.96 * stdev(gains) / sqrt(len(gains)),
        minutes=minutes,
        cpu_minutes=cpu_minutes,
    )
    kept.write_bytes(msgspec.json.encode(found))
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of ended child processes and their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def half_width(gains: list[float]) -> float:
    """Return half the width of the 95 % interval of the mean gain over seeds."""
    return STUDENT[len(gains)] * stdev(gains) / sqrt(len(gains))


def section(found: Mapping[str, Mapping[int, Gain]], page: str) -> list[str]:
    """Return the lines of the page's section: a row for each training, and one for each environment.

    Rows of environments that were not trained in now stay as they are on the page.
    """
    head = [
        f"`make bench-agents` writes this section. A score is the mean reward of {NUM_SAMPLES} episodes of each of "
        f"{NUM_PROMPTS} held-out prompts,",
        "under fixed weights. Each seed has its own model of half a million parameters, which a supervised warm-up",
        "taught the task and to stop too early, and its own prompts. Intervals are 95 %: of a seed over its prompts,",
        "of a mean over at least three seeds (Student's t). The trainings have "
        f"{', '.join(f'{case.steps} steps ({name})' for name, case in CASES.items())}.",
        "",
        "| environment | seed | before | after | gain | CPU minutes of the training |",
        "|---|---|---|---|---|---|",
    ]
    old = [line for line in section_of(page, SECTION) if line.startswith("| ")]
    rows: list[str] = []
    for name, case in CASES.items():
        start = f"| {name}: {case.task} |"
        if not found.get(name):
            rows += [line for line in old if line.startswith(start)]
            continue
        gains = found[name]
        rows += [
            f"{start} {seed} | {each.before:.3f} | {each.after:.3f} | {each.gain:+.3f} ± {each.interval:.3f} "
            f"| {each.cpu_minutes:.1f} |"
            for seed, each in gains.items()
        ]
        if len(gains) >= FEWEST_SEEDS:
            all_gains = [each.gain for each in gains.values()]
            before, after = (
                mean(each.before for each in gains.values()),
                mean(each.after for each in gains.values()),
            )
            rows.append(
                f"{start} mean | {before:.3f} | {after:.3f} | **{mean(all_gains):+.3f} ± {half_width(all_gains):.3f}** "
                f"| {mean(each.cpu_minutes for each in gains.values()):.1f} |"
            )
    return [*head, *rows]


def main() -> None:
    """Print one figure a line; with --page, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--page", type=Path, help="docs/agentic.md, whose section is written")
    args = parser.parse_args()
    found: dict[str, dict[int, Gain]] = {name: {} for name in args.cases}
    for seed in args.seeds:
        for name in args.cases:
            found[name][seed] = gain = measure(name, seed)
            for key, value in msgspec.structs.asdict(gain).items():
                figure = {"name": f"{name}, seed {seed}: {key}", "value": value}
                unit = "min" if key.endswith("minutes") else "reward"
                print(json.dumps({**figure, "unit": unit}), flush=True)
    for name, gains in found.items():
        value = mean(each.gain for each in gains.values())
        print(json.dumps({"name": f"{name}: gain", "value": value, "unit": "reward"}), flush=True)
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_section(page, SECTION, section(found, page)), encoding="utf-8")


if __name__ == "__main__":
    main()
