"""Accept names and numbers as people write them: "H100-SXM", "Qwen/Qwen3-8B", "32k".

A run file may hold them anywhere. They are replaced before its keys are checked. A number in quotes needs a unit, such as
"32k": "32" is a text, as in TOML, and the check of its key refuses it.

An offer of GPUs is one line, such as "16xH100@2.20,8xH20@1.10":

| part       | example | what it says                                       | where absent                  |
|------------|---------|----------------------------------------------------|-------------------------------|
| count      | `16x`   | GPUs that may be rented or used                    | must be there                 |
| node       | `2x8x`  | instead: nodes, and GPUs of a node                 | 8 (GB200, GB300: 4), or the count where it is less |
| GPU        | `H100`  | a name in profiles/gpus, in any capitals           | must be there                 |
| price      | `@2.20` | dollars per GPU-hour                               | the GPU's own figure          |
| list price | `@runpod` | instead: a provider of profiles/prices.toml; `@runpod/spot` is of another kind | |
| owned      | `@owned`| the GPUs are the user's own                        | they are rented               |
| unit       | `/1`    | GPUs by which a rental changes: `/8`, `/4`, `/1`   | as `plan.unit` has it         |
| network    | `with 1600 Gbps` | bandwidth between nodes                   | the GPU's own figure          |

If all GPUs are owned and none has a price, their price is 0.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from streamrl.runfile.config import Run
from streamrl.runfile.gpu_names import gpu_name
from streamrl.runfile.length_words import lengths_in_full
from streamrl.runfile.list_prices import list_price, stated_price
from streamrl.runfile.section import Section
from streamrl.runfile.units import Bandwidth, count_of


def model_name(text: str) -> str:
    """Return a model's name as profiles/models has it: "qwen3-8b" for "Qwen/Qwen3-8B"."""
    return text.strip().rsplit("/", 1)[-1].lower()


def model_keys(text: str) -> dict[str, str]:
    """Return a model as keys of `[model]`: a directory with config.json as its path, and anything else as a name."""
    if (Path(text.strip()) / "config.json").is_file():
        return {"path": text.strip()}
    return {"name": model_name(text)}


def in_full(table: dict[str, Any]) -> dict[str, Any]:
    """Return a run file's table with short numbers and names written out; what is no table stays as it is."""
    written: dict[str, Any] = _numbers_in_full(table, Run)
    _rename(written, "model", "name", model_name)
    workload = _table(written, "workload")
    if "lengths" in workload:
        workload["lengths"] = lengths_in_full(workload["lengths"])
    for pool in _table(_table(written, "cluster"), "pools").values():
        if isinstance(pool, dict) and isinstance(gpu := pool.get("gpu"), str):
            pool["gpu"] = gpu_name(gpu)
            pool |= {key: size for key, size in _rack_of(pool["gpu"]).items() if key not in pool}
            _resolve_price(pool)
    return written


def _resolve_price(pool: dict[str, Any]) -> None:
    """Replace the name of a list price by its dollars and source. The check of the key refuses unknown names."""
    price, source = pool.get("price"), pool.get("price_source")
    if isinstance(price, str):
        try:
            pool |= list_price(price, pool["gpu"]).keys
        except ValueError:
            return
    elif isinstance(source, str) and stated_price(source, pool["gpu"]) not in (None, price):
        del pool["price_source"]  # another price was set afterwards


def _rack_of(gpu: str) -> dict[str, int]:
    """Return the sizes of a GPU's rack as keys of its pool; nothing where NVLink joins only one node."""
    return _RACKS.get(gpu, {})


def _rename(table: dict[str, Any], section: str, key: str, name: Any) -> None:
    found = _table(table, section)
    if isinstance(value := found.get(key), str):
        found[key] = name(value)


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    found = table.get(key)
    return found if isinstance(found, dict) else {}


def _numbers_in_full(value: Any, kind: Any) -> Any:
    """Return a value of a run file with every short number in it written out, where its key wants a number."""
    kinds = get_args(kind)
    if kind is int or (int in kinds and not isinstance(value, list | dict)):
        return _number(value)
    if isinstance(value, dict):
        return {key: _numbers_in_full(each, _kind_of(kind, key)) for key, each in value.items()}
    if isinstance(value, list):
        entries = [each for each in (kind, *kinds) if get_origin(each) in (list, tuple)]
        inner = get_args(entries[0])[0] if entries else Any
        return [_numbers_in_full(each, inner) for each in value]
    return value


def _number(value: Any) -> Any:
    """Return the number of a text with a unit; the check of its key refuses every other text."""
    has_unit = isinstance(value, str) and value.strip()[-1:].isalpha()
    try:
        return count_of(value) if has_unit else value
    except ValueError:
        return value


def _kind_of(kind: Any, key: str) -> Any:
    """Return the type of a key in a section or a table by name; `Any` for what is neither."""
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, Section):
            return _types_of(each).get(key, Any)
        if get_origin(each) is dict:
            return get_args(each)[1]
    return Any


@cache
def _types_of(section: type[Section]) -> dict[str, Any]:
    return get_type_hints(section)


# Offers ------------------------------------------------------------------------------------------


NODE = 8
"""GPUs of a node, but for those of a rack."""
_RACKS = {
    "gb200": {"gpus_per_node": 4, "nvlink_domain": 72},
    "gb300": {"gpus_per_node": 4, "nvlink_domain": 72},
}
"""GPUs of racks that NVLink joins across nodes: how many a node has, and how many NVLink joins. Source: NVIDIA GB200
NVL72 and GB300 NVL72 datasheets (18 nodes of 4 GPUs)."""


def usual_domain(gpu: str) -> int:
    """Return the GPUs that NVLink joins, of nodes as they are usual for a GPU."""
    return _rack_of(gpu).get("nvlink_domain", NODE)


EXAMPLE = "'16xH100@2.20,8xH20@1.10'"
_OWNED = re.compile(r"\s*@?\s*\bowned\b", re.IGNORECASE)
_NETWORK = re.compile(r"\s+with\s+(?P<rate>\d.*)$", re.IGNORECASE)
_PRICE = r"\d+(?:\.\d+)?|[A-Za-z][\w\-]*(?:/[A-Za-z][\w.\-]*)*"
"""Dollars, or a provider with a GPU, a kind, both or none."""
_PART = re.compile(
    r"(?:(?P<nodes>\d+)\s*[x*]\s*)?(?P<count>\d+)\s*[x*]\s*(?P<gpu>[A-Za-z][\w.\- ]*?)"
    rf"(?:\s*@\s*\$?(?P<price>{_PRICE}))?(?:\s*/\s*(?P<unit>\d+))?(?:\s*@\s*\$?(?P<late_price>{_PRICE}))?",
    re.ASCII,
)


def read_offer(text: str) -> dict[str, dict[str, Any]]:
    """Return the pools of an offer, by name, as a run file has them.

    Raises:
        ValueError: a part cannot be read, has no GPU, or does not fill its nodes.
    """
    pools: dict[str, dict[str, Any]] = {}
    for part in text.split(","):
        pool = _read_owned(part.strip())
        pools[_free_name(pool["gpu"], pools)] = pool
    if all("owned" in pool and "price" not in pool for pool in pools.values()):
        return {name: {**pool, "price": 0.0} for name, pool in pools.items()}
    return pools


def _read_owned(part: str) -> dict[str, Any]:
    """Return the pool of a part that may say that its GPUs are owned."""
    network = _NETWORK.search(part)
    rest, count = _OWNED.subn("", _NETWORK.sub("", part))
    if count > 1:
        raise ValueError(f"--gpus: {part!r} says 'owned' twice")
    pool = _read_part(rest.strip())
    if network is not None:
        pool |= _network_of_offer(part, network["rate"])
    return {**pool, "owned": True} if count else pool


def _network_of_offer(part: str, rate: str) -> dict[str, Any]:
    """Return the bandwidth between nodes as a key of a pool."""
    try:
        Bandwidth.parse(rate)
    except ValueError as error:
        raise ValueError(f"--gpus: {part!r}: {error}") from None
    return {"node_bandwidth": rate}


def _read_part(part: str) -> dict[str, Any]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"--gpus: {part!r} is no offer: write GPUs and prices as {EXAMPLE}")
    gpu = gpu_name(match["gpu"])
    rack = _rack_of(gpu)
    node = rack.get("gpus_per_node", NODE)
    nodes, per_node = _nodes_of(part, int(match["count"]), match["nodes"], node)
    pool: dict[str, Any] = {"gpu": gpu, "nodes": nodes, **rack}
    if per_node != NODE:
        pool["gpus_per_node"] = per_node
    if match["price"] and match["late_price"]:
        raise ValueError(f"--gpus: {part!r} has two prices")
    if (price := match["price"] or match["late_price"]) is not None:
        pool |= _price_of_offer(price, gpu)
    if (unit := match["unit"]) is not None:
        pool["unit"] = int(unit)
    if 0 in (nodes, per_node, pool.get("unit")):
        raise ValueError(f"--gpus: {part!r} has no GPU")
    if pool.get("unit", 1) > nodes * per_node:
        raise ValueError(
            f"--gpus: {part!r} is rented by more GPUs than it has; write a smaller unit"
        )
    return pool


def _price_of_offer(text: str, gpu: str) -> dict[str, Any]:
    """Return the price as keys of a pool."""
    if text[0].isdigit():
        return {"price": float(text)}
    try:
        return list_price(text, gpu).keys
    except ValueError as error:
        raise ValueError(f"--gpus: {error}") from None


def _nodes_of(part: str, count: int, nodes: str | None, node: int) -> tuple[int, int]:
    if nodes is not None:
        return int(nodes), count
    if count < node:
        return 1, count
    if count % node:
        raise ValueError(
            f"--gpus: {part!r} does not fill nodes of {node}: write nodes and GPUs of each, as 3x4xH100"
        )
    return count // node, node


def _free_name(gpu: str, taken: dict[str, Any]) -> str:
    if gpu not in taken:
        return gpu
    return next(
        name for number in range(2, len(taken) + 3) if (name := f"{gpu}-{number}") not in taken
    )
