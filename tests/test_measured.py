"""Measured profiles: what the reader refuses, what lies between the points, and what a simulation makes of them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.engine.messages import DrawnGroup, Generate, Generated, PromptsDrawn, Train, Verified
from streamrl.engine.trace import Trace
from streamrl.hardware.measured_profile import (
    DecodeRow,
    MeasuredProfile,
    MixedRow,
    read_measured,
    write_measured,
)
from streamrl.hardware.profile_fit import (
    fit_decode,
    fit_padded_share,
    fit_passes,
    fit_positive,
    fit_prefill,
)
from streamrl.record.metrics import measure
from streamrl.record.recorded_workload import informative_share
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.machine_profile import passes
from streamrl.sim.world import SimWorld, simulate
from streamrl.workload.workload import SimulatedWorkload
from tests.measured_profile import (
    ALONE,
    PER_PAIR,
    PER_ROLLOUT,
    PER_TOKEN,
    TRAIN_FACTOR,
    around,
    base,
    make_profile,
    measured_run,
    model_directory,
    prefix_time,
    slope,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "model")


@pytest.fixture
def profile(model: Path) -> MeasuredProfile:
    return make_profile(model)


def written(profile: MeasuredProfile, path: Path) -> Path:
    write_measured(profile, path / "profile.toml")
    return path / "profile.toml"


# The file -----------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(profile: MeasuredProfile, tmp_path: Path) -> None:
    path = written(profile, tmp_path)
    assert tomllib.loads(path.read_text())["decode"][0]["running"] == 1
    again = read_measured(path)
    assert again.decode[-1].seconds == pytest.approx(profile.decode[-1].seconds, rel=1e-5)
    write_measured(again, path)
    assert read_measured(path) == again


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("running = 1, context = 64.0", "running = 0, context = 64.0", ["decode row 2", "running"]),
        ("context = 64.0", "context = nan", ["decode row 2", "context", "nan"]),
        ("context = 256.0", "context = -1.0", ["decode row 3", "context", "-1.0"]),
        (
            "[optimizer]\nseconds = [0.0027",
            "[optimizer]\nseconds = [0.9",
            ["optimizer: seconds", "0.9"],
        ),
        ("seconds = [0.0036", "seconds = [0.0", ["push: seconds", "positive"]),
        ('source = "closed form"', 'source = " "', ["source is empty"]),
        ('source = "closed form"\n', "", ["source"]),
        ("running = 4", "runing = 4", ["decode row 4", "runing"]),
        ("running = 4", 'running = "4"', ["decode row 4", "running", "int"]),
        ("repeats = 5", "repeats = 0", ["repeats", "0"]),
        ("pace = 1.0", "pace = 0.0", ["pace", "0.0"]),
        ("pace = 1.0", "pace = inf", ["pace", "inf"]),
        ("repeats = 5", "repeats = [", ["not a TOML file"]),
    ],
)
def test_the_reader_refuses_by_file_table_row_and_key(
    profile: MeasuredProfile, tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    path = written(profile, tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError) as refusal:
        read_measured(path)
    for word in [str(path), *words]:
        assert word in str(refusal.value)


def test_the_reader_refuses_a_table_without_rows(profile: MeasuredProfile, tmp_path: Path) -> None:
    path = written(profile, tmp_path)
    lines = path.read_text().splitlines()
    first, last = lines.index("call = ["), lines.index("]", lines.index("call = ["))
    path.write_text("\n".join([*lines[:first], "call = []", *lines[last + 1 :]]))
    with pytest.raises(ValueError, match="call has no rows"):
        read_measured(path)


def test_the_reader_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml"):
        read_measured(tmp_path / "nowhere.toml")


# Between the points -------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [1, 2, 3, 4, 9, 16, 20])
def test_a_decode_step_is_linear_in_context_and_between_batches(
    profile: MeasuredProfile, running: int
) -> None:
    fit = fit_decode(profile.decode, 20)
    wanted = base(running) + slope(running) * 1234
    assert fit.step_time(running, 1234) == pytest.approx(wanted, rel=1e-9)
    assert (fit.most_running, fit.longest_context) == (16, 256)


def test_a_line_that_would_fall_is_level_or_passes_through_the_origin() -> None:
    falling = [
        DecodeRow(running=1, context=10.0, seconds=around(2.0)),
        DecodeRow(running=1, context=20.0, seconds=around(1.0)),
    ]
    fit = fit_decode(falling, 1)
    assert fit.per_context_token[1] == 0 and 1.0 < fit.base[1] < 2.0
    steep = [
        DecodeRow(running=1, context=10.0, seconds=around(1.0)),
        DecodeRow(running=1, context=20.0, seconds=around(3.0)),
    ]
    fit = fit_decode(steep, 1)
    assert fit.base[1] == 0 and fit.per_context_token[1] > 0


def test_prefixes_and_passes_are_told_apart_by_their_sizes(profile: MeasuredProfile) -> None:
    wanted = (ALONE, PER_ROLLOUT, PER_TOKEN, PER_PAIR)
    prefill = fit_prefill(profile.prefill, profile.join)
    found = (prefill.alone, prefill.per_rollout, prefill.per_token, prefill.per_pair)
    assert found == pytest.approx(wanted, rel=1e-6)
    train = fit_passes(profile.train)
    found = (train.alone, train.per_rollout, train.per_token, train.per_pair)
    assert found == pytest.approx([TRAIN_FACTOR * value for value in wanted], rel=1e-6)


def test_a_fit_has_no_term_below_zero() -> None:
    import numpy as np

    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit_positive(terms, np.array([3.0, 2.0, 1.0]), np.ones(3)) == pytest.approx([2.0, 0.0])


def test_passes_fill_up_by_falling_length() -> None:
    lengths = [10, 40, 20, 20, 30]
    assert passes(lengths, 60, "padded") == [(1, 40, 800.0), (2, 60, 900.0), (2, 40, 400.0)]
    assert passes(lengths, 60, "packed") == [(1, 40, 800.0), (2, 50, 650.0), (2, 30, 250.0)]
    assert passes([100, 10], 50, "padded") == [(1, 100, 5000.0), (1, 10, 50.0)]
    assert passes([], 50, "packed") == []


# In a simulation ----------------------------------------------------------------------------------


def test_every_operation_of_a_simulation_is_measured(
    model: Path, profile: MeasuredProfile, tmp_path: Path
) -> None:
    path = written(profile, tmp_path)
    trace = simulate(measured_run(model, path))
    assert measure(trace).tiers == pytest.approx({"measured": 1.0})
    costs = Costs.load(measured_run(model, path))
    assert costs.decode.step_time(4, 100) == pytest.approx(base(4) + slope(4) * 100, rel=1e-4)
    assert costs.prefill_time(16, 128, 4, 1) == pytest.approx(prefix_time(1, 16), rel=1e-4)
    assert costs.prefill_time(16, 128, 0, 1) == pytest.approx(ALONE + prefix_time(1, 16), rel=1e-4)
    assert costs.step_time == pytest.approx(5e-4 + 3e-3, rel=1e-4)
    assert costs.sync.push_time == pytest.approx(4e-3)
    assert costs.load_time == pytest.approx(6e-3)
    assert any(
        str(path) in source for found in costs.provenance.values() for source in found.sources
    )


def test_the_trainer_computes_the_informative_share_and_is_sent_all(
    model: Path, profile: MeasuredProfile, tmp_path: Path
) -> None:
    path = written(profile, tmp_path)
    lengths = [64] * 6  # passes of 4 and 2 rollouts at 256 tokens each
    passes = TRAIN_FACTOR * (2 * ALONE + prefix_time(4, 64) + prefix_time(2, 64))
    call = 5e-4 + 1e-6 * 6 * 64
    for share in (1.0, 0.5, 0.0):
        run = measured_run(model, path, workload__informative_share=share)
        found = Costs.load(run).training.train_time(lengths)
        assert found == pytest.approx(call + share * passes, rel=1e-4)
    few = Costs.load(measured_run(model, path, workload__informative_share=0.25)).training
    for groups in (1, 2):  # of two rollouts: a pass is made where any of them teaches something
        own, is_made = [64] * 2 * groups, 1 - 0.75**groups
        one = TRAIN_FACTOR * (is_made * ALONE + 0.25 * prefix_time(2 * groups, 64))
        expected = 5e-4 + 1e-6 * sum(own) + one
        assert few.train_time(own) == pytest.approx(expected, rel=1e-4)
    whole = measured_run(
        model, path, workload__informative_share=0.5, algorithm__kl_coefficient=0.1
    )
    assert Costs.load(whole).training.train_time(lengths) == pytest.approx(call + passes, rel=1e-4)


def test_what_lies_beyond_the_measured_range_is_said(
    model: Path, profile: MeasuredProfile, tmp_path: Path
) -> None:
    path = written(profile, tmp_path)
    wide = measured_run(model, path, rollout__max_running=32, rollout__max_tokens=512)
    notes = " ".join(Costs.load(wide).provenance["decode"].sources)
    assert "16 to 32 rollouts" in notes and "256 to 576 tokens" in notes
    assert "extrapolated" not in " ".join(
        Costs.load(measured_run(model, path)).provenance["decode"].sources
    )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gpu": "h20"}, "cluster.pools.local.gpu"),
        ({"dtype": "bfloat16"}, "model.dtype"),
        ({"backend": "vllm"}, "rollout.backend"),
        ({"tensor_parallel": 2}, "rollout.tensor_parallel"),
        ({"shares_prefixes": True}, "rollout.shares_prefixes"),
    ],
)
def test_a_profile_of_something_else_is_refused_by_the_key_of_the_run(
    model: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    path = written(make_profile(model, **changes), tmp_path)
    with pytest.raises(ValueError) as refusal:
        simulate(measured_run(model, path))
    for word in ("costs.profile", str(path), key, repr(next(iter(changes.values())))):
        assert word in str(refusal.value)


def test_a_profile_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    path = written(make_profile(model), tmp_path)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"hidden_size": 32', '"hidden_size": 64'))
    with pytest.raises(ValueError, match=r"costs\.profile.*model\.path"):
        simulate(measured_run(model, path))


# Replicas that prefill as transformers' continuous batching does -------------------------------------


def replica_times(run: Run, lengths: list[int], prompt: int) -> list[float]:
    """Return the instants at which rollouts of these lengths end that one idle replica is given at once."""
    from streamrl.sim.replica import Replica
    from streamrl.sim.world_interface import SimRollout

    world = SimWorld(run, Costs.load(run), SimulatedWorkload(run))
    ended: dict[int, float] = {}
    world.emit = lambda event: ended.update(  # type: ignore[method-assign]  # no engine here
        {event.rollout: world.env.now} if isinstance(event, Generated) else {}
    )
    replica = Replica(world, 0, 0)
    for rollout, length in enumerate(lengths):
        world.rollouts[rollout] = SimRollout(rollout // 2, prompt, length)
        replica.generate(Generate(rollout, 0, rollout))
    world.env.run(until=1000)
    return [ended[rollout] for rollout in range(len(lengths))]


def step(running: int, context: int) -> float:
    return base(running) + slope(running) * context


def test_a_prefix_rides_on_the_decode_step_of_what_runs(model: Path, tmp_path: Path) -> None:
    path = written(make_profile(model), tmp_path)
    run = measured_run(model, path, rollout__max_running=2)
    # 0 and 1 prefill; 1 ends with its 2nd token; 2 joins while 0 makes its 3rd; both make another.
    times = replica_times(run, [4, 2, 2], prompt=10)
    first = ALONE + prefix_time(2, 10) + step(2, 22)
    joined = first + step(1, 12) + prefix_time(1, 10)
    assert times[1] == pytest.approx(first, rel=1e-4)
    assert times[0] == times[2] == pytest.approx(joined + step(2, 24), rel=1e-4)


def test_a_freed_place_stays_empty_until_the_queue_has_heard_of_it(
    model: Path, tmp_path: Path
) -> None:
    path = written(make_profile(model, refill_passes=1), tmp_path)
    run = measured_run(model, path, rollout__max_running=2)
    times = replica_times(run, [5, 2, 2], prompt=10)
    alone = ALONE + prefix_time(2, 10) + step(2, 22) + step(1, 12)
    joined = alone + step(1, 13) + prefix_time(1, 10)
    assert times[2] == pytest.approx(joined + step(2, 25), rel=1e-4)


def test_a_pass_takes_no_more_prefix_tokens_than_it_has_room_for(
    model: Path, tmp_path: Path
) -> None:
    path = written(make_profile(model, prefill_tokens=30), tmp_path)
    run = measured_run(model, path, rollout__max_running=2)  # a pass has room for 32 tokens
    times = replica_times(run, [1, 1], prompt=24)
    whole = 2 * ALONE + 3 * PER_ROLLOUT + PER_TOKEN * 48 + PER_PAIR * 2 * 24 * 24 / 2
    assert times[0] < times[1] == pytest.approx(whole, rel=1e-4)


def test_attention_that_pads_takes_every_rollout_for_the_longest(
    model: Path, tmp_path: Path
) -> None:
    path = written(make_profile(model, pads_context=True), tmp_path)
    run = measured_run(model, path, rollout__max_running=2)
    times = replica_times(run, [5, 2, 2], prompt=10)
    joined = ALONE + prefix_time(2, 10) + step(2, 22) + step(1, 12) + prefix_time(1, 10)
    assert times[2] == pytest.approx(joined + step(2, 26), rel=1e-4)  # 13 and 11 tokens, padded


def mixed_rows(share: float) -> tuple[MixedRow, ...]:
    """Return steps of which so much of the cost of context is that of the longest rollout."""
    rows = []
    for running, context, longest in ((4, 30.0, 90.0), (16, 50.0, 250.0), (16, 150.0, 250.0)):
        attended = running * (context + share * (longest - context))
        seconds = around(base(running) + slope(running) * attended)
        rows.append(MixedRow(running=running, context=context, longest=longest, seconds=seconds))
    return tuple(rows)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_step_of_mixed_contexts_pays_for_padding_as_far_as_was_measured(
    share: float, model: Path, tmp_path: Path
) -> None:
    path = written(make_profile(model, pads_context=True, mixed=mixed_rows(share)), tmp_path)
    assert read_measured(path).mixed[1].longest == 250.0
    run = measured_run(model, path, rollout__max_running=2)
    assert Costs.load(run).padded_share == pytest.approx(share, abs=1e-3)
    times = replica_times(run, [5, 2, 2], prompt=10)
    joined = ALONE + prefix_time(2, 10) + step(2, 22) + step(1, 12) + prefix_time(1, 10)
    assert times[2] == pytest.approx(joined + step(2, 24 + 2 * share), rel=1e-4)


def test_a_padded_share_is_no_less_than_none_and_no_more_than_all() -> None:
    rows = [
        DecodeRow(running=b, context=c, seconds=around(base(b) + slope(b) * b * c))
        for b in (1, 4, 16)
        for c in (16.0, 256.0)
    ]
    fit = fit_decode(rows, 16)
    assert fit_padded_share(mixed_rows(1.5), fit) == 1.0
    assert fit_padded_share(mixed_rows(-0.5), fit) == 0.0
    level = [replace(row, longest=row.context) for row in mixed_rows(0.0)]
    assert fit_padded_share(level, fit) == 1.0  # nothing is known of padding


def test_a_longest_rollout_is_no_shorter_than_the_mean(model: Path, tmp_path: Path) -> None:
    row = MixedRow(running=4, context=90.0, longest=30.0, seconds=around(1e-3))
    path = written(make_profile(model, mixed=(row,)), tmp_path)
    with pytest.raises(ValueError, match=r"mixed row 1: longest must be at least context=90.0"):
        read_measured(path)


def test_a_prompt_is_kept_once_a_rollout_where_prefixes_are_not_shared(
    model: Path, tmp_path: Path
) -> None:
    path = written(make_profile(model), tmp_path)
    shared = written(make_profile(model, shares_prefixes=True), tmp_path / "shared")
    apart = replica_times(measured_run(model, path), [1, 1], prompt=10)
    together = replica_times(
        measured_run(model, shared, rollout__shares_prefixes=True), [1, 1], prompt=10
    )
    tokens = PER_TOKEN * 9 + PER_PAIR * 50  # the second prompt, of which one token is left
    assert apart[1] - together[1] == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize(("backend", "shares"), [("transformers", False), ("vllm", True)])
def test_a_run_that_does_not_say_shares_prompts_where_the_measured_engine_does(
    backend: str, shares: bool, model: Path, tmp_path: Path
) -> None:
    path = written(make_profile(model, backend=backend), tmp_path)

    def times(given: bool | None) -> list[float]:
        own = {"rollout__backend": backend, "rollout__shares_prefixes": given}
        return replica_times(measured_run(model, path, **own), [1, 1], prompt=10)

    assert times(None) == times(shares)
    if backend == "vllm":
        assert times(not shares)[1] > times(shares)[1]


# Which rollouts inform ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "share"), [("grpo", 0.5), ("reinforce++", 0.75)])
def test_rollouts_without_an_advantage_do_not_inform(model: Path, name: str, share: float) -> None:
    run = measured_run(model, model / "none.toml", algorithm__name=name)
    trace = Trace(run, "real")
    groups = (DrawnGroup(0, (0, 1), 8, (4, 4)), DrawnGroup(1, (2, 3), 8, (4, 4)))
    trace.record(0.0, PromptsDrawn(1, 0, groups), [])
    for rollout, reward in enumerate((1.0, 0.0, 1.0, 1.0)):
        trace.record(1.0, Verified(rollout, reward), [])
    trace.record(2.0, Verified(3, 1.0), [Train((0, 1, 2, 3), 0)])
    assert informative_share(trace) == share
