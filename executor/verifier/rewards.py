"""What a run's completions are scored by: of each `[[verifier.reward]]` its scorer."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, cast

from streamrl.executor.verifier.reward_function import function_scorer
from streamrl.executor.verifier.scorers import EXACT, MATH_VERIFY, REASONING_GYM, Scorer
from streamrl.executor.verifier.text_scorers import (
    format_scorer,
    judge_scorer,
    length_scorer,
    model_scorer,
    regex_scorer,
)
from streamrl.executor.verifier.unit_tests import unit_tests_scorer
from streamrl.runfile.reward_config import RewardConfig, ScorerName, function_of

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record


def make_scorer(reward: RewardConfig) -> Scorer:
    """Return what scores by a reward whose keys were checked; nothing is imported for it yet."""
    function = function_of(reward.scorer)
    if function is not None:
        return function_scorer(function, reward.bounds)
    name = cast(ScorerName, reward.scorer)
    match name:
        case "exact":
            return EXACT
        case "math-verify":
            return MATH_VERIFY
        case "reasoning-gym":
            return REASONING_GYM
        case "regex":
            return regex_scorer(_given(reward.pattern))
        case "format":
            return format_scorer(_given(reward.pattern))
        case "length-penalty":
            assert reward.beyond is not None and reward.until is not None, (
                "check_rewards wants both"
            )
            return length_scorer(reward.beyond, reward.until)
        case "unit-tests":
            return unit_tests_scorer(reward.credit)
        case "judge":
            return judge_scorer(reward.bounds)
        case "reward-model":
            return model_scorer()
        case _:
            assert_never(name)


def is_scored(record: Record, reward: RewardConfig) -> bool:
    """Whether completions to a record are scored by a reward."""
    return not reward.families or record.get("family") in reward.families


def _given(pattern: str | None) -> str:
    assert pattern is not None, "check_rewards wants a pattern"
    return pattern
