"""Pass each message of a trace to the readers that use its type.

Most messages of a run are of four types, and most readers use few types. One pass over the entries for
all readers costs a fraction of one pass for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

from streamrl.engine.messages import Command, Event, Message
from streamrl.engine.trace import Entry

AnyEntry: TypeAlias = tuple[float, Event, Sequence[Command]]
Handler: TypeAlias = Callable[[Any, float], None]
"""Called with a message, and the instant of its entry in seconds."""
Handlers: TypeAlias = Mapping[type[Message] | type[Entry], Handler]
"""Handler of each type of message. A handler of `Entry` is called with each entry, after its messages."""
TYPES = (*get_args(Event), *get_args(Command), Entry)
"""All types that may have handlers."""


class MessageReader(ABC):
    """Reads a trace block by block. It gets only messages of the types that it handles."""

    now = 0.0
    """Instant of the last entry that was read."""

    @abstractmethod
    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that the reader uses, and those of readers that it contains."""

    def read(self, entries: Sequence[AnyEntry]) -> None:
        """Read the next entries of the trace."""
        pass_on(entries, self.handlers())
        if entries:
            self.end_block(entries[-1][0])

    def end_block(self, now: float) -> None:
        """Set the instant of the last entry, also in readers that it contains and that need it."""
        self.now = now


def pass_on(entries: Iterable[AnyEntry], readers: Iterable[Handlers]) -> None:
    """Call all handlers of each event and then of each of its commands, in the order of the readers."""
    by_type: dict[type, tuple[Handler, ...]] = dict.fromkeys(TYPES, ())
    for handlers in readers:
        for kind, handle in handlers.items():
            by_type[kind] = (*by_type[kind], handle)
    at_end = by_type[Entry]
    for entry in entries:
        time, event, commands = entry
        for handle in by_type[type(event)]:
            handle(event, time)
        for command in commands:
            for handle in by_type[type(command)]:
                handle(command, time)
        for handle in at_end:
            handle(entry, time)
