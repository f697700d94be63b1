"""Workers without a model: a replica and a trainer that sleep, and make tokens by rollout id; they import no torch."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from streamrl.executor.roles import (
    BroadcastRank,
    CacheState,
    Completion,
    Exchange,
    Manifest,
    ModelScore,
    Request,
    RewardRole,
    Sample,
    TrainerRole,
)
from streamrl.executor.rollout.inference_engine import (
    STOPPED,
    Copy,
    OnEnd,
    ReplicaSettings,
    RunningSequence,
    TimedPass,
)
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.tokens import encode_ids, read_blocks

VOCABULARY = 20
OBSERVED = 2
"""Every token of an observation; no policy samples it."""


class ScriptedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a role is, how often it fails, and what it has room for."""

    seed: int
    fastest: float = 0.0
    slowest: float = 0.004
    failure_rate: float = 0.0
    max_running: int = 4
    max_tokens: int = 1_000_000
    max_prompt_tokens: int = 1_000_000
    save_time: float = 5.0
    may_be_cut: bool = False
    """Whether limits may cut off the last turn of an episode."""
    generation_time: float | None = None
    """Seconds that a replica takes for each output; None where chance says, as of all that it does."""
    cache_tokens: int | None = None
    """That the cache of a replica is said to hold; None where it has none that it tells of."""


class ScriptedReplica(ReplicaWorker):
    """A replica whose engine sleeps."""

    def __init__(self, config: ScriptedConfig) -> None:
        settings = ReplicaSettings(
            model="",
            max_running=config.max_running,
            max_tokens=config.max_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
            temperature=1.0,
            seed=config.seed,
            save_time=config.save_time,
        )
        super().__init__(settings, ScriptedEngine(config))

    async def generate(self, request: Request) -> Completion:
        self._check(request)
        return await super().generate(
            msgspec.structs.replace(request, prompt=encode_ids([request.rollout % 2**31]))
        )

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        await asyncio.sleep(0)

    async def _verified(self, manifest: Manifest) -> tuple[Manifest, str]:
        if manifest.is_packed:
            return manifest, manifest.checksum
        return await super()._verified(manifest)

    async def break_engine(self) -> None:
        """End the engine, as a crash does, while this process lives."""
        await self._engine.stop()

    def _text(self, tokens: list[int]) -> str:
        """Return a text that scores 1 with answer "odd" or "even", by the sum of the tokens."""
        return "odd" if sum(tokens) % 2 else "even"


@dataclass(frozen=True)
class ScriptedRun:
    """One sequence of a scripted engine."""

    tokens: list[int]
    began_at: float
    duration: float
    work: asyncio.Task[None]
    on_end: OnEnd

    def so_far(self, until: float) -> RunningSequence:
        """Return what it has made up to an instant: never the last token, which ends it."""
        share = (until - self.began_at) / self.duration if self.duration else 0.0
        return self._made(min(len(self.tokens) - 1, int(share * len(self.tokens))))

    def whole(self) -> RunningSequence:
        return self._made(len(self.tokens))

    def _made(self, count: int) -> RunningSequence:
        step = self.duration / len(self.tokens)
        times = [self.began_at + step * number for number in range(1, count + 1)]
        return RunningSequence(self.tokens[:count], [-1.0] * count, self.began_at, times)


class ScriptedEngine:
    """Sleeps for each sequence, and makes the tokens of the rollout whose id the prompt is."""

    end_tokens = frozenset(range(VOCABULARY))
    pads_context = False
    prefill_tokens = 512

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._names = map(str, itertools.count())
        self._runs: dict[str, ScriptedRun] = {}
        self._turn = asyncio.Lock()
        self._paused_at = 0.0
        self._is_stopped = False

    async def start(self, manifest: Manifest | None) -> None:
        await asyncio.sleep(self._some_time())

    @property
    def has_room(self) -> bool:
        return self._is_stopped or len(self._runs) < self._config.max_running

    @property
    def is_over(self) -> bool:
        return self._is_stopped

    @property
    def cache(self) -> CacheState | None:
        tokens = self._config.cache_tokens
        if tokens is None:
            return None
        held = sum(len(run.tokens) for run in self._runs.values())
        return CacheState(tokens=tokens, use=min(1.0, held / tokens), num_preempted=0)

    def submit(
        self, tokens: list[int], max_new_tokens: int, on_end: OnEnd, seed: int | None, priority: int
    ) -> str:
        self._check_alive()
        run, (rollout, *prefix) = next(self._names), tokens
        fails = self._random.random() < self._config.failure_rate
        rest = rest_of(rollout, prefix)[:max_new_tokens]
        own = self._config.generation_time
        duration = self._some_time() if own is None else own
        work = asyncio.create_task(self._work(run, duration, fails))
        self._runs[run] = ScriptedRun(rest, time.perf_counter(), duration, work, on_end)
        return run

    async def _work(self, run: str, duration: float, fails: bool) -> None:
        await asyncio.sleep(duration)
        async with self._turn:
            ended = self._runs.pop(run)
        ended.on_end(OSError("a scripted failure") if fails else ended.whole())

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        async with self._turn:
            self._check_alive()
            self._paused_at = time.perf_counter()
            yield

    def read(self, run: str) -> RunningSequence:
        return self._runs[run].so_far(self._paused_at)

    def cancel(self, run: str) -> None:
        self._runs.pop(run).work.cancel()

    async def read_weights(self, manifest: Manifest) -> Copy:
        for bucket in manifest.buckets:
            if not Path(bucket.path).is_file():
                raise ValueError(f"{bucket.path} is not there")

        async def copy() -> None:
            await asyncio.sleep(self._some_time())

        return copy

    def _check_alive(self) -> None:
        if self._is_stopped:
            raise RuntimeError(STOPPED)

    async def sleep(self) -> None:
        self._check_alive()
        await asyncio.sleep(self._some_time())

    async def wake(self) -> None:
        self._check_alive()
        await asyncio.sleep(self._some_time())

    async def stop(self) -> None:
        self._is_stopped = True
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.work.cancel()
            run.on_end(RuntimeError(STOPPED))

    async def time_passes(self) -> None:
        pass

    async def passes(self) -> list[TimedPass]:
        return []

    def _some_time(self) -> float:
        return self._random.uniform(self._config.fastest, self._config.slowest)


class ScriptedTrainer(TrainerRole):
    """Trains by sleeping, one call after the other, on what scripted replicas made, and counts."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._turn = asyncio.Lock()
        self._version = 0
        self._num_trained = 0
        self._origin = config.seed
        """Of the trainer whose weights it goes on with."""

    async def start(self, checkpoint: str | None, version: int | None = None) -> int:
        if checkpoint is not None:
            self._version = int((Path(checkpoint) / "version").read_text())
            self._origin = int((Path(checkpoint) / "origin").read_text())
        if version is not None:
            self._version = version
        return self._version

    async def start_blank(self) -> None:
        pass

    async def regroup(self, num_ranks: int, num_kept: int, rendezvous: str) -> int:
        async with self._work():
            if self._num_trained and num_ranks < num_kept:
                raise ValueError("the batch has begun")
            return self._version

    async def score(self, samples: list[Sample]) -> dict[str, float]:
        async with self._work():
            check_tokens(samples, may_be_cut=self._config.may_be_cut)
            return {}

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        async with self._work():
            check_tokens(samples, may_be_cut=self._config.may_be_cut)
            self._num_trained += len(samples)
            return {}

    async def step(self, version: int) -> dict[str, float]:
        async with self._work():
            if version != self._version + 1:
                raise ValueError(f"step must make version {self._version + 1}, got {version}")
            if not self._num_trained:
                raise ValueError("nothing was trained on")
            self._version, num_trained, self._num_trained = version, self._num_trained, 0
            return {"loss": 0.0, "rollouts": num_trained, "origin": self._origin}

    async def push(self, version: int, directory: str) -> Manifest:
        async with self._work():
            if version != self._version:
                raise ValueError(f"push must write version {self._version}, got {version}")
            return Manifest(version=version, buckets=[])

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        return msgspec.structs.replace(await self.push(version, ""), is_packed=True)

    async def listen(self) -> str:
        return f"group of {id(self)}"

    async def send(self, version: int, seat: BroadcastRank) -> None:
        await asyncio.sleep(self._random.random() * self._config.slowest)

    async def save(self, path: str) -> None:
        async with self._turn:
            Path(path).mkdir(parents=True, exist_ok=True)
            (Path(path) / "version").write_text(str(self._version))
            (Path(path) / "origin").write_text(str(self._origin))

    async def sleep(self) -> None:
        async with self._turn:
            pass

    async def wake(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    @asynccontextmanager
    async def _work(self) -> AsyncIterator[None]:
        async with self._turn:
            await asyncio.sleep(self._random.random() * self._config.slowest)
            yield


class ScriptedRewardModel(RewardRole):
    """Scores by the length of a completion, one call after the other, and knows the sizes of its calls."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        if self._config.failure_rate:
            raise ValueError("a scripted failure")

    async def score(self, exchanges: list[Exchange]) -> list[ModelScore]:
        async with self._turn:
            await asyncio.sleep(self._config.slowest)
            return [self._score(each, len(exchanges)) for each in exchanges]

    def _score(self, exchange: Exchange, at_once: int) -> ModelScore:
        if not exchange.completion:
            return ModelScore(num_tokens=0, fault="nothing to score")
        return ModelScore(num_tokens=at_once, score=len(exchange.completion) + at_once / 100)

    async def stop(self) -> None:
        pass


def check_tokens(samples: list[Sample], *, may_be_cut: bool = False) -> None:
    """Raise where samples have other tokens than their rollouts were made of; a last turn may be cut off."""
    for sample in samples:
        tokens, logprobs = (each.tolist() for each in read_blocks(sample.output))
        turn = start = 0
        for segment in sample.segments:
            part = slice(start, start := start + segment.num_tokens)
            expected, logprob = [OBSERVED] * segment.num_tokens, 0.0
            if segment.is_policy:
                expected, logprob, turn = tokens_of(sample.rollout, turn), -1.0, turn + 1
                if may_be_cut and start == len(tokens):
                    expected = expected[: segment.num_tokens]
            if (tokens[part], {*logprobs[part]}) != (expected, {logprob}):
                raise ValueError(f"rollout {sample.rollout} comes with the tokens of another")
        if start != len(tokens) or not sample.segments[-1].is_policy:
            raise ValueError(f"rollout {sample.rollout}: {sample.segments}")


def tokens_of(rollout: int, turn: int = 0) -> list[int]:
    """Return the tokens of a turn of a rollout: the same whoever generates it, and whenever."""
    source = random.Random(rollout if not turn else f"{rollout} {turn}")
    return [source.randrange(3, VOCABULARY) for _ in range(source.randrange(2, 9))]


def rest_of(rollout: int, prefix: list[int]) -> list[int]:
    """Return what follows the first turns of a rollout, observations between them and the start of a turn."""
    turn, begun = 0, 0
    for before, token in pairwise([OBSERVED, *prefix]):
        turn += token == OBSERVED != before
        begun = 0 if token == OBSERVED else begun + 1
    return tokens_of(rollout, turn)[begun:]


def text_of(tokens: list[int]) -> str:
    """Return a text that scores 1 with answer "odd" or "even", by the sum of the tokens."""
    return "odd" if sum(tokens) % 2 else "even"
