"""Answer a question without a run file: make the run file that it stands for, and estimate the plans to decide between.

What a question leaves out gets a value that is told, so that a reader can contradict it. Estimates are closed forms,
corrected by a few simulated steps of the plans that are named. `make_plan` then compares plans by simulation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.profiles import price_of
from streamrl.logs.imported_workload import scale_to_mean
from streamrl.record.assumed import network_text, price_note
from streamrl.record.band import Band, ModelError, band_of, ends_of, mixed_basis
from streamrl.record.billing import BILLING_KEYS, bill_of, rented_time, uncounted
from streamrl.record.charges import PaidGpus
from streamrl.record.steady_state import FEW_STEPS
from streamrl.record.whole_run import steps_for_one, whole_time
from streamrl.runfile.cluster_config import BillingConfig, LinkConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds
from streamrl.runfile.field_checks import bounds_of
from streamrl.runfile.formatting import (
    format_dollars,
    format_step_time,
    listing,
    long_dollars,
    long_time,
)
from streamrl.runfile.notebook import frame_of, html_table
from streamrl.runfile.plan_config import PlanConfig, limit_words
from streamrl.runfile.section import Section
from streamrl.runfile.short_forms import model_keys, read_offer
from streamrl.runfile.units import Bandwidth, Duration, quantity_text
from streamrl.runfile.workload_config import LengthsConfig, WorkloadConfig
from streamrl.sim.planner.model_errors import estimated_error
from streamrl.sim.planner.modes import keep_to_framework
from streamrl.sim.planner.objective import aim_of, check_free_plans, decide
from streamrl.sim.planner.plan_settings import describe
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate

if TYPE_CHECKING:
    from pandas import DataFrame

SHAPE = "streamrl-codemath-20k"
"""The profile whose distribution of output lengths is scaled to the mean: DeepSeek-R1 on mathematics and code."""
MOST_CAPPED = 0.95
"""Largest mean as a share of the cap. Above it, most outputs would be cut off."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The training and the GPUs to plan for."""

    model: str
    """Name of a profile or of a model on the Hugging Face hub, or a directory with config.json."""
    gpus: str
    """The offer, in the syntax of `streamrl.runfile.short_forms`."""
    algorithm: str = "grpo"
    prompts: int = 64
    """Prompts per step."""
    group: int = 16
    """Rollouts per prompt."""
    mean_tokens: int = 4_000
    """Mean output tokens of a rollout."""
    max_tokens: int = 16_000
    """Output tokens after which a rollout is cut off."""
    prompt_tokens: int = 400
    steps: int = 200
    link: str = "100 Gbps"
    """Bandwidth between any two pools."""
    deadline: str | None = None
    budget: float | None = None
    setup_time: str | None = None
    """Time for which all GPUs are rented before the first step."""
    minimum_term: str | None = None
    """Shortest time that a rental of any pool is billed for."""


def run_table_of(question: Question) -> dict[str, Any]:
    """Return the run file of a question, in the form of a TOML table.

    Its layout is only a start, which the plan replaces.

    Raises:
        ValueError: a value cannot be read, or the mean is too near the cap.
    """
    pools = _pools(question)
    first, *_ = pools
    objective = "step-time" if _is_free(pools) else None
    plan = {"objective": objective, "deadline": question.deadline, "budget": question.budget}
    setup = {} if question.setup_time is None else {"setup_time": question.setup_time}
    return {
        "model": model_keys(question.model),
        "cluster": {
            "pools": pools,
            "links": _links(list(pools), question.link),
            **({"billing": setup} if setup else {}),
        },
        "plan": {key: value for key, value in plan.items() if value is not None},
        "rollout": {"pool": first, "replicas": 1, "max_tokens": question.max_tokens},
        "trainer": {"pool": first},
        "algorithm": {
            "name": question.algorithm,
            "steps": question.steps,
            "prompts_per_step": question.prompts,
            "group_size": question.group,
        },
        "workload": {
            "lengths": _lengths(question),
            "max_prompt_tokens": max(WorkloadConfig().max_prompt_tokens, question.prompt_tokens),
        },
        "policies": {"system": "colocated"},
    }


def _pools(question: Question) -> dict[str, dict[str, Any]]:
    """Return the pools of a question. The minimum term is that of each rented pool."""
    pools, term = read_offer(question.gpus), question.minimum_term
    if term is None:
        return pools
    if all("owned" in pool for pool in pools.values()):
        raise ValueError("--minimum-term applies to rented GPUs, but all pools are owned")
    return {
        name: pool if "owned" in pool else {**pool, "minimum_term": term}
        for name, pool in pools.items()
    }


def _is_free(pools: dict[str, dict[str, Any]]) -> bool:
    """Return whether no pool costs anything. Plans are then compared by time."""
    return all(pool.get("owned") and pool.get("price") == 0 for pool in pools.values())


def _links(pools: list[str], bandwidth: str) -> list[dict[str, Any]]:
    return [{"between": list(pair), "bandwidth": bandwidth} for pair in combinations(pools, 2)]


def _lengths(question: Question) -> dict[str, Any]:
    mean, cap = question.mean_tokens, question.max_tokens
    check_lengths(mean, cap)
    shape = LengthsConfig(kind="histogram", source=SHAPE)
    return {
        "kind": shape.kind,
        "source": SHAPE,
        "scale": float(f"{scale_to_mean(shape, mean, cap):.4g}"),
        "prompt_tokens": question.prompt_tokens,
    }


def check_lengths(mean: int, cap: int) -> None:
    """Raise `ValueError` if the mean of the output tokens is not well below their cap."""
    if not 1 <= mean <= MOST_CAPPED * cap:
        raise ValueError(
            f"--mean-tokens must be from 1 to {MOST_CAPPED:.0%} of --max-tokens ({cap:,}), got {mean:,}"
        )


def assumptions_of(question: Question, stated: set[str]) -> list[str]:
    """Return the assumptions of a question, one per line.

    Args:
        question: the question.
        stated: the fields that the user set.
    """
    told = [
        f"lengths have the shape of {SHAPE} (DeepSeek-R1 on mathematics and code), scaled to the mean of "
        f"{question.mean_tokens:,} tokens under a cap of {question.max_tokens:,}"
    ]
    names = {
        "algorithm": question.algorithm,
        "prompts": f"{question.prompts} prompts a step",
        "group": f"{question.group} rollouts a prompt",
        "steps": f"{question.steps} steps",
        "prompt_tokens": f"{question.prompt_tokens} tokens a prompt",
    }
    if "," in question.gpus:
        names["link"] = f"{question.link} between pools"
    assumed = [text for name, text in names.items() if name not in stated]
    told += [*_price_assumptions(question), *_node_assumptions(question)]
    told += _network_assumptions(question)
    return [*told, *([f"not stated, so assumed: {', '.join(assumed)}"] if assumed else [])]


def _price_assumptions(question: Question) -> Iterator[str]:
    """Yield the prices that a question leaves out."""
    pools = read_offer(question.gpus)
    if _is_free(pools):
        yield (
            "your own GPUs have no price, so plans are compared by time (plan.objective); write dollars per GPU-hour as "
            "@owned@0.50"
        )
    for name, pool in pools.items():
        price = format_dollars(price_of(PoolConfig(gpu=pool["gpu"])))
        if "price_source" in pool:
            asked, note = format_dollars(pool["price"]), price_note(pool["price_source"])
            yield f"{name} costs {asked} per GPU-hour, the list price of {note}"
        elif "price" not in pool and "owned" in pool:
            yield (
                f"your own {name} count as {price} per GPU-hour each, used or not, by the profile; write another price as "
                "@owned@0.50"
            )
        elif "price" not in pool:
            yield f"{name} costs {price} per GPU-hour, by its profile; write another price as @2.20"


def _node_assumptions(question: Question) -> Iterator[str]:
    """Yield which pools a plan takes by the node."""
    whole = {
        name: "owned" in pool
        for name, pool in read_offer(question.gpus).items()
        if "unit" not in pool and pool["nodes"] > 1
    }
    rented = [name for name, is_owned in whole.items() if not is_owned]
    owned = [name for name, is_owned in whole.items() if is_owned]
    if rented:
        yield f"{' and '.join(rented)} are rented by the node; write /1 behind the price if single GPUs are"
    if owned:
        yield f"your own {' and '.join(owned)} are used by the node; write @owned/1 to use single GPUs"


def _network_assumptions(question: Question) -> Iterator[str]:
    """Yield the bandwidths between nodes that a question leaves out."""
    for name, keys in read_offer(question.gpus).items():
        shape = {
            key: keys[key] for key in ("nodes", "gpus_per_node", "nvlink_domain") if key in keys
        }
        pool = PoolConfig(gpu=keys["gpu"], **shape)
        if pool.num_gpus > pool.domain and "node_bandwidth" not in keys:
            yield (
                f"nodes of {name} have {network_text(pool)} to each other, as usual for them; write another rate behind "
                "the price, as 'with 1600 Gbps'"
            )


QUANTITIES: dict[str, tuple[type[Bandwidth | Duration], type[Section], str]] = {
    "link": (Bandwidth, LinkConfig, "bandwidth"),
    "deadline": (Duration, PlanConfig, "deadline"),
    "setup_time": (Duration, BillingConfig, "setup_time"),
    "minimum_term": (Duration, PoolConfig, "minimum_term"),
}
"""Fields of a question that have a unit, each with the section and the key that it becomes."""


def check_units(stated: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a quantity of a question has no unit, cannot be read, or is out of bounds.

    Its key may have no place in the run file, as a link of one pool.
    """
    for name, (kind, section, key) in QUANTITIES.items():
        try:
            if name in stated:
                _check_quantity(stated[name], kind, bounds_of(section)[key])
        except ValueError as error:
            raise ValueError(f"--{name.replace('_', '-')}: {error}") from None


def _check_quantity(stated: object, kind: type[Bandwidth | Duration], bounds: Bounds) -> None:
    if not bounds.hold(kind.parse(stated)):
        allowed = bounds.text(lambda bound: quantity_text(kind(bound)))
        raise ValueError(f"must be {allowed}, got {stated!r}")


# The answer --------------------------------------------------------------------------------------


Floats = NDArray[np.float64]


class EstimatedPlan(NamedTuple):
    """One plan of a first answer."""

    what: str
    """Its part in the answer: cheapest, recommended or fastest."""
    choice: str
    """One line with the GPUs that generate and train."""
    seconds: float
    """Wall time of the whole run, with set-up and failed attempts."""
    dollars: float
    """Dollars of the whole run."""
    step_time: float
    """Seconds of a step."""
    seconds_band: Band
    """Range in which `seconds` may truly be: model error, and the error of closed forms or so few steps."""
    dollars_band: Band
    step_time_band: Band
    model_error: ModelError
    simulated_steps: int
    """Steps that were simulated; 0 if all its figures are closed forms."""
    candidate: Candidate

    def figures(self) -> Iterator[str]:
        """Yield dollars and seconds of the whole run, and seconds of a step, with their bands."""
        yield long_dollars(self.dollars, None, ends_of(self.dollars_band))
        yield long_time(self.seconds, None, ends_of(self.seconds_band))
        yield format_step_time(self.step_time, None, ends_of(self.step_time_band))


MOST_ROLLOUTS = 300_000
"""Rollouts after which a first answer starts no further simulation. A core simulates some 40,000 a second, so they take
less than 8 s on two cores. With 1,024 rollouts a step, 40,000 to 170,000 settle the choice.
"""
LIMITS_ASIDE = "by estimate no plan keeps the deadline and the budget: set aside here"


class FirstAnswer(NamedTuple):
    """The plans to decide between, before the search."""

    plans: list[EstimatedPlan]
    """The cheapest plan, the fastest that costs little more, and the fastest."""
    num_plans: int
    """Plans that fit. All of them were estimated."""
    seconds: float
    """Seconds until this answer was ready."""
    is_late: bool
    """Whether it took so long that no further plan was simulated. Then it depends on the speed of the machine."""
    keeps_limits: bool
    """Whether any plan keeps the deadline and the budgets, by estimate. If none does, limits are left aside."""
    rule: str
    """By what rule a plan is recommended."""
    offer: Run
    """The run that was planned, as it was given."""
    assumptions: Sequence[str] = ()
    """What was assumed of the question, one per line."""

    @property
    def recommended(self) -> EstimatedPlan:
        """The fastest plan that costs little more than the cheapest."""
        return self.plans[1]

    @property
    def run(self) -> Run:
        """The run with the layout of the recommended plan, to simulate, plan or write it."""
        laid_out = self.recommended.candidate.apply(self.offer)
        return replace(laid_out, cluster=self.offer.cluster, plan=self.offer.plan)

    def __repr__(self) -> str:
        plan = self.recommended
        figures = "{}, {}, step {}".format(*plan.figures())
        return f"<First answer: {plan.choice}; {figures}; best of {self.num_plans:,} estimates>"

    def _repr_html_(self) -> str:
        """Return the table of `streamrl plan --model …` for a notebook."""
        head, *rows = self.table_rows()
        return html_table(self.title, rows, head, self.notes())

    def to_frame(self) -> DataFrame:
        """Return a row for each plan: what it is, seconds and dollars of the whole run, and seconds of a step."""
        columns = [name for name in EstimatedPlan._fields if name != "candidate"]
        return frame_of({name: getattr(plan, name) for name in columns} for plan in self.plans)

    def table_rows(self) -> Iterator[list[str]]:
        """Yield the heads of a table of the plans, then its rows; a plan that is best in two ways has one."""
        yield ["", "whole run", "takes", "a step", "from", "plan"]
        names: dict[Candidate, list[str]] = {}
        for plan in self.plans:
            names.setdefault(plan.candidate, []).append(plan.what)
        for candidate, alike in names.items():
            plan = next(each for each in self.plans if each.candidate == candidate)
            steps = f"{plan.simulated_steps} steps" if plan.simulated_steps else "estimate"
            figures = (figure.replace(" (", "\n(") for figure in plan.figures())
            yield [",\n".join(alike), *figures, steps, plan.choice]

    @property
    def title(self) -> str:
        """Return how many plans were estimated, and in which time."""
        return f"First answer: {self.num_plans:,} plans estimated in {self.seconds:.0f} s"

    def band_notes(self) -> Iterator[str]:
        """Yield which plans were not simulated and why, what the bands rest on, and what the bill leaves out."""
        steps = {plan.candidate: plan.simulated_steps for plan in self.plans}
        num_left = [*steps.values()].count(0)
        left = f"{num_left} of these {len(steps)} plans were not simulated"
        if self.is_late:
            yield f"time was up{f': {left}' if num_left else ''}; on a free machine the choice may differ"
        elif num_left:
            yield f"{left}: a first answer simulates few rollouts, `streamrl plan RUN.toml` more"
        yield f"{self.recommended.model_error.note}, and {FEW_STEPS:.0%} for so few steps"
        if mixed := mixed_basis({p.what: p.model_error.datasheet_share for p in self.plans}):
            yield mixed
        if missing := uncounted(self.offer.cluster):
            yield f"not counted: {listing(missing)} ({BILLING_KEYS})"

    def notes(self) -> Iterator[str]:
        """Yield the rule of the recommendation, and what the plans rest on."""
        yield f"recommended: {self.rule}"
        yield from self.band_notes()
        if not self.keeps_limits:
            yield LIMITS_ASIDE
        yield from self.assumptions


def first_answer(
    run: Run, pool: Executor, most_seconds: float, most_rollouts: float = MOST_ROLLOUTS
) -> FirstAnswer:
    """Estimate all plans of a run's offer, and simulate a few steps of the best ones.

    The same run has the same answer on any machine, unless `most_seconds` end the simulations first.

    Args:
        run: the offer.
        pool: workers.
        most_seconds: seconds after which nothing more is simulated.
        most_rollouts: rollouts after which nothing more is simulated.

    Raises:
        ValueError: no plan fits.
        RunError: plans cost nothing, and the objective needs dollars.
    """
    began = time.perf_counter()
    offer, until = keep_to_framework(run).run, began + most_seconds
    search = Search.open(offer, until, most_rollouts=most_rollouts)
    check_free_plans(run.cluster.pools, run.plan, search.space.prices)
    while True:
        search.refine(pool, lambda *_: [*dict.fromkeys(_name(search, _figures(search)).values())])
        figures = _figures(search)
        named = _name(search, figures)
        new = [i for i in dict.fromkeys(named.values()) if i not in search.speeds]
        if not new or search.is_late or search.is_spent:
            break
        search.simulate(pool, new, lambda: None)
    plans = [_estimated(search, what, index, figures) for what, index in named.items()]
    keeps_limits = bool((search.over_limits() <= 1).any())
    rule = _rule_of(run.plan)
    seconds = time.perf_counter() - began
    return FirstAnswer(plans, len(search.space), seconds, search.is_late, keeps_limits, rule, run)


def _rule_of(plan: PlanConfig) -> str:
    """Return by what rule a plan is recommended, in words."""
    rule = f"{aim_of(plan)} of the plans"
    if plan.takes_faster or plan.objective == "pareto":
        rule = f"the fastest plan that costs at most {plan.tolerance:.0%} more than the cheapest"
    if plan.deadline is None:
        return rule
    return f"{rule}{', of those' if plan.takes_faster else ''} that meet {limit_words('deadline', plan.deadline)}"


class _Figures(NamedTuple):
    """Seconds and dollars of a step of every plan: simulated if known, else estimated. Dollars are as billed."""

    seconds: Floats
    dollars: Floats


def _figures(search: Search) -> _Figures:
    seconds = search.estimates.estimate().step.copy()
    dollars = seconds * search.space.prices + search.estimates.egress(seconds)
    dollars *= search.estimates.billed(seconds, np.zeros(len(seconds)), search.goal)
    for index, speed in search.speeds.items():
        seconds[index] = speed.step_time
        dollars[index] = speed.cost_per_step * speed.steady_billing_ratio
    return _Figures(seconds, dollars)


def _name(search: Search, figures: _Figures) -> dict[str, int]:
    """Return the best plan of each kind.

    Plans that exceed a limit count only if all do, and unfinished plans never. At an early end, plans whose generation has
    only a lower bound would look best, so they count only if no other plan is left or nothing was simulated.
    """
    is_out = search.over_limits() > 1
    is_out &= not is_out.all()
    is_out[list(search.unfinished)] = True
    if search.num_rollouts and (search.is_late or search.is_spent):
        is_bound = ~search.estimates.has_generation()
        is_bound[list(search.speeds)] = False
        is_out |= is_bound & (~is_bound & ~is_out).any()
    plan, lags = search.space.run.plan, search.lags
    steps = steps_for_one(plan, lags)
    seconds, dollars = (np.where(is_out, np.inf, each * steps) for each in figures)
    cheapest, recommended, fastest = decide(seconds, dollars, plan.tolerance)
    if not (plan.takes_faster or plan.objective == "pareto"):
        values = search.estimates.values(figures.seconds, lags, plan)
        recommended = int(np.argmin(np.where(is_out, np.inf, values)))
    if not search.space.prices.any():  # none is the cheapest
        cheapest = recommended
    return {
        "cheapest": cheapest,
        "recommended": recommended,
        "fastest": fastest,
    }


def _estimated(search: Search, what: str, index: int, figures: _Figures) -> EstimatedPlan:
    speed, candidate, run = (
        search.speeds.get(index),
        search.space.candidate(index),
        search.space.run,
    )
    step_time, steps = float(figures.seconds[index]), run.algorithm.steps
    spread = 1 / (1 + FEW_STEPS), 1 + FEW_STEPS
    seconds, egress = steps * step_time, float(search.estimates.egress(figures.seconds)[index])
    if speed is not None:
        time, spread = whole_time(run, speed), speed.spread
        steps, seconds, egress = time.steps, time.seconds, speed.egress_per_step
    error, billing = estimated_error(search, index), run.cluster.billing
    band, rents = _band(seconds, spread, error), PaidGpus.of(candidate.apply(run)).rents

    def dollars(seconds: float) -> float:
        return bill_of(run.cluster, rents, egress * steps, seconds).total

    return EstimatedPlan(
        what=what,
        choice=describe(run.cluster.pools, candidate),
        seconds=rented_time(billing, seconds),
        dollars=dollars(seconds),
        step_time=step_time,
        seconds_band=Band(low=rented_time(billing, band.low), high=rented_time(billing, band.high)),
        dollars_band=Band(low=dollars(band.low), high=dollars(band.high)),
        step_time_band=_band(step_time, spread, error),
        model_error=error,
        simulated_steps=0 if speed is None else len(speed.step_times),
        candidate=candidate,
    )


def _band(value: float, spread: tuple[float, float], error: ModelError) -> Band:
    """Return the band of a figure, given the ends of its sampling error relative to it."""
    least, most = spread
    return band_of(value, (value * least, value * most), error)
