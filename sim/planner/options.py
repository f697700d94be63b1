"""Choose the rows of the answer: three to five plans that differ in cost, time or staleness.

Rows are the recommended, the cheapest, the fastest, the best synchronous and the best colocated
plan. Plans of one system whose cost and time differ by less than `ALIKE` are one row. A faster plan
and another layout fill a short table, unless a row beats them in cost and time. A plan that costs
just too much for `plan.tolerance` always has a row if it is `WORTH_MORE` times as fast. Further rows
are the user's own file, a plan on parts of a node, and one that nothing runs today. Every row was
simulated for as many steps as the recommended plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from streamrl.record.metrics import Metrics
from streamrl.record.relations import relation_text
from streamrl.record.run_comparison import ratio_half_width
from streamrl.record.steady_state import Speed
from streamrl.runfile.plan_config import PlanConfig, limit_words
from streamrl.sim.planner.objective import Spend, beats, limits_of, unmet, value_of
from streamrl.sim.planner.plan import (
    RUN_BY_NOTHING,
    LeftOutOption,
    OptionLabel,
    PlanOption,
)
from streamrl.sim.planner.plan_description import choice_of, whole_run_of
from streamrl.sim.planner.plan_settings import describe, group_of
from streamrl.sim.planner.race import Race, Simulated, ratios_of
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import Unfinished
from streamrl.targets.verdicts import TARGETS, verdict_of

MOST_ROWS, FEWEST_ROWS = 5, 3
"""Rows of plans that the offer allows. Plans that the search leaves out are further rows."""
MUCH_FASTER = 0.75
"""A plan is much faster if its time is below this share of another plan's."""
JUST_ABOVE, WORTH_MORE = 2.0, 1.5
"""A plan costs just too much if it costs at most `JUST_ABOVE` times `plan.tolerance` more than the cheapest.
It is named beside the recommended plan if it is `WORTH_MORE` times as fast.
"""
MOST_OPTIONS = 9
"""Rows of the largest table: the recommended plan, four kinds of best plans, a faster one that costs just too much, the
user's own file, and the two of `LEFT_OUT_ROWS`.
"""
LEFT_OUT_ROWS: tuple[OptionLabel, ...] = ("on parts of a node", RUN_BY_NOTHING)
"""Rows of plans that the search leaves out and that would be better."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan of the table, with its figures."""

    labels: tuple[OptionLabel, ...]
    search: Search
    index: int
    speeds: Sequence[Metrics]
    """Figures by seed, the run's own first."""
    is_offered: bool = True

    @property
    def metrics(self) -> Metrics:
        """The figures with the run's own seed."""
        return self.speeds[0]

    @property
    def system(self) -> str:
        """The name of the system."""
        return self.search.space.candidate(self.index).mode.system

    @property
    def group(self) -> Hashable:
        """A key that variants of the plan share."""
        return group_of(self.search.space.candidate(self.index))

    @property
    def simulated(self) -> Simulated:
        """The plan with its simulations."""
        return Simulated(self.search, self.index, self.speeds)

    @property
    def spend(self) -> Spend[float]:
        """Dollars and seconds."""
        return self.search.spend_of(self.metrics)

    def is_like(self, other: Row) -> bool:
        """Whether two rows are one: about the same cost and time with the same system.

        A plan that the offer does not include also needs the same GPUs.
        """
        ours, theirs = self.spend, other.spend
        figures = [(ours.seconds, theirs.seconds), (ours.whole, theirs.whole)]
        is_alike = all(abs(one - another) <= ALIKE * another for one, another in figures)
        is_offered = self.is_offered and other.is_offered
        return (
            is_alike and self.system == other.system and (is_offered or self.group == other.group)
        )


class Options:
    """The plans of the table, among those that a search simulated."""

    def __init__(self, search: Search, race: Race, chosen: int) -> None:
        self._search, self._race, self._chosen = search, race, chosen
        space, systems = search.space, search.space.modes
        self._kinds: dict[OptionLabel, Callable[[int], bool]] = {
            "cheapest": lambda index: True,
            "fastest": lambda index: True,
            "best synchronous": lambda index: not space.system(index).staleness_bound,
            "best colocated": lambda index: systems[space.of_mode[index]].system == "colocated",
        }
        """Test of each kind that has a row."""
        if not space.prices.any():
            del self._kinds["cheapest"]

    # Plans to simulate ----------------------------------------------------------------------------

    def wanted(self) -> list[int]:
        """Return the plans that need as many simulated steps as the chosen one."""
        few = {index: self._search.speeds[index] for index in self._ranking()}
        first = [index for label in self._kinds if (index := self._first(label)) is not None]
        found = [*first, *self._just_dearer(few)[:1], *self._between(few)[:1]]
        found += self._race.ahead_over_few_steps(self._chosen)
        groups = {self._group(index) for index in (self._chosen, *found)}
        if len(groups) < FEWEST_ROWS:
            found += [i for i in self._ranking() if self._group(i) not in groups][:1]
        return list(dict.fromkeys(found))

    def _first(self, label: OptionLabel) -> int | None:
        """Return the best plan of a kind by the few steps of the search; None if there is none."""
        if label == "cheapest" and self._race.cheapest is not None:
            return self._race.cheapest
        return self._best(label, {i: self._search.speeds[i] for i in self._ranking()})

    def _best(self, label: OptionLabel, speeds: Mapping[int, Speed]) -> int | None:
        """Return the best of some plans of one kind; None if none is of this kind."""
        fits = {index: speed for index, speed in speeds.items() if self._kinds[label](index)}
        if label == "cheapest":
            return min(fits, key=lambda index: self._search.spend_of(fits[index]).whole)
        if label == "fastest":
            return min(fits, key=lambda index: self._search.spend_of(fits[index]).seconds)
        return recommended_of(self._search, fits) if fits else None

    def _ranking(self) -> list[int]:
        """Return the simulated plans, the chosen one first, then those with more steps."""
        others = [index for index in self._search.ranking() if index != self._chosen]
        finals = sorted((i for i in others if i in self._race.finals), key=self._race.value)
        return [self._chosen, *finals, *(i for i in others if i not in self._race.finals)]

    def _between(self, speeds: Mapping[int, Speed]) -> list[int]:
        """Return the plans that are much faster than the chosen one and much slower than the fastest, the cheapest first."""
        spends = {index: self._search.spend_of(speed) for index, speed in speeds.items()}
        least = min(spend.seconds for spend in spends.values()) / MUCH_FASTER
        most = MUCH_FASTER * spends[self._chosen].seconds
        between = [index for index, spend in spends.items() if least < spend.seconds < most]
        return sorted(between, key=lambda index: spends[index].whole)

    def _just_dearer(self, among: Iterable[int]) -> list[int]:
        """Return the plans that cost just too much and are `WORTH_MORE` times as fast as the chosen one, the fastest first."""
        race, plan = self._race, self._search.space.run.plan
        if race.cheapest is None or not plan.takes_faster:
            return []
        most, seconds = 1 + JUST_ABOVE * plan.tolerance, dict[int, float]()
        for index in among:
            _, seconds[index] = race.ratios(index, self._chosen)
        return [
            index
            for index in sorted(seconds, key=seconds.__getitem__)
            if seconds[index] * WORTH_MORE <= 1
            and not race.is_tolerable(index)
            and race.ratios(index, race.cheapest)[0] <= most
        ]

    def _group(self, index: int) -> Hashable:
        return group_of(self._search.space.candidate(index))

    # Rows -----------------------------------------------------------------------------------------

    def rows(self, others: Iterable[Row]) -> list[Row]:
        """Return the rows: the recommended plan, then the others by rising cost.

        Args:
            others: rows of plans that are not in this search.
        """
        known = {index: self._race.as_known(index)[0] for index in self._race.known()}
        rows = [self._row("recommended", self._chosen)]
        for label in self._kinds:
            if (index := self._best(label, known)) is not None:
                _add(rows, self._row(label, index))
        for row in (self._row("faster", index) for index in self._just_dearer(known)[:1]):
            rows += [] if any(row.is_like(each) for each in rows) else [row]
        has_faster = any("faster" in row.labels for row in rows)
        for row in self._fillers(known, has_faster=has_faster):
            most = FEWEST_ROWS if "another layout" in row.labels else MOST_ROWS
            is_new = not any(row.is_like(each) or beats(each.spend, row.spend) for each in rows)
            if len(rows) < most and is_new:
                rows.append(row)
        for row in others:
            _add(rows, row)
        return [rows[0], *sorted(rows[1:], key=lambda row: (row.spend.whole, row.spend.seconds))]

    def just_dearer(self, rows: Sequence[Row]) -> int | None:
        """Return the number of the row that costs just too much and is much faster; None if there is none.

        It costs more than `plan.tolerance` allows, but at most `JUST_ABOVE` times that, and is `WORTH_MORE` times as
        fast as the recommended plan.
        """
        numbers = numbers_of(rows, self._search)
        kept = [index for index in numbers if index in self._race.known()]
        return next((numbers[index] for index in self._just_dearer(kept)), None)

    def _row(self, label: OptionLabel, index: int) -> Row:
        speeds = self._race.as_known(index)
        return Row(labels=(label,), search=self._search, index=index, speeds=speeds)

    def _fillers(self, known: Mapping[int, Speed], *, has_faster: bool) -> Iterator[Row]:
        """Yield a plan between the recommended and the fastest one if no row is one, then other layouts."""
        between = [] if has_faster else self._between(known)[:1]
        yield from (self._row("faster", index) for index in between)
        others = (index for index in self._ranking() if index in known)
        yield from (self._row("another layout", index) for index in others)

    def left_out(self, rows: Sequence[Row]) -> Iterator[LeftOutOption]:
        """Yield each kind without a row, and why."""
        shown = {label for row in rows for label in row.labels}
        for label in self._kinds:
            if label not in shown:
                yield LeftOutOption(label=label, reason=self._why_none(label))

    def _why_none(self, label: OptionLabel) -> str:
        """Return why a kind of plan has no row."""
        search, index = self._search, self._first(label)
        if index is not None and (known := self._race.as_known(index)):
            limits = broken_limits(search.space.run.plan, search.spend_of(known[0]))
            return f"{limits} over more steps: {self._text(index)}"
        if index is not None:
            return f"no time was left to simulate it: {self._text(index)}"
        modes, plans = np.unique(search.space.of_mode, return_index=True)
        fits = {mode for mode, plan in zip(modes, plans, strict=True) if self._kinds[label](plan)}
        if not fits:
            return "the offer and [plan] have none"
        return self._why_none_was_kept(fits)

    def _why_none_was_kept(self, modes: Collection[int]) -> str:
        """Return why no plan with some modes was kept, although such plans exist."""
        search, of_mode = self._search, self._search.space.of_mode
        stopped = {i: why for i, why in search.unfinished.items() if of_mode[i] in modes}
        ended = [i for i in search.speeds if of_mode[i] in modes and i not in stopped]
        spends = [search.spend_of(search.speeds[index]) for index in ended]
        reasons = [str(unmet(search.space.run.plan, spends))] if spends else []
        reasons += [
            f"a plan that was simulated does not come to its end: {why.reason}"
            for why in list(stopped.values())[:1]
        ]
        if reasons:
            return "; ".join(reasons)
        if search.is_late:
            return "no time was left to simulate one"
        return "by their estimates none is better than the recommended plan"

    def _text(self, index: int) -> str:
        space = self._search.space
        return describe(space.run.cluster.pools, space.candidate(index))


def recommended_of(search: Search, speeds: Mapping[int, Speed]) -> int:
    """Return the plan to choose among some plans: the best, or the fastest that costs little more."""
    plan = search.space.run.plan
    best = min(speeds, key=lambda index: value_of(plan, speeds[index]))
    if not plan.takes_faster:
        return best
    spends = {index: search.spend_of(speed) for index, speed in speeds.items()}
    most = (1 + plan.tolerance) * min(spend.whole for spend in spends.values())
    return min(
        (index for index, spend in spends.items() if spend.whole <= most),
        key=lambda index: spends[index].seconds,
    )


def _add(rows: list[Row], row: Row) -> None:
    """Add a row, or its labels to a row that is like it.

    A plan that nothing runs is left out if another one is like it: that one can be run.
    """
    for place, other in enumerate(rows):
        if row.is_like(other):
            own = (label for label in row.labels if label != RUN_BY_NOTHING)
            labels = dict.fromkeys([*other.labels, *own])
            rows[place] = replace(other, labels=tuple(labels))
            return
    rows.append(row)


class OtherRows:
    """Rows of plans that the search does not have: the layout of the run file, parts of a node, and what nothing runs."""

    def __init__(self, race: Race, chosen: int) -> None:
        self._race, self._chosen = race, chosen
        self._candidates: dict[OptionLabel, Candidate] = {}
        self._indices: dict[OptionLabel, int] = {}
        self.left_out: list[LeftOutOption] = []
        """Plans without a row, and why."""

    def add(self, label: OptionLabel, candidate: Candidate) -> None:
        """Add a plan, or record why it cannot run."""
        index = self._race.search.space.index_of(candidate)
        if index is not None and self._race.as_known(index):
            self._indices[label] = index
        elif reason := self._race.search.space.refusal_of(candidate):
            self.leave_out(label, reason)
        else:
            self._candidates[label] = candidate

    def simulate(self, pool: Executor, watch: Callable[[], None]) -> Iterator[Row]:
        """Simulate the plans for as long as the chosen one, and yield their rows."""
        search, race = self._race.search, self._race
        for label, index in self._indices.items():
            speeds = race.as_known(index)
            yield Row(labels=(label,), search=search, index=index, speeds=speeds)
        found = race.simulate_as_long(pool, self._chosen, self._candidates, watch)
        for label, candidate in self._candidates.items():
            metrics = found.get(label)
            if metrics is None or isinstance(metrics, Unfinished):
                reason = "no time was left to simulate it" if metrics is None else metrics.reason
                self.leave_out(label, reason)
                continue
            alone = search.only(candidate)
            rivals = [self._chosen, *race.known()]
            spend = alone.spend_of(metrics)
            beaten_by = next((i for i in rivals if beats(race.spend(i), spend)), None)
            if label in LEFT_OUT_ROWS and beaten_by is not None:
                which = "the recommended" if beaten_by == self._chosen else "another simulated"
                self.leave_out(label, f"the best one is dearer and slower than {which} plan")
                continue
            is_offered = search.space.index_of(candidate) is not None
            yield Row(
                labels=(label,), search=alone, index=0, speeds=[metrics], is_offered=is_offered
            )

    def leave_out(self, label: OptionLabel, reason: str) -> None:
        """Record why a plan has no row."""
        self.left_out.append(LeftOutOption(label=label, reason=reason))


def numbers_of(rows: Sequence[Row], search: Search) -> dict[int, int]:
    """Return the number of each row of a search, by the index of its plan."""
    return {row.index: number for number, row in enumerate(rows, start=1) if row.search is search}


# Description --------------------------------------------------------------------------------------


def describe_rows(rows: Sequence[Row]) -> list[PlanOption]:
    """Return the table of the answer."""
    return [_option(number, row, rows[0]) for number, row in enumerate(rows, start=1)]


def _option(number: int, row: Row, first: Row) -> PlanOption:
    whole, metrics = whole_run_of(row.speeds, row.search.space.run.cluster), row.metrics
    assert whole is not None, "only finished runs are options"
    choice = choice_of(row.search, row.index, row.speeds)
    dollars, seconds = ratios_of(row.simulated, first.simulated)
    all_free = not first.spend.whole and not row.spend.whole
    space = row.search.space
    planned = space.candidate(row.index).apply(space.run)
    width = ratio_half_width(metrics, first.metrics)
    return PlanOption(
        number=number,
        labels=list(row.labels),
        text=choice.text,
        choice=choice,
        whole_run=whole,
        tiers=metrics.tiers,
        uncertainty=metrics.uncertainty,
        trains_on=age_text(metrics.mean_staleness),
        cost_ratio=dollars if first.spend.whole else None,
        time_ratio=seconds,
        ratio_half_width=None if row is first else width,
        relation=""
        if row is first
        else relation_text(None if all_free else dollars, seconds, width),
        is_offered=row.is_offered,
        note=broken_limits(row.search.space.run.plan, row.spend),
        carried_by=[verdict_of(planned, name) for name in TARGETS],
    )


def broken_limits(plan: PlanConfig, spend: Spend[float]) -> str:
    """Return the limits that a plan exceeds."""
    limits = limits_of(plan)
    broken = [
        limit_words(limit.key, limit.most) for limit in limits if spend[limit.place] > limit.most
    ]
    return f"exceeds {' and '.join(broken)}" if broken else ""


def age_text(staleness: float) -> str:
    """Return the age of rollouts: "trains on rollouts 1 step old"."""
    age = f"{staleness:.1f}".removesuffix(".0")
    if age == "0":
        return "trains on fresh rollouts"
    return f"trains on rollouts {age} step{'' if age == '1' else 's'} old"
