"""One of two runs that are set against each other: what its steps took, cost and left idle, one by one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamrl.hardware.profiles import price_of
from streamrl.hardware.tables import Floats
from streamrl.record.against import GpuUse, PairedRun
from streamrl.record.attribution import SHARED, UNDERFILLED
from streamrl.record.leader_steps import read_steps
from streamrl.record.metrics import measure_read
from streamrl.record.rent import gpus_of_sides, gpus_paid
from streamrl.record.run_reader import read_run
from streamrl.record.trace import Trace
from streamrl.record.whole_run import WholeRun, steps_for_one
from streamrl.runfile.sides import SideKind, sides_of
from streamrl.runfile.units import SECONDS_PER_HOUR

DIGITS = 9
"""Of a mean number of replicas, beyond which seconds leave their rounding."""


class MeasuredRun:
    """What is asked of one run: its figures, step by step, over the steps that count."""

    def __init__(self, trace: Trace, counted_steps: tuple[int, int]) -> None:
        first, last = counted_steps
        self.run = trace.run
        reader, steps = read_run(trace), read_steps(trace)
        self.metrics = measure_read(reader, steps, counted_steps)
        self.seconds: Floats = np.array(self.metrics.step_times[first - 1 : last])
        self.tokens: Floats = np.array(self.metrics.step_tokens[first - 1 : last], dtype=float)
        self.longer = steps_for_one(self.run.plan, self.metrics.mean_staleness)
        """Steps that are needed for one whose rollouts lag behind nothing."""
        self.dollars_per_second = self.metrics.cost_per_step / self.metrics.step_time
        window = reader.flow.leader.window(first, last)
        self.num_replicas = round(reader.replicas.mean(*window), DIGITS)
        idle = reader.attribution.idle_of_steps(steps.ended_at)
        sides = {side.name: idle[side.name][first - 1 : last] for side in sides_of(self.run)}
        self.idle: Floats = np.sum(list(sides.values()), axis=0)
        """GPU-seconds of each step."""
        prices = {
            side.name: self.price(side.pool) / SECONDS_PER_HOUR for side in sides_of(self.run)
        }
        self.idle_dollars: Floats = np.sum(
            [idle_of * prices[name] for name, idle_of in sides.items()], axis=0
        )

    def price(self, pool: str) -> float:
        """Return the dollars of one of a pool's GPUs for an hour."""
        return price_of(self.run.cluster.pools[pool])

    def gpu(self, pool: str) -> str:
        """Return the GPU of a pool."""
        return self.run.cluster.pools[pool].gpu

    @property
    def gpus(self) -> Mapping[str, float]:
        """GPUs that are paid for by pool, on average."""
        return gpus_paid(self.run, self.num_replicas)

    @property
    def whole_run(self) -> WholeRun:
        """What all its steps take."""
        assert self.metrics.whole_run is not None, (
            "only runs that finish are set against each other"
        )
        return self.metrics.whole_run

    def describe(self) -> PairedRun:
        """Return the run's own figures."""
        metrics, run = self.metrics, self.run
        return PairedRun(
            step_time=metrics.step_time,
            step_time_interval=metrics.step_time_interval,
            dollars_per_hour=self.dollars_per_second * SECONDS_PER_HOUR,
            cost_per_step=metrics.cost_per_step,
            cost_per_million_tokens=metrics.cost_per_million_tokens,
            throughput=metrics.throughput,
            goodput=metrics.goodput,
            shares_gpus=run.shares_gpus,
            generation=self._use("rollout"),
            training=self._use("trainer"),
            staleness=metrics.mean_staleness,
            idle_gpu_seconds=float(self.idle.mean()),
            idle_cost=float(self.idle_dollars.mean()),
            whole_run=self.whole_run,
            note=metrics.note,
        )

    def _use(self, kind: SideKind) -> GpuUse:
        """Return what GPUs of a kind of side do, of replicas all together; of those that share them of both."""
        if self.run.shares_gpus:
            counts = {SHARED: float(self.run.num_gpus)}
        else:
            sides = gpus_of_sides(self.run, self.num_replicas)
            counts = {s.name: count for s, count in sides if s.kind == kind and not s.trainer}
        num_gpus, of_sides = sum(counts.values()), self.metrics.sides
        idle = sum(count * sum(of_sides[n].idle.values()) for n, count in counts.items())
        lost = sum(count * of_sides[n].busy.get(UNDERFILLED, 0.0) for n, count in counts.items())
        is_known = kind == "trainer" or self.metrics.underfilled_from != "unknown"
        return GpuUse(
            num_gpus=num_gpus,
            idle=idle / num_gpus,
            underfilled=lost / num_gpus if is_known else None,
        )
