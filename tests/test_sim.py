"""The simulated hardware against closed forms, and against a replica stepped token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from random import Random

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    Event,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    Step,
    Train,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.handling import Handling
from streamrl.sim.replica import Replica
from streamrl.sim.trainer import Trainer
from streamrl.sim.transfer import Transfer
from streamrl.sim.verifier import Verifier
from streamrl.sim.world_interface import Disruptions, SimRollout
from tests.runs import checked_world, run_with_capacity, small_run
from tests.step_by_step import End, Job, StepByStep
from tests.traces import check_every_rollout_is_accounted_for

RUN = small_run({"rollout.max_running": 8})
RESERVING = small_run(
    {"rollout.max_running": 8, "rollout.max_tokens": 130, "rollout.admission": "reserve"}
)
COSTS = Costs.load(RUN)


class Bench:
    """One piece of hardware alone: a world that decides nothing and notes what is emitted, and when."""

    def __init__(self, run: Run = RUN, costs: Costs = COSTS) -> None:
        self.run_file, self.costs = run, costs
        self.env = simpy.Environment()
        self.cores, self.disruptions = Cores(self.env), Disruptions()
        self.handling = Handling(self.env, self.cores.time_of("handling"), costs.handling_time)
        self.events: list[tuple[float, Event]] = []
        self.jobs: dict[int, Job] = {}
        self.rollouts: dict[int, SimRollout] = {}
        self.replica = Replica(self, 0, 0)

    def emit(self, event: Event) -> None:
        """Note an event; what was aborted is sent again at once."""
        self.events.append((self.env.now, event))
        if isinstance(event, Generated) and event.finish == "aborted":
            self.send(self.jobs[event.rollout], event.tokens)

    def send(self, job: Job, prefix: int = 0) -> None:
        """Send a job to the replica."""
        self.jobs[job.rollout] = job
        self.rollouts[job.rollout] = SimRollout(job.group, job.prompt_tokens, job.length)
        self.replica.generate(Generate(job.rollout, 0, job.priority, prefix))

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at `time`."""

        def wait() -> Generator[simpy.Event, None, None]:
            yield self.env.timeout(time)
            action()

        self.env.process(wait())

    def run(self, jobs: list[Job]) -> Bench:
        """Send each job at its time, and go on until nothing is left."""
        for job in jobs:
            self.at(job.time, lambda job=job: self.send(job))
        self.env.run()
        return self

    @property
    def ends(self) -> list[End]:
        """Every end of a rollout."""
        return [
            End(e.rollout, e.tokens, e.finish == "aborted", time)
            for time, e in self.events
            if isinstance(e, Generated)
        ]


def decode_time(num_running: int, prompt_tokens: int, length: int) -> float:
    """Sum the decode steps of equal rollouts; prefill has made the first token."""
    curve = COSTS.decode
    return sum(
        curve.step_time(num_running, num_running * (prompt_tokens + done))
        for done in range(1, length)
    )


def equal_jobs(num: int, prompt_tokens: int = 40, length: int = 30) -> list[Job]:
    return [Job(0.0, r, r, r, prompt_tokens, length) for r in range(num)]


# A replica ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 8])
def test_equal_rollouts_take_their_prefill_and_one_decode_step_for_each_further_token(
    num: int,
) -> None:
    ends = Bench().run(equal_jobs(num, prompt_tokens=40, length=30)).ends
    prefill_time = COSTS.prefill_time(num * 40, num * 40 * 40 / 2, 0)
    expected = prefill_time + decode_time(num, prompt_tokens=40, length=30)
    assert [end.time for end in ends] == pytest.approx([expected] * num, rel=1e-12)


def some_jobs(rng: Random, num: int, siblings: int) -> list[Job]:
    prompts = [rng.randint(5, 60) for _ in range(num)]
    return [
        Job(
            rng.choice([0.0, rng.uniform(0, 1)]),
            rollout,
            rollout // siblings,
            rng.choice([rollout, -rng.randint(0, 99)]),
            prompts[rollout // siblings],
            rng.randint(1, 120),
        )
        for rollout in range(num)
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(1, 4),
    st.sampled_from([190, 400, 700, 10**6]),
    st.booleans(),
)
def test_a_replica_agrees_with_one_stepped_token_by_token(
    seed: int, siblings: int, capacity: int, reserves: bool
) -> None:
    rng = Random(seed)
    jobs = some_jobs(rng, rng.randint(1, 14), siblings)
    aborts = sorted((rng.uniform(0, 1.5), rng.choice(jobs).rollout) for _ in range(4))
    load = (rng.uniform(0, 1.5), LoadWeights(0, 1, rng.choice([True, False])))
    costs = replace(COSTS, kv_capacity=capacity)
    bench = Bench(RESERVING if reserves else RUN, costs)
    for time, rollout in aborts:
        bench.at(time, lambda rollout=rollout: bench.replica.abort(rollout))
    bench.at(load[0], lambda: bench.replica.load(load[1]))
    bench.run(jobs)
    reserved = RESERVING.rollout.max_tokens if reserves else None
    naive = StepByStep(costs, 8, list(jobs), aborts, load, reserved).run()
    assert sorted(bench.ends) == [
        (r, tokens, aborted, pytest.approx(time, rel=1e-9))
        for r, tokens, aborted, time in sorted(naive.ends)
    ]
    loaded_at = [time for time, event in bench.events if isinstance(event, WeightsLoaded)]
    assert loaded_at == [pytest.approx(naive.loaded_at, rel=1e-9)]
    assert bench.replica.num_preempted == naive.num_preempted
    assert not (reserves and naive.num_preempted)


def test_a_full_kv_cache_preempts_and_every_rollout_still_finishes() -> None:
    costs = replace(COSTS, kv_capacity=300)
    bench = Bench(costs=costs).run(equal_jobs(6, prompt_tokens=40, length=120))
    assert bench.replica.num_preempted > 0
    assert sorted(end.rollout for end in bench.ends) == list(range(6))
    assert all(end.tokens == 120 for end in bench.ends)


def test_a_run_with_hardly_any_kv_cache_preempts_and_accounts_for_every_rollout() -> None:
    world = checked_world(
        run_with_capacity(
            330, {"workload.max_prompt_tokens": 64, "workload.lengths.scale": 0.02, "seed": 1}
        )
    )
    assert world.costs.kv_capacity < 340
    check_every_rollout_is_accounted_for(world.run())
    assert sum(replica.num_preempted for replica in world.replicas.values()) > 0


def test_the_prompt_of_a_group_is_prefilled_once_on_a_replica() -> None:
    bench = Bench().run([Job(0.0, r, 0, r, 1000, 5) for r in range(4)])
    (prefill_time,) = {e.prefill_time for _, e in bench.events if isinstance(e, Generated)}
    assert prefill_time == pytest.approx(COSTS.prefill_time(1003, 1000 * 1000 / 2, 0))


def test_a_load_with_drain_waits_for_what_runs_and_goes_before_what_waits() -> None:
    bench = Bench()
    bench.at(0.1, lambda: bench.replica.load(LoadWeights(0, 1, drain=True)))
    late = Job(0.2, 9, 9, 9, 40, 30)
    bench.run([*equal_jobs(2), late])
    drained_at = COSTS.prefill_time(80, 1600.0, 0) + decode_time(2, 40, 30)
    times = {type(e): (t, e) for t, e in bench.events}
    assert times[WeightsLoaded][0] == pytest.approx(drained_at + COSTS.load_time)
    last_time, last = times[Generated]
    alone = COSTS.prefill_time(40, 800.0, 0) + decode_time(1, 40, 30)
    assert last_time == pytest.approx(drained_at + COSTS.load_time + alone)
    assert isinstance(last, Generated)
    assert (last.rollout, last.version) == (9, 1)


def test_a_load_in_flight_pauses_what_runs_for_exactly_its_time() -> None:
    undisturbed = Bench().run(equal_jobs(3)).ends
    bench = Bench()
    bench.at(0.1, lambda: bench.replica.load(LoadWeights(0, 1, drain=False)))
    for end, before in zip(bench.run(equal_jobs(3)).ends, undisturbed, strict=True):
        assert end.time == pytest.approx(before.time + COSTS.load_time, rel=1e-12)
    assert {e.version for _, e in bench.events if isinstance(e, Generated)} == {0}


def test_a_rollout_that_is_aborted_while_it_waits_is_sent_again_and_keeps_its_place() -> None:
    bench = Bench(small_run({"rollout.max_running": 1}))
    bench.at(0.05, lambda: bench.replica.abort(1))
    ends = bench.run(equal_jobs(3)).ends
    assert [(e.rollout, e.tokens, e.is_aborted) for e in ends] == [
        (1, 0, True),
        (0, 30, False),
        (1, 30, False),
        (2, 30, False),
    ]


def test_a_stopped_replica_emits_nothing_more() -> None:
    bench = Bench()
    bench.at(0.1, bench.replica.stop)
    assert not bench.run(equal_jobs(3)).events


def test_a_rollout_is_cut_at_the_most_tokens_it_may_have() -> None:
    bench = Bench().run([Job(0.0, 0, 0, 0, 40, 256), Job(0.0, 1, 1, 1, 40, 255)])
    finishes = {e.rollout: e.finish for _, e in bench.events if isinstance(e, Generated)}
    assert finishes == {0: "length", 1: "stop"}


def test_littles_law_holds_on_a_steady_run() -> None:
    rng, now, jobs = Random(7), 0.0, []
    run = small_run({"rollout.max_running": 64})
    for rollout in range(3000):
        now += rng.expovariate(20.0)
        jobs.append(Job(now, rollout, rollout, rollout, 40, rng.randint(20, 180)))
    bench = Bench(run, Costs.load(run))
    seen: list[int] = []
    for tick in range(1, 1400):
        bench.at(tick / 10, lambda: seen.append(sent_and_not_ended(bench)))
    bench.run(jobs)
    run_times = [e.run_time for _, e in bench.events if isinstance(e, Generated)]
    mean_time = sum(run_times) / len(run_times)
    assert sum(seen) / len(seen) == pytest.approx(20.0 * mean_time, rel=0.05)


def sent_and_not_ended(bench: Bench) -> int:
    return len(bench.jobs) - len(bench.events)


# Trainer, link, verifiers, whole runs -------------------------------------------------------------


@pytest.mark.parametrize("num_micro", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_micro_batches_take_turns_of_the_slowest_stage_and_a_fill_of_the_others(
    num_micro: int, stages: int
) -> None:
    changes = {"trainer.tensor_parallel": 1, "trainer.pipeline_parallel": stages}
    training = TrainingCosts.load(resolve(small_run(changes)))
    micro = [(2000, 1000.0**2, 4000)]  # two rollouts
    times = training.stages.forward_times(micro) + training.stages.backward_times(micro)
    *others, slowest = times[0]
    assert slowest > max(others, default=0.0)  # it has the output head
    total = training.train_time([1000] * (2 * num_micro))
    sent = 2 * (stages - 1) * 2000 * training.stages.send  # there and back
    assert total == pytest.approx(num_micro * slowest + sum(others) + sent)


def test_only_passes_that_follow_others_without_a_break_find_the_pipeline_full() -> None:
    run = small_run({"trainer.tensor_parallel": 1, "trainer.pipeline_parallel": 4})
    costs, lengths = Costs.load(run), [1000, 1000]
    bench = Bench(run, costs)
    bench.rollouts = {rollout: SimRollout(rollout, 400, 600) for rollout in range(6)}
    trainer = Trainer(bench, 0, costs)
    trainer.train(Train((0, 1), 0))
    trainer.train(Train((2, 3), 0))
    trainer.step(Step(1, (0, 1), 0))
    bench.at(1000.0, lambda: trainer.train(Train((4, 5), 0)))
    bench.at(1000.0, lambda: trainer.step(Step(2, (2,), 0)))
    bench.env.run()
    first, second, stepped, third, late = (time for time, _ in bench.events)
    line = costs.line()
    taken = [line.train(lengths, 0.0), line.train(lengths, first)]
    assert [first, second] == pytest.approx(taken)
    fresh, together = (late - 1000.0 - costs.step_time, stepped - costs.step_time)
    assert together == pytest.approx(line.finish(0.0))
    assert (third - 1000.0, fresh) == pytest.approx((first, costs.training.train_time(lengths)))
    assert together < 1.5 * fresh


def test_a_push_takes_its_time_and_the_next_one_waits_for_it() -> None:
    bench = Bench()
    transfer = Transfer(bench)
    transfer.push(PushWeights(1, 0))
    transfer.push(PushWeights(2, 0))
    bench.env.run()
    sync = COSTS.sync
    times = [time for time, _ in bench.events]
    assert times == pytest.approx([sync.push_time, 2 * sync.push_time])
    assert [event for _, event in bench.events] == [
        WeightsPushed(1, sync.wire_bytes),
        WeightsPushed(2, sync.wire_bytes),
    ]


@pytest.mark.parametrize(("num", "workers"), [(1, 1), (9, 3), (10, 3), (2, 5)])
def test_verifier_workers_share_rollouts_evenly(num: int, workers: int) -> None:
    run = small_run({"verifier.workers": workers, "verifier.time": "1500 ms"})
    bench = Bench(run)
    verifier = Verifier(bench)
    for rollout in range(num):
        verifier.verify(Verify(rollout))
    bench.env.run()
    assert len(bench.events) == num
    assert bench.events[-1][0] == pytest.approx(-(-num // workers) * 1.5)
