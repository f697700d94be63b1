"""How the books of a run stand: what is in them, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

MOST_FAULTS = 3
"""Faults that are told one by one: the first ones say what is wrong."""


class TrainerBalance(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rollouts that were drawn, as one trainer sees them."""

    name: str
    trained: int
    """Those that a step which stayed was made of."""
    dropped: dict[str, int]
    """Those that it gave up, by reason."""
    open: int
    """Those that were still under way when the record ended."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the books of a run balance, and what is in them."""

    is_balanced: bool
    drawn: int
    """Rollouts, those that a resume took back left out."""
    trainers: list[TrainerBalance]
    """The one that leads first."""
    staleness: int
    """Most versions that a token was behind the one that was trained from."""
    max_staleness: int | None
    """Most that the run file allows; None where its consumption keeps no bound."""
    checksummed: int | None
    """Versions of which every replica that served them found the checksum that was pushed; None of a simulation."""
    unverified: int = 0
    """Versions that were pushed without one, as in records of earlier versions of this program."""
    legs: int = 1
    """How often the run was begun or resumed."""
    first_leg: int = 1
    """The one that the books begin with: a later one where the records of those before are not there."""
    taken_back: int = 0
    """Rollouts whose end a resume took back."""
    faults: list[str] = []
    """What is wrong, the first few."""
    num_faults: int = 0


@dataclass(slots=True)
class Faults:
    """What is wrong with the books."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, fault: str, of: str = "") -> None:
        """Take note of one, of whom `of` tells."""
        self.count += 1
        if self.count <= MOST_FAULTS:
            self.first.append(of + fault)
