"""Small runs that differ in everything a policy can tell, and what goes wrong while they last."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.engine.messages import Event, Failed, Generate, Generated, Stop, Verified, Verify
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.systems import build_policies, build_state
from streamrl.engine.trace import Trace
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.policies_config import WeightSyncName
from streamrl.runfile.roles_config import AlgorithmChanges, SecondaryTrainerConfig
from streamrl.runfile.simulation_config import FailuresConfig
from streamrl.runfile.units import Duration
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import (
    CheckedEngine,
    lose_replica_at,
    lose_trainer_at,
    of,
    run_with_capacity,
    small_run,
)

Losses = list[tuple[float, int]]
"""Seconds at which a replica dies, and which of those that are up then."""

losses: st.SearchStrategy[Losses] = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(0, 3)), max_size=6
)
failures = st.frozensets(st.integers(0, 60), max_size=12)
"""Which rollouts and rewards fail, counted in the order in which they end."""


@st.composite
def runs(
    draw: st.DrawFn,
    consumption: str | None = "strict-fifo",
    only_system: str | None = None,
    followers: list[dict[str, Any]] | None = None,
    late: bool = False,
) -> Run:
    """Return runs of every system with any dispatch, order, migration, degree and number of replicas.

    With `late` weights may be pushed seldom, groups drawn too many, and given up where they are late.
    """
    system = only_system or draw(st.sampled_from(sorted(SYSTEMS)))
    consumed = consumption or draw(st.sampled_from(["strict-fifo", "greedy"]))
    changes: dict[str, Any] = {
        "seed": draw(st.integers(0, 999)),
        "policies.system": system,
        "policies.consumption": consumed,
        **draw(WORKLOADS),
        **draw(HARDWARE),
        **draw(GENERATION),
    }
    if followers:
        changes |= {
            "model.name": "qwen2.5-1.5b",
            "cluster.pools.near.nodes": 3,
            "cluster.pools.far.nodes": 3,
            "followers": followers,
        }
    if system == "fully-async":
        changes["policies.max_staleness"] = draw(st.integers(0, 3))
    if system != "colocated" and draw(st.booleans()):
        changes["policies.weight_sync"] = draw(st.sampled_from(sorted(get_args(WeightSyncName))))
    if system != "colocated" and draw(st.booleans()):
        changes["policies.streaming"] = draw(st.sampled_from(["stream", "whole-batch"]))
    if late:
        changes |= draw(_late(changes))
    if changes.get("policies.weight_sync") != "between-batches" and draw(st.booleans()):
        changes |= COUNTING_PLACES
        if changes["policies.migration"] == "overrun":
            changes["policies.migration"] = "consolidate"
    is_tight = draw(st.booleans())
    return run_with_capacity(330, changes) if is_tight else small_run(changes)


@st.composite
def _late(draw: st.DrawFn, changes: dict[str, Any]) -> dict[str, Any]:
    """Return how often weights are pushed, parts of a step ahead, and what becomes of late groups, as far as a run may have it."""
    system, prompts = changes["policies.system"], changes["algorithm.prompts_per_step"]
    found: dict[str, Any] = {}
    if system != "colocated":
        found["policies.sync_every"] = draw(st.integers(1, 3))
    if system == "fully-async" and prompts > 1:
        found["policies.max_staleness"] = draw(st.sampled_from([0, 0.5, 1.5, 2]))
    if changes["policies.consumption"] == "greedy":
        found["policies.over_staleness"] = draw(st.sampled_from(["wait", "drop"]))
        found["policies.left_over"] = draw(st.sampled_from(["drop", "keep"]))
        if system != "one-step-async" and prompts > 1:
            found["policies.oversampling"] = draw(st.sampled_from([1.0, 1.5, 2.0]))
    return found


COUNTING_PLACES = {
    "policies.concurrency": "kv-pressure",
    "policies.dispatch": "least-loaded",
    "policies.group_placement": "split",
}
WORKLOADS = st.fixed_dictionaries(
    {
        "algorithm.name": st.sampled_from(["grpo", "ppo", "reinforce++"]),
        "algorithm.group_size": st.integers(2, 4),
        "algorithm.prompts_per_step": st.integers(1, 6),
        "algorithm.dynamic_sampling": st.booleans(),
        "algorithm.max_gen_batches": st.integers(1, 3),
        "workload.informative_share": st.sampled_from([0.0, 0.4, 1.0]),
        "workload.max_prompt_tokens": st.just(64),
        "workload.lengths.ranker": st.sampled_from(["oracle", "recall", "none"]),
    }
).map(
    lambda changes: (
        changes
        if changes["algorithm.name"] == "grpo"
        else changes | {"algorithm.dynamic_sampling": False}
    )
)
HARDWARE = st.fixed_dictionaries(
    {
        "rollout.replicas": st.integers(1, 4),
        "rollout.tensor_parallel": st.sampled_from([1, 2]),
        "rollout.max_running": st.integers(1, 6),
        "rollout.start_time": st.sampled_from(["0 s", "700 ms"]),
        "trainer.data_parallel": st.sampled_from([1, 2]),
        "trainer.micro_batch": st.integers(1, 3),
        "trainer.start_time": st.sampled_from(["0 s", "3 s"]),
        "verifier.time": st.sampled_from(["0 s", "30 ms", "2 s"]),
        "verifier.workers": st.integers(1, 3),
    }
)
GENERATION = st.fixed_dictionaries(
    {
        "policies.dispatch": st.sampled_from(
            ["least-loaded", "round-robin", "random", "skewness-aware"]
        ),
        "policies.skew_objective": st.sampled_from(["max", "sum", "drain"]),
        "policies.order": st.sampled_from(["fifo", "longest-first"]),
        "policies.group_placement": st.sampled_from(["split", "together"]),
        "policies.migration": st.sampled_from(["none", "consolidate", "overrun"]),
        "policies.max_attempts": st.integers(1, 3),
    }
).map(
    lambda changes: (
        changes | {"policies.dispatch": "skewness-aware"}
        if changes["policies.migration"] == "overrun"
        else changes
    )
)


@st.composite
def runs_of_several(draw: st.DrawFn) -> Run:
    """Return runs as `runs` does, with trainers that follow, verifiers on GPUs, and trainers that fail."""
    run = draw(runs(consumption=None))
    pools = {**run.cluster.pools, "third": PoolConfig(gpu="h800", nodes=2)}
    followers = draw(st.lists(FOLLOWERS, min_size=1, max_size=2))
    return replace(
        run,
        cluster=replace(run.cluster, pools=pools),
        followers=tuple(
            replace(each, name=f"follower {number}")
            for number, each in enumerate(followers, start=1)
        ),
        verifier=replace(run.verifier, pool="third", gpus_per_worker=1),
        failures=draw(
            st.sampled_from([FailuresConfig(), FailuresConfig(per_gpu_day=2000.0, trainers=True)])
        ),
        execute=ExecuteConfig(checkpoint_every=draw(st.integers(1, 3))),
    )


FOLLOWERS = st.builds(
    SecondaryTrainerConfig,
    name=st.just(""),
    pool=st.just("third"),
    data_parallel=st.integers(1, 2),
    tensor_parallel=st.just(4),
    micro_batch=st.integers(1, 3),
    start_time=st.sampled_from([Duration(0.0), Duration(2.0)]),
    algorithm=st.builds(AlgorithmChanges, prompts_per_step=st.integers(1, 6)),
    backlog=st.integers(1, 2),
    every=st.integers(1, 2),
    max_staleness=st.sampled_from([None, 0, 1]),
)


class FaultyWorld(SimWorld):
    """A simulated world whose engine checks itself, and in which some rollouts and rewards fail at their end."""

    def __init__(self, run: Run, faults: Collection[int] = ()) -> None:
        costs = Costs.load(run)
        run = fill_policies(run, costs)
        super().__init__(run, costs, SimulatedWorkload(run))
        self.engine = CheckedEngine(build_state(run), build_policies(run))
        self._faults = faults
        self._num_ended = 0

    def emit(self, event: Event) -> None:
        """Tell of a failure instead, where it is the turn of one."""
        match event:
            case Generated(rollout, finish="stop" | "length"):
                replica = self.engine.state.rollouts[rollout].replica
                assert replica is not None
                event = self._replace(event, Failed(Generate(rollout, replica.id, 0), "broken"))
            case Verified(rollout):
                event = self._replace(event, Failed(Verify(rollout), "no reward"))
            case _:
                pass  # never fails here
        super().emit(event)

    def _replace(self, event: Event, failure: Failed) -> Event:
        self._num_ended += 1
        return failure if self._num_ended - 1 in self._faults else event


def simulate(
    run: Run,
    lost: Losses | None = None,
    faults: Collection[int] = (),
    trainers: Losses | None = None,
    checkpoint_every: int = 50,
) -> Trace:
    """Simulate with an engine that checks itself after every event, and with what goes wrong."""
    execute = replace(run.execute, checkpoint_every=checkpoint_every)
    world = FaultyWorld(replace(run, execute=execute), faults)
    for time, which in trainers or []:
        lose_trainer_at(world, time, which)
    for time, which in lost or []:
        lose_replica_at(world, time, which)
    return world.run()


def has_stopped_early(trace: Trace) -> bool:
    """Whether the run gave up before its last step."""
    return any(of(Stop, entry.commands) for entry in trace.entries)
