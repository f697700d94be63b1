"""Stragglers that move to idle replicas: when it pays, and what it leaves alone."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from streamrl.engine.messages import (
    Abort,
    DrawnGroup,
    DrawPrompts,
    Failed,
    Generate,
    PromptsDrawn,
    ReplicaLost,
    ReplicaStarted,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.systems import build_engine
from tests.runs import Script, generated, of, singles, small_run
from tests.test_skew import simulate_batch

STEEP = [[1, 0.01], [2, 0.5], [8, 2.0]]


def begun(expected: list[int], **changes: Any) -> Script:
    """Return a script whose two replicas generate rollouts of these expected lengths in turn."""
    chosen: dict[str, Any] = {
        "policies__latency": STEEP,
        "policies__context_time": 1e-6,
        "policies__migration": "consolidate",
        **changes,
    }
    s = singles(len(expected), policies__system="stream-sync", **chosen)
    draw = of(DrawPrompts, s.begin())[0]
    groups = tuple(DrawnGroup(g, (g,), 40, (tokens,)) for g, tokens in enumerate(expected))
    s.tell(PromptsDrawn(draw.step, draw.oldest_version, groups))
    return s


def test_the_rollout_with_most_ahead_moves_to_the_replica_that_stands_idle() -> None:
    s = begun([10, 9000, 10, 5000])
    assert not of(Abort, s.tell(generated(0)))  # replica 0 still has one
    assert of(Abort, s.tell(generated(2))) == [Abort(1, 1)]
    sent = s.tell(generated(1, tokens=70, finish="aborted"))
    assert of(Generate, sent) == [Generate(1, 0, 1, prefix=70)]
    assert not of(Abort, s.tell(generated(3)))


@pytest.mark.parametrize(
    "changes",
    [
        {"policies__migration": "none"},
        {"policies__context_time": 1000.0},
        {"policies__latency": [[1, 0.01], [8, 0.01]]},
    ],
)
def test_nothing_moves_that_would_not_gain(changes: dict[str, Any]) -> None:
    s = begun([10, 9000, 10, 5000], **changes)
    assert not of(Abort, s.tell(generated(0), generated(2)))


def test_a_rollout_that_finishes_before_it_is_aborted_stays_finished() -> None:
    s = begun([10, 9000, 10, 5000])
    s.tell(generated(0), generated(2))
    assert not of(Generate, s.tell(generated(1, tokens=9000)))
    assert s.state.num_generating == 1


def test_a_rollout_whose_new_replica_is_lost_meanwhile_is_sent_elsewhere() -> None:
    s = begun([10, 9000, 10, 5000])
    s.tell(generated(0), generated(2), ReplicaLost(0, "gone"))
    sent = of(Generate, s.tell(generated(1, tokens=70, finish="aborted")))
    assert [(c.rollout, c.replica, c.prefix) for c in sent] == [(1, 1, 70)]


def test_a_rollout_does_not_go_on_under_another_version() -> None:
    s = singles(
        4,
        policies__latency=STEEP,
        policies__context_time=1e-6,
        policies__migration="consolidate",
    )
    s.draw(s.begin())
    for _ in range(8):
        s.state.recent.add(5000)
    s.finish(0, 1, 2, 3)
    s.step(1)
    on_one = [r for r in range(4, 8) if getattr(s.state.rollouts[r].replica, "id", None) == 1]
    assert len(on_one) == 2
    s.tell(WeightsPushed(1, 1))  # both are told to drain and load
    commands = [c for r in range(4, 8) if r not in on_one for c in s.tell(generated(r))]
    assert not of(Abort, commands + s.tell(WeightsLoaded(0, 1, 1.0)))


def test_a_rollout_moves_at_most_twice() -> None:
    s = begun([10, 9000, 10, 5000])
    s.tell(generated(0), generated(2))
    s.tell(generated(1, tokens=70, finish="aborted"))  # now on 0, and 3 on 1
    for lost, moved in ((1, 1), (2, 3)):  # each replacement of the other replica stands idle
        other = 3 if moved == 1 else 1
        s.tell(ReplicaLost(lost, "gone"), Failed(Generate(other, lost, 0), "gone"))
        assert of(Abort, s.tell(ReplicaStarted(lost + 1, 0))) == [Abort(moved, 0)]
        s.tell(generated(moved, tokens=80, finish="aborted"))


def test_lengths_of_finished_rollouts_say_how_much_is_ahead() -> None:
    s = begun([2, 2, 2, 2])
    assert not of(Abort, s.tell(generated(0), generated(2)))  # expected to be done long ago
    s = begun([2, 2, 2, 2])
    for _ in range(4):
        s.state.recent.add(5000)
    assert of(Abort, s.tell(generated(0), generated(2))) == [Abort(1, 1)]


def test_it_refuses_to_reckon_without_seconds() -> None:
    changes: dict[str, Any] = {"policies.migration": "consolidate"}
    with pytest.raises(ValueError, match=r"policies.latency is missing"):
        build_engine(small_run(changes))
    with pytest.raises(ValueError, match=r"policies.context_time is missing"):
        build_engine(small_run({**changes, "policies.latency": STEEP}))


def test_moving_stragglers_shortens_generation_and_never_by_losing_one() -> None:
    def spans(migration: str) -> list[float]:
        runs = [
            simulate_batch(
                seed=seed,
                policies__migration=migration,
                policies__dispatch="skewness-aware",
                policies__skew_objective="max",
                workload__lengths__ranker="recall",
                rollout__max_running=64,
            )
            for seed in range(6)
        ]
        assert all(len(ran.lengths) >= 256 for ran in runs)
        return [ran.makespan for ran in runs]

    before, after = spans("none"), spans("consolidate")
    assert all(b <= 1.005 * a for a, b in zip(before, after, strict=True))
    assert median(after) < 0.98 * median(before)
