"""What a run file may not ask of scorers; raises `RunError`."""

from __future__ import annotations

import re
from math import isfinite
from typing import get_args
from urllib.parse import urlsplit

from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError, shown
from streamrl.runfile.reward_config import REWARD_MODEL, RewardConfig, ScorerName, function_of

MOST_AT_ONCE = 256
POSITIVE_SECONDS = Bounds(0, 1e6, excludes_least=True)
NAMES: tuple[str, ...] = get_args(ScorerName)
PARAMETERS = {
    "pattern": ("regex", "format"),
    "beyond": ("length-penalty",),
    "until": ("length-penalty",),
    "endpoint": ("judge",),
    "model": ("judge", "reward-model"),
}
"""Keys that some scorers need, and no other has."""


def check_rewards(run: Run) -> None:
    """Refuse scorers that are none, and such as lack what they need or have what they do not know."""
    verifier = run.verifier
    if verifier.scorer is not None and verifier.reward:
        text = f"verifier.scorer {shown(verifier.scorer)} stands beside {len(verifier.reward)} [[verifier.reward]]: one of both says what scores"
        raise RunError("verifier.scorer", verifier.scorer, text=text, others=("verifier.reward",))
    for place, reward in enumerate(verifier.rewards):
        _check_scorer(verifier.key(place), reward)
    for place, reward in enumerate(verifier.reward):
        _check_numbers(f"verifier.reward.{place}", reward, run.rollout.max_tokens)
    _check_reward_model(run)
    labels = [reward.label for reward in verifier.rewards]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            key = f"verifier.reward.{place}.name"
            text = f"{key} must differ from that of every other reward, got {shown(label)} twice"
            raise RunError(key, verifier.rewards[place].name, str, text)


def _check_scorer(key: str, reward: RewardConfig) -> None:
    scorer = reward.scorer
    if scorer not in NAMES and function_of(scorer) is None:
        ours = f"{OneOf(NAMES)}, python:FILE.py:FUNCTION or MODULE:FUNCTION"
        raise RunError(key, scorer, OneOf(NAMES), f"{key} must be {ours}, got {shown(scorer)}")
    for name, scorers in PARAMETERS.items():
        value = getattr(reward, name)
        here = f"{key.removesuffix('.scorer')}.{name}"
        if scorer in scorers and value is None:
            text = f"{here} is missing: scorer {scorer} needs it"
            if key == "verifier.scorer":
                text = f"{key} {scorer!r} needs a {name}, which a [[verifier.reward]] has"
            raise RunError(here, None, text=text, others=(key,), problem="missing key")
        if scorer not in scorers and value is not None:
            text = f"{here} is known by {' and '.join(scorers)} alone, got {shown(value)} of scorer {shown(scorer)}"
            raise RunError(here, value, text=text, others=(key,))


def _check_reward_model(run: Run) -> None:
    """Refuse a reward model without GPUs, a second one, and keys of one where there is none."""
    verifier = run.verifier
    models = [at for at, each in enumerate(verifier.rewards) if each.scorer == REWARD_MODEL]
    if models and verifier.pool is None:
        text = f"verifier.pool is missing: {verifier.key(models[0])} {REWARD_MODEL!r} computes in a pool"
        raise RunError("verifier.pool", None, str, text, (verifier.key(models[0]),))
    if len(models) > 1:
        key = verifier.key(models[1])
        text = f"{key} {REWARD_MODEL!r} stands beside {verifier.key(models[0])}: verifier.pool has one reward model"
        raise RunError(key, REWARD_MODEL, text=text, others=(verifier.key(models[0]),))
    for at, reward in enumerate(verifier.rewards):
        if reward.step_end is not None and (reward.scorer != REWARD_MODEL or not reward.step_end):
            key = f"verifier.reward.{at}.step_end"
            text = f"{key} must be the end of a step, of {REWARD_MODEL} alone, got {shown(reward.step_end)} of {reward.scorer}"
            raise RunError(key, reward.step_end, str, text, (verifier.key(at),))


def _check_judge(key: str, reward: RewardConfig) -> None:
    if not 1 <= reward.at_once <= MOST_AT_ONCE:
        raise RunError(f"{key}.at_once", reward.at_once, Bounds(1, MOST_AT_ONCE))
    if not 0 < reward.request_time < float("inf"):
        raise RunError(f"{key}.request_time", reward.request_time, POSITIVE_SECONDS)
    if reward.endpoint is None:
        return
    try:
        url = urlsplit(reward.endpoint)
        is_one = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        text = f"{key}.endpoint must be the URL of a server, such as http://127.0.0.1:8000/v1, got {shown(reward.endpoint)}"
        raise RunError(f"{key}.endpoint", reward.endpoint, str, text)


def _check_numbers(key: str, reward: RewardConfig, max_tokens: int) -> None:
    if not isfinite(reward.weight) or reward.weight == 0:
        text = f"{key}.weight must be a finite number other than 0, got {reward.weight}"
        raise RunError(f"{key}.weight", reward.weight, float, text)
    low, high = reward.bounds
    if not (isfinite(low) and isfinite(high) and low < high):
        text = (
            f"{key}.bounds must be two finite numbers in rising order, got {shown(reward.bounds)}"
        )
        raise RunError(f"{key}.bounds", reward.bounds, list, text)
    _check_judge(key, reward)
    if reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            text = f"{key}.pattern is no regular expression: {error}, got {shown(reward.pattern)}"
            raise RunError(f"{key}.pattern", reward.pattern, str, text) from None
    if reward.beyond is None or reward.until is None:
        return
    for name, number, bounds in (
        ("beyond", reward.beyond, Bounds(0, max_tokens - 1)),
        ("until", reward.until, Bounds(reward.beyond + 1)),
    ):
        if not bounds.hold(number):
            raise RunError(f"{key}.{name}", number, bounds)
