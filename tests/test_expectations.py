"""What is expected of rollouts: by their siblings that finished, and by what their prompt took in earlier epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.executor.prompts import PromptWorkload
from streamrl.workload.length_posterior import SiblingLengths
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import small_run
from tests.scripted import ScriptedTokenizer

LEARN = {"policies.learns_from_siblings": True, "policies.order": "longest-first"}


def ended(rollout: int, tokens: int, finish: str = "stop") -> Generated:
    assert finish in ("stop", "length", "aborted")
    return Generated(rollout, tokens, finish, 0, 1.0, 0.1)  # type: ignore[arg-type]  # checked above


def drawn(group: int, *expected: int) -> DrawnGroup:
    """Return a group of four places of the numbering, of which it takes as many as lengths are expected."""
    return DrawnGroup(group, tuple(range(4 * group, 4 * group + len(expected))), 40, expected)


def siblings(*groups: DrawnGroup) -> SiblingLengths:
    found = SiblingLengths()
    found.add(groups)
    return found


# Siblings -----------------------------------------------------------------------------------------


def test_each_finished_sibling_counts_as_much_as_what_was_expected_at_first() -> None:
    lengths = siblings(drawn(0, 100, 100, 200, 400))
    # with one known its share is 1/2: 200 + 350, 100 + 400 and 400 + 250
    assert lengths.learn(ended(1, 900)) == ExpectationsChanged((0, 2, 3), (500, 550, 650))
    # with two known 1/3: 500 - 490/3 = 500 - 163, 650 - 640/3 = 650 - 213
    assert lengths.learn(ended(2, 10, "length")) == ExpectationsChanged((0, 3), (337, 437))
    # with three known 1/4: 437 + 63/4 = 437 + 16
    assert lengths.learn(ended(0, 500)) == ExpectationsChanged((3,), (453,))
    assert lengths.learn(ended(3, 1)) is None


@given(st.integers(1, 20000), st.lists(st.integers(1, 20000), min_size=1, max_size=8))
def test_it_is_the_mean_of_prior_and_known_but_for_rounding(prior: int, known: list[int]) -> None:
    lengths = siblings(DrawnGroup(0, tuple(range(len(known) + 1)), 40, (prior,) * (len(known) + 1)))
    for rollout, tokens in enumerate(known):
        found = lengths.learn(ended(rollout, tokens))
    assert found is not None and found.rollouts == (len(known),)
    assert abs(found.tokens[0] - (prior + sum(known)) / (1 + len(known))) <= len(known)


def test_an_abort_tells_nothing_and_other_groups_learn_nothing() -> None:
    lengths = siblings(drawn(0, 100, 100), drawn(1, 300, 300))
    assert lengths.learn(ended(0, 5000, "aborted")) is None
    assert lengths.learn(ended(4, 100)) == ExpectationsChanged((5,), (200,))
    assert lengths.learn(ended(0, 300)) == ExpectationsChanged((1,), (200,))


def test_nothing_is_expected_of_a_group_that_is_forgotten_or_was_never_drawn() -> None:
    lengths = siblings(drawn(0, 100, 100), drawn(1, 100, 100))
    lengths.forget(0)
    lengths.forget(0)
    lengths.forget(9)
    assert lengths.learn(ended(0, 500)) is None
    assert lengths.learn(ended(77, 500)) is None
    assert lengths.learn(ended(4, 500)) is not None


def test_a_group_that_is_drawn_again_begins_with_what_its_draw_says() -> None:
    lengths = siblings(drawn(0, 100, 100, 100))
    lengths.learn(ended(0, 900))
    lengths.add([drawn(0, 40, 40, 40)])
    assert lengths.learn(ended(0, 80)) == ExpectationsChanged((1, 2), (60, 60))


# Workloads ----------------------------------------------------------------------------------------


def test_a_simulated_workload_tells_what_siblings_told_where_that_is_asked_for() -> None:
    workload = SimulatedWorkload(small_run({**LEARN, "algorithm.group_size": 3}))
    first = workload.draw(0, 2)[0].drawn.expected_tokens
    found = workload.learn(ended(1, first[0] + 40))
    assert found == ExpectationsChanged((0, 2), (first[0] + 20, first[0] + 20))
    workload.forget(0)
    assert workload.learn(ended(0, 7)) is None
    plain = SimulatedWorkload(small_run())
    plain.draw(0, 1)
    plain.forget(0)
    assert plain.learn(ended(0, 7)) is None


def prompts(directory: Path, changes: dict[str, Any]) -> PromptWorkload:
    """Return two prompts, of which 10 and 90 tokens are expected, in groups of two."""
    file = directory / "prompts.jsonl"
    lines = [{"prompt": "p", "expected_tokens": tokens} for tokens in (10, 90)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = small_run({"workload.prompts": str(file), **changes})
    return PromptWorkload(run, ScriptedTokenizer())


def expected_of(workload: PromptWorkload, line: int, epoch: int) -> tuple[int, ...]:
    draws = [draw.drawn for draw in workload.draw(2 * epoch, 2)]
    return next(d.expected_tokens for d in draws if workload.line(d.group) == line)


def test_real_prompts_tell_what_siblings_told_where_that_is_asked_for(tmp_path: Path) -> None:
    workload = prompts(tmp_path, LEARN)
    first = workload.draw(0, 2)[0].drawn
    found = workload.learn(ended(first.rollouts[0], first.expected_tokens[0] + 30))
    assert found == ExpectationsChanged(first.rollouts[1:], (first.expected_tokens[0] + 15,))
    workload.forget(1)
    assert workload.learn(ended(2, 7)) is None
    plain = prompts(tmp_path, {})
    plain.draw(0, 2)
    assert plain.learn(ended(0, 7)) is None


def test_a_prompt_is_expected_to_take_what_it_took_in_earlier_epochs(tmp_path: Path) -> None:
    workload = prompts(tmp_path, {"workload.ranker.window": 8})
    drawn = [draw.drawn for draw in workload.draw(0, 8)]
    for group in drawn:
        for rollout in group.rollouts:
            tokens = (
                200 if workload.line(group.group) == 0 else 50
            )  # the opposite of what lines say
            workload.learn(ended(rollout, 1, "aborted"))
            workload.learn(ended(rollout, tokens))
    # each line came four times, with two rollouts: eight lengths count for more than a prior
    assert expected_of(workload, 0, epoch=4) > expected_of(workload, 1, epoch=4)
    told = prompts(tmp_path, {"workload.ranker.history": False, "workload.ranker.window": 8})
    assert expected_of(told, 0, epoch=0) == (10, 10)
    assert expected_of(told, 1, epoch=0) == (90, 90)


def test_what_is_learnt_changes_no_order_of_the_data(tmp_path: Path) -> None:
    changes = {
        "policies.tail_batching": "defer",
        "workload.ranker.window": 8,
        "algorithm.prompts_per_step": 1,
        "algorithm.steps": 3,
        "workload.lengths.ranker": "oracle",
    }
    fresh, taught = prompts(tmp_path, changes), prompts(tmp_path, changes)
    for draw in taught.draw(0, 8):
        for rollout in draw.drawn.rollouts:
            taught.learn(ended(rollout, 1 if taught.line(draw.drawn.group) else 250))
    groups = range(60)
    assert [taught.line(group) for group in groups] == [fresh.line(group) for group in groups]
    assert taught.draw(8, 3) != fresh.draw(8, 3)  # which expect other lengths of them
