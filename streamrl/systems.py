"""Named sets of policies: how generation, training and weight sync take turns.

system          a batch is trained     prompts of step s may start   weights reach the replicas
disaggregated   once it is whole       when s - 1 is loaded          while both sides wait
stream-sync     as rollouts arrive     when s - 1 is loaded          while generation waits
one-step-async  once it is whole       one batch ahead, whole        while both sides wait
stream-async    as rollouts arrive     one step ahead                overlapped; replicas drain
fully-async     as rollouts arrive     max_staleness steps ahead     overlapped, in flight
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from streamrl.config import PoliciesConfig, Run
from streamrl.engine import Engine, Policy
from streamrl.policies.checkpoint import CheckpointEvery
from streamrl.policies.dispatch import LeastLoaded, RoundRobin
from streamrl.policies.order import FirstInFirstOut, LongestFirst, Order
from streamrl.policies.resize import KeepReplicas
from streamrl.policies.retry import RetryThenDrop, WindDown
from streamrl.policies.staleness import BoundedAdmission, Greedy, StrictFifo
from streamrl.policies.streaming import Stream, WholeBatch
from streamrl.policies.verification import VerifyOnArrival
from streamrl.policies.weight_sync import AbortAndResume, Barrier, DrainThenLoad, LoadInFlight
from streamrl.state import State

PASSES_PER_COMMAND = (
    4  # a streamed command is at most this many fills: work that arrives waits no longer
)


@dataclass(frozen=True, kw_only=True)
class System:
    """One choice for each policy."""

    max_staleness: int = 0
    waits_for_whole_batches: bool = False
    dispatch: str = "least-loaded"
    order: str = "fifo"
    streaming: str = "stream"
    consumption: str = "strict-fifo"
    weight_sync: str = "drain-then-load"


SYSTEMS = {
    "disaggregated": System(streaming="whole-batch", weight_sync="barrier"),
    "stream-sync": System(),
    "one-step-async": System(
        max_staleness=1,
        waits_for_whole_batches=True,
        streaming="whole-batch",
        weight_sync="barrier",
    ),
    "stream-async": System(max_staleness=1),
    "fully-async": System(max_staleness=2, weight_sync="load-in-flight"),
}

DISPATCH: dict[str, Callable[[Order], Policy]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
ORDER: dict[str, Callable[[], Order]] = {"fifo": FirstInFirstOut, "longest-first": LongestFirst}
CONSUMPTION: dict[str, Callable[[], Policy]] = {"strict-fifo": StrictFifo, "greedy": Greedy}
WEIGHT_SYNC: dict[str, Callable[[], Policy]] = {
    "barrier": Barrier,
    "drain-then-load": DrainThenLoad,
    "load-in-flight": LoadInFlight,
    "abort-and-resume": AbortAndResume,
}


def choose_system(policies: PoliciesConfig) -> System:
    """Give the preset that `policies` names, with what it replaces by name."""
    changes = {
        key: getattr(policies, key)
        for key in (
            "max_staleness",
            "dispatch",
            "order",
            "streaming",
            "consumption",
            "weight_sync",
        )
        if getattr(policies, key) is not None
    }
    return replace(SYSTEMS[policies.system], **changes)


def build_policies(run: Run) -> list[Policy]:
    """Make the policies of a run, in order of precedence."""
    system = choose_system(run.policies)
    fill = run.trainer.data_parallel * run.trainer.micro_batch
    streaming: Policy
    if system.streaming == "stream":
        streaming = Stream(fill, most=PASSES_PER_COMMAND * fill)
    else:
        streaming = WholeBatch(most=run.algorithm.rollouts_per_step)
    return [
        VerifyOnArrival(),
        KeepReplicas(run.rollout.replicas, run.policies.max_restarts),
        RetryThenDrop(run.policies.max_attempts),
        WindDown(),
        CheckpointEvery(run.execute.checkpoint_every),
        CONSUMPTION[system.consumption](),
        BoundedAdmission(system.max_staleness, system.waits_for_whole_batches),
        streaming,
        WEIGHT_SYNC[system.weight_sync](),
        DISPATCH[system.dispatch](ORDER[system.order]()),
    ]


def build_engine(run: Run) -> Engine:
    """Make the engine of a run, before its first event."""
    return Engine(State.start(run), build_policies(run))
