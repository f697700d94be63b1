"""Check that runs with replicas behind a slow link are as fast as simulated, for all sync modes and several systems.

    build/engines/bin/python -m benchmarks.bench_wan --rate 200e6 --delay 0.02

examples/two-datacenters.toml is executed on a Ray cluster of two nodes. Each node has its own
network namespace, and `benchmarks.wan_link` delays the packets between them. The script needs root.
Each round profiles this machine and executes every run. The pooled profiles
(`benchmarks.pooled_profiles`) are the input of the simulations. Each simulation uses the recorded
lengths, the recorded share of changed values, and the speed of the cores during its run
(`benchmarks.core_watch`). Output is one JSON object per figure: step times, their errors, the parts
of synchronous steps, and the gain of deltas and adapters over whole weights, measured and
simulated; then the medians of the rounds.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from benchmarks.core_watch import CoreWatch, watched_cores
from benchmarks.pooled_profiles import Profiled, pooled
from benchmarks.quickstart import limits_of
from benchmarks.reality_runs import push_time
from benchmarks.wan_link import ADDRESSES, FAR, NEAR, inside, wan_link
from streamrl.engine.messages import Generated, Stepped, WeightsLoaded, WeightsPushed
from streamrl.engine.trace import Trace, read_trace
from streamrl.hardware.measured_profile import MeasuredProfile, write_measured
from streamrl.hardware.profiles import load_model
from streamrl.record.metrics import Metrics, measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.files import load_run
from streamrl.sim.world import simulate

HERE = Path(__file__).parent.parent
RUN_FILE = HERE / "examples" / "two-datacenters.toml"
MODES = ("full", "delta", "lora")
SYSTEMS = ("stream-sync", "stream-async")
PORT = 6379
PYTHON = Path(sys.executable)
START_TIME = 60.0
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Token that the cluster requires from every client."""


class Parts(NamedTuple):
    """Median seconds of the parts of a step whose parts do not overlap with the next step."""

    weights: float
    """Until replicas have loaded the weights of the last step."""
    generation: float
    """Until the last rollout has ended. Training runs at the same time."""
    rest: float
    """Until the optimizer step."""


class Figure(NamedTuple):
    """One run, executed and simulated."""

    mode: str
    system: str
    measured: Metrics
    simulated: Metrics
    pushes: list[WeightsPushed]
    push_time: float
    simulated_push: float
    parts: Parts | None
    simulated_parts: Parts | None
    pace: float
    """Slowdown of the cores during the run: seconds of the reference work over those in a usual
    run.
    """
    work_time: float
    """Seconds of the reference work of the core watch during the run."""


def main() -> None:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=200e6, help="bits a second")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds one way")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--systems", nargs="*", default=SYSTEMS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--output", type=Path, help="keep profiles and runs in this directory")
    options = parser.parse_args()
    if options.output is not None:
        options.output.mkdir(parents=True)  # fails if it exists, since it may have other runs
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the Ray nodes end with it
    with (
        tempfile.TemporaryDirectory(prefix="bench-wan-") as name,
        watched_cores() as cores,
        wan_link(options.rate, options.delay),
        cluster(),
    ):
        scratch = options.output or Path(name)
        bench = Bench(scratch, cores, options, settings=options.settings)
        kinds = sorted({learned(mode) for mode in options.modes})
        profiles: dict[str, list[Profiled]] = {kind: [] for kind in kinds}
        runs: list[Executed] = []
        for number in range(options.rounds):
            for kind in kinds:
                profiles[kind].append(bench.profile(kind, str(number)))
            for system, mode in product(options.systems, options.modes):
                runs.append(bench.execute(mode, system, str(number)))
                print(f"round {number}: {mode}, {system}", file=sys.stderr, flush=True)
    usual = median(run.work_time for run in runs)
    every = [each for own in profiles.values() for each in own]
    machine = {
        kind: pooled(own, [each for each in every if each not in own], usual)
        for kind, own in profiles.items()
    }
    figures = []
    for run in runs:
        figures.append(compare(run, machine[learned(run.mode)], usual))
        report(figures[-1])
    report_medians(figures, usual)


def learned(mode: str) -> str:
    """Return the kind of profile for a mode: what the trainer learns, weights or adapters."""
    return "lora" if mode == "lora" else "full"


class Executed(NamedTuple):
    """A run, and the speed of the cores during it."""

    mode: str
    system: str
    output: Path
    work_time: float
    """Seconds of the reference work of the core watch during the run."""


class Bench(NamedTuple):
    """Profiles this machine and executes runs on it, while the core watch measures its speed."""

    scratch: Path
    cores: CoreWatch
    options: argparse.Namespace
    run_file: Path = RUN_FILE
    settings: Sequence[str] = ()
    """Changes of the run file, as KEY=VALUE."""

    def profile(self, mode: str, name: str, *, is_quick: bool = False) -> Profiled:
        """Profile the machine within the limits of the run file, with Ray's time on the trainer's side.

        If `mode` is lora, the profile has adapters; otherwise it has whole weights and their deltas.
        """
        run = load_run(self.run_file, [*self.settings, f"sync.mode={mode}"])
        path = self.scratch / f"{name}-profile-{mode}.toml"
        most = limits_of(run)
        options = {
            "max-running": most.max_running,
            "max-context": most.max_context,
            "max-tokens-per-pass": most.max_tokens_per_pass,
            "dtype": run.model.dtype,
            "threads": 1,
            "ray": run.trainer.pool,
            "ray-address": f"{ADDRESSES[NEAR]}:{PORT}",
            "output": path,
            **({"lora-rank": run.sync.lora_rank} if mode == "lora" else {}),
        }
        settings = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        own = [*settings, *(["--quick"] if is_quick else [])]
        return Profiled(path, self._timed("profile", str(run.model.path), *own))

    def execute(self, mode: str, system: str, name: str) -> Executed:
        """Execute a run over the emulated link."""
        options = self.options
        output = self.scratch / f"{name}-{mode}-{system}"
        keys = {
            "sync.mode": mode,
            "policies.system": system,
            "algorithm.steps": options.steps,
            "execute.launcher": "ray",
            "execute.output": output,
            "execute.ray_address": f"{ADDRESSES[NEAR]}:{PORT}",
            "cluster.links.0.bandwidth": f"{options.rate / 1e6:g} Mbps",
            "cluster.links.0.latency": f"{1000 * options.delay:g} ms",
        }
        changes = [*self.settings, *(f"{key}={value}" for key, value in keys.items())]
        settings = [part for change in changes for part in ("--set", change)]
        work_time = self._timed("execute", str(self.run_file), *settings)
        return Executed(mode, system, output, work_time)

    def _timed(self, *arguments: str) -> float:
        """Run a command of streamrl, and return the seconds of the reference work of the core watch meanwhile."""
        began_at = time.monotonic()
        streamrl(*arguments)
        return self.cores.mean_time(began_at, time.monotonic())


def compare(run: Executed, profile: MeasuredProfile, usual: float) -> Figure:
    """Simulate a run with the recorded lengths, at the speed at which the reference work takes `usual` seconds."""
    trace, pace = read_trace(run.output / "trace.jsonl"), run.work_time / usual
    pushes = [e.event for e in trace.entries if isinstance(e.event, WeightsPushed)]
    again = simulation_of(trace, run.output / "trace.jsonl", profile, pushes, pace)
    simulated, measured = simulate(again), measure(trace)
    predicted = measure(simulated, measured.counted_steps)
    times = push_time(trace), push_time(simulated)
    parts = (parts_of(trace), parts_of(simulated)) if run.system == "stream-sync" else (None, None)
    own = run.mode, run.system, measured, predicted, pushes
    return Figure(*own, *times, *parts, pace, run.work_time)


def near_command(*arguments: str) -> list[str]:
    """Return the arguments that run a command of streamrl on the trainer's side, with `TOKEN` in its environment."""
    return [*inside(NEAR), str(PYTHON), "-c", "from streamrl.cli import main; main()", *arguments]


def streamrl(*arguments: str) -> None:
    """Run a command of streamrl on the trainer's side.

    Raises:
        RuntimeError: the command failed.
    """
    done = subprocess.run(
        near_command(*arguments),
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | TOKEN,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


@contextmanager
def cluster(near: str = "training", far: str = "generation") -> Iterator[None]:
    """Run a Ray node at each end of the link, each with the resources of a pool."""
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    joins = [f"--address={ADDRESSES[NEAR]}:{PORT}"]
    with ExitStack() as nodes:
        for name, pool, own in ((NEAR, near, head), (FAR, far, joins)):
            nodes.enter_context(node(name, pool, own))
            wait_for(name)
        yield


@contextmanager
def node(name: str, pool: str, own: list[str]) -> Iterator[None]:
    """Run a Ray node in a network namespace."""
    command = [
        *inside(name),
        str(PYTHON.parent / "ray"),
        "start",
        "--block",
        f"--node-ip-address={ADDRESSES[name]}",
        "--num-cpus=4",
        f"--object-store-memory={200 * 2**20}",
        f"--resources={json.dumps({f'pool-{pool}': 1})}",
        *own,
    ]
    started = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | TOKEN,
    )
    try:
        yield
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)


def wait_for(name: str) -> None:
    """Wait until a node has joined the cluster."""
    check = (
        f"import ray; ray.init('{ADDRESSES[NEAR]}:{PORT}', log_to_driver=False);"
        f"print(sum(n['Alive'] and n['NodeManagerAddress'] == '{ADDRESSES[name]}' for n in ray.nodes()))"
    )
    until = time.monotonic() + START_TIME
    while time.monotonic() < until:
        done = subprocess.run(
            [*inside(NEAR), str(PYTHON), "-c", check],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | TOKEN,
        )
        if done.stdout.strip().endswith("1"):
            return
        time.sleep(1.0)
    raise RuntimeError(f"no Ray node came up in {name}: {done.stderr[-500:]}")


def simulation_of(
    trace: Trace, file: Path, profile: MeasuredProfile, pushes: list[WeightsPushed], pace: float
) -> Run:
    """Return the run as it is simulated: recorded lengths and share of changed values, and this machine's seconds.

    A profile at the speed of the run is written next to its trace.
    """
    profile = msgspec.structs.replace(profile, pace=pace * (profile.pace or 1.0))
    write_measured(profile, file.with_name("profile.toml"))
    run: Run = msgspec.structs.replace(trace.run, workload=recorded_workload(trace, file))
    costs = CostsConfig(profile=str(file.with_name("profile.toml")))
    run = msgspec.structs.replace(run, costs=costs)
    if run.sync.mode != "delta":
        return run
    row = next(row for row in profile.relay if row.mode == "delta")
    sent = median(push.num_bytes for push in pushes[1:])
    share = sent / (row.bytes / row.values) / load_model(run.model).num_parameters
    sync = msgspec.structs.replace(run.sync, changed_share=min(1.0, share))
    return msgspec.structs.replace(run, sync=sync)


def parts_of(trace: Trace) -> Parts:
    """Return the parts of a trace's synchronous steps, without the first two, which are warm-up."""
    stepped_at, loaded_at, generated_at = 0.0, 0.0, 0.0
    steps = []
    for entry in trace.entries:
        match entry.event:
            case WeightsLoaded():
                loaded_at = entry.time
            case Generated():
                generated_at = entry.time
            case Stepped():
                instants = (stepped_at, loaded_at, generated_at, entry.time)
                steps.append([after - before for before, after in pairwise(instants)])
                stepped_at = entry.time
    return Parts(*map(median, zip(*steps[2:], strict=True)))


def report(figure: Figure) -> None:
    measured, simulated = figure.measured.step_time, figure.simulated.step_time
    line: dict[str, Any] = {
        "name": f"wan.{figure.mode}.{figure.system}",
        "step_time": round(measured, 4),
        "simulated": round(simulated, 4),
        "error_percent": round(100 * (simulated / measured - 1), 1),
        "pace": round(figure.pace, 2),
        "push": round(figure.push_time, 4),
        "simulated_push": round(figure.simulated_push, 4),
        "bytes": round(median(push.num_bytes for push in figure.pushes)),
        "phases": {
            name: round(median(getattr(push, name) for push in figure.pushes), 4)
            for name in ("encode_time", "wire_time", "decode_time")
        },
    }
    for key, parts in (("parts", figure.parts), ("simulated_parts", figure.simulated_parts)):
        if parts is not None:
            line[key] = {name: round(seconds, 4) for name, seconds in parts._asdict().items()}
    print(json.dumps(line), flush=True)


def report_medians(figures: list[Figure], usual: float) -> None:
    """Print the median steps over all rounds, and the gain of each mode over whole weights in percent."""
    steps: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        steps.setdefault((figure.system, figure.mode), []).append(figure)
    middle = {key: middle_of(rounds, usual) for key, rounds in steps.items()}
    for (system, mode), (measured, simulated) in middle.items():
        line = {
            "name": f"wan.median.{mode}.{system}",
            "step_time": round(measured, 4),
            "simulated": round(simulated, 4),
            "error_percent": round(100 * (simulated / measured - 1), 1),
        }
        base = middle.get((system, "full"))
        if base is not None and mode != "full":
            line["gain_percent"] = round(100 * (1 - measured / base[0]), 1)
            line["simulated_gain_percent"] = round(100 * (1 - simulated / base[1]), 1)
        print(json.dumps(line), flush=True)


def middle_of(rounds: list[Figure], usual: float) -> tuple[float, float]:
    """Return the median step in seconds, executed and simulated, at the speed at which the reference work takes `usual`."""
    return (
        median(figure.measured.step_time * usual / figure.work_time for figure in rounds),
        median(figure.simulated.step_time * usual / figure.work_time for figure in rounds),
    )


if __name__ == "__main__":
    main()
