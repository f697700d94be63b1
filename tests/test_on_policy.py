"""Streaming changes when the trainer works, never what it computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.engine.messages import Train
from streamrl.engine.trace import Trace
from streamrl.executor.launchers.handles import Handle, InProcess
from streamrl.executor.launchers.launcher import TRAINER
from streamrl.executor.transfer.transfer import Transfer
from streamrl.runfile.config import Run
from tests.scripted import ScriptedLauncher, make_world
from tests.scripted_roles import VOCABULARY
from tests.test_execute import real_run
from tests.tiny_model import tiny_model


class RealTrainerLauncher(ScriptedLauncher):
    """Scripted replicas, whose tokens depend on the rollout alone, and a trainer that really trains."""

    async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
        return InProcess(
            TRAINER,
            {
                "model": self._options["model"],
                "learning_rate": 3e-3,
                "temperature": 1.0,
                "correction": "token-tis",
            },
        )

    async def _start(self, role: str, number: int) -> Handle:
        options = self._options
        self._options = {"slowest": 0.02}
        try:
            return await super()._start(role, number)
        finally:
            self._options = options


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few thousand parameters."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(
        VOCABULARY,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    model.save_pretrained(path)
    return path


def train(run: Run, model: Path) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Run to the end; return the trace and the weights of the last version."""

    async def go() -> Trace:
        options = {"model": str(model)}
        launcher = RealTrainerLauncher
        world = make_world(run, options, launcher_class=launcher, make_transfer=Transfer)
        return await world.run()

    trace = asyncio.run(asyncio.wait_for(go(), timeout=120))
    last = Path(run.execute.output) / "checkpoints" / f"v{run.algorithm.steps:06d}"
    return trace, load_file(last / "model.safetensors")


def test_stream_sync_makes_the_weights_of_disaggregated_from_the_same_rollouts(
    model: Path, tmp_path: Path
) -> None:
    results = {}
    for system in ("disaggregated", "stream-sync"):
        directory = tmp_path / system
        directory.mkdir()
        run = real_run(
            directory,
            policies__system=system,
            algorithm__steps=2,
            algorithm__prompts_per_step=6,
            algorithm__group_size=4,
        )
        results[system] = train(run, model)
    num_trains = {
        system: sum(isinstance(c, Train) for entry in trace.entries for c in entry.commands)
        for system, (trace, _) in results.items()
    }
    assert num_trains["stream-sync"] > num_trains["disaggregated"] == 2
    whole, streamed = (results[system][1] for system in ("disaggregated", "stream-sync"))
    initial = load_file(model / "model.safetensors")
    assert any(not torch.equal(whole[name], initial[name]) for name in initial)
    for name, tensor in whole.items():
        torch.testing.assert_close(streamed[name], tensor, rtol=1e-5, atol=1e-6)
