"""docs/reliability.md: what `benchmarks/bench_faults.py` found, in words and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from benchmarks.fault_books import KINDS, SIMULATED, Cell
from streamrl.runfile.simulation_config import FaultKind

FAULTS: dict[FaultKind, str] = {
    "replica-dies": "A replica's process is killed. Its socket ends, so its rollouts go on elsewhere after the tokens "
    "that lie on disk (`execute.save_tokens_every`), and another replica is started in its place, with the newest weights.",
    "replica-hangs": "A replica's process is stopped (SIGSTOP). It answers no ping and computes nothing for "
    "`execute.patience`; then it is killed and replaced.",
    "replica-garbles": "A replica answers with another rollout's id, with tokens that are not there, or does not say "
    "whose they are. The answer is refused before anything of it is entered, and the rollout is generated again.",
    "trainer-dies-training": "The trainer is killed between micro-batches. It comes up again at its last checkpoint; "
    "replicas that have newer weights load that, and what was sampled from those is dropped.",
    "trainer-dies-pushing": "The same while it writes weights: none of them is ever loaded, and what it wrote is removed.",
    "trainer-dies-saving": "The same while it writes a checkpoint, which is complete or not there: the one before counts.",
    "link-slows": "Pushes take 20 times as long for a while. Nothing is to be mended.",
    "link-drops": "A push is lost. It is made again, up to `policies.max_attempts` times in a row, with the newest weights.",
    "verifier-stalls": "The scoring processes are stopped for a while. Rewards wait; were it for longer than the limit "
    "of a command, the verifier would be killed and asked again.",
    "reward-model-dies": "A replica of the reward model is killed. What it was scoring fails and is scored again, by another "
    "replica or by the one that is started in its place (not among the runs below, which have no reward model).",
    "reward-model-hangs": "The same of one that is stopped (SIGSTOP), once it has been silent for `execute.patience`.",
    "disk-full": "A checkpoint is written to a disk without room. It is tried again, up to `policies.max_attempts` times "
    "in a row, and the one before stays as it was.",
    "driver-dies": "The process that decides is killed (SIGKILL), which no simulation has. Its workers end, and "
    "`--resume` goes on from the newest checkpoint, and with the tokens of rollouts that it still stands by; faults that "
    "have struck do not strike again.",
}


def page(cells: list[Cell]) -> Iterator[str]:
    """Yield the lines of docs/reliability.md."""
    yield "# What breaks, and what becomes of the run"
    yield ""
    yield (
        f"`make faults` wrote this page, from {len(cells)} runs. Faults are planned in a run file (`[[faults]]`) and strike simulated and executed runs "
        "by the same plan. *Lost* are rollouts that were drawn and neither trained on nor dropped with a reason, *twice* "
        "those in two steps that count, *wrong* those trained on though their weights were taken back, and steps in which "
        "replica and trainer disagree about log-probabilities; *hung* is what came to no end by itself. The ledger that every run ends with "
        f"balances in {sum(not cell.ledger for cell in cells)} of them."
    )
    yield ""
    yield from (f"- **{kind}** {text}" for kind, text in FAULTS.items())
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
        "Qwen2.5-7B, replicas on 8 H20 and a trainer on 8 H800 (colocated: both on 8 H20), `benchmarks/faults.toml`: "
        f"8 steps of {median(c.seconds for c in calm.values()) / 8:.0f} s in the median, a checkpoint every third. A cell "
        "is how many runs had all their steps, and the median of the seconds that they took longer than without the fault."
    )
    yield ""
    yield f"| fault | {' | '.join(SIMULATED)} | lost | twice | wrong | hung | noticed after |"
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
        "A random two-layer model on CPUs, two replicas and a trainer in processes of their own, "
        "`benchmarks/faults-executed.toml`: each run meets all eleven faults, in an order drawn by its seed, and is resumed after the one that kills the driver. "
        "`execute.patience` is 2 s. *Mended* is when the next new step is made and what was lost serves again; starting a "
        "worker, which imports torch, is most of it. Of two ranks of a trainer one is struck, which ends the other."
    )
    yield ""
    yield "| system | complete | lost | twice | wrong | hung | dropped or rolled back | undisturbed | with all faults |"
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
        "| fault | noticed after | at most | mended after | at most |",
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
