"""Published sizes of KV caches, from start-up logs of inference engines, and their predictions."""

from __future__ import annotations

from functools import cache

import msgspec

from streamrl.hardware.memory import kv_capacity, stage_bytes
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.resolved import resolve
from streamrl.runfile.files import make_run
from streamrl.sim.fidelity.published_rows import Row, read_published

GIB = 2**30
SAME_SOURCE, INDEPENDENT = "reports that gave the constants", "independent logs"
"""Sources of rows: those that constants of memory were fitted to, and all others."""
LENGTHS = "r1-distill-aime"
SHORT = 256
"""Longest output of the predicted runs; the size of a KV cache does not depend on it."""


class RoomRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published KV cache."""

    engine: str
    """Name in profiles/engine_memory."""
    version: str
    gpu: str
    model: str
    dtype: str
    tensor_parallel: int
    max_running: int
    share: float
    """gpu_memory_utilization of vLLM, or mem_fraction_static of SGLang."""
    gib: float
    """GiB on one GPU."""
    fitted: bool
    source: str


@cache
def read_rooms() -> tuple[RoomRow, ...]:
    """Read profiles/published/kv_room.csv."""
    lines = read_published(PROFILES / "published" / "kv_room.csv")
    return tuple(msgspec.convert(line, RoomRow, strict=False) for line in lines)


def predict_room(row: RoomRow) -> float:
    """Return the predicted GiB of KV cache on one GPU."""
    run = make_run(
        {
            "model": {"name": row.model},
            "cluster": {"pools": {"pool": {"gpu": row.gpu, "nodes": 1}}},
            "rollout": {
                "pool": "pool",
                "replicas": 1,
                "tensor_parallel": row.tensor_parallel,
                "dtype": row.dtype,
                "max_running": row.max_running,
                "max_tokens": SHORT,
                "memory_utilization": row.share,
            },
            "trainer": {"pool": "pool"},
            "algorithm": {"name": "grpo", "steps": 1, "prompts_per_step": 1, "group_size": 2},
            "workload": {
                "max_prompt_tokens": SHORT,
                "lengths": {"kind": "histogram", "source": LENGTHS, "prompt_tokens": 64},
            },
            "policies": {"system": "colocated"},
        }
    )
    replica = msgspec.structs.replace(resolve(run).replica, engine=row.engine)
    return kv_capacity(replica) * stage_bytes(replica)[0].token / GIB


def room_rows() -> list[Row]:
    """Return every published KV cache with its prediction."""
    fitted = {_page(row) for row in read_rooms() if row.fitted}
    return [_row(row, _page(row) in fitted) for row in read_rooms()]


def _page(row: RoomRow) -> str:
    """Return the source of a row, without what it says of a single model."""
    return row.source.partition(" (")[0]


def engine_of(row: Row) -> str:
    """Return the engine that a row of a KV cache is of, by the name of its file in profiles/engine_memory."""
    return row.group.removeprefix(CACHE).partition(": ")[0]


CACHE = "KV cache, "


def _row(row: RoomRow, is_of_fit: bool) -> Row:
    """Return a row. `is_of_fit` says whether constants were fitted to other rows of its source.

    Such a row is left out of the fit with its model, but not with its source.
    """
    ours = predict_room(row)
    layout = f"{row.gpu} TP{row.tensor_parallel}, share {row.share:g}"
    kind = "constants from these" if row.fitted else SAME_SOURCE if is_of_fit else INDEPENDENT
    return Row(
        name=f"{row.model} in {row.dtype}, {layout}",
        group=f"{CACHE}{row.engine}: {kind}",
        shape=row.model,
        unit="GiB a GPU",
        published=(row.gib, row.gib),
        predicted=(ours, ours),
        is_fitted=row.fitted or is_of_fit,
        left_out=ours if is_of_fit and not row.fitted else None,
        source=row.source,
    )
