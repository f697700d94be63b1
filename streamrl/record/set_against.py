"""Set two runs of the same work against each other: A, which is asked about, and B, which one has.

Both had the same prompts and lengths step by step, so that differences are those of steps that did the same work, and
their intervals hold nothing of what made a step long for both. Dollars a second are the mean of the steps that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log

from msgspec.structs import replace

from streamrl.hardware.tables import Floats
from streamrl.record.against import Against, BreakEvenPrice, Known, Outcome
from streamrl.record.batch_means import half_width
from streamrl.record.measured_run import MeasuredRun
from streamrl.record.paired import relative
from streamrl.record.trace import Trace
from streamrl.record.uncertainty import unshared_error
from streamrl.runfile.sides_config import RolloutConfig, TrainerConfig
from streamrl.runfile.units import SECONDS_PER_HOUR

EQUAL = 1e-9
"""Difference, as a share, that rounding leaves of equal figures."""


def set_against(traces: tuple[Trace, Trace], counted_steps: tuple[int, int], note: str) -> Against:
    """Measure the traces of A and B over the same steps, and set them against each other.

    Args:
        traces: of A and of B.
        counted_steps: first and last step to count.
        note: what keeps the difference from being as exactly known as was asked for.
    """
    a, b = (MeasuredRun(trace, counted_steps) for trace in traces)
    ours, theirs, steps = a.metrics, b.metrics, a.run.algorithm.steps
    seconds = _known(a.seconds - b.seconds)
    dollars = _known(a.seconds * a.dollars_per_second - b.seconds * b.dollars_per_second)
    spread = relative(a.seconds) - relative(b.seconds)
    more_tokens = relative(a.tokens) - relative(b.tokens)
    longer = a.longer / b.longer
    step_time_ratio = _ratio(longer * ours.step_time / theirs.step_time, spread)
    cost_ratio = _ratio(
        longer * ours.cost_per_million_tokens / theirs.cost_per_million_tokens, spread - more_tokens
    )
    whole, other = a.whole_run, b.whole_run
    all_seconds = whole.steps * a.seconds - other.steps * b.seconds
    all_dollars = (
        whole.steps * a.seconds * a.dollars_per_second
        - other.steps * b.seconds * b.dollars_per_second
    )
    error = _error_of_difference(a, b)
    return Against(
        a=a.describe(),
        b=b.describe(),
        counted_steps=counted_steps,
        outcome=decide(cost_ratio, step_time_ratio, error),
        step_time_ratio=step_time_ratio,
        cost_ratio=cost_ratio,
        step_time=seconds,
        cost_per_step=dollars,
        idle_gpu_seconds=_known(a.idle - b.idle),
        idle_cost=_known(a.idle_dollars - b.idle_dollars),
        training_steps=steps,
        steps_ratio=longer,
        training_time=_about(whole.seconds - other.seconds, _known(all_seconds)),
        training_cost=_about(whole.dollars - other.dollars, _known(all_dollars)),
        unshared_error=error,
        prices=list(_break_even_prices(a, b, cost_ratio)),
        note=note,
    )


def decide(cost_ratio: Known, step_time_ratio: Known, error: float | None) -> Outcome:
    """Return whether A is worth it over B, as far as the ratios of A to B are known.

    Args:
        cost_ratio: of dollars a token.
        step_time_ratio: of seconds a step.
        error: how far costs that A and B do not share may be off; None where nobody knows, which is no reason to
            doubt a difference.
    """
    is_equal = max(abs(log(ratio.value)) for ratio in (cost_ratio, step_time_ratio)) < EQUAL
    if is_equal and cost_ratio.interval is not None:
        return "no difference"
    if not cost_ratio.differs_from(1.0):
        return "may be chance"
    if not is_told(cost_ratio, error):
        return "within the error of costs"
    is_other_time = is_told(step_time_ratio, error)
    if cost_ratio.value < 1:
        is_slower = is_other_time and step_time_ratio.value > 1
        return "cheaper but slower" if is_slower else "worth it"
    is_faster = is_other_time and step_time_ratio.value < 1
    return "faster but dearer" if is_faster else "not worth it"


def is_told(ratio: Known, error: float | None) -> bool:
    """Whether a ratio of A to B is another than 1 beyond chance, and beyond the error of what they do not share."""
    return ratio.differs_from(1.0) and abs(log(ratio.value)) >= (error or 0.0)


# Figures ------------------------------------------------------------------------------------------


def _known(differences: Floats) -> Known:
    """Return the mean of step by step differences."""
    mean, width = float(differences.mean()), half_width(differences)
    return Known(value=mean, interval=None if width is None else (mean - width, mean + width))


def _ratio(value: float, spread: Floats) -> Known:
    """Return a ratio of two means: the logarithm of it scatters as the relative steps of both do."""
    width = half_width(spread)
    return Known(
        value=value, interval=None if width is None else (value * exp(-width), value * exp(width))
    )


def _about(value: float, known: Known) -> Known:
    """Return a figure that is as exactly known as another: start and checkpoints add nothing to what is not known."""
    more = value - known.value
    return Known(
        value=value,
        interval=known.interval and (known.interval[0] + more, known.interval[1] + more),
    )


def _error_of_difference(a: MeasuredRun, b: MeasuredRun) -> float | None:
    """Return how far the costs of what the two do not do alike were off; None where that was never checked."""
    errors = []
    for each in (a, b):
        known = each.metrics.uncertainty
        errors.append(unshared_error({} if known is None else known.stages, _shared_stages(a, b)))
    checked = [error for error in errors if error is not None]
    return max(checked) if len(checked) == len(errors) else None


def _shared_stages(a: MeasuredRun, b: MeasuredRun) -> set[str]:
    """Return the operations that both do on as many GPUs of one kind, in the same way."""
    if a.run.costs != b.run.costs:
        return set()
    (rollout, trainer), theirs = ((each.run.rollout, each.run.trainer) for each in (a, b))
    shared = set()
    if _is_alike(a, rollout, b, theirs[0]):
        shared.add("decode")
    if _is_alike(a, trainer, b, theirs[1]):
        shared.add("train")
    return shared


def _is_alike(
    a: MeasuredRun,
    ours: RolloutConfig | TrainerConfig,
    b: MeasuredRun,
    theirs: RolloutConfig | TrainerConfig,
) -> bool:
    """Whether two sides have the same section, whatever their pools are called, and the same GPU."""
    return a.gpu(ours.pool) == b.gpu(theirs.pool) and ours == replace(theirs, pool=ours.pool)


def _break_even_prices(
    a: MeasuredRun, b: MeasuredRun, cost_ratio: Known
) -> Iterator[BreakEvenPrice]:
    """Yield for each pool the price of the GPUs that A rents beyond B: what a token costs is linear in it."""
    for pool, num_gpus in a.gpus.items():
        has = b.gpus.get(pool, 0.0) if pool in b.gpus and a.gpu(pool) == b.gpu(pool) else 0.0
        if num_gpus - has > EQUAL:
            yield _break_even_price(a, pool, num_gpus - has, cost_ratio)


def _break_even_price(
    a: MeasuredRun, pool: str, num_gpus: float, cost_ratio: Known
) -> BreakEvenPrice:
    price = a.price(pool)
    slope = a.dollars_per_second * SECONDS_PER_HOUR / num_gpus
    wanted, interval = price + slope * (1 / cost_ratio.value - 1), None
    if cost_ratio.interval is not None:
        least, most = cost_ratio.interval
        interval = price + slope * (1 / most - 1), price + slope * (1 / least - 1)
    return BreakEvenPrice(
        pool=pool,
        gpu=a.gpu(pool),
        num_gpus=num_gpus,
        price=price,
        break_even=Known(value=wanted, interval=interval) if wanted >= 0 else None,
    )
