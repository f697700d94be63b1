"""Measure how well `simulate` predicts `execute` on this machine, from a profile of this machine.

Three kinds of run alternate, `ROUNDS` times each. So drift of the machine's speed affects all alike:

| run     | what takes its time                                                                       |
|---------|-------------------------------------------------------------------------------------------|
| decode  | generation: no answer is right, so every advantage is 0 and the trainer computes nothing  |
| train   | training: long prompts, short outputs, and a small reward for every output                |
| mixed   | the quickstart: generation and training at the same time, on cores that share caches      |

A simulation uses the output lengths and the share of informative rollouts of the executed run. So
only seconds are compared. The machine is profiled before and after the runs. The drift between the
two profiles is a lower bound on the error of any prediction. The prediction is the mean over both
profiles, which corrects a steady drift.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.quickstart import EXAMPLES, limits_of, make_quickstart
from streamrl.cli.progress import make_progress
from streamrl.engine.trace import Trace
from streamrl.executor.execute import execute
from streamrl.executor.profiling.profile_file import make_setup, profile_model
from streamrl.hardware.measured_profile import write_measured
from streamrl.record.metrics import Metrics, measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.files import load_run
from streamrl.sim.world import simulate

ROUNDS = 5
STEPS = {"decode": 10, "train": 8, "mixed": 8}
"""Optimizer steps of each run. The first step is warm-up."""
LONG_PROMPT = 64
"""Prompt tokens. With outputs of `SHORT_OUTPUT`, the trainer's three passes over a prompt take
longer than its prefill.
"""
SHORT_OUTPUT = 4
NUM_PROMPTS = 1024
LENIENT_TASK = "fraction_simplification"
"""A reasoning-gym task whose scorer gives 0.01 to wrong answers, so that no advantage is 0."""


class Outcome(NamedTuple):
    """An executed run and its simulation."""

    measured: float
    """Mean seconds per step."""
    predicted: float
    """Simulated seconds per step: the mean over the profiles before and after the run."""


def main() -> None:
    """Print the comparison, then one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only", choices=STEPS, action="append", help="kinds of run, all if absent"
    )
    args = parser.parse_args()
    make_quickstart(args.data)
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as scratch:
        show(*compare(args.data, Path(scratch), args.rounds, args.only or list(STEPS)))


def compare(
    data: Path, scratch: Path, rounds: int, kinds: list[str]
) -> tuple[dict[str, list[Outcome]], list[float]]:
    """Profile, run each kind once, profile again, and so on; return outcomes, and seconds by each profile."""
    runs = make_runs(data, scratch)
    profiles = [scratch / f"profile-{number}.toml" for number in range(rounds + 1)]
    write_profile(data, runs["mixed"], profiles[0])
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        done: list[tuple[str, Trace, Path]] = []
        for kind in kinds:
            output = scratch / f"{kind}-{number}"
            place = msgspec.structs.replace(runs[kind].execute, output=str(output))
            trace = execute(msgspec.structs.replace(runs[kind], execute=place))
            done.append((kind, trace, output / "trace.jsonl"))
            shutil.rmtree(output / "checkpoints")
        write_profile(data, runs["mixed"], profiles[number + 1])
        for kind, trace, file in done:
            around = profiles[number : number + 2]
            expected = mean(predict(trace, file, profile).step_time for profile in around)
            outcomes[kind].append(Outcome(measure(trace).step_time, expected))
    kind, trace, file = done[-1]
    return outcomes, [predict(trace, file, profile).step_time for profile in profiles]


def predict(trace: Trace, file: Path, profile: Path, calibration: Path | None = None) -> Metrics:
    """Simulate an executed run with a profile and a calibration, using the recorded lengths and advantages."""
    replace, run = msgspec.structs.replace, trace.run
    workload = recorded_workload(trace, file)
    rollout = replace(run.rollout, shares_prefixes=False)
    costs = CostsConfig(
        profile=str(profile), calibration=None if calibration is None else str(calibration)
    )
    predicted = simulate(replace(run, workload=workload, rollout=rollout, costs=costs))
    return measure(predicted, measure(trace).counted_steps)


def make_runs(data: Path, scratch: Path) -> dict[str, Run]:
    """Write the prompts of the first two runs, and return all three runs."""
    hopeless, lenient = scratch / "hopeless.jsonl", scratch / "lenient.jsonl"
    lines = (data / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    write_lines(hopeless, ({**json.loads(line), "answer": "never"} for line in lines))
    write_lines(lenient, long_prompts())
    common = [f"model.path={(data / 'model').resolve()}", f"execute.checkpoint_every={10**6}"]
    ours = {
        "decode": [
            "policies.system=disaggregated",
            f"workload.prompts={hopeless}",
            "verifier.scorer=exact",
        ],
        "train": [
            "policies.system=disaggregated",
            f"workload.prompts={lenient}",
            f"workload.max_prompt_tokens={LONG_PROMPT + 8}",
            f"rollout.max_tokens={SHORT_OUTPUT}",
            "algorithm.name=reinforce++",
            "algorithm.group_size=1",
            "algorithm.prompts_per_step=384",
        ],
        "mixed": [f"workload.prompts={(data / 'prompts.jsonl').resolve()}"],
    }
    return {
        kind: load_run(
            EXAMPLES / "quickstart.toml",
            [*common, *overrides, f"algorithm.steps={STEPS[kind]}"],
        )
        for kind, overrides in ours.items()
    }


def long_prompts() -> Iterator[dict[str, object]]:
    """Yield prompts of `LONG_PROMPT` random symbols."""
    symbols = random.Random(0)
    for _ in range(NUM_PROMPTS):
        text = "".join(symbols.choices("0123456789+-abcdefgh", k=LONG_PROMPT))
        entry = {"answer": "1/2", "metadata": {}}
        yield {"prompt": text, "answer": "1/2", "task": LENIENT_TASK, "entry": entry}


def write_lines(path: Path, records: Iterator[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_profile(data: Path, run: Run, path: Path) -> None:
    """Profile the quickstart's model within the limits of its run file."""
    setup = make_setup(
        data / "model",
        gpu="cpu",
        dtype=run.model.dtype,
        threads=run.execute.threads,
        limits=limits_of(run),
        is_quick=False,
    )
    with make_progress() as progress:
        task = progress.add_task("profile", total=setup.num_points, facts="")
        found = profile_model(setup, "cpu", lambda what: progress.update(task, advance=1))
    write_measured(found, path)


def show(outcomes: dict[str, list[Outcome]], by_profile: list[float]) -> None:
    """Print every run, then the medians as JSON."""
    table = Table("run", "measured", "predicted", "error")
    for kind, ones in outcomes.items():
        for one in [*ones, middle(ones)]:
            name = kind if one in ones else f"{kind}, median"
            seconds = f"{one.measured:.3f} s", f"{one.predicted:.3f} s"
            table.add_row(name, *seconds, f"{one.predicted / one.measured - 1:+.1%}")
    Console(width=100).print(table)
    report("drift: slowest over fastest profile", max(by_profile) / min(by_profile) - 1, "ratio")
    for kind, ones in outcomes.items():
        one = middle(ones)
        report(f"step time of the {kind} run, measured", one.measured, "s")
        report(f"step time of the {kind} run, predicted", one.predicted, "s")
        errors = [each.predicted / each.measured - 1 for each in ones]
        report(f"error of the {kind} run, median of rounds", median(errors), "ratio")
        report(f"error of the {kind} run, of medians", one.predicted / one.measured - 1, "ratio")


def middle(ones: list[Outcome]) -> Outcome:
    """Return the median of each field."""
    return Outcome(median(one.measured for one in ones), median(one.predicted for one in ones))


def report(name: str, value: float, unit: str) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
