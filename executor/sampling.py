"""Restrict which tokens may be sampled, and find where a stop string ends a rollout; both sides of a run use the same code.

Truncation. A token is sampled from the softmax of logits / temperature over the tokens that remain. The keys apply in
the order of vLLM (0.32.0, v1/sample/sampler.py):

| key              | removes                                                                                  |
|------------------|------------------------------------------------------------------------------------------|
| `rollout.min_p`  | tokens less likely than `min_p` times the most likely token (arXiv 2407.01082)           |
| `rollout.top_k`  | tokens below the `top_k` largest logits                                                  |
| `rollout.top_p`  | the least likely tokens, while those left keep a mass of `top_p` (arXiv 1904.09751)      |

The trainer must compute log-probabilities of the same distribution. So it removes the tokens that its own logits
exclude. It never removes the token that was sampled: another policy version, or another rounding, may exclude it, and
its log-probability would be minus infinity. DeepSeek-V3.2 (arXiv 2512.02556, section 3.1, "Keep Sampling Mask") sends
the sampler's set to the trainer instead. Both are the same where the weights are the same. With older rollouts, the two
sets differ at their edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.roles_config import RolloutConfig, VerifierConfig

if TYPE_CHECKING:
    import torch

REMOVED = -1e9
"""Logit of a token that is not sampled. It is finite, so that entropies are; its probability is exactly 0 in float32."""


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens may be sampled; the default is all."""

    top_k: int | None = None
    """Number of most likely tokens; None: all."""
    top_p: float = 1.0
    """Least probability mass of the most likely tokens; 1: all."""
    min_p: float = 0.0
    """Least probability relative to the most likely token; 0: all."""

    @property
    def is_whole(self) -> bool:
        """Return whether every token may be sampled."""
        return self.top_k is None and self.top_p == 1.0 and self.min_p == 0.0


WHOLE = Truncation()


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution from which tokens are sampled."""

    temperature: float
    """Divides the logits."""
    truncation: Truncation = WHOLE


GREEDY = Sampling(temperature=1.0, truncation=Truncation(top_k=1))
"""Sampling at temperature 0: the most likely token."""


def sampling_of(config: EvaluationConfig, rollout: RolloutConfig) -> Sampling:
    """Return the sampling of evaluations: its own values, and those of training where it has none."""
    temperature = rollout.temperature if config.temperature is None else config.temperature
    if temperature == 0:
        return GREEDY
    truncation = Truncation(
        top_k=config.top_k or rollout.top_k,
        top_p=rollout.top_p if config.top_p is None else config.top_p,
        min_p=rollout.min_p if config.min_p is None else config.min_p,
    )
    return Sampling(temperature=temperature, truncation=truncation)


SAMPLING_KEYS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("max_tokens", "stop", "stop_token_ids"),
)
"""Keys of `[rollout]` that decide which tokens an evaluation samples, and where a rollout ends."""


def sampling_keys(config: EvaluationConfig | None, rollout: RolloutConfig) -> dict[str, Any]:
    """Return the values of `SAMPLING_KEYS` in evaluations, without empty ones: the own value, otherwise that of training."""
    found = {}
    for key in SAMPLING_KEYS:
        own = getattr(config, key, None)
        value = getattr(rollout, key) if own is None else own
        if value is not None and value != ():
            found[key] = value
    return found


SCORED_ALIKE = (
    *("share", "scorer", "samples", "passes_at"),
    *("temperature", "top_p", "top_k", "min_p", "max_tokens"),
)
"""Keys of `[evaluation]` without which scores cannot be compared. A resume must not change them."""


def scored_with(
    evaluation: EvaluationConfig | None, rollout: RolloutConfig, verifier: VerifierConfig
) -> dict[str, object]:
    """Return what the scores of evaluations depend on, by key of `[evaluation]`. Without evaluations only the share is there."""
    if evaluation is None:
        return {"share": None}
    used = sampling_keys(evaluation, rollout)
    found = {name: used.get(name, getattr(evaluation, name)) for name in SCORED_ALIKE}
    return found | {"scorer": evaluation.scorer or verifier.reward or verifier.scorer}


def truncated(
    scaled: torch.Tensor, truncation: Truncation, sampled: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits / temperature, [n, vocabulary], with `REMOVED` for tokens that may not be sampled.

    `sampled`, [n] int64, are tokens that stay whatever their logits are.
    """
    if truncation.is_whole:
        return scaled
    is_out = scaled < _smallest_logits(scaled.detach(), truncation)
    if sampled is not None:
        is_out.scatter_(-1, sampled[:, None], False)
    return scaled.masked_fill(is_out, REMOVED)


def _smallest_logits(scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return the smallest logit of each row, [n, 1], that may be sampled."""
    size = scaled.shape[-1]
    least = scaled.new_full((len(scaled), 1), -math.inf)
    if truncation.min_p > 0:
        least = scaled.amax(-1, keepdim=True) + math.log(truncation.min_p)
    if truncation.top_k is not None and truncation.top_k < size:
        rising = scaled.topk(truncation.top_k, dim=-1).values.flip(-1)
        least = least.maximum(rising[:, :1])
    elif truncation.top_p < 1:
        rising = scaled.sort(dim=-1).values
    if truncation.top_p < 1:
        mass = rising.masked_fill(rising < least, -math.inf).softmax(-1).cumsum(-1)
        is_kept = mass > 1 - truncation.top_p
        is_kept[:, -1] = True  # at least the most likely token
        first = is_kept.int().argmax(-1, keepdim=True)
        least = least.maximum(rising.gather(-1, first))
    return least


TOKENS_PER_CHARACTER = 4
"""Most tokens that one character can have: byte-level tokenizers have up to one for each byte of UTF-8."""
IsOver = Callable[[Sequence[int]], bool]
"""Whether a rollout with these output tokens has reached its end."""


class StopStrings:
    """Finds the token with which the text of a rollout first has one of some strings."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # One token more than the longest string can have: the first token of the window may lose a leading space.
        self._window = 1 + TOKENS_PER_CHARACTER * max(map(len, self._strings), default=0)

    def ends(self, prefix: Sequence[int], tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string; call it after each token.

        Args:
            prefix: output tokens of earlier attempts.
            tokens: output tokens after them.
        """
        if not self._strings or not tokens:
            return False
        tail = list(tokens[-self._window :])
        if missing := self._window - len(tail):
            tail = [*prefix[max(0, len(prefix) - missing) :], *tail]
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(string in text for string in self._strings)
