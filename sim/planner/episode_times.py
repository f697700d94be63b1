"""Estimate when the episodes of a batch end, by a closed form that needs no simulation.

A replica with `e` episodes under way is a closed queue. Each episode alternates between the replica
and its tools, so with `b` episodes at the replica, X turns per second and D seconds of tools a turn,

    e  =  b + X D                 (Little's law)
    X  =  1 / (g a(r) / r + p)    turns that r running episodes complete, each with g tokens

`a(r)` is the decode step with the mean context, and `p` the prefill of a turn: its observation, and
what the prefix cache has lost. The cache keeps contexts of episodes that wait. It loses a context
that waits longer than the time in which others fill the room, as in Che's approximation of a
least-recently-used cache.

The ends of a batch follow from these speeds: between two ends every episode proceeds at the speed of
the number under way. Episodes beyond the sandboxes start when others end. Time limits of episodes are
left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from streamrl.engine.presets import choose_system
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.resolved import ResolvedRun
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.policies_config import TurnPlacement
from streamrl.sim.batch_generation import DrawnBatch, Finish, StepBatch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.stage_times import GenerationTime, summarize
from streamrl.workload.episodes import Episode, start_time_of
from streamrl.workload.replica_batch import rollouts_under_way

POINTS = 16
"""Numbers of episodes under way for which speeds are computed; others are interpolated."""
HALVINGS = 16
"""Steps of a bisection."""
STEADY = 3
"""Batches over which the seconds of a steady run are averaged."""
ROUNDING = 1e-9
"""Relative difference of two instants that count as equal."""
QUANTILES: Floats = np.array([-1.46, -0.79, -0.37, 0.0, 0.37, 0.79, 1.46])
"""Means of the normal distribution on seven parts of equal probability."""


class EpisodeMix:
    """Means over the turns of a batch, and the distribution of its action times."""

    def __init__(self, batch: DrawnBatch, config: EnvironmentConfig) -> None:
        """Read the episodes of a batch."""
        limit = inf if config.action_time_limit is None else float(config.action_time_limit)
        prompts, episodes = _episodes_of(batch)
        self.tokens: Floats = np.array([each.ends[-1] for each in episodes], dtype=float)
        """Generated tokens of each episode."""
        self.tool_times: Floats = np.array(
            [sum(min(time, limit) for time in each.action_times) for each in episodes]
        )
        """Seconds of the actions of each episode."""
        times = [min(time, limit) for each in episodes for time in each.action_times]
        self._times: Floats = np.sort(np.array(times or [0.0]))
        num_turns = sum(each.num_turns for each in episodes)
        self.turns = num_turns / len(episodes)
        """Turns of an episode."""
        self.turn_tokens = float(self.tokens.sum()) / num_turns
        self.observed = sum(sum(each.observations) for each in episodes) / num_turns
        """Tokens of observations a turn."""
        self.prompt = float(np.mean(prompts))
        contexts = [_contexts(each, prompt) for prompt, each in zip(prompts, episodes, strict=True)]
        all_contexts = np.concatenate(contexts)
        self.context = float(all_contexts.mean())
        """Tokens of the context at the start of a turn."""
        self.spread = float(all_contexts.std()) / self.context
        """Their standard deviation, relative to the mean."""
        self.delay = float(self.tool_times.sum()) / num_turns
        """Seconds of tools a turn."""

    @cached_property
    def _capped_means(self) -> list[float]:
        """For each action time t in rising order, the mean of the action times that are cut off at t."""
        longer = np.arange(len(self._times), 0, -1)
        gaps = np.diff(self._times, prepend=0.0)
        means: list[float] = (np.cumsum(gaps * longer) / len(self._times)).tolist()
        return means

    def share_beyond(self, capped_mean: float) -> float:
        """Return the share of actions that are longer than t, where action times cut off at t have this mean."""
        return 1 - bisect_left(self._capped_means, capped_mean) / len(self._times)


def _episodes_of(batch: DrawnBatch) -> tuple[list[int], list[Episode]]:
    pairs = [(draw.drawn.prompt_tokens, each) for draw in batch for each in draw.episodes]
    return [prompt for prompt, _ in pairs], [each for _, each in pairs]


def _contexts(episode: Episode, prompt: int) -> Floats:
    ends = np.concatenate(([0], episode.ends[:-1]))
    observed = np.concatenate(([0], np.cumsum(episode.observations)))[: len(ends)]
    contexts: Floats = prompt + ends + observed
    return contexts


class Speed(NamedTuple):
    """A replica with some episodes under way."""

    token_time: float
    """Seconds at the replica for each generated token: decode, prefill and waiting."""
    lost: float
    """Share of the turns whose context must be computed again."""


class ReplicaSpeeds:
    """The speeds of one kind of replica, by the number of its episodes under way."""

    def __init__(
        self,
        costs: Costs,
        max_running: int,
        mix: EpisodeMix,
        *,
        keeps: float,
        prompt_share: float,
        refreshed: float,
    ) -> None:
        """Take the properties of a replica.

        Args:
            costs: its costs.
            max_running: `rollout.max_running`.
            mix: the episodes.
            keeps: share of the turns that return to the replica of the turn before, if it caches.
            prompt_share: share of a prompt that an episode holds by itself.
            refreshed: contexts that new weights invalidate, for each turn.
        """
        self._costs, self._mix, self._keeps = costs, mix, keeps
        self._refreshed = refreshed
        self._first = mix.prompt * prompt_share / mix.turns
        """Tokens of prompts, for each turn."""
        self._held = max(1.0, mix.context + mix.turn_tokens / 2 - mix.prompt * (1 - prompt_share))
        """Tokens of memory of an episode under way."""
        self._most = max(1.0, min(max_running, costs.kv_capacity / self._held))

    def at(self, under_way: float) -> Speed:
        """Return the speed with so many episodes under way."""
        delay, mix = self._mix.delay, self._mix
        high = self._number_here(under_way)
        rate = (under_way - high) / delay if delay else self._service(high, high, inf)[0]
        rate, lost = self._service(high, under_way, rate)
        return Speed(high / rate / mix.turn_tokens, lost)

    def _number_here(self, under_way: float) -> float:
        """Return the number at the replica at which turns end as fast as they come back."""
        low, high = 0.0, under_way
        for _ in range(HALVINGS if self._mix.delay else 0):
            middle = (low + high) / 2
            rate = (under_way - middle) / self._mix.delay
            if self._service(middle, under_way, rate)[0] < rate:
                low = middle
            else:
                high = middle
        return high

    def _service(self, here: float, under_way: float, rate: float) -> tuple[float, float]:
        """Return the turns per second with `here` episodes at the replica, and the share of contexts that are lost.

        `rate` is the rate at which episodes come back, which decides how long a context waits. The
        number at the replica and the sum of their contexts vary.
        """
        mix = self._mix
        spread = sqrt(here * (1 - here / under_way + mix.spread**2))
        numbers = np.clip(here + spread * QUANTILES, 0.0, under_way)
        runs = np.minimum(numbers, self._most)
        pairs_of = list(zip(runs, numbers - runs, strict=True))
        lost = self._mean_lost(pairs_of, rate, 0.0)
        loaded = 0.0
        if self._costs.host_cache is not None:
            evicted, host = lost, self._costs.host_cache
            lost = self._mean_lost(pairs_of, rate, host.capacity)
            loaded = (evicted - lost) * mix.context * host.token_time
        again = min(1.0, lost + self._refreshed) * max(
            0.0, mix.context - mix.observed - self._first
        )
        tokens = max(1.0, mix.observed + self._first + again)
        pairs = tokens * max(mix.context - tokens / 2, tokens / 2)
        running = float(runs.mean())
        batch = max(1.0, running)
        prefill = self._costs.prefill_time(round(tokens), pairs, round(batch))
        context = batch * (mix.context + mix.turn_tokens / 2)
        step = self._costs.decode.step_time(round(batch), context)
        seconds = mix.turn_tokens * step / batch + prefill + loaded
        return min(1.0, running) / seconds, lost

    def _mean_lost(self, numbers: Sequence[tuple[float, float]], rate: float, host: float) -> float:
        """Return the share of turns whose context is in no memory, given the numbers that run and wait."""
        found = [self._lost(*each, rate, host) for each in numbers]
        return 1 - self._keeps * (1 - sum(found) / len(found))

    def _lost(self, running: float, queued: float, rate: float, host: float) -> float:
        """Return the share of contexts that are evicted while their episode waits. `host` tokens fit in host memory, which has copies of all."""
        mix = self._mix
        room = max(0.0, max(self._costs.kv_capacity, host) / self._held - running)
        if not rate or rate == inf:
            return 0.0
        waited, kept_for = queued / rate, room / rate
        if kept_for <= waited:
            return 1.0
        return mix.share_beyond(kept_for - waited)


class Population(NamedTuple):
    """Episodes that may be open at once, and the seconds of an environment without its episode."""

    sandboxes: float
    episodes: float
    """Maximum in flight."""
    start: float
    """Seconds of a start."""
    warm: int
    warm_start: float
    spacing: float
    """Seconds between two starts."""
    scoring: float
    """Seconds for which an environment stays open after its episode."""

    @classmethod
    def of(cls, config: EnvironmentConfig, reward_time: float) -> Population:
        """Return the limits of a run file, given the seconds of a reward."""
        per_second = config.starts_per_second
        return cls(
            sandboxes=inf if config.sandboxes is None else config.sandboxes,
            episodes=inf if config.max_episodes is None else config.max_episodes,
            start=start_time_of(config).mean,
            warm=config.warm,
            warm_start=float(config.warm_start_time),
            spacing=(1 + (config.warm > 0)) / per_second if per_second else 0.0,
            scoring=reward_time if config.scores_in_sandbox else 0.0,
        )

    @property
    def later_start(self) -> float:
        """Seconds of a start in a steady run: prepared environments are replaced in time."""
        return self.warm_start if self.warm else self.start

    def start_of(self, number: int) -> float:
        """Return when the environment `number` of the first ones is open, if all start at once."""
        seconds = self.warm_start if number < self.warm else self.start
        return number * self.spacing + seconds


class EpisodeTimes:
    """The ends of batches of episodes on the replicas of a run file."""

    def __init__(
        self, resolved: ResolvedRun, costs: Costs, batch: DrawnBatch, in_flight: float, loads: float
    ) -> None:
        """Compute the speeds of the replicas.

        Args:
            resolved: the run file with its profiles.
            costs: its costs.
            batch: a typical batch.
            in_flight: episodes that may be under way at once in a steady run.
            loads: weight loads during a batch, which invalidate the contexts under way.
        """
        run, config = resolved.run, resolved.run.environment
        assert config is not None, "only a run with an environment has episodes"
        self._mix = EpisodeMix(batch, config)
        self._config = config
        self._population = Population.of(config, float(run.verifier.time))
        self._in_flight = min(in_flight, self._population.sandboxes, self._population.episodes)
        self._num_replicas = run.rollout.num_replicas
        num_turns = self._mix.turns * len(self._mix.tokens)
        shared = min(1.0, self._num_replicas / run.algorithm.group_size)
        places = np.geomspace(1.0, max(2.0, self._in_flight / self._num_replicas), POINTS)
        rates = np.zeros(POINTS)
        for kind, own in enumerate(run.rollout.kinds):
            shares = run.of_kind(kind).shares_prefixes
            speeds = ReplicaSpeeds(
                costs.of_kind(kind),
                own.max_running,
                self._mix,
                keeps=_kept_share(run.policies.turn_placement, self._num_replicas) * shares,
                prompt_share=shared if shares else 1.0,
                refreshed=loads * self._in_flight / num_turns,
            )
            found = [speeds.at(place) for place in places]
            rates += [own.replicas / each.token_time for each in found]
        self._places, self._token_times = places, self._num_replicas / rates

    def _token_time(self, under_way: float) -> float:
        per_replica = under_way / self._num_replicas
        return float(np.interp(per_replica, self._places, self._token_times))

    def ends(self, batch: DrawnBatch) -> list[Finish]:
        """Return the ends of a batch whose environments all start at once, sorted by time."""
        mix = EpisodeMix(batch, self._config)
        groups = [draw.drawn.group for draw in batch for _ in draw.episodes]
        times = self._end_times(mix.tokens, mix.tool_times, [len(groups)], 1)
        tokens = mix.tokens.astype(int).tolist()
        return sorted(
            Finish(time, tokens[place], group, place % self._num_replicas)
            for place, (time, group) in enumerate(zip(times.tolist(), groups, strict=True))
        )

    def steady_time(self, batches: Sequence[DrawnBatch], window: int) -> float:
        """Return the seconds of a batch in a steady run with at most `window` batches under way.

        A batch starts when the one `window` places before has ended.
        """
        num = window + STEADY
        mixes = [EpisodeMix(batch, self._config) for batch in batches]
        mixes = (mixes * num)[:num]
        sizes = [len(mix.tokens) for mix in mixes]
        tokens = np.concatenate([mix.tokens for mix in mixes])
        tools = np.concatenate([mix.tool_times for mix in mixes])
        times = np.split(self._end_times(tokens, tools, sizes, window), np.cumsum(sizes)[:-1])
        ended = np.maximum.accumulate([each.max() for each in times])
        return float(ended[-1] - ended[-1 - STEADY]) / STEADY

    def _end_times(
        self, tokens: Floats, tools: Floats, sizes: Sequence[int], window: int
    ) -> Floats:
        """Return when each episode ends, with at most `window` of the batches under way.

        Args:
            tokens: generated tokens of each episode, in the order of the batches.
            tools: seconds of its tools.
            sizes: episodes of each batch.
            window: batches that may be under way.
        """
        own, num = self._population, len(tokens)
        of_batch = np.repeat(np.arange(len(sizes)), sizes)
        missing, allowed = list(sizes), sum(sizes[:window])
        left, ended_at = np.ones(num), np.zeros(num)
        free = [0.0] * int(min(own.sandboxes, num))
        opening: list[tuple[float, int]] = []
        active = np.zeros(0, dtype=int)
        now, next_one, first_batch = 0.0, 0, 0
        while next_one < num or opening or len(active):
            while free and next_one < allowed and len(opening) + len(active) < own.episodes:
                started = max(now, heappop(free))
                seconds = own.start_of(next_one) if next_one < len(free) else own.later_start
                heappush(opening, (started + seconds, next_one))
                next_one += 1
            durations = tokens[active] * self._token_time(len(active)) + tools[active]
            remaining = left[active] * durations
            ends_in = float(remaining.min()) if len(active) else inf
            opens_in = max(0.0, opening[0][0] - now) if opening else inf
            step = min(ends_in, opens_in)
            left[active] -= step / durations
            now += step
            if opens_in <= ends_in:
                active = np.append(active, heappop(opening)[1])
                continue
            is_over = remaining <= ends_in * (1 + ROUNDING)
            for place in active[is_over].tolist():
                ended_at[place] = now
                heappush(free, now + own.scoring)
                missing[of_batch[place]] -= 1
            while first_batch < len(sizes) and not missing[first_batch]:
                first_batch += 1
                allowed = sum(sizes[: first_batch + window])
            active = active[~is_over]
        return ended_at


def _kept_share(placement: TurnPlacement, num_replicas: int) -> float:
    """Return the share of turns that return to the replica of the turn before, if no replica is overloaded."""
    return 1 / num_replicas if placement == "any" else 1.0


def times_of_episodes(
    resolved: ResolvedRun, costs: Costs, batches: Sequence[StepBatch]
) -> GenerationTime:
    """Return the generation times of batches on the replicas of a run file.

    Replicas whose steps overlap have the episodes of several batches under way. So a batch takes the
    time in which a steady run ends as many episodes.
    """
    run = resolved.run
    system = choose_system(run.policies)
    in_flight = rollouts_under_way(run.policies, run.algorithm)
    overlaps = system.staleness_bound > 0 and not system.waits_for_whole_batches
    loads = 1 / system.sync_every if overlaps else 0.0
    times = EpisodeTimes(resolved, costs, batches[0].drawn, in_flight, loads)
    found = summarize(
        [batch.generate(times.ends) for batch in batches],
        run.rollout.num_replicas,
        waits_for_groups=run.algorithm.trains_whole_groups,
        has_reward_time=costs.rewards is not None or run.verifier.time > 0,
    )
    if not overlaps:
        return found
    steady = times.steady_time([batch.drawn for batch in batches], 1 + system.staleness_bound)
    return replace(found, shares=np.full(len(batches), steady))
