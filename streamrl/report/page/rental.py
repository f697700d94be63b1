"""What a plan rents: which GPUs in which pool, on how many nodes, at whose price, and over which links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from streamrl.hardware.profiles import gpu_of, price_of
from streamrl.record.assumed import price_note
from streamrl.report.page.parts import PageCell, PageTable
from streamrl.report.page.plan_command import command_words
from streamrl.report.page.sources import PlanMade
from streamrl.report.words import NBSP, dollars, gpu_word
from streamrl.runfile.cluster_config import LinkConfig, PoolConfig
from streamrl.runfile.formatting import listing
from streamrl.runfile.keys import pool_key
from streamrl.runfile.units import BITS_PER_BYTE

NAMES = "A pool is named as in the offer. Its name is all that the offer says of the datacenter or region."
PLACES = "Rent all GPUs of a pool in one place, because the plan counts on the network within it."


def rental_title(made: PlanMade) -> str:
    """Return the title of the section with the GPUs of a plan."""
    if not made.plan.owned_pools:
        return "What to rent, and where"
    return (
        "Which of your own GPUs to use"
        if made.plan.rents_none
        else "What to rent, and what to use of your own"
    )


def places_of(made: PlanMade) -> Iterator[str]:
    """Yield what the name of a pool says, and where to rent its GPUs."""
    yield NAMES if made.plan.rents_none else f"{NAMES} {PLACES}"


def rental_table(made: PlanMade) -> PageTable:
    """Return what to rent or to use in each pool, with its price and who says so."""
    chosen = made.plan.allocation
    is_paid = chosen.dollars_per_hour > 0
    head = (
        "pool",
        "GPUs" if made.plan.owned_pools else "rent",
        "to",
        "nodes",
        *(("price", "which is") if is_paid else ()),
    )
    rows = [
        _row(made, pool, tasks, is_paid=is_paid)
        for pool, tasks in sorted(chosen.tasks_by_pool.items())
    ]
    return PageTable("", head, rows, is_cards=True)


def _row(made: PlanMade, pool: str, tasks: Mapping[str, int], *, is_paid: bool) -> list[PageCell]:
    count, gpu = sum(tasks.values()), gpu_word(made.plan.allocation.gpus[pool])
    own = made.run.cluster.pools.get(pool)
    cells = [
        PageCell(pool),
        PageCell(f"{count}{NBSP}{gpu}", "yours" if own is not None and own.owned else ""),
        PageCell("; ".join(f"{task}: {each}" for task, each in tasks.items())),
        PageCell(*_nodes(own, count)),
    ]
    if not is_paid:
        return cells
    price = _price(made, pool)
    charged = own.num_gpus if own is not None and own.owned else count
    return [
        *cells,
        PageCell(f"{dollars(price)} a GPU-hour", f"{dollars(price * charged)} an hour"),
        PageCell(price_source(made, pool)),
    ]


def _nodes(pool: PoolConfig | None, count: int) -> tuple[str, str]:
    """Return on how many nodes the GPUs are, and what network the plan counts on."""
    if pool is None or pool.gpu == "cpu":
        return "", ""
    nodes = ceil(count / pool.gpus_per_node)
    text = f"{nodes} of {pool.gpus_per_node} GPUs each" if nodes > 1 else "1 node"
    if nodes == 1 and count < pool.gpus_per_node:
        text = f"part of 1 node of {pool.gpus_per_node} GPUs"
    speed = gpu_of(pool).network * pool.gpus_per_node * BITS_PER_BYTE / 1e9
    return text, f"{speed:g} Gbit/s between nodes, {pool.transport}" if nodes > 1 else ""


def _price(made: PlanMade, pool: str) -> float:
    """Return the price of a GPU-hour. The file of a taken option lacks pools of other plans, but the total has them."""
    if pool in made.run.cluster.pools:
        return price_of(made.run.cluster.pools[pool])
    whole = made.plan.whole_run
    total = None if whole is None else whole.pools.get(pool)
    return total.dollars / total.gpu_hours if total is not None and total.gpu_hours else 0.0


def price_source(made: PlanMade, pool: str) -> str:
    """Return who states the price of a pool: a provider, the command, the run file, or a profile as an assumption."""
    stated = made.run.cluster.pools.get(pool)
    if stated is not None and stated.price_source is not None:
        return f"list price of {price_note(stated.price_source)}"
    whole = made.plan.whole_run
    for each in [] if whole is None else whole.assumed:
        if each.key == pool_key(pool, "price"):
            return f"assumed from the profile ({each.source})"
    return (
        "as given in the command (--gpus)"
        if "--gpus" in command_words(made)
        else "from the run file"
    )


def prices_from(made: PlanMade) -> str:
    """Return where the prices of the total are from, in a few words: "prices from the run file"."""
    sources = [price_source(made, pool) for pool in made.plan.allocation.gpus_by_pool]
    return f"prices {listing([each.partition(' (')[0] for each in dict.fromkeys(sources)])}"


def link_lines(made: PlanMade) -> Iterator[str]:
    """Yield the links between the pools of a plan, each with its source."""
    used = made.plan.allocation.gpus_by_pool
    for link in made.run.cluster.links:
        if all(pool in used for pool in link.between):
            yield f"Link between {' and '.join(link.between)}: {_link_text(link)} ({_link_source(made)})."


def _link_text(link: LinkConfig) -> str:
    latency = f", {link.latency * 1e3:g} ms" if link.latency else ", no latency counted"
    price = f", ${link.price_per_gb:g} per GB" if link.price_per_gb else ""
    return f"{link.bandwidth * BITS_PER_BYTE / 1e9:g} Gbit/s each way{latency}, {link.transport}{price}"


def _link_source(made: PlanMade) -> str:
    words = command_words(made)
    if "--gpus" not in words:
        return "run file"
    return "as given in the command" if "--link" in words else "assumed: --link sets it"
