"""What a ranker that learns is worth, executed and simulated: examples/predictable.toml on this machine.

    random       rollouts dealt to replicas at random, first in first out
    learnt       the longest first, by what prompts took in earlier epochs
    opposite     the longest first by expectations that say the opposite, until the ranker is switched off

Pairs of runs with one seed each, in turn. What counts is generation: from the draw of a step's prompts to its last
rollout, all steps together, those of the first epoch too, in which nothing is known. Simulations know the profile of
this machine and the lengths that the model's outputs had before the first run. Nothing else may run meanwhile.
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


class Way(NamedTuple):
    """How a run is dispatched."""

    name: str
    settings: tuple[str, ...] = ()
    has_ranker: bool = True


RANDOM = Way("random", ("policies.dispatch=random", "policies.order=fifo"), has_ranker=False)
LEARNT = Way("learnt")
OPPOSITE = Way("opposite", ("workload.ranker.history=false",))


class Generation(NamedTuple):
    """Seconds of generation of each step, and where the ranker was switched off: before this step, if at all."""

    times: list[float]
    off_at: int | None

    def after(self, step: int) -> float:
        """Return the seconds from a step on."""
        return sum(self.times[step:])


def main() -> None:
    """Print one JSON object a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--opposite", type=int, default=3, help="pairs with the opposite, executed")
    parser.add_argument("--seeds", type=int, default=10, help="pairs with the opposite, simulated")
    parser.add_argument("--profile", type=Path, help="measured before; else it is now")
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
    """Yield the figures, of executed runs and of simulated ones."""
    gains, simulated = [], []
    for seed in range(options.rounds):
        pair = [_run(scratch, path, way, seed, options.steps) for way in _in_turn(LEARNT, seed)]
        one, other = pair if seed % 2 else pair[::-1]
        gains.append(1 - sum(one.times) / sum(other.times))
        alike = [_simulate(scratch, path, way, seed, options.steps) for way in (LEARNT, RANDOM)]
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


def _in_turn(way: Way, seed: int) -> tuple[Way, Way]:
    return (way, RANDOM) if seed % 2 else (RANDOM, way)


def _opposite(
    run: type[None] | object, scratch: Path, path: Path, seed: int, steps: int
) -> tuple[float, float, int]:
    """Return what a ranker costs that says the opposite, before and after it is switched off, and when that is."""
    assert callable(run)
    wrong, plain = (run(scratch, path, way, seed, steps) for way in (OPPOSITE, RANDOM))
    off_at = wrong.off_at
    if off_at is None:
        raise SystemExit(f"seed {seed}: the ranker was not switched off")
    before = sum(wrong.times[:off_at]) / sum(plain.times[:off_at]) - 1
    return before, wrong.after(off_at) / plain.after(off_at) - 1, off_at


def _run(scratch: Path, path: Path, way: Way, seed: int, steps: int) -> Generation:
    """Execute, and have the trace decided again."""
    run = _read(scratch, way, seed, steps, is_executed=True)
    output = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    run = replace(run, execute=replace(run.execute, output=str(output)))
    trace = execute(fill_policies(run, Costs.load(_with(run, path))))
    if (divergence := replay(trace)) is not None:
        raise SystemExit(f"{output}: a replay decides otherwise: {divergence}")
    return generation(trace)


def _simulate(scratch: Path, path: Path, way: Way, seed: int, steps: int) -> Generation:
    return generation(simulate(_with(_read(scratch, way, seed, steps, is_executed=False), path)))


def _read(scratch: Path, way: Way, seed: int, steps: int, *, is_executed: bool) -> Run:
    settings = [f"seed={seed}", f"algorithm.steps={steps}", *way.settings]
    if way is OPPOSITE and is_executed:
        settings.append(f"workload.prompts={scratch / 'opposite.jsonl'}")
    elif way is OPPOSITE:
        settings += [
            "workload.lengths.ranker=scores",
            f"workload.lengths.ranker_scores={scratch / 'opposite.csv'}",
        ]
    run = load_run(RUN_FILE, settings)
    if not way.has_ranker:
        run = replace(run, workload=replace(run.workload, ranker=None))
    return run


def _with(run: Run, path: Path) -> Run:
    return replace(run, costs=replace(run.costs, profile=str(path)))


def generation(trace: Trace) -> Generation:
    """Return from a trace how long each step's rollouts took, and when its ranker was switched off."""
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
                pass  # says nothing of generation
    return Generation([ended[step] - drawn[step] for step in sorted(drawn)], off_at)


def write_opposites(scratch: Path) -> None:
    """Write prompts, and scores for a simulation, that expect the opposite of what outputs take."""
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
