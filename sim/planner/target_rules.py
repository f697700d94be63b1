"""Leave out what no target of a plan can run: modes, trainers, replicas and sizes, by the targets' own rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product
from typing import NamedTuple, get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.export.launch_file import why_not_placed
from streamrl.export.layout_rules import layout_of
from streamrl.export.option_table import ExportName
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import load_framework
from streamrl.runfile.plan_config import TargetName, framework_of_target
from streamrl.runfile.simulation_config import FrameworkName
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import Mode
from streamrl.targets.back_ends import for_target
from streamrl.targets.verdicts import TARGETS, check_target

Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]


def targets_of(target: TargetName | None, framework: FrameworkName | None) -> list[TargetName]:
    """Return what may run the plans of a run file: `plan.target`, its framework, or all targets if it names neither.

    A framework that is no target has none.
    """
    if target is not None:
        return [target]
    return [each for each in TARGETS if framework in (None, framework_of_target(each))]


def _first_unless_one_is_empty(keys: Iterable[str], none: str = "") -> str:
    """Return the first key, or `none` if there are no keys; "" as soon as one is empty."""
    first = ""
    for key in keys:
        if not key:
            return ""
        first = first or key
    return first or none


class TargetRules:
    """What at least one of some targets can run."""

    def __init__(self, each: Sequence[OneTarget]) -> None:
        self.targets = tuple(one.target for one in each)
        self._each = each
        self._name = self.targets[0] if len(each) == 1 else "any target"
        self._refused: dict[Degrees, str] = {}
        """Answers about trainers, whatever their micro-batch and recomputation."""
        self._judged: Sequence[Mode] = ()
        """The modes that it was last asked about. Answers about sides rest on them."""

    def rests_on(self, targets: Sequence[TargetName], modes: Sequence[Mode]) -> bool:
        """Return whether its answers are those for these targets and modes, so that another search can use them."""
        return self.targets == tuple(targets) and self._judged == modes

    def keep_modes(self, modes: Sequence[Mode], cut: Counter[str]) -> list[Mode]:
        """Return the modes that a target can run.

        Raises:
            RunError: none can run any of them. The error is the first target's rule that the first mode breaks.
        """
        errors, self._judged = [each.judge_modes(modes) for each in self._each], modes
        kept = [mode for mode in modes if any(mode in each.modes for each in self._each)]
        for mode in modes:
            if mode not in kept:
                cut[self._reason(errors[0][mode].key)] += 1
        if modes and not kept:
            error, name = errors[0][modes[0]], self.targets[0]
            text = f"plan.target {name!r} can run no plan of this run file: {error}"
            raise RunError(error.key, error.value, error.allowed, text, ("plan.target",))
        return kept

    def refuses_trainer(self, trainer: Degrees) -> str:
        """Return why no target can run a trainer in any mode; "" if one can."""
        alike = trainer._replace(micro_batch=1, recompute="full")
        if alike not in self._refused:
            reasons = (each.refuses_trainer(alike) for each in self._each)
            self._refused[alike] = self._first_refusal(reasons)
        return self._refused[alike]

    def refuses_replicas(self, replicas: Replicas) -> str:
        """Return why no target can run replicas in any mode; "" if one can."""
        return self._first_refusal(each.refuses_replicas(replicas) for each in self._each)

    def ability(self, trainer: Degrees) -> tuple[bool, bool, bool]:
        """Return whether a trainer can run in execute with sides apart, in execute with shared GPUs, and in a framework.

        Frameworks are one kind, because most of them share their back ends.
        """
        own = [each for each in self._each if each.is_execute]
        apart, shared = (any(each.has(trainer, shares) for each in own) for shares in (False, True))
        others = any(each.has(trainer) for each in self._each if not each.is_execute)
        return apart, shared, others

    def pairs(self, replicas: Sequence[Replicas], trainers: Sequence[Degrees]) -> RunnablePairs:
        """Return which pairs of two sides a target can run, by mode."""
        blocks = list(product(_by_size(replicas), _by_size(trainers)))
        of_each = [_PairsOfTarget(each, replicas, trainers, blocks) for each in self._each]
        return RunnablePairs(of_each, self._reason)

    def _first_refusal(self, keys: Iterable[str]) -> str:
        """Return the reason of the first target; "" if one of them has none."""
        first = _first_unless_one_is_empty(keys)
        return self._reason(first) if first else ""

    def _reason(self, key: str) -> str:
        return f"not run by {self._name}: {key.rstrip(',')}"


class RunnablePairs:
    """Which pairs of some replicas and trainers at least one target can run."""

    def __init__(self, of_each: Sequence[_PairsOfTarget], reason: Callable[[str], str]) -> None:
        self._of_each, self._reason = of_each, reason

    def open_to(self, mode: Mode, is_open: Mask, cut: Counter[str]) -> Mask:
        """Return the pairs among `is_open` that a target can run in a mode."""
        shares = _shares_gpus(mode)
        found = np.zeros_like(is_open)
        able = [each.found(shares) for each in self._of_each if mode in each.target.modes]
        for pairs in able:
            found |= pairs.mask
        found &= is_open
        for key, block in able[0].refused if able else ():
            cut[self._reason(key)] += int((is_open & ~found)[block].sum())
        return found


class _Size(NamedTuple):
    pool: str
    num_gpus: int
    together: int
    """GPUs of a replica, or of a tensor-parallel group."""


_Block = tuple[tuple[_Size, list[int]], tuple[_Size, list[int]]]
"""The replicas and the trainers of one size each, with their indices."""


class _Pairs(NamedTuple):
    """What one target says of all pairs."""

    mask: Mask
    """The pairs that it can run."""
    refused: list[tuple[str, tuple[Indices, ...]]]
    """The pairs of sizes that it cannot run, with the key of the rule."""


class _PairsOfTarget:
    """The pairs that one target can run, with GPUs that both sides share and without."""

    def __init__(
        self,
        target: OneTarget,
        replicas: Sequence[Replicas],
        trainers: Sequence[Degrees],
        blocks: Sequence[_Block],
    ) -> None:
        self.target = target
        self._replicas, self._trainers, self._blocks = replicas, trainers, blocks
        self._found: dict[bool, _Pairs] = {}

    def found(self, shares: bool) -> _Pairs:
        """Return what the target says of all pairs in a mode, which shares GPUs or does not."""
        if shares not in self._found:
            self._found[shares] = self._judge(shares)
        return self._found[shares]

    def _judge(self, shares: bool) -> _Pairs:
        target = self.target
        generate = np.array([not target.of_replicas(each, shares) for each in self._replicas])
        train = np.array([not target.of_trainer(each, shares) for each in self._trainers])
        mask: Mask = generate[:, None] & train[None, :]
        refused = []
        for (first, rows), (second, columns) in self._blocks:
            if not target.has_room(first, second, shares):
                continue
            block = np.ix_(rows, columns)
            if not mask[block].any():
                continue
            sides = self._replicas[rows[0]], self._trainers[columns[0]]
            is_unplaced = target.is_unplaced(*sides, shares)  # this rule is the quickest one
            key = "rollout.replicas" if is_unplaced else target.of_sizes(first, second, shares)
            if key:
                refused.append((key, block))
                mask[block] = False
        return _Pairs(mask, refused)


class OneTarget:
    """What one target can run. Each part of a plan is judged beside a plain layout of the rest.

    A plain layout has replicas of one GPU, and a trainer with data parallelism only. Answers are
    kept, because many plans share their parts.
    """

    def __init__(self, run: Run, target: TargetName) -> None:
        self.modes: dict[Mode, None] = {}
        """The modes that it can run, once they are judged."""
        self._run = run
        self.target: TargetName = target
        self._framework = load_framework(framework_of_target(target))
        self._zero = min(self._framework.layouts[0].zero)
        self._first: dict[bool, Mode] = {}
        """The first mode with sides that share GPUs, and the first with sides that do not."""
        self._known: dict[tuple[Hashable, bool], str] = {}
        """Keys of broken rules of each layout of a side, by whether the sides share GPUs."""
        self._lacking: dict[Degrees, str] = {}
        """The key that no training back end of a framework has, of each layout of a trainer."""
        self._of_pairs: dict[tuple[tuple[str, int], tuple[str, int]], str] = {}
        """Keys of broken rules of sizes of two sides that do not share GPUs."""

    def judge_modes(self, modes: Iterable[Mode]) -> dict[Mode, RunError]:
        """Find the modes that it can run, and return the rule that each other one breaks."""
        errors: dict[Mode, RunError] = {}
        pool = self._run.trainer.pool
        for mode in modes:
            error = self._error(self._plain_replicas(pool, 1), self._plain_trainer(pool, 1), mode)
            if error is None:
                self.modes[mode] = None
                self._first.setdefault(_shares_gpus(mode), mode)
            else:
                errors[mode] = error
        return errors

    @property
    def is_execute(self) -> bool:
        """Whether the target is `streamrl execute`."""
        return self.target == "execute"

    def has(self, trainer: Degrees, shares: bool = False) -> bool:
        """Whether it has a back end for a trainer. For a framework this is the same with shared GPUs, and quick to know."""
        if self.is_execute:
            return shares in self._first and not self.of_trainer(trainer, shares)
        return bool(self._first) and not self._lacks_layout(trainer)

    def refuses_trainer(self, trainer: Degrees) -> str:
        """Return the key of the rule that keeps a trainer from all modes; "" if it can run in one."""
        return self._refusal(self.of_trainer(trainer, shares) for shares in self._first)

    def refuses_replicas(self, replicas: Replicas) -> str:
        """Return the key of the rule that keeps replicas from all modes; "" if they can run in one."""
        return self._refusal(self.of_replicas(replicas, shares) for shares in self._first)

    def _refusal(self, keys: Iterable[str]) -> str:
        return _first_unless_one_is_empty(keys, "policies.system")

    def of_trainer(self, trainer: Degrees, shares: bool) -> str:
        """Return the key of the rule that a trainer breaks beside plain replicas on as many GPUs; "" if none."""
        alike = trainer._replace(micro_batch=1, recompute="full")
        if not self.is_execute:
            alike = trainer.layout._replace(offload=trainer.offload)
        kind = self._kind_of(alike, shares)
        if (kind, shares) not in self._known:
            key = self._lacks_layout(alike)
            plain = self._plain_replicas(trainer.pool, trainer.num_gpus)
            self._known[kind, shares] = key or self._judge(plain, alike, shares)
        return self._known[kind, shares]

    def _kind_of(self, trainer: Degrees, shares: bool) -> Hashable:
        """Return what the rules read of a trainer beside plain replicas on as many GPUs.

        Those of execute read whether there are several data-parallel ranks, and several nodes, but not how many.
        """
        if not self.is_execute or self._run.trainer.shard_ranks is not None:
            return trainer
        used = trainer.num_gpus * (1 if shares else 2)
        is_wide = used > self._run.cluster.pools[trainer.pool].gpus_per_node
        return trainer._replace(data_parallel=min(2, trainer.data_parallel)), is_wide

    def _lacks_layout(self, trainer: Degrees) -> str:
        """Return the key that no training back end of a framework has; "" if one has all. This rule is the quickest one.

        What execute can split depends on more than its profile says.
        """
        if self.target == "execute":
            return ""
        layout = trainer.layout._replace(offload=trainer.offload)
        if layout not in self._lacking:
            try:
                layout_of(self._framework, layout.change(self._run.trainer))
                self._lacking[layout] = ""
            except RunError as error:
                self._lacking[layout] = error.key
        return self._lacking[layout]

    def of_replicas(self, replicas: Replicas, shares: bool) -> str:
        """Return the key of the rule that replicas break beside a plain trainer on as many GPUs as the first kind; "" if none."""
        alike, first = replicas.layout, replicas.kinds[0]
        if (alike, shares) not in self._known:
            plain = self._plain_trainer(first.pool, first.num_gpus)
            self._known[alike, shares] = self._judge(replicas, plain, shares)
        return self._known[alike, shares]

    def of_sizes(self, generate: _Size, train: _Size, shares: bool) -> str:
        """Return the key of the rule that two sides of these sizes break beside each other; "" if none."""
        if shares or self.target == "execute":
            return ""
        key = (generate[:2], train[:2])
        if key not in self._of_pairs:
            plain = self._plain_replicas(*generate[:2]), self._plain_trainer(*train[:2])
            self._of_pairs[key] = self._judge(*plain, shares)
        return self._of_pairs[key]

    def has_room(self, generate: _Size, train: _Size, shares: bool) -> bool:
        """Whether sides of these sizes are in their pools together. Sides that share GPUs have the same ones."""
        if shares:
            return generate[:2] == train[:2]
        room = self._run.cluster.pools[train.pool].num_gpus
        return generate.pool != train.pool or generate.num_gpus + train.num_gpus <= room

    def is_unplaced(self, replicas: Replicas, trainer: Degrees, shares: bool) -> bool:
        """Whether the framework has no placement for the GPUs of both sides."""
        own, framework = self._run, framework_of_target(self.target)
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
        mode = self._first.get(shares)
        error = None if mode is None else self._error(replicas, trainer, mode)
        return "" if error is None else error.key

    def _error(self, replicas: Replicas, trainer: Degrees, mode: Mode) -> RunError | None:
        own = self._run
        sides = {"rollout": replicas.change(own.rollout), "trainer": trainer.change(own.trainer)}
        try:
            check_target(for_target(mode.apply(replace(own, **sides)), self.target), self.target)
        except RunError as error:
            return error
        return None

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
