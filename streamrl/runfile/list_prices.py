"""Read profiles/prices.toml: what providers ask for a GPU-hour, for `price = "runpod/h100/spot"`.

| part     | example   | where absent             |
|----------|-----------|--------------------------|
| provider | `runpod`  | must be there            |
| GPU      | `h100`    | the GPU of the pool      |
| kind     | `spot`    | `on-demand`              |
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from streamrl.runfile.gpu_names import gpu_name
from streamrl.runfile.profile_folder import PROFILES
from streamrl.runfile.reading import read_toml

PRICES = PROFILES / "prices.toml"
KINDS = ("on-demand", "reserved", "spot")
OLD_DAYS = 183
"""Days after which a list price is called old: half a year."""
_DATE = re.compile(r"\bread on (\d{4}-\d{2}-\d{2})\b")


class Sheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The prices that one page of a provider had on one date, by GPU."""

    provider: str
    region: str
    currency: Literal["USD"]
    date: datetime.date
    source: str
    on_demand: dict[str, float] = {}
    reserved: dict[str, float] = {}
    spot: dict[str, float] = {}

    def of_kind(self, kind: str) -> dict[str, float]:
        """Return the prices of a kind by GPU."""
        return {"on-demand": self.on_demand, "reserved": self.reserved, "spot": self.spot}[kind]


class _SheetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of profiles/prices.toml."""

    sheet: tuple[Sheet, ...]


class ListPrice(NamedTuple):
    """What a provider asks for an hour of a GPU."""

    dollars: float
    sheet: Sheet
    kind: str

    @property
    def source(self) -> str:
        """Return provider, kind, region, date and page in a few words."""
        sheet = self.sheet
        region = f" in {sheet.region}" if not sheet.region.startswith(("any", "not")) else ""
        return f"{sheet.provider} {self.kind}{region}, read on {sheet.date} ({sheet.source})"

    @property
    def keys(self) -> dict[str, Any]:
        """Return the price as keys of a pool."""
        return {"price": self.dollars, "price_source": self.source}


@functools.cache
def sheets() -> tuple[Sheet, ...]:
    """Return all sheets of profiles/prices.toml in their order."""
    return read_sheets(PRICES)


def read_sheets(path: Path) -> tuple[Sheet, ...]:
    """Return the sheets of a file of list prices.

    Raises:
        ValueError: the file is not one. The text has the file and the key.
    """
    try:
        table = read_toml(path)
        return msgspec.convert(table, _SheetFile).sheet
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def providers() -> list[str]:
    """Return the names of all providers."""
    return sorted({sheet.provider for sheet in sheets()})


def list_price(text: str, gpu: str) -> ListPrice:
    """Return the price that a text such as "runpod/h100/spot" names.

    Args:
        text: provider, then a GPU, a kind, or both.
        gpu: the GPU of the pool.

    Raises:
        ValueError: there is no such provider, GPU or kind. The text lists the known ones.
    """
    provider, *rest = [part.strip().lower() for part in text.split("/")]
    known = providers()
    if provider not in known:
        raise ValueError(
            f"no provider {provider!r} in profiles/prices.toml; there is {', '.join(known)}"
        )
    kind = rest.pop() if rest and rest[-1] in KINDS else KINDS[0]
    named = [gpu_name(part) for part in rest] or [gpu]
    if named != [gpu]:
        raise ValueError(
            f"{text!r} is not of this pool's GPU; write {provider}/{gpu} or {provider}/{gpu}/spot"
        )
    found = next(_prices_of(provider, gpu, kind), None)
    if found is None:
        offered = ", ".join(_offers_of(provider))
        raise ValueError(
            f"{provider} has no {kind} price of {gpu} in profiles/prices.toml; there is {offered}"
        )
    return found


def _prices_of(provider: str, gpu: str, kind: str) -> Iterator[ListPrice]:
    for sheet in sheets():
        if sheet.provider == provider and gpu in sheet.of_kind(kind):
            yield ListPrice(sheet.of_kind(kind)[gpu], sheet, kind)


def _offers_of(provider: str) -> Iterator[str]:
    """Yield what a provider has a price of, as a run file names it."""
    for sheet in sheets():
        if sheet.provider == provider:
            for kind in KINDS:
                end = "" if kind == KINDS[0] else f"/{kind}"
                yield from (f"{provider}/{gpu}{end}" for gpu in sheet.of_kind(kind))


def list_prices_of(gpu: str) -> list[str]:
    """Return all list prices of a GPU, as a run file names them."""
    names = chain.from_iterable(map(_offers_of, providers()))
    return [name for name in names if name.split("/")[1] == gpu]


def stated_price(source: str, gpu: str) -> float | None:
    """Return the dollars of a list price by its source; None if the text is not the source of one."""
    every = chain.from_iterable(
        _prices_of(provider, gpu, kind) for provider in providers() for kind in KINDS
    )
    return next((price.dollars for price in every if price.source == source), None)


def is_old(source: str, today: datetime.date) -> bool:
    """Return whether the date in the source of a list price is more than half a year ago."""
    match = _DATE.search(source)
    if match is None:
        return False
    return (today - datetime.date.fromisoformat(match[1])).days > OLD_DAYS
