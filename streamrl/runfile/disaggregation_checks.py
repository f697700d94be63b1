"""Check replicas that only prefill, and refuse what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH, dispatch_named
from streamrl.runfile.errors import RunError
from streamrl.runfile.gpu_pools import find_link, kind_key
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import ReplicasConfig, RolloutConfig


class _Rule(NamedTuple):
    key: str
    value: object
    holds: bool
    allowed: str
    """What the value must be, and why."""


def check_disaggregation(
    rollout: RolloutConfig,
    policies: PoliciesConfig,
    links: list[LinkConfig],
    *,
    lends: bool,
    profile: str | None,
) -> None:
    """Raise `RunError` if some replicas only prefill, and another key does not allow it.

    Args:
        rollout: all kinds of replicas.
        policies: its section of the run file.
        links: those between pools.
        lends: whether GPUs of the trainer are lent.
        profile: the profile of the machine that gives all seconds; None if there is none.
    """
    for kind in rollout.prefill_kinds:
        key, own = kind_key(kind), rollout.others[kind - 1]
        mode = f"{key}.disaggregation_mode"
        for rule in (*_own_rules(own, key), *_rules(rollout, policies, profile, lends=lends)):
            if not rule.holds:
                text = f"{rule.key} must be {rule.allowed} ({mode} 'prefill'), got {rule.value!r}"
                raise RunError(rule.key, rule.value, None, text, (mode,))
        for pool in (decode.pool for decode in rollout.decode_kinds):
            if own.pool != pool and find_link(links, own.pool, pool) is None:
                text = (
                    f"cluster.links has no link between {own.pool!r} and {pool!r}, which KV caches cross "
                    f"({mode} 'prefill'); add one"
                )
                raise RunError("cluster.links", links, None, text, (mode,))


def _own_rules(own: ReplicasConfig, key: str) -> Iterator[_Rule]:
    """Yield what the replicas themselves must be."""
    for name, value in (("share", own.share), ("latency", own.latency)):
        what = "left out for replicas that decode nothing"
        yield _Rule(f"{key}.{name}", value, value is None, what)


def _rules(
    rollout: RolloutConfig, policies: PoliciesConfig, profile: str | None, *, lends: bool
) -> Iterator[_Rule]:
    """Yield what the rest of the run must be."""
    yield _Rule(
        "policies.dispatch",
        policies.dispatch,
        dispatch_named(policies.dispatch).sends_just_in_time,
        f"{DEFAULT_DISPATCH!r}, because a rollout is sent once its context is prefilled",
    )
    yield _Rule(
        "policies.weight_sync",
        policies.weight_sync,
        policies.weight_sync != "between-batches",
        "another one, because replicas do not get whole batches",
    )
    yield _Rule(
        "rollout.admission",
        rollout.admission,
        rollout.admission == "on-demand",
        "'on-demand', because prefill replicas reserve nothing for outputs",
    )
    yield _Rule("lending", "a section", not lends, "left out: lent replicas do both")
    what = "left out, because it measured replicas that do both"
    yield _Rule("costs.profile", profile, profile is None, what)
