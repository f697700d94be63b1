"""What became of a run that something happened to, and of each of its rollouts, over all its legs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_args

from streamrl.engine.messages import (
    CheckpointSaved,
    Drop,
    Generate,
    Generated,
    PromptsDrawn,
    PushWeights,
    ReplicaStarted,
    RunStarted,
    Skip,
    Stepped,
    Trained,
    TrainerLost,
    WeightsLoaded,
)
from streamrl.engine.trace import Entry, Trace, read_trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.restarts import earlier_trace_numbers, earlier_trace_path
from streamrl.record.run_directory import TRACE
from streamrl.runfile.simulation_config import OF_REWARD_MODEL, FaultKind

KINDS: tuple[FaultKind, ...] = tuple(
    kind for kind in get_args(FaultKind) if kind not in OF_REWARD_MODEL
)
"""What strikes a run without a reward model, as those here are; tests strike one that has one."""
SIMULATED = ("stream-sync", "one-step-async", "stream-async", "fully-async", "colocated")


RAY = "127.0.0.1:6399"
"""Of the cluster that `make faults` begins."""


class Way(NamedTuple):
    """What is executed under faults."""

    settings: tuple[str, ...]
    needs: str | None = None
    """A package, without which it is left out."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a system, and not what another back end makes of one."""
        return len(self.settings) == 1


EXECUTED = {
    **{system: Way((f"policies.system={system}",)) for system in SIMULATED},
    "stream-async, vLLM": Way(("policies.system=stream-async", "rollout.backend=vllm"), "vllm"),
    "stream-async, 2 ranks": Way(
        ("policies.system=stream-async", "trainer.data_parallel=2", "trainer.zero=0")
    ),
    "stream-async, adapters": Way(
        ("policies.system=stream-async", "sync.mode=lora", "sync.lora_rank=4"), "peft"
    ),
    "stream-async, on Ray": Way(
        (
            *("policies.system=stream-async", "execute.launcher=ray"),
            f"execute.ray_address={RAY}",
            "execute.patience=10 s",  # nobody tells whether an actor that is silent computes
        ),
        "ray",
    ),
    "stream-async, 2 ranks of DeepSpeed": Way(
        (
            *("policies.system=stream-async", "trainer.data_parallel=2", "trainer.zero=2"),
            "trainer.backend=deepspeed",
        ),
        "deepspeed",
    ),
}


class Books(NamedTuple):
    """Rollouts of a run by what became of them."""

    drawn: int
    trained: int
    """In steps that count."""
    dropped: int
    rolled_back: int
    """Trained on in steps that a lost trainer took back, and not again."""
    lost: int
    """None of these."""
    twice: int
    """In two steps that count."""
    wrong: int
    """In steps that count, though born under weights that had been taken back."""

    @property
    def is_clean(self) -> bool:
        """Whether every rollout is accounted for, and none was trained on that should not have been."""
        return not (self.lost or self.twice or self.wrong)


class Key(NamedTuple):
    """Which run."""

    world: str
    system: str
    kind: str
    """The fault; "all" in an executed run, "none" where it is undisturbed."""
    seed: int


@dataclass(frozen=True)
class Cell:
    """What became of one run."""

    key: Key
    is_complete: bool
    hung: bool
    seconds: float
    books: Books
    ledger: str
    """What its ledger finds wrong; empty where it balances. The books are counted another way."""
    noticed: dict[str, float] = field(default_factory=dict)
    """Seconds from a fault to the event that tells of it, by kind."""
    mended: dict[str, float] = field(default_factory=dict)
    """Seconds from a fault to the next new step, and to a serving replacement of what was lost."""


def read_legs(output: Path) -> list[Trace]:
    """Return the traces of all legs of an executed run, in order."""
    earlier = (earlier_trace_path(output, leg) for leg in earlier_trace_numbers(output))
    return [read_trace(path) for path in (*earlier, output / TRACE)]


def balance(legs: Iterable[Trace]) -> Books:
    """Return the books of a run from the traces of its legs, in order."""
    steps: dict[int, list[int]] = {}
    drawn: set[int] = set()
    dropped: set[int] = set()
    taken_back: set[int] = set()
    wrong = 0
    for trace in legs:
        leg = _Leg(steps)
        for entry in trace.entries:
            leg.read(entry)
        drawn |= {rollout for group in leg.drawn.values() for rollout in group}
        dropped |= leg.dropped
        taken_back |= leg.taken_back
        wrong += leg.num_wrong
    counted = Counter(rollout for rollouts in steps.values() for rollout in rollouts)
    rolled_back = taken_back - counted.keys()
    dropped -= counted.keys() | rolled_back
    return Books(
        drawn=len(drawn),
        trained=len(counted),
        dropped=len(dropped),
        rolled_back=len(rolled_back),
        lost=len(drawn - counted.keys() - dropped - rolled_back),
        twice=sum(count > 1 for count in counted.values()),
        wrong=wrong,
    )


class _Leg:
    """Reads one leg, entry by entry; `steps` are those of the legs before, and grow."""

    def __init__(self, steps: dict[int, list[int]]) -> None:
        self._steps = steps
        self.drawn: dict[int, tuple[int, ...]] = {}
        self.dropped: set[int] = set()
        self.taken_back: set[int] = set()
        self.num_wrong = 0
        self._gradient: list[int] = []
        self._saved = 0
        self._lineage: Counter[int] = Counter()
        """How often each version was made."""
        self._pushed: dict[int, int] = {}
        """The lineage of each version as it was pushed last."""
        self._serves: dict[int, tuple[int, int]] = {}
        """Version and lineage of each replica."""
        self._sent_to: dict[int, int] = {}
        self._born: dict[int, tuple[int, int]] = {}

    def read(self, entry: Entry) -> None:
        """Enter what an entry tells."""
        match entry.event:
            case RunStarted(version):
                self._saved = version
                for later in [step for step in self._steps if step > version]:
                    del self._steps[later]
            case PromptsDrawn(groups=groups):
                self.drawn.update({group.group: group.rollouts for group in groups})
            case Trained(rollouts, trainer) if trainer == LEADER:
                self._gradient += rollouts
            case Stepped(version, trainer) if trainer == LEADER:
                self._end_step(version)
            case CheckpointSaved(version, trainer) if trainer == LEADER:
                self._saved = version
            case TrainerLost(trainer) if trainer == LEADER:
                self._gradient = []
                for later in [step for step in self._steps if step > self._saved]:
                    self.taken_back.update(self._steps.pop(later))
            case ReplicaStarted(replica, version) | WeightsLoaded(replica, version):
                self._serves[replica] = (version, self._pushed.get(version, 0))
            case Generated(rollout, tokens, _, version) if tokens:
                lineage = self._lineage_of(self._sent_to[rollout], version)
                self._born.setdefault(rollout, (version, lineage))
            case _:
                pass
        for command in entry.commands:
            match command:
                case Generate(rollout, replica):
                    self._sent_to[rollout] = replica
                case PushWeights(version):
                    self._pushed[version] = self._lineage[version]
                case Drop(group) | Skip(group, trainer=0):
                    self.dropped.update(self.drawn[group])
                case _:
                    pass

    def _lineage_of(self, replica: int, version: int) -> int:
        """Return the lineage of a version that a replica has; of one that it had before, the one made then."""
        serves, lineage = self._serves.get(replica, (version, self._pushed.get(version, 0)))
        return lineage if serves == version else self._lineage[version]

    def _end_step(self, version: int) -> None:
        self._lineage[version] += 1
        alive = [rollout for rollout in self._gradient if rollout not in self.dropped]
        self._steps[version] = alive
        self._gradient = []
        for rollout in alive:
            born, lineage = self._born.get(rollout, (0, 0))
            self.num_wrong += lineage != self._lineage[born]
