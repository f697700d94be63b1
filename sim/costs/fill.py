"""What policies reckon with and a run file leaves out: seconds of generation, from the costs."""

from __future__ import annotations

import msgspec

from sim.costs.costs import Costs
from streamrl.engine.systems import moves_caches, needs_latency
from streamrl.hardware.memory import longest_sequence, most_running
from streamrl.runfile.config import Run


def fill_policies(run: Run, costs: Costs) -> Run:
    """Return the run with the seconds that its policies ask for; those that it states stay."""
    if not needs_latency(run):
        return run
    run = fill_latency(run, costs)
    if run.policies.migration == "none" or run.policies.context_time is not None:
        return run
    policies = msgspec.structs.replace(run.policies, context_time=_context_time(run, costs))
    filled: Run = msgspec.structs.replace(run, policies=policies)
    return filled


def _context_time(run: Run, costs: Costs) -> float:
    """Return the seconds of each token of context that moves: its transfer, or prefill at the longest context."""
    if moves_caches(run):
        return costs.cache_transfer.token_time
    context = longest_sequence(run)
    return costs.prefill_time(context, context**2 / 2, 0) / context


def fill_latency(run: Run, costs: Costs) -> Run:
    """Return the run with `policies.latency` filled in from the decode curve, where it is absent.

    Read at half the longest rollout's context, the middle of its life, up to the batch that memory holds of
    these, or of the longest where admission reserves them.
    """
    if run.policies.latency is not None:
        return run
    context = longest_sequence(run) / 2
    most = most_running(run)
    if run.rollout.admission == "on-demand":
        most = max(1, min(most, int(costs.kv_capacity / context)))
    batches = [b for b in (2**i for i in range(17)) if b < most] + [most]
    points = tuple((b, costs.decode.step_time(b, b * context)) for b in batches)
    policies = msgspec.structs.replace(run.policies, latency=points)
    filled: Run = msgspec.structs.replace(run, policies=policies)
    return filled
