"""Families and data sources of prompts, by which trainers select groups and evaluations are split."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.keys import join_key, trainer_key
from streamrl.runfile.roles_config import SecondaryTrainerConfig

FAMILY = "family"
"""Field of a prompt's record that names its family if it has no task."""
DATA_SOURCE = "data_source"
"""Column of verl's data sets with the name of the one that a prompt comes from."""


def prompt_family(record: Mapping[str, object]) -> str | None:
    """Return the family of a prompt for the figures of a run: its task, else its family; None if it has neither."""
    family = record.get("task", record.get(FAMILY))
    return None if family is None else str(family)


def prompt_source(record: Mapping[str, object]) -> str | None:
    """Return the data source of a prompt for scores by source: verl's column, else its task or family; None without any."""
    source = record.get(DATA_SOURCE)
    return prompt_family(record) if source is None else str(source)


def check_families(followers: Sequence[SecondaryTrainerConfig], known: Collection[str]) -> None:
    """Reject families without any prompt, because a trainer would wait for them forever.

    Raises:
        RunError: a family has no prompt; the error names the trainer's key and the family.
    """
    for number, follower in enumerate(followers, start=1):
        for family in follower.families:
            if family not in known:
                raise _no_such(join_key(trainer_key(number), "families"), family, known)


def _no_such(key: str, family: str, known: Collection[str]) -> RunError:
    if not known:
        where = "the prompts of this run have no families; add a task or family to each record of the prompts, "
        where += "and for a simulation a column family next to prompt_id in workload.lengths.source"
        return RunError(key, family, None, f"{key} names {shown(family)}, but {where}")
    allowed = OneOf(sorted(known))
    return RunError(key, family, allowed, f"{key} must name {allowed}, got {shown(family)}")
