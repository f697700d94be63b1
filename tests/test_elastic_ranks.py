"""Ranks that join and leave a trainer in processes of their own: its weights are those of a trainer that never changed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamrl.engine.messages import Lent, Stepped, TrainerResized
from streamrl.engine.trace import read_trace, replay
from streamrl.executor.launchers.handles import (
    Handle,
    LocalProcess,
    RankHandles,
    WorkerLostError,
    remote,
)
from streamrl.executor.launchers.launcher import TRAINER, worker_environment
from streamrl.executor.launchers.local_launcher import LOOPBACK
from streamrl.executor.launchers.processes import begin_for
from streamrl.executor.roles import Sample, TrainerRole
from streamrl.executor.trainer import joining
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker
from streamrl.record.run_directory import read_metrics
from tests.command_line import streamrl
from tests.test_end_to_end import project
from tests.test_ranks import gap, numbered, run, weights_of
from tests.test_trainer import Weights, make_config, make_samples, model_path

__all__ = ["model_path", "project"]  # fixtures
GAP = 2e-5
"""Largest difference of weights by the rounding of sums, after four steps of AdamW at this rate."""
MUON_GAP = 1e-3
"""The same of Muon, which orthogonalizes in bfloat16. Three ranks that never change differ from one by 3e-4."""
RATE = 1e-2


class ElasticTrainer:
    """A trainer in processes whose ranks a test changes."""

    def __init__(self, config: TrainerSettings, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self.handles: Handle

    async def start(self) -> None:
        self.handles = await self._process(self._config)
        await remote(TrainerRole, self.handles).start(None)

    async def _process(self, config: TrainerSettings) -> LocalProcess:
        return await LocalProcess.start(
            TRAINER,
            msgspec.to_builtins(config),
            self._directory / f"rank-{config.rank}.log",
            {**worker_environment(1), "GLOO_SOCKET_IFNAME": LOOPBACK},
            begin=begin_for("cpu", "torch"),
        )

    @property
    def ranks(self) -> list[Any]:
        return list(self.handles.ranks) if isinstance(self.handles, RankHandles) else [self.handles]

    async def resize(self, num_ranks: int) -> None:
        had, rendezvous = self.ranks, self._directory / f"meet-{os.urandom(4).hex()}"
        config = msgspec.structs.replace(
            self._config, num_ranks=num_ranks, rendezvous=f"file://{rendezvous}"
        )
        added = [
            await self._process(msgspec.structs.replace(config, rank=rank))
            for rank in range(len(had), num_ranks)
        ]
        handles = RankHandles(
            [*had[:num_ranks], *added], lambda: rendezvous.unlink(missing_ok=True)
        )
        before = self.handles if isinstance(self.handles, RankHandles) else None
        await handles.regroup(len(had), f"file://{rendezvous}", before)
        handles.let_go(had[num_ranks:])
        self.handles = handles


@asynccontextmanager
async def elastic(model: str, directory: Path, **changes: Any) -> AsyncIterator[ElasticTrainer]:
    trainer = ElasticTrainer(make_config(model, learning_rate=RATE, **changes), directory)
    await trainer.start()
    try:
        yield trainer
    finally:
        await trainer.handles.close()


def steps(count: int) -> list[list[Sample]]:
    return [numbered(make_samples(number, 12), 100 * number) for number in range(1, count + 1)]


async def make_steps(role: TrainerRole, batches: Sequence[list[Sample]], first: int) -> None:
    for version, samples in enumerate(batches, start=first):
        for part in (samples[:7], samples[7:]):
            await role.score(part)
            await role.train(part)
        await role.step(version)


async def unchanged(
    model: str, batches: list[list[Sample]], directory: Path, **changes: Any
) -> Weights:
    """Return the weights of one rank that is never joined by another."""
    worker = TrainerWorker(make_config(model, learning_rate=RATE, **changes))
    await worker.start(None)
    await make_steps(worker, batches, 1)
    weights = await weights_of(worker, len(batches), directory)
    await worker.stop()
    return weights


async def changed(
    model: str, batches: list[list[Sample]], directory: Path, sizes: Sequence[int], **changes: Any
) -> Weights:
    """Return the weights of a trainer that has these numbers of ranks before its steps, and check who stayed."""
    async with elastic(model, directory, **changes) as trainer:
        for version, (size, samples) in enumerate(zip(sizes, batches, strict=True), start=1):
            before = [rank.pid for rank in trainer.ranks]
            if size != len(before):
                await trainer.resize(size)
            after = [rank.pid for rank in trainer.ranks]
            assert after[: min(size, len(before))] == before[:size], "who stays is not restarted"
            await make_steps(remote(TrainerRole, trainer.handles), [samples], version)
        return await weights_of(remote(TrainerRole, trainer.handles), len(sizes), directory)


VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": "muon"},
    "ppo": {"algorithm": "ppo", "critic_learning_rate": RATE, "gae_lambda": 0.9},
    "reference": {"correction": "decoupled", "kl_coefficient": 0.1},
    "adapters": {"adapter_rank": 4},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "adamw" else pytest.mark.fsdp2) for name in VARIANTS],
)
def test_weights_are_those_of_a_trainer_whose_ranks_never_changed(
    model_path: str, tmp_path: Path, name: str
) -> None:
    batches, changes = steps(4), VARIANTS[name]
    alone = run(unchanged(model_path, batches, tmp_path / "alone", **changes))
    elastic_weights = run(changed(model_path, batches, tmp_path, (1, 3, 3, 2), **changes))
    most = MUON_GAP if name == "muon" else GAP
    assert gap(alone, elastic_weights) < most
    start = run(unchanged(model_path, batches[:1], tmp_path / "start", **changes))
    assert gap(alone, start) > 20 * most, "the weights have moved since the first change"


@pytest.mark.fsdp2
def test_ranks_that_join_in_the_middle_of_a_batch_change_no_weights(
    model_path: str, tmp_path: Path
) -> None:
    batches, changes = steps(3), {**VARIANTS["reference"], "max_grad_norm": 1e9}
    alone = run(unchanged(model_path, batches, tmp_path / "alone", **changes))

    async def go() -> Weights:
        async with elastic(model_path, tmp_path, **changes) as trainer:
            await trainer.resize(2)
            role = remote(TrainerRole, trainer.handles)
            await role.score(batches[0])
            await role.train(batches[0][:11])
            await trainer.resize(3)
            role = remote(TrainerRole, trainer.handles)
            await role.train(batches[0][11:])
            await role.step(1)
            await make_steps(role, batches[1:], 2)
            return await weights_of(remote(TrainerRole, trainer.handles), 3, tmp_path)

    assert gap(alone, run(go())) < GAP


def test_a_state_is_described_in_plain_data() -> None:
    tensors = [torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(7)]
    state = {"weights": tensors, "optimizer": {0: {"step": 1.0}}, "sums": Counter(kl=0.5)}
    received = joining._allocated(joining._described(state), torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in received["weights"]] == [
        (t.shape, t.dtype) for t in tensors
    ]
    assert {**received, "weights": tensors} == state
    with pytest.raises(TypeError, match="type code cannot be sent"):
        joining._described({"code": (lambda: None).__code__})


@pytest.mark.fsdp2
def test_ranks_do_not_leave_in_the_middle_of_a_batch(model_path: str, tmp_path: Path) -> None:
    async def go() -> None:
        async with elastic(model_path, tmp_path) as trainer:
            await trainer.resize(2)
            role = remote(TrainerRole, trainer.handles)
            samples = make_samples(1, 6)
            await role.score(samples)
            await role.train(samples)
            with pytest.raises(WorkerLostError, match="only between two steps"):
                await asyncio.wait_for(trainer.resize(1), 60)

    run(go())


@pytest.mark.fsdp2
def test_a_new_rank_that_dies_ends_every_rank(model_path: str, tmp_path: Path) -> None:
    async def go() -> None:
        async with elastic(model_path, tmp_path) as trainer:
            first = trainer.ranks[0]
            process = trainer._process

            async def doomed(config: TrainerSettings) -> LocalProcess:
                rank = await process(config)
                os.kill(rank.pid, signal.SIGKILL)
                return rank

            trainer._process = doomed  # type: ignore[method-assign]  # a rank that is killed as it starts
            with pytest.raises(WorkerLostError, match=r"status -9|with the other ranks"):
                await trainer.resize(2)
            with pytest.raises(WorkerLostError):
                await remote(TrainerRole, first).step(1)

    run(go())


ELASTIC = {
    "cluster.pools.local.gpus_per_node": 5,
    "policies.system": "stream-sync",
    "rollout.backend": "static",
    "rollout.max_running": 1,
    "execute.deterministic": "true",
    "trainer.zero": 0,
    "algorithm.steps": 5,
    "execute.checkpoint_every": 5,
}


@pytest.mark.fsdp2
def test_an_executed_run_adds_and_removes_ranks_and_learns_the_same(project: Path) -> None:
    finals = {}
    sizes = "[{step = 2, data_parallel = 3}, {step = 4, data_parallel = 1}]"
    for name, changes in (("elastic", {"trainer.resize": sizes}), ("constant", {})):
        keys = {**ELASTIC, "execute.output": name, **changes}
        options = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        made = streamrl("execute", project / "run.toml", *options)
        assert made.returncode == 0, made.stderr
        trace = read_trace(project / name / "trace.jsonl")
        assert replay(trace, checks_invariants=True) is None
        found = [e.event for e in trace.entries if isinstance(e.event, TrainerResized | Stepped)]
        ranks = [each.data_parallel for each in found if isinstance(each, TrainerResized)]
        assert ranks == ([3, 1] if changes else [])
        finals[name] = _weights(project / name / "checkpoints" / "v000005")
        assert [line["rollouts"] for line in read_metrics(project / name)] == [16] * 5
    assert gap(finals["elastic"], finals["constant"]) < 1e-4
    told = streamrl("replay", project / "elastic", "--json")
    assert told.returncode == 0, told.stderr


@pytest.mark.fsdp2
def test_gpus_of_replicas_train_in_an_executed_run(project: Path) -> None:
    keys = {
        **ELASTIC,
        "policies.system": "disaggregated",
        "execute.deterministic": "false",
        "rollout.backend": "transformers",
        "trainer.borrows": "true",
        "execute.output": "borrowed",
    }
    options = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    made = streamrl("execute", project / "run.toml", *options)
    assert made.returncode == 0, made.stderr
    trace = read_trace(project / "borrowed" / "trace.jsonl")
    assert replay(trace, checks_invariants=True) is None
    events = [entry.event for entry in trace.entries]
    ranks = [each.data_parallel for each in events if isinstance(each, TrainerResized)]
    replicas = trace.run.rollout.replicas
    assert ranks[:4] == [1 + replicas, 1, 1 + replicas, 1]
    assert sum(isinstance(each, Lent) for each in events) >= 2 * replicas
    assert [line["rollouts"] for line in read_metrics(project / "borrowed")] == [16] * 5


def _weights(checkpoint: Path) -> Weights:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")
