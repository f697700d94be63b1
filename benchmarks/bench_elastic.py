"""Measure how long a trainer on this machine needs to add and remove ranks, against the simulator's seconds.

Each model's trainer goes through `SIZES`. The seconds until an added rank is ready are measured alone, as a user would
for `trainer.rank_start_time`. Other constants are those of `profiles/sync/ranks-gloo.toml`. The goal is a simulated time
within 15 % of the executed one.

A shared machine changes its speed. So before each change two other processes broadcast `REFERENCE_BYTES` by gloo, and
figures "at the rate of the moment" use that rate in place of the profile's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from streamrl.executor.launchers.handles import LocalProcess, RankHandles, end_ranks, remote
from streamrl.executor.launchers.launcher import TRAINER, worker_environment
from streamrl.executor.launchers.local_launcher import LOOPBACK
from streamrl.executor.launchers.processes import begin_for, begin_imports
from streamrl.executor.roles import Sample, TrainerRole
from streamrl.executor.tokens import TokenSegment, encode_ids, write_block
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.hardware.resolved import resolve
from streamrl.runfile.files import make_run
from streamrl.sim.costs.resizing import ResizingCosts

SIZES = (1, 2, 1, 3, 2, 3)
"""Data-parallel ranks, one after the other."""
MODELS = {"small": (128, 4), "middle": (512, 12), "large": (768, 16)}
"""Hidden size and layers of each model."""
VOCABULARY = 4096
ROUNDS = 3
REFERENCE_BYTES = 2**28
BLOCK_BYTES = 2**22
"""Bytes of one broadcast: about those of a weight of the larger models."""


def broadcast_blocks(rank: int, meet: str, pipe: Connection) -> None:
    """Broadcast blocks to another process each time the pipe has a message, and answer with the seconds."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    sent = torch.rand(REFERENCE_BYTES // 4)
    while pipe.recv():
        began_at = time.monotonic()
        # new memory each time, as a new rank has it: its pages are made as they are written
        held = sent if rank == 0 else torch.empty(REFERENCE_BYTES // 4)
        for block in held.split(BLOCK_BYTES // 4):
            dist.broadcast(block, 0)
        pipe.send(time.monotonic() - began_at)


class Reference:
    """Two processes that measure the rate of a broadcast at any moment."""

    def __init__(self, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(2)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(
                target=broadcast_blocks,
                args=(rank, str(scratch / "reference"), theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        self.rate()

    def rate(self) -> float:
        """Return bytes per second."""
        for pipe in self._pipes:
            pipe.send(True)
        return REFERENCE_BYTES / max([float(pipe.recv()) for pipe in self._pipes])

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(False)
            process.join()


def make_model(directory: Path, hidden: int, layers: int) -> Path:
    """Write a model with random weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


class Elastic:
    """A trainer whose ranks are changed and timed."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._settings = TrainerSettings(
            model=str(model), learning_rate=1e-5, temperature=1.0, correction=None
        )
        self._directory = directory
        self._ranks: list[LocalProcess] = []
        self._num_steps = 0

    async def start(self, settings: TrainerSettings) -> LocalProcess:
        """Start the process of one rank."""
        return await LocalProcess.start(
            TRAINER,
            msgspec.to_builtins(settings),
            self._directory / f"rank-{settings.rank}.log",
            {**worker_environment(1), "GLOO_SOCKET_IFNAME": LOOPBACK},
            begin=begin_for("cpu", "torch"),
        )

    async def start_time(self) -> float:
        """Return the seconds until a rank that is added has its model."""
        began_at = time.monotonic()
        rank = await self.start(self._settings)
        await remote(TrainerRole, rank).start_blank()
        seconds = time.monotonic() - began_at
        await rank.close()
        return seconds

    async def begin(self) -> None:
        """Start the first rank and make a step, so that the optimizer has its state."""
        self._ranks = [await self.start(self._settings)]
        await remote(TrainerRole, self._ranks[0]).start(None)
        await self.step(RankHandles(self._ranks, lambda: None))

    async def step(self, handles: RankHandles) -> None:
        """Make one step of a few tokens."""
        role = remote(TrainerRole, handles)
        samples = [sample(number) for number in range(6)]
        await role.score(samples)
        await role.train(samples)
        self._num_steps += 1
        await role.step(self._num_steps)

    async def resize(self, num_ranks: int) -> float:
        """Change the ranks; return the seconds."""
        began_at, had = time.monotonic(), self._ranks
        rendezvous = self._directory / f"meet-{os.urandom(4).hex()}"
        settings = msgspec.structs.replace(
            self._settings, num_ranks=num_ranks, rendezvous=f"file://{rendezvous}"
        )
        added = await asyncio.gather(
            *(
                self.start(msgspec.structs.replace(settings, rank=rank))
                for rank in range(len(had), num_ranks)
            )
        )
        self._ranks = [*had[:num_ranks], *added]
        handles = RankHandles(self._ranks, lambda: rendezvous.unlink(missing_ok=True))
        await handles.regroup(len(had), f"file://{rendezvous}")
        seconds = time.monotonic() - began_at
        await end_ranks(had[num_ranks:])
        await self.step(handles)
        return seconds

    async def close(self) -> None:
        """End all ranks."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))


def sample(number: int) -> Sample:
    """Return a rollout of a few tokens."""
    tokens = [(7 * number + place) % VOCABULARY for place in range(16)]
    return Sample(
        rollout=number,
        prompt=encode_ids(tokens[:4]),
        output=(write_block(tokens, [-8.0] * len(tokens), None),),
        segments=(TokenSegment(len(tokens), is_policy=True),),
        advantage=1.0 if number % 2 else -1.0,
    )


class Change(NamedTuple):
    """An executed change of ranks."""

    before: int
    after: int
    seconds: float
    start_time: float
    """Seconds to start one rank, in the same round."""
    rate: float
    """Bytes per second of the reference broadcast, just before."""


async def measure(model: Path, scratch: Path, rounds: int, reference: Reference) -> list[Change]:
    """Return the changes of all rounds."""
    changes = []
    for _ in range(rounds):
        trainer = Elastic(model, scratch)
        await trainer.begin()
        try:
            for before, after in pairwise(SIZES):
                start_time, rate = await trainer.start_time(), reference.rate()
                seconds = await trainer.resize(after)
                changes.append(Change(before, after, seconds, start_time, rate))
        finally:
            await trainer.close()
    return changes


def costs_of(model: Path, start_time: float) -> ResizingCosts:
    """Return the simulator's costs of a model's trainer on this machine's cores."""
    table: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"pools": {"here": {"gpu": "cpu", "gpus_per_node": 8}}},
        "rollout": {"pool": "here", "replicas": 1, "max_tokens": 16},
        "trainer": {"pool": "here", "zero": 0},
        "algorithm": {"steps": 4, "prompts_per_step": 4, "group_size": 2},
    }
    return ResizingCosts.of(resolve(make_run(table)).trainer, start_time)


def say(name: str, value: float, unit: str) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit}), flush=True)


def report(name: str, model: Path, changes: list[Change]) -> None:
    """Print the figures of a model: medians over rounds, and sums of all changes that add ranks."""
    start_time = median(change.start_time for change in changes)
    costs = costs_of(model, start_time)
    say(f"elastic {name}: bytes of a rank's state", costs.num_bytes, "bytes")
    say(f"elastic {name}: start of a rank", start_time, "s")
    say(f"elastic {name}: reference broadcast", median(c.rate for c in changes), "bytes/s")
    executed = simulated = at_moment = 0.0
    for before, after in pairwise(SIZES):
        found = [c for c in changes if (c.before, c.after) == (before, after)]
        ranks = f"elastic {name}: {before} to {after} ranks"
        own = median(c.seconds for c in found), costs.time(before, after)
        moment = median(map(at_rate(costs), found))
        say(f"{ranks}, executed", own[0], "s")
        say(f"{ranks}, simulated", own[1], "s")
        say(f"{ranks}, at the rate of the moment", moment, "s")
        if after > before:
            executed += own[0]
            simulated += own[1]
            at_moment += moment
    added = f"elastic {name}: added ranks"
    say(f"{added}, simulated / executed", simulated / executed, "ratio")
    say(f"{added}, the same at the rate of the moment", at_moment / executed, "ratio")


def at_rate(costs: ResizingCosts) -> Callable[[Change], float]:
    """Return a function that computes the simulated seconds of a change with the measured start and rate."""

    def seconds(change: Change) -> float:
        own = replace(costs, start_time=change.start_time, near=change.rate, far=change.rate)
        return own.time(change.before, change.after)

    return seconds


def main() -> None:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    begin_imports({**os.environ, **worker_environment(1)}, "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-elastic-") as scratch:
        reference = Reference(Path(scratch))
        for name in args.models:
            model = make_model(Path(scratch) / name, *MODELS[name])
            asyncio.run(warm_up(model, Path(scratch)))
            changes = asyncio.run(measure(model, Path(scratch), args.rounds, reference))
            report(name, model, changes)
        reference.close()


async def warm_up(model: Path, scratch: Path) -> None:
    """Start a rank once, so that the prefork server has imported everything."""
    await Elastic(model, scratch).start_time()


if __name__ == "__main__":
    main()
