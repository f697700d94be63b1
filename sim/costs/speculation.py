"""Decode steps in which some tokens are drafted and then checked together: multi-token prediction, or a small model.

With k drafted tokens, each accepted with probability a where all before it were, a step makes

    1 + a + a^2 + … + a^k = (1 - a^(k+1)) / (1 - a)

tokens of a rollout (Leviathan et al. 2023, arXiv 2211.17192, equation 1): one that the check itself gives, and those accepted. It
takes k steps of the draft, and one of the model with k + 1 tokens of each rollout: they share its weights and the reads of its
cache, so that a small batch, as in the tail of a step, gains most, and one that is bound by arithmetic loses. The curve has the
seconds of one token on average; how many a single step accepts is not drawn.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from streamrl.hardware.draft import draft_of
from streamrl.runfile.sides_config import SpeculativeConfig
from streamrl.sim.costs.curves import DecodeCurve, compose_decode
from streamrl.sim.costs.inference import Shard


def accepted_tokens(config: SpeculativeConfig) -> float:
    """Return the tokens that a step makes of each rollout on average."""
    assert config.acceptance is not None, "check_run wants it"
    return sum(config.acceptance**place for place in range(config.tokens + 1))


def compose_speculative(
    shard: Shard, config: SpeculativeConfig, max_running: int, longest: float, capacity: float
) -> DecodeCurve:
    """Compose the decode step by which rollouts get a token each on average; arguments as of `compose_decode`."""
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
    """Return the draft on the same tensor ranks, without what an engine takes of a step beside its layers."""
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
