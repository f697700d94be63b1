"""Plans that may draft tokens: where drafts pay, where they do not, and what a plan then says and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import draft_bytes
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, write_run
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.sim.planner.layouts import mixed_fleets
from streamrl.sim.planner.plan_description import drafts_text
from streamrl.sim.planner.plan_settings import settings_of
from streamrl.sim.planner.scores import complexities
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate, Space
from tests.test_plan import Here, few

NARROW: dict[str, Any] = {
    "objective": "step-time",
    "systems": ["disaggregated"],
    "rollout_pools": ["h20"],
    "rollout_gpus": [8],
    "rollout_tensor_parallel": [1],
    "trainer_gpus": [8],
    "trainer_tensor_parallel": [4],
    "pipeline_parallel": [1],
    "zero": [1],
}
DRAFTER = "qwen2.5-0.5b"
DRAFT: dict[str, Any] = {"tokens": 2, "acceptance": 0.8, "model": DRAFTER}


def drafting(changes: dict[str, Any] | None = None, **plan: Any) -> Run:
    """Return an offer of one way to generate and one to train, where tokens may be drafted or not."""
    plans = {**NARROW, "speculative": [0, 1, 3], **plan}
    return few({"rollout.speculative": DRAFT, **(changes or {})}, **plans)


def chosen(run: Run) -> Candidate:
    search = Search.open(run)
    return search.space.candidate(search.run(Here(), lambda: None)[0])


# The choice ---------------------------------------------------------------------------------------


def test_drafts_are_chosen_where_the_last_rollouts_of_a_step_are_waited_for() -> None:
    """Two rollouts a replica: a check of four tokens reads the weights once, as one token does."""
    found = chosen(drafting({"algorithm.prompts_per_step": 16}))
    assert found.replicas.drafted == 3


def test_drafts_are_not_chosen_where_arithmetic_bounds_generation_and_few_are_accepted() -> None:
    """H20 computes little for what it reads: at 64 rollouts a replica each checked token costs as much as a new one."""
    crowd = {
        "algorithm.prompts_per_step": 512,
        "rollout.speculative.acceptance": 0.2,
        "rollout.max_tokens": 1024,
        "workload.lengths.scale": 0.05,
    }
    assert chosen(drafting(crowd)).replicas.drafted == 0


# What is open -------------------------------------------------------------------------------------


def test_every_way_to_generate_is_tried_with_each_number_of_drafted_tokens() -> None:
    space = Space.open(drafting())
    assert [each.drafted for each in space.replicas] == [0, 1, 3]
    own = [each.change(space.run.rollout).drafts for each in space.replicas]
    assert own == [
        None,
        *(SpeculativeConfig(tokens=n, acceptance=0.8, model=DRAFTER) for n in (1, 3)),
    ]
    absent = Space.open(drafting(speculative=None))
    assert {each.drafted for each in absent.replicas} == {None}
    rollout = absent.run.rollout
    assert absent.replicas[0].change(rollout).speculative == rollout.speculative


def test_without_drafts_nothing_is_kept_for_them() -> None:
    space = Space.open(drafting())
    own = resolve(space.run).replica
    sizes = [draft_bytes(each.place(own, own.pool)) for each in space.replicas]
    assert sizes[0] == (0.0, 0.0) and sizes[1] == sizes[2] > (0.0, 0.0)


def test_drafting_counts_as_something_to_set_up() -> None:
    space = Space.open(drafting())
    counts = dict(
        zip(
            (space.candidate(i).replicas.drafted for i in range(3)),
            complexities(space),
            strict=True,
        )
    )
    assert counts[1] == counts[3] == counts[0] + 1


def test_replicas_of_two_kinds_draft_alike() -> None:
    run = drafting(mixes_replicas=True, rollout_gpus=None, rollout_tensor_parallel=[1, 2], unit=8)
    space = Space.open(run)
    replica, pools = resolve(run).replica, run.cluster.pools
    fleets = mixed_fleets(replica, pools, run.plan, space.replicas, space.trainers)
    assert fleets
    for fleet in fleets:
        first, second = fleet.kinds
        assert first.drafted == second.drafted
        fleet.change(run.rollout)


# What a plan says of them -------------------------------------------------------------------------


def test_a_plan_says_whose_drafts_it_reckons_with_and_what_it_took_for_accepted() -> None:
    run = drafting()
    said = (
        "are accepted with probability 0.8 each where all before were, as rollout.speculative.acceptance says: "
        "1 drafted make 1.80 tokens a step, 3 drafted make 2.95 tokens a step"
    )
    counts = run.plan.speculative
    assert drafts_text(run.rollout.speculative, counts) == f"drafts of {DRAFTER} {said}"
    assert drafts_text(SpeculativeConfig(tokens=2, acceptance=0.8), counts) == (
        f"drafts of the model's own layer for multi-token prediction {said}"
    )
    assert drafts_text(run.rollout.speculative, None) == ""


@pytest.mark.parametrize(("drafted", "tokens"), [(0, 2), (3, 3)])
def test_a_planned_file_drafts_as_chosen_and_can_be_planned_again(
    drafted: int, tokens: int, tmp_path: Path
) -> None:
    space = Space.open(drafting())
    candidate = next(
        space.candidate(i) for i in range(3) if space.candidate(i).replicas.drafted == drafted
    )
    settings, run = settings_of(candidate), candidate.apply(space.run)
    assert settings["rollout.speculative.enabled"] is (drafted > 0)
    assert settings.get("rollout.speculative.tokens") == (drafted or None)
    write_run(run, tmp_path / "plan.toml", stated=settings)
    loaded = load_run(tmp_path / "plan.toml")
    assert loaded.rollout.speculative == SpeculativeConfig(
        tokens=tokens, acceptance=0.8, model=DRAFTER, enabled=drafted > 0
    )
    assert len(Space.open(replace(loaded, plan=space.run.plan)).replicas) == 3


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"speculative": [65]}, r"plan\.speculative must be in .0, 64., got 65"),
        ({"speculative": [-1]}, r"plan\.speculative must be in .0, 64., got -1"),
        ({"speculative": []}, r"plan\.speculative is empty"),
    ],
)
def test_a_wrong_list_of_drafts_is_refused_by_key_and_value(
    plan: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        drafting(**plan)


def test_drafts_are_not_chosen_among_before_somebody_says_how_many_are_accepted() -> None:
    with pytest.raises(
        ValueError, match=r"plan\.speculative=\[0, 1\] needs the section rollout\.speculative"
    ):
        few({}, **NARROW, speculative=[0, 1])
    run = drafting()
    assert replace(run.rollout, speculative=None).drafts is None
