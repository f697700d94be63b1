"""Check whether this machine can execute a run: limits of back ends, GPUs, cores, memory and the scorers' sandbox.

torch is imported only to count GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from streamrl.executor.checkup.executed_memory import executed_memory
from streamrl.executor.chosen_classes import check_chosen_classes
from streamrl.executor.environment.session import EnvironmentFaultError, EnvironmentHost
from streamrl.executor.launchers.placement import (
    PlacedRoles,
    find_gpus,
    gpus_needed,
    index_of,
    roles_on_cores,
    say_seen,
    threads_of,
    usable_cores,
)
from streamrl.executor.launchers.role_configs import received_copies, weights_room
from streamrl.executor.transfer.shared_directory import (
    MORE_SHARED_MEMORY,
    SHARED_MEMORY,
    free_shared_memory,
)
from streamrl.executor.verifier.sandbox import find_gaps
from streamrl.executor.verifier.scorers import make_scorer
from streamrl.hardware.resolved import ResolvedRun, resolve
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.bases import secret_of
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.findings import Changes, Finding, Level, changed, passes, say, value_of
from streamrl.runfile.frameworks import keep_filled_in
from streamrl.runfile.roles_config import ExternalConfig, RolloutConfig, VerifierConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.targets.execute_limits import refusal_of
from streamrl.workload.prompt_records import read_sources

SERVER_TIME = 5.0
"""Seconds in which a server of external replicas must answer."""
LIMITS: tuple[Changes, ...] = (
    {
        "rollout.tensor_parallel": 1,
        "rollout.pipeline_parallel": 1,
        "rollout.data_parallel": 1,
        "rollout.expert_parallel": 1,
    },
    {"rollout.backend": "static"},
    {"rollout.admission": "on-demand"},
    {"rollout.migration_transfer": "recompute"},
    {"rollout.others": ()},
    {"policies.concurrency": "fixed"},
    {"trainer.packing": "padded"},
    {"trainer.context_exchange": "all-gather"},
    {"trainer.kernels": "eager"},
    {"trainer.order": "sorted"},
    {"trainer.routing": "natural"},
    {"trainer.offload_to": "host"},
    {"trainer.reshard_after_forward": True},
    {"trainer.sharding": "fsdp2"},
    {"trainer.gradient_dtype": "float32"},
    {"trainer.master_weights": "float32"},
    {"trainer.max_tokens_per_scoring_pass": None},
    {"trainer.offload": False},
    {"trainer.logits": None},
    {"rollout.chunked_prefill": True},
    {"sync.merge_adapters": True},
    {"sync.mode": "delta"},
    {"sync.mode": "full"},
    {"trainer.zero": 0},
    {"trainer.zero": 2},
    {
        "trainer.data_parallel": 1,
        "trainer.tensor_parallel": 1,
        "trainer.pipeline_parallel": 1,
        "trainer.context_parallel": 1,
        "trainer.virtual_stages": 1,
        "trainer.expert_parallel": 1,
        "trainer.expert_tensor_parallel": None,
    },
    {"algorithm.old_log_probs": "engine"},
    {"framework.name": "streamrl"},
    {"framework.optimizer_steps": 1},
    {"framework.epochs": 1},
    {"rollout.dtype": None, "rollout.weight_only": False},
    {"rollout.kv_dtype": None},
    {"trainer.dtype": None},
    {"model.dtype": "bfloat16"},
    {"algorithm.learning_rate": 1e-6},
    {"algorithm.max_grad_norm": 1.0},
    {"execute.deterministic": False},
    {"verifier.pool": None, "verifier.gpus_per_worker": 0},
)
"""Changes that may make a run executable with these back ends. The first one that helps is proposed."""


def find(run: Run) -> Iterator[Finding]:
    """Yield findings on what prevents this machine from executing the run; skip a run without weights."""
    if run.model.path is None:
        text = "without model.path the run is planned and simulated only: GPUs of this machine are not checked"
        yield _finding("ok", "execute", text)
        return
    yield from _find_limits(run)
    yield from _find_chosen_classes(run)
    if run.rollout.external is not None:
        yield from _find_servers(run.rollout.external)
    roles = PlacedRoles.of(run)
    if run.execute.launcher == "ray":
        text = "the Ray cluster provides GPUs and cores: execute checks its nodes before it starts a role"
        yield _finding("ok", "cluster", text)
    else:
        yield from _find_gpus(gpus_needed(roles), run.execute.device)
        yield from _find_cores(run.rollout, roles_on_cores(roles), threads_of(roles))
    if roles.device_of(run.trainer.pool) != "cpu":
        takes_turns = run.policies.shares_gpus
        reserved = _reserved_beside(run.rollout, run.execute.device, takes_turns=takes_turns)
        yield from _find_memory(resolve(run), run.rollout.max_tokens, reserved)
    copies = received_copies(run.sync, run.execute.launcher, run.rollout, run.cluster.pools)
    yield from _find_shared_memory(
        run.model, run.rollout, copies, serves_adapters=run.serves_adapters
    )
    yield from _find_sandbox(run.verifier)
    if run.environment is not None and run.environment.implementation is not None:
        yield from _find_environment(run.environment, run.workload)


def _find_limits(run: Run) -> Iterator[Finding]:
    """Yield each limit of the back ends that the run exceeds, with a fix; each check assumes the earlier fixes."""
    for _ in LIMITS:
        message = refusal_of(run)
        if not message:
            return
        changes = _fix_of(run, message)
        fix = say(changes) if changes else "simulate it: these back ends cannot execute it"
        yield _finding("error", "back-end", f"execute: {message}", fix, changes)
        if not changes:
            return
        run = keep_filled_in(run, changed(run, changes))


def _find_chosen_classes(run: Run) -> Iterator[Finding]:
    """Check that workers can import what choices from outside this package name."""
    try:
        check_chosen_classes(run)
    except ValueError as error:
        fix = "correct the path, or make its module importable (PYTHONPATH or pip install)"
        yield _finding("error", "back-end", f"execute: {error}", fix)


def _fix_of(run: Run, message: str) -> Changes:
    """Return the first changes after which the back ends accept the run or report another limit, or nothing."""
    for candidate in LIMITS:
        changes = {key: new for key, new in candidate.items() if value_of(run, key) != new}
        after = changed(run, changes)
        if passes(after) and refusal_of(after) != message:
            return changes
    return {}


def _find_servers(external: ExternalConfig) -> Iterator[Finding]:
    """Check that each server of external replicas answers, and serves a model."""
    from streamrl.executor.rollout.server_api import ServerSettings, make_api
    from streamrl.executor.rollout.server_client import find_fault

    api = make_api(external.api)
    for url in external.endpoints:
        settings = ServerSettings(
            url=url,
            api=external.api,
            timeout=SERVER_TIME,
            key=secret_of(external.key),
            certificate=external.certificate,
        )
        fault = find_fault(settings, (api.health, api.models))
        if fault is None:
            yield _finding("ok", "servers", f"the server {url} is healthy and serves a model")
        else:
            fix = f"{api.how_to_start}: docs/external-engines.md"
            yield _finding("error", "servers", f"rollout.external.endpoints: {fault}", fix)


def _find_gpus(needed: int, device: str) -> Iterator[Finding]:
    """Check that this machine has the GPUs of the run; import torch only if the run needs any."""
    if not needed:
        text = "every process of the run computes on the CPU: no GPU is needed"
        yield _finding("ok", "gpus", text)
        return
    available = visible_gpus()
    text = f"execute needs {needed} GPUs of this machine; {say_seen(available)}"
    if available >= needed:
        yield _finding("ok", "gpus", text)
        return
    level: Level = "warning" if device == "auto" else "error"
    changes: Changes = {"execute.device": "cpu"}
    fix = f"{say(changes)}, or execute it where the GPUs are"
    yield _finding(level, "gpus", text, fix, changes)


def _reserved_beside(rollout: RolloutConfig, device: str, *, takes_turns: bool) -> float:
    """Return the share of the trainer's GPU that replicas reserve, where `execute.device` names one GPU for all roles."""
    if index_of(device) is None or takes_turns:
        return 0.0
    kinds = [kind for kind in rollout.kinds if engine_named(kind.backend).reserves_memory]
    return sum(kind.replicas * kind.memory_utilization for kind in kinds)


def _find_memory(resolved: ResolvedRun, max_tokens: int, reserved: float) -> Iterator[Finding]:
    """Report the GPU memory of the primary trainer, which differs from that of plans; skip it if there is no formula.

    `reserved` is the share of its GPU that replicas reserve for themselves.

    The doctor says by itself that a model cannot be read.
    """
    try:
        trainer = resolved.trainer
    except ValueError:
        return
    parts = executed_memory(trainer, max_tokens)
    if parts is None:
        return
    gpu, need = trainer.gpu, sum(parts.values())
    listed = " + ".join(f"{size / 1e9:.1f} of {name}" for name, size in parts.items())
    text = (
        f"the trainer takes {need / 1e9:.1f} of {gpu.usable_memory / 1e9:.0f} GB a GPU when executed "
        f"({listed}), in the largest pass of rollouts of maximum length"
    )
    free = gpu.usable_memory * (1 - reserved)
    if reserved and need > free:
        text += (
            f"; replicas reserve {reserved:.0%} of the same GPU, which leaves {free / 1e9:.1f} GB"
        )
        fix = "a smaller rollout.memory_utilization, or a GPU for each role (execute.device=cuda)"
        yield _finding("error", "executed-memory", text, fix)
        return
    if need <= gpu.usable_memory:
        yield _finding("ok", "executed-memory", text)
        return
    fix = 'trainer.recompute="full", trainer.logits="chunked", or a smaller trainer.max_tokens_per_pass'
    yield _finding("warning", "executed-memory", text, fix)


QUEUE_BYTES = 10 * 16 * 2**20
"""Shared memory of the queue with which vLLM's core sends work to the workers of a replica with several GPUs: 10 chunks of
16 MiB (0.32, VLLM_MQ_MAX_CHUNK_BYTES_MB)."""


def _find_shared_memory(
    model: ModelConfig, rollout: RolloutConfig, copies: int, *, serves_adapters: bool
) -> Iterator[Finding]:
    """Check that weights, and the queues of vLLM, have room in shared memory; a container has 64 MB by default."""
    try:
        need = weights_room(model, serves_adapters=serves_adapters, copies=copies)
    except ValueError:  # the doctor says by itself that a model cannot be read
        return
    split = [kind.replicas for kind in rollout.kinds if kind.tensor_parallel > 1]
    queues, free = QUEUE_BYTES * sum(split), free_shared_memory()
    text = (
        f"two versions of the weights {f'in {copies} replicas ' if copies > 1 else ''}"
        f"take {need / 1e9:.2f} GB of shared memory"
        + (f" and vLLM's queues {queues / 1e9:.2f} GB" if queues else "")
        + f"; {SHARED_MEMORY} has room for {free / 1e9:.2f} GB"
    )
    if need + queues <= free:
        yield _finding("ok", "shared-memory", text)
    elif queues > free:
        yield _finding("error", "shared-memory", f"{text}: vLLM would die", MORE_SHARED_MEMORY)
    else:
        text += ": weights go through files in the temporary directory"
        yield _finding("warning", "shared-memory", text, MORE_SHARED_MEMORY)


def _find_cores(rollout: RolloutConfig, roles: int, threads: int) -> Iterator[Finding]:
    """Check that this machine has a core for each thread of the roles that compute on the CPU."""
    cores = usable_cores()
    if not roles:
        return
    needed = roles * threads
    text = (
        f"{roles} roles compute on the CPU, with {threads} threads each, and it has {cores} cores"
    )
    if needed <= cores:
        yield _finding("ok", "cores", text)
        return
    text += ": each is slower while the others compute"
    changes = _fewer_roles(rollout, roles, cores)
    fix = say(changes) if changes else f"execute it on a machine with {needed} cores"
    yield _finding("warning", "cores", text, fix, changes)


def _fewer_roles(rollout: RolloutConfig, roles: int, cores: int) -> Changes:
    """Return changes with which every thread of every role has its own core, or nothing."""
    left = rollout.replicas - (roles - cores)
    if roles <= cores:
        return {"execute.threads": cores // roles}
    if rollout.others or left < 1:
        return {}
    return {"rollout.replicas": left}


def _find_sandbox(verifier: VerifierConfig) -> Iterator[Finding]:
    """Check that this machine can sandbox a scorer that evaluates the model's output as code."""
    evaluating = [each.scorer for each in verifier.rewards if make_scorer(each).evaluates]
    if not evaluating:
        return
    what = f"verifier.scorer {evaluating[0]} may evaluate what the model writes"
    gaps = find_gaps()
    for gap in gaps:
        fix = (
            "execute it on Linux 5.13 or newer, x86-64 or arm64, where containers do not forbid it"
        )
        yield _finding("warning", "verifier", f"{what}, and here is {gap}", fix)
    if not gaps:
        text = f"{what}: without network, other processes, files to write or files of yours to read"
        yield _finding("ok", "verifier", text)


def _find_environment(config: EnvironmentConfig, workload: WorkloadConfig) -> Iterator[Finding]:
    """Check that the environment can begin an episode of the first prompt, and how its process is limited."""
    what = f"environment.implementation {config.implementation!r}"
    for gap in find_gaps() if config.sandbox else ():
        fix = "execute it on Linux 5.13 or newer, or set environment.sandbox=false for trusted code"
        yield _finding("warning", "environment", f"{what} has an incomplete sandbox: {gap}", fix)
    try:
        record = read_sources(workload)[0].records[0]
        asyncio.run(EnvironmentHost(config).try_out(record))
    except (ValueError, OSError, IndexError, EnvironmentFaultError) as error:
        text = f"{what} cannot begin an episode of the first prompt: {error}"
        yield _finding(
            "error", "environment", text, "mend the class, or the records of the prompts"
        )
        return
    limits = "in a sandbox" if config.sandbox else "as trusted code"
    yield _finding("ok", "environment", f"{what} begins an episode of the first prompt, {limits}")


def visible_gpus() -> int:
    """Return the number of GPUs that processes on this machine can use."""
    return len(find_gpus())


def _finding(
    level: Level, name: str, text: str, fix: str = "", changes: Changes | None = None
) -> Finding:
    return Finding(
        level=level, topic="versions", name=name, text=text, fix=fix, changes=changes or {}
    )
