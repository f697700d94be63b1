"""Rehearse a run and report what only a simulation shows: stalls, an overloaded link, slow weight formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.doctor.diagnosis import diagnose
from streamrl.engine.presets import choose_system
from streamrl.hardware.resolved import resolve
from streamrl.record.metrics import Metrics, measure
from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Changes, Finding, Fix, is_error, propose_fix, toml
from streamrl.runfile.formatting import format_count, format_duration, format_share
from streamrl.runfile.gpu_pools import find_link
from streamrl.runfile.policies_config import PoliciesConfig, SyncMode
from streamrl.runfile.roles_config import NARROW, RolloutConfig
from streamrl.runfile.units import Bandwidth
from streamrl.sim.checkup import progress
from streamrl.sim.checkup.rehearsal import Rehearsal, rehearse, shortened
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.weight_sync import link_hop
from streamrl.workload.replica_batch import MeanLengths, mean_lengths, replica_batch

OTHER_FORMATS: tuple[Changes, ...] = (
    {"weight_only": True},
    {"dtype": None, "weight_only": False},
)
"""Keys of `[rollout]` that are tried. The first saves memory as before, because weights stay narrow and are widened
before each product."""


def find_slow_format(run: Run) -> Iterator[Finding]:
    """Yield a finding if a decode step takes longer with narrow weights than with weights in `model.dtype`.

    Raises:
        ValueError: the model fits its replica in only one of the two formats.
    """
    dtype, lengths = run.rollout.dtype, mean_lengths(run)
    if dtype not in NARROW or lengths is None:
        return
    batch = replica_batch(resolve(run))
    assert batch is not None, "it is None only without lengths"
    running = max(1, int(min(batch)))
    wide = replace(run, rollout=replace(run.rollout, dtype=None, weight_only=False))
    narrow_time, wide_time = (
        Costs.load(each).decode.step_time(running, running * lengths.context)
        for each in (run, wide)
    )
    if narrow_time > wide_time:
        text = (
            f"a decode step of {running:,} rollouts takes {format_duration(narrow_time)} with weights in {dtype}, and "
            f"{format_duration(wide_time)} in {run.model.dtype}"
        )
        yield Finding(level="warning", topic="batch", name="slow-format", text=text)


def _other_formats(rollout: RolloutConfig) -> Iterator[Changes]:
    for keys in OTHER_FORMATS:
        yield {f"rollout.{key}": new for key, new in keys.items() if getattr(rollout, key) != new}


FORMAT_FIXES = {
    "slow-format": Fix(
        lambda run: _other_formats(run.rollout),
        "keep rollout.dtype only if you need the memory that it saves",
    ),
}


MOST_EXPOSED = 0.1
"""Maximum share of a step for weight sync while generation waits. Above it there is a warning."""
TOKEN_BYTES = 8
"""Bytes of a token that is sent to the trainer: an id and a log-probability of 32 bits each."""
MOST_DOUBLINGS = 10
"""Maximum number of times that the link's bandwidth is doubled in the search for a fix."""


def find_link_use(run: Run, metrics: Metrics | None) -> Iterator[Finding]:
    """Yield the use of the link by weights and rollouts, and a warning if weight sync takes too long.

    Raises:
        ValueError: a side does not fit its memory.
    """
    sync, exposed = Costs.load(shortened(run)).sync, is_exposed(run.policies)
    pools = run.rollout.pool, run.trainer.pool
    index = find_link(run.cluster.links, *pools)
    link = None if index is None else run.cluster.links[index]
    route = _route_text(link, *pools, shares_gpus=run.policies.shares_gpus)
    rollouts = _rollouts(mean_lengths(run), run.algorithm.rollouts_per_step, link)
    seconds = sync.push_time + sync.load_time
    text = (
        f"weights: {format_count(sync.wire_bytes)}B a step {route}, {format_duration(sync.push_time)} and "
        f"{format_duration(sync.load_time)} to load"
    )
    if metrics is None:
        yield Finding(level="ok", topic="link", name="link", text=f"{text}; {rollouts}")
        return
    share = seconds / metrics.step_time
    text += f": {format_share(share)} of a rehearsed step"
    if exposed and share > MOST_EXPOSED:
        text += ", for which generation waits"
        yield Finding(level="warning", topic="link", name="sync-exposed", text=text)
    elif not exposed and sync.push_time > metrics.step_time:
        text += (
            ": replicas fall behind, because the next version is ready before this one has arrived"
        )
        yield Finding(level="warning", topic="link", name="link-saturated", text=text)
    else:
        text += ", for which generation waits" if exposed else ", while generation continues"
        yield Finding(level="ok", topic="link", name="link", text=text)
    yield Finding(level="ok", topic="link", name="rollouts", text=rollouts)


def is_exposed(policies: PoliciesConfig) -> bool:
    """Return whether generation waits for the weight sync: at a barrier, or because it runs no step ahead."""
    system = choose_system(policies)
    return system.halts_for_sync or system.max_staleness == 0


def _route_text(link: LinkConfig | None, generate: str, train: str, *, shares_gpus: bool) -> str:
    if shares_gpus:
        return "between GPUs that change phase"
    if link is None:
        return f"within pool {generate!r}"
    return f"over {toml(link.bandwidth).strip(chr(34))} between {train!r} and {generate!r}"


def _rollouts(mean: MeanLengths | None, rollouts_per_step: int, link: LinkConfig | None) -> str:
    """Describe how much of the link the rollouts of a step use. No role waits for this transfer."""
    if mean is None:
        return f"rollouts: {TOKEN_BYTES} bytes for each output token (output lengths are unknown)"
    tokens = mean.total * rollouts_per_step
    text = (
        f"rollouts: {format_count(tokens)} tokens a step are {format_count(tokens * TOKEN_BYTES)}B"
    )
    if link is None:
        return text
    seconds = tokens * TOKEN_BYTES / link_hop(link).bandwidth
    return f"{text}, {format_duration(seconds)} of the link"


def _less_waiting(
    mode: SyncMode, policies: PoliciesConfig, links: list[LinkConfig], pools: tuple[str, str]
) -> Iterator[Changes]:
    """Yield changes to try: first fewer bytes, then generation during the sync, then more bandwidth."""
    if mode == "full":
        yield {"sync.mode": "delta"}
        yield {"sync.mode": "delta", "sync.backend": "broadcast-tree"}
    if is_exposed(policies):
        yield {"policies.system": "stream-async"}
        yield {"policies.system": "stream-async", "sync.mode": "delta"}
    index = find_link(links, *pools)
    if index is not None:
        for doublings in range(1, MOST_DOUBLINGS):
            wider = Bandwidth(links[index].bandwidth * 2**doublings)
            yield {f"cluster.links.{index}.bandwidth": toml(wider).strip('"')}


def _link_fix(otherwise: str) -> Fix:
    return Fix(
        lambda run: _less_waiting(
            run.sync.mode, run.policies, run.cluster.links, (run.rollout.pool, run.trainer.pool)
        ),
        otherwise,
    )


LINK_FIXES = {
    "sync-exposed": _link_fix("send fewer bytes (sync.mode), or generate a step ahead"),
    "link-saturated": _link_fix("send fewer bytes (sync.mode), or rent a link with more bandwidth"),
}


class Checkup(NamedTuple):
    """The findings of a rehearsal."""

    findings: list[Finding]
    metrics: Metrics | None
    """Figures of the rehearsal; None if it finished no step."""


def examine(run: Run) -> list[Finding]:
    """Return the findings of a rehearsal. Each fix was confirmed by another rehearsal."""
    findings, metrics = check_up(run)
    fixes = {**progress.fixes(metrics), **LINK_FIXES, **FORMAT_FIXES}
    return [
        finding
        if finding.level == "ok"
        else propose_fix(run, finding, fixes[finding.name], _examine_all)
        for finding in findings
    ]


def check_up(run: Run) -> Checkup:
    """Return the findings of a rehearsal, without fixes."""
    rehearsal = rehearse(run)
    metrics = _measure(rehearsal)
    findings = list(progress.find(run, rehearsal, metrics))
    if not any(map(is_error, findings)):
        findings += _if_it_fits(find_link_use(run, None if rehearsal.is_stand_in else metrics))
        findings += _if_it_fits(find_slow_format(run))
    return Checkup(findings, metrics)


def _examine_all(run: Run) -> Iterator[Finding]:
    yield from diagnose(run)
    yield from check_up(run).findings


def _if_it_fits(findings: Iterator[Finding]) -> list[Finding]:
    try:
        return list(findings)
    except ValueError:
        return []  # the doctor's memory check reports it


def _measure(rehearsal: Rehearsal) -> Metrics | None:
    return measure(rehearsal.trace) if rehearsal.version else None
