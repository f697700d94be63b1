"""Compare `streamrl execute` with TRL's GRPOTrainer on one machine: seconds of a step, and a held-out score.

    make bench-trl
    python -m benchmarks.bench_trl --quick       four minutes, with settings that were the fastest
    python -m benchmarks.bench_trl --continue    go on after an interruption

Both train the quickstart's model on the same prompts: 24 prompts per step with 8 rollouts of at most 128
tokens. Both use AdamW, the PPO clip, a mean over tokens, rewards of one scorer, float32 and two
cores in all. Both run under the interpreter of this script, so on the same torch and transformers.
All of TRL's `SETTINGS` and of streamrl's `OWN_SETTINGS` are tried first, for each system. Those
close to the fastest run again, and the fastest of each system are compared.

TRL computes rollouts whose advantage is 0, though they have no gradient; streamrl leaves them out.
So TRL is compared twice: unchanged, and without these rollouts, which is the fair comparison.

Seconds: rounds in which each trainer runs once, in its own processes, at a learning rate at which
lengths do not change. The order alternates. The first two and the last two steps do not count. A
system that generates ahead has no rollouts ahead at the start, and nothing to generate at the end.

Scores: each trainer trains from each seed at the quickstart's learning rate. `streamrl evaluate` scores
the last weights of all on the same held-out prompts. Differences from TRL are paired by prompt.

Nothing else may run on the machine. The CPU time of other processes is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import resource
import shutil
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

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.trl_training import CORES, HERE, MODEL, ROLLOUTS, SETTINGS
from streamrl.executor.checkpoint_export import choose_checkpoint
from streamrl.executor.libc import prctl
from streamrl.record.evaluation import EvaluationResult, Score, difference, mean_of
from streamrl.report.fidelity import with_section
from streamrl.runfile.evaluation_config import EvaluationConfig

STILL, LEARNING = 1e-6, 4e-4
"""Learning rates: one at which lengths do not change, and the quickstart's."""
WARM_UP = COOL_DOWN = 2
"""Steps at both ends that do not count. If a system generates one step ahead, its steps alternate;
count an even number.
"""
TRIED_STEPS = 6
"""Counted steps of a setting in the first trials."""
HELD_OUT, SAMPLES = 200, 4
"""Prompts that nothing is trained on, the last ones of the file, and rollouts of each in an evaluation."""
SCORER = "reasoning-gym"
TRIES, CLOSE = 3, 1.25
"""Number of trials of a setting, and the slowdown up to which it is tried again. A single trial is
too noisy.
"""
SLOWEST = 120
"""Seconds after which the trial of a setting is stopped."""
SYSTEMS = {"sync": "stream-sync", "async": "stream-async"}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "as the example": {},
    "all at once": {"rollout.max_running": ROLLOUTS, "rollout.shares_prefixes": True},
    "two replicas": {
        "rollout.replicas": 2,
        "rollout.max_running": ROLLOUTS // 2,
        "rollout.shares_prefixes": True,
        "cluster.pools.local.gpus_per_node": 3,
    },
    "two replicas, two ranks": {
        "rollout.replicas": 2,
        "rollout.max_running": ROLLOUTS // 2,
        "rollout.shares_prefixes": True,
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
FULL = {"rounds": 3, "steps": 10, "seeds": 10, "learning_steps": 25}
QUICK = {
    "rounds": 2,
    "steps": 6,
    "seeds": 1,
    "learning_steps": 12,
    "setting": "two processes, static cache",
    "sync_setting": "two replicas",
    "async_setting": "two replicas",
}
"""Options that are not given. The settings of `--quick` were the fastest on two cores."""
INPUTS = HERE / "build/bench-trl"
TRAINED_ON, HELD, RUN_FILE = (
    INPUTS / name for name in ("trained.jsonl", "held-out.jsonl", "run.toml")
)
RESULTS = INPUTS / "results.json"
SECTION = "Speed beside TRL"
"""Section of docs/executing.md."""
COMMAND = [sys.executable, "-c", "from streamrl.cli import main; main()"]
EVALUATED_WITH = {"rollout.max_tokens": 128, "execute.threads": CORES}
"""Changes of the run that evaluates."""
CONFIDENCE = 0.95
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
    interval: tuple[float, float] | None = None
    """95 % interval of the mean."""


Entrant = Callable[..., list[Step]]
"""Trains for a number of steps at a learning rate, from a seed. It may have a `limit` of seconds, and a
directory for the last `weights`.
"""


class Finished:
    """Results of finished runs, in a file, so that an interrupted benchmark can go on."""

    def __init__(self, path: Path, *, continues: bool) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        if continues and path.exists():
            self._found = json.loads(path.read_text(encoding="utf-8"))

    def steps(self, name: str, run: Callable[[], list[Step]]) -> list[Step]:
        """Return the steps of a run, which is made unless it is finished."""
        return [Step(*each) for each in self.result(name, run)]

    def result(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a finished result, or make it and write it to the file."""
        if name not in self._found:
            self._found[name] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self._found), encoding="utf-8")
            partial.replace(self._path)
        return self._found[name]


def main() -> None:
    """Find the fastest settings of TRL and of each system, then compare their seconds and their scores."""
    options = _read_arguments()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # also for child processes
    began = time.monotonic()
    taken = _machine_seconds()
    write_inputs()
    console = Console(stderr=options.json, width=110)
    console.print(_machine(), highlight=False)
    finished = Finished(RESULTS, continues=options.continues)
    names, chosen, tried = {}, {}, list[Figure]()
    for who, settings in settings_to_try(options).items():
        names[who], figures = fastest(who, settings, finished, console)
        chosen[who] = settings[names[who]]
        tried += figures
    runs = entrants(chosen)
    rounds = compare(runs, options.rounds, options.steps, finished)
    figures = [*tried, *seconds(rounds), *ratios(rounds)]
    if options.seeds:
        figures += scores(learn(runs, options.seeds, options.learning_steps, finished))
    wall = time.monotonic() - began
    others = max(0.0, _machine_seconds() - taken - _own_seconds()) / (wall * (os.cpu_count() or 1))
    show(figures, console, options.json)
    if options.page is not None:
        lines = section(names, figures, options, finished.result("share of others", lambda: others))
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_section(page, SECTION, lines), encoding="utf-8")
    summary = f"{wall / 60:.0f} minutes; others took {others:.0%} of the machine"
    console.print(summary + (": not a quiet one" if others > QUIET else ""), highlight=False)


def write_inputs() -> None:
    """Make the quickstart, and write the prompts to train on, the held-out ones, and the run file without evaluation."""
    if not MODEL.exists():
        _run([sys.executable, "examples/make_quickstart.py", "--out", "build/quickstart"])
    lines = (MODEL.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    INPUTS.mkdir(parents=True, exist_ok=True)
    TRAINED_ON.write_text("".join(lines[:-HELD_OUT]), encoding="utf-8")
    HELD.write_text("".join(lines[-HELD_OUT:]), encoding="utf-8")
    text = (HERE / "examples/quickstart.toml").read_text(encoding="utf-8")
    own = re.sub(r"^\[evaluation\]\n(?:[^\[].*\n|\n)*", "", text, flags=re.MULTILINE)
    RUN_FILE.write_text(own, encoding="utf-8")


def settings_to_try(options: argparse.Namespace) -> dict[str, dict[str, Entrant]]:
    """Return the settings of TRL and of each system by name, or only the given ones."""
    theirs = [options.setting] if options.setting else list(SETTINGS)
    given = {"sync": options.sync_setting, "async": options.async_setting}
    return {
        "TRL": {name: partial(run_trl, name) for name in theirs},
        **{
            who: {
                name: partial(run_streamrl, system, OWN_SETTINGS[name])
                for name in ([given[who]] if given[who] else OWN_SETTINGS)
            }
            for who, system in SYSTEMS.items()
        },
    }


def entrants(chosen: Mapping[str, Entrant]) -> dict[str, Entrant]:
    """Return the trainers to compare by name: TRL unchanged, TRL without advantages of 0, and the systems."""
    trl = chosen["TRL"]
    return {"TRL": partial(trl, skips=False), LEAVES_OUT: trl, **{w: chosen[w] for w in SYSTEMS}}


def fastest(
    who: str, settings: Mapping[str, Entrant], finished: Finished, console: Console
) -> tuple[str, list[Figure]]:
    """Return the name of the setting with the fewest seconds per step, and a figure of each setting that was tried."""
    steps = WARM_UP + TRIED_STEPS + COOL_DOWN
    found: dict[str, list[float]] = {}

    def tries(name: str, number: int, **limit: float) -> float:
        run = partial(settings[name], steps, STILL, number, **limit)
        return seconds_of(finished.steps(f"{who}, {name}, try {number}", run))

    for name in settings if len(settings) > 1 else ():
        try:
            found[name] = [tries(name, 0, limit=SLOWEST)]
        except RuntimeError as error:
            console.print(f"{who}, {name}: left out, {error}", highlight=False, markup=False)
    least = min((each[0] for each in found.values()), default=0.0)
    close = [name for name, each in found.items() if each[0] <= CLOSE * least]
    for number, name in product(range(1, TRIES), close if len(close) > 1 else ()):
        found[name].append(tries(name, number))
    chosen = min(
        close, key=lambda name: statistics.median(found[name]), default=next(iter(settings))
    )
    console.print(f"{who} at its fastest: {chosen}", highlight=False)
    return chosen, [Figure(f"{who} tried, {name}: s/step", found[name]) for name in found]


def compare(
    runs: Mapping[str, Entrant], rounds: int, steps: int, finished: Finished
) -> list[dict[str, list[Step]]]:
    """Run all trainers in turn, `rounds` times, in alternating order."""
    steps += WARM_UP + COOL_DOWN
    found = []
    for number in range(rounds):
        order = list(runs) if number % 2 == 0 else list(reversed(runs))
        each = {
            name: finished.steps(
                f"{name}, round {number} of {steps} steps",
                partial(runs[name], steps, STILL, number),
            )
            for name in order
        }
        found.append({name: each[name] for name in runs})
    return found


def learn(
    runs: Mapping[str, Entrant], seeds: int, steps: int, finished: Finished
) -> list[dict[str, EvaluationResult]]:
    """Train TRL and the systems from each seed, and evaluate their last weights."""

    def trained(run: Entrant, seed: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder, "weights")
            run(steps, LEARNING, seed, weights=weights)
            return evaluate(weights)

    return [
        {
            name: msgspec.convert(
                finished.result(
                    f"{name}, seed {seed} of {steps} steps", partial(trained, run, seed)
                ),
                EvaluationResult,
                str_keys=True,
            )
            for name, run in runs.items()
            if name != LEAVES_OUT
        }
        for seed in range(seeds)
    ]


def evaluate(weights: Path) -> Any:
    """Return the evaluation of a model on the held-out prompts."""
    options = ["--prompts", str(HELD), "--scorer", SCORER, "--samples", str(SAMPLES), "--json"]
    output = _run([*COMMAND, "evaluate", str(weights), *options, *_words(EVALUATED_WITH)])
    (found,) = json.loads(output[output.index("{") :])["evaluations"].values()
    return found


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


def scores(learned: list[dict[str, EvaluationResult]]) -> list[Figure]:
    """Return the held-out scores of each seed, and how far the systems are above TRL."""
    config = EvaluationConfig(prompts="", samples=SAMPLES)
    figures = [
        Figure(
            f"{name}: held-out {each.main}",
            [seed[name].scores[each.main].value for seed in learned],
        )
        for name, each in learned[0].items()
    ]
    for system in SYSTEMS:
        changes = [
            difference(each[system], each["TRL"], config)[each[system].main].score
            for each in learned
        ]
        figures.append(
            Figure(
                f"{system}: score above TRL's",
                [each.value for each in changes],
                interval=_mean_interval(changes),
            )
        )
    return figures


def _mean_interval(changes: Sequence[Score]) -> tuple[float, float]:
    """Return the 95 % interval of the mean difference over seeds, by their spread.

    With one seed it is that of its prompts.
    """
    if len(changes) == 1:
        return changes[0].low, changes[0].high
    mean = mean_of([each.value for each in changes], CONFIDENCE)
    return mean.low, mean.high


def run_trl(
    name: str,
    steps: int,
    rate: float,
    seed: int,
    limit: float | None = None,
    *,
    skips: bool = True,
    weights: Path | None = None,
) -> list[Step]:
    """Train with TRL in separate processes."""
    setting = SETTINGS[name]
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, *(many if setting.processes > 1 else [])]
        command += [str(HERE / "benchmarks/trl_training.py"), "--setting", name]
        command += ["--steps", str(steps), "--rate", str(rate), "--seed", str(seed)]
        command += ["--prompts", str(TRAINED_ON), "--out", str(out)]
        command += ["--skips"] if skips else []
        command += [] if weights is None else ["--weights", str(weights)]
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
    *,
    weights: Path | None = None,
) -> list[Step]:
    """Execute the quickstart's run file with a system."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "seed": seed,
            "model.path": MODEL,
            "workload.prompts": TRAINED_ON,
            "workload.lengths.source": MODEL.parent / "lengths.csv",
            "policies.system": system,
            "algorithm.steps": steps,
            "algorithm.learning_rate": rate,
            "execute.output": f"{folder}/run",
            "execute.checkpoint_every": steps,
            "execute.threads": 1,
            **setting,
        }
        _run([*COMMAND, "execute", str(RUN_FILE), *_words(changes)], limit=limit)
        text = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8")
        if weights is not None:
            shutil.copytree(last_checkpoint(Path(folder, "run")), weights)
    lines = map(json.loads, text.splitlines())
    return [Step(line["time"], line["reward"], line["length_mean"]) for line in lines]


def last_checkpoint(run: Path) -> Path:
    """Return the directory of a finished run's weights."""
    return choose_checkpoint(run, "last").path


def _words(changes: Mapping[str, Any]) -> list[str]:
    """Return changes of a run file as options of a command."""
    texts = {k: str(v).lower() if isinstance(v, bool) else v for k, v in changes.items()}
    return [word for key, text in texts.items() for word in ("--set", f"{key}={text}")]


def show(figures: list[Figure], console: Console, as_json: bool) -> None:
    """Print medians and spreads, as a table or as one JSON object per figure."""
    columns = ("", "median", "least", "most", "tokens", "tokens/s", "95 % interval of the mean")
    table = Table(*columns, box=None)
    for figure in figures:
        name, values, tokens, per_second, interval = figure
        found = [statistics.median(values), min(values), max(values)]
        if as_json:
            facts = dict(zip(("value", "least", "most"), found, strict=True))
            work = {"tokens": tokens, "tokens_per_second": per_second}
            facts |= {"interval": interval} if interval else {}
            print(json.dumps({"name": name, **facts, **work, "values": list(values)}), flush=True)
        cells = [f"{value:.3f}" for value in (found if len(values) > 1 else found[:1])]
        cells += [""] * (3 - len(cells))
        cells += ["" if tokens is None else f"{tokens:.1f}"]
        cells += ["" if per_second is None else f"{per_second:,.0f}"]
        cells += ["" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}"]
        table.add_row(name, *cells)
    if not as_json:
        console.print(table)


def section(
    names: Mapping[str, str], figures: Sequence[Figure], options: argparse.Namespace, others: float
) -> list[str]:
    """Return the lines of the page's section."""
    by_name = {figure.name: figure for figure in figures}
    score = next((name for name in by_name if ": held-out " in name), None)
    metric = "" if score is None else score.rpartition(" ")[2]
    lines = [
        "`make bench-trl` writes this section. TRL's GRPOTrainer and `streamrl execute` train the quickstart's model on the same",
        f"prompts, {ROLLOUTS} rollouts a step, each with the fastest of its settings: {'; '.join(f'{who}: {name}' for who, name in names.items())}. TRL computes rollouts whose",
        "advantage is 0, and streamrl leaves them out. So TRL is measured again without them, which is the fair comparison. Values are",
        f"medians, with the least and the most, of {options.rounds} alternating rounds of {options.steps} steps, and of {options.seeds} seeds that train",
        f"for {options.learning_steps} steps and are scored on {HELD_OUT} held-out prompts.",
        "",
        f"| | seconds of a step | times as fast as TRL | times as fast as TRL, advantages of 0 left out | {metric} | above TRL's |",
        "|---|---|---|---|---|---|",
    ]
    for who in ("TRL", LEAVES_OUT, *SYSTEMS):
        names_of = (
            f"{who}: s/step",
            f"{who}: times as fast as TRL",
            f"{who}: times as fast as {LEAVES_OUT}",
            f"{who}: held-out {metric}",
        )
        cells = [_range(by_name.get(name)) for name in names_of]
        above = by_name.get(f"{who}: score above TRL's")
        cells.append("" if above is None else _mean_with_interval(above))
        lines.append(f"| {SYSTEMS.get(who, who)} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"The last column is the mean over seeds with its 95 % interval. Measured on {datetime.date.today()}: {_machine()}. Other processes",
        f"took {others:.0%} of the machine.",
    ]


def _mean_with_interval(figure: Figure) -> str:
    """Return the mean of a difference, and its interval."""
    mean = f"{statistics.mean(figure.values):+.3f}"
    if figure.interval is None:
        return mean
    low, high = figure.interval
    return f"{mean} ({low:+.3f} to {high:+.3f})"


def _range(figure: Figure | None) -> str:
    """Return the median of a figure, and the least and most value."""
    if figure is None:
        return ""
    values = figure.values
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _machine() -> str:
    """Return a description of the machine and of the package versions."""
    packages = ("streamrl", "trl", "torch", "transformers", "accelerate")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{platform.machine()}, {os.cpu_count()} cores, of which {CORES} are used; Python {platform.python_version()}, {versions}"


def _run(
    command: list[str], environment: Mapping[str, str] | None = None, limit: float | None = None
) -> str:
    """Run a command, and return its output.

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
        output = log.read()
        lines = output.strip().splitlines() or ["it wrote nothing"]
    if status:
        why = next(
            (line for line in lines if re.match(r"(\[rank\d\]: )?\w*Error", line)), lines[-1]
        )
        raise RuntimeError(f"exit status {status}: {why}")
    return output


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
    parser.add_argument("--quick", action="store_true", help="four minutes: few steps, one seed")
    parser.add_argument(
        "--continue", dest="continues", action="store_true", help=f"use what {RESULTS} has"
    )
    parser.add_argument("--rounds", type=int, help="rounds of every trainer; default 3")
    parser.add_argument("--steps", type=int, help="counted steps of a round; default 10")
    parser.add_argument("--seeds", type=int, help="seeds of the comparison of scores; default 10")
    parser.add_argument("--learning-steps", type=int, help="default 25")
    parser.add_argument("--setting", choices=SETTINGS, help="setting of TRL; others are not tried")
    for who in SYSTEMS:
        parser.add_argument(
            f"--{who}-setting", choices=OWN_SETTINGS, help=f"of {who}; others are not tried"
        )
    parser.add_argument("--json", action="store_true", help="one JSON object per figure")
    parser.add_argument("--page", type=Path, help="docs/executing.md, whose section is written")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
