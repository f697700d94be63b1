"""Measure how long a trainer on this machine needs to add and remove ranks, against the simulator's seconds.

Each model's trainer goes through `SIZES`. The seconds until an added rank is ready are measured first, alone, as a user
would for `trainer.rank_start_time`. All other constants are those of `profiles/sync/ranks-gloo.toml`. The goal is a
simulated time within 15 % of the executed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
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


async def measure(
    model: Path, scratch: Path, rounds: int
) -> tuple[float, dict[tuple[int, int], float]]:
    """Return the seconds to start a rank, and of each change: the medians of all rounds."""
    starts, changes = [], dict[tuple[int, int], list[float]]()
    for _ in range(rounds):
        trainer = Elastic(model, scratch)
        starts.append(await trainer.start_time())
        await trainer.begin()
        try:
            for change in pairwise(SIZES):
                changes.setdefault(change, []).append(await trainer.resize(change[1]))
        finally:
            await trainer.close()
    return median(starts), {change: median(found) for change, found in changes.items()}


def predict(model: Path, start_time: float) -> ResizingCosts:
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


def report(
    name: str, start_time: float, executed: dict[tuple[int, int], float], costs: ResizingCosts
) -> Sequence[float]:
    """Print the figures of a model, and return the ratios of simulated to executed seconds."""
    say(f"elastic {name}: bytes of a rank's state", costs.num_bytes, "bytes")
    say(f"elastic {name}: start of a rank", start_time, "s")
    ratios = []
    for (before, after), seconds in executed.items():
        simulated = costs.time(before, after)
        say(f"elastic {name}: {before} to {after} ranks, executed", seconds, "s")
        say(f"elastic {name}: {before} to {after} ranks, simulated", simulated, "s")
        ratios.append(simulated / seconds)
    grown = sum(s for (before, after), s in executed.items() if after > before)
    predicted = sum(costs.time(*change) for change in executed if change[1] > change[0])
    say(f"elastic {name}: all added ranks, simulated / executed", predicted / grown, "ratio")
    return ratios


def main() -> None:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    begin_imports({**os.environ, **worker_environment(1)}, "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-elastic-") as scratch:
        for name in args.models:
            model = make_model(Path(scratch) / name, *MODELS[name])
            started, executed = asyncio.run(measure(model, Path(scratch), args.rounds))
            report(name, started, executed, predict(model, started))


if __name__ == "__main__":
    main()
