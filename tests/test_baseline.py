"""REINFORCE++: every reward of a step beside the mean of the batch before, whatever arrives when."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from streamrl.engine.messages import (
    DrawnGroup,
    Drop,
    Event,
    PromptsDrawn,
    RunStarted,
    Skip,
    Stepped,
    Train,
    Verified,
)
from streamrl.engine.trace import Trace, replay
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.launchers.handles import Handle
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.roles import Sample
from streamrl.executor.trainer.advantages import AdvantageEstimator, batch_baseline
from streamrl.executor.trainer.losses import Tokens, policy_losses
from streamrl.record.recorded_workload import informative_share
from streamrl.record.run_directory import read_rollouts
from streamrl.runfile.algorithms import algorithm_named
from streamrl.runfile.config import Run
from tests.scripted import ScriptedLauncher, ScriptedTokenizer, make_world
from tests.scripted_roles import ScriptedTrainer
from tests.test_execute import real_run

ALONE = {"algorithm__name": "reinforce++", "algorithm__group_size": 1}


class NotingTrainer(ScriptedTrainer):
    """Notes the advantage of every rollout, step by step."""

    steps: ClassVar[list[dict[int, float]]] = [{}]

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        self.steps[-1].update((sample.rollout, sample.advantage) for sample in samples)
        return await super().train(samples)

    async def step(self, version: int) -> dict[str, float]:
        self.steps.append({})
        return await super().step(version)


class NotingLauncher(ScriptedLauncher):
    """Starts that trainer."""

    async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
        return await self._start("tests.test_baseline:NotingTrainer", -1)


def advantages_of(run: Run, resume: bool = False) -> list[dict[int, float]]:
    """Execute a run with scripted roles; return the advantages of each of its steps by rollout."""
    NotingTrainer.steps = [{}]

    async def go() -> Trace:
        world = make_world(run, {}, resume, NotingLauncher)
        with contextlib.closing(world._directory):
            return await world.run()

    assert replay(asyncio.run(asyncio.wait_for(go(), timeout=60))) is None
    return NotingTrainer.steps[:-1]


@pytest.mark.parametrize("system", ["stream-sync", "fully-async", "disaggregated"])
@pytest.mark.parametrize("group_size", [1, 4])
def test_the_baseline_of_a_step_is_the_mean_reward_of_the_one_before_also_where_a_run_resumes(
    system: str, group_size: int, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {
        **ALONE,
        "algorithm__group_size": group_size,
        "algorithm__prompts_per_step": 6,
        "policies__system": system,
        "execute__checkpoint_every": 2,
    }
    steps = advantages_of(real_run(tmp_path, **keys, algorithm__steps=3))
    steps += advantages_of(real_run(tmp_path, **keys, algorithm__steps=5), resume=True)
    rewards = {line["rollout"]: line["reward"] for line in read_rollouts(tmp_path / "run")}
    assert len(set(rewards.values())) == 2 and [len(step) for step in steps] == [6 * group_size] * 5
    baseline = 0.0
    for step in steps:
        assert step == {rollout: rewards[rollout] - baseline for rollout in step}
        baseline = batch_baseline([rewards[rollout] for rollout in step])


def rewarded(
    estimator: AdvantageEstimator, buffer: RolloutBuffer, rewards: list[float]
) -> list[float]:
    """Draw a batch of single rollouts, let it have these rewards, and return the advantages that train on it."""
    rollouts = [rollout for group in buffer.draw(len(rewards)) for rollout in group.rollouts]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        buffer.rollouts[rollout].reward = reward
    found = [sample.advantage for sample in estimator.samples(rollouts)]
    estimator.end_step(rollouts)
    return found


def gradient(values: list[float]) -> torch.Tensor:
    """Return the gradient of the loss by the log-probabilities of one token a rollout, sampled a little off policy."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.75], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs,
        behaviour=torch.tensor([-1.25, -0.5, -1.5, -1.0]),
        advantages=torch.tensor(values),
        rollouts=torch.arange(4),
    )
    policy_losses(tokens, "token-tis", clip=0.2, cap=2.0).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return logprobs.grad


def test_once_the_baseline_is_known_a_constant_added_to_all_rewards_leaves_the_gradient(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, **ALONE)
    first, second = [1.0, 0.0, 0.5, 1.5], [0.25, 2.0, 0.0, 1.0]
    buffers = [
        RolloutBuffer(PromptWorkload(run, ScriptedTokenizer()), run.num_trainers) for _ in range(2)
    ]
    one, other = ((AdvantageEstimator(run.algorithm, buffer), buffer) for buffer in buffers)
    assert rewarded(*one, first) == first
    rewarded(*other, [reward + 64.0 for reward in first])
    found = [rewarded(*one, second), rewarded(*other, [reward + 64.0 for reward in second])]
    assert found[0] == found[1] == [-0.5, 1.25, -0.75, 0.25]
    # by hand: -min(exp(logprob - behaviour), cap) * advantage
    expected = [0.5 * 2.718281828**0.25, -1.25, 0.75 * 2.718281828**-0.5, -0.25 * 2.718281828**0.25]
    for values in found:
        torch.testing.assert_close(gradient(values), torch.tensor(expected))


def test_the_baseline_of_equal_rewards_is_that_reward_and_leaves_nothing_to_train_on() -> None:
    rewards = [0.1] * 3
    assert sum(rewards) / 3 != 0.1 == batch_baseline(rewards)
    assert algorithm_named("reinforce++").advantages(rewards, batch_baseline(rewards)) == [0.0] * 3


def test_rollouts_inform_where_their_reward_is_not_the_baseline(tmp_path: Path) -> None:
    def share(first_version: int) -> float:
        trace = Trace(real_run(tmp_path, **ALONE), "real")
        groups = tuple(DrawnGroup(n, (n,), 8, (4,)) for n in range(6))
        begun: list[Event] = [RunStarted(first_version, 0), PromptsDrawn(1, 0, groups)]
        for event in begun:
            trace.record(0.0, event, [])
        for rollout, reward in enumerate((0.0, 1.0, 7.0, 0.5, 0.0, 0.5)):
            trace.record(1.0, Verified(rollout, reward), [])
        trace.record(2.0, Verified(5, 0.5), [Train((0, 1, 2), 0), Drop(2, "a scripted reason")])
        trace.record(2.5, Verified(5, 0.5), [Train((0, 3), 1), Skip(1, 1, "another's own affair")])
        trace.record(2.5, Stepped(1, 1), [])
        trace.record(3.0, Stepped(first_version + 1, 0), [Train((3, 4, 5), 0)])
        return informative_share(trace)

    assert (
        share(0) == 3 / 6
    )  # beside 0: all but rollout 0; beside 0.5, the mean of 0 and 1: rollout 4
    assert share(4) == 4 / 6  # the baseline of a resumed run's first step is in its checkpoint
