"""How near a simulation comes to what is then executed on this machine: run files that nothing was tuned on.

The machine is profiled, for both models, before the runs. Every run file is simulated before it is executed, in turn
with all others and `--rounds` times, and once more with the lengths that it had. A run's step time is set beside both:

    before      simulated before it was executed, lengths as its run file has them
    recorded    simulated with its lengths

A host that others use as well changes its pace by the minute. So a few points of the profile are measured again between
runs (`benchmarks/pace.py`), and its seconds are taken as many times as long as they took just before, or around, a run.

Its own repeats say what no prediction can get below. What asynchrony gains at one, two and three replicas, and how long
pushes take, is set beside what was simulated before. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from rich.console import Console

from benchmarks.pace import measure_pace
from benchmarks.reality_cells import (
    CELLS,
    EXAMPLES,
    LONG,
    MAX_PROMPT,
    PAIRS,
    SECOND_MODEL,
    Cell,
    make_run,
    with_expectations,
)
from benchmarks.reality_figures import Repeat, figures, section, table_of
from executor.execute import execute
from executor.profiling.measurements import Limits
from executor.profiling.profile_file import make_setup, profile_model
from sim.costs.costs import Costs
from sim.costs.fill import fill_policies
from sim.world import simulate
from streamrl.engine.messages import Generate, PushWeights, WeightsPushed
from streamrl.hardware.machine_profile import read_measured, write_measured
from streamrl.record.informative import recorded_workload
from streamrl.record.metrics import Metrics, measure
from streamrl.record.trace import Trace
from streamrl.report.fidelity import EXECUTED, with_section
from streamrl.runfile.config import CostsConfig, Run

ROUNDS = 3
LIMITS = Limits(max_running=64, max_context=LONG + MAX_PROMPT, max_tokens_per_pass=2048)
NUM_SAMPLED, NUM_SAMPLES = 64, 4
"""Prompts, and outputs of each, that say before a run how long outputs are."""


class Executed(NamedTuple):
    """What is simulated again with the lengths that it had."""

    cell: Cell
    trace: Trace
    file: Path
    before: Metrics
    push_before: float
    pace_before: float
    pace_after: float

    @property
    def pace(self) -> float:
        """Seconds around the run over those of the profile."""
        return (self.pace_before + self.pace_after) / 2


def main() -> None:
    """Print the comparison and one JSON object a figure; write the page's section where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    pairs = [one for pair in PAIRS.values() for one in pair]
    names = [one.name for one in (*CELLS, *pairs)]
    parser.add_argument("--only", choices=names, action="append", help="cells, all if absent")
    parser.add_argument("--page", type=Path, help="docs/fidelity.md, whose section is written")
    parser.add_argument("--quick", action="store_true", help="profiles of few points: does it run?")
    args = parser.parse_args()
    chosen = [one for one in (*CELLS, *pairs) if one.name in (args.only or names)]
    with tempfile.TemporaryDirectory(prefix="bench-reality-") as scratch:
        repeats = compare(
            make_models(args.data, Path(scratch)), chosen, args.rounds, is_quick=args.quick
        )
    lines = section(repeats)
    Console(width=140).print(table_of(repeats))
    for name, value, unit in figures(repeats):
        print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_section(page, EXECUTED, lines), encoding="utf-8")


# Runs ---------------------------------------------------------------------------------------------


def compare(
    data: Path, cells: Sequence[Cell], rounds: int, *, is_quick: bool
) -> dict[str, list[Repeat]]:
    """Profile, execute every cell in turn and that `rounds` times; return the repeats by cell."""
    models = dict.fromkeys(("first", *(one.model for one in cells)))
    profiles = {
        name: profile(data, name, data / f"{name}.toml", is_quick=is_quick) for name in models
    }
    repeats: dict[str, list[Repeat]] = {one.name: [] for one in cells}
    pace = _pace(data, profiles["first"])
    for number in range(rounds):
        for place, one in enumerate(cells):
            output = data / f"run-{number}-{place}"
            run = make_run(one, data, output)
            path, pace_before = profiles[one.model], pace
            predicted = _with_profile(run, path, pace_before)
            simulated = simulate(predicted)
            trace = execute(fill_policies(run, Costs.load(predicted)))
            shutil.rmtree(output / "checkpoints")
            pace = _pace(data, profiles["first"])
            done = Executed(
                *(one, trace, output / "trace.jsonl", measure(simulated), push_time(simulated)),
                *(pace_before, pace),
            )
            repeats[one.name].append(_repeat(done, path))
            print(f"{one.name}: {measure(trace).step_time:.3f} s a step", file=sys.stderr)
    return repeats


def _repeat(done: Executed, path: Path) -> Repeat:
    recorded = predict(done, path)
    return Repeat(
        *(measure(done.trace), done.before, recorded, done.pace, started_at(done.trace)),
        *(push_time(done.trace), done.push_before),
    )


def _pace(data: Path, path: Path) -> float:
    return measure_pace(data / "first" / "model", read_measured(path), LIMITS)


def predict(done: Executed, path: Path) -> Metrics:
    """Simulate an executed run from a profile, with the lengths and advantages that it had."""
    workload = recorded_workload(done.trace, done.file)
    run = msgspec.structs.replace(done.trace.run, workload=workload)
    trace = simulate(_with_profile(run, path, done.pace))
    return measure(trace, measure(done.trace).counted_steps)


def started_at(trace: Trace) -> float:
    """Return the seconds until the first rollout was sent to a replica."""
    return next(
        time
        for time, _, commands in trace.entries
        if any(isinstance(c, Generate) for c in commands)
    )


def push_time(trace: Trace) -> float:
    """Return the median seconds of a push of weights."""
    began: dict[int, float] = {}
    took = []
    for time, event, commands in trace.entries:
        if isinstance(event, WeightsPushed):
            took.append(time - began.pop(event.version))
        began.update({c.version: time for c in commands if isinstance(c, PushWeights)})
    return median(took)


def _with_profile(run: Run, path: Path, pace: float) -> Run:
    """Return a run whose seconds are a profile's, so many times as long."""
    costs = CostsConfig(profile=str(path), generation_factor=1 / pace, training_factor=1 / pace)
    found: Run = msgspec.structs.replace(run, costs=costs)
    return found


def profile(data: Path, model: str, path: Path, *, is_quick: bool) -> Path:
    """Profile a model within the limits of all cells."""
    setup = make_setup(
        data / model / "model",
        gpu="cpu",
        dtype="float32",
        threads=1,
        limits=LIMITS,
        is_quick=is_quick,
    )
    write_measured(profile_model(setup, "cpu", lambda what: None), path)
    return path


def make_models(quickstart: Path, scratch: Path) -> Path:
    """Put both models, their prompts and what is known of their lengths into a directory."""
    if not (quickstart / "model" / "config.json").is_file():
        make = [sys.executable, str(EXAMPLES / "make_quickstart.py"), "--out", str(quickstart)]
        subprocess.run(make, check=True)
    lines = (quickstart / "prompts.jsonl").read_text().splitlines()
    (scratch / "prompts.jsonl").write_text("".join(with_expectations(lines)))
    (scratch / "first").mkdir()
    (scratch / "first" / "model").symlink_to((quickstart / "model").resolve())
    shutil.copy(quickstart / "lengths.csv", scratch / "first" / "lengths.csv")
    prompts = [json.loads(line)["prompt"] for line in lines[:NUM_SAMPLED]]
    make_second(quickstart / "model", scratch / "second", prompts)
    return scratch


def make_second(first: Path, directory: Path, prompts: list[str]) -> None:
    """Write an untaught model beside the quickstart's tokenizer, and the lengths of what it says."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

    from examples.make_quickstart import sample, write_lengths

    torch.set_num_threads(1)  # of so small a model more only wait for each other
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(first)
    kinds = ["full_attention"] * SECOND_MODEL["num_hidden_layers"]
    config.update({**SECOND_MODEL, "layer_types": kinds})
    model, tokenizer = Qwen2ForCausalLM(config), AutoTokenizer.from_pretrained(first)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    asked = [prompt for prompt in prompts for _ in range(NUM_SAMPLES)]
    outputs = sample(model.eval(), tokenizer, asked, LONG)
    write_lengths(directory / "lengths.csv", outputs, NUM_SAMPLES)


if __name__ == "__main__":
    main()
