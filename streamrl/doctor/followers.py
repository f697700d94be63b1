"""What is looked at of a trainer is looked at of those that follow too, each alone, with its own keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from streamrl.doctor import batch, divisibility, memory
from streamrl.doctor.finding import Finding, of_part
from streamrl.doctor.fix import Fix, fix_of_part
from streamrl.runfile.config import Run
from streamrl.runfile.trainers import trainer_key

NAME = re.compile(r"trainer\.(?P<trainer>\d+)-(?P<rest>.+)")
"""Of findings: `trainer.1-memory` is `trainer-memory` of the second trainer."""
OWN = re.compile(r"\btrainer\.(?=[a-z])")
"""Where a text names a key of the trainer."""


def find(run: Run) -> Iterator[Finding]:
    """Find what is wrong with each trainer that follows."""
    for number, follower in enumerate(run.followers, start=1):
        if follower.counts_only:
            continue  # has neither a model nor passes
        seen, key = run.as_seen_by(number), trainer_key(number)
        for look in (memory.find_trainer, divisibility.find_trainer, batch.find_trainer):
            for finding in look(seen):
                yield of_part(finding, "trainer", key, follower.name, partial(_own_text, key))


def fix_of(name: str, fixes: dict[str, Fix]) -> Fix | None:
    """Return what may mend a finding of a trainer that follows; None where it is none."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    number, rest = int(match["trainer"]), match["rest"]
    fix = fixes.get(f"trainer-{rest}") or fixes[rest]
    key = trainer_key(number)
    return fix_of_part(
        fix,
        lambda run: run.as_seen_by(number),
        lambda changed: _own_key(changed, key),
        _own_text(key, fix.otherwise),
    )


def _own_text(key: str, text: str) -> str:
    return OWN.sub(f"{key}.", text)


def _own_key(changed: str, key: str) -> str:
    """Return the key of a follower's own section that stands for one of the leader's."""
    section, _, rest = changed.partition(".")
    match section:
        case "trainer":
            return f"{key}.{rest}"
        case "algorithm":
            return f"{key}.{changed}"
        case _:
            return changed
