"""Draw groups with seeded prompts and output lengths: the same run file draws the same rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, assert_never

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.engine.messages import (
    UNFINISHED,
    DrawnGroup,
    Drop,
    ExpectationsChanged,
    Generated,
    PromptsDrawn,
)
from streamrl.engine.trace import read_trace
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import find_profile
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.length_words import stated_figures
from streamrl.runfile.result_files import ROLLOUTS_FILE
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.data_files import parse_number, read_csv
from streamrl.workload.episodes import (
    Episode,
    EpisodeSource,
    RecordedEpisode,
    RecordedEpisodes,
    fitted_to_context,
    read_episodes,
)
from streamrl.workload.online_ranker import Expectations
from streamrl.workload.prompt_families import check_families
from streamrl.workload.prompt_order import PromptOrder, TailBatches, make_order
from streamrl.workload.simulated_ranker import load_ranker
from streamrl.workload.stated_lengths import StatedLengths, correlated, normal_shares


class Drift:
    """Linear growth of lengths over a run, and of other figures that change with it."""

    def __init__(self, lengths: LengthsConfig, algorithm: AlgorithmConfig) -> None:
        steps = algorithm.steps if lengths.drift_steps is None else lengths.drift_steps
        self._last = max(1, steps - 1)
        self._prompts_per_step = algorithm.prompts_per_step

    def at(self, groups: Floats, first: float, last: float | None) -> Floats:
        """Return a figure for each of `groups`: `first` in the first step, `last` from the end of the drift on.

        A group belongs to the step that it is drawn for if no group before it is dropped. If `last`
        is None, nothing drifts.
        """
        if last is None:
            return np.full(len(groups), first)
        share = np.minimum(1.0, groups // self._prompts_per_step / self._last)
        drifted: Floats = first + (last - first) * share
        return drifted


def drift_within(lengths: LengthsConfig, steps: int, num_steps: int) -> LengthsConfig:
    """Return lengths that drift in the first `num_steps` of `steps` steps as far as in all of them."""
    if not lengths.drifts or steps <= num_steps:
        return lengths
    drift_steps = max(2, round((lengths.drift_steps or steps) * num_steps / steps))
    drifted: LengthsConfig = replace(lengths, drift_steps=drift_steps)
    return drifted


Lengths = npt.NDArray[np.int64]


class RecordedLengths(NamedTuple):
    """The part of a trace file that a workload consists of. It has no seconds."""

    drawn: dict[int, DrawnGroup]
    """By number: rollouts, prompt tokens, family and expected tokens of each group."""
    tokens: dict[int, int]
    """Output tokens of each finished rollout."""
    dropped: set[int]
    """Groups that a failure lost, so that the run drew others."""


def read_lengths(path: Path) -> RecordedLengths:
    """Return the groups and lengths of a trace file.

    Raises:
        ValueError: the file is not a trace.
    """
    found = RecordedLengths({}, {}, set())
    for _, event, commands in read_trace(path).entries:
        if isinstance(event, PromptsDrawn):
            found.drawn.update((group.group, group) for group in event.groups)
        elif isinstance(event, Generated) and event.finish not in UNFINISHED:
            found.tokens[event.rollout] = event.tokens
        found.dropped.update(command.group for command in commands if isinstance(command, Drop))
    return found


class RecordedGroups:
    """The groups of a trace file in draw order.

    A lost group has no lengths and is skipped, because the run drew another one for it. A group
    that was unfinished at the end of the record gets the lengths of another one.
    """

    def __init__(self, path: Path) -> None:
        """Read a trace.

        Raises:
            ValueError: the file is not a trace, or has no group with known lengths.
        """
        self._path = path
        drawn, tokens, dropped = read_lengths(path)
        self._finished = [g for _, g in sorted(drawn.items()) if g.rollouts and _is_in(g, tokens)]
        if not self._finished:
            raise ValueError(f"{path} has no finished group")
        finished = {group.group for group in self._finished}
        self._groups = [
            group
            for number, group in sorted(drawn.items())
            if number in finished or number not in dropped
        ]
        self._tokens = tokens
        self._known = finished
        self._recorded: dict[int, RecordedEpisode] = {}

    def read_episodes(self) -> bool:
        """Read the turns of episodes from the run directory, and return whether it has them.

        Then a group whose episodes are not all recorded gets those of another one.

        Raises:
            ValueError: rollouts.jsonl has a wrong line.
        """
        file = self._path.parent / ROLLOUTS_FILE
        found = read_episodes(file) if file.is_file() else {}
        known = [g for g in self._finished if all(rollout in found for rollout in g.rollouts)]
        if known:
            self._recorded, self._finished = found, known
            self._known = {group.group for group in known}
        return bool(known)

    def rollouts(self, first: int, num_groups: int, group_size: int) -> list[list[int]]:
        """Return the recorded rollouts of each group."""
        return [list(group.rollouts) for group in self._picks(first, num_groups, group_size)]

    def episodes(self, rollouts: Sequence[int], room: int) -> tuple[Episode, ...]:
        """Return the episodes of recorded rollouts, which end when their tokens reach `room`."""
        return tuple(fitted_to_context(self._recorded[each].episode, room) for each in rollouts)

    def block(self, first: int, num_groups: int, group_size: int) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups]; after the last recorded group it repeats."""
        groups = self._picks(first, num_groups, group_size)
        lengths = [[self._tokens[rollout] for rollout in group.rollouts] for group in groups]
        return np.array(lengths), np.array([self._shown_tokens(group) for group in groups])

    def _shown_tokens(self, group: DrawnGroup) -> int:
        """Return the tokens before the first turn: the prompt, and what the environment showed."""
        first = self._recorded.get(group.rollouts[0])
        return group.prompt_tokens + (0 if first is None else first.first_observation_tokens)

    def expected(self, first: int, num_groups: int, group_size: int) -> Lengths:
        """Return the recorded expectations of these groups when they were drawn, with the shape of `block`'s lengths."""
        groups = self._picks(first, num_groups, group_size)
        return np.array([group.expected_tokens for group in groups])

    def prompts(self, first: int, num_groups: int, group_size: int) -> list[int]:
        """Return the line of the prompts file for each of these groups; empty if the record does not have it."""
        lines = [group.prompt for group in self._picks(first, num_groups, group_size)]
        return [line for line in lines if line is not None] if None not in lines else []

    @property
    def known_families(self) -> set[str]:
        """Return the recorded families of groups."""
        return {group.family for group in self._groups if group.family is not None}

    def families(self, first: int, num_groups: int, group_size: int) -> list[str | None]:
        """Return the family of each group's prompt; None if the record does not have it."""
        return [group.family for group in self._picks(first, num_groups, group_size)]

    def _picks(self, first: int, num_groups: int, group_size: int) -> list[DrawnGroup]:
        size = len(self._finished[0].rollouts)
        if size != group_size:
            raise ValueError(
                f"algorithm.group_size is {group_size}, but {self._path} has groups of {size}"
            )
        return [self._pick(place) for place in range(first, first + num_groups)]

    def _pick(self, place: int) -> DrawnGroup:
        """Return the group that was drawn there; if its lengths are unknown, one with known lengths."""
        if place < len(self._groups) and self._groups[place].group in self._known:
            return self._groups[place]
        return self._finished[place % len(self._finished)]


def _is_in(group: DrawnGroup, tokens: dict[int, int]) -> bool:
    return all(rollout in tokens for rollout in group.rollouts)


BLOCK = (
    1024  # groups from one random stream: large enough for numpy, and fixed so that draws repeat
)

MOST_NUMBER = (
    1e15  # largest number in a table of lengths: leaves room for a scale in an integer array
)
KEPT_ROLLOUTS = 1 << 17  # rollouts that a shared workload keeps: about 16 MB
_NEW = tuple.__new__
CALIBRATION = 1 << 16  # lengths for a ranker's calibration: recall@20% is then exact within 0.003


class Draw(NamedTuple):
    """One group, with data that only the workload knows."""

    drawn: DrawnGroup
    lengths: tuple[int, ...]
    """True output tokens of each rollout; empty if only generation will tell."""
    episodes: tuple[Episode, ...] = ()
    """The turns of each rollout; empty without an environment, or if only the run will tell."""


class Workload(Protocol):
    """The source of groups, in simulated and real runs."""

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return `num_groups` groups from `first_group` on; the same ids always get the same prompts."""
        ...

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return the changed expectations of other rollouts after this one ended; None if there are none."""
        ...

    def forget(self, group: int) -> None:
        """Forget a dropped group."""
        ...


class Source(Protocol):
    """A distribution of groups."""

    def sample(
        self, rng: np.random.Generator, num_groups: int, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups]."""
        ...


class SimulatedWorkload:
    """Groups whose true lengths are known in advance, from `workload.lengths`."""

    def __init__(
        self, run: Run, *, num_steps: int | None = None, keeps_draws: bool = False
    ) -> None:
        """Read the lengths of a run file.

        Args:
            run: the run file.
            num_steps: steps that are simulated, over which lengths drift at most as far as in the
                whole training; None if all of `algorithm.steps` are.
            keeps_draws: whether several simulations share this workload. It then keeps its first
                groups, because drawing them again takes a tenth of a simulation.

        Raises:
            ValueError: there are none, or they cannot be read.
        """
        config = run.workload.lengths
        if config is None:
            raise ValueError("workload.lengths is missing: a simulation needs output lengths")
        if num_steps is not None:
            config = drift_within(config, run.algorithm.steps, num_steps)
        self._config = config
        self._seed = run.seed
        self._group_size = run.algorithm.group_size
        self._max_tokens = run.rollout.max_tokens
        self._source = load_source(config)
        self._environment = run.environment
        self._turns: EpisodeSource | None = None
        """Splits lengths into turns; None without an environment, and for recorded episodes."""
        if run.environment is not None and not _has_episodes(self._source):
            self._turns = EpisodeSource(run.environment, run.seed)
        self._tells_families = run.filters_by_family
        if run.filters_by_family:
            check_families(run.followers, self._known_families())
        self._drift = Drift(config, run.algorithm)
        self._order: PromptOrder | None = None
        if config.epochs and isinstance(self._source, Groups):
            self._order = make_order(run.workload, run.seed, [self._source.num_prompts])
        past = self._past if config.kind == "groups" else None
        self._ranker = load_ranker(config, self._population, past, run.seed)
        self._blocks = {0: self._sample(0)}
        self._mean = int(np.mean(self._blocks[0][0]))
        self._told = Expectations(
            run.workload.ranker,
            prompts_per_step=run.algorithm.prompts_per_step,
            max_tokens=self._max_tokens,
            seed=run.seed,
            learns_from_siblings=run.policies.learns_from_siblings,
        )
        self._tails: TailBatches | None = None
        if run.policies.tail_batching == "defer" and self._ranker is not None:
            every = run.policies.tail_every
            self._tails = TailBatches(run.algorithm.prompts_per_step, every, self._longest)
        is_repeated = keeps_draws and self._told.is_fixed and self._tails is None
        self._num_kept = KEPT_ROLLOUTS // self._group_size if is_repeated else 0
        self._is_plain = (
            not self._num_kept
            and self._told.is_fixed
            and self._tails is None
            and self._environment is None
        )
        self._kept: dict[int, Draw] = {}
        """Draws of the groups before `_num_kept`, as far as they were drawn."""

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return groups with their true lengths, capped at `rollout.max_tokens`."""
        groups = range(first_group, first_group + num_groups)
        if self._is_plain:
            return list(self._plain_draws(groups, groups))
        return [self._kept.get(group) or self._group(group) for group in groups]

    def _plain_draws(self, groups: Iterable[int], sources: Iterable[int]) -> Iterator[Draw]:
        """Yield groups as the data have them, each from its place in the data."""
        size = self._group_size
        mean, number = (self._mean,) * size, -1
        for group, source in zip(groups, sources, strict=True):
            block, offset = divmod(source, BLOCK)
            if block != number:
                number, drawn = block, self._block(block)
            rollouts = tuple(range(group * size, group * size + size))
            expected = tuple(drawn.expected[offset]) if drawn.expected else mean
            family = drawn.families[offset] if drawn.families else None
            plain = DrawnGroup(
                group, rollouts, drawn.prompt_tokens[offset], expected, family=family
            )
            # what `Draw` does, without its slower constructor
            yield _NEW(Draw, (plain, tuple(drawn.lengths[offset]), ()))

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return the changed expectations of other rollouts, if siblings or a ranker are configured."""
        return None if self._told.is_fixed else self._told.learn(event)

    def forget(self, group: int) -> None:
        """Forget a dropped group."""
        self._told.forget(group)

    def _known_families(self) -> set[str]:
        source = self._source
        return source.known_families if isinstance(source, RecordedGroups | Groups) else set()

    def _longest(self, first: int, num: int) -> list[int]:
        """Return the expected tokens of the longest rollout of each group of the data."""
        found = []
        for group in range(first, first + num):
            block, offset = divmod(group, BLOCK)
            found.append(max(self._block(block).expected[offset]))
        return found

    def _block(self, block: int) -> _Block:
        if block not in self._blocks:
            self._blocks = {block: self._sample(block)}
        return self._blocks[block]

    def _group(self, group: int) -> Draw:
        source = group if self._tails is None else self._tails.source(group)
        block, offset = divmod(source, BLOCK)
        drawn = self._block(block)
        draw = next(self._plain_draws((group,), (source,)))
        if not self._told.is_fixed:
            prompt = drawn.prompts[offset] if drawn.prompts else None
            draw = draw._replace(drawn=self._told.draw(draw.drawn, prompt))
        if self._environment is not None:
            episodes = self._episodes_of(group, draw, drawn, offset)
            lengths = tuple(episode.ends[-1] for episode in episodes)
            draw = Draw(draw.drawn, lengths, episodes)
        if group < self._num_kept:
            self._kept[group] = draw
        return draw

    def _episodes_of(
        self, group: int, draw: Draw, block: _Block, offset: int
    ) -> tuple[Episode, ...]:
        """Return the episodes of a group, which is in a block at `offset`."""
        assert self._environment is not None, "only episodes have turns"
        prompt, factor = draw.drawn.prompt_tokens, self._environment.action_time_factor
        if self._turns is not None:
            found = self._turns.episodes(group, draw.lengths, block.turns[offset], prompt)
        else:
            assert isinstance(self._source, RecordedEpisodes | RecordedGroups), "they are recorded"
            room = self._environment.max_context - prompt
            found = self._source.episodes(block.turns[offset], room)
        return found if factor == 1.0 else tuple(each.with_times(factor) for each in found)

    def _sample(self, block: int) -> _Block:
        """Draw a block of groups."""
        ids: list[int] = []
        turns: list[list[int]] = []
        families: list[str | None] = []
        if isinstance(self._source, RecordedGroups):
            ids = self._source.prompts(block * BLOCK, BLOCK, self._group_size)
            if self._tells_families:
                families = self._source.families(block * BLOCK, BLOCK, self._group_size)
            lengths, prompts = self._source.block(block * BLOCK, BLOCK, self._group_size)
            if self._environment is not None:
                turns = self._source.rollouts(block * BLOCK, BLOCK, self._group_size)
        else:
            rng = np.random.default_rng([self._seed, block])
            if isinstance(self._source, Groups):
                ids = self._pick(block, rng)
                lengths, prompts = self._source.sample_of(ids, rng, self._group_size)
                if self._tells_families:
                    families = self._source.families_of(ids)
                ids = ids if self._config.kind == "groups" else []
            elif isinstance(self._source, RecordedEpisodes):
                picks = self._source.pick(rng, BLOCK, self._group_size)
                lengths, prompts = self._source.of(picks)
                turns = picks.tolist()
            else:
                lengths, prompts = self._source.sample(rng, BLOCK, self._group_size)
        groups = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=float)
        scale = self._drift.at(groups, self._config.scale, self._config.scale_to)
        expected = []
        if self._ranker is not None:
            age = self._drift.at(groups, 0.0, 1.0)
            expected = self._scaled(self._ranker.expect(block, lengths, age), scale)
        elif isinstance(self._source, RecordedGroups) and self._config.ranker == "recorded":
            known = self._source.expected(block * BLOCK, BLOCK, self._group_size)
            expected = self._scaled(known, scale)
        scaled = self._scaled(lengths, scale)
        if self._turns is not None:
            turns = self._turns.turns(scaled)
        return _Block(scaled, expected, prompts.tolist(), ids, families, turns)

    def _pick(self, block: int, rng: np.random.Generator) -> list[int]:
        """Return the prompt of each group of a block."""
        assert isinstance(self._source, Groups), "only groups have prompts"
        if self._order is None:
            return self._source.pick(rng, BLOCK)
        return [self._order.prompt(place) for place in range(block * BLOCK, (block + 1) * BLOCK)]

    def _scaled(self, lengths: Lengths | Floats, scale: Floats) -> list[list[int]]:
        scaled = np.clip(np.rint(lengths * scale[:, None]), 1, self._max_tokens)
        whole: list[list[int]] = scaled.astype(np.int64).tolist()
        return whole

    def _population(self) -> Lengths:
        """Draw lengths for a ranker's calibration; they do not depend on the run's seed."""
        if isinstance(self._source, RecordedGroups):
            return self._source.block(0, BLOCK, self._group_size)[0]
        rng = np.random.default_rng(CALIBRATION)
        return self._source.sample(rng, CALIBRATION // self._group_size + 1, self._group_size)[0]

    def _past(self, block: int, lengths: Lengths, num_samples: int) -> Lengths:
        assert isinstance(self._source, Groups), "only groups know their prompts' past"
        rng = np.random.default_rng([self._seed, block])
        return self._source.past(self._pick(block, rng), rng, lengths, num_samples)


def _has_episodes(source: Source | RecordedGroups) -> bool:
    """Return whether a source has recorded turns."""
    if isinstance(source, RecordedGroups):
        return source.read_episodes()
    return isinstance(source, RecordedEpisodes)


class _Block(NamedTuple):
    """Successive groups; each list has one entry for each group."""

    lengths: list[list[int]]
    expected: list[list[int]]
    """Empty if there are no expectations."""
    prompt_tokens: list[int]
    prompts: list[int]
    """Prompt of each group; empty if prompts cannot be identified."""
    families: list[str | None]
    """Families of the prompts; empty if no trainer selects by family."""
    turns: list[list[int]]
    """Turns of each episode, or the number of the recorded episode; empty without an environment."""


class Histogram:
    """Lengths, uniform within bins `[start, end)` of given density. Those of a group may be alike."""

    def __init__(
        self, rows: list[dict[str, float]], prompt_tokens: int, correlation: float = 0.0
    ) -> None:
        self._starts = np.array([row["start"] for row in rows])
        self._widths = np.array([row["end"] for row in rows]) - self._starts
        weights = np.array([row["density"] for row in rows]) * self._widths
        self._edges = np.cumsum(weights / weights.sum())
        self._prompt_tokens = prompt_tokens
        self._correlation = correlation

    def sample(
        self, rng: np.random.Generator, num_groups: int, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups]."""
        u, v = rng.random((2, num_groups, group_size))
        if self._correlation:
            u = normal_shares(correlated(rng, num_groups, group_size, self._correlation))
        bins = np.minimum(np.searchsorted(self._edges, u, side="right"), len(self._edges) - 1)
        lengths = np.rint(self._starts[bins] + v * self._widths[bins]).astype(np.int64)
        lengths = np.maximum(1, lengths)  # the first bin may start at 0
        return lengths, np.full(num_groups, self._prompt_tokens)


class Requests:
    """Independent lengths and prompts from rows of requests.

    Each group gets the prompt of a random row. Its outputs are drawn from all rows, because siblings must differ.
    """

    def __init__(self, lengths: list[int], prompt_tokens: list[int]) -> None:
        self._lengths = np.array(lengths, dtype=np.int64)
        self._prompt_tokens = np.array(prompt_tokens, dtype=np.int64)

    def sample(
        self, rng: np.random.Generator, num_groups: int, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups]."""
        lengths = rng.choice(self._lengths, (num_groups, group_size))
        return lengths, rng.choice(self._prompt_tokens, num_groups)


class Groups:
    """Recorded groups, resampled as a whole, so that siblings stay together.

    Args:
        groups: output tokens of the rollouts of each prompt.
        prompt_tokens: tokens of each prompt, or one number for all.
        families: family of each prompt, if known.
    """

    def __init__(
        self,
        groups: list[list[int]],
        prompt_tokens: list[int] | int,
        families: list[str | None] | None = None,
    ) -> None:
        self._families = families or [None] * len(groups)
        self._groups = [np.array(group, dtype=np.int64) for group in groups]
        self._prompt_tokens = np.broadcast_to(np.array(prompt_tokens), len(groups))

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts."""
        return len(self._groups)

    @property
    def known_families(self) -> set[str]:
        """Return the families of the prompts."""
        return {family for family in self._families if family is not None}

    def families_of(self, picks: list[int]) -> list[str | None]:
        """Return the families of prompts."""
        return [self._families[pick] for pick in picks]

    def pick(self, rng: np.random.Generator, num_groups: int) -> list[int]:
        """Return random prompts for groups."""
        picks: list[int] = rng.integers(0, len(self._groups), num_groups).tolist()
        return picks

    def sample(
        self, rng: np.random.Generator, num_groups: int, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups] of random prompts."""
        return self.sample_of(self.pick(rng, num_groups), rng, group_size)

    def sample_of(
        self, picks: list[int], rng: np.random.Generator, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return lengths and prompt tokens of groups of these prompts; a prompt with too few samples repeats some."""
        lengths = [
            rng.choice(self._groups[pick], group_size, replace=len(self._groups[pick]) < group_size)
            for pick in picks
        ]
        return np.array(lengths), self._prompt_tokens[picks]

    def past(
        self, picks: list[int], rng: np.random.Generator, lengths: Lengths, num_samples: int
    ) -> Lengths:
        """Return [num_groups, num_samples] samples of the same prompts, without those in `lengths`.

        Raises:
            ValueError: a prompt has too few samples.
        """
        found = np.empty((len(lengths), num_samples), dtype=np.int64)
        for row, (pick, drawn) in enumerate(zip(picks, lengths, strict=True)):
            others = self._groups[pick].tolist()
            if len(others) < len(drawn) + num_samples:
                raise ValueError(
                    f"workload.lengths: a group of {len(drawn)} with {num_samples} past samples "
                    f"(ranker_history) needs {len(drawn) + num_samples} samples of each prompt, but one has {len(others)}"
                )
            for length in drawn.tolist():
                others.remove(length)
            found[row] = rng.choice(others, num_samples, replace=False)
        return found


def load_source(config: LengthsConfig) -> Source | RecordedGroups:
    """Read the distribution that `workload.lengths` names.

    Raises:
        RunError: the file is wrong; the error names it and the reason.
    """
    try:
        return _read_source(config)
    except RunError:
        raise
    except ValueError as error:
        text = f"workload.lengths.source: {error}"
        raise RunError("workload.lengths.source", config.source, text=text) from None


def _read_source(config: LengthsConfig) -> Source | RecordedGroups:
    if config.kind == "trace":
        return RecordedGroups(Path(config.source))
    if config.kind == "episodes":
        return RecordedEpisodes(Path(config.source), config.prompt_tokens)
    if config.kind == "stated":
        figures = stated_figures(config.source)
        return StatedLengths(figures, config.prompt_tokens, config.group_correlation)
    if config.names_a_file:
        path = Path(config.source)
    else:
        path = find_profile("lengths", config.source, ".csv")
    rows = read_csv(path)
    if not rows:
        raise ValueError(f"{path} has no rows")
    match config.kind:
        case "histogram":
            bins = _read_bins(path, rows)
            return Histogram(bins, config.prompt_tokens, config.group_correlation)
        case "empirical" if "prompt_tokens" in rows[0]:
            prompts = [
                _tokens(path, number, row, "prompt_tokens") for number, row in _numbered(rows)
            ]
            return Requests(_output_tokens(path, rows), prompts)
        case "empirical":
            return Groups([_output_tokens(path, rows)], config.prompt_tokens)
        case "groups":
            groups = _by_prompt(path, rows)
            prompt_tokens = _prompts_of(path, rows) or config.prompt_tokens
            return Groups(groups, prompt_tokens, _families_of(rows))
        case _:
            assert_never(config.kind)


def _numbered(rows: list[dict[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows below the header with their numbers, from 1."""
    return enumerate(rows, start=1)


def _output_tokens(path: Path, rows: list[dict[str, str]]) -> list[int]:
    return [_tokens(path, number, row, "output_tokens") for number, row in _numbered(rows)]


def _by_prompt(path: Path, rows: list[dict[str, str]]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for row, length in zip(rows, _output_tokens(path, rows), strict=True):
        if not row.get("prompt_id"):
            raise ValueError(f"{path}: row {row} needs a prompt_id, which marks rows of one group")
        groups.setdefault(row["prompt_id"], []).append(length)
    return list(groups.values())


def _prompts_of(path: Path, rows: list[dict[str, str]]) -> list[int]:
    """Return the tokens of each prompt from its first row; empty without such a column."""
    if "prompt_tokens" not in rows[0]:
        return []
    found: dict[str, int] = {}
    for number, row in _numbered(rows):
        if row["prompt_id"] not in found:
            found[row["prompt_id"]] = _tokens(path, number, row, "prompt_tokens")
    return list(found.values())


def _families_of(rows: list[dict[str, str]]) -> list[str | None]:
    """Return the family of each prompt from its first row; None if it has none."""
    found: dict[str, str | None] = {}
    for row in rows:
        found.setdefault(row["prompt_id"], row.get("family") or None)
    return list(found.values())


def _read_bins(path: Path, rows: list[dict[str, str]]) -> list[dict[str, float]]:
    bins = [_numbers(path, row, ("start", "end", "density")) for row in rows]
    for row, each in zip(rows, bins, strict=True):
        if each["end"] <= each["start"]:
            raise ValueError(f"{path}: row {row} must end after its start")
    if not any(each["density"] for each in bins):
        raise ValueError(f"{path}: no bin has a density above 0")
    ordered = sorted(bins, key=lambda each: each["start"])
    for one, other in pairwise(ordered):
        if other["start"] < one["end"]:
            overlap = " and ".join(f"{each['start']:g} to {each['end']:g}" for each in (one, other))
            raise ValueError(
                f"{path}: the bins {overlap} overlap, so their tokens would count twice; let each bin "
                "start at or after the end of the one before"
            )
    return bins


def _tokens(path: Path, number: int, row: dict[str, str], column: str) -> int:
    """Return a length: a whole number of tokens, at least 1."""
    if column not in row:
        raise ValueError(f"{path}: has no column {column}; its columns are {', '.join(row)}")
    value = row[column]
    try:
        tokens = parse_number(value or "")
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens <= MOST_NUMBER or not tokens.is_integer():
        raise ValueError(
            f"{path}: row {number}, {shown(row)}: {column} must be a whole number of tokens from 1 to {MOST_NUMBER:.0e}, "
            f"got {value!r}; correct the row or remove it"
        )
    return int(tokens)


def _numbers(path: Path, row: dict[str, str], columns: tuple[str, ...]) -> dict[str, float]:
    try:
        numbers = {column: parse_number(row[column]) for column in columns}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{path}: row {row} needs numbers in columns {', '.join(columns)}"
        ) from None
    if not all(0 <= number <= MOST_NUMBER for number in numbers.values()):
        raise ValueError(f"{path}: row {row} must hold numbers from 0 to {MOST_NUMBER:.0e}")
    return numbers
