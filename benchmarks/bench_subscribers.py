"""Measure the cost of secondary trainers for a run, and whether they learn: executed here, on an otherwise idle machine.

| part       | result                                                                                           |
|------------|--------------------------------------------------------------------------------------------------|
| generation | output tokens per second with 1, 2 and 4 secondary trainers that only count (`counts_only`), over  |
|            | those of a run without any, in pairs of alternating order; then with real ones (RLOO,              |
|            | REINFORCE++) on the same cores, executed, and simulated from a profile of this machine             |
| engine     | CPU time of the engine per rollout, without and with four secondary trainers: events of a          |
|            | simulated run, replayed through a new engine; the median of the rounds                             |
| learning   | a primary trainer (GRPO) and three secondary ones (RLOO, DPO, REINFORCE++) on one stream: held-out  |
|            | prompts that each one's last checkpoint solves, sampled outside the run, minus those that the       |
|            | initial model solves with the same random numbers; then the same with learning rate 0              |

    python -m benchmarks.bench_subscribers --part engine
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import msgspec

from benchmarks.quickstart import make_quickstart
from benchmarks.reality_runs import profile
from streamrl.engine.messages import Generated, Stepped
from streamrl.engine.systems import build_engine
from streamrl.engine.trace import Trace
from streamrl.executor.execute import execute
from streamrl.record.metrics import measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import secondary_trainer_directory
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.files import make_run, read_table
from streamrl.sim.costs.costs import Costs
from streamrl.sim.world import SimWorld, simulate
from streamrl.workload.workload import SimulatedWorkload

HERE = Path(__file__).parent
RUN_FILE, ENGINE_FILE = HERE / "subscribers.toml", HERE / "engine.toml"
FIRST_STEP = 2
"""Tokens are counted from the end of this step of the primary trainer, because processes start before it."""
COUNTS = 1, 2, 4
REAL = "rloo", "reinforce++"
LEARNING = ("rloo", 4e-4), ("dpo", 4e-4), ("reinforce++", 2e-4)
"""Algorithms of the secondary trainers that should learn, and their learning rates."""
ROUNDS = 7
"""Rounds of the measurement of the engine's time."""
SAMPLES = 2
"""Outputs of each held-out prompt."""
MOST_TOKENS = 128
PARTS = "generation", "engine", "learning"


def main() -> None:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="all if absent")
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument(
        "--pairs", type=int, default=6, help="pairs of runs for each number of secondary trainers"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of learning runs")
    parser.add_argument(
        "--steps", type=int, default=8, help="primary trainer's steps of the learning runs"
    )
    parser.add_argument("--prompts", type=int, default=200, help="number of held-out prompts")
    parser.add_argument("--quick", action="store_true", help="a profile of few points")
    args = parser.parse_args()
    make_quickstart(args.data)
    with tempfile.TemporaryDirectory(prefix="bench-subscribers-") as scratch:
        for part in args.part or PARTS:
            match part:
                case "generation":
                    time_generation(args.data, Path(scratch), args.pairs, is_quick=args.quick)
                case "engine":
                    time_engine()
                case "learning":
                    learn(args.data, Path(scratch), args.seeds, args.steps, args.prompts)


def report(name: str, value: float, unit: str, **more: object) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "value": value, "unit": unit, **more}), flush=True)


def run_with(
    secondary: list[dict[str, Any]], data: Path, output: Path, changes: dict[str, Any]
) -> Run:
    """Return the benchmark's run with secondary trainers.

    Args:
        secondary: keys of each section, without pool and portions.
        data: directory of the quickstart's model and prompts.
        output: the run directory.
        changes: keys of the sections "algorithm" and "run" (the file's own keys).
    """
    table = read_table(RUN_FILE)
    primary = table["trainer"]
    table["trainer"] = [primary, *({**primary, **own} for own in secondary)]
    table["algorithm"] |= changes.get("algorithm", {})
    table |= changes.get("run", {})
    table["model"]["path"] = str((data / "model").resolve())
    table["workload"]["prompts"] = str((data / "prompts.jsonl").resolve())
    table["workload"]["lengths"]["source"] = str((data / "lengths.csv").resolve())
    table["execute"]["output"] = str(output.resolve())
    return make_run(table, HERE)


def counters(number: int) -> list[dict[str, Any]]:
    """Return secondary trainers that only count."""
    return [{"name": f"counter-{n}", "counts_only": True} for n in range(1, number + 1)]


def learners(algorithms: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return secondary trainers that learn, one per algorithm."""
    return [{"name": name, "algorithm": {"name": name}} for name in algorithms]


# Generation ---------------------------------------------------------------------------------------


def time_generation(data: Path, scratch: Path, pairs: int, *, is_quick: bool) -> None:
    """Report the slowdown of generation by secondary trainers, counting ones and real ones."""
    for number in COUNTS:
        found = [slowed(counters(number), data, scratch, n)[0] for n in range(pairs)]
        report_ratios(
            f"tokens per second with {number} counting trainers, over those without", found
        )
    (scratch / "first").mkdir()
    (scratch / "first" / "model").symlink_to((data / "model").resolve())
    path = profile(scratch, "first", scratch / "profile.toml", is_quick=is_quick)
    real, simulated = [], []
    for number in range(pairs):
        ratio, traces = slowed(learners(REAL), data, scratch, number)
        real.append(ratio)
        alone, followed = (throughput(predicted(*each, path)) for each in traces)
        simulated.append(followed / alone)
    what = f"tokens per second with {' and '.join(REAL)} on the same cores, over those without"
    report_ratios(f"{what}, executed", real)
    report_ratios(f"{what}, simulated", simulated)


def report_ratios(name: str, ratios: list[float]) -> None:
    """Report the mean of some ratios with its standard error."""
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    report(name, mean(ratios), "ratio", error=error, median=median(ratios), each=ratios)


def slowed(
    secondary: list[dict[str, Any]], data: Path, scratch: Path, number: int
) -> tuple[float, list[tuple[Trace, Path]]]:
    """Execute a run alone and with secondary trainers; return the ratio of their speeds.

    Even and odd pairs have different orders.
    """
    done: dict[bool, tuple[Trace, Path]] = {}
    for has_secondary in (False, True) if number % 2 == 0 else (True, False):
        output = Path(tempfile.mkdtemp(dir=scratch))
        run = run_with(secondary if has_secondary else [], data, output, {"run": {"seed": number}})
        done[has_secondary] = execute(run), output / "trace.jsonl"
        assert ledger_of_run(done[has_secondary][0], output).is_balanced, output
        shutil.rmtree(output / "checkpoints")
    traces = [done[False], done[True]]
    alone, followed = (throughput(trace) for trace, _ in traces)
    return followed / alone, traces


def throughput(trace: Trace) -> float:
    """Return output tokens per second between the ends of two steps of the primary trainer; aborted tokens count once."""
    made = [time for time, event, _ in trace.entries if _is_primary_step(event)]
    first, last = made[FIRST_STEP - 1], made[-1]
    known: dict[int, int] = {}
    tokens = 0
    for at, event, _ in trace.entries:
        if isinstance(event, Generated):
            tokens += (event.tokens - known.get(event.rollout, 0)) * (first < at <= last)
            known[event.rollout] = event.tokens
    return tokens / (last - first)


def _is_primary_step(event: object) -> bool:
    return isinstance(event, Stepped) and event.trainer == 0


def predicted(trace: Trace, file: Path, profile_file: Path) -> Trace:
    """Simulate an executed run from a profile of this machine, with the recorded lengths and advantages."""
    replace = msgspec.structs.replace
    run = replace(trace.run, workload=recorded_workload(trace, file))
    return simulate(replace(run, costs=CostsConfig(profile=str(profile_file))))


# Engine -------------------------------------------------------------------------------------------


def time_engine() -> None:
    """Report the CPU time of the engine per rollout, without secondary trainers and with four."""
    for number in (0, 4):
        run = engine_run(number)
        trace = SimWorld(run, Costs.load(run), SimulatedWorkload(run)).run()
        rollouts = sum(isinstance(event, Generated) for _, event, _ in trace.entries)
        found = [replay_time(trace) / rollouts * 1000 for _ in range(ROUNDS)]
        steps = [trainer.num_steps for trainer in measure(trace).trainers]
        name = f"engine CPU time per rollout, {number} secondary trainers"
        report(name, median(found), "ms", least=min(found), rollouts=rollouts, steps=steps)


def engine_run(num_secondary: int) -> Run:
    """Return a run of 1,024 rollouts per step with `num_secondary` secondary trainers of four algorithms."""
    table = read_table(ENGINE_FILE)
    table["model"]["name"] = "qwen2.5-1.5b"
    primary = table["trainer"]
    names = ("rloo", "dpo", "reinforce++", "dr-grpo")[:num_secondary]
    own = ({**primary, "name": name, "algorithm": {"name": name}} for name in names)
    table["trainer"] = [primary, *own]
    table["cluster"]["pools"]["h800"]["nodes"] = 1 + num_secondary
    table["algorithm"] |= {"name": "grpo", "steps": 4, "prompts_per_step": 128, "group_size": 8}
    table["rollout"] |= {"replicas": 20}
    table["cluster"]["pools"]["h200"]["nodes"] = 3
    table["policies"]["system"] = "stream-async"
    return make_run(table, HERE)


def replay_time(trace: Trace) -> float:
    """Return the CPU seconds that a new engine takes to handle a trace's events."""
    engine = build_engine(trace.run)
    began_at = time.process_time()
    for at, event, _ in trace.entries:
        engine.handle(event, at)
    return time.process_time() - began_at


# Learning -----------------------------------------------------------------------------------------


def learn(data: Path, scratch: Path, seeds: int, steps: int, num_prompts: int) -> None:
    """Report the gain of each trainer's checkpoint over the initial model, for all seeds and with learning rate 0."""
    names = ["grpo", *(name for name, _ in LEARNING)]
    prompts = held_out(num_prompts)
    before = solved(data / "model", data / "model", prompts)
    report(f"{num_prompts} held-out prompts, initial model", mean(before), "mean reward")
    gains: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        output = scratch / f"learning-{seed}"
        for name, gain in learned(data, output, prompts, before, steps, seed, 1.0).items():
            gains[name].append(gain)
    for name, found in gains.items():
        report(f"{name} beats the initial model by, least of the seeds", min(found), "mean reward")
    still = learned(data, scratch / "still", prompts, before, min(steps, 4), 0, 0.0)
    report("learning rate 0 beats the initial model by, most", max(still.values()), "mean reward")
    assert all(gain > 0 for found in gains.values() for gain in found), gains
    assert all(gain <= 0 for gain in still.values()), still


def learned(
    data: Path,
    output: Path,
    prompts: list[dict[str, Any]],
    before: list[float],
    steps: int,
    seed: int,
    rate: float,
) -> dict[str, float]:
    """Execute one run with all learning rates times `rate`; return each trainer's gain over the initial model."""
    secondary = [
        {
            "name": name,
            "backlog": 4,
            "algorithm": {"name": name, "learning_rate": rate * own},
        }
        for name, own in LEARNING
    ]
    algorithm = {"steps": steps, "learning_rate": rate * 4e-4}
    run = run_with(secondary, data, output, {"algorithm": algorithm, "run": {"seed": seed}})
    trace = execute(run)
    balance = ledger_of_run(trace, output)
    assert balance.is_balanced, balance.faults
    places = {"grpo": output} | {
        name: secondary_trainer_directory(output, n, name)
        for n, (name, _) in enumerate(LEARNING, start=1)
    }
    found = {}
    for book, (name, place) in zip(balance.trainers, places.items(), strict=True):
        newest = max(p.parent for p in (place / "checkpoints").glob("v*/position.json"))
        after = solved(newest, data / "model", prompts)
        found[name] = mean(after) - mean(before)
        gains = [b - a for a, b in zip(before, after, strict=True)]
        report(
            f"{name}, seed {seed}, learning rates times {rate:g}: more than the initial model",
            found[name],
            "mean reward",
            error=stdev(gains) / len(gains) ** 0.5,
            checkpoint=newest.name,
            trained=book.trained,
            lost=book.dropped,
        )
    return found


def held_out(num_prompts: int) -> list[dict[str, Any]]:
    """Return records of the quickstart's task that are neither in its training data nor in its runs."""
    from examples.make_quickstart import TASKS, entries, make_record

    unseen = entries(9_000_000_000, TASKS["even"])  # training data starts at 1e9, prompts at 1.5e9
    return [make_record(next(unseen)) for _ in range(num_prompts)]


def solved(model: Path, tokenizer: Path, records: list[dict[str, Any]]) -> list[float]:
    """Return the mean reward of each record's outputs, sampled with the same random numbers for every model."""
    import torch
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    from examples.make_quickstart import sample
    from streamrl.executor.verifier.scorers import make_scorer
    from streamrl.runfile.roles_config import RewardConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    network = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    repeated = [record for record in records for _ in range(SAMPLES)]
    rows = sample(network, words, [record["prompt"] for record in repeated], MOST_TOKENS)
    scorer = make_scorer(RewardConfig(scorer="reasoning-gym"))
    grade = scorer.load()
    texts = [words.decode(row, skip_special_tokens=True) for row in rows]
    rewards = [
        grade(record)(scorer.read(text, len(row)))
        for record, text, row in zip(repeated, texts, rows, strict=True)
    ]
    return [mean(rewards[n : n + SAMPLES]) for n in range(0, len(rewards), SAMPLES)]


if __name__ == "__main__":
    main()
