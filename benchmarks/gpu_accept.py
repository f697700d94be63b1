"""GPU checks of `streamrl profile accept`: a small plan on this machine's GPUs, measured and predicted again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.gpu_models import ON_GPU
from benchmarks.gpu_record import Recorder
from benchmarks.gpu_run import JOBS, make_job_run
from streamrl.executor.profiling.node_benchmarks import find_node
from streamrl.runfile.files import write_run
from streamrl.sim.acceptance.result import Acceptance

MODEL = "medium" if ON_GPU else "small"
SPREAD = 1.5
"""Largest accepted ratio of measured to expected seconds, or of expected to measured, of a matrix product whose table
was measured on the same kind of GPU."""
COMMAND = "import sys; from streamrl.cli import main; sys.exit(main())"
LEFT_ALONE = 0.7
"""Share of the time limit that the command may use to measure."""
LENGTHS = (
    "workload.lengths.kind=histogram",
    "workload.lengths.source=streamrl-codemath-20k",
    "workload.lengths.scale=0.005",
    "workload.lengths.prompt_tokens=16",
)
"""Output lengths of the plan, which no run has executed."""


def check_acceptance(recorder: Recorder, scratch: Path, out: Path, bound: float) -> None:
    """Run the acceptance test of a node, and compare its matrix products with their tables."""
    recorder.check("accept", bound, _accept, scratch, out, bound)


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of streamrl in a process of its own, which leaves nothing on the GPU."""
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _accept(recorder: Recorder, name: str, scratch: Path, out: Path, bound: float) -> None:
    node = find_node(1)
    run = make_job_run(scratch, JOBS[MODEL], "colocated")
    (pool_name,) = run.cluster.pools
    pool = msgspec.structs.replace(run.cluster.pools[pool_name], gpus_per_node=node.num_gpus)
    cluster = msgspec.structs.replace(run.cluster, pools={pool_name: pool})
    plan = scratch / "accept.toml"
    write_run(msgspec.structs.replace(run, cluster=cluster), plan)
    minutes = f"{bound / 60 * LEFT_ALONE:.2f}"
    options = ["--minutes", minutes, "--limit", "1000", "--json"]
    options += [word for change in LENGTHS for word in ("--set", change)]
    done = run_command("profile", "accept", str(plan), *options)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1000:])
    (out / "acceptance.json").write_text(done.stdout)
    found = msgspec.json.decode(done.stdout, type=Acceptance)
    for row in found.comparisons:
        is_judged = ON_GPU and row.name.startswith("matrix product")
        is_near = 1 / SPREAD < row.slowdown < SPREAD if is_judged else None
        unit = "GB/s" if row.unit == "B/s" else "ms"
        scale = 1e-9 if row.unit == "B/s" else 1e3
        detail = f"{row.slowdown:.3f} times the expected time; changes {row.changes or 'nothing'}"
        recorder.add(f"{name}: {row.name}", row.measured * scale, unit, is_near, detail)
    detail = f"planned {found.before.step_time:.4g} s; not measured: {', '.join(found.kept)}"
    recorder.add(f"{name}: step, predicted again", found.after.step_time, "s", None, detail)
