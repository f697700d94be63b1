"""Check the executor on this machine's GPU in under ten minutes, and measure what predictions need.

    make gpu                                             # results in build/gpu
    make gpu GPU_PYTHON=python3 GPU_OUT=DIR GPU_MINUTES=9

| part        | what it checks or measures                                                              |
|-------------|-----------------------------------------------------------------------------------------|
| card        | versions, memory, bandwidth, matrix products, the host link, checksums                  |
| trainer     | gradients and log-probabilities by dtype, packing, recomputation, against the CPU's     |
| replica     | log-probability gap to the trainer, before and after weight loads                       |
| switch      | sleep and wake of a colocated system; push and load of 1.2 GB of weights                |
| weights     | weights from the trainer's process to a replica's: CUDA IPC on a GPU, gloo on a CPU     |
| fsdp2       | a step of FSDP2 on one rank, against one of the torch back end                          |
| evaluation  | a colocated run with held-out evaluations                                               |
| memory      | peak memory of training steps against the memory model of `streamrl doctor`             |
| profile     | `streamrl profile` of a small model                                                     |
| run         | executed steps beside their simulation from that profile                                |
| tables      | operator tables in the format of profiles/measured                                      |
| accept      | the acceptance test of a rented node, for a small plan on this card                     |
| profile-medium, run-medium | the same with 222 million parameters                                     |

Each part is a separate process with a time limit, so a crash or a hang ends only that part. Each
result is a line of OUT/results.jsonl, written as soon as it is known. Other output of the parts goes to
OUT/log.txt. A part is skipped if too little of the time budget is left. On a machine without a GPU, the
same code runs with small shapes, and checks of CUDA kernels are skipped. The exit status is 1 if a
result is outside its tolerance, or if a part did not end by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_record import RESULTS, Recorder, read_results, table

LOG = "log.txt"
RESERVE = 3.0
"""Seconds that are reserved for the table at the end."""
GRACE = 10.0
"""Seconds for a killed part to end. A part that waits for the driver may never end."""
ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "4",  # for weight checksums; the launcher gives roles at least as many
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # otherwise an import that looks for a GPU starts CUDA
}


class Place(NamedTuple):
    """The directories and the time limit of a part."""

    scratch: Path
    """Directory of models and run directories. All parts share it."""
    out: Path
    seconds: float
    """Time limit of the part, or of all parts."""


class Part(NamedTuple):
    """A group of checks in its own process."""

    bound: float
    """Time limit in seconds."""
    least: float
    """Seconds of time budget that the part needs to be started."""
    run: Callable[[Recorder, Place], None]


def _card(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_card import check_ceilings, check_environment

    check_environment(recorder, place.scratch)
    check_ceilings(recorder, place.scratch)


def _trainer(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_training import check_gradients, check_kernels

    check_gradients(recorder, place.scratch)
    check_kernels(recorder, place.scratch)


def _replica(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_rollout import check_gaps

    check_gaps(recorder, place.scratch)


def _switch(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_rollout import check_switch

    check_switch(recorder, place.scratch, place.out / "weight_sync.csv")


def _weights(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_paths import check_weights

    check_weights(recorder, place.scratch)


def _fsdp2(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_paths import check_fsdp2

    check_fsdp2(recorder, place.scratch)


def _evaluation(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_paths import check_evaluated_run

    check_evaluated_run(recorder, place.scratch)


def _memory(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_training import check_memory, check_switched_pass

    check_switched_pass(recorder, place.scratch)
    check_memory(recorder, place.scratch)


def _tables(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_card import check_tables

    check_tables(recorder, place.out)


def _accept(recorder: Recorder, place: Place) -> None:
    from benchmarks.gpu_accept import check_acceptance

    check_acceptance(recorder, place.scratch, place.out, place.seconds - 5)


def _profile(recorder: Recorder, place: Place, model: str = "small") -> None:
    from benchmarks.gpu_run import check_profile

    check_profile(recorder, place.scratch, place.out, model, place.seconds - 5)


def _run(recorder: Recorder, place: Place, model: str = "small") -> None:
    from benchmarks.gpu_run import check_run

    for system in ("disaggregated", "colocated"):
        check_run(recorder, place.scratch, place.out, model, system, place.seconds / 2)


PARTS = {
    "card": Part(60, 20, _card),
    "trainer": Part(150, 30, _trainer),
    "replica": Part(120, 30, _replica),
    "switch": Part(75, 25, _switch),
    "weights": Part(100, 30, _weights),
    "fsdp2": Part(100, 30, _fsdp2),
    "evaluation": Part(120, 40, _evaluation),
    "memory": Part(75, 25, _memory),
    "profile": Part(170, 45, _profile),
    "run": Part(120, 40, _run),
    "tables": Part(45, 15, _tables),
    "accept": Part(120, 45, _accept),
    "profile-medium": Part(170, 100, lambda recorder, place: _profile(recorder, place, "medium")),
    "run-medium": Part(90, 40, lambda recorder, place: _run(recorder, place, "medium")),
}


def main() -> None:
    """Run the parts one after the other, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all parts together")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts; all if absent")
    parser.add_argument("--scratch", type=Path, help="keep models and run directories there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for old in (args.out / RESULTS, args.out / LOG):
        old.unlink(missing_ok=True)
    os.environ.update(ENVIRONMENT | os.environ)
    kept = {"prefix": "gpu-checks-", "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(**kept) as scratch:
        place = Place(args.scratch or Path(scratch), args.out, 60 * args.minutes - RESERVE)
        run_parts(args.only or list(PARTS), place)
    results = read_results(args.out)
    print(table(results), flush=True)
    sys.exit(any(one.ok is False for one in results))


def run_parts(names: list[str], place: Place) -> None:
    """Run each part in its own process, within `place.seconds` in total."""
    ends_at = time.monotonic() + place.seconds
    recorder = Recorder(place.out)
    method = import_early()
    for name in names:
        part, left = PARTS[name], ends_at - time.monotonic()
        if left < part.least:
            recorder.skip(name, f"{left:.0f} s are left, but it needs {part.least:g} s")
            continue
        began_at = time.monotonic()
        ending = run_part(name, place._replace(seconds=min(part.bound, left)), method)
        passed = time.monotonic() - began_at
        recorder.add(f"part {name}", passed, "s", not ending, ending or "ended by itself")


def run_part(name: str, place: Place, start_method: str) -> str:
    """Run a part in a process. Return how it ended; empty if it succeeded."""
    with (place.out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"== {name}\n")
    process = multiprocessing.get_context(start_method).Process(target=_begin, args=(name, place))
    process.start()
    process.join(place.seconds)
    is_late = process.is_alive()
    _kill(process)
    if is_late:
        return f"killed after {place.seconds:.0f} s"
    code = process.exitcode
    return "" if code == 0 else f"ended with {code}: see {LOG}"


def _begin(name: str, place: Place) -> None:
    """Run a part in its own session, with its errors in the log."""
    os.setsid()
    log = os.open(place.out / LOG, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    PARTS[name].run(Recorder(place.out), place)


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """Kill a part and all processes of its session. Workers of a run end with the process that started them."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(GRACE)


def import_early() -> str:
    """Import the packages of all parts; return the start method: "fork", or "spawn" if an import has started CUDA."""
    with contextlib.suppress(ImportError):  # each part reports it
        import torch  # noqa: F401
        from transformers import Qwen3ForCausalLM  # noqa: F401
        from transformers.utils import logging

        logging.disable_progress_bar()
        probe = multiprocessing.get_context("fork").Process(target=_exit_by_cuda)
        probe.start()
        probe.join()
        if probe.exitcode != 0:
            return "spawn"
    return "fork"


def _exit_by_cuda() -> None:
    """Exit with status 1 in a fork that cannot use CUDA."""
    import torch

    sys.exit(torch.cuda._is_in_bad_fork())


if __name__ == "__main__":
    main()
