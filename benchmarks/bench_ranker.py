"""Measure the gain of a ranker that learns, executed and simulated: examples/predictable.toml on this machine.

    random       random dispatch to replicas, first in first out
    learnt       longest first, by the lengths of earlier epochs
    opposite     longest first, by inverted expectations, until the ranker is switched off

Runs are in pairs with the same seed, one after the other. The result is the time of generation: from
the draw of a step's prompts to its last rollout, summed over all steps. This includes the first
epoch, in which nothing is known about lengths. Simulations use the profile of this machine and the
lengths that the model's outputs had before the first run. No other program may run on the machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks.quickstart import limits_of
from streamrl.engine.messages import ExpectationsChanged, Generated, PromptsDrawn
from streamrl.engine.trace import Trace, replay
from streamrl.executor.execute import execute
from streamrl.executor.profiling.profile_file import make_setup, profile_model
from streamrl.hardware.measured_profile import write_measured
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import simulate

ROOT = Path(__file__).parent.parent
RUN_FILE = ROOT / "examples" / "predictable.toml"
DATA = ROOT / "build" / "predictable"
ROUNDS = 10


class Dispatch(NamedTuple):
    """The dispatch settings of a run."""

    name: str
    settings: tuple[str, ...] = ()
    has_ranker: bool = True


RANDOM = Dispatch("random", ("policies.dispatch=random", "policies.order=fifo"), has_ranker=False)
LEARNT = Dispatch("learnt")
OPPOSITE = Dispatch("opposite", ("workload.ranker.history=false",))


class Generation(NamedTuple):
    """Seconds of generation of each step, and the step before which the ranker was switched off, if any."""

    times: list[float]
    off_at: int | None

    def after(self, step: int) -> float:
        """Return the seconds of generation from a step on."""
        return sum(self.times[step:])


def main() -> None:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--opposite", type=int, default=3, help="executed pairs with inverted expectations"
    )
    parser.add_argument(
        "--seeds", type=int, default=10, help="simulated pairs with inverted expectations"
    )
    parser.add_argument("--profile", type=Path, help="existing profile; measured now if absent")
    options = parser.parse_args()
    if not (DATA / "model" / "config.json").is_file():
        make = ("examples/make_quickstart.py", "--lengths", "skewed", "--out", "build/predictable")
        subprocess.run([sys.executable, *make], check=True, cwd=ROOT)
    with tempfile.TemporaryDirectory(prefix="bench-ranker-") as name:
        scratch = Path(name)
        path = options.profile or scratch / "profile.toml"
        if not path.is_file():
            _profile(path)
        write_opposites(scratch)
        for figure in figures(scratch, path, options):
            print(json.dumps(figure), flush=True)


def figures(scratch: Path, path: Path, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the figures of executed and simulated runs."""
    gains, simulated = [], []
    for seed in range(options.rounds):
        pair = [
            _run(scratch, path, dispatch, seed, options.steps)
            for dispatch in _alternating(LEARNT, seed)
        ]
        one, other = pair if seed % 2 else pair[::-1]
        gains.append(1 - sum(one.times) / sum(other.times))
        alike = [
            _simulate(scratch, path, dispatch, seed, options.steps) for dispatch in (LEARNT, RANDOM)
        ]
        simulated.append(1 - sum(alike[0].times) / sum(alike[1].times))
        print(
            f"seed {seed}: {gains[-1]:.1%} of generation, simulated {simulated[-1]:.1%}",
            file=sys.stderr,
        )
    if gains:
        yield _figure(
            "ranker/gain", 100 * median(gains), "%", runs=[round(100 * g, 1) for g in gains]
        )
        yield _figure("ranker/gain simulated", 100 * median(simulated), "%")
        yield _figure("ranker/gain apart", 100 * (median(gains) - median(simulated)), "points")
    costs = [
        _opposite(_run, scratch, path, seed, options.steps) for seed in range(options.opposite)
    ]
    alike = [
        _opposite(_simulate, scratch, path, seed, options.steps) for seed in range(options.seeds)
    ]
    for world, found in (("executed", costs), ("simulated", alike)):
        if found:
            before, after, off_at = zip(*found, strict=True)
            yield _figure(
                f"ranker/opposite, {world}: cost before it is off", 100 * median(before), "%"
            )
            yield _figure(
                f"ranker/opposite, {world}: cost from then on",
                100 * median(after),
                "%",
                worst=100 * max(after),
            )
            yield _figure(
                f"ranker/opposite, {world}: steps until it is off", median(off_at), "steps"
            )


def _alternating(dispatch: Dispatch, seed: int) -> tuple[Dispatch, Dispatch]:
    return (dispatch, RANDOM) if seed % 2 else (RANDOM, dispatch)


def _opposite(
    run: type[None] | object, scratch: Path, path: Path, seed: int, steps: int
) -> tuple[float, float, int]:
    """Return the cost of inverted expectations before and after the ranker is switched off, and the step of the switch."""
    assert callable(run)
    wrong, plain = (run(scratch, path, dispatch, seed, steps) for dispatch in (OPPOSITE, RANDOM))
    off_at = wrong.off_at
    if off_at is None:
        raise SystemExit(f"seed {seed}: the ranker was not switched off; use more --steps")
    before = sum(wrong.times[:off_at]) / sum(plain.times[:off_at]) - 1
    return before, wrong.after(off_at) / plain.after(off_at) - 1, off_at


def _run(scratch: Path, path: Path, dispatch: Dispatch, seed: int, steps: int) -> Generation:
    """Execute a run, and check its decisions by a replay."""
    run = _read(scratch, dispatch, seed, steps, is_executed=True)
    output = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    run = replace(run, execute=replace(run.execute, output=str(output)))
    trace = execute(fill_policies(run, Costs.load(_with(run, path))))
    if (divergence := replay(trace)) is not None:
        raise SystemExit(f"{output}: the replay made another decision: {divergence}")
    return generation(trace)


def _simulate(scratch: Path, path: Path, dispatch: Dispatch, seed: int, steps: int) -> Generation:
    return generation(
        simulate(_with(_read(scratch, dispatch, seed, steps, is_executed=False), path))
    )


def _read(scratch: Path, dispatch: Dispatch, seed: int, steps: int, *, is_executed: bool) -> Run:
    settings = [f"seed={seed}", f"algorithm.steps={steps}", *dispatch.settings]
    if dispatch is OPPOSITE and is_executed:
        settings.append(f"workload.prompts={scratch / 'opposite.jsonl'}")
    elif dispatch is OPPOSITE:
        settings += [
            "workload.lengths.ranker=scores",
            f"workload.lengths.ranker_scores={scratch / 'opposite.csv'}",
        ]
    run = load_run(RUN_FILE, settings)
    if not dispatch.has_ranker:
        run = replace(run, workload=replace(run.workload, ranker=None))
    return run


def _with(run: Run, path: Path) -> Run:
    return replace(run, costs=replace(run.costs, profile=str(path)))


def generation(trace: Trace) -> Generation:
    """Return the seconds of generation of each step in a trace, and the step of the switch-off."""
    step_of: dict[int, int] = {}
    drawn: dict[int, float] = {}
    ended: dict[int, float] = {}
    off_at = None
    for time, event, _ in trace.entries:
        match event:
            case PromptsDrawn(step, _, groups):
                drawn.setdefault(step, time)
                step_of.update((rollout, step) for group in groups for rollout in group.rollouts)
            case Generated(rollout):
                ended[step_of[rollout]] = time
            case ExpectationsChanged(reason=reason) if "switched off" in reason and off_at is None:
                off_at = len(drawn)
            case _:
                pass  # not about generation
    return Generation([ended[step] - drawn[step] for step in sorted(drawn)], off_at)


def write_opposites(scratch: Path) -> None:
    """Write prompts, and scores for a simulation, with inverted expectations of output lengths."""
    with (DATA / "lengths.csv").open(newline="") as file:
        rows = [(int(row["prompt_id"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    longest = max(tokens for _, tokens in rows)
    by_prompt: dict[int, list[int]] = {}
    for prompt, tokens in rows:
        by_prompt.setdefault(prompt, []).append(tokens)
    lines = (DATA / "prompts.jsonl").read_text().splitlines()
    with (scratch / "opposite.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            own = by_prompt[number]
            expected = max(1, longest + 1 - round(sum(own) / len(own)))
            file.write(json.dumps({**json.loads(line), "expected_tokens": expected}) + "\n")
    scores = "".join(f"{-tokens},{tokens}\n" for _, tokens in rows)
    (scratch / "opposite.csv").write_text("score,output_tokens\n" + scores)


def _profile(path: Path) -> None:
    run = load_run(RUN_FILE, [])
    setup = make_setup(
        *(Path(str(run.model.path)),),
        gpu="cpu",
        dtype=run.model.dtype,
        threads=1,
        limits=limits_of(run),
        is_quick=False,
    )
    write_measured(profile_model(setup, "cpu", lambda what: None), path)


def _figure(name: str, value: float, unit: str, **more: object) -> dict[str, object]:
    return {**more, "name": name, "value": round(value, 2), "unit": unit}


if __name__ == "__main__":
    main()
