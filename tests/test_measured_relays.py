"""What a push over relays costs by a measured profile: bytes, phases, and the link between the pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.hardware.measured_profile import (
    MeasuredProfile,
    ModelOperation,
    RelayRow,
    read_measured,
    write_measured,
)
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.sync_profiles import load_transport
from streamrl.sim.costs.weight_sync import INITIAL_WINDOW, Payload, sending_time
from tests.measured_profile import around, make_profile, measured_run, model_directory

PUSH, LOAD = 4e-3, 6e-3
"""Seconds of the profile's."""
ENCODE, DECODE, DECODE_ALL = 0.02, 0.03, 0.05
RATE, LATENCY, EFFICIENCY = 1e8, 0.02, load_transport("tcp").efficiency
"""Bits a second and seconds one way of the link; its transport is profiles/transports/tcp.toml."""
VALUES, BYTES = 500, 600
"""Of the delta that was measured."""


@pytest.fixture
def profile(tmp_path: Path) -> MeasuredProfile:
    rows = (
        RelayRow(mode="full", bytes=1000, values=500, encode=around(0), decode=around(DECODE_ALL)),
        RelayRow(
            mode="delta", bytes=BYTES, values=VALUES, encode=around(ENCODE), decode=around(DECODE)
        ),
    )
    model = model_directory(tmp_path / "model")
    return replace(make_profile(model, dtype="bfloat16"), relay=rows)


def far(profile: MeasuredProfile, directory: Path, mode: str) -> Run:
    """Return a run whose replicas are behind a link."""
    write_measured(profile, directory / "profile.toml")
    run = measured_run(
        directory / "model",
        directory / "profile.toml",
        model__dtype="bfloat16",
        cluster__pools__far={"gpu": "cpu", "gpus_per_node": 2},
        cluster__links=[{"between": ["local", "far"], "bandwidth": "100 Mbps", "latency": "20 ms"}],
        rollout__pool="far",
        sync__mode=mode,
        sync__changed_share=0.1,
        sync__lora_rank=4,
    )
    return run


def wire(num_bytes: float) -> float:
    """Return the seconds of few bytes, which the first segments hold."""
    return num_bytes / (EFFICIENCY * RATE / 8)


def test_a_connection_that_rested_fills_the_link_only_after_some_round_trips() -> None:
    window, rate, trip = INITIAL_WINDOW, 1e8, 0.04
    assert sending_time(window, rate, trip) == pytest.approx(window / rate)
    assert sending_time(2 * window, rate, trip) == pytest.approx(trip + window / rate)
    assert sending_time(7 * window, rate, trip) == pytest.approx(2 * trip + 4 * window / rate)
    full = sending_time(1e9, rate, trip)  # windows of 1 to 256 are under way before 4 MB fill it
    assert full == pytest.approx(9 * trip + (1e9 - 511 * window) / rate)
    assert sending_time(1e6, rate, 0.0) == pytest.approx(1e6 / rate)


def test_rows_of_relays_are_read_as_they_were_written(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    write_measured(profile, tmp_path / "p.toml")
    assert [row.mode for row in read_measured(tmp_path / "p.toml").relay] == ["full", "delta"]


def test_whole_weights_cross_the_link_and_are_checked_there(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    sync = Costs.load(far(profile, tmp_path, "full")).sync
    assert sync.wire_bytes == 1000
    assert sync.push_time == pytest.approx(PUSH + wire(1000) + 4 * LATENCY + DECODE_ALL)
    assert sync.drain_time == pytest.approx(4 * LATENCY)
    assert sync.unpack_time == pytest.approx(DECODE_ALL), "cores of the far host compute then"
    assert sync.load_time == pytest.approx(LOAD)


def test_a_delta_has_the_bytes_of_the_values_that_change(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    run = far(profile, tmp_path, "delta")
    sync = Costs.load(run).sync
    changed = 0.1 * profile.model.num_parameters
    assert sync.wire_bytes == pytest.approx(BYTES / VALUES * changed, rel=1e-3)
    expected = PUSH + ENCODE + wire(sync.wire_bytes) + 4 * LATENCY + DECODE
    assert sync.push_time == pytest.approx(expected)


def test_adapters_have_their_own_bytes_and_are_merged_as_all_is_checked(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    run = far(profile, tmp_path, "lora")
    sync = Costs.load(run).sync
    assert sync.wire_bytes == Payload.of(resolve(run).replica, run.sync).num_bytes
    expected = PUSH + wire(sync.wire_bytes) + 4 * LATENCY + DECODE_ALL
    assert sync.push_time == pytest.approx(expected)
    assert sync.tier == Costs.load(run).provenance["sync"].tier == "composed"


def with_adapters(profile: MeasuredProfile, rank: int) -> MeasuredProfile:
    row = RelayRow(mode="lora", bytes=900, values=450, encode=around(ENCODE), decode=around(DECODE))
    return replace(profile, relay=(row,), lora_rank=rank)


@pytest.mark.parametrize(
    ("rank", "modes", "words"),
    [
        (0, ["lora"], "lora_rank must be at least 1, got 0"),
        (None, ["lora"], "lora_rank and a row of relay with mode lora must both be there"),
        (2, ["full"], "lora_rank and a row of relay with mode lora must both be there"),
    ],
)
def test_adapters_that_were_not_measured_so_are_refused(
    profile: MeasuredProfile, tmp_path: Path, rank: int | None, modes: list[str], words: str
) -> None:
    rows = tuple(replace(profile.relay[0], mode=mode) for mode in modes)
    write_measured(replace(profile, lora_rank=rank, relay=rows), tmp_path / "p.toml")
    with pytest.raises(ValueError, match=words):
        read_measured(tmp_path / "p.toml")


def test_adapters_that_were_measured_take_what_they_did(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    own = with_adapters(profile, 2)
    run = far(own, tmp_path, "lora")
    costs = Costs.load(run)
    assert costs.sync.wire_bytes == 900 / 2 * run.sync.lora_rank
    expected = PUSH + ENCODE + wire(costs.sync.wire_bytes) + 4 * LATENCY + DECODE
    assert costs.sync.push_time == pytest.approx(expected)
    assert costs.sync.tier == "measured"
    assert costs.provenance["sync"].tier == "measured"
    with pytest.raises(RunError, match=r"adapters of rank 2, but sync\.mode is 'full'"):
        Costs.load(far(own, tmp_path, "full"))
    critic = replace(run, algorithm=replace(run.algorithm, name="ppo"))
    with pytest.raises(RunError, match=r"but a critic of algorithm\.name 'ppo' trains all"):
        Costs.load(critic)


def test_a_run_says_what_adapters_its_training_was_measured_with(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    def notes(lora_rank: int | None, mode: str = "lora") -> str:
        own = profile if lora_rank is None else with_adapters(profile, lora_rank)
        return "; ".join(Costs.load(far(own, tmp_path, mode)).provenance["decode"].sources)

    assert "pushes measured of all weights, not with adapters of rank 4" in notes(None)
    assert "measured of rank 2, not with adapters of rank 4" in notes(2)
    assert "not with adapters" not in notes(4)
    assert "not with adapters" not in notes(None, "full")


def test_a_run_says_where_its_replicas_have_adapters_otherwise_than_measured(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    def notes(*, serves: bool, merges: bool | None) -> str:
        own = replace(with_adapters(profile, 4), serves_adapters=serves, backend="vllm")
        run = far(own, tmp_path, "lora")
        run = replace(run, rollout=replace(run.rollout, backend="vllm"))
        run = replace(run, sync=replace(run.sync, merge_adapters=merges))
        return "; ".join(Costs.load(run).provenance["decode"].sources)

    assert "adapters" not in notes(serves=True, merges=None)
    assert "replicas measured with adapters beside weights, here" in notes(serves=True, merges=True)
    assert "replicas measured with adapters merged, here" in notes(serves=False, merges=None)
    assert "adapters" not in notes(serves=False, merges=True)


def test_a_profile_without_relays_is_refused(profile: MeasuredProfile, tmp_path: Path) -> None:
    older = replace(profile, relay=())
    with pytest.raises(RunError, match=r"no relays for sync\.mode 'delta'"):
        Costs.load(far(older, tmp_path, "delta"))


def test_in_one_pool_whole_weights_need_no_relay(profile: MeasuredProfile, tmp_path: Path) -> None:
    write_measured(profile, tmp_path / "profile.toml")
    run = measured_run(tmp_path / "model", tmp_path / "profile.toml", model__dtype="bfloat16")
    sync = Costs.load(run).sync
    assert sync.push_time == pytest.approx(PUSH)


def test_a_push_over_ray_takes_what_its_calls_do_on_one_machine_for_each_of_those_over_a_link(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    def push_time(launcher: str, own: MeasuredProfile) -> float:
        run = far(own, tmp_path, "delta")
        run = replace(run, execute=replace(run.execute, launcher=launcher))
        found: float = Costs.load(run).sync.push_time
        return found

    usual = push_time("ray", profile)
    known = replace(profile, push_over_ray=ModelOperation(seconds=around(PUSH + DECODE_ALL + 0.03)))
    assert push_time("ray", known) == pytest.approx(usual + 5 / 3 * 0.03)
    assert push_time("local", known) == pytest.approx(usual)
    quick = replace(profile, push_over_ray=ModelOperation(seconds=around(PUSH)))
    assert push_time("ray", quick) == pytest.approx(usual)


def test_what_is_an_object_of_rays_store_is_looked_for_and_asked_for_over_the_link(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    def more_over_ray(num_bytes: int, **sync: str) -> float:
        whole = replace(profile.relay[0], bytes=num_bytes)
        run = far(replace(profile, relay=(whole,)), tmp_path, "full")
        run = replace(run, sync=replace(run.sync, **sync))
        over_ray = replace(run, execute=replace(run.execute, launcher="ray"))
        return float(Costs.load(over_ray).sync.push_time - Costs.load(run).sync.push_time)

    assert more_over_ray(100 * 1024) == 0.0
    assert more_over_ray(100 * 1024 + 1) == pytest.approx(4 * LATENCY)
    assert more_over_ray(100 * 1024 + 1, wire="gloo") == 0.0, "relays bring it to each other"


def test_in_one_pool_a_push_over_ray_takes_what_was_measured_there(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    def push_time(mode: str, launcher: str, own: MeasuredProfile) -> float:
        write_measured(own, tmp_path / "profile.toml")
        changes = {"sync__mode": mode, "sync__changed_share": 0.1, "model__dtype": "bfloat16"}
        run = measured_run(tmp_path / "model", tmp_path / "profile.toml", **changes)
        run = replace(run, execute=replace(run.execute, launcher=launcher))
        found: float = Costs.load(run).sync.push_time
        return found

    known = replace(profile, push_over_ray=ModelOperation(seconds=around(PUSH + DECODE_ALL + 0.03)))
    assert push_time("full", "ray", known) == pytest.approx(PUSH + DECODE_ALL + 0.03)
    assert push_time("full", "local", known) == pytest.approx(PUSH)
    assert push_time("full", "ray", profile) == pytest.approx(PUSH)
    assert push_time("delta", "ray", known) == pytest.approx(PUSH + ENCODE + DECODE + 0.03)


def test_rollouts_over_ray_take_of_the_cores_what_was_measured_over_ray(
    profile: MeasuredProfile, tmp_path: Path
) -> None:
    def found(launcher: str, own: MeasuredProfile) -> Costs:
        run = far(own, tmp_path, "full")
        return Costs.load(replace(run, execute=replace(run.execute, launcher=launcher)))

    local = replace(profile, handling=ModelOperation(seconds=around(1e-3)))
    both = replace(local, handling_over_ray=ModelOperation(seconds=around(3e-3)))
    unknown = "as if Ray itself took no core, which was not measured"
    assert found("ray", both).handling_time == 3e-3
    assert found("local", both).handling_time == 1e-3
    assert found("ray", local).handling_time == 1e-3
    assert unknown in "; ".join(found("ray", local).provenance["decode"].sources)
    assert unknown not in "; ".join(found("ray", both).provenance["decode"].sources)
    assert unknown not in "; ".join(found("local", local).provenance["decode"].sources)
    calls = "as if calls of a push over Ray took nothing, which was not measured"
    timed = replace(both, push_over_ray=ModelOperation(seconds=around(0.1)))
    assert calls in "; ".join(found("ray", both).provenance["decode"].sources)
    assert calls not in "; ".join(found("ray", timed).provenance["decode"].sources)
