"""Tabulate the seconds of a replica's decode steps, plain or speculative, and of its prefill passes.

Speculative decoding drafts some tokens and checks them together, with multi-token prediction or a
small model. With k drafted tokens, each accepted with probability a if all before it were, a step
makes

    1 + a + a^2 + … + a^k = (1 - a^(k+1)) / (1 - a)

tokens of a rollout (Leviathan et al. 2023, arXiv 2211.17192, equation 1): one from the check
itself, and the accepted ones. It takes k steps of the draft model, and one step of the model with k
+ 1 tokens of each rollout. These tokens share the reads of weights and cache. So a small batch
gains most, as in the tail of a step, and a batch that is limited by FLOPs loses. The curve has the
mean seconds per token. The number of accepted tokens of a single step is not drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import ceil

import msgspec
import numpy as np

from streamrl.hardware.memory import PREFILL_CHUNK, draft_of
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.parallelism import stage_layers
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.sim.costs.inference import SHORTEST_CONTEXT, Shard
from streamrl.sim.costs.kernels import Estimate, total

KNOTS_PER_DOUBLING = 3
"""Prefill passes are composed at this number of points per doubling of tokens, with linear
interpolation.
"""
LONGEST_PROMPT = 2.0**17


@dataclass(frozen=True, kw_only=True)
class DecodeCurve:
    """A replica's decode step: `base[b] + per_context_token[b] * S` seconds for b rollouts with S tokens in total."""

    base: list[float]
    per_context_token: list[float]
    provenance: Provenance

    def step_time(self, num_running: int, context_tokens: float) -> float:
        """Return the seconds of one decode step."""
        return self.base[num_running] + self.per_context_token[num_running] * context_tokens


def compose_decode(shard: Shard, max_running: int, longest: float, capacity: float) -> DecodeCurve:
    """Compose the decode step for every batch up to `max_running`.

    Products and overheads depend on the batch alone. Attention is fitted at batches of powers of
    two: a straight line in the tokens of context, with least squares of relative errors. The fit
    has up to `longest` tokens a rollout and `capacity` tokens in total. Between those batches, the
    two parameters of the line are interpolated. A batch takes at least as long as a smaller one: if
    a kernel is faster for more rollouts, an engine pads.

    Attention ranks have equal shares of the rollouts. A pipeline of p stages has p batches under
    way, or one for each rollout if there are fewer. A token of every rollout takes p turns of the
    slowest stage.
    """
    running = np.arange(1.0, max_running + 1)
    under_way = np.minimum(running, shard.pipeline_parallel)
    ways = under_way * shard.data_parallel
    batch = np.ceil(running / ways)
    slowdown = shard.engine.constants.slowdown
    base = _base(shard, batch, running / under_way)
    largest = int(batch[-1])
    knots = [b for b in (2**i for i in range(17)) if b < largest] + [largest]
    each = capacity / shard.pipeline_parallel / shard.data_parallel
    lines = [_attention_line(shard, b, longest, each) for b in knots]
    turns = shard.pipeline_parallel * fullest_share(shard)
    fixed = turns * np.interp(batch, knots, [line[0] for line in lines])
    slope = turns * np.interp(batch, knots, [line[1] for line in lines])
    slope = np.maximum.accumulate(slope * batch) / batch / ways
    return DecodeCurve(
        base=[0.0, *np.maximum.accumulate(base.seconds + slowdown * fixed).tolist()],
        per_context_token=[slowdown * float(slope[0]), *(slowdown * slope).tolist()],
        provenance=total([base, *(line[2] for line in lines)]).provenance,
    )


def fullest_share(shard: Shard) -> float:
    """Return the share of the layers on the largest stage."""
    layers = shard.model.num_layers
    return max(stage_layers(layers, shard.pipeline_parallel)) / layers


def _base(shard: Shard, batch: Floats, together: Floats) -> Estimate:
    """Return the seconds of a decode step without attention; every stage takes as long as the slowest.

    `batch` is the number of rollouts on the fullest attention rank, `together` that of all ranks in
    one pass.
    """
    slowdown, stages = shard.engine.constants.slowdown, shard.pipeline_parallel
    tokens = batch * shard.queries
    routed = together * shard.queries if shard.data_parallel > 1 else None
    products, head = shard.products(tokens, routed) * slowdown, shard.head(tokens) * slowdown
    if stages == 1:
        kernels = products + head
        return total([kernels, shard.waiting(kernels.seconds), shard.overhead(batch)])
    layers = stage_layers(shard.model.num_layers, stages)
    shares = [max(layers) / shard.model.num_layers, layers[-1] / shard.model.num_layers]
    turns = [products * shares[0], products * shares[1] + head]
    slowest = max(turns, key=lambda turn: float(turn.seconds[-1]))
    waiting = shard.waiting(slowest.seconds / shares[0])
    turn = [slowest, waiting * shares[0], shard.overhead(batch, shares[0]), shard.sent_on(tokens)]
    return total(turn) * stages


def _attention_line(
    shard: Shard, rollouts: int, longest: float, capacity: float
) -> tuple[float, float, Estimate]:
    """Fit seconds = fixed + slope * tokens of context; both are at least 0."""
    farthest = max(4 * SHORTEST_CONTEXT, min(longest, capacity / rollouts))
    contexts = np.geomspace(SHORTEST_CONTEXT, farthest, 9)
    estimate = shard.decode_attention(rollouts, contexts)
    tokens, weight = contexts * rollouts, 1 / estimate.seconds
    fixed, slope = np.linalg.lstsq(
        np.stack([weight, tokens * weight], axis=1), np.ones(len(contexts)), rcond=None
    )[0]
    if fixed < 0:
        fixed, slope = 0.0, np.sum(tokens * weight) / np.sum((tokens * weight) ** 2)
    return float(fixed), max(0.0, float(slope)), estimate.mean()


class PrefillCurve:
    """Seconds of prefill passes.

    If passes mix prefill with decode, as in vLLM, a prefill costs the seconds that it adds to the
    decode step. This is close to zero while the decode step is limited by reading the weights.
    """

    def __init__(self, shard: Shard, max_running: int, *, is_mixed: bool) -> None:
        """Compose passes of up to a chunk of tokens, together with up to `max_running` decoding rollouts."""
        num_knots = 1 + int(np.log2(PREFILL_CHUNK + max_running) * KNOTS_PER_DOUBLING)
        knots = np.geomspace(1, PREFILL_CHUNK + max_running, num_knots).round()
        tokens = np.array(sorted(set(knots.tolist())))
        products = shard.products(tokens)
        overhead = shard.overhead(np.ones(1)) + shard.waiting(products.seconds[:1])
        contexts = np.geomspace(16, LONGEST_PROMPT, 27)
        alone = shard.prefill_attention(1, contexts)
        packed = [
            shard.prefill_attention(max(1.0, PREFILL_CHUNK / c), np.array([c])) for c in contexts
        ]
        self._is_mixed = is_mixed
        self._share, self._ranks = fullest_share(shard), shard.data_parallel
        self._overhead = float(overhead.seconds[0])
        self._products = _Line(tokens, products.seconds)
        pairs = contexts * contexts / 2
        self._alone = _Line(contexts, alone.seconds / pairs)
        self._packed = _Line(
            contexts,
            np.array([p.seconds[0] for p in packed])
            / (pairs * np.maximum(1, PREFILL_CHUNK / contexts)),
        )
        self.provenance = (shard.products(np.array([PREFILL_CHUNK])) + packed[0]).provenance

    def time(
        self, num_tokens: int, context_pairs: float, num_running: int, num_rollouts: int = 1
    ) -> float:
        """Return the seconds that prefill adds; the slowest pipeline stage counts, and all attention ranks wait.

        Args:
            num_tokens: new tokens of context.
            context_pairs: tokens that they attend to, in total.
            num_running: rollouts that decode meanwhile.
            num_rollouts: rollouts of these tokens; it does not matter for kernels.
        """
        if self._ranks > 1:
            num_tokens = ceil(num_tokens / self._ranks)
            context_pairs /= self._ranks
            num_running = ceil(num_running / self._ranks)
        beside = num_running if self._is_mixed else 0
        length = 2 * context_pairs / num_tokens
        per_pair = self._packed if num_tokens >= 2 * length else self._alone
        attention = context_pairs * per_pair.at(length)
        whole, rest = divmod(num_tokens, PREFILL_CHUNK)
        seconds = attention + whole * self._pass(PREFILL_CHUNK, beside)
        seconds += self._pass(rest, beside) if rest else 0.0
        return seconds * self._share

    def _pass(self, num_tokens: int, beside: int) -> float:
        if beside:
            return max(0.0, self._products.at(num_tokens + beside) - self._products.at(beside))
        return self._products.at(num_tokens) + self._overhead


class _Line:
    """A piecewise linear function that is constant beyond its ends."""

    def __init__(self, places: Floats, values: Floats) -> None:
        self._places: list[float] = places.tolist()
        self._values: list[float] = values.tolist()

    def at(self, place: float) -> float:
        places, values = self._places, self._values
        right = bisect_right(places, place)
        if right == 0:
            return values[0]
        if right == len(places):
            return values[-1]
        share = (place - places[right - 1]) / (places[right] - places[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])


DRIFT_POINTS = 101
"""Points of a training run at which the acceptance of a draft is looked at."""


def accepted_tokens(config: SpeculativeConfig) -> float:
    """Return the mean number of tokens that a decode step makes for each rollout.

    If acceptance changes over training steps, it is the number at which all tokens take as long.
    """
    assert config.acceptance is not None, "check_run wants it"
    last = config.acceptance if config.acceptance_to is None else config.acceptance_to
    if last == config.acceptance:
        return _accepted(config.acceptance, config.tokens)
    shares = np.linspace(config.acceptance, last, DRIFT_POINTS)
    return DRIFT_POINTS / sum(1 / _accepted(float(share), config.tokens) for share in shares)


def _accepted(acceptance: float, tokens: int) -> float:
    return sum(acceptance**place for place in range(tokens + 1))


def compose_speculative(
    shard: Shard, config: SpeculativeConfig, max_running: int, longest: float, capacity: float
) -> DecodeCurve:
    """Compose a decode step with one token per rollout on average; arguments as in `compose_decode`."""
    checked = replace(shard, queries=config.tokens + 1)
    check, draft = (
        compose_decode(one, max_running, longest, capacity)
        for one in (checked, _draft_shard(shard, config))
    )
    made = accepted_tokens(config)
    base, slope = (
        [(one + config.tokens * other) / made for one, other in zip(*both, strict=True)]
        for both in ((check.base, draft.base), (check.per_context_token, draft.per_context_token))
    )
    source = f"run file: rollout.speculative, {made:.2f} tokens a step"
    return DecodeCurve(
        base=base, per_context_token=slope, provenance=check.provenance.adjusted(source)
    )


def _draft_shard(shard: Shard, config: SpeculativeConfig) -> Shard:
    """Return the draft model on the same tensor ranks, without the engine's overhead per step."""
    bare = msgspec.structs.replace(shard.engine.constants, step=0.0, request=0.0, logit=0.0)
    engine = msgspec.structs.replace(shard.engine, constants=bare)
    draft = draft_of(shard.model, config)
    experts = shard.expert_parallel if draft.experts is not None else 1
    ranks = shard.data_parallel if experts > 1 else 1
    return replace(
        shard,
        model=draft,
        engine=engine,
        expert_parallel=experts,
        data_parallel=ranks,
        pipeline_parallel=1,
    )
