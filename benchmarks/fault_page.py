"""Write docs/reliability.md from the results of `benchmarks/bench_faults.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from benchmarks.fault_results import KINDS, SIMULATED, Cell
from streamrl.runfile.simulation_config import FaultKind

FAULTS: dict[FaultKind, str] = {
    "replica-dies": "A replica's process is killed. Another replica continues its rollouts from the tokens on disk "
    "(`execute.save_tokens_every`). A new replica starts with the newest weights.",
    "replica-hangs": "A replica's process is stopped (SIGSTOP). It neither answers nor computes for `execute.patience`. "
    "Then it is killed and replaced.",
    "replica-garbles": "A replica returns another rollout's id, tokens that do not exist, or no id. "
    "The answer is refused as a whole, and the rollout is generated again.",
    "trainer-dies-training": "The trainer is killed between micro-batches. It restarts at its last checkpoint. "
    "Replicas with newer weights load that version, and rollouts sampled from the newer weights are dropped.",
    "trainer-dies-pushing": "The trainer is killed while it writes weights. No replica loads them, and the files are removed.",
    "trainer-dies-saving": "The trainer is killed while it writes a checkpoint. It restarts at the previous checkpoint.",
    "link-slows": "Pushes take 20 times as long for a while. Nothing needs repair.",
    "link-drops": "A push is lost. It is repeated with the newest weights, up to `policies.max_attempts` times in a row.",
    "verifier-stalls": "The scoring processes are stopped for a while, and rewards wait. "
    "A stop beyond the time limit of a command would restart the verifier.",
    "reward-model-dies": "A replica of the reward model is killed. Another replica, or its replacement, scores its rollouts "
    "again. The runs below have no reward model.",
    "reward-model-hangs": "A replica of the reward model is stopped (SIGSTOP). After `execute.patience` it is killed, "
    "with the same reaction.",
    "disk-full": "The disk is full when a checkpoint is written. Saving is repeated, up to `policies.max_attempts` times "
    "in a row. The previous checkpoint stays as it was.",
    "driver-dies": "The controller is killed (SIGKILL; executed only). Its workers end. `--resume` continues from the newest "
    "checkpoint. Rollouts that this version or an older one sampled continue from their saved tokens. Faults that have struck "
    "do not strike again.",
}


def page(cells: list[Cell]) -> Iterator[str]:
    """Yield the lines of docs/reliability.md."""
    num_balanced = sum(not cell.ledger for cell in cells)
    yield "# See which failures a run survives"
    yield ""
    yield (
        f"`make faults` injected faults into {len(cells)} runs and wrote this page. Every run ends with a check of its "
        f"ledger, the record of all rollouts. The ledger balances in {num_balanced} of the {len(cells)} runs. A run file plans "
        "faults with `[[faults]]`, for simulated and executed runs alike ([executing.md](executing.md#inject-faults))."
    )
    yield ""
    yield "The tables count:"
    yield ""
    yield "- *lost*: rollouts that were started and neither trained on nor dropped with a reason;"
    yield "- *twice*: rollouts in two steps that count;"
    yield (
        "- *wrong*: rollouts that were trained on although their weights were rolled back, and steps in which replica and "
        "trainer disagree about log-probabilities;"
    )
    yield "- *hung*: runs that did not end by themselves."
    yield ""
    yield "## Faults and reactions"
    yield ""
    yield from (f"- **{kind}**: {text}" for kind, text in FAULTS.items())
    simulated = [cell for cell in cells if cell.key.world == "simulated"]
    executed = [cell for cell in cells if cell.key.world == "executed"]
    if simulated:
        yield from _simulated_table(simulated)
    if executed:
        yield from _executed_tables(executed)


def _simulated_table(cells: list[Cell]) -> Iterator[str]:
    calm = {(c.key.system, c.key.seed): c for c in cells if c.key.kind == "none"}
    yield from ("", "## Simulated", "")
    yield (
        "The runs have Qwen2.5-7B, replicas on 8 H20 and a trainer on 8 H800 (`benchmarks/faults.toml`). Colocated runs have both "
        f"on 8 H20. Each run makes 8 steps of {median(c.seconds for c in calm.values()) / 8:.0f} s (median) and saves a "
        "checkpoint every third step. A cell shows the runs that made all steps, and the median delay against the run without "
        "the fault."
    )
    yield ""
    yield f"| fault | {' | '.join(SIMULATED)} | lost | twice | wrong | hung | detected after |"
    yield f"|---{'|--:' * (len(SIMULATED) + 5)}|"
    for kind in KINDS:
        own = [cell for cell in cells if cell.key.kind == kind]
        if own:
            columns = (
                _cell([c for c in own if c.key.system == system], calm) for system in SIMULATED
            )
            yield f"| {kind} | {' | '.join(columns)} | {_sums(own)} | {_seconds(own, kind)} |"
    yield f"| none | {' | '.join(f'{_complete([c for c in calm.values() if c.key.system == s])}' for s in SIMULATED)} | {_sums([*calm.values()])} | |"


def _executed_tables(cells: list[Cell]) -> Iterator[str]:
    yield from ("", "## Executed", "")
    yield (
        "The runs train a random two-layer model on CPUs, with two replicas and a trainer in their own processes "
        "(`benchmarks/faults-executed.toml`). Each run gets all eleven faults in random order, and is resumed after the one "
        "that kills the controller. `execute.patience` is 2 s. With two trainer ranks, a fault hits one rank, which ends the "
        "other."
    )
    yield ""
    yield "| system | complete | lost | twice | wrong | hung | dropped or rolled back | time without faults | time with all faults |"
    yield f"|---{'|--:' * 8}|"
    for system in dict.fromkeys(c.key.system for c in cells):
        own = [c for c in cells if c.key.system == system and c.key.kind == "all"]
        (calm,) = (c for c in cells if c.key.system == system and c.key.kind == "none")
        dropped = sum(c.books.dropped + c.books.rolled_back for c in own) / max(1, len(own))
        drawn = sum(c.books.drawn for c in own) / max(1, len(own))
        yield (
            f"| {system} | {_complete(own)} | {_sums(own)} | {dropped:.0f} of {drawn:.0f} rollouts | "
            f"{calm.seconds:.0f} s | {median(c.seconds for c in own):.0f} s |"
        )
    yield from (
        "",
        "A fault is *repaired* when the next new step is made and the lost role works again. Most of this time is the start of a "
        "worker, which imports torch. The times are medians and maxima.",
        "",
        "| fault | detected after | at most | repaired after | at most |",
        "|---|--:|--:|--:|--:|",
    )
    own = [c for c in cells if c.key.kind == "all"]
    for kind in KINDS:
        columns = (
            _range([getattr(c, name)[kind] for c in own if kind in getattr(c, name)])
            for name in ("noticed", "mended")
        )
        yield f"| {kind} | {' | '.join(columns)} |"


def _cell(cells: list[Cell], calm: dict[tuple[str, int], Cell]) -> str:
    lost = median(c.seconds - calm[c.key.system, c.key.seed].seconds for c in cells)
    return f"{_complete(cells)}, {lost:+.0f} s"


def _complete(cells: list[Cell]) -> str:
    return f"{sum(cell.is_complete for cell in cells)}/{len(cells)}"


def _sums(cells: list[Cell]) -> str:
    totals: Counter[str] = Counter()
    for cell in cells:
        totals.update(lost=cell.books.lost, twice=cell.books.twice, wrong=cell.books.wrong)
        totals.update(hung=cell.hung)
    return " | ".join(str(totals[name]) for name in ("lost", "twice", "wrong", "hung"))


def _seconds(cells: list[Cell], kind: str) -> str:
    found = [cell.noticed[kind] for cell in cells if kind in cell.noticed]
    return f"{median(found):.0f} s" if found else ""


def _range(found: list[float]) -> str:
    return f"{median(found):.2f} s | {max(found):.2f} s" if found else " | "
