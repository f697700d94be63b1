"""Every GPU of profiles/gpus: its tables give their own cells back, and each kind of run simulates on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.hardware.interpolation import Surface
from streamrl.hardware.operator_tables import OPERATORS, Table, read_table
from streamrl.hardware.profiles import PROFILES, load_gpu
from streamrl.record.metrics import measure
from streamrl.sim.costs.kernels import peak_of
from streamrl.sim.world import simulate
from tests.runs import small_run

GPUS = sorted(path.stem for path in (PROFILES / "gpus").glob("*.toml") if path.stem != "cpu")
MEASURED = sorted(path.name for path in (PROFILES / "measured").iterdir() if path.is_dir())
ROOFLINE = {"l4", "rtx-4090", "a6000", "mi300x", "mi325x", "mi355x", "tpu-v5p", "tpu-v6e"}
MOST_ERROR = 1e-9


@pytest.mark.parametrize("gpu", MEASURED)
def test_the_tables_of_a_gpu_give_their_own_cells_back(gpu: str) -> None:
    paths = list((PROFILES / "measured" / gpu).glob("*.csv"))
    assert paths
    for path in paths:
        errors = errors_of(path)
        assert errors and max(errors) < MOST_ERROR, path.name


def errors_of(path: Path) -> list[float]:
    """Return the relative error of each cell of a table whose shape was measured once."""
    table = read_table(path)
    peak = peak_of(load_gpu(table.facts.gpu), table.facts.dtype)
    surface, errors = Surface(table, peak), list[float]()
    for row in single_rows(table):
        shape = dict(zip(table.keys, table.rows[row].tolist(), strict=True))
        found, _ = surface.seconds(shape, table.columns, peak)
        differences = abs(found / table.seconds[row] - 1)
        errors.extend(differences[~np.isnan(table.seconds[row])].tolist())
    return errors


def single_rows(table: Table) -> list[int]:
    """Return the rows that share their coordinates with no other row: the others become medians."""
    axes = {name: table.rows[:, i] for i, name in enumerate(table.keys)}
    points = np.stack(OPERATORS[table.facts.operator].coordinates(axes), axis=1)
    _, groups, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[groups.ravel()] == 1).tolist()


def test_gpus_without_tables_say_so_in_their_source() -> None:
    untabled = {gpu for gpu in GPUS if not load_gpu(gpu).tables}
    assert untabled == ROOFLINE
    for gpu in untabled:
        assert load_gpu(gpu).source.startswith("roofline: ")


def changes_of(gpu: str, kind: str) -> dict[str, Any]:
    """Return the changes to the small run for one kind of run on one GPU."""
    pools = {"far": {"gpu": gpu, "nodes": 2}, "near": {"gpu": gpu, "nodes": 2}}
    changes: dict[str, Any] = {"cluster.pools": pools, "model.name": "qwen2.5-0.5b"}
    match kind:
        case "colocated":
            return {
                **changes,
                "cluster.pools": {"far": pools["far"]},
                "cluster.links": [],
                "policies.system": "colocated",
                "rollout.tensor_parallel": 2,
                "trainer.tensor_parallel": 2,
            }
        case "experts":
            pools = {name: {**pool, "nodes": 8} for name, pool in pools.items()}
            return {
                **changes,
                "cluster.pools": pools,
                "model.name": "moonlight-16b-a3b",
                "rollout.tensor_parallel": 4,
                "trainer.tensor_parallel": 8,
                "trainer.data_parallel": 4,
                "trainer.expert_parallel": 8,
                "trainer.logits": "chunked",
                "algorithm.prompts_per_step": 16,
            }
    return changes


@pytest.mark.parametrize("kind", ["colocated", "streaming", "experts"])
@pytest.mark.parametrize("gpu", GPUS)
def test_each_kind_of_run_simulates_on_every_gpu(gpu: str, kind: str) -> None:
    run = small_run(changes_of(gpu, kind))
    trace = simulate(run)
    metrics = measure(trace)
    assert metrics.num_steps == run.algorithm.steps
    assert metrics.total_time > 0
