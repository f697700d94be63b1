"""Advantages over episodes: of the whole episode, or of each turn, against calculations by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamrl.executor.buffer import BufferedRollout
from streamrl.executor.roles import Sample
from streamrl.executor.tokens import TokenBlock, TokenSegment, encode_ids, encode_tokens
from streamrl.executor.trainer.advantages import AdvantageEstimator
from streamrl.executor.trainer.losses import flatten_sequences
from streamrl.executor.trainer.objectives import PolicyGradient
from streamrl.executor.trainer.sequences import read_samples
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from tests.runs import make_table

LENGTHS = (2, 3, 1)
"""Tokens of a turn, of an observation, and of the next turn."""


class Episodes:
    """A buffer of one group: episodes of one or two turns."""

    def __init__(self, *rewards: tuple[list[float], float]) -> None:
        """Take for each episode the rewards of its turns, and the score of the verifier."""
        group = tuple(range(len(rewards)))
        self.rollouts = {}
        for rollout, (of_turns, score) in enumerate(rewards):
            pieces = [TokenSegment(n, is_policy=i != 1) for i, n in enumerate(LENGTHS)]
            buffered = BufferedRollout(group, 0, segments=tuple(pieces[: 2 * len(of_turns) - 1]))
            buffered.turn_rewards, buffered.reward = of_turns, sum(of_turns) + score
            self.rollouts[rollout] = buffered


def estimator(name: str, buffer: Any, credit: Any = "turn") -> AdvantageEstimator:
    config = AlgorithmConfig(name=name, steps=1, prompts_per_step=1, credit=credit)
    return AdvantageEstimator(config, buffer)


THREE = Episodes(([1.0, 0.0], 0.0), ([0.0, 2.0], 0.5), ([0.5], 0.0))
"""Returns: (1, 0), (2.5, 2.5) and (0.5)."""


def test_a_turn_is_compared_with_the_same_turn_of_the_other_episodes() -> None:
    """Turn 1: returns 1, 2.5, 0.5 with mean 4/3. Turn 2: returns 0 and 2.5 with mean 1.25."""
    found = estimator("dr-grpo", THREE)
    assert found.turn_advantages(0) == pytest.approx((1 - 4 / 3, -1.25))
    assert found.turn_advantages(1) == pytest.approx((2.5 - 4 / 3, 1.25))
    assert found.turn_advantages(2) == pytest.approx((0.5 - 4 / 3,))
    assert [found.advantage(each) for each in range(3)] == pytest.approx([-1 / 3, 7 / 6, -5 / 6])


def test_a_turn_that_no_other_episode_has_has_advantage_0() -> None:
    found = estimator("rloo", Episodes(([1.0, 0.0], 0.0), ([0.5], 0.0)))
    assert found.turn_advantages(0) == pytest.approx((0.5, 0.0))


def test_without_a_baseline_of_the_group_a_turn_has_its_own_return() -> None:
    found = estimator("reinforce++", THREE)
    found.baseline = 0.5
    assert found.turn_advantages(1) == pytest.approx((2.0, 2.0))


def test_the_tokens_of_a_turn_have_its_advantage_and_observations_have_none() -> None:
    """Loss by hand with ratio 1: the mean over three sampled tokens of minus the advantage, (-2 - 2 + 1) / 3."""
    segments = tuple(TokenSegment(n, is_policy=i != 1) for i, n in enumerate(LENGTHS))
    data = encode_tokens(range(6), [-0.5] * 6)
    sample = Sample(
        rollout=0,
        prompt=encode_ids([1]),
        output=(TokenBlock(6, None, data),),
        segments=segments,
        advantage=0.0,
        turn_advantages=(2.0, -1.0),
    )
    (sequence,) = read_samples([sample])
    assert sequence.token_advantages is not None and sequence.has_advantage
    assert sequence.token_advantages.tolist() == [2.0, 2.0, -1.0]
    objective = PolicyGradient(
        TrainerSettings(model="", learning_rate=0.1, temperature=1.0, correction=None)
    )
    assert objective.computes(sequence)
    logprobs = torch.full((3,), -0.5)
    tokens = flatten_sequences([sequence], [objective.advantages(sequence, {})], logprobs, None)
    assert tokens.advantages.tolist() == [2.0, 2.0, -1.0]
    assert np.isclose(float(-(tokens.advantages).mean()), (-2 - 2 + 1) / 3)
    with pytest.raises(ValueError, match="2 turns but 1 advantages"):
        read_samples(
            [
                Sample(
                    **{
                        **{f: getattr(sample, f) for f in sample.__struct_fields__},
                        "turn_advantages": (2.0,),
                    }
                )
            ]
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "algorithm.credit 'turn' needs the section"),
        (
            {"environment": {"max_turns": 2, "max_context": 4096}, "algorithm.name": "ppo"},
            "algorithm.credit 'turn' is not for algorithm.name 'ppo'",
        ),
    ],
)
def test_credit_of_turns_is_refused_where_it_cannot_be(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        make_run(make_table({"algorithm.credit": "turn", **changes}))
