"""Leave out what the target of a plan cannot run: modes, trainers, replicas and sizes, by the target's own rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple, get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.export.launch_file import why_not_placed
from streamrl.export.option_table import ExportName
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import load_framework
from streamrl.runfile.plan_config import TargetName, framework_of_target
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import Mode
from streamrl.targets.back_ends import for_target
from streamrl.targets.verdicts import check_target

Mask = NDArray[np.bool_]


class _Size(NamedTuple):
    pool: str
    num_gpus: int
    together: int
    """GPUs of a replica, or of a tensor-parallel group."""


class TargetRules:
    """What a target can run. Each part of a plan is judged beside a plain layout of the rest.

    A plain layout has replicas of one GPU, and a trainer with data parallelism only. Answers are
    kept, because many plans share their parts.
    """

    def __init__(self, run: Run, target: TargetName) -> None:
        self._run = run
        self._target: TargetName = target
        framework = load_framework(framework_of_target(target))
        self._zero = min(framework.layouts[0].zero)
        self._modes: dict[bool, Mode] = {}
        """The first mode with sides that share GPUs, and the first with sides that do not."""
        self._known: dict[tuple[Replicas | Degrees, bool], str] = {}
        """Answers about each layout of a side, and whether the sides share GPUs."""
        self._of_pairs: dict[tuple[tuple[str, int], tuple[str, int]], str] = {}
        """Answers about sizes of two sides that do not share GPUs."""

    def keep_modes(self, modes: Iterable[Mode], cut: Counter[str]) -> list[Mode]:
        """Return the modes that the target can run.

        Raises:
            RunError: it can run none of them. The error is the rule that the first mode breaks.
        """
        errors: list[RunError] = []
        kept = []
        pool = self._run.trainer.pool
        for mode in modes:
            error = self._error(self._plain_replicas(pool, 1), self._plain_trainer(pool, 1), mode)
            if error is None:
                kept.append(mode)
                self._modes.setdefault(_shares_gpus(mode), mode)
            else:
                errors.append(error)
                cut[self._reason(error)] += 1
        if not kept and errors:
            error = errors[0]
            text = f"plan.target {self._target!r} can run no plan of this run file: {error}"
            raise RunError(error.key, error.value, error.allowed, text, ("plan.target",))
        return kept

    def refuses_trainer(self, trainer: Degrees) -> str:
        """Return why the target can run a trainer in none of the modes; "" if it can."""
        reasons = [self._of_trainer(trainer, shares) for shares in self._modes]
        return "" if "" in reasons else reasons[0]

    def refuses_replicas(self, replicas: Replicas) -> str:
        """Return why the target can run replicas in none of the modes; "" if it can."""
        reasons = [self._of_replicas(replicas, shares) for shares in self._modes]
        return "" if "" in reasons else reasons[0]

    def open_pairs(
        self,
        mode: Mode,
        replicas: Sequence[Replicas],
        trainers: Sequence[Degrees],
        is_open: Mask,
        cut: Counter[str],
    ) -> Mask:
        """Return the pairs among `is_open` that the target can run in a mode."""
        shares = _shares_gpus(mode)
        generate = np.array([not self._of_replicas(each, shares) for each in replicas])
        train = np.array([not self._of_trainer(each, shares) for each in trainers])
        found: Mask = is_open & generate[:, None] & train[None, :]
        for (first, rows), (second, columns) in product(_by_size(replicas), _by_size(trainers)):
            reason = self._of_sizes(first, second, shares)
            if reason or self._is_unplaced(replicas[rows[0]], trainers[columns[0]], shares):
                reason = reason or f"not run by {self._target}: rollout.replicas"
                block = np.ix_(rows, columns)
                cut[reason] += int(found[block].sum())
                found[block] = False
        return found

    def _of_trainer(self, trainer: Degrees, shares: bool) -> str:
        """Return why a trainer cannot run beside plain replicas on as many GPUs."""
        alike = trainer._replace(micro_batch=1, recompute="full")
        if self._target != "execute":
            alike = trainer.layout._replace(offload=trainer.offload)
        if (alike, shares) not in self._known:
            plain = self._plain_replicas(trainer.pool, trainer.num_gpus)
            self._known[alike, shares] = self._judge(plain, alike, shares)
        return self._known[alike, shares]

    def _of_replicas(self, replicas: Replicas, shares: bool) -> str:
        """Return why replicas cannot run beside a plain trainer on as many GPUs as the first kind."""
        alike, first = replicas.layout, replicas.kinds[0]
        if (alike, shares) not in self._known:
            plain = self._plain_trainer(first.pool, first.num_gpus)
            self._known[alike, shares] = self._judge(replicas, plain, shares)
        return self._known[alike, shares]

    def _of_sizes(self, generate: _Size, train: _Size, shares: bool) -> str:
        """Return why two sides of these sizes cannot run beside each other."""
        if shares or self._target == "execute":
            return ""
        key = (generate[:2], train[:2])
        if key not in self._of_pairs:
            plain = self._plain_replicas(*generate[:2]), self._plain_trainer(*train[:2])
            self._of_pairs[key] = self._judge(*plain, shares)
        return self._of_pairs[key]

    def _is_unplaced(self, replicas: Replicas, trainer: Degrees, shares: bool) -> bool:
        """Whether the framework has no placement for the GPUs of both sides."""
        own, framework = self._run, framework_of_target(self._target)
        return any(
            why_not_placed(
                name,
                replicas.change(own.rollout),
                trainer.change(own.trainer),
                own.cluster.pools,
                shares_gpus=shares,
            )
            for name in get_args(ExportName)
            if name == framework
        )

    def _judge(self, replicas: Replicas, trainer: Degrees, shares: bool) -> str:
        mode = self._modes.get(shares)
        error = None if mode is None else self._error(replicas, trainer, mode)
        return "" if error is None else self._reason(error)

    def _error(self, replicas: Replicas, trainer: Degrees, mode: Mode) -> RunError | None:
        own = self._run
        sides = {"rollout": replicas.change(own.rollout), "trainer": trainer.change(own.trainer)}
        try:
            check_target(for_target(mode.apply(replace(own, **sides)), self._target), self._target)
        except RunError as error:
            return error
        return None

    def _reason(self, error: RunError) -> str:
        return f"not run by {self._target}: {error.key.rstrip(',')}"

    def _plain_replicas(self, pool: str, num_gpus: int) -> Replicas:
        return Replicas(pool, num_gpus, 1, 1, self._run.rollout.max_running)

    def _plain_trainer(self, pool: str, num_gpus: int) -> Degrees:
        split = (pool, num_gpus, 1, 1, 1, 1, self._zero)
        return Degrees(*split, "full", None, False)


def _by_size(sides: Sequence[Replicas | Degrees]) -> list[tuple[_Size, list[int]]]:
    """Return the pool and GPUs of each side, of replicas those of the first kind, with the indices of such sides."""
    found: dict[_Size, list[int]] = defaultdict(list)
    for index, side in enumerate(sides):
        if isinstance(side, Replicas):
            first = side.kinds[0]
            size = _Size(first.pool, first.num_gpus, first.gpus_per_replica)
        else:
            size = _Size(side.pool, side.num_gpus, side.tensor_parallel)
        found[size].append(index)
    return list(found.items())


def _shares_gpus(mode: Mode) -> bool:
    return mode.system == "colocated"
