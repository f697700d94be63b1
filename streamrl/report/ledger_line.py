"""Whether the books of a run balance, in one line."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.record.balance import Balance, TrainerBalance


def ledger_line(ledger: Balance) -> str:
    """Return what became of all rollouts and versions: `ledger: 32 rollouts drawn: 32 trained once; …`."""
    return "ledger: " + "; ".join(_parts(ledger))


def tell_faults(ledger: Balance) -> str:
    """Return what is wrong with the books, as far as it is told one by one; nothing where they balance."""
    more = ledger.num_faults - len(ledger.faults)
    return ", ".join(ledger.faults) + (f" and {more:,} more" if more else "")


def _parts(ledger: Balance) -> Iterator[str]:
    if not ledger.is_balanced:
        yield f"does not balance: {tell_faults(ledger)}"
    if ledger.first_leg > 1:
        yield f"the books begin with leg {ledger.first_leg}, what was before is not known"
    leader, *followers = ledger.trainers
    yield f"{ledger.drawn:,} rollouts drawn: {_fates(leader)}"
    for follower in followers:
        yield f"{follower.name}: {_fates(follower)}"
    bound = ", not bounded" if ledger.max_staleness is None else f" of {ledger.max_staleness}"
    yield f"staleness at most {ledger.staleness}{bound}"
    if ledger.checksummed is not None:
        yield f"{ledger.checksummed:,} versions checksummed"
    if ledger.unverified:
        yield f"{ledger.unverified:,} recorded without checksums"
    if ledger.legs > 1:
        yield f"{ledger.legs} legs, {ledger.taken_back:,} rollouts taken back"


def _fates(trainer: TrainerBalance) -> str:
    """Return what became of the rollouts that one trainer was to train on."""
    fates = [f"{trainer.trained:,} trained once"]
    if trainer.dropped:
        by_reason = (
            f"{' '.join(reason.split())}: {num:,}" for reason, num in trainer.dropped.items()
        )
        fates.append(f"{sum(trainer.dropped.values()):,} dropped ({', '.join(by_reason)})")
    if trainer.open:
        fates.append(f"{trainer.open:,} open")
    return ", ".join(fates)
