"""Estimate the model error of a plan that was not measured in full, from the closed forms of its stages."""

from __future__ import annotations

from streamrl.hardware.step_errors import Stage
from streamrl.hardware.tiers import datasheet_share
from streamrl.record.band import ModelError, basis_of, model_error_of, named_datasheets
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.trial import open_trial


def estimated_error(search: Search, index: int) -> ModelError:
    """Return the model error of a plan, from its seconds by closed forms. Scores count as training."""
    base, _ = open_trial(search.base)
    run = search.space.candidate(index).apply(base)
    costs, stages = Costs.load(run), search.estimates.estimate()
    generating, training = float(stages.generation[index]), float(stages.training[index])
    waiting, step = float(stages.sync[index]), float(stages.step[index])
    replicas: dict[Stage, float] = {"generation": generating / step, "sync": waiting / step}
    basis = basis_of(replicas, {"train": training / step}, costs.facts)
    weights = {
        "decode": generating * run.rollout.num_gpus,
        "train": training * run.trainer.num_gpus,
        "sync": waiting * (run.rollout.num_gpus + run.trainer.num_gpus),
    }
    found, total = costs.provenance, sum(weights.values()) or 1.0
    from_datasheets = sum(datasheet_share(found[each].shares) * weights[each] for each in weights)
    unchecked = [
        name
        for name in ("decode", "train")
        if weights[name] > 0 and found[name].shares.get("composed") and found[name].p90 is None
    ]
    shares = {name: {str(t): s for t, s in each.shares.items()} for name, each in found.items()}
    parts = {name: each.datasheets for name, each in found.items()}
    named = named_datasheets(weights, shares, parts)
    return model_error_of(basis, from_datasheets / total, unchecked, named)
