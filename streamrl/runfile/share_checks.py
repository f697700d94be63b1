"""Shares of the stream that no trainer can take; raises `RunError`."""

from __future__ import annotations

from math import fsum

from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError, shown
from streamrl.runfile.keys import join_key
from streamrl.runfile.sides_config import FollowerConfig
from streamrl.runfile.trainers import trainer_key

ROUNDING = 1e-6
"""By which shares that add up to 1 may miss it as they are written down."""


def check_shares(run: Run) -> None:
    """Refuse bounds that no group lies within, families without a name, several GPUs of one that counts, and rewards whose shares do not add up."""
    for number, follower in enumerate(run.followers, start=1):
        key = trainer_key(number)
        _check_order(key, follower, "staleness")
        _check_order(key, follower, "reward")
        _check_families(key, follower)
        _check_counting(key, follower)
    _check_group_rewards(run)


def _check_order(key: str, follower: FollowerConfig, what: str) -> None:
    least, most = getattr(follower, f"min_{what}"), getattr(follower, f"max_{what}")
    if least is None or most is None or least <= most:
        return
    lower, upper = join_key(key, f"min_{what}"), join_key(key, f"max_{what}")
    text = f"{upper} must be at least {lower}={least:g}, got {most:g}"
    raise RunError(upper, most, Bounds(least), text, (lower,))


def _check_families(key: str, follower: FollowerConfig) -> None:
    for place, family in enumerate(follower.families):
        if not family or family in follower.families[:place]:
            here = join_key(key, "families")
            what = "have a name each" if not family else "be named once each"
            text = f"{here} must {what}, got {shown(list(follower.families))}"
            raise RunError(here, list(follower.families), None, text)


def _check_counting(key: str, follower: FollowerConfig) -> None:
    if follower.counts_only and follower.num_gpus > 1:
        here = join_key(key, "counts_only")
        text = (
            f"{here} must be false for {follower.num_gpus} GPUs: who only counts has one, got True"
        )
        raise RunError(here, True, OneOf([False]), text, (join_key(key, "data_parallel"),))


def _check_group_rewards(run: Run) -> None:
    pairs, key = run.workload.group_rewards, "workload.group_rewards"
    for reward, share in pairs:
        if not (Bounds(-1e9, 1e9).hold(reward) and Bounds(0, 1, excludes_least=True).hold(share)):
            text = f"{key} must hold pairs of a mean reward and a share in (0, 1], got {[reward, share]}"
            raise RunError(key, pairs, None, text)
    total = fsum(share for _, share in pairs)
    if pairs and abs(total - 1) > ROUNDING:
        text = f"{key} must have shares that add up to 1, got {total:g}"
        raise RunError(key, pairs, None, text)
