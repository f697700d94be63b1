"""What replicas served: the checksums that were pushed, and no version that they never said to have loaded."""

from __future__ import annotations

import pytest

from streamrl.engine.messages import (
    Event,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    ReplicaStarted,
    RunStarted,
    StartReplica,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Trace
from streamrl.record.ledger import Ledger, ledger_line
from tests.test_ledger import balance_of, hand


def served(pushed: str, found: str, started: str = "aa") -> Ledger:
    """Return the books of an executed run whose replica 0 loads version 1, and whose replica 1 comes up with it."""
    trace = Trace(hand().trace.run, "real")
    trace.record(0.0, RunStarted(0, 0), [StartReplica(0, 0)])
    trace.record(0.0, ReplicaStarted(0, 0), [])
    trace.record(1.0, WeightsPushed(1, 8, "aa"), [LoadWeights(0, 1, True), StartReplica(1, 1)])
    trace.record(2.0, WeightsLoaded(0, 1, 0.5, found), [])
    trace.record(2.0, ReplicaStarted(1, 1, started), [])
    trace.record(3.0, WeightsPushed(2, 8, pushed), [LoadWeights(0, 2, True)])
    trace.record(4.0, WeightsLoaded(0, 2, 0.5, pushed), [])
    return balance_of(trace)


def test_each_version_that_was_served_was_checksummed() -> None:
    balance = served("bb", "aa")
    assert balance.is_balanced and balance.checksummed == 2
    assert ledger_line(balance).endswith("; 2 versions checksummed")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bb", "bb"), "replica 0 served version 1 with checksum bb, but the trainer pushed aa"),
        (("bb", ""), "replica 0 served version 1 with checksum none, but the trainer pushed aa"),
        (
            ("bb", "aa", ""),
            "replica 1 served version 1 with checksum none, but the trainer pushed aa",
        ),
        (("", "aa"), "versions 2 were served without a checksum"),
    ],
)
def test_a_version_that_was_served_unverified_does_not_balance(
    words: tuple[str, ...], told: str
) -> None:
    balance = served(*words)
    assert not balance.is_balanced and balance.faults == [told]


def test_a_version_that_nobody_pushed_does_not_balance() -> None:
    trace = Trace(hand().trace.run, "real")
    trace.record(0.0, RunStarted(0, 0), [StartReplica(0, 1)])
    assert balance_of(trace).faults == ["replica 0 loads version 1, which was never pushed"]


def sampled(*between: Event, then: Generated, prefix: int = 0) -> list[str]:
    """Return what is wrong where replica 0, which serves version 0, is told to load version 1 while rollout 7 is there."""
    trace = Trace(hand().trace.run, "real")
    trace.record(0.0, RunStarted(0, 0), [StartReplica(0, 0)])
    trace.record(0.0, ReplicaStarted(0, 0), [Generate(7, 0, 0, prefix)])
    trace.record(1.0, WeightsPushed(1, 8, "aa"), [LoadWeights(0, 1, False)])
    for event in (*between, then):
        trace.record(2.0, event, [])
    return balance_of(trace).faults


LOADED = WeightsLoaded(0, 1, 0.5, "aa")


def of_version(version: int, tokens: int = 10) -> Generated:
    return Generated(7, tokens, "stop", version, 0.5, 0.0)


def test_a_replica_samples_with_what_it_served_since_a_rollout_was_sent() -> None:
    assert not sampled(LOADED, then=of_version(1))
    assert not sampled(LOADED, then=of_version(0))  # begun before weights were loaded in flight
    assert not sampled(of_version(1), then=LOADED)  # whose word came later
    assert not sampled(then=of_version(0, tokens=4), prefix=4)  # aborted before it sampled
    failed = Failed(LoadWeights(0, 1, False), "gone")
    assert not sampled(of_version(1), then=failed)


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_that_a_replica_samples_with_and_never_loaded_does_not_balance(
    version: int,
) -> None:
    told = f"replica 0 sampled rollout 7 with version {version}, which it never loaded"
    assert sampled(then=of_version(version)) == [told]


def test_a_replica_that_comes_up_anew_serves_nothing_from_before() -> None:
    trace = Trace(hand().trace.run, "real")
    trace.record(0.0, RunStarted(0, 0), [StartReplica(0, 0)])
    trace.record(0.0, ReplicaStarted(0, 0), [])
    trace.record(1.0, WeightsPushed(1, 8, "aa"), [StartReplica(0, 1)])
    trace.record(2.0, ReplicaStarted(0, 1, "aa"), [Generate(7, 0, 0)])
    trace.record(3.0, of_version(0), [])
    trace.record(3.0, of_version(1), [])
    assert balance_of(trace).faults == [
        "replica 0 sampled rollout 7 with version 0, which it never loaded",
        "rollout 7 was generated, but was sent to no replica",
    ]


def test_what_a_replica_loads_untold_does_not_balance() -> None:
    assert sampled(LOADED, LOADED, then=of_version(0)) == [
        "replica 0 served version 1, which it was not asked to load"
    ]
