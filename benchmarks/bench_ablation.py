"""Take away one thing at a time, and compare stages of published RL steps: what frameworks fill in, and terms of the cost model.

    python -m benchmarks.bench_ablation
    python -m benchmarks.bench_ablation --output docs/ablation.md

A correction earns its place if a stage is worse without it. One that improves only whole steps may cancel another
error. One JSON object is printed per correction and partition.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import force_setattr, replace

from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import known_engines, load_gpu, load_model
from streamrl.hardware.resolved import ResolvedRun
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.findings import value_of
from streamrl.runfile.frameworks import load_framework, settings_of
from streamrl.runfile.keys import place_of
from streamrl.runfile.units import NO_FACTOR, Duration
from streamrl.sim.costs.interconnect import Interconnect
from streamrl.sim.costs.kernels import Estimate, unmeasured
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.costs.sync_profiles import load_hand_over
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.fidelity.published_rows import Row, grouped, summarise
from streamrl.sim.fidelity.rl_steps import LENGTHS, Published, load_published, stage_rows
from streamrl.sim.fidelity.scorecard import stamp
from streamrl.sim.fidelity.switches import switch_rows
from streamrl.sim.parallel import worker_pool

LENGTH_SHAPE = "workload.lengths.source"
"""Shapes of output lengths of models that do not reason; without them, lengths have the shape of `LENGTHS`."""
SECONDS = {f"framework.{name}": "0 s" for name in ("step_time", "switch_time", "transfer_time")}
"""Times that a framework adds to a step, and the value that takes them away."""
LEAST = 1e-6
"""Seconds of a stage that is gone without a correction; its error is -100 %."""
HEAD = """# Each correction alone

Frameworks fill in keys of a run file, and add seconds to a step. The cost model has terms of its own. A published stage or
step becomes worse without each of them, except without: {useless}. Keys of memory decide which layouts fit, so a step may not show them.

Each line takes one correction away from all published steps that have it. It compares the errors of their stages with it
and without it. A correction that improves only whole steps may cancel another error, so stages come first. Inputs that a
source does not state have the first of their values, so errors differ a little from those of [fidelity](fidelity.md). All
published steps count, asynchronous ones too. So a term that makes a group worse shows it in the column *better*.

`make bench-ablation` writes this page ({stamp}).

| without | worse, in points of the median error | better |
|---|---|---|
"""
DETAILS = """
## Errors of each group

Median of absolute errors and bias, with the correction and without it. Groups that it does not change are left out.

| without | stage or steps | rows | median error with | without | bias with | without |
|---|---|---|---|---|---|---|
"""
VISIBLE = 0.005
"""Change of a median error that is listed."""


class Line(NamedTuple):
    """Errors of a partition with and without one correction."""

    correction: str
    group: str
    rows: int
    median: float
    median_without: float
    bias: float
    bias_without: float


def main() -> None:
    """Print a line for each correction and partition; write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="write this Markdown page too")
    options = parser.parse_args()
    lines = []
    for line in find_lines([_with_first_inputs(step) for step in load_published()]):
        print(json.dumps(line._asdict()), flush=True)
        lines.append(line)
    if options.output:
        options.output.write_text(page_of(lines, stamp()), encoding="utf-8")


def find_lines(published: Sequence[Published]) -> Iterator[Line]:
    """Simulate the published steps with everything, and those of each correction without it."""
    with worker_pool() as pool:
        rows = [*stage_rows(published, pool), *pool.submit(switch_rows).result()]
        with_all = {_key(row): row for row in rows}
        for correction in corrections_of(published):
            steps = [each for step in published if (each := without(step, correction))]
            rows = stage_rows(steps, pool)
            yield from _compared(correction, [with_all[_key(row)] for row in rows], rows)
    for term in TERMS:
        steps = [step for step in published if term.touches(make_run(step.table))]
        with worker_pool(
            term.take_away
        ) as pool:  # new processes, which have nothing in their caches
            rows = [*stage_rows(steps, pool), *pool.submit(switch_rows).result()]
        changed = [row for row in rows if row.predicted != with_all[_key(row)].predicted]
        yield from _compared(term.name, [with_all[_key(row)] for row in changed], changed)


def _with_first_inputs(step: Published) -> Published:
    """Return a step whose unknown inputs have their first value alone: an ablation needs no range."""
    return replace(step, opens={key: values[:1] for key, values in step.opens.items()})


def _key(row: Row) -> tuple[str, float]:
    """Return what tells rows apart: one layout may be published twice."""
    return row.name, row.published[0]


class Term(NamedTuple):
    """A term of the cost model."""

    name: str
    take_away: Callable[[], None]
    """Change the profiles of this process, which has not computed anything yet."""
    touches: Callable[[Run], bool]
    """Whether a run has it."""


def _in_layouts(name: str, value: object) -> Callable[[], None]:
    def take_away() -> None:
        for layout in load_framework("nemo-rl").layouts:
            force_setattr(layout, name, value)

    return take_away


def _in_engines(*names: str) -> Callable[[], None]:
    def take_away() -> None:
        for engine in known_engines():
            for name in names:
                force_setattr(load_engine(engine).constants, name, Duration(0.0))

    return take_away


def _no_offload() -> None:
    switch = load_framework("nemo-rl").switch_time
    assert switch is not None, "its switch is known"
    force_setattr(switch, "offload_bandwidth", None)


def _onload_at_the_host_link() -> None:
    switch = load_framework("nemo-rl").switch_time
    assert switch is not None, "its switch is known"
    force_setattr(switch, "onload_bandwidth", None)


def _whole_graphs() -> None:
    whole = load_engine("vllm-0.10").constants.layer
    force_setattr(load_engine(SPLIT).constants, "layer", whole)


def _no_kept_weights() -> None:
    switch = load_framework("nemo-rl").switch_time
    assert switch is not None, "its switch is known"
    force_setattr(switch, "keeps_weights", False)


def _no_counted_loss() -> None:
    force_setattr(load_framework("nemo-rl"), "losses", [])


def _no_offload_to_score() -> None:
    for release in load_framework("nemo-rl").releases:
        force_setattr(release, "offloads_to_score", False)


def _no_copies() -> None:
    for release in load_framework("nemo-rl").releases:
        force_setattr(release, "sends_copies", False)


def _no_host_slowdown() -> None:
    for name in GRACE:
        force_setattr(load_gpu(name), "host_slowdown", NO_FACTOR)


def _no_tensor_time() -> None:
    force_setattr(load_hand_over("cuda-ipc"), "tensor_time", Duration(0.0))


def _no_routing_time() -> None:
    force_setattr(load_training_profile().constants, "routing_time", 0.0)


def _no_gathered_scores() -> None:
    load = TrainingCosts.load

    def loose(resolved: ResolvedRun) -> TrainingCosts:
        return replace(load(resolved), gathers_scores=False)

    TrainingCosts.load = loose  # type: ignore[method-assign]  # of this process alone


def _line_rate_between_nodes() -> None:
    def reduced(self: Interconnect, num_bytes: Floats, domains: int) -> Estimate:
        return unmeasured(num_bytes / (self.network * self.domain / 2), self.source, "network")

    Interconnect.reduced = reduced  # type: ignore[method-assign]  # of this process alone


def _is_nemo(run: Run) -> bool:
    return run.framework.name == "nemo-rl"


def _is_megatron(run: Run) -> bool:
    return _is_nemo(run) and run.trainer.zero == 1


def _is_dtensor(run: Run) -> bool:
    return _is_nemo(run) and run.trainer.zero == 3


def _is_on_grace(run: Run) -> bool:
    return run.cluster.pools[run.trainer.pool].gpu in GRACE


def _is_mixture(run: Run) -> bool:
    return load_model(run.model).experts is not None


def _spans_nodes(run: Run) -> bool:
    return run.rollout.tensor_parallel > run.cluster.pools[run.rollout.pool].domain


def _is_pipelined(run: Run) -> bool:
    return run.trainer.pipeline_parallel > 1


def _any(run: Run) -> bool:
    return True


def _launches_attention(run: Run) -> bool:
    return run.costs.engine == SPLIT


GRACE = ("gb200", "gb300")
SPLIT = "vllm-0.9"
"""Engine with attention outside of its CUDA graphs."""
TERMS = (
    Term("slowdown of NeMo-RL's Megatron passes", _in_layouts("slowdown", NO_FACTOR), _is_megatron),
    Term("whole batches packed by NeMo-RL", _in_layouts("fills_micro_batches", False), _is_nemo),
    Term(
        "micro-batches that NeMo-RL's DTensor pads to train",
        _in_layouts("pads_training", False),
        _is_dtensor,
    ),
    Term("offload of optimizer states in NeMo-RL's switch", _no_offload, _is_nemo),
    Term("optimizer states that return from pageable memory", _onload_at_the_host_link, _is_nemo),
    Term("weights that sleeping engines of NeMo-RL keep", _no_kept_weights, _is_nemo),
    Term("passes over logits counted in NeMo-RL's code", _no_counted_loss, _is_nemo),
    Term("offload of optimizer states to score, up to NeMo-RL 0.4", _no_offload_to_score, _is_nemo),
    Term("copies of a batch for each rank, up to NeMo-RL 0.6", _no_copies, _is_nemo),
    Term("calls for each tensor of a hand-over", _no_tensor_time, _any),
    Term("scores gathered from all ranks after each pass", _no_gathered_scores, _is_pipelined),
    Term("slow hosts of Grace", _no_host_slowdown, _is_on_grace),
    Term("wait for token counts", _no_routing_time, _is_mixture),
    Term("NCCL between nodes, for tensor ranks", _line_rate_between_nodes, _spans_nodes),
    Term(
        "log-probabilities from engines",
        _in_engines("log_prob", "log_prob_http", "log_prob_step"),
        _any,
    ),
    Term("engine seconds of a step and of a layer", _in_engines("step", "layer"), _any),
    Term("engine seconds of a running rollout", _in_engines("request"), _any),
    Term("attention outside of CUDA graphs, up to vLLM 0.10", _whole_graphs, _launches_attention),
)
"""Terms that are no keys of a run file."""


def corrections_of(published: Sequence[Published]) -> list[str]:
    """Return the keys that frameworks fill in for these steps, and the times that they add."""
    keys = (setting.key for step in published for setting, _ in settings_of(make_run(step.table)))
    return [*dict.fromkeys(keys), *SECONDS, LENGTH_SHAPE]


def without(step: Published, correction: str) -> Published | None:
    """Return a step whose only value of a key is its default; None if that changes nothing, or the source states it."""
    if correction == LENGTH_SHAPE:
        shapes = step.opens.get(correction, [LENGTHS])
        return (
            None
            if LENGTHS in shapes
            else replace(step, opens={**step.opens, correction: [LENGTHS]})
        )
    run = make_run(step.table)
    if run.framework.name is None:
        return None
    value = SECONDS.get(correction) or _default(step, correction)
    if value is None or make_run(_applied(step, correction, value)) == run:
        return None
    return replace(step, opens={**step.opens, correction: [value]})


def page_of(lines: Sequence[Line], made: str) -> str:
    """Return the page: which groups each correction changes, and the errors of those.

    Args:
        lines: the comparisons.
        made: version and date of the code that made them.
    """
    names = list(dict.fromkeys(line.correction for line in lines))
    worse, better = _changed(lines, 1), _changed(lines, -1)
    useless = [f"`{name}`" for name in names if not worse.get(name)]
    head = HEAD.format(stamp=made, useless=", ".join(useless) or "none")
    verdicts = [f"| `{name}` | {_cell(worse, name)} | {_cell(better, name)} |" for name in names]
    rows = [
        f"| `{line.correction}` | {line.group} | {line.rows} | {line.median:.1%} | {line.median_without:.1%} "
        f"| {line.bias:+.1%} | {line.bias_without:+.1%} |"
        for line in lines
        if abs(line.median_without - line.median) >= VISIBLE
        or abs(line.bias_without - line.bias) >= VISIBLE
    ]
    return head + "\n".join(verdicts) + "\n" + DETAILS + "\n".join(rows) + "\n"


def _changed(lines: Sequence[Line], sign: int) -> dict[str, list[str]]:
    """Return the groups whose median error rises (1) or falls (-1) without each correction, with that change."""
    found: dict[str, list[str]] = {}
    for line in lines:
        rise = line.median_without - line.median
        if sign * rise >= VISIBLE:
            name = line.group.rpartition(": ")[2]
            found.setdefault(line.correction, []).append(f"{name} ({100 * rise:+.1f})")
    return found


def _cell(found: dict[str, list[str]], name: str) -> str:
    return "; ".join(found.get(name, ["-"]))


def _compared(correction: str, before: Sequence[Row], after: Sequence[Row]) -> Iterator[Line]:
    later = grouped([_at_least(row) for row in after])
    for group, some in grouped(before).items():
        one, other = summarise(some), summarise(later[group])
        medians, biases = (one.median, other.median), (one.bias, other.bias)
        yield Line(correction, group, one.rows, *medians, *biases)


def _at_least(row: Row) -> Row:
    low, high = row.predicted
    return replace(row, predicted=(max(low, LEAST), max(high, LEAST)))


def _default(step: Published, key: str) -> Any:
    """Return the value of a key without the framework; None if the source states the key."""
    table = deepcopy(step.table)
    del table["framework"]["name"]
    table["framework"].pop("version", None)
    place, last = place_of(table, key)
    return None if last in place else value_of(make_run(table), key)


def _applied(step: Published, key: str, value: Any) -> dict[str, Any]:
    table = deepcopy(step.table)
    place, last = place_of(table, key)
    place[last] = value
    return table


if __name__ == "__main__":
    main()
