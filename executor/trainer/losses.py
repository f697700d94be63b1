"""Compute policy losses, off-policy corrections and their diagnostics for each output token.

Tensors are flat, `[n]`: the output tokens of several rollouts, concatenated without padding. They have only tokens that
the policy sampled. Other tokens, such as a tool's answer, are only context of the forward pass. All corrections use one
formula: PPO (arXiv 1707.06347) with the third policy of decoupled PPO.

    loss = -w * min(r * A, clip(r, 1 - clip, 1 + clip_high) * A)     r = policy / proximal

| correction | proximal policy        | w, from k = proximal / behaviour            | source           |
|------------|------------------------|---------------------------------------------|------------------|
| none       | the behaviour policy   | 1                                           | PPO              |
| gspo       | the behaviour policy   | 1; r is the geometric mean over the rollout | arXiv 2507.18071 |
| token-tis  | the policy itself      | min(k, cap)                                 | Yao et al. 2025  |
| seq-tis    | the policy itself      | min(product of k over the rollout, cap)     | Yao et al. 2025  |
| icepop     | the policy itself      | k if 1/cap <= k <= cap, else 0              | arXiv 2510.18855 |
| topr       | the policy itself      | 1 if A >= 0, else min(product of k, 1)      | arXiv 2503.14286 |
| cispo      | the policy itself      | min(k, cap), with a cap of 1 + clip_high    | arXiv 2506.13585 |
| m2po       | the behaviour policy   | 0 for masked tokens, else 1; no clipping    | arXiv 2510.01161 |
| decoupled  | that of the score pass | min(k, cap)                                 | arXiv 2110.00641 |

M2PO masks the tokens with the largest (log r)^2 until the mean of the others is at most the cap. The paper takes the mean
over a batch. Here it is over a rollout, because a batch is never in memory as a whole.

Without a correction the loss is -A * log-probability of the chosen rollouts, whatever policy sampled them. If the
proximal policy is the policy itself, r is 1 and its gradient is that of the log-probability. This is the
importance-weighted policy gradient. It is exact if a batch has one optimizer step. DAPO's clip-higher (arXiv 2503.14476)
is a `clip_high` above `clip`. With a dual clip c (arXiv 1912.09729), the minimum is at least c * A where A < 0; it binds
where r > c, so only where r is not always 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import assert_never, get_args

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from streamrl.executor.sampling import WHOLE, Truncation, truncated
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.runfile.algorithm_config import CorrectionName, KlEstimator

CORRECTIONS: tuple[CorrectionName, ...] = get_args(CorrectionName)
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: e^20 is above any cap, and its square does not overflow in float64 sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Sampled output tokens of whole rollouts, flat."""

    logprobs: torch.Tensor
    """[n] float32, log-probabilities under the policy that is trained, with gradient."""
    behaviour: torch.Tensor
    """[n] log-probabilities under the policy that sampled."""
    advantages: torch.Tensor
    """[n]; without a critic, all tokens of a rollout have the same advantage."""
    rollouts: torch.Tensor
    """[n] int64, index of each token's rollout, from 0."""
    proximal: torch.Tensor | None = None
    """[n] log-probabilities of the score pass, with the weights at the start of the batch; only for `decoupled`."""


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    truncation: Truncation = WHOLE,
) -> torch.Tensor:
    """Compute `log softmax(logits / temperature)[token]`, [n] float32, from logits [n, vocabulary].

    With a truncation the softmax is over the tokens that may be sampled, and the sampled token.
    """
    scaled = truncated(scaled_logits(logits, temperature), truncation, tokens)
    return -cross_entropy(scaled, tokens, reduction="none")


def token_entropies(
    logits: torch.Tensor,
    temperature: float,
    truncation: Truncation = WHOLE,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the entropy of the next token, [n] float32 in nats, with gradient, from logits [n, vocabulary].

    With a truncation it is that of the tokens that may be sampled, and of the sampled `tokens`, [n].
    """
    scaled = truncated(scaled_logits(logits, temperature), truncation, tokens).log_softmax(-1)
    return -(scaled.exp() * scaled).sum(-1)


def scaled_logits(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits / temperature in float32; the same tensor if nothing changes."""
    whole = logits.float()
    return whole if temperature == 1.0 else whole / temperature


def flatten_sequences(
    sequences: list[TokenSequence],
    advantages: Sequence[torch.Tensor],
    logprobs: torch.Tensor,
    proximal: torch.Tensor | None,
) -> Tokens:
    """Combine log-probabilities [n] of sequences with their behaviour log-probabilities and advantages.

    `advantages` has one tensor for each sequence: one value for all its tokens, or one value for each.
    """
    device = logprobs.device
    lengths = torch.tensor([sequence.num_trained for sequence in sequences])
    rollouts = torch.arange(len(sequences)).repeat_interleave(lengths).to(device)
    behaviour = np.concatenate([sequence.logprobs[sequence.is_policy] for sequence in sequences])
    return Tokens(
        logprobs=logprobs,
        behaviour=torch.from_numpy(behaviour).to(device),
        advantages=torch.cat(
            [each.expand(s.num_trained) for each, s in zip(advantages, sequences, strict=True)]
        ).to(device),
        rollouts=rollouts,
        proximal=proximal,
    )


def policy_losses(
    tokens: Tokens,
    correction: CorrectionName | None,
    *,
    clip: float,
    cap: float,
    clip_high: float | None = None,
    clip_dual: float | None = None,
) -> torch.Tensor:
    """Compute the loss of every token, [n], by this module's formula and table; `clip_high` defaults to `clip`."""
    if correction is None:
        return -tokens.advantages * tokens.logprobs
    weights = correction_weights(tokens, correction, cap)
    ratios = _policy_ratios(tokens, correction)
    if correction == "m2po":
        return -weights * ratios * tokens.advantages
    clipped = ratios.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    gains = torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)
    if clip_dual is not None:
        bounded = torch.maximum(gains, clip_dual * tokens.advantages)
        gains = torch.where(tokens.advantages < 0, bounded, gains)
    return -weights * gains


def proximal_logprobs(tokens: Tokens, correction: CorrectionName | None) -> torch.Tensor:
    """Return the log-probabilities, [n], of the policy that the PPO clip stays close to.

    Raises `ValueError` if `decoupled` has no score pass.
    """
    match correction:
        case "none" | "gspo" | "m2po":
            return tokens.behaviour
        case "token-tis" | "seq-tis" | "icepop" | "topr" | "cispo" | None:
            return tokens.logprobs.detach()
        case "decoupled":
            if tokens.proximal is None:
                raise ValueError(
                    "correction decoupled needs log-probabilities of a score pass: call score first"
                )
            return tokens.proximal
        case _:
            assert_never(correction)


def correction_weights(
    tokens: Tokens, correction: CorrectionName | None, cap: float
) -> torch.Tensor:
    """Compute the importance weight w of every token, [n], without gradient."""
    ratios = _raw_weights(tokens, correction)
    match correction:
        case "none" | "gspo" | None:
            return ratios
        case "topr":
            return ratios.clamp(max=1.0)
        case "icepop":
            return torch.where((ratios >= 1 / cap) & (ratios <= cap), ratios, 0.0)
        case "token-tis" | "seq-tis" | "decoupled" | "cispo":
            return ratios.clamp(max=cap)
        case "m2po":
            return _small_moments(tokens, cap)
        case _:
            assert_never(correction)


def k1(logprobs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Compute the unbiased estimate of KL(sampling policy || policy) for each token, in nats.

    `log q - log p`, where q is the sampling policy (Schulman 2020, "Approximating KL divergence").
    """
    return sampled - logprobs


def k3(logprobs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Compute `p/q - 1 - log(p/q)`: an estimate of KL(q || p) for each token, unbiased and never negative.

    q is the sampling policy and p the other one (Schulman 2020). GRPO's penalty (arXiv 2402.03300, equation 4) uses
    the reference as p and the trained policy as q.
    """
    log_ratio = (logprobs - sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def k2(logprobs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Compute half the squared log-ratio for each token, in nats: its gradient is the gradient of the KL.

    For a policy that is pulled towards another one on its own samples (Schulman 2020; gradient: arXiv 2506.09477).
    """
    return (logprobs - sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2


def kl_losses(
    logprobs: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Compute the KL term against a reference policy for each token, [n], with gradient."""
    match estimator:
        case "k1":
            return k1(reference, logprobs)
        case "k2":
            return k2(logprobs, reference)
        case "k3":
            return k3(reference, logprobs)
        case _:
            assert_never(estimator)


SUMS = (
    *("evaluated", "ratio", "ratio_squared", "clipped", "truncated"),
    *("entropy", "gap", "k1", "k3"),
)
"""Keys of `diagnostic_sums`."""
REFERENCE_SUM = "reference_kl"
"""Additional key if a reference model runs: the KL term of every token."""


def diagnostic_sums(
    tokens: Tokens,
    correction: CorrectionName | None,
    *,
    clip: float,
    cap: float,
    clip_high: float | None = None,
    clip_dual: float | None = None,
) -> dict[str, float]:
    """Return sums over these tokens; add them up over micro-batches, and pass them to `diagnostics`."""
    with torch.no_grad():
        policy, behaviour = tokens.logprobs.double(), tokens.behaviour.double()
        ratios = _ratios(policy, behaviour)
        raw = _raw_weights(tokens, correction)
        sums = {
            "ratio": ratios,
            "ratio_squared": ratios.square(),
            "clipped": _clip_binds(
                tokens, correction, clip, clip if clip_high is None else clip_high, clip_dual
            ),
            "truncated": raw != correction_weights(tokens, correction, cap),
            "entropy": -policy,
            "gap": (policy - behaviour).abs(),
            "k1": k1(policy, behaviour),
            "k3": k3(policy, behaviour),
        }
        values = torch.stack([value.double().sum() for value in sums.values()]).tolist()
    return {"evaluated": float(len(policy)), **dict(zip(sums, values, strict=True))}


def diagnostics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute how far the policy is from the one that sampled; empty without evaluated tokens.

    | key                    | over the evaluated tokens, ratio = policy / behaviour   |
    |------------------------|---------------------------------------------------------|
    | mean_ratio             | mean ratio; 1 in expectation                            |
    | effective_sample_share | `(sum ratio)^2 / (n * sum ratio^2)`, 1 on-policy (Kish) |
    | clip_fraction          | share whose gradient the PPO clip stops                 |
    | entropy                | mean -log policy, nats: an estimate from sampled tokens |
    | truncated_fraction     | share whose importance weight was capped or masked      |
    | logprob_gap            | mean abs(log policy - log behaviour), nats              |
    | kl_k1, kl_k3           | KL(behaviour || policy), nats                           |
    | reference_kl           | KL(policy || initial policy) by `kl_estimator`, nats; only with a reference |

    At staleness 0 and with one optimizer step for each batch, the gap is only the mismatch of the two engines.
    """
    evaluated = sums.get("evaluated", 0.0)
    if evaluated == 0:
        return {}
    beside = {"reference_kl": sums[REFERENCE_SUM] / evaluated} if REFERENCE_SUM in sums else {}
    return {
        "mean_ratio": sums["ratio"] / evaluated,
        "effective_sample_share": sums["ratio"] ** 2 / (evaluated * sums["ratio_squared"]),
        "clip_fraction": sums["clipped"] / evaluated,
        "truncated_fraction": sums["truncated"] / evaluated,
        "entropy": sums["entropy"] / evaluated,
        "logprob_gap": sums["gap"] / evaluated,
        "kl_k1": sums["k1"] / evaluated,
        "kl_k3": sums["k3"] / evaluated,
        **beside,
    }


def average_gradients(model: torch.nn.Module, count: float, max_norm: float) -> float:
    """Divide the summed gradient by `count`, clip it, and return its norm before clipping.

    Raises `FloatingPointError` if the norm is not finite; the gradient is then unchanged.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = float(torch.nn.utils.get_total_norm(gradients))
    return scale_gradients(gradients, total, count, max_norm)


def scale_gradients(
    gradients: list[torch.Tensor], total_norm: float, count: float, max_norm: float
) -> float:
    """Divide gradients whose norm is `total_norm` by `count` and clip them; see `average_gradients`."""
    norm = total_norm / count
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}; the weights were not updated")
    scale = max_norm / max(norm, max_norm) / count
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _ratios(logprobs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _policy_ratios(tokens: Tokens, correction: CorrectionName | None) -> torch.Tensor:
    """Compute r of every token, [n], with gradient."""
    proximal = proximal_logprobs(tokens, correction)
    if correction != "gspo":
        return _ratios(tokens.logprobs, proximal)
    log_ratio = tokens.logprobs - proximal
    lengths = _of_rollouts(torch.ones_like(log_ratio), tokens.rollouts)
    return _ratios(_of_rollouts(log_ratio, tokens.rollouts) / lengths, torch.zeros_like(log_ratio))


def _of_rollouts(values: torch.Tensor, rollouts: torch.Tensor) -> torch.Tensor:
    """Return for each token, [n], the sum over its rollout."""
    num = int(rollouts.max()) + 1 if len(rollouts) else 0
    return values.new_zeros(num).index_add(0, rollouts, values)[rollouts]


def _small_moments(tokens: Tokens, most: float) -> torch.Tensor:
    """Return 1 for tokens, [n], that M2PO keeps, 0 for masked ones.

    In each rollout it keeps the smallest squared log-ratios whose mean is at most `most`.
    """
    squares = (tokens.logprobs.detach() - tokens.behaviour).square()
    kept = torch.zeros_like(squares)
    for places in torch.split(
        torch.arange(len(squares), device=squares.device), _lengths(tokens.rollouts)
    ):
        rising, order = squares[places].sort()
        means = rising.cumsum(0) / torch.arange(1, 1 + len(rising), device=squares.device)
        kept[places[order]] = (means <= most).to(kept.dtype)
    return kept


def _lengths(rollouts: torch.Tensor) -> list[int]:
    """Return the number of tokens of each rollout; rollouts are consecutive."""
    lengths: list[int] = torch.unique_consecutive(rollouts, return_counts=True)[1].tolist()
    return lengths


def _raw_weights(tokens: Tokens, correction: CorrectionName | None) -> torch.Tensor:
    """Return the importance weights before any cap or mask."""
    if correction is None:
        return torch.ones_like(tokens.behaviour)
    log_ratio = (proximal_logprobs(tokens, correction) - tokens.behaviour).detach()
    if correction in ("seq-tis", "topr"):
        log_ratio = _of_rollouts(log_ratio, tokens.rollouts)
    if correction == "topr":
        log_ratio = torch.where(tokens.advantages >= 0, 0.0, log_ratio)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip_binds(
    tokens: Tokens,
    correction: CorrectionName | None,
    clip: float,
    clip_high: float,
    clip_dual: float | None,
) -> torch.Tensor:
    ratios = _policy_ratios(tokens, correction)
    if correction == "m2po":
        return torch.zeros_like(ratios, dtype=torch.bool)
    above = (ratios > 1 + clip_high) & (tokens.advantages > 0)
    outside = ratios < 1 - clip
    if clip_dual is not None:
        outside |= ratios > clip_dual
    return above | (outside & (tokens.advantages < 0))
