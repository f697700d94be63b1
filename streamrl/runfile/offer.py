"""Read an offer of GPUs as people write it in one line: "16xH100@2.20,8xH20@1.10".

| part       | example | what it says                                       | where absent                  |
|------------|---------|----------------------------------------------------|-------------------------------|
| count      | `16x`   | GPUs that may be rented                            | must be there                 |
| node       | `2x8x`  | instead: nodes, and GPUs of a node                 | 8, or the count where it is less |
| GPU        | `H100`  | a name in profiles/gpus, in any capitals           | must be there                 |
| price      | `@2.20` | dollars per GPU-hour                               | the GPU's own figure          |
| unit       | `/1`    | GPUs by which a rental changes: `/8`, `/4`, `/1`   | as `plan.unit` has it         |
"""

from __future__ import annotations

import re
from typing import Any

from streamrl.runfile.short_forms import gpu_name

NODE = 8
"""GPUs of a node of all GPUs that are rented by the node today."""
EXAMPLE = "'16xH100@2.20,8xH20@1.10'"
_PART = re.compile(
    r"(?:(?P<nodes>\d+)\s*[x*]\s*)?(?P<count>\d+)\s*[x*]\s*(?P<gpu>[A-Za-z][\w.\- ]*?)"
    r"(?:\s*@\s*\$?(?P<price>\d+(?:\.\d+)?))?(?:\s*/\s*(?P<unit>\d+))?(?:\s*@\s*\$?(?P<late_price>\d+(?:\.\d+)?))?"
)


def read_offer(text: str) -> dict[str, dict[str, Any]]:
    """Return the pools of an offer, by name, as a run file has them.

    Raises:
        ValueError: a part cannot be read, has no GPU, or does not fill its nodes.
    """
    pools: dict[str, dict[str, Any]] = {}
    for part in text.split(","):
        pool = _read_part(part.strip())
        pools[_free_name(pool["gpu"], pools)] = pool
    return pools


def _read_part(part: str) -> dict[str, Any]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"--gpus: {part!r} is no offer: write GPUs and prices as {EXAMPLE}")
    nodes, per_node = _nodes_of(part, int(match["count"]), match["nodes"])
    pool: dict[str, Any] = {"gpu": gpu_name(match["gpu"]), "nodes": nodes}
    if per_node != NODE:
        pool["gpus_per_node"] = per_node
    if (price := match["price"] or match["late_price"]) is not None:
        pool["price"] = float(price)
    if (unit := match["unit"]) is not None:
        pool["unit"] = int(unit)
    if 0 in (nodes, per_node, pool.get("unit")):
        raise ValueError(f"--gpus: {part!r} has no GPU")
    return pool


def _nodes_of(part: str, count: int, nodes: str | None) -> tuple[int, int]:
    if nodes is not None:
        return int(nodes), count
    if count < NODE:
        return 1, count
    if count % NODE:
        raise ValueError(
            f"--gpus: {part!r} does not fill nodes of {NODE}: write nodes and GPUs of each, as 3x4xH100"
        )
    return count // NODE, NODE


def _free_name(gpu: str, taken: dict[str, Any]) -> str:
    if gpu not in taken:
        return gpu
    return next(
        name for number in range(2, len(taken) + 3) if (name := f"{gpu}-{number}") not in taken
    )
