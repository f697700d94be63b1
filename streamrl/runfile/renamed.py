"""What older run files name otherwise: said in one line by whatever reads a run file, replaced in old records."""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.keys import place_of


class Renamed(NamedTuple):
    """A key that moved, or one value of a key."""

    key: str
    """As it was."""
    now: str
    """The key, or the value, that stands for it."""
    value: str | None = None
    """The value that has another name; None where the key has."""


RENAMED = (
    Renamed("workload.verifier", "verifier.scorer"),
    Renamed("algorithm.correction", "token-tis", value="token_tis"),
    Renamed("algorithm.correction", "seq-tis", value="seq_tis"),
)
GONE = {
    "warm_up_steps": "the end of the start-up is found by itself; simulate.interval says how sure a step time must be",
    "plan.steps": "the chosen plan is simulated until simulate.interval is met, for at most simulate.max_steps",
    "plan.simulations": "as many plans are simulated as estimates leave in question; plan.finalists says how many of "
    "them for longer",
}
"""Keys that are no more, and what stands for each."""


OF_A_TRAINER = re.compile(r"trainer\.\d+\.(?=algorithm\.)")
"""What stands before a key of `[algorithm]` where a trainer that follows changes it."""


def renamed_key(key: str, value: object) -> RunError | None:
    """Return the error of a key that has another name now, or is no more; None of any other."""
    if key in GONE:
        text = f"{key} is no key any more, got {shown(value)}: {GONE[key]}"
        return RunError(key, value, OneOf(()), text, problem="unknown key")
    for old in RENAMED:
        if (old.key, old.value) == (key, None):
            text = f"{key} was renamed to {old.now}, got {shown(value)}"
            return RunError(key, value, OneOf([old.now]), text, problem="unknown key")
    return None


def renamed_value(key: str, value: object) -> RunError | None:
    """Return the error of a value that has another name now, of whichever trainer; None of any other."""
    for old in RENAMED:
        if old.value is not None and (old.key, old.value) == (OF_A_TRAINER.sub("", key), value):
            text = f"{key} {value!r} was renamed to {old.now!r}"
            return RunError(key, value, OneOf([old.now]), text)
    return None


def upgrade_run(table: dict[str, Any]) -> dict[str, Any]:
    """Return a run as an older `encode_run` wrote it, in the names of today's; what has them already stays as it is.

    What is no more is left out.

    Args:
        table: the JSON object of a trace's header, or of a run.json.
    """
    upgraded = copy.deepcopy(table)
    for old in RENAMED:
        section, name = place_of(upgraded, old.key)
        if old.value is not None:
            if section.get(name) == old.value:
                section[name] = old.now
        elif name in section:
            new_section, new_name = place_of(upgraded, old.now)
            new_section[new_name] = section.pop(name)
    for key in GONE:
        section, name = place_of(upgraded, key)
        section.pop(name, None)
    return upgraded
