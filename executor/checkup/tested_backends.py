"""Report whether this project's tests or benchmarks have run the back ends of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, Level
from streamrl.runfile.policies_config import SyncMode

NEVER = "never"
BY_HAND = "by hand, on one H200"
CHECKED = "`make gpu`, on one H200"


class Ran(NamedTuple):
    """A choice in a run file, and the tests that ran it on a CPU and on a GPU."""

    choice: str
    """Key and value of the run file."""
    on_cpu: str
    on_gpu: str


RAN = {
    ran.choice: ran
    for ran in (
        Ran("rollout.backend = transformers", "every test and benchmark", CHECKED),
        Ran("rollout.backend = static", "`make test`", CHECKED),
        Ran("rollout.backend = vllm", "`make test-vllm`, in float32", BY_HAND),
        Ran("rollout.backend = sglang", "by hand, in float32", NEVER),
        Ran("rollout.backend = external", "`make test`, `make test-vllm`", NEVER),
        Ran("rollout.tensor_parallel > 1", "`make test-vllm`, 2 in float32", NEVER),
        Ran("trainer.backend = torch", "every test and benchmark", CHECKED),
        Ran("trainer.backend = deepspeed", "`make test-deepspeed`, in float32", NEVER),
        Ran("trainer.backend = fsdp2", "`make test-fsdp2`", NEVER),
        Ran("trainer.data_parallel > 1", "`make test`, `make test-deepspeed`", NEVER),
        Ran("trainer.tensor_parallel > 1", "`make test-fsdp2`, 2 ranks", NEVER),
        Ran("execute.launcher = local", "every test and benchmark", CHECKED),
        Ran("execute.launcher = in-process", "`make test`", NEVER),
        Ran("execute.launcher = ray", "`make test-ray`", NEVER),
        Ran("sync.mode = full", "every test and benchmark", CHECKED),
        Ran("sync.mode = delta", "`make test`, in bfloat16", NEVER),
        Ran("sync.mode = lora", "`make test`", NEVER),
        Ran("sync.merge_adapters = false", "`make test-vllm`, in float32", NEVER),
    )
}


def choices_of(
    roles: PlacedRoles, sync_mode: SyncMode, *, serves_adapters: bool
) -> Iterator[tuple[str, str]]:
    """Yield the choices of a run file, as named in `RAN`, each with its device."""
    trains_on = roles.device_of(roles.trainer.pool)
    for own in roles.rollout.kinds:
        device = roles.device_of(own.pool)
        yield f"rollout.backend = {own.backend}", device
        if own.tensor_parallel > 1:
            yield "rollout.tensor_parallel > 1", device
    for trainer in roles.trainers:
        device = roles.device_of(trainer.pool)
        yield f"trainer.backend = {trainer.backend}", device
        if trainer.data_parallel > 1:
            yield "trainer.data_parallel > 1", device
        if trainer.tensor_parallel > 1:
            yield "trainer.tensor_parallel > 1", device
    yield f"execute.launcher = {roles.execute.launcher}", trains_on
    yield f"sync.mode = {sync_mode}", trains_on
    if serves_adapters:
        yield "sync.merge_adapters = false", roles.device_of(roles.rollout.pool)


def find(run: Run) -> Iterator[Finding]:
    """Yield a warning for each choice that was never run; skip a run without weights."""
    if run.model.path is None:
        return
    choices = choices_of(PlacedRoles.of(run), run.sync.mode, serves_adapters=run.serves_adapters)
    chosen = list(dict.fromkeys(choices))
    new = [(choice, device) for choice, device in chosen if _where(choice, device) == NEVER]
    for choice, device in new:
        text = f"{choice} on {_name(device)} was never run by this project's own tests: docs/running.md"
        yield _finding(
            "warning", text, "begin with a few steps, and look at logprob_gap and reward"
        )
    if not new:
        ran = "; ".join(
            f"{choice} on {_name(device)} by {_where(choice, device)}" for choice, device in chosen
        )
        yield _finding("ok", f"run before: {ran}")


def _where(choice: str, device: str) -> str:
    ran = RAN.get(choice)
    if ran is None:  # a class from outside this package
        return NEVER
    return ran.on_cpu if device == "cpu" else ran.on_gpu


def _name(device: str) -> str:
    return "a CPU" if device == "cpu" else "a GPU"


def _finding(level: Level, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="versions", name="where-run", text=text, fix=fix)
