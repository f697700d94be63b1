"""Count the rollouts of a run with faults from its traces, over all of its starts and resumes."""

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
from streamrl.runfile.simulation_config import OF_LENDING, OF_REWARD_MODEL, FaultKind

KINDS: tuple[FaultKind, ...] = tuple(
    kind for kind in get_args(FaultKind) if kind not in (*OF_REWARD_MODEL, *OF_LENDING)
)
"""Faults of a run without a reward model and without lending, like all runs here. Tests inject the others."""
SIMULATED = ("stream-sync", "one-step-async", "stream-async", "fully-async", "colocated")


RAY = "127.0.0.1:6399"
"""Address of the Ray cluster that `make faults` starts."""


class Setup(NamedTuple):
    """Settings of a run that is executed with faults."""

    settings: tuple[str, ...]
    needs: str | None = None
    """A package that the run needs. Without it, the run is left out."""

    @property
    def is_plain(self) -> bool:
        """Return whether only the system is set, and no other back end."""
        return len(self.settings) == 1


EXECUTED = {
    **{system: Setup((f"policies.system={system}",)) for system in SIMULATED},
    "stream-async, vLLM": Setup(("policies.system=stream-async", "rollout.backend=vllm"), "vllm"),
    "stream-async, 2 ranks": Setup(
        ("policies.system=stream-async", "trainer.data_parallel=2", "trainer.zero=0")
    ),
    "stream-async, adapters": Setup(
        ("policies.system=stream-async", "sync.mode=lora", "sync.lora_rank=4"), "peft"
    ),
    "stream-async, on Ray": Setup(
        (
            *("policies.system=stream-async", "execute.launcher=ray"),
            f"execute.ray_address={RAY}",
            "execute.patience=10 s",  # nobody tells whether an actor that is silent computes
        ),
        "ray",
    ),
    "stream-async, 2 ranks of DeepSpeed": Setup(
        (
            *("policies.system=stream-async", "trainer.data_parallel=2", "trainer.zero=2"),
            "trainer.backend=deepspeed",
        ),
        "deepspeed",
    ),
    "stream-async, 2 ranks of FSDP2": Setup(
        (
            *("policies.system=stream-async", "trainer.data_parallel=2", "trainer.zero=3"),
            "trainer.backend=fsdp2",
        )
    ),
}


class RolloutCounts(NamedTuple):
    """Numbers of rollouts of a run by their end."""

    drawn: int
    trained: int
    """Trained on in steps that count."""
    dropped: int
    rolled_back: int
    """Trained on in steps that were rolled back with a lost trainer, and not again."""
    lost: int
    """Neither trained on, dropped nor rolled back."""
    twice: int
    """Trained on in two steps that count."""
    wrong: int
    """Trained on in steps that count, although sampled from weights that were rolled back."""

    @property
    def is_clean(self) -> bool:
        """Return whether every rollout is accounted for, and no rollout was trained on wrongly."""
        return not (self.lost or self.twice or self.wrong)


class Key(NamedTuple):
    """Identifies a run."""

    world: str
    system: str
    kind: str
    """The fault; "all" for an executed run with all faults, "none" for a run without faults."""
    seed: int


@dataclass(frozen=True)
class Cell:
    """The result of one run."""

    key: Key
    is_complete: bool
    hung: bool
    seconds: float
    books: RolloutCounts
    ledger: str
    """Faults in the run's ledger; empty if it balances. `books` are counted independently of it."""
    noticed: dict[str, float] = field(default_factory=dict)
    """Seconds from a fault to the event that reports it, by kind."""
    mended: dict[str, float] = field(default_factory=dict)
    """Seconds from a fault until the next new step is made and a replacement serves, by kind."""


def read_traces(output: Path) -> list[Trace]:
    """Return the traces of all starts and resumes of an executed run, in order."""
    earlier = (earlier_trace_path(output, number) for number in earlier_trace_numbers(output))
    return [read_trace(path) for path in (*earlier, output / TRACE)]


def balance(traces: Iterable[Trace]) -> RolloutCounts:
    """Return the numbers of rollouts of a run, from the traces of its starts and resumes in order."""
    steps: dict[int, list[int]] = {}
    drawn: set[int] = set()
    dropped: set[int] = set()
    rolled: set[int] = set()
    wrong = 0
    for trace in traces:
        reader = _TraceReader(steps)
        for entry in trace.entries:
            reader.read(entry)
        drawn |= {rollout for group in reader.drawn.values() for rollout in group}
        dropped |= reader.dropped
        rolled |= reader.rolled
        wrong += reader.num_wrong
    counted = Counter(rollout for rollouts in steps.values() for rollout in rollouts)
    rolled_back = rolled - counted.keys()
    dropped -= counted.keys() | rolled_back
    return RolloutCounts(
        drawn=len(drawn),
        trained=len(counted),
        dropped=len(dropped),
        rolled_back=len(rolled_back),
        lost=len(drawn - counted.keys() - dropped - rolled_back),
        twice=sum(count > 1 for count in counted.values()),
        wrong=wrong,
    )


class _TraceReader:
    """Reads the trace of one start or resume. It adds to `steps`, which has the steps of earlier ones."""

    def __init__(self, steps: dict[int, list[int]]) -> None:
        self._steps = steps
        self.drawn: dict[int, tuple[int, ...]] = {}
        self.dropped: set[int] = set()
        self.rolled: set[int] = set()
        self.num_wrong = 0
        self._gradient: list[int] = []
        self._saved = 0
        self._lineage: Counter[int] = Counter()
        """Number of times that each version was made. A roll-back makes versions again."""
        self._pushed: dict[int, int] = {}
        """The lineage of each version at its last push."""
        self._serves: dict[int, tuple[int, int]] = {}
        """Version and lineage of each replica."""
        self._sent_to: dict[int, int] = {}
        self._born: dict[int, tuple[int, int]] = {}

    def read(self, entry: Entry) -> None:
        """Update the counts with an entry."""
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
                    self.rolled.update(self._steps.pop(later))
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
        """Return the lineage of a version on a replica; if it serves another version, return the current lineage."""
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
