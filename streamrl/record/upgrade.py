"""Traces of format 1 as ones of format 2: what their commands left to the engine's state is filled in.

Format 1 had one trainer, which no message named; an abort did not say where its rollout runs, nor a step what it is
made of; and the engine learnt from siblings by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from streamrl.engine.messages import Command, DrawnGroup, Event, ExpectationsChanged, Generated
from streamrl.engine.siblings import SiblingLengths

OLD_FORMAT = 1
OF_A_TRAINER = (
    *("StartTrainer", "Take", "Score", "Train", "Step", "PushWeights", "SaveCheckpoint"),
    *("TrainerStarted", "Scored", "Trained", "Stepped", "CheckpointSaved"),
)
"""Messages that name their trainer since."""

Table: TypeAlias = dict[str, Any]
RawEntry: TypeAlias = tuple[float, Table, list[Table]]
"""Instant, event and commands as JSON gives them."""


def upgrade_entries(
    entries: Iterable[RawEntry], learns_from_siblings: bool
) -> Iterator[tuple[float, Event, list[Command]]]:
    """Yield the entries of a trace of format 1 as today's.

    Raises:
        msgspec.ValidationError: an entry is of no format.
        KeyError: an entry speaks of what was never begun.
    """
    upgrade = _Upgrade()
    siblings = SiblingLengths() if learns_from_siblings else None
    for time, old_event, old_commands in entries:
        event = msgspec.convert(upgrade.message(old_event), Event)
        if siblings is not None and (news := _learn(siblings, event)) is not None:
            yield time, news, []
        commands = [upgrade.message(command) for command in old_commands]
        yield time, event, msgspec.convert(commands, list[Command])


def _learn(siblings: SiblingLengths, event: Event) -> ExpectationsChanged | None:
    """Return what the engine of then learnt by itself."""
    if isinstance(event, Generated):
        return siblings.learn(event)
    groups: tuple[DrawnGroup, ...] = getattr(event, "groups", ())
    siblings.add(groups)
    return None


class _Upgrade:
    """Follows a trace, and fills in what its messages did not say."""

    def __init__(self) -> None:
        self._version = 0
        self._replica: dict[int, int] = {}
        """By rollout: where it was sent last."""
        self._taken: dict[int, None] = {}
        """Groups of the coming step, in the order in which they were taken."""

    def message(self, old: Table) -> Table:
        """Return a command or an event as it is written today."""
        new = dict(old)
        kind = old.get("type")
        if kind in OF_A_TRAINER:
            new["trainer"] = 0
        match kind:
            case "RunStarted":
                self._version = old["version"]
            case "StartTrainer":
                new["version"] = self._version
            case "Generate":
                self._replica[old["rollout"]] = old["replica"]
            case "Abort":
                new["replica"] = self._replica[old["rollout"]]
            case "Take":
                self._taken[old["group"]] = None
            case "Drop":
                self._taken.pop(old["group"], None)
            case "Step":
                new["groups"] = list(self._taken)
            case "Stepped":
                self._taken.clear()
            case "Failed":
                new["command"] = self.message(old["command"])
            case _:
                pass  # says today what it said then
        return new
