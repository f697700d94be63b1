"""Execute run files on this machine and simulate them: models, profiles, runs and their comparison."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.pace import measure_pace
from benchmarks.quickstart import make_quickstart
from benchmarks.reality_cells import (
    LONG,
    MAX_PROMPT,
    SECOND_MODEL,
    Cell,
    make_run,
    with_expectations,
)
from benchmarks.reality_figures import Repeat
from streamrl.engine.messages import Generate
from streamrl.engine.trace import Trace
from streamrl.executor.execute import execute
from streamrl.executor.profiling.environment_times import MeasuredEnvironment
from streamrl.executor.profiling.measurements import Limits
from streamrl.executor.profiling.profile_file import make_setup, profile_model
from streamrl.hardware.measured_profile import read_measured, write_measured
from streamrl.record.metrics import Metrics, measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.record.timeline import read_timeline
from streamrl.runfile.config import CostsConfig, Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import simulate

LIMITS = Limits(max_running=64, max_context=LONG + MAX_PROMPT, max_tokens_per_pass=2048)
NUM_SAMPLED, NUM_SAMPLES = 64, 4
"""Numbers of prompts, and of outputs per prompt, that are sampled to know lengths before a run."""


class Executed(NamedTuple):
    """A run, and its simulation before the run."""

    trace: Trace
    file: Path
    before: Metrics
    push_before: float
    pace_before: float
    """Slowdown of the machine before the run, relative to its profile."""


def run_cell(one: Cell, data: Path, output: Path, profile: Path, pace: float) -> Executed:
    """Simulate a run file at the machine's current speed, then execute it."""
    run = make_run(one, data, output)
    predicted = with_profile(run, profile, pace)
    simulated = simulate(predicted)
    trace = execute(fill_policies(run, Costs.load(predicted)))
    shutil.rmtree(output / "checkpoints")
    found = measure(trace)
    print(f"{one.name}: {found.step_time:.3f} s a step, pace {pace:.2f}", file=sys.stderr)
    return Executed(trace, output / "trace.jsonl", measure(simulated), push_time(simulated), pace)


def judge(done: Executed, profile: Path, pace_after: float) -> Repeat:
    """Simulate an executed run with its recorded lengths and advantages, at the speed around it."""
    pace = (done.pace_before + pace_after) / 2
    measured = measure(done.trace)
    recorded = as_recorded(done.trace, done.file, profile, measured.counted_steps, pace)
    return Repeat(
        *(measured, done.before, recorded, pace, started_at(done.trace)),
        *(push_time(done.trace), done.push_before),
    )


def as_recorded(
    trace: Trace, file: Path, profile: Path, counted: tuple[int, int], pace: float = 1.0
) -> Metrics:
    """Return the metrics of a run, simulated with the lengths and advantages recorded in a file."""
    run = msgspec.structs.replace(trace.run, workload=recorded_workload(trace, file))
    return measure(simulate(with_profile(run, profile, pace)), counted)


def pace_of(
    data: Path,
    model: str,
    profile: Path,
    limits: Limits = LIMITS,
    environment: MeasuredEnvironment | None = None,
) -> float:
    """Return the current slowdown of the machine relative to a model's profile, with an environment also beside that."""
    return measure_pace(data / model / "model", read_measured(profile), limits, environment)


def started_at(trace: Trace) -> float:
    """Return the seconds until the first rollout was sent to a replica."""
    return next(
        time
        for time, _, commands in trace.entries
        if any(isinstance(c, Generate) for c in commands)
    )


def push_time(trace: Trace) -> float:
    """Return the median seconds of a weight push."""
    return median(span.end - span.start for span in read_timeline(trace).link)


def with_profile(run: Run, path: Path, pace: float = 1.0) -> Run:
    """Return a run whose costs are those of a profile, times `pace`."""
    costs = CostsConfig(profile=str(path), generation_factor=1 / pace, training_factor=1 / pace)
    found: Run = msgspec.structs.replace(run, costs=costs)
    return found


def profile(
    data: Path,
    model: str,
    path: Path,
    *,
    is_quick: bool,
    limits: Limits = LIMITS,
    environment: MeasuredEnvironment | None = None,
) -> Path:
    """Profile a model within limits, by default those of all cells."""
    setup = make_setup(
        data / model / "model",
        gpu="cpu",
        dtype="float32",
        threads=1,
        limits=limits,
        is_quick=is_quick,
        environment=environment,
    )
    write_measured(profile_model(setup, "cpu", lambda what: None), path)
    return path


def make_models(quickstart: Path, scratch: Path) -> Path:
    """Write both models, their prompts and their known lengths into a directory."""
    make_quickstart(quickstart)
    lines = (quickstart / "prompts.jsonl").read_text().splitlines()
    (scratch / "prompts.jsonl").write_text("".join(with_expectations(lines)))
    (scratch / "first").mkdir()
    (scratch / "first" / "model").symlink_to((quickstart / "model").resolve())
    shutil.copy(quickstart / "lengths.csv", scratch / "first" / "lengths.csv")
    prompts = [json.loads(line)["prompt"] for line in lines[:NUM_SAMPLED]]
    make_second(quickstart / "model", scratch / "second", prompts)
    return scratch


def make_second(first: Path, directory: Path, prompts: list[str]) -> None:
    """Write an untrained model with the quickstart's tokenizer, and the lengths of its outputs."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

    from examples.make_quickstart import sample, write_lengths

    torch.set_num_threads(1)  # more threads are not faster on so small a model
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(first)
    kinds = ["full_attention"] * SECOND_MODEL["num_hidden_layers"]
    config.update({**SECOND_MODEL, "layer_types": kinds})
    model, tokenizer = Qwen2ForCausalLM(config), AutoTokenizer.from_pretrained(first)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    repeated = [prompt for prompt in prompts for _ in range(NUM_SAMPLES)]
    outputs = sample(model.eval(), tokenizer, repeated, LONG)
    write_lengths(directory / "lengths.csv", outputs, NUM_SAMPLES)
