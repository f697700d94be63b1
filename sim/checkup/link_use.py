"""What crosses between the two sides in a step, how long that takes, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.doctor.changes import toml
from streamrl.doctor.finding import Changes, Finding
from streamrl.doctor.fix import Fix
from streamrl.doctor.lengths import mean_lengths
from streamrl.engine.presets import choose_system
from streamrl.record.metrics import Metrics
from streamrl.report.run_tables import format_count, format_duration, format_share
from streamrl.runfile.config import Run
from streamrl.runfile.pools import find_link
from streamrl.runfile.units import Bandwidth
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.sync import link_leg

MOST_EXPOSED = 0.1
"""Share of a step that weight sync may take where generation waits for it."""
TOKEN_BYTES = 8
"""Of a rollout's token on its way to the trainer: an id and a log-probability of 32 bits each."""
MOST_DOUBLINGS = 10


def find(run: Run, costs: Costs, metrics: Metrics | None) -> Iterator[Finding]:
    """Say what weights and rollouts take of the link, and find who waits too long for it."""
    sync = costs.sync
    seconds = sync.push_time + sync.load_time
    text = (
        f"weights: {format_count(sync.wire_bytes)}B a step {_way(run)}, {format_duration(sync.push_time)} and "
        f"{format_duration(sync.load_time)} to load"
    )
    if metrics is None:
        yield Finding(level="ok", topic="link", name="link", text=f"{text}; {_rollouts(run)}")
        return
    share = seconds / metrics.step_time
    text += f": {format_share(share)} of a rehearsed step"
    if is_exposed(run) and share > MOST_EXPOSED:
        text += ", for which generation waits"
        yield Finding(level="warning", topic="link", name="sync-exposed", text=text)
    elif not is_exposed(run) and sync.push_time > metrics.step_time:
        text += ": replicas fall behind, as the next version is there before this one has arrived"
        yield Finding(level="warning", topic="link", name="link-saturated", text=text)
    else:
        text += ", for which generation waits" if is_exposed(run) else ", beside generation"
        yield Finding(level="ok", topic="link", name="link", text=text)
    yield Finding(level="ok", topic="link", name="rollouts", text=_rollouts(run))


def is_exposed(run: Run) -> bool:
    """Whether nothing is generated while weights are on their way: a barrier, or no step ahead to work on."""
    system = choose_system(run.policies)
    return system.halts_for_sync or system.max_staleness == 0


def _way(run: Run) -> str:
    if run.shares_gpus:
        return "between GPUs that change phase"
    index = find_link(run)
    if index is None:
        return f"within pool {run.rollout.pool!r}"
    link = run.cluster.links[index]
    return f"over {toml(link.bandwidth).strip(chr(34))} between {run.trainer.pool!r} and {run.rollout.pool!r}"


def _rollouts(run: Run) -> str:
    """Say what the rollouts of a step take of the link; nothing of it is waited for."""
    mean, index = mean_lengths(run), find_link(run)
    if mean is None:
        return "rollouts: as many bytes as outputs have tokens, 8 a token"
    tokens = mean.total * run.algorithm.rollouts_per_step
    text = (
        f"rollouts: {format_count(tokens)} tokens a step are {format_count(tokens * TOKEN_BYTES)}B"
    )
    if index is None:
        return text
    seconds = tokens * TOKEN_BYTES / link_leg(run.cluster.links[index]).bandwidth
    return f"{text}, {format_duration(seconds)} of the link"


def _less_waiting(run: Run) -> Iterator[Changes]:
    """Yield less to send, then generation that goes on meanwhile, then a wider link."""
    if run.sync.mode == "full":
        yield {"sync.mode": "delta"}
        yield {"sync.mode": "delta", "sync.backend": "broadcast-tree"}
    if is_exposed(run):
        yield {"policies.system": "stream-async"}
        yield {"policies.system": "stream-async", "sync.mode": "delta"}
    index = find_link(run)
    if index is not None:
        for doublings in range(1, MOST_DOUBLINGS):
            wider = Bandwidth(run.cluster.links[index].bandwidth * 2**doublings)
            yield {f"cluster.links.{index}.bandwidth": toml(wider).strip('"')}


FIXES = {
    "sync-exposed": Fix(_less_waiting, "send less (sync.mode), or generate a step ahead meanwhile"),
    "link-saturated": Fix(_less_waiting, "send less (sync.mode), or rent a wider link"),
}
