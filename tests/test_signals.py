"""A signal in any phase of a run on any back end: a checkpoint, the right status, one line, and nothing left.

Every pair of a phase and a back end is run, every pair of a phase and a signal, and every pair of a back end and a signal.
Each process also gets each signal while weights, or a checkpoint, are half written.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from streamrl.engine.trace import read_trace
from streamrl.executor.checkpoint_export import choose_checkpoint
from streamrl.executor.checkpoints import Checkpoints
from streamrl.executor.checksums import find_damage
from streamrl.record.ledger import describe_faults
from streamrl.record.restarts import ledger_of_run
from streamrl.record.run_directory import read_metrics
from tests.sglang_server import SglangServer
from tests.signalled_run import LEAST_VERSION, MISSED, PHASES, WRITINGS
from tests.test_end_to_end import SYMBOLS
from tests.test_external import write_run
from tests.tiny_model import WIDE_HEADS, tiny_model

pytestmark = pytest.mark.signals
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTERM,SIGTERM")
RANKS = ("cluster.pools.local.gpus_per_node=4", "trainer.data_parallel=2")
BACK_ENDS: dict[str, tuple[str, ...]] = {
    "torch": (),
    "fsdp2": (*RANKS, "trainer.backend=fsdp2", "trainer.zero=3"),
    "deepspeed": (*RANKS, "trainer.backend=deepspeed", "trainer.zero=3"),
    "external": ("rollout.backend=external",),
    "vllm": ("rollout.backend=vllm",),
}
NAMES = {
    "SIGINT": "Ctrl-C",
    "SIGTERM": "terminated",
    "SIGHUP": "the terminal was closed",
    "SIGQUIT": "Ctrl-\\",
}
STEPS = 6
LIMIT = 600.0
"""Seconds of a run on a busy machine: two starts of vLLM, and the grace."""
GRACE = 60
MARK = "STREAMRL_TEST_SIGNALS"
"""Environment variable that all processes of a run inherit."""
GONE = 10.0
"""Seconds in which everything of a run must be gone after its end."""


class Case(NamedTuple):
    """One run."""

    back_end: str
    phase: str
    signals: str


CASES = [
    Case(back_end, phase, SIGNALS[(row + column) % len(SIGNALS)])
    for column, back_end in enumerate(BACK_ENDS)
    for row, phase in enumerate(PHASES)
]


def processes_with(mark: str) -> list[str]:
    """Return the command lines of the processes that have inherited a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
    return [each for each in found if each]


def wait_until_gone(mark: str) -> None:
    """Raise `AssertionError` if processes of a run are left."""
    deadline = time.monotonic() + GONE
    while left := processes_with(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


ALONE = """
mount -t tmpfs -o mode=1777 tmpfs /dev/shm || exit 99
left=$1; shift
"$@"; status=$?
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -z "$(ls -A /dev/shm)" ] && break; sleep 1; done
ls -A /dev/shm > "$left"
exit $status
"""
"""Runs a command with a shared memory of its own, and writes what it has left there to a file. External servers read
weights from the shared memory of all.
"""


def with_own_shared_memory(left: Path) -> list[str]:
    """Return the words before a command that let it have shared memory of its own; none where the user may not."""
    words = ["unshare", "--mount", "sh", "-c", ALONE, "sh", str(left)]
    tried = subprocess.run([*words, "true"], capture_output=True)
    return words if tried.returncode == 0 else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_a_signal_saves_the_run_says_how_to_go_on_and_leaves_nothing(
    tmp_path: Path, case: Case
) -> None:
    mark, left = uuid.uuid4().hex, tmp_path / "left"
    with ExitStack() as stack:
        urls = ["http://127.0.0.1:1"]
        file = write_run(tmp_path, urls, api="sglang")
        if case.back_end == "external":
            urls = [stack.enter_context(SglangServer(tmp_path / "model")).url]
            write_run(tmp_path, urls, api="sglang")
        else:
            text = file.read_text().partition("[rollout.external]")[0]
            file.write_text(text)
        changes = [
            *(f"algorithm.steps={STEPS}", "rollout.replicas=1", f"execute.grace={GRACE} s"),
            f"execute.checkpoint_every={1 if case.phase == 'checkpoint' else 1000}",
            *BACK_ENDS[case.back_end],
        ]
        if case.phase == "evaluation":
            changes += ["evaluation.prompts=prompts.jsonl", "evaluation.every=1"]
        if case.phase in ("push", "training"):
            changes.append("policies.system=stream-sync")
        words = [word for change in changes for word in ("--set", change)]
        done = subprocess.run(
            [
                *(with_own_shared_memory(left) if case.back_end != "external" else ()),
                *(sys.executable, "-m", "tests.signalled_run", case.phase, case.signals),
                *("execute", str(file), *words),
            ],
            env=os.environ | {MARK: mark},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    wait_until_gone(mark)
    assert not left.exists() or left.read_text() == ""
    check(case, done, tmp_path / "run")


def check(case: Case, done: subprocess.CompletedProcess[str], output: Path) -> None:
    """Check the status and the last line of a run, and the checkpoint that it names."""
    first, *others = case.signals.split(",")
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    number = signal.Signals[first]
    if case.phase == "end" and done.returncode in (0, 128 + number, -number):
        return  # all steps were made; only tables were left to write
    assert done.returncode == 128 + number, (done.returncode, done.stderr[-3000:])
    found = re.fullmatch(
        rf"streamrl: {re.escape(NAMES[first])} after step (\d+): (step (\d+) is|no step is) saved( yet)?; "
        r"go on with: streamrl execute .* --resume",
        last,
    )
    assert found is not None, done.stderr[-3000:]
    step, saved = int(found[1]), found[3]
    assert case.phase == "start" or step >= LEAST_VERSION
    if not others and case.phase != "start":
        assert saved == found[1], last
    if saved is not None:
        assert choose_checkpoint(output, "last").version == int(saved)


# While weights or a checkpoint are half written -----------------------------------------------------

SINGLE_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGSTOP", "SIGKILL")
LARGE = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 2048}
"""A model of 100 MB, of which a checkpoint has three times as much: it takes a second to write."""
RELAYED = ("sync.mode=delta", "model.dtype=bfloat16", "rollout.replicas=2")


class Strike(NamedTuple):
    """A signal to one process while something is written."""

    writing: str
    role: str
    signal: str


STRIKES = [
    Strike(writing, role, name)
    for writing in WRITINGS
    for role in ("driver", "trainer", "replica", "relay")
    for name in SINGLE_SIGNALS
    if role != "relay" or writing == "writing-weights"
]


def checkpoints_are_whole(output: Path) -> bool:
    """Return whether each checkpoint is whole or absent, and nothing half written is left."""
    place = output / "checkpoints"
    whole = Checkpoints(place)
    left = [path.name for path in place.iterdir() if path.name.startswith(".")]
    return not left and all(
        not find_damage(whole.path_of(version), reads_all=True) for version in whole.versions()
    )


@pytest.mark.parametrize("strike", STRIKES, ids=lambda strike: "-".join(strike))
def test_a_signal_while_weights_or_a_checkpoint_are_written_loses_nothing(
    tmp_path: Path, strike: Strike
) -> None:
    mark, output = uuid.uuid4().hex, tmp_path / "run"
    file = write_run(tmp_path, ["http://127.0.0.1:1"], api="sglang")
    file.write_text(file.read_text().partition("[rollout.external]")[0])
    own = {"max_position_embeddings": 64, **WIDE_HEADS, **LARGE, "num_attention_heads": 8}
    model = tiny_model(len(SYMBOLS), **own, pad_token_id=0, eos_token_id=1)
    model.save_pretrained(tmp_path / "model")
    changes = [
        *(f"algorithm.steps={STEPS}", "rollout.replicas=1", f"execute.grace={GRACE} s"),
        *("execute.checkpoint_every=1", "policies.system=stream-sync", "execute.patience=20 s"),
        *(("cluster.pools.local.gpus_per_node=4", *RELAYED) if strike.role == "relay" else ()),
    ]
    words = ["execute", str(file), *(word for each in changes for word in ("--set", each))]

    def run(*before: str) -> subprocess.CompletedProcess[str]:
        left = tmp_path / "left"
        done = subprocess.run(
            [*with_own_shared_memory(left), sys.executable, *before, *words],
            env=os.environ | {MARK: mark},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        wait_until_gone(mark)
        assert not left.exists() or left.read_text() == ""
        return done

    done = run("-m", "tests.signalled_run", strike.writing, f"{strike.signal}@{strike.role}")
    assert done.returncode != MISSED, "all was written before the signal"
    number = signal.Signals[strike.signal]
    ends = strike.role == "driver" and strike.signal != "SIGSTOP"
    if ends and strike.signal != "SIGKILL":
        check(Case("torch", "push", strike.signal), done, output)
    elif not ends:
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    if ends:
        assert done.returncode in (128 + number, -number)
        words.append("--resume")
        done = run("-c", "from streamrl.cli import main; main()")
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert checkpoints_are_whole(output)
    versions = [line["step"] for line in read_metrics(output) if "step" in line]
    assert versions == [*range(1, STEPS + 1)]
    ledger = ledger_of_run(read_trace(output / "trace.jsonl"), output)
    assert ledger.is_balanced, describe_faults(ledger)
