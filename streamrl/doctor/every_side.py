"""Repeat trainer checks for each secondary trainer and replica checks for each replica kind.

Each trainer and kind is checked with its own keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from streamrl.doctor import batch, divisibility, memory
from streamrl.hardware.resolved import ResolvedRun, resolve
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, Fix, fix_of_part, of_part
from streamrl.runfile.gpu_pools import kind_key, kind_name, own_keys
from streamrl.runfile.keys import trainer_key
from streamrl.workload.replica_batch import mean_lengths

TRAINER_FINDING = re.compile(r"trainer\.(?P<trainer>\d+)-(?P<rest>.+)")
"""Matches the names of findings of secondary trainers: `trainer.1-memory` is `trainer-memory` of trainer 1."""
OWN = re.compile(r"\btrainer\.(?=[a-z])")
"""Matches a key of the trainer in a text."""


def find_secondary_trainers(run: Run) -> Iterator[Finding]:
    """Find errors and warnings of each secondary trainer."""
    for number, follower in enumerate(run.followers, start=1):
        if follower.counts_only:
            continue  # has neither a model nor passes
        key = trainer_key(number)
        for finding in _find_trainer(resolve(run.as_seen_by(number))):
            yield of_part(finding, "trainer", key, follower.name, partial(_own_text, key))


def _find_trainer(resolved: ResolvedRun) -> Iterator[Finding]:
    trainer, algorithm = resolved.trainer, resolved.run.algorithm
    total, mean = algorithm.rollouts_per_step, mean_lengths(resolved.run)
    yield from memory.find_trainer(trainer)
    yield from divisibility.find_trainer(trainer.model, trainer.config)
    yield from batch.find_trainer(total, trainer.config, mean, trainer.longest_sequence)


def fix_of_secondary_trainer(name: str, fixes: dict[str, Fix]) -> Fix | None:
    """Return the fix of a secondary trainer's finding; None for other findings."""
    match = TRAINER_FINDING.fullmatch(name)
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
    """Return a secondary trainer's own key for a key of the primary trainer."""
    section, _, rest = changed.partition(".")
    match section:
        case "trainer":
            return f"{key}.{rest}"
        case "algorithm":
            return f"{key}.{changed}"
        case _:
            return changed


KIND_FINDING = re.compile(r"rollout-(?P<number>\d+)-(?P<rest>.+)")
"""Matches the names of findings of replica kinds: `rollout-2-memory` is `rollout-memory` of the second kind."""


def find_replica_kinds(resolved: ResolvedRun) -> Iterator[Finding]:
    """Find errors and warnings of each replica kind after the first."""
    mean = mean_lengths(resolved.run)
    for kind in range(1, resolved.run.rollout.num_kinds):
        replica, name = resolved.replicas[kind], kind_name(kind)
        fits = memory.find_replica(replica, mean)
        for finding in (fits, *divisibility.find_replica(replica.model, replica.config)):
            yield of_part(finding, "rollout", name, name, partial(own_keys, kind=kind))


def fix_of_replica_kind(name: str, fixes: dict[str, Fix]) -> Fix | None:
    """Return the fix of a finding of another replica kind; None for other findings."""
    match = KIND_FINDING.fullmatch(name)
    if match is None:
        return None
    kind, fix = int(match["number"]) - 1, fixes[f"rollout-{match['rest']}"]
    return fix_of_part(
        fix,
        lambda run: run.of_kind(kind),
        partial(own_keys, kind=kind),
        f"change {kind_key(kind)}: {own_keys(fix.otherwise, kind)}",
    )
