"""Keys of `[algorithm]` that say nothing to the algorithm, or to the correction, that is chosen beside them.

They are looked for in the table of a run file, which tells what is stated: a run has its defaults too. What is said here
of a table is said of one in which nothing else is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from streamrl.runfile.algorithm_config import AlgorithmConfig, AlgorithmName, CorrectionName
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.trainers import TRAINER, is_list, trainer_key

READ_BY_NAME: dict[str, tuple[AlgorithmName, ...]] = {
    "beta": ("dpo",),
    "critic_learning_rate": ("ppo",),
    "gae_lambda": ("ppo",),
    "loss_mean": ("grpo", "dr-grpo", "rloo", "reinforce++", "raft", "ppo"),
}
"""Algorithms whose loss a key is in; every one reads what is not here."""
CLIPPING: tuple[CorrectionName, ...] = ("none", "gspo", "cispo", "decoupled")
READ_BY_CORRECTION: dict[str, tuple[CorrectionName, ...]] = {
    "clip": CLIPPING,
    "clip_high": CLIPPING,
    "correction_cap": ("token-tis", "seq-tis", "icepop", "decoupled"),
    "second_moment": ("m2po",),
}
"""The same of corrections."""
CLIPPED_TOO: dict[CorrectionName, CorrectionName] = {"token-tis": "decoupled"}
"""The correction that has the same weights and a clip, by the one that has none."""

Table: TypeAlias = dict[str, Any]


class _Unused(NamedTuple):
    section: Table
    """Where the key stands, and under which key that is."""
    place: str
    name: str
    chosen: AlgorithmConfig
    """Of which nothing but name and correction is said."""


def find_unused(table: Table) -> Iterator[RunError]:
    """Yield an error for each key of an algorithm that is stated, and that no trainer which has it reads."""
    for unused in _find(table):
        yield _error(unused)


def drop_unused(table: Table) -> None:
    """Take those keys out of a table, which older versions took, and recorded."""
    for unused in list(_find(table)):
        del unused.section[unused.name]


def _find(table: Table) -> Iterator[_Unused]:
    leader: Table = table["algorithm"]
    trainers = table[TRAINER][1:] if is_list(table) else []
    followers: list[Table] = [trainer.get("algorithm", {}) for trainer in trainers]
    for name in leader:
        heirs = [{**leader, **own} for own in followers if name not in own]
        if not any(_reads(_chosen(each), name) for each in (leader, *heirs)):
            yield _Unused(leader, "algorithm", name, _chosen(leader))
    for number, own in enumerate(followers, start=1):
        chosen, place = _chosen({**leader, **own}), f"{trainer_key(number)}.algorithm"
        yield from (_Unused(own, place, name, chosen) for name in own if not _reads(chosen, name))


def _chosen(stated: Table) -> AlgorithmConfig:
    choice = {key: stated[key] for key in ("name", "correction") if key in stated}
    return AlgorithmConfig(steps=1, prompts_per_step=1, **choice)


def _reads(chosen: AlgorithmConfig, key: str) -> bool:
    by_name = chosen.name in READ_BY_NAME.get(key, (chosen.name,))
    return by_name and chosen.corrected_by in READ_BY_CORRECTION.get(key, (chosen.corrected_by,))


def _error(unused: _Unused) -> RunError:
    chosen, correction = unused.chosen, unused.chosen.corrected_by
    key = f"{unused.place}.{unused.name}"
    readers: tuple[str, ...] = READ_BY_NAME.get(unused.name, ())
    instead, others, with_what = OneOf(()), tuple[str, ...](), f"name {chosen.name!r}"
    if unused.name in READ_BY_CORRECTION and correction is None:
        with_what += ", which takes no correction"
    elif unused.name in READ_BY_CORRECTION and correction is not None:
        readers = READ_BY_CORRECTION[unused.name]
        with_what = f"correction {correction!r}" + ("" if chosen.correction else " (the default)")
        if readers == CLIPPING and correction in CLIPPED_TOO:
            instead, others = OneOf([CLIPPED_TOO[correction]]), (f"{unused.place}.correction",)
    hint = _hint(readers, instead)
    text = f"{key} does nothing with {with_what}, got {shown(unused.section[unused.name])}{hint}"
    value = unused.section[unused.name]
    return RunError(key, value, instead, text, others, problem="unused key")


def _hint(readers: tuple[str, ...], instead: OneOf) -> str:
    also = f"; {instead} weighs the same and clips, as TRL and verl do" if instead else ""
    return f": it is read with {', '.join(readers)}{also}" if readers else ""
