"""Roles without a model, for tests of the real world's control: they sleep, and make tokens by rollout id."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from executor.buffer import RolloutBuffer
from executor.carriers.handles import Handle, InProcess, LocalProcess, WorkerLostError
from executor.prompts import PromptWorkload, Record
from executor.record import RunDirectory
from executor.samples import Completion, Manifest, Request, Sample
from executor.tokens import TokenSegment, count_tokens, read_blocks, write_block
from executor.verifier.verifier import Scoring
from executor.world import RealWorld
from streamrl.engine.systems import build_policies, build_state
from streamrl.record.trace import Trace
from streamrl.runfile.config import Run
from tests.runs import CheckedEngine
from tests.verifying import score

REPLICA = "tests.scripted:ScriptedReplica"
TRAINER = "tests.scripted:ScriptedTrainer"
VOCABULARY = 20


class ScriptedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a role is, and how often it fails."""

    seed: int
    slowest: float = 0.004
    failure_rate: float = 0.0
    max_running: int = 4


class ScriptedReplica:
    """Generates by sleeping; honours drain, in-flight loads and aborts like a real replica."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._version = 0
        self._slots = asyncio.Semaphore(config.max_running)
        self._gate = asyncio.Event()
        self._gate.set()
        self._running: dict[int, asyncio.Event] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._loads = asyncio.Lock()

    async def start(self, manifest: Manifest | None, version: int) -> None:
        await asyncio.sleep(self._random.random() * self._config.slowest)
        self._version = version

    async def generate(self, request: Request) -> Completion:
        aborted = self._running.setdefault(request.rollout, asyncio.Event())
        async with self._slots:
            while not self._gate.is_set():
                await self._gate.wait()
            self._idle.clear()
            self._busy = getattr(self, "_busy", 0) + 1
            try:
                return await self._sleep(request, aborted)
            finally:
                del self._running[request.rollout]
                self._busy -= 1
                if not self._busy:
                    self._idle.set()

    async def _sleep(self, request: Request, aborted: asyncio.Event) -> Completion:
        began_at, version = time.monotonic(), self._version
        if self._random.random() < self._config.failure_rate:
            raise OSError("a scripted failure")
        tokens = tokens_of(request.rollout)
        text, tokens = text_of(tokens), tokens[count_tokens(request.prefix) :]
        try:
            slowness = self._random.random() * self._config.slowest
            await asyncio.wait_for(aborted.wait(), slowness)
            tokens = tokens[: len(tokens) // 2]
        except TimeoutError:
            pass
        return Completion(
            rollout=request.rollout,
            output=write_block(tokens, [-1.0] * len(tokens), request.output_path),
            segments=(TokenSegment(len(tokens), is_policy=True),) if tokens else (),
            text=None if aborted.is_set() else text,
            versions=[(version, 0)] if tokens else [],
            finish="aborted" if aborted.is_set() else "stop",
            run_time=time.monotonic() - began_at,
            prefill_time=0.0,
        )

    async def abort(self, rollout: int) -> None:
        if rollout in self._running:
            self._running[rollout].set()

    async def load(self, manifest: Manifest, drain: bool) -> float:
        self._gate.clear()  # what is sent after a load starts under what it brings
        async with self._loads:
            self._gate.clear()
            if drain:
                await self._idle.wait()
            began_at = time.monotonic()
            await asyncio.sleep(self._random.random() * self._config.slowest)
            self._version = manifest.version
            self._gate.set()
            return time.monotonic() - began_at

    async def stop(self) -> None:
        pass


class ScriptedTrainer:
    """Trains by sleeping, on samples that are what scripted replicas made."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._version = 0

    async def start(self, checkpoint: str | None) -> int:
        if checkpoint is not None:
            self._version = int((Path(checkpoint) / "version").read_text())
        return self._version

    async def score(self, samples: list[Sample]) -> dict[str, float]:
        await self._work()
        check_tokens(samples)
        return {}

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        await self._work()
        check_tokens(samples)
        return {}

    async def step(self, version: int) -> dict[str, float]:
        await self._work()
        self._version = version
        return {"loss": 0.0}

    async def push(self, version: int, directory: str) -> Manifest:
        await self._work()
        return Manifest(version=version, buckets=[])

    async def save(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "version").write_text(str(self._version))

    async def stop(self) -> None:
        pass

    async def _work(self) -> None:
        await asyncio.sleep(self._random.random() * self._config.slowest)


def check_tokens(samples: list[Sample]) -> None:
    """Raise where samples have other tokens than their rollouts were made of."""
    for sample in samples:
        tokens, logprobs = read_blocks(sample.output)
        if (tokens.tolist(), {*logprobs.tolist()}) != (tokens_of(sample.rollout), {-1.0}):
            raise ValueError(f"rollout {sample.rollout} comes with the tokens of another")
        if sample.segments != (TokenSegment(len(tokens), is_policy=True),):
            raise ValueError(f"rollout {sample.rollout}: {sample.segments}")


def tokens_of(rollout: int) -> list[int]:
    """Return the output of a rollout: the same whoever generates it, and whenever."""
    source = random.Random(rollout)
    return [source.randrange(3, VOCABULARY) for _ in range(source.randrange(2, 9))]


def text_of(tokens: list[int]) -> str:
    """Return a text that scores 1 with answer "odd" or "even", by the sum of the tokens."""
    return "odd" if sum(tokens) % 2 else "even"


class ScriptedTokenizer:
    """A character a token."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % (VOCABULARY - 3) for character in text]


class ScriptedVerifier:
    """Scores in this process: what scripted roles write is trusted."""

    async def start(self) -> None:
        pass

    async def verify(self, completion: str, record: Record) -> Scoring:
        return Scoring(score("exact", completion, record), None)

    def close(self) -> None:
        pass


class ScriptedLauncher:
    """Starts scripted roles in this process, or in processes of their own; `lose` kills replicas."""

    def __init__(
        self, run: Run, directory: RunDirectory, is_local: bool = False, **options: Any
    ) -> None:
        self._directory = directory
        self._is_local = is_local
        self._seed = run.seed
        self._options: dict[str, Any] = options
        self.replicas: dict[int, Handle] = {}

    async def replica(self, replica_id: int, model: str) -> Handle:
        self.replicas[replica_id] = handle = await self._start(REPLICA, replica_id)
        return handle

    async def trainer(self) -> Handle:
        return await self._start(TRAINER, -1)

    def free(self, replica_id: int) -> None:
        self.replicas.pop(replica_id, None)

    async def _start(self, role: str, number: int) -> Handle:
        failure_rate = self._options.get("failure_rate", 0.0) if role == REPLICA else 0.0
        config = {
            "seed": self._seed * 1000 + number,
            **self._options,
            "failure_rate": failure_rate,
        }
        if self._is_local:
            log = self._directory.logs / f"{number}.log"
            return await LocalProcess.start(role, config, log, {})
        return MortalHandle(role, config)


class MortalHandle(InProcess):
    """A role in this process that can be killed as a process can."""

    def __init__(self, role_path: str, config: dict[str, object]) -> None:
        super().__init__(role_path, config)
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        if not self._death.done():
            self._death.set_exception(WorkerLostError("killed by a test"))
            self._death.exception()

    async def call(self, method: str, *arguments: object, returns: Any) -> Any:
        work = asyncio.ensure_future(super().call(method, *arguments, returns=returns))
        await asyncio.wait([work, self._death], return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            work.cancel()
            self._death.result()
        return await work


def make_world(
    run: Run,
    launcher_options: dict[str, Any],
    resume: bool = False,
    launcher_class: type[ScriptedLauncher] = ScriptedLauncher,
    verifier_class: type[ScriptedVerifier] = ScriptedVerifier,
    tokens: Path | None = None,
    **kwargs: Any,
) -> RealWorld:
    """Put a real world of scripted roles together, which write to `tokens`; call it inside the event loop."""
    directory = RunDirectory(Path(run.execute.output))
    checkpoint = directory.open(run, resume)
    launcher = launcher_class(run, directory, **launcher_options)
    return RealWorld(
        Trace(run, "real", {}, directory.trace_file),
        CheckedEngine(build_state(run), build_policies(run)),
        launcher,  # type: ignore[arg-type]
        RolloutBuffer(run, PromptWorkload(run, ScriptedTokenizer()), tokens),
        verifier_class(),  # type: ignore[arg-type]
        directory,
        checkpoint,
        **kwargs,
    )
