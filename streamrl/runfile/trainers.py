"""Several trainers in a run file: `[[trainer]]` repeats, the first one leads; one alone is written `[trainer]`."""

from __future__ import annotations

from typing import Any

TRAINER, FOLLOWERS = "trainer", "followers"


def trainer_key(trainer: int) -> str:
    """Return the key of a trainer's section, the leading one first."""
    return f"{TRAINER}.{trainer}" if trainer else TRAINER


def is_list(table: dict[str, Any]) -> bool:
    """Return whether a run file's table has its trainers in a list."""
    return isinstance(table.get(TRAINER), list)


def full_key(table: dict[str, Any], parts: list[str]) -> list[str]:
    """Return a dotted key with the number of the trainer that leads, where it names none."""
    if is_list(table) and parts[0] == TRAINER and len(parts) > 1 and not parts[1].isdigit():
        return [TRAINER, "0", *parts[1:]]
    return parts


def split_trainers(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table, in which no error was found, with the trainer that leads apart from those that follow."""
    if not is_list(table):
        return table
    leader, *followers = table[TRAINER]
    return {**table, TRAINER: leader, FOLLOWERS: followers}


def join_trainers(table: dict[str, Any]) -> dict[str, Any]:
    """Return what `split_trainers` took apart as a run file has it."""
    followers = table.pop(FOLLOWERS, [])
    if followers:
        table[TRAINER] = [table[TRAINER], *followers]
    return table
