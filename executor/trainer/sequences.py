"""Read samples as arrays, which the losses compute with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamrl.executor.expert_choices import Choices, merge_choices
from streamrl.executor.roles import Sample
from streamrl.executor.token_files import read_choices
from streamrl.executor.tokens import (
    ID,
    LOGPROB,
    Ids,
    Logprobs,
    count_tokens,
    decode_ids,
    read_blocks,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSequence:
    """One finished rollout: a prompt and n output tokens."""

    rollout: int
    prompt: Ids
    tokens: Ids
    """[n] output token ids."""
    logprobs: Logprobs
    """[n] log-probabilities under the policy that sampled, in nats; arbitrary for other tokens."""
    is_policy: npt.NDArray[np.bool_]
    """[n] whether the policy sampled the token; other tokens are only context, without loss and not counted."""
    advantage: float
    token_advantages: Logprobs | None = None
    """[m] advantage of each token that the policy sampled; None: all have `advantage`."""
    partner: int | None = None
    """The other rollout of its pair, if it has one."""
    is_masked: bool = False
    """Whether it is left out of the loss and of its mean."""
    experts: Choices | None = None
    """Experts that the engine's routers chose for the tokens of prompt and output, except the last one; None: the
    trainer's routers choose."""

    @property
    def length(self) -> int:
        """Return the number of tokens that a forward pass computes."""
        return len(self.prompt) + len(self.tokens)

    @property
    def has_advantage(self) -> bool:
        """Return whether any token has an advantage that is not 0."""
        if self.token_advantages is not None:
            return bool(self.token_advantages.any())
        return self.advantage != 0

    @property
    def num_trained(self) -> int:
        """Return the number of output tokens that the policy sampled."""
        return int(self.is_policy.sum())


NOTHING = TokenSequence(
    rollout=-1,
    prompt=np.zeros(1, ID),
    tokens=np.zeros(1, ID),
    logprobs=np.zeros(1, LOGPROB),
    is_policy=np.ones(1, bool),
    advantage=0.0,
)
"""Dummy that a rank computes with zero gradient while other ranks still have passes to make with it."""


def read_samples(samples: list[Sample], *, with_experts: bool = False) -> list[TokenSequence]:
    """Read the tokens of samples, from memory or from files, and with `with_experts` the recorded experts.

    Raises:
        ValueError: a sample cannot be trained on; the message has its rollout number.
    """
    return [_read(sample, with_experts=with_experts) for sample in samples]


def _read(sample: Sample, *, with_experts: bool) -> TokenSequence:
    where = f"rollout {sample.rollout}"
    tokens, logprobs = read_blocks(sample.output)
    if count_tokens(sample.segments) != len(tokens):
        in_segments = count_tokens(sample.segments)
        raise ValueError(f"{where}: {len(tokens)} tokens but segments of {in_segments}")
    is_policy = np.repeat(
        [segment.is_policy for segment in sample.segments],
        [segment.num_tokens for segment in sample.segments],
    ).astype(bool)
    if not sample.prompt or not is_policy.any():
        raise ValueError(
            f"{where}: needs at least one prompt token and one token that the policy sampled"
        )
    if not all(map(math.isfinite, (sample.advantage, *sample.turn_advantages))):
        found = sample.turn_advantages or sample.advantage
        raise ValueError(f"{where}: advantage must be finite, got {found}")
    prompt = decode_ids(sample.prompt)
    experts = None
    if with_experts:
        experts = merge_choices(read_choices(sample.output), len(prompt) + len(tokens) - 1)
    return TokenSequence(
        rollout=sample.rollout,
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        is_policy=is_policy,
        advantage=sample.advantage,
        token_advantages=_token_advantages(sample) if sample.turn_advantages else None,
        partner=sample.partner,
        is_masked=sample.is_masked,
        experts=experts,
    )


def _token_advantages(sample: Sample) -> Logprobs:
    """Return the advantage of each sampled token, from those of the turns."""
    lengths = [segment.num_tokens for segment in sample.segments if segment.is_policy]
    if len(lengths) != len(sample.turn_advantages):
        raise ValueError(
            f"rollout {sample.rollout}: {len(lengths)} turns but {len(sample.turn_advantages)} advantages"
        )
    return np.repeat(np.array(sample.turn_advantages, LOGPROB), lengths)
