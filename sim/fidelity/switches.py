"""Published seconds to hand new weights to replicas, and their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.resolved import resolve
from streamrl.record.band import StepBasis
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.simulation_config import FrameworkName
from streamrl.sim.costs.colocation import PhaseChange
from streamrl.sim.costs.costs import partition_of
from streamrl.sim.costs.sync_profiles import load_backend
from streamrl.sim.costs.weight_sync import Payload, SyncCosts
from streamrl.sim.fidelity.published_rows import Row, middle, read_published

PATH = PROFILES / "published" / "switches.csv"
LENGTHS = "r1-distill-aime"
SHORT = 256
"""Longest output of the predicted runs; the size of weights does not depend on it."""
TITLES = {
    "transfer": "weights handed over on shared GPUs",
    "refit": "refit of colocated systems",
    "switch": "switch of colocated systems",
    "push": "weights pushed to other GPUs",
}


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure."""

    framework: FrameworkName
    model: str
    gpu: str
    gpus_per_node: int
    gpus: int
    receivers: int | None
    generate: int
    """GPUs of a replica."""
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    zero: Literal[1, 3]
    kind: Literal["transfer", "refit", "switch", "push"]
    low: float
    high: float
    constant: Literal["", "hand_over", "verl", "packed"]
    """The fitted constant that rests on the row."""
    note: str
    source: str


class Prediction(NamedTuple):
    """Predicted seconds: `rest` + `factor` * the fitted constant."""

    rest: float
    factor: float
    constant: float

    @property
    def seconds(self) -> float:
        """Return the seconds with the constant of the profiles."""
        return self.rest + self.factor * self.constant

    def constant_for(self, seconds: float) -> float:
        """Return the constant that predicts these seconds."""
        return (seconds - self.rest) / self.factor


@cache
def read_switches() -> tuple[Switch, ...]:
    """Read profiles/published/switches.csv."""
    tables = [{**row, "receivers": row["receivers"] or None} for row in read_published(PATH)]
    return tuple(msgspec.convert(tables, list[Switch], strict=False))


def predict(row: Switch) -> Prediction:
    """Return the predicted seconds of a row."""
    resolved = resolve(run_of(row))
    if row.kind == "push":
        costs = SyncCosts.load(resolved)
        seconds = costs.push_time + costs.load_time
        payload = float(Payload.of(resolved.replica, resolved.run.sync).num_bytes)
        sender = load_backend(resolved.run.sync.backend).sender_bandwidth
        return Prediction(seconds - payload / sender, payload, 1 / sender)
    change = PhaseChange.load(resolved)
    if row.constant == "verl":
        others = change.push_time - change.switch_time + change.wake_time
        return Prediction(others, 1.0, change.switch_time)
    rest = change.reshard_time + change.wake_time
    if row.kind == "refit":
        rest += change.offload_time + change.kept_time
    elif row.kind == "switch":
        rest = change.push_time - change.hand_over_time + change.wake_time
    return Prediction(rest, change.num_tensors, change.hand_over_time / change.num_tensors)


def run_of(row: Switch) -> Run:
    """Return a run file with the GPUs and degrees of a row."""
    receivers = row.gpus if row.receivers is None else row.receivers
    num_gpus = row.gpus + (row.receivers or 0)
    pool = {
        "gpu": row.gpu,
        "nodes": num_gpus // row.gpus_per_node,
        "gpus_per_node": row.gpus_per_node,
    }
    degrees = ("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel", "zero")
    return make_run(
        {
            "model": {"name": row.model},
            "framework": {"name": row.framework},
            "cluster": {"pools": {"pool": pool}},
            "rollout": {
                "pool": "pool",
                "replicas": receivers // row.generate,
                "tensor_parallel": row.generate,
                "max_tokens": SHORT,
            },
            "trainer": {"pool": "pool", **{key: getattr(row, key) for key in degrees}},
            "algorithm": {
                "name": "grpo",
                "steps": 1,
                "prompts_per_step": row.gpus,
                "group_size": 2,
                "kl_coefficient": 0.0,
            },
            "workload": {
                "max_prompt_tokens": SHORT,
                "lengths": {"kind": "histogram", "source": LENGTHS, "prompt_tokens": 64},
            },
            "policies": {"system": "disaggregated" if row.receivers else "colocated"},
        }
    )


def fitted_constant(rows: Sequence[Switch]) -> float:
    """Return the mean of the constants that rows of one constant ask for."""
    return fmean(predict(row).constant_for(middle((row.low, row.high))) for row in rows)


def readings() -> list[tuple[Switch, ...]]:
    """Return the lines of each published figure: several if its source does not state all inputs."""
    return [tuple(lines) for _, lines in groupby(read_switches(), key=_figure)]


def switch_rows() -> list[Row]:
    """Return published figures with their predictions, left out with their source if a constant rests on them.

    The only source of a constant cannot be left out, so its figure is not compared.
    """
    return [
        _row(lines) for lines in readings() if not lines[0].constant or _other_sources(lines[0])
    ]


def _figure(row: Switch) -> tuple[object, ...]:
    """Return what the readings of one published figure have in common."""
    return row.framework, row.model, row.gpu, row.kind, row.low, row.high, row.source


def _other_sources(row: Switch) -> list[Switch]:
    """Return the rows of other sources on which the constant of a row rests."""
    same = [other for other in read_switches() if other.constant == row.constant]
    return [other for other in same if other.source != row.source]


def _row(lines: Sequence[Switch]) -> Row:
    row, seconds = lines[0], [predict(line).seconds for line in lines]
    left_out = None
    if row.constant:
        ours = predict(row)
        left_out = ours.rest + ours.factor * fitted_constant(_other_sources(row))
    gpus = " or ".join(str(line.gpus) for line in lines)
    where = f" to {row.receivers}" if row.receivers else ""
    return Row(
        name=f"{row.framework}: {row.model}, {row.kind} on {gpus}{where} {row.gpu}",
        group=TITLES[row.kind],
        shape=row.model,
        unit="s",
        published=(row.low, row.high),
        predicted=(min(seconds), max(seconds)),
        is_fitted=bool(row.constant),
        left_out=left_out,
        note=row.note,
        source=row.source,
        stage="sync",
        basis=StepBasis(replicas={}, trainer={}, partition=partition_of(resolve(run_of(row)))),
    )
