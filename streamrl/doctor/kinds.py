"""What is looked at of a replica is looked at of every kind of replica, each alone, with its own keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain

from streamrl.doctor import divisibility, memory
from streamrl.doctor.finding import Finding, of_part
from streamrl.doctor.fix import Fix, fix_of_part
from streamrl.runfile.config import Run
from streamrl.runfile.sides import kind_key, kind_name, own_keys

NAME = re.compile(r"rollout-(?P<number>\d+)-(?P<rest>.+)")
"""Of findings: `rollout-2-memory` is `rollout-memory` of the second kind."""


def find(run: Run) -> Iterator[Finding]:
    """Find what is wrong with each kind of replica beside the one that is named first."""
    for kind in range(1, run.num_kinds):
        seen = run.of_kind(kind)
        for finding in chain([memory.find_replica(seen)], divisibility.find_replica(seen)):
            name = kind_name(kind)
            yield of_part(finding, "rollout", name, name, partial(own_keys, kind=kind))


def fix_of(name: str, fixes: dict[str, Fix]) -> Fix | None:
    """Return what may mend a finding of another kind of replica; None where it is none."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    kind, fix = int(match["number"]) - 1, fixes[f"rollout-{match['rest']}"]
    return fix_of_part(
        fix,
        lambda run: run.of_kind(kind),
        partial(own_keys, kind=kind),
        f"change {kind_key(kind)}: {own_keys(fix.otherwise, kind)}",
    )
