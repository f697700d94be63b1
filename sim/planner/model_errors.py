"""Estimate the model error of a plan that was not measured in full: its tiers, weighted by estimated seconds."""

from __future__ import annotations

from collections import defaultdict

from streamrl.hardware.tiers import Provenance
from streamrl.record.band import ModelError, model_error_of, named_datasheets
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.trial import open_trial


def estimated_error(search: Search, index: int) -> ModelError:
    """Return the model error of a plan. The weights of its operations are GPU-seconds by closed forms.

    Prefill counts as decode, and scores count as training: one fit has both.
    """
    base, _ = open_trial(search.base)
    run = search.space.candidate(index).apply(base)
    found, stages = Costs.load(run).provenance, search.estimates.estimate()
    generating = float(stages.generation[index]) * run.rollout.num_gpus
    training = float(stages.training[index]) * run.trainer.num_gpus
    waiting = float(stages.sync[index]) * (run.rollout.num_gpus + run.trainer.num_gpus)
    weights = {"decode": generating, "train": training, "sync": waiting}
    return _error_of(found, weights)


def _error_of(found: dict[str, Provenance], weights: dict[str, float]) -> ModelError:
    total = sum(weights.values()) or 1.0
    tiers: dict[str, float] = defaultdict(float)
    for operation, weight in weights.items():
        for tier, share in found[operation].shares.items():
            tiers[tier] += share * weight / total
    sides = {name: found[name] for name in ("decode", "train") if weights[name] > 0}
    bounds = [each.p90 for each in sides.values() if each.p90 is not None]
    composed = [name for name, each in sides.items() if each.shares.get("composed", 0.0) > 0]
    unchecked = [name for name in composed if sides[name].p90 is None]
    shares = {name: {str(t): s for t, s in each.shares.items()} for name, each in found.items()}
    parts = {name: each.datasheets for name, each in found.items()}
    return model_error_of(tiers, bounds, unchecked, named_datasheets(weights, shares, parts))
