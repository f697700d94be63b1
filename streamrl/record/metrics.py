"""Compute every figure of a run from its trace, for simulated and executed runs alike.

A trace is read in blocks. A trace in memory is one block. Large files and long simulations have many
blocks, and the entries of a block are freed after it is read. Memory then holds a few numbers for each
step and the running activities.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from streamrl.engine.messages import Interrupted, Lend, Stepped, Stop
from streamrl.engine.trace import Trace, blaming_damage
from streamrl.engine.trainer_side import LEADER
from streamrl.record.attribution import (
    RECOMPUTED,
    TRAINER,
    UNDERFILLED,
    Attribution,
    AttributionReader,
    SidesAttribution,
)
from streamrl.record.band import (
    Band,
    ModelError,
    StepBasis,
    band_of,
    ends_of,
    read_basis,
    read_model_error,
)
from streamrl.record.charges import PaidGpus, PaidRanks, PaidReplicas, Pushes, egress_dollars
from streamrl.record.decode_efficiency import YieldSource
from streamrl.record.episode_figures import EpisodeMetrics, EpisodeReader
from streamrl.record.ledger import Ledger, LedgerReader
from streamrl.record.long_column import LongColumn
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.record.rollout_flow import Flow
from streamrl.record.selection import SelectionMetrics
from streamrl.record.steady_state import (
    LeaderSteps,
    Speed,
    Steady,
    count_steps,
    describe_unfinished,
    find_steady_of,
    read_steps,
    steady_state_caveats,
)
from streamrl.record.step_stages import stage_seconds
from streamrl.record.uncertainty import (
    OPERATION_OF_ACTIVITY,
    Uncertainty,
    read_uncertainty,
    unmeasured_warning,
)
from streamrl.record.whole_run import WholeRun, make_whole_run, whole_time, with_bill
from streamrl.runfile.formatting import (
    format_count,
    format_dollars,
    format_share,
    format_step_time,
    listing,
    long_dollars,
    long_time,
)
from streamrl.runfile.gpu_pools import sides_of, trainer_names
from streamrl.runfile.notebook import frame_of, html_table
from streamrl.runfile.recorded_numbers import Count, NotNegative
from streamrl.runfile.roles_config import SecondaryTrainerConfig

if TYPE_CHECKING:
    from pandas import DataFrame

RATIOS = (
    "step_time",
    "throughput",
    "goodput",
    "samples_per_second",
    "cost_per_step",
    "cost_per_million_tokens",
)
"""Metrics of speed and cost, which comparisons show with a relative error."""


class PaceReader(MessageReader):
    """Reads the inputs of `Speed` from a trace: steps, rollouts, paid replicas and pushes."""

    def __init__(self, trace: Trace) -> None:
        """Read the header of a trace; pass its entries to `read`."""
        self.trace = trace
        self.flow = Flow(trace.run.num_trainers, trace.joined)
        self.replicas = PaidReplicas(trace.run.rollout.num_replicas, trace.run.lent)
        self.ranks = PaidRanks(trace.run.trainer.data_parallel)
        self.pushes = Pushes()
        self.stopped_for = ""
        """Why the run stopped or was interrupted; empty if it was not."""
        self._is_interrupted = False

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handlers of all messages that `Speed` depends on."""
        for reader in (self.flow, self.replicas, self.ranks, self.pushes):
            yield from reader.handlers()
        yield {Stop: self._stop, Interrupted: self._interrupt}

    def _stop(self, command: Stop, _: float) -> None:
        if not self._is_interrupted:
            self.stopped_for = command.reason

    def _interrupt(self, event: Interrupted, _: float) -> None:
        self.stopped_for, self._is_interrupted = event.reason, True

    def settle(self) -> None:
        """Add up what no later entry can change, and free its memory. Call this between blocks."""

    def finish(self) -> None:
        """Add up the rest. Call this after the last block."""


class RunReader(PaceReader):
    """Reads the inputs of all `Metrics`: those of `PaceReader`, the attribution and the ledger."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.attribution = AttributionReader(trace)
        self.ledger = LedgerReader(trace)
        self.episodes = EpisodeReader(trace.run.algorithm.group_size)
        self.lent_at = LongColumn[float]("d")
        """Instants at which GPUs of the primary trainer were lent, in seconds."""

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handlers of all messages that `Metrics` depend on."""
        yield from self.ledger.handlers()
        yield from super().handlers()
        yield from self.attribution.handlers()
        if self.trace.run.environment is not None:
            yield from self.episodes.handlers()
        yield {Stepped: self._mark_step, Lend: lambda _, time: self.lent_at.append(time)}

    def end_block(self, now: float) -> None:
        """Set the instant of the last entry."""
        super().end_block(now)
        self.attribution.end_block(now)

    def _mark_step(self, event: Stepped, time: float) -> None:
        if event.trainer == LEADER:
            self.attribution.mark([time])

    def settle(self) -> None:
        """See `PaceReader`."""
        self.attribution.settle()

    def finish(self) -> None:
        """See `PaceReader`."""
        self.attribution.finish()


def read_run(trace: Trace) -> RunReader:
    """Read a whole trace."""
    reader = RunReader(trace)
    for number, block in enumerate(trace.blocks()):
        if number:
            reader.settle()
        reader.read(block)
    reader.finish()
    return reader


VERIFY, SYNC, SWITCH, RESIZE = "verify", "sync", "switch", "resize"
"""Names of activities that are also operations with a tier of their own."""

TRAINING = ("score", "train")
GENERATING = ("prefill", RECOMPUTED, "decode", UNDERFILLED)


class SideMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the GPU-seconds of one side went; busy and idle shares together sum to 1."""

    busy: dict[str, float]
    """Share by activity."""
    idle: dict[str, float]
    """Share by cause."""


class TrainerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one trainer."""

    name: str
    num_steps: int
    mean_step_time: float | None
    """Mean seconds of a step in the counted time; None if it made no step then. There is no median, because the steps
    of a secondary trainer come in bursts."""
    trained: int
    """Rollouts in its steps, from the first step on."""
    goodput: float
    """Output tokens trained on per second, in the counted time."""
    staleness: dict[int, int]
    """Rollouts by how many versions they were behind the newest version of the primary trainer when
    it trained on them.
    """
    lost: dict[str, int]
    """Rollouts that it never trains on, by reason."""


class LendingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How often GPUs of the primary trainer generated, over the counted steps."""

    steps: Count
    """Counted steps."""
    num_lent: Count
    """Those in which GPUs were lent."""
    generating: NotNegative
    """Share of the trainer's GPU-seconds in which they generated."""
    switching: NotNegative
    """Share in which they changed sides."""


class BorrowingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How often GPUs of replicas trained, over the counted steps."""

    steps: Count
    """Counted steps."""
    num_borrowed: Count
    """Those in which GPUs were borrowed."""
    training: NotNegative
    """Share of all seconds in which they were among the trainer's ranks, the switches of ranks included."""


class ResizeMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the primary trainer's data-parallel ranks."""

    step: Count
    """The first step with these ranks."""
    data_parallel: Count
    seconds: NotNegative
    """Seconds in which the trainer waited for it."""


class Metrics(Speed, frozen=True, kw_only=True):
    """The figures for tables, JSON and comparisons."""

    world: str
    num_steps: int
    total_time: float
    """Seconds from the first to the last entry."""
    whole_run: WholeRun | None
    """Time and cost of all `algorithm.steps`; an estimate if not all were recorded. None for an
    unfinished run.
    """
    num_gpus: dict[str, int]
    """GPUs allocated at the start by side, each once: "shared" ones generate and train in turn."""
    busy: dict[str, float]
    """Share of all GPU-seconds by activity; "underfilled" is decode time that full batches would
    not need.
    """
    idle: dict[str, float]
    """Share of all GPU-seconds, by cause; `busy` and `idle` sum to 1."""
    underfilled_from: YieldSource = "unknown"
    """Source of the throughput of a full batch. If it is "unknown", `busy` has no "underfilled", and "decode" is all
    decode time."""
    sides: dict[str, SideMetrics]
    """The same for each side; GPUs shared by replicas and the primary trainer are one side,
    "shared".
    """
    stages: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds of a mean step in each stage: generation, score, train, sync. Those of replicas and of
    the trainer may overlap.
    """
    staleness: dict[int, int]
    """Rollouts in counted steps, by how many versions they were behind when the primary trainer
    trained on them.
    """
    rewards: list[float]
    """Mean reward of each step's rollouts."""
    dropped: dict[str, int]
    """Rollouts that the primary trainer never trained on, by reason."""
    lending: LendingMetrics | None = None
    """None without `[lending]`."""
    borrowing: BorrowingMetrics | None = None
    """None without `trainer.borrows`. Then `resizes` is empty."""
    resizes: list[ResizeMetrics] = msgspec.field(default_factory=list)
    """All changes of the primary trainer's ranks, in order."""
    wasted: dict[str, float] = msgspec.field(default_factory=dict)
    """Share of the output tokens generated in counted steps that the primary trainer never trained
    on, by reason.
    """
    trainers: list[TrainerMetrics]
    """Every trainer, the primary one first; all other step figures are those of the primary
    trainer.
    """
    tiers: dict[str, float]
    """Share of the seconds in which GPUs work or wait for weights, by tier: measured, composed or roofline. Verifiers
    count only if the seconds of a reward model are composed."""
    ledger: Ledger
    """The ledger of all recorded rollouts and versions."""
    uncertainty: Uncertainty | None = None
    """Errors of simulated seconds, by stage and for the step; None for a real run."""
    model_error: ModelError | None = None
    """Range of true to simulated seconds; None for a real run. All bands include it."""
    step_time_band: Band | None = None
    """Range in which `step_time` may truly be, with sampling error and model error. For a real run it is the figure
    itself."""
    cost_per_step_band: Band | None = None
    cost_per_million_tokens_band: Band | None = None
    selection: SelectionMetrics | None = None
    """Generated rollouts compared with those that were trained on."""
    episodes: EpisodeMetrics | None = None
    """Turns, tools and cache of episodes; None without an environment."""

    def __repr__(self) -> str:
        figures = ", ".join(figure for name, figure in self.summary() if name in IN_SHORT)
        return f"<Metrics of a {self.world} run: {figures}>"

    def _repr_html_(self) -> str:
        """Return the main figures as a table for a notebook."""
        notes = [self.note if self.model_error is None else self.model_error.note, self.note]
        title = f"Metrics of a {self.world} run"
        return html_table(title, self.summary(), notes=dict.fromkeys(notes))

    def summary(self) -> Iterator[tuple[str, str]]:
        """Yield the main figures with their bands, each with its name."""
        whole = self.whole_run
        if whole is None:
            yield "whole run", f"not finished: it {self.unfinished}"
        else:
            yield "steps", f"{whole.steps:,} steps"
            if whole.dollars:
                yield "cost", long_dollars(whole.dollars, band=ends_of(whole.dollars_band))
            yield "time", long_time(whole.wall_time, band=ends_of(whole.wall_time_band))
        step_time = format_step_time(self.step_time, None, ends_of(self.step_time_band))
        yield "step", f"{step_time} a step"
        yield "throughput", f"{format_count(self.throughput)} tokens/s"
        if self.cost_per_step:
            band = ends_of(self.cost_per_million_tokens_band)
            yield "million tokens", format_dollars(self.cost_per_million_tokens, band)
        yield "GPUs", listing([f"{count} {side}" for side, count in self.num_gpus.items()])
        for name, shares in (("busy", self.busy), ("idle", self.idle)):
            parts = (f"{what} {format_share(part)}" for what, part in shares.items() if part > 0)
            yield name, f"{format_share(sum(shares.values()))}: {', '.join(parts)}"
        yield "seconds from", ", ".join(f"{format_share(v, 0)} {k}" for k, v in self.tiers.items())

    def to_frame(self, what: Frame = "steps") -> DataFrame:
        """Return a data frame.

        Args:
            what: "steps" has a row for each step: seconds, tokens trained on, and whether the step counts.
                "stages" has a row for each side and activity or cause: its share of the side's GPU-seconds.
                "figures" has a row for each figure of speed and cost, with the ends of its band.

        Raises:
            ValueError: there is no such frame.
        """
        rows = {"steps": self._step_rows, "stages": self._stage_rows, "figures": self._figure_rows}
        if what not in rows:
            raise ValueError(f"what must be one of {', '.join(map(repr, rows))}, got {what!r}")
        return frame_of(rows[what](), FRAMES[what])

    def _step_rows(self) -> Iterator[dict[str, object]]:
        first, last = self.counted_steps
        for step, seconds in enumerate(self.step_times, start=1):
            yield {
                "step": self.steps_before + step,
                "seconds": seconds,
                "tokens": self.step_tokens[step - 1] if self.step_tokens else None,
                "reward": self.rewards[step - 1] if self.world == "real" else None,
                "counts": first <= step <= last,
            }

    def _stage_rows(self) -> Iterator[dict[str, object]]:
        for side, shares in self.sides.items():
            for kind, by_stage in (("busy", shares.busy), ("idle", shares.idle)):
                for stage, share in by_stage.items():
                    yield {"side": side, "kind": kind, "stage": stage, "share": share}

    def _figure_rows(self) -> Iterator[dict[str, object]]:
        whole = self.whole_run
        if whole is not None:
            for name in ("seconds", "wall_time", "dollars"):
                band = getattr(whole, f"{name}_band")
                yield _figure_row(f"whole_run.{name}", getattr(whole, name), band)
        for name in RATIOS:
            yield _figure_row(name, getattr(self, name), getattr(self, f"{name}_band", None))
        yield _figure_row("mean_staleness", self.mean_staleness, None)


IN_SHORT = ("whole run", "steps", "cost", "time", "step")
"""Names of the figures in the line of a run."""
Frame: TypeAlias = Literal["steps", "stages", "figures"]
FRAMES: dict[Frame, tuple[str, ...]] = {
    "steps": ("step", "seconds", "tokens", "reward", "counts"),
    "stages": ("side", "kind", "stage", "share"),
    "figures": ("figure", "value", "low", "high"),
}
"""Columns of each frame."""


def _figure_row(name: str, value: float, band: Band | None) -> dict[str, object]:
    low, high = ends_of(band) or (None, None)
    return {"figure": name, "value": value, "low": low, "high": high}


def measure(trace: Trace, counted_steps: tuple[int, int] | None = None) -> Metrics:
    """Compute every figure of a trace.

    Args:
        trace: the trace of a run.
        counted_steps: first and last step to count; None for the steady state.

    Raises:
        ValueError: the trace has no finished step, or is damaged.
    """
    with blaming_damage(trace):
        return measure_read(read_run(trace), read_steps(trace), counted_steps)


def measure_speed(
    trace: Trace,
    counted_steps: tuple[int, int] | None = None,
    steps: LeaderSteps | None = None,
) -> Speed:
    """Compute the figures of a trace that need only its steps and rollouts. This is faster than `measure`.

    Args:
        trace: the trace of a run.
        counted_steps: first and last step to count; None for the steady state.
        steps: the steps of the primary trainer; read from the trace if None.

    Raises:
        ValueError: the trace has no finished step.
    """
    reader = PaceReader(trace)
    for block in trace.blocks():
        reader.read(block)
    return measure_pace(reader, steps or read_steps(trace), counted_steps)


def measure_read(
    reader: RunReader, steps: LeaderSteps, counted_steps: tuple[int, int] | None = None
) -> Metrics:
    """Compute every figure of a run that was read completely; see `measure`."""
    trace, leader = reader.trace, reader.flow.leader
    speed = measure_pace(reader, steps, counted_steps)
    first, last = speed.counted_steps
    window = leader.window(first, last)
    shares = reader.attribution.between(*window)
    operations = [*_weights(trace.run.followers, shares, trace.facts), *_waits(trace, shares)]
    tiers = _tiers(trace, operations)
    worked = _tiers(trace, _weights(trace.run.followers, shares, trace.facts))
    notes = [note for note in (speed.note, unmeasured_warning(worked)) if note]
    speed = msgspec.structs.replace(speed, note="; ".join(notes))
    error = read_model_error(trace, shares, tiers, _summed(operations))
    return Metrics(
        world=trace.world,
        num_steps=len(speed.step_times),
        total_time=reader.now,
        whole_run=None
        if speed.unfinished
        else make_whole_run(trace, speed, shares, _paid_in_all(reader, speed, window), error),
        num_gpus={side.name: side.num_gpus for side in sides_of(trace.run)},
        busy=shares.whole.busy,
        idle=shares.whole.idle,
        underfilled_from=shares.whole.underfilled_from,
        sides={name: _side(of_side) for name, of_side in shares.sides.items()},
        stages=stage_seconds(
            shares, speed.step_time, [follower.name for follower in trace.run.followers]
        ),
        staleness=dict(sorted(leader.made.staleness(first - 1, last).items())),
        rewards=leader.made.rewards.tolist(),
        dropped=dict(leader.lost),
        lending=None
        if trace.run.lending is None
        else _lending(reader.lent_at, steps.ended_at, (first, last), shares),
        resizes=[
            ResizeMetrics(
                step=bisect_right(steps.ended_at, begin) + 1,
                data_parallel=data_parallel,
                seconds=end - begin,
            )
            for begin, end, data_parallel in reader.ranks.changes
            if not trace.run.trainer.borrows
        ],
        borrowing=None
        if not trace.run.trainer.borrows
        else _borrowing(
            reader.ranks,
            steps.ended_at,
            (first, last),
            window,
            trace.run.trainer.data_parallel,
            trace.run.borrowed_ranks,
        ),
        wasted=_wasted(reader.flow, leader.made.num_tokens[first - 1 : last], window),
        trainers=list(_trainers(trace.run.followers, reader.flow, window)),
        tiers=tiers,
        ledger=reader.ledger.balance(),
        selection=reader.flow.selection.metrics(),
        episodes=reader.episodes.between(*window),
        uncertainty=read_uncertainty(trace, shares),
        model_error=error,
        **bands_of_speed(speed, error)._asdict(),
        **msgspec.structs.asdict(speed),
    )


def _paid(reader: PaceReader, start: float, end: float) -> PaidGpus:
    """Return the paid GPUs of a run, as their mean between two instants in seconds."""
    replicas = reader.replicas
    mean, away = replicas.mean(start, end), replicas.mean_away(start, end)
    return PaidGpus.of(reader.trace.run, mean, away, reader.ranks.mean(start, end))


def _paid_in_all(reader: PaceReader, speed: Speed, window: tuple[float, float]) -> PaidGpus:
    """Return the paid GPUs of a whole run: those of the steps that count as they were, and of `window` in other seconds."""
    steady = _paid(reader, *window)
    time = whole_time(reader.trace.run, speed, is_recorded=reader.trace.world == "real")
    if not time.num_before:
        return steady
    began, ended = reader.flow.leader.window(1, time.num_before)
    return steady.mixed(_paid(reader, began, ended), min(1.0, (ended - began) / time.seconds))


def _lending(
    lent_at: Sequence[float],
    ended_at: Sequence[float],
    counted_steps: tuple[int, int],
    shares: SidesAttribution,
) -> LendingMetrics:
    """Return how often GPUs were lent in the counted steps."""
    first, last = counted_steps
    lent = {bisect_left(ended_at, time) + 1 for time in lent_at}
    own = shares.sides[TRAINER]
    generating = sum(own.busy.get(name, 0.0) for name in GENERATING)
    return LendingMetrics(
        steps=last - first + 1,
        num_lent=sum(first <= step <= last for step in lent),
        generating=generating,
        switching=own.idle.get(SWITCH, 0.0),
    )


def _borrowing(
    ranks: PaidRanks,
    ended_at: Sequence[float],
    counted_steps: tuple[int, int],
    window: tuple[float, float],
    num_own: int,
    num_borrowed: int,
) -> BorrowingMetrics:
    """Return how often the trainer borrowed GPUs in the counted steps, which last for `window` in seconds."""
    first, last = counted_steps
    grown = {bisect_right(ended_at, begin) + 1 for begin, _, now in ranks.changes if now > num_own}
    return BorrowingMetrics(
        steps=last - first + 1,
        num_borrowed=sum(first <= step <= last for step in grown),
        training=(ranks.mean(*window) - num_own) / num_borrowed,
    )


def steady_basis(trace: Trace) -> StepBasis:
    """Return what the mean step of a simulated run consists of, and what its seconds rest on."""
    reader, steps = read_run(trace), read_steps(trace)
    first, last = measure_pace(reader, steps, None).counted_steps
    window = reader.flow.leader.window(first, last)
    return read_basis(trace, reader.attribution.between(*window))


class StepBands(NamedTuple):
    """The bands of the figures of a step, by their keys in `Metrics`."""

    step_time_band: Band
    cost_per_step_band: Band
    cost_per_million_tokens_band: Band


def bands_of_speed(speed: Speed, error: ModelError | None) -> StepBands:
    """Return the bands of the figures of a step. Egress does not grow with seconds.

    Args:
        speed: the figures.
        error: the model error of their seconds; None if a clock measured them, which also leaves no sampling error.
    """
    interval = None if error is None else speed.sampled
    step = band_of(speed.step_time, interval, error)
    egress = speed.egress_per_step
    a_second = (speed.cost_per_step - egress) / speed.step_time
    low, high = (egress + a_second * end for end in (step.low, step.high))
    tokens = speed.cost_per_million_tokens / (speed.cost_per_step or 1.0)
    return StepBands(step, Band(low=low, high=high), Band(low=low * tokens, high=high * tokens))


def measure_pace(
    reader: PaceReader, steps: LeaderSteps, counted_steps: tuple[int, int] | None
) -> Speed:
    """Compute the speed of a run that was read completely; see `measure_speed`."""
    trace, flow, leader = reader.trace, reader.flow, reader.flow.leader
    if not leader.made:
        raise ValueError("the trace has no finished step, so there is nothing to measure")
    steady = _choose(trace, steps, counted_steps)
    first, last = steady.first, steady.last
    began, ended = leader.window(first + 1, last)
    num_tokens = sum(leader.made.num_tokens[first:last])
    num_rollouts = sum(leader.made.num_rollouts[first:last])
    paid = _paid(reader, began, ended)
    dollars = paid.dollars_per_second
    egress = egress_dollars(
        trace.run.cluster.links,
        trace.run.rollout.kinds,
        trace.run.trainer.pool,
        reader.pushes.num_bytes(began, ended),
    )
    lasted = ended - began - sum(steps.held[first:last])
    step_times = leader.step_times()
    if steps.held:
        step_times = [time - held for time, held in zip(step_times, steps.held, strict=True)]
    unfinished = describe_unfinished(trace.run.algorithm.steps, steps.version, reader.stopped_for)
    speed = Speed(
        step_time=steady.step_time,
        step_time_interval=steady.interval,
        median_step_time=median(step_times[first:last]),
        step_times=step_times,
        step_tokens=leader.made.num_tokens.tolist(),
        counted_steps=(first + 1, last),
        steps_before=steps.num_before,
        note=steady_state_caveats(trace, steps, steady, unfinished),
        unfinished=unfinished,
        throughput=(num_tokens + sum(flow.lost_tokens(began, ended).values())) / lasted,
        goodput=num_tokens / lasted,
        samples_per_second=num_rollouts / lasted,
        cost_per_step=steady.step_time * dollars + egress / (last - first),
        egress_per_step=egress / (last - first),
        cost_per_million_tokens=(dollars * lasted + egress) / num_tokens * 1e6
        if num_tokens
        else 0.0,
        mean_staleness=_mean_of(leader.made.staleness(first, last)),
        evaluation_time=steps.evaluation_time,
        num_evaluations=len(steps.evaluation_times),
    )
    time = whole_time(trace.run, speed, is_recorded=trace.world == "real")
    return with_bill(trace.run.cluster, speed, time, paid)


def _wasted(flow: Flow, trained: Sequence[int], window: tuple[float, float]) -> dict[str, float]:
    """Return by reason the share of tokens that were lost, among all tokens trained on or lost."""
    lost = flow.lost_tokens(*window)
    total = sum(trained) + sum(lost.values())
    return {reason: tokens / total for reason, tokens in lost.items()}


def _mean_of(counts: Mapping[int, int]) -> float:
    """Return the mean of numbers, weighted by their counts."""
    return sum(number * times for number, times in counts.items()) / (sum(counts.values()) or 1)


def _choose(trace: Trace, steps: LeaderSteps, counted_steps: tuple[int, int] | None) -> Steady:
    if counted_steps is None:
        return find_steady_of(trace, steps)
    first, last = counted_steps
    return count_steps(steps.durations(), first - 1, last)


def _trainers(
    followers: tuple[SecondaryTrainerConfig, ...], flow: Flow, window: tuple[float, float]
) -> Iterator[TrainerMetrics]:
    """Yield the results of every trainer over the same window of seconds."""
    began, ended = window
    for name, trainer in zip(trainer_names(followers), flow.trainers, strict=True):
        made = trainer.made
        first, last = (bisect_right(made.ended_at, time) for time in window)
        mean_step_time, goodput = None, 0.0
        if last > first:
            since = made.ended_at[first - 1] if first else 0.0
            mean_step_time = (made.ended_at[last - 1] - since) / (last - first)
            goodput = sum(made.num_tokens[first:last]) / (ended - began)
        yield TrainerMetrics(
            name=name,
            num_steps=len(made),
            mean_step_time=mean_step_time,
            trained=sum(made.num_rollouts),
            goodput=goodput,
            staleness=dict(sorted(made.staleness(first, last).items())),
            lost=dict(trainer.lost),
        )


def _side(shares: Attribution) -> SideMetrics:
    return SideMetrics(
        busy={name: share for name, share in shares.busy.items() if share},
        idle={name: share for name, share in shares.idle.items() if share},
    )


def _tiers(trace: Trace, operations: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean share of each tier, weighted by the seconds of each operation."""
    if trace.world == "real":
        return {"measured": 1.0}
    tiers: dict[str, float] = {}
    weights = _summed(operations)
    busy = sum(weights.values()) or 1.0
    for operation, weight in weights.items():
        shares = trace.facts[operation]
        assert isinstance(shares, Mapping), f"a simulation gives shares of tiers for {operation}"
        for tier, share in shares.items():
            tiers[tier] = tiers.get(tier, 0.0) + share * weight / busy
    return tiers


def _summed(operations: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of each operation."""
    weights: dict[str, float] = defaultdict(float)
    for operation, weight in operations:
        weights[operation] += weight
    return weights


def _weights(
    followers: tuple[SecondaryTrainerConfig, ...], shares: SidesAttribution, known: Container[str]
) -> Iterator[tuple[str, float]]:
    """Yield each operation with its share of all GPU-seconds. Secondary trainers have operations of their own.

    Verification is yielded only if its tier is known.
    """
    others = dict.fromkeys(TRAINING, 0.0)
    for secondary in followers:
        if secondary.counts_only:  # it only counts groups, so its seconds have no tier
            continue
        of_side = shares.sides[secondary.name]
        part = of_side.gpu_seconds / (shares.whole.gpu_seconds or 1.0)
        own = {activity: part * of_side.busy[activity] for activity in TRAINING}
        others = {activity: others[activity] + own[activity] for activity in TRAINING}
        yield f"train {secondary.name}", sum(own.values())
    for activity, operation in OPERATION_OF_ACTIVITY.items():
        yield operation, shares.whole.busy.get(activity, 0.0) - others.get(activity, 0.0)
    if VERIFY in known:
        yield VERIFY, shares.whole.busy.get(VERIFY, 0.0)


def _waits(trace: Trace, shares: SidesAttribution) -> Iterator[tuple[str, float]]:
    """Yield the weight sync, and switches of lent GPUs, with the share of GPU-seconds that wait for them.

    Each is yielded only if its tier is known.
    """
    for wait in (SYNC, SWITCH, RESIZE):
        if wait in trace.facts:
            yield wait, shares.whole.idle.get(wait, 0.0)
