"""Check how well `simulate` predicts algorithms other than the quickstart's, from a profile of this machine.

| run          | difference to the quickstart                                                                |
|--------------|---------------------------------------------------------------------------------------------|
| ppo          | a critic: a second model on the trainer's cores                                              |
| dapo         | groups with uniform rewards are replaced; clip-higher; means over tokens                     |
| reward-model | a replica of a reward model on its own pool, in addition to the right answer                 |

As in `bench_profile.py` and `streamrl compare`, a simulation uses the recorded output lengths and
the recorded share of informative groups. The machine is profiled before and after the runs of a
round. The prediction is the mean over both profiles.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.bench_profile import Outcome, middle, predict, report
from benchmarks.quickstart import EXAMPLES, limits_of, make_quickstart, settings_of
from streamrl.cli.progress import make_progress
from streamrl.engine.trace import Trace
from streamrl.executor.execute import execute
from streamrl.executor.profiling.profile_file import make_setup, profile_model
from streamrl.hardware.measured_profile import write_measured
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run

ROUNDS, STEPS = 3, 12
LEARNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("quickstart.toml", ("algorithm.name=ppo",)),
    "dapo": (
        "quickstart.toml",
        (
            "algorithm.dynamic_sampling=true",
            "algorithm.correction=none",
            "algorithm.clip_high=0.28",
            "algorithm.loss_mean=token",
        ),
    ),
    "reward-model": ("quickstart-reward-model.toml", ()),
}
"""The example of each run, and its changed keys."""
WITHIN = 0.15
"""Error of a step that predictions should not exceed."""


def main() -> None:
    """Print every run, then one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=LEARNERS, action="append", help="all if absent")
    parser.add_argument("--quick", action="store_true", help="profile few points, as a smoke test")
    args = parser.parse_args()
    make_models(args.data)
    names = args.only or list(LEARNERS)
    runs = {name: make_run(name, args.data, args.steps) for name in names}
    with tempfile.TemporaryDirectory(prefix="bench-learners-") as scratch:
        show(compare(runs, args.data, Path(scratch), args.rounds, is_quick=args.quick))


def make_models(data: Path) -> None:
    """Create the quickstart's model and its reward model, if they do not exist."""
    make_quickstart(data)
    if not (data / "reward-model" / "config.json").is_file():
        make = [sys.executable, str(EXAMPLES / "make_reward_model.py"), "--data", str(data)]
        subprocess.run(make, check=True)


def make_run(name: str, data: Path, steps: int) -> Run:
    """Return the run of an algorithm, with the models of a directory."""
    example, changes = LEARNERS[name]
    run = load_run(EXAMPLES / example, [*settings_of(data, steps), *changes])
    model = str((data / "reward-model").resolve())
    rewards = tuple(
        msgspec.structs.replace(each, model=model) if each.scorer == "reward-model" else each
        for each in run.verifier.reward
    )
    verifier = msgspec.structs.replace(run.verifier, reward=rewards)
    found: Run = msgspec.structs.replace(run, verifier=verifier)
    return found


def compare(
    runs: dict[str, Run], data: Path, scratch: Path, rounds: int, *, is_quick: bool
) -> dict[str, list[Outcome]]:
    """Profile, execute each run once, profile again, and so on; return measured and predicted steps."""
    profiles = [scratch / f"profile-{number}.toml" for number in range(rounds + 1)]
    write_profile(data, next(iter(runs.values())), profiles[0], is_quick=is_quick)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    for number in range(rounds):
        done: list[tuple[str, Trace, Path]] = []
        for name, run in runs.items():
            output = scratch / f"{name}-{number}"
            place = msgspec.structs.replace(run.execute, output=str(output))
            trace = execute(msgspec.structs.replace(run, execute=place))
            done.append((name, trace, output / "trace.jsonl"))
            shutil.rmtree(output / "checkpoints")
        write_profile(data, next(iter(runs.values())), profiles[number + 1], is_quick=is_quick)
        for name, trace, file in done:
            around = profiles[number : number + 2]
            expected = mean(predict(trace, file, profile).step_time for profile in around)
            outcomes[name].append(Outcome(measure(trace).step_time, expected))
    return outcomes


def write_profile(data: Path, run: Run, path: Path, *, is_quick: bool) -> None:
    """Profile both models within the limits of a run file."""
    setup = make_setup(
        data / "model",
        gpu="cpu",
        dtype=run.model.dtype,
        threads=run.execute.threads,
        limits=limits_of(run),
        is_quick=is_quick,
        reward_model=data / "reward-model",
    )
    with make_progress() as progress:
        task = progress.add_task("profile", total=setup.num_points, facts="")
        found = profile_model(setup, "cpu", lambda what: progress.update(task, advance=1))
    write_measured(found, path)


def show(outcomes: dict[str, list[Outcome]]) -> None:
    """Print every run, then the figures of each algorithm as JSON."""
    table = Table("run", "measured", "predicted", "error")
    for name, ones in outcomes.items():
        for one in [*ones, middle(ones)]:
            what = name if one in ones else f"{name}, median"
            seconds = f"{one.measured:.3f} s", f"{one.predicted:.3f} s"
            table.add_row(what, *seconds, f"{one.predicted / one.measured - 1:+.1%}")
    Console(width=100).print(table)
    for name, ones in outcomes.items():
        errors = [one.predicted / one.measured - 1 for one in ones]
        report(f"step time of the {name} run, measured", middle(ones).measured, "s")
        report(f"step time of the {name} run, predicted", middle(ones).predicted, "s")
        report(f"error of the {name} run, median of rounds", median(errors), "ratio")
        within = sum(abs(error) <= WITHIN for error in errors) / len(errors)
        report(f"rounds of the {name} run within {WITHIN:.0%}", within, "ratio")


if __name__ == "__main__":
    main()
