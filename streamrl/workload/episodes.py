"""Draw episodes: their turns, and the observations and action times of their environments.

A rollout with L generated tokens is split into n turns. Longer episodes have more turns: among the
episodes of a block, the one at quantile q by L gets the turn count at quantile q. The tokens of the
turns are random shares of L. Observations and action times are independent. These three are
assumptions; a recorded file (`workload.lengths.kind = "episodes"`) needs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from math import exp, inf, log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import find_profile, read_profile
from streamrl.runfile.distribution_words import StatedDistribution, read_distribution
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.reading import read_text
from streamrl.runfile.result_files import ROLLOUTS_FILE
from streamrl.workload.data_files import columns_in_seconds, parse_number, read_csv
from streamrl.workload.stated_lengths import USUAL_SPREAD, fitted_to_mean

Lengths = npt.NDArray[np.int64]

SHARES = 2.0
"""Shape of the gamma distribution of the turns' shares of an episode's tokens (an assumption): their
standard deviation is 0.7 of their mean.
"""
STREAM = 0x4550
"""Separates the random numbers of turns from those of lengths."""
TIMES = ("action_time", "start_time")
MOST_TOKENS, MOST_SECONDS = 10**9, 1e9
"""Largest recorded numbers; larger ones come from a damaged file."""


class Episode(msgspec.Struct, frozen=True, gc=False):
    """What happens in one episode, known from the start as only a simulation can."""

    ends: tuple[int, ...]
    """Generated tokens at the end of each turn, turns before it included."""
    observations: tuple[int, ...]
    """Tokens of the answer to each turn that the environment answers."""
    action_times: tuple[float, ...]
    """Seconds of the action of each of these turns, without a time limit. A recorded episode may have
    one more: the action that ended it.
    """
    is_cut: bool = False
    """Whether its last turn ends at the maximum context."""
    start_time: float | None = None
    """Recorded seconds of the start of its environment; None if they are drawn."""

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return len(self.ends)

    def with_times(self, factor: float) -> Episode:
        """Return the episode with other times of its actions."""
        times = tuple(factor * time for time in self.action_times)
        changed: Episode = msgspec.structs.replace(self, action_times=times)
        return changed

    @property
    def tokens(self) -> int:
        """Generated tokens and tokens of observations."""
        return self.ends[-1] + sum(self.observations)


class EpisodeProfile(ProfileTable, frozen=True, kw_only=True):
    """Statistics of a kind of agent, from published traces or documents."""

    name: str
    source: str
    date: date
    turns: str
    generated_tokens: str
    """Generated tokens of a whole episode, as a run file states them in `workload.lengths`."""
    observation_tokens: str
    action_time: str
    start_time: str
    assumed: tuple[str, ...] = ()
    """Keys whose figures are at least in part assumptions."""


class EpisodeFigures(NamedTuple):
    """The distributions of episodes and environments."""

    turns: Lognormal
    observation_tokens: Lognormal
    action_time: Lognormal
    """Seconds."""
    start_time: Lognormal
    """Seconds of a cold start."""

    @classmethod
    def of(cls, config: EnvironmentConfig) -> EpisodeFigures:
        """Return the distributions of a run file, or those of the profile that it names.

        Raises:
            RunError: a distribution is missing or cannot be read.
        """
        return cls(*(_figure(config, name) for name in cls._fields))


def start_time_of(config: EnvironmentConfig) -> Lognormal:
    """Return the distribution of the seconds of a cold start. Recorded episodes need no other one.

    Raises:
        RunError: it cannot be read.
    """
    return _figure(config, "start_time")


def _figure(config: EnvironmentConfig, name: str) -> Lognormal:
    return Lognormal.of(name, _text_of(config, name))


def load_episode_profile(name: str) -> EpisodeProfile:
    """Return a profile of profiles/episodes.

    Raises:
        RunError: there is no such profile.
    """
    try:
        return read_profile(find_profile("episodes", name, ".toml"), EpisodeProfile)
    except ValueError as error:
        raise RunError("environment.source", name, text=f"environment.source: {error}") from None


def _text_of(config: EnvironmentConfig, name: str) -> str:
    stated: str | None = getattr(config, name)
    if stated is not None:
        return stated
    if config.source is not None:
        text: str = getattr(load_episode_profile(config.source), name)
        return text
    if name == "start_time":
        return "0 s"
    key = f"environment.{name}"
    text = f"{key} is missing: a simulation needs it; set it, or name a profile, such as environment.source = 'swe-agent'"
    raise RunError(key, None, str, text)


class Lognormal:
    """A lognormal distribution that is cut off at a maximum, or a constant."""

    def __init__(self, stated: StatedDistribution, key: str) -> None:
        """Fit the distribution to its stated figures.

        Raises:
            RunError: no lognormal distribution has these figures.
        """
        self._most = inf if stated.most is None else stated.most
        self._constant = stated.middle if stated.is_constant else None
        if stated.is_constant:
            self._location, self._spread = 0.0, 0.0
            return
        normal = NormalDist().inv_cdf(stated.share)
        if stated.is_mean:
            try:
                name = f"p{100 * stated.share:.0f}"
                fitted = fitted_to_mean(stated.middle, stated.upper, normal, self._most, name)
            except ValueError as error:
                raise RunError(key, stated.middle, text=f"{key}: {error}") from None
            self._location, self._spread = fitted
        else:
            self._location = log(stated.middle)
            upper = stated.upper
            self._spread = USUAL_SPREAD if upper is None else (log(upper) - self._location) / normal

    @classmethod
    def of(cls, name: str, text: str) -> Lognormal:
        """Return the distribution that a text of the key `environment.NAME` states."""
        key = f"environment.{name}"
        return cls(read_distribution(key, text, is_time=name in TIMES), key)

    def sample(self, rng: np.random.Generator, num: int) -> Floats:
        """Return `num` independent values."""
        if self._constant is not None:
            return np.full(num, self._constant)
        return np.minimum(rng.lognormal(self._location, self._spread, num), self._most)

    def at(self, shares: Floats) -> Floats:
        """Return the quantiles at shares in (0, 1)."""
        if self._constant is not None:
            return np.full(shares.shape, self._constant)
        normal = np.interp(shares, *_NORMAL)
        values: Floats = np.minimum(np.exp(self._location + self._spread * normal), self._most)
        return values

    @cached_property
    def mean(self) -> float:
        """The mean of values that are cut off at the maximum."""
        return float(self.at((np.arange(MEAN_POINTS) + 0.5) / MEAN_POINTS).mean())

    @property
    def median(self) -> float:
        """The median."""
        return (
            self._constant if self._constant is not None else min(exp(self._location), self._most)
        )


MEAN_POINTS = 1 << 14
_POINTS = (np.arange(2048) + 0.5) / 2048
_NORMAL = (_POINTS, np.array([NormalDist().inv_cdf(point) for point in _POINTS]))
"""Quantiles of the normal distribution."""


class EpisodeSource:
    """Splits generated tokens into turns, with observations and action times from stated distributions."""

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        """Read the distributions of a run file; see `EpisodeFigures.of`."""
        self._config = config
        self._figures = EpisodeFigures.of(config)
        self._seed = seed

    def turns(self, lengths: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the turns of each episode of a block by the rank of its length."""
        tokens = np.array(lengths)
        ranks = np.argsort(np.argsort(tokens, axis=None, kind="stable"), kind="stable")
        drawn = np.rint(self._figures.turns.at((ranks + 0.5) / tokens.size)).astype(np.int64)
        most = np.minimum(self._config.max_turns, tokens.ravel())
        turns: Lengths = np.minimum(np.maximum(drawn, 1), most).reshape(tokens.shape)
        return [row.tolist() for row in turns]

    def episodes(
        self, group: int, lengths: Sequence[int], turns: Sequence[int], prompt_tokens: int
    ) -> tuple[Episode, ...]:
        """Return the episodes of a group, given the generated tokens and turns of each."""
        rng = np.random.default_rng([self._seed, STREAM, group])
        return tuple(
            self._episode(rng, tokens, num, prompt_tokens)
            for tokens, num in zip(lengths, turns, strict=True)
        )

    def _episode(
        self, rng: np.random.Generator, tokens: int, num_turns: int, prompt_tokens: int
    ) -> Episode:
        shares = np.cumsum(rng.gamma(SHARES, size=num_turns))
        ends = np.floor(shares / shares[-1] * (tokens - num_turns)) + np.arange(1, num_turns + 1)
        observed = np.rint(self._figures.observation_tokens.sample(rng, num_turns - 1))
        seconds = self._figures.action_time.sample(rng, num_turns - 1)
        whole = Episode(
            tuple(ends.astype(np.int64).tolist()),
            tuple(observed.astype(np.int64).tolist()),
            tuple(seconds.tolist()),
        )
        return fitted_to_context(whole, self._config.max_context - prompt_tokens)


def fitted_to_context(episode: Episode, room: int) -> Episode:
    """Return an episode that ends when its tokens reach `room`, in the middle of a turn or an observation."""
    if episode.tokens <= room:
        return episode
    held = 0
    for turn, end in enumerate(episode.ends):
        if end + held >= room:
            ends = (*episode.ends[:turn], room - held)
            return Episode(
                ends,
                episode.observations[:turn],
                episode.action_times[:turn],
                True,
                episode.start_time,
            )
        if turn < len(episode.observations) and end + held + episode.observations[turn] >= room:
            observations = (*episode.observations[:turn], room - held - end)
            times = episode.action_times[: turn + 1]
            ends = episode.ends[: turn + 1]
            return Episode(ends, observations, times, start_time=episode.start_time)
        held += episode.observations[turn] if turn < len(episode.observations) else 0
    return episode


Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]


class RecordedTurn(msgspec.Struct, frozen=True, gc=False):
    """One turn of an executed or a logged episode."""

    tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    """Generated tokens."""
    observation_tokens: Count = 0
    """Tokens of the observation that follows it; 0 if none does."""
    action_time: Seconds | None = None
    """Seconds until the environment answered; None if unknown, or if it did not."""


class RecordedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a line of rollouts.jsonl that describes an episode."""

    rollout: int | None = None
    prompt_tokens: Count = 0
    turns: tuple[RecordedTurn, ...] = ()
    first_observation_tokens: Count = 0
    """Tokens that the environment showed before the first turn."""
    start_time: Seconds | None = None
    """Seconds of the start of its environment, without later starts after a loss; None if unknown."""

    @property
    def shown_tokens(self) -> int:
        """Tokens before its first turn: the prompt, and what the environment showed."""
        return self.prompt_tokens + self.first_observation_tokens

    @property
    def is_timed(self) -> bool:
        """Whether it has turns, and the time of each action that an observation follows."""
        return bool(self.turns) and all(
            turn.action_time is not None or turn is self.turns[-1] for turn in self.turns
        )

    @property
    def episode(self) -> Episode:
        """Return it as a simulation needs it."""
        times = [turn.action_time or 0.0 for turn in self.turns]
        return Episode(
            tuple(np.cumsum([turn.tokens for turn in self.turns]).tolist()),
            tuple(turn.observation_tokens for turn in self.turns[:-1]),
            tuple(times if times[-1] else times[:-1]),
            start_time=self.start_time,
        )


def read_episodes(path: Path) -> dict[int, RecordedEpisode]:
    """Return the recorded episodes of a rollouts.jsonl file by their rollout.

    A rollout that a resumed run repeated counts once, as it was repeated. Rollouts without turns, and
    those whose action times are unknown, are left out.

    Raises:
        ValueError: the file cannot be read, or has a wrong line; the message names both.
    """
    try:
        *lines, _ = read_text(path).split("\n")  # a killed run may have left a part of a last line
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    found: dict[int, RecordedEpisode] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = msgspec.json.decode(line, type=RecordedEpisode)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: the line is not from a run: {error}") from None
        if record.rollout is not None and record.is_timed:
            found[record.rollout] = record
    return found


class RecordedEpisodes:
    """Episodes of an executed run or of a CSV file. Whole episodes are sampled.

    A CSV file has one turn a row, in order: columns episode, output_tokens, observation_tokens and
    action_time (seconds, or another unit as in `action_time_ms`); optional prompt_tokens and start_time. The observation of an episode's last
    row is ignored. Its action is the one that ended the episode.
    """

    def __init__(self, path: Path, prompt_tokens: int) -> None:
        """Read a CSV file, a run directory, or its rollouts.jsonl.

        Raises:
            ValueError: it is wrong; the message names file and row.
        """
        if path.is_dir() or path.suffix == ".jsonl":
            file = path / ROLLOUTS_FILE if path.is_dir() else path
            records = list(read_episodes(file).values())
            if not records:
                raise ValueError(
                    f"{file} has no episode with turns; name a run that `streamrl execute` made with [environment]"
                )
        else:
            records = _read_rows(path, prompt_tokens)
        self._episodes = [record.episode for record in records]
        self._lengths = np.array([episode.ends[-1] for episode in self._episodes])
        self._prompts = np.array([record.shown_tokens for record in records])

    def pick(self, rng: np.random.Generator, num_groups: int, group_size: int) -> Lengths:
        """Return the recorded episode of each rollout, [num_groups, group_size]."""
        return rng.integers(0, len(self._episodes), (num_groups, group_size))

    def sample(
        self, rng: np.random.Generator, num_groups: int, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return generated tokens [num_groups, group_size] and prompt tokens [num_groups]."""
        return self.of(self.pick(rng, num_groups, group_size))

    def of(self, picks: Lengths) -> tuple[Lengths, Lengths]:
        """Return the generated tokens of picked episodes, and the prompt tokens of each group."""
        return self._lengths[picks], self._prompts[picks[:, 0]]

    def episodes(self, picks: Sequence[int], room: int) -> tuple[Episode, ...]:
        """Return picked episodes, which end when their tokens reach `room`."""
        return tuple(fitted_to_context(self._episodes[pick], room) for pick in picks)


def _read_rows(path: Path, prompt_tokens: int) -> list[RecordedEpisode]:
    """Return the episodes of a CSV file; `prompt_tokens` counts where a row has none."""
    turns: dict[str, list[RecordedTurn]] = {}
    prompts: dict[str, int] = {}
    starts: dict[str, float] = {}
    rows = read_csv(path)
    columns = columns_in_seconds(str(path), rows[0] if rows else (), TIMES)
    written = {name: (column, unit) for column, (name, unit) in columns.items()}
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        read = partial(_number, where, row, written)
        name = row.get("episode") or ""
        if not name:
            raise ValueError(f"{where} needs an episode, which marks its turns")
        turns.setdefault(name, []).append(
            RecordedTurn(
                int(read("output_tokens", 1)),
                int(read("observation_tokens", 0)),
                read("action_time", 0),
            )
        )
        if row.get("prompt_tokens"):
            prompts.setdefault(name, int(read("prompt_tokens", 1)))
        if "start_time" in written and row[written["start_time"][0]]:
            starts.setdefault(name, read("start_time", 0))
    if not turns:
        raise ValueError(f"{path} has no rows")
    return [
        RecordedEpisode(
            prompt_tokens=prompts.get(name, prompt_tokens),
            turns=tuple(own),
            start_time=starts.get(name),
        )
        for name, own in turns.items()
    ]


def _number(
    where: str,
    row: Mapping[str, str],
    written: Mapping[str, tuple[str, float]],
    column: str,
    least: int,
) -> float:
    """Return a number of a row; `written` has the header's name of each column, and the seconds of its unit."""
    name, unit = written.get(column, (column, 1.0))
    try:
        value = parse_number(row.get(name) or "")
    except ValueError:
        value = -1.0
    if value < least or (column not in TIMES and not value.is_integer()):
        raise ValueError(
            f"{where}: {name} must be a number of at least {least}, got {row.get(name)!r}"
        )
    return value * unit
