"""What a run file may not ask of prompts; raises `RunError`."""

from __future__ import annotations

from streamrl.runfile.config import Run
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.workload_config import HUB

OF_ONE = ("prompts", "subset", "split", "fields", "template")
"""Keys of `[workload]` that each `[[workload.source]]` has of its own."""


def check_prompt_sources(run: Run) -> None:
    """Refuse a mixture beside a data set of its own, two of one name, and what has no name on the hub."""
    workload = run.workload
    for name in OF_ONE if workload.source else ():
        if value := getattr(workload, name):
            key = f"workload.{name}"
            text = f"{key} stands beside [[workload.source]], each of which has its own, got {shown(value)}"
            raise RunError(key, value, text=text, others=("workload.source",))
    for place, source in enumerate(workload.sources):
        key = workload.key(place)
        if source.prompts == HUB:
            text = f"{key} must name a data set after {HUB}, got {shown(source.prompts)}"
            raise RunError(key, source.prompts, str, text)
    names = [source.name for source in workload.source if source.name is not None]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        place = [source.name for source in workload.source].index(twice)
        key = f"workload.source.{place}.name"
        raise RunError(key, twice, None, f"{key} must be of one source, got {shown(twice)} twice")
    _check_families(run, names)


def _check_families(run: Run, names: list[str]) -> None:
    """Refuse a reward of a source that there is not, where every source has a name."""
    if not names or len(names) < len(run.workload.source):
        return
    for place, reward in enumerate(run.verifier.reward):
        for family in reward.families:
            if family not in names:
                key = f"verifier.reward.{place}.families"
                allowed = OneOf(names)
                raise RunError(
                    key, family, allowed, f"{key} must name {allowed}, got {shown(family)}"
                )
