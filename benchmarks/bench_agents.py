"""Train small agents in environments, and score them on held-out prompts before and after: `make bench-agents`.

    tools      examples/agentic-tools.toml: sums with two tools
    retry      benchmarks/agentic-retry.toml: reasoning-gym's chain_sum, with another attempt after a wrong answer
    verifiers  the same sums in a `ToolEnv` of the verifiers package (in the environment of make test-environments)

A score is the mean reward of 8 episodes of each of 128 held-out prompts, under fixed weights. The model has half a
million parameters (examples/make_agent.py, examples/make_quickstart.py). The interval of the gain is that of the
prompts: 95 %, normal approximation, of the paired differences of prompts' means.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "agents"
NUM_PROMPTS, NUM_SAMPLES = 128, 8
MAKERS = {"agent": "make_agent.py", "quickstart": "make_quickstart.py"}


class Case(NamedTuple):
    """An environment to train in."""

    run_file: str
    data: str
    """Folder of its model and prompts, below build."""
    settings: tuple[str, ...] = ()


VERIFIERS = (
    "environment.implementation=verifiers",
    "environment.tools=[]",
    'environment.arguments={environment="two-tools"}',
    "environment.sandbox=false",
)
CASES = {
    "tools": Case("examples/agentic-tools.toml", "agent"),
    "retry": Case("benchmarks/agentic-retry.toml", "quickstart"),
    "verifiers": Case("examples/agentic-tools.toml", "agent", VERIFIERS),
}


def make(data: str, seed: int) -> Path:
    """Return the folder with the model and the prompts of a seed; make them if they are not there."""
    folder = OUT / f"{data}-{seed}"
    if not (folder / "model" / "config.json").exists():
        words = [ROOT / "examples" / MAKERS[data], "--out", folder, "--seed", seed]
        subprocess.run([sys.executable, *map(str, words)], check=True)
    held_out = folder / "held_out.jsonl"
    if not held_out.exists():  # the last prompts, which are then not trained on
        lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
        held_out.write_text("".join(lines[-NUM_PROMPTS:]))
        (folder / "prompts.jsonl").write_text("".join(lines[:-NUM_PROMPTS]))
    return folder


def execute(case: Case, output: Path, **settings: object) -> None:
    """Execute a run file, unless its run is there already."""
    if (output / "done").exists():
        return
    sets = [
        *case.settings,
        *(f"{key.replace('__', '.')}={value}" for key, value in settings.items()),
    ]
    words = [
        "execute",
        str(ROOT / case.run_file),
        "--set",
        f"execute.output={output}",
    ]
    for each in sets:
        words += ["--set", each]
    program = "import sys; from streamrl.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)
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


def measure(name: str, seed: int) -> dict[str, float]:
    """Train in one environment with one seed; return the scores before and after, and the gain."""
    case = CASES[name]
    folder, output = make(case.data, seed), OUT / f"{name}-{seed}"
    before = scores(case, output / "before", folder, folder / "model", seed)
    began_at = time.monotonic()
    trained = output / "trained"
    execute(
        case,
        trained,
        seed=seed,
        model__path=folder / "model",
        workload__prompts=folder / "prompts.jsonl",
    )
    minutes = (time.monotonic() - began_at) / 60
    newest = sorted((trained / "checkpoints").glob("v*"))[-1]
    after = scores(case, output / "after", folder, newest, seed)
    gains = [after[line] - before[line] for line in before.keys() & after.keys()]
    return {
        "before": mean(before.values()),
        "after": mean(after.values()),
        "gain": mean(gains),
        "interval": 1.96 * stdev(gains) / sqrt(len(gains)),
        "minutes": minutes,
    }


def main() -> None:
    """Print one figure a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["tools", "retry"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    for name in args.cases:
        found = {seed: measure(name, seed) for seed in args.seeds}
        for seed, figures in found.items():
            for key, value in figures.items():
                unit = "min" if key == "minutes" else "reward"
                print(
                    json.dumps(
                        {"name": f"{name}, seed {seed}: {key}", "value": value, "unit": unit}
                    )
                )
        gain = mean(each["gain"] for each in found.values())
        print(json.dumps({"name": f"{name}: gain", "value": gain, "unit": "reward"}), flush=True)


if __name__ == "__main__":
    main()
