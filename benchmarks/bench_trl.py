"""Compare `streamrl execute` with TRL's GRPOTrainer on one machine: seconds of a training step, and rewards.

    make bench-trl

Both train the quickstart's model on its prompts: 24 prompts per step with 8 rollouts of at most 128
tokens. Both use AdamW, the PPO clip, a mean over tokens, rewards of one scorer, float32 and two
cores in all. Both run under the interpreter of this script, so on the same torch and transformers.
All of TRL's `SETTINGS` and of streamrl's `OWN_SETTINGS` are tried first, for each system. Those
close to the fastest run again, and the fastest of each system are compared.

TRL computes rollouts whose advantage is 0, though they have no gradient; streamrl leaves them out.
So TRL is compared twice: unchanged, and without these rollouts, which is the fair comparison.

Rounds are interleaved, each in its own process, at a learning rate at which lengths do not change.
The first two and the last two steps do not count. A system that generates ahead has no rollouts
ahead at the start, and nothing to generate at the end. Rewards are compared at the quickstart's
learning rate, seed by seed. Nothing else may run on the machine. The CPU time of other processes is
printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.trl_training import CORES, HERE, MODEL, ROLLOUTS, SETTINGS
from streamrl.executor.libc import prctl

STILL, LEARNING = 1e-6, 4e-4
"""Learning rates: one at which lengths do not change, and the quickstart's."""
WARM_UP = COOL_DOWN = 2
"""Steps at both ends that do not count. If a system generates one step ahead, its steps alternate;
count an even number.
"""
TRIED_STEPS = 6
"""Counted steps of a setting in the first trials."""
LAST = 10
"""Number of last steps whose mean reward is compared."""
TRIES, CLOSE = 3, 1.25
"""Number of trials of a setting, and the slowdown up to which it is tried again. A single trial is
too noisy.
"""
SLOWEST = 120
"""Seconds after which the trial of a setting is stopped."""
SYSTEMS = {"sync": "stream-sync", "async": "stream-async"}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "as the example": {},
    "all at once": {"rollout.max_running": ROLLOUTS},
    "two replicas": {
        "rollout.replicas": 2,
        "rollout.max_running": ROLLOUTS // 2,
        "cluster.pools.local.gpus_per_node": 3,
    },
    "two replicas, two ranks": {
        "rollout.replicas": 2,
        "rollout.max_running": ROLLOUTS // 2,
        "trainer.data_parallel": 2,
        "trainer.zero": 0,
        "cluster.pools.local.gpus_per_node": 4,
    },
}
"""Changes of the quickstart's run file. Like TRL's settings, they change seconds and not the training
result. Processes share the two cores and have one thread each.
"""
LEAVES_OUT = "TRL, advantages of 0 left out"
PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl: this process adopts orphaned child processes, so their CPU seconds count as its own."""
QUIET = 0.05
"""Share of CPU time that other processes may take. Above it, the figures are marked as doubtful."""


class Step(NamedTuple):
    """The recorded figures of a step."""

    time: float
    """End of the step in seconds, from an arbitrary origin."""
    reward: float
    """Mean reward of its rollouts."""
    tokens: float
    """Mean output tokens of a rollout."""


class Figure(NamedTuple):
    """Values of a figure, one for each round or seed."""

    name: str
    values: Sequence[float]
    tokens: float | None = None
    """Mean output tokens of a rollout over all rounds."""
    tokens_per_second: float | None = None


Entrant = Callable[..., list[Step]]
"""Trains for a number of steps at a learning rate, from a seed, within an optional `limit` of
seconds.
"""


def main() -> None:
    """Find the fastest settings of TRL and of each system, then compare their seconds and their rewards."""
    options = _read_arguments()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # also for child processes
    began = time.monotonic()
    taken = _machine_seconds()
    if not MODEL.exists():
        _run([sys.executable, "examples/make_quickstart.py", "--out", "build/quickstart"])
    console = Console(stderr=options.json, width=110)
    console.print(_machine(), highlight=False)
    chosen, tried = {}, list[Figure]()
    for who, settings in settings_to_try(options.setting, options.own_setting).items():
        chosen[who], figures = fastest(who, settings, console)
        tried += figures
    runs = entrants(chosen)
    rounds = compare(runs, options.rounds, options.steps)
    figures = [*tried, *seconds(rounds), *ratios(rounds)]
    if options.seeds:
        learned = learn(runs, options.seeds, options.learning_steps)
        figures += rewards(learned, options.learning_steps)
    wall = time.monotonic() - began
    others = max(0.0, _machine_seconds() - taken - _own_seconds()) / (wall * (os.cpu_count() or 1))
    show(figures, console, options.json)
    summary = f"{wall / 60:.0f} minutes; others took {others:.0%} of the machine"
    console.print(summary + (": not a quiet one" if others > QUIET else ""), highlight=False)


def settings_to_try(setting: str | None, own: str | None) -> dict[str, dict[str, Entrant]]:
    """Return the settings of TRL and of each system by name, or only the given ones."""
    theirs = [setting] if setting else list(SETTINGS)
    ours = [own] if own else list(OWN_SETTINGS)
    return {
        "TRL": {name: partial(run_trl, name) for name in theirs},
        **{
            who: {name: partial(run_streamrl, system, OWN_SETTINGS[name]) for name in ours}
            for who, system in SYSTEMS.items()
        },
    }


def entrants(chosen: Mapping[str, Entrant]) -> dict[str, Entrant]:
    """Return the trainers to compare by name: TRL unchanged, TRL without advantages of 0, and the systems."""
    trl = chosen["TRL"]
    return {"TRL": partial(trl, skips=False), LEAVES_OUT: trl, **{w: chosen[w] for w in SYSTEMS}}


def fastest(
    who: str, settings: Mapping[str, Entrant], console: Console
) -> tuple[Entrant, list[Figure]]:
    """Return the setting with the fewest seconds per step, and a figure of each setting that was tried."""
    steps = WARM_UP + TRIED_STEPS + COOL_DOWN
    found: dict[str, list[float]] = {}
    for name, run in settings.items() if len(settings) > 1 else ():
        try:
            found[name] = [seconds_of(run(steps, STILL, 0, limit=SLOWEST))]
        except RuntimeError as error:
            console.print(f"{who}, {name}: left out, {error}", highlight=False, markup=False)
    least = min((tries[0] for tries in found.values()), default=0.0)
    close = [name for name, tries in found.items() if tries[0] <= CLOSE * least]
    for number, name in product(range(1, TRIES), close if len(close) > 1 else ()):
        found[name].append(seconds_of(settings[name](steps, STILL, number)))
    chosen = min(
        close, key=lambda name: statistics.median(found[name]), default=next(iter(settings))
    )
    console.print(f"{who} at its fastest: {chosen}", highlight=False)
    return settings[chosen], [Figure(f"{who} tried, {name}: s/step", found[name]) for name in found]


def compare(runs: Mapping[str, Entrant], rounds: int, steps: int) -> list[dict[str, list[Step]]]:
    """Run all trainers in turn, `rounds` times."""
    steps += WARM_UP + COOL_DOWN
    return [
        {name: run(steps, STILL, number) for name, run in runs.items()} for number in range(rounds)
    ]


def learn(runs: Mapping[str, Entrant], seeds: int, steps: int) -> list[dict[str, list[Step]]]:
    """Train TRL and the systems from each seed."""
    return [
        {name: run(steps, LEARNING, seed) for name, run in runs.items() if name != LEAVES_OUT}
        for seed in range(seeds)
    ]


def seconds_of(steps: list[Step]) -> float:
    """Return the seconds of a step, without those at both ends."""
    counted = steps[WARM_UP - 1 : len(steps) - COOL_DOWN]
    return (counted[-1].time - counted[0].time) / (len(counted) - 1)


def seconds(rounds: list[dict[str, list[Step]]]) -> list[Figure]:
    """Return the seconds of a step and the tokens of each trainer."""
    figures = []
    for name in rounds[0]:
        taken = [seconds_of(each[name]) for each in rounds]
        tokens = statistics.mean(step.tokens for each in rounds for step in each[name])
        per_second = tokens * ROLLOUTS / statistics.median(taken)
        figures.append(Figure(f"{name}: s/step", taken, tokens, per_second))
    return figures


def ratios(rounds: list[dict[str, list[Step]]]) -> list[Figure]:
    """Return the speed of the systems relative to TRL, for each round."""
    return [
        Figure(
            f"{system}: times as fast as {rival}",
            [seconds_of(each[rival]) / seconds_of(each[system]) for each in rounds],
        )
        for rival in (LEAVES_OUT, "TRL")
        for system in SYSTEMS
    ]


def rewards(learned: list[dict[str, list[Step]]], steps: int) -> list[Figure]:
    """Return the mean rewards of the last steps, for each seed."""
    last = min(LAST, steps)
    return [
        Figure(
            f"{name}: reward, steps {steps - last + 1} to {steps}",
            [statistics.mean(step.reward for step in each[name][-last:]) for each in learned],
            statistics.mean(step.tokens for each in learned for step in each[name][-last:]),
        )
        for name in learned[0]
    ]


def run_trl(
    name: str,
    steps: int,
    rate: float,
    seed: int,
    limit: float | None = None,
    *,
    skips: bool = True,
) -> list[Step]:
    """Train with TRL in separate processes."""
    setting = SETTINGS[name]
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, *(many if setting.processes > 1 else [])]
        command += [str(HERE / "benchmarks/trl_training.py"), "--setting", name]
        command += ["--steps", str(steps), "--rate", str(rate), "--seed", str(seed)]
        command += ["--out", str(out), *(["--skips"] if skips else [])]
        _run(command, setting.environment, limit)
        lines = json.loads(out.read_text(encoding="utf-8"))
    return [Step(line["time"], line["reward"], line["tokens"]) for line in lines]


def run_streamrl(
    system: str,
    setting: Mapping[str, Any],
    steps: int,
    rate: float,
    seed: int,
    limit: float | None = None,
) -> list[Step]:
    """Execute the quickstart's run file with a system."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "seed": seed,
            "policies.system": system,
            "algorithm.steps": steps,
            "algorithm.learning_rate": rate,
            "execute.output": f"{folder}/run",
            "execute.checkpoint_every": steps,
            "execute.threads": 1,
            **setting,
        }
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-c", "from streamrl.cli import main; main()", "execute"]
        _run([*command, str(HERE / "examples/quickstart.toml"), *words], limit=limit)
        text = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8")
    lines = map(json.loads, text.splitlines())
    return [Step(line["time"], line["reward"], line["length_mean"]) for line in lines]


def show(figures: list[Figure], console: Console, as_json: bool) -> None:
    """Print medians and spreads, as a table or as one JSON object per figure."""
    table = Table("", "median", "least", "most", "tokens", "tokens/s", box=None)
    for figure in figures:
        name, values, tokens, per_second = figure
        found = [statistics.median(values), min(values), max(values)]
        if as_json:
            facts = dict(zip(("value", "least", "most"), found, strict=True))
            work = {"tokens": tokens, "tokens_per_second": per_second}
            print(json.dumps({"name": name, **facts, **work, "values": list(values)}), flush=True)
        cells = [f"{value:.3f}" for value in (found if len(values) > 1 else found[:1])]
        cells += [""] * (3 - len(cells))
        cells += ["" if tokens is None else f"{tokens:.1f}"]
        cells += ["" if per_second is None else f"{per_second:,.0f}"]
        table.add_row(name, *cells)
    if not as_json:
        console.print(table)


def _machine() -> str:
    """Return a description of the machine and of the package versions."""
    packages = ("streamrl", "trl", "torch", "transformers", "accelerate")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{platform.machine()}, {os.cpu_count()} cores, of which {CORES} are used; Python {platform.python_version()}, {versions}"


def _run(
    command: list[str], environment: Mapping[str, str] | None = None, limit: float | None = None
) -> None:
    """Run a command.

    Raises:
        RuntimeError: the command failed or exceeded its limit; it has the error or the last line.
    """
    variables = {**os.environ, "PYTHONPATH": str(HERE), **(environment or {})}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=HERE, env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {limit:.0f} s") from None
        finally:
            _kill(process.pid)
            process.wait()
            _reap()
        log.seek(0)
        lines = log.read().strip().splitlines() or ["it wrote nothing"]
    if status:
        why = next(
            (line for line in lines if re.match(r"(\[rank\d\]: )?\w*Error", line)), lines[-1]
        )
        raise RuntimeError(f"exit status {status}: {why}")


def _kill(pid: int) -> None:
    """Kill the process group of a process, and its child processes in other sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap() -> None:
    """Kill the remaining processes of a run, which this process has adopted, and wait for them."""
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def _machine_seconds() -> float:
    """Return the CPU seconds of all processes of this machine (Linux only)."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    of = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(who)[:2]) for who in of)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every trainer")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a round")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the comparison of rewards")
    parser.add_argument("--learning-steps", type=int, default=25)
    parser.add_argument("--setting", choices=SETTINGS, help="setting of TRL; others are not tried")
    parser.add_argument(
        "--own-setting", choices=OWN_SETTINGS, help="setting of streamrl; others are not tried"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per figure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
