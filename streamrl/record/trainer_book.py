"""The book of one trainer: what it has yet to train on, what it trained on, what it gave up and why."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from streamrl.engine.messages import DrawnGroup
from streamrl.engine.trainer_side import ROLLED_BACK
from streamrl.record.saved_books import SavedBook


@dataclass(slots=True)
class TrainerBook:
    """See the module; `streamrl.record.books` tells it what happens."""

    name: str
    complain: Callable[[str], None]
    """Told what is wrong."""
    is_there: bool = True
    """False of one that joins later in a leg, until it does."""
    version: int = 0
    newest: int = 0
    """Newest version that it ever made, taken back or not."""
    num_trained: int = 0
    """Rollouts that steps which stayed were made of."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rollouts that it gave up, by reason."""
    open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rollouts of the groups that it is to train on, in the order of their draw."""
    done_before: frozenset[int] = frozenset()
    """Groups that are drawn again by a resume though its checkpoint has them."""
    groups: tuple[int, ...] = ()
    """Groups of the step under way, or of the last one."""

    _in_gradient: set[int] = field(default_factory=set)
    _unsaved: array[int] = field(default_factory=lambda: array("q"))
    """Rollouts of each step since the last checkpoint, up to the one that made `version`."""

    @property
    def num_open(self) -> int:
        """Rollouts that it is to train on."""
        return sum(map(len, self.open.values()))

    @property
    def num_ended(self) -> int:
        """Rollouts that it trained on or gave up."""
        return self.num_trained + sum(self.dropped.values())

    def draw(self, drawn: DrawnGroup) -> None:
        """Enter that a group was drawn, which it is to train on unless it has."""
        if self.is_there and drawn.group not in self.done_before:
            self.open[drawn.group] = drawn.rollouts

    def train(self, rollouts: tuple[int, ...]) -> None:
        """Enter that the gradient of rollouts is accumulated."""
        for rollout in self._in_gradient.intersection(rollouts):
            self.complain(f"rollout {rollout} was trained on twice in one step")
        self._in_gradient.update(rollouts)

    def end_step(self, version: int) -> set[int]:
        """Enter that a step has made `version`; return the rollouts that the trainer is done with."""
        made_of = {r for group in self.groups for r in self.open.pop(group, ())}
        trained, self._in_gradient = self._in_gradient, set()
        if trained != made_of:
            self._blame(version, trained - made_of, made_of - trained)
        self.version = version
        self.newest = max(self.newest, version)
        self.num_trained += len(made_of)
        self._unsaved.append(len(made_of))
        return made_of

    def _blame(self, version: int, others: set[int], missing: set[int]) -> None:
        """Complain of what a step was made of beside its open groups, and of what it left out of these."""
        is_open = {r for rollouts in self.open.values() for r in rollouts}
        for rollout in sorted(others):
            why = "is of none of its groups" if rollout in is_open else "was not open any more"
            self.complain(f"step {version} trained on rollout {rollout}, which {why}")
        for rollout in sorted(missing):
            self.complain(f"step {version} lost rollout {rollout} of its own groups")

    def save(self, version: int) -> None:
        """Enter that its checkpoint of `version` is on disk."""
        del self._unsaved[: max(0, len(self._unsaved) - (self.version - version))]

    def lose(self) -> None:
        """Enter that it is lost, and with it every step since its last checkpoint."""
        if num := sum(self._unsaved):
            self.num_trained -= num
            self.dropped[ROLLED_BACK] += num
        del self._unsaved[:]
        self._in_gradient = set()

    def leave_out(self, group: int, reason: str) -> tuple[int, ...]:
        """Enter that it gives a group up; return its rollouts, none where it is done with them."""
        rollouts = self.open.pop(group, ())
        if rollouts:
            self.dropped[reason] += len(rollouts)
            self._in_gradient.difference_update(rollouts)
        return rollouts

    def fall_back_to(self, version: int, saved: SavedBook | None) -> None:
        """Enter that the run begins, or goes on, at a version, with nothing under way and what was saved in the book."""
        self.version, self.open = version, {}
        self.num_trained = 0 if saved is None else saved.trained
        self.dropped = Counter() if saved is None else saved.dropped.copy()
        self.groups, self._in_gradient, self.done_before = (), set(), frozenset()
        del self._unsaved[:]
