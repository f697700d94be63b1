"""Run the whole fault matrix on real back ends, and write docs/fault-matrix.md.

Every cell is one executed run on this machine. A role of it dies, hangs, gets stuck or is slow at one of its
commands (`tests/fault_matrix.py`). A cell is sound if the run makes all of its steps, no rollout is lost or used twice,
and a fresh engine decides as the recorded one did. Finished cells are kept in a file, so an interrupted matrix continues.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import msgspec

from streamrl.engine.trace import read_trace, replay
from streamrl.executor.execute import execute
from streamrl.executor.launchers.handles import Handle
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.record.metrics import measure
from streamrl.runfile.files import load_run
from tests.fault_matrix import (
    AT_START,
    CASES,
    FAULTS,
    LOSSES,
    NEEDS,
    RESIZED,
    Case,
    Role,
    Strike,
)
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.tiny_model import WIDE_HEADS, save_tiny_tokenizer, tiny_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

PAGE = Path(__file__).parents[1] / "docs" / "fault-matrix.md"
STEPS = 4
PATIENCE = 2.0
"""Seconds without a sign of life after which a role is lost."""
LIMIT = 1200.0
"""Seconds after which a run counts as lost: more than ten starts of vLLM, after which the watchdog ends a stuck start."""
TRIES = 3
"""Runs of a cell whose command is never sent, because no rollout runs at that moment."""
ENGINES = ("transformers", "vllm")
TRAINERS = {
    "torch": (),
    "deepspeed": ("trainer.backend=deepspeed", "trainer.zero=3", "trainer.data_parallel=2"),
}
NEEDED = {"vllm": "vllm", "deepspeed": "deepspeed"}
"""Modules without which a back end is left out."""
LONG = {"abort": ("rollout.max_tokens=300", "rollout.max_running=2")}
"""Settings with which rollouts still run when the command is sent."""
SOUND, UNREACHED = "sound", "not reached"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run."""

    back_end: str
    role: Role
    method: str
    fault: str
    verdict: str
    """`SOUND`; `UNREACHED` if the run never sent the command; else what was wrong."""
    num_losses: int
    seconds: float

    @property
    def key(self) -> tuple[str, str]:
        """Return the back end and the name of the case."""
        return self.back_end, f"{self.role}-{self.method}-{self.fault}"


def cells() -> Iterator[tuple[str, Case]]:
    """Yield every back end with every case of its role."""
    # broken: needs an engine that can be broken. Changes of ranks: of scripted roles alone.
    cases = [
        case for case in CASES if case.fault != "broken" and NEEDS.get(case.method) is not RESIZED
    ]
    for back_end in (*ENGINES, *TRAINERS):
        role = "replica" if back_end in ENGINES else "trainer"
        module = NEEDED.get(back_end)
        if module is None or find_spec(module) is not None:
            yield from ((back_end, case) for case in cases if case.role == role)


def write_model(directory: Path) -> None:
    """Write a random model without end tokens, prompts and the run file."""
    save_tiny_tokenizer(directory / "model", SYMBOLS)
    model = tiny_model(len(SYMBOLS), max_position_embeddings=512, eos_token_id=None, **WIDE_HEADS)
    model.save_pretrained(directory / "model")
    prompts = ({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8))
    (directory / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    (directory / "run.toml").write_text(RUN_FILE)


def run_cell(directory: Path, back_end: str, case: Case) -> Cell:
    """Execute one run with its fault, and look at its books."""
    strike = Strike(case, _break)
    output = directory / "run"
    shutil.rmtree(output, ignore_errors=True)
    began_at = time.monotonic()
    try:
        with limited(LIMIT), exposing(strike):
            execute(load_run(directory / "run.toml", list(settings_of(back_end, case, output))))
        verdict, num_losses = verdict_of(output, strike, case)
    except Exception as error:
        verdict, num_losses = f"{type(error).__name__}: {error}", 0
    return Cell(
        back_end=back_end,
        role=case.role,
        method=case.method,
        fault=case.fault,
        verdict=verdict,
        num_losses=num_losses,
        seconds=round(time.monotonic() - began_at, 1),
    )


def settings_of(back_end: str, case: Case, output: Path) -> Iterator[str]:
    """Yield the changes of a cell's run file."""
    changes = {
        "rollout.backend": back_end if back_end in ENGINES else "transformers",
        "policies.system": "stream-async",
        "algorithm.steps": STEPS,
        "algorithm.prompts_per_step": 2,
        "cluster.pools.local.gpus_per_node": 4,
        "execute.output": str(output),
        "execute.patience": f"{PATIENCE} s",
        "execute.checkpoint_every": 1,
        **NEEDS.get(case.method, {}),
    }
    yield from (f"{key}={value}" for key, value in changes.items())
    yield from TRAINERS.get(back_end, ())
    yield from LONG.get(case.method, ())


def verdict_of(output: Path, strike: Strike, case: Case) -> tuple[str, int]:
    """Return the verdict on a run that ended, and the number of lost roles of the case's kind."""
    trace = read_trace(output / "trace.jsonl")
    losses = [e for e in trace.entries if isinstance(e.event, LOSSES[case.role])]
    if not strike.has_struck:
        return UNREACHED, len(losses)
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    if measure(trace).num_steps != STEPS:
        return f"{measure(trace).num_steps} of {STEPS} steps", len(losses)
    if replay(trace) is not None:
        return "the replay decides otherwise", len(losses)
    came_up = case.role != "replica" or case.method not in AT_START
    # Replicas wait for a stuck send no longer than the patience, and then the trainer sends again.
    is_sent_again = (case.method, case.fault) == ("send", "stuck")
    if case.is_lost and came_up and not losses and not is_sent_again:
        return "the loss was not noticed", 0
    return SOUND, len(losses)


@contextmanager
def exposing(strike: Strike) -> Iterator[None]:
    """Let a run's launcher start roles that can get the fault."""

    class Exposing(LocalLauncher):
        async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
            return strike.expose("replica", await super().replica(replica_id, kind, model))

        async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
            return strike.expose("trainer", await super().trainer(number, data_parallel))

    def make(roles: PlacedRoles, directory: RunDirectory, configs: RoleConfigs) -> LocalLauncher:
        return Exposing(configs, roles, directory)

    with patch("streamrl.executor.execute.make_launcher", make):
        yield


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in this thread after some seconds."""

    def end(*_: object) -> None:
        raise TimeoutError(f"the run has not ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


async def _break(_: object) -> None:
    raise NotImplementedError("cells have no broken engines")


def read_cells(path: Path) -> dict[tuple[str, str], Cell]:
    """Return the finished cells in a file."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    found = (msgspec.json.decode(line, type=Cell) for line in lines)
    return {cell.key: cell for cell in found}


def page(done: list[Cell], num_all: int) -> str:
    """Return the page: a table of each back end, and what was wrong."""
    lost = [cell for cell in done if cell.verdict not in (SOUND, UNREACHED)]
    num_sound = sum(cell.verdict == SOUND for cell in done)
    rows = [
        "# Fault matrix",
        "",
        f"`make matrix` executed {len(done)} of {num_all} runs and wrote this page. In each run, one role dies, hangs, gets "
        f"stuck or is slow at one of its commands. {num_sound} runs made all of their steps without losing a rollout, "
        f"{len(lost)} did not, and {len(done) - len(lost) - num_sound} never sent the command.",
        "",
        "| fault | meaning |",
        "|---|---|",
        "| dead | The process is killed (SIGKILL). |",
        f"| hung | The process is stopped (SIGSTOP). It is lost after {PATIENCE:g} s without a sign of life. |",
        "| stuck | The process answers pings, but never this call. The watchdog ends it. |",
        "| slow | The call takes 1 s longer. The role is not lost. |",
        "",
        "A cell has the seconds of the whole run and the number of lost roles. `ping` means that the role was idle.",
        "A run that never sends the command is *not reached*. An empty cell has no result: an idle role has no call that could be "
        "stuck or slow, and the other ones were not run to their end yet.",
    ]
    for back_end in dict.fromkeys(cell.back_end for cell in done):
        own = {(cell.method, cell.fault): cell for cell in done if cell.back_end == back_end}
        methods = list(dict.fromkeys(method for method, _ in own))
        faults = [each for each in FAULTS if each != "broken"]
        role = next(iter(own.values())).role
        rows += ["", f"## {role.capitalize()} on {back_end}", ""]
        rows += [f"| command | {' | '.join(faults)} |", "|---|" + "---|" * len(faults)]
        for method in methods:
            shown = [_shown(own.get((method, fault))) for fault in faults]
            rows.append(f"| {method} | {' | '.join(shown)} |")
    if lost:
        rows += ["", "## Runs that were lost", ""]
        rows += [f"- {cell.back_end}, {cell.key[1]}: {cell.verdict}" for cell in lost]
    return "\n".join([*rows, ""])


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.verdict == UNREACHED:
        return "not reached"
    losses = {0: "no loss", 1: "1 loss"}.get(cell.num_losses, f"{cell.num_losses} losses")
    what = losses if cell.verdict == SOUND else "**lost**"
    return f"{what}, {cell.seconds:.0f} s"


def main() -> None:
    """Run the cells that are not in the file yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=Path, default=Path("build/fault-matrix.jsonl"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after these")
    parser.add_argument("--back-ends", nargs="*", default=[*ENGINES, *TRAINERS])
    arguments = parser.parse_args()
    arguments.cells.parent.mkdir(parents=True, exist_ok=True)
    done, wanted = read_cells(arguments.cells), list(cells())
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as name:
        write_model(Path(name))
        for back_end, case in wanted:
            known = (back_end, str(case)) in done
            if known or back_end not in arguments.back_ends or time.monotonic() > end:
                continue
            cell = run_cell(Path(name), back_end, case)
            for _ in range(TRIES - 1):
                if cell.verdict == UNREACHED:
                    cell = run_cell(Path(name), back_end, case)
            done[cell.key] = cell
            with arguments.cells.open("ab") as file:
                file.write(msgspec.json.encode(cell) + b"\n")
            print(*cell.key, cell.verdict, f"{cell.seconds} s", flush=True)
    found = [done[key] for back_end, case in wanted if (key := (back_end, str(case))) in done]
    arguments.page.write_text(page(found, len(wanted)))
    lost = [cell for cell in found if cell.verdict not in (SOUND, UNREACHED)]
    print(json.dumps({"name": "matrix.runs", "value": len(found), "unit": "runs"}))
    print(json.dumps({"name": "matrix.lost", "value": len(lost), "unit": "runs"}))
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
