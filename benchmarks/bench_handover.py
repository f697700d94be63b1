"""Measure the CPU time of the controller per rollout, in the process that runs the engine.

| figure   | it contains                                                                                     |
|----------|-------------------------------------------------------------------------------------------------|
| handover | the engine and the controller's side of the roles: events in, commands out; requests,           |
|          | completions and samples, encoded and decoded for other processes; no sockets, no event loop     |
| all      | a whole run with its sockets, event loop, verifier, trace and rollouts.jsonl                    |

Workers run in their own processes and answer at once, with outputs of a given length. They write the
outputs where a real replica writes them. So their time does not count. Each figure is the median over
the steps of `ROUNDS` rounds with `ROLLOUTS` rollouts each. The first step of a round does not count.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from types import coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    DrawPrompts,
    Event,
    Generate,
    LoadWeights,
    PromptsDrawn,
    PushWeights,
    ReplicaStarted,
    RunStarted,
    SaveCheckpoint,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    Take,
    Train,
    Verified,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.state import State
from streamrl.engine.systems import build_engine
from streamrl.engine.trace import Trace
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.execute import token_directory
from streamrl.executor.launchers.handles import Config, Handle, LocalProcess
from streamrl.executor.launchers.worker import Call, decode, encode, encode_frame
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.record import RunDirectory
from streamrl.executor.roles import Completion, Loaded, Manifest, Request, Sample, Scoring
from streamrl.executor.rollout.replica import Replica
from streamrl.executor.tokens import TokenBlock, TokenSegment, write_block
from streamrl.executor.trainer.trainer import StepSettings, Trainer
from streamrl.executor.transfer.transfer import Transfer
from streamrl.executor.verifier.verifier import Verifier
from streamrl.executor.world import RealWorld
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run, read_table

RUN_FILE = Path(__file__).parent / "engine.toml"
LENGTHS = (1_000, 20_000)
PROMPT_TOKENS = 200
PROMPTS, GROUP = 32, 8
ROLLOUTS = PROMPTS * GROUP
STEPS = 9
ROUNDS = 5

T = TypeVar("T")


def main() -> None:
    """Print one JSON object per figure."""
    for num_tokens in LENGTHS:
        report("handover", num_tokens, [measure_handover(num_tokens) for _ in range(ROUNDS)])
        report("all", num_tokens, [asyncio.run(measure_all(num_tokens)) for _ in range(ROUNDS)])


def report(what: str, num_tokens: int, rounds: list[list[float]]) -> None:
    """Print the figure of some rounds of steps, each in CPU seconds per rollout."""
    name = f"controller CPU time a rollout of {num_tokens} tokens, {what}"
    value = statistics.median(chain.from_iterable(steps[1:] for steps in rounds)) * 1000
    print(json.dumps({"name": name, "value": value, "unit": "ms"}), flush=True)


# Workers ------------------------------------------------------------------------------------------


class Length(msgspec.Struct, frozen=True):
    """The settings of a worker."""

    num_tokens: int


class InstantReplica:
    """A replica worker that answers at once."""

    def __init__(self, config: Length) -> None:
        self._config = config
        self._version = 0

    async def start(self, manifest: Manifest | None, version: int) -> str:
        """Start serving at a version."""
        self._version = version
        return ""

    async def generate(self, request: Request) -> Completion:
        """Return as many tokens as the settings say."""
        num_tokens = self._config.num_tokens
        ids, logprobs = np.full(num_tokens, 7, np.int32), np.full(num_tokens, -1.0, np.float32)
        output = write_block(ids, logprobs, request.output_path)
        return complete(request, output, self._version)

    async def load(self, manifest: Manifest, drain: bool) -> Loaded:
        """Return without loading weights."""
        self._version = manifest.version
        return Loaded(0.0, manifest.checksum)


class InstantTrainer:
    """A trainer worker that computes nothing."""

    def __init__(self, config: Length) -> None:
        self._config = config

    async def start(self, checkpoint: str | None) -> int:
        """Start at version 0."""
        return 0

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        """Return without training."""
        return {}

    async def step(self, version: int) -> dict[str, float]:
        """Return without an optimizer step."""
        return {"loss": 0.0}

    async def push(self, version: int, directory: str) -> Manifest:
        """Return a manifest without writing weights."""
        return Manifest(version=version, buckets=[])

    async def save(self, path: str) -> None:
        """Write an empty checkpoint."""
        Path(path).mkdir()


def complete(request: Request, output: TokenBlock, version: int) -> Completion:
    """Return the completion of a request, with a text of four characters per token."""
    return Completion(
        rollout=request.rollout,
        output=output,
        segments=(TokenSegment(output.num_tokens, is_policy=True),),
        text="the " * (output.num_tokens - 1) + "\n" + str(request.rollout % 2),
        versions=[(version, 0)],
        finish="stop",
        run_time=1.0,
        prefill_time=0.1,
    )


# Engine and handover ------------------------------------------------------------------------------


@coroutine
def _answered() -> Generator[None, bytes, bytes]:
    """Yield until the bytes of a worker's answer are sent in."""
    return (yield)


class Loopback(Handle):
    """Encodes and decodes as between processes. The driver of the call supplies the answer."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Encode the call, wait for its answer, and decode it."""
        self.frames.append(encode_frame(Call(1, method, list(arguments))))
        return decode(await _answered(), returns)

    def kill(self, reason: str) -> None:
        """Return without effect: there is no process."""

    async def close(self) -> None:
        """Return without effect: there is no connection."""


class Handover:
    """The controller without sockets and event loop: an engine, the roles, and a stopwatch around them."""

    def __init__(self, run: Run, directory: RunDirectory, tokens: Path | None) -> None:
        self._engine = build_engine(run)
        self._buffer = RolloutBuffer(
            PromptWorkload(run, Tokenizer()), run.num_trainers, directory=tokens
        )
        self._handle = Loopback()
        self._replica = Replica(self._handle, self._buffer)
        settings = StepSettings.of(run)
        self._trainer = Trainer(settings, self._buffer, directory, lambda: 0.0)
        self._events: deque[Event] = deque([RunStarted(0, 0)])
        self._seconds = 0.0
        self._now = 0.0
        self.steps: list[float] = []
        """CPU seconds per rollout, for each step."""

    def run(self, num_tokens: int) -> None:
        """Run to the end, with outputs of `num_tokens`."""
        while self._events:
            with self._timed():
                commands = self._handle_events()
                calls = [(command, call) for command in commands if (call := self._begin(command))]
            frames, self._handle.frames = self._handle.frames, []
            answers = [answer_to(frame, num_tokens) for frame in frames]
            del frames
            with self._timed():
                for (command, call), answer in zip(calls, answers, strict=True):
                    self._events.append(finish(call, answer))
                    if isinstance(command, Step):
                        self.steps.append(self._seconds / ROLLOUTS)
                        self._seconds = 0.0

    def _handle_events(self) -> list[Command]:
        commands: list[Command] = []
        while self._events:
            self._now += 0.001
            commands += self._engine.handle(self._events.popleft(), self._now)
        return commands

    def _begin(self, command: Command) -> Coroutine[Any, Any, Event] | None:
        """Start a call of a worker, or carry out a command that needs no worker."""
        call: Coroutine[Any, Any, Event]
        match command:
            case Generate():
                call = self._replica.generate(command)
            case Train():
                self._trainer.note_primary_version(command, self._engine.version)
                call = self._trainer.train(command)
            case Step():
                call = self._trainer.step(command)
            case StartTrainer():
                call = self._trainer.start(command, self._handle, None)
            case _:
                self._events += self._carry_out(command)
                return None
        call.send(None)
        return call

    def _carry_out(self, command: Command) -> Iterator[Event]:
        match command:
            case StartReplica(replica, version):
                yield ReplicaStarted(replica, version)
            case DrawPrompts(step, num_groups, oldest):
                yield PromptsDrawn(step, oldest, self._buffer.draw(num_groups))
            case Verify(rollout):
                self._buffer.rollouts[rollout].enter(Scoring(rollout % 2, None))
                yield Verified(rollout, rollout % 2)
            case PushWeights(version):
                yield WeightsPushed(version, 1)
            case LoadWeights(replica, version):
                yield WeightsLoaded(replica, version, 0.1)
            case SaveCheckpoint(version):
                yield CheckpointSaved(version, 0)
            case Take():
                pass
            case _:
                raise NotImplementedError(command)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_at = time.process_time()
        yield
        self._seconds += time.process_time() - began_at


def finish(call: Coroutine[Any, Any, Event], answer: bytes) -> Event:
    """Return the event of a call, given the worker's answer."""
    try:
        call.send(answer)
    except StopIteration as end:
        event: Event = end.value
        return event
    raise RuntimeError("a role called its worker twice")


def answer_to(frame: bytes, num_tokens: int) -> bytes:
    """Return the worker's answer, and write its tokens to the requested place."""
    call = msgspec.msgpack.decode(frame[4:], type=Call)
    if call.method == "generate":
        request = msgspec.convert(call.arguments[0], Request)
        ids, logprobs = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
        output = write_block(ids, logprobs, request.output_path)
        return bytes(encode(complete(request, output, 0)))
    return bytes(encode(0 if call.method == "start" else {"loss": 0.0}))


def measure_handover(num_tokens: int) -> list[float]:
    """Return the CPU seconds of engine and handover per rollout, for each step."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_handover_run(Path(folder), num_tokens)
        directory = RunDirectory(Path(run.execute.output))
        directory.open(run, resume=False)
        directory.begin()
        with token_directory(run.execute) as tokens:
            handover = Handover(run, directory, tokens)
            handover.run(num_tokens)
        directory.close()
        return handover.steps


# All ----------------------------------------------------------------------------------------------


class InstantLauncher:
    """Starts workers that answer at once, each in its own process."""

    def __init__(self, directory: RunDirectory, num_tokens: int) -> None:
        self._directory = directory
        self._config: Config = {"num_tokens": num_tokens}

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        """Start a replica worker."""
        return await self._start("InstantReplica", f"{replica_id}.log")

    async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
        """Start the trainer worker."""
        return await self._start("InstantTrainer", "trainer.log")

    def free(self, replica_id: int) -> None:
        """Return without effect: replicas have no GPUs."""

    def place_of(self, replica_id: int) -> str:
        """Return the place where all replicas load weights."""
        return "here"

    async def _start(self, name: str, log: str) -> Handle:
        role = f"benchmarks.bench_handover:{name}"
        return await LocalProcess.start(role, self._config, self._directory.logs / log, {})


async def measure_all(num_tokens: int) -> list[float]:
    """Return the CPU seconds of the whole controller process per rollout, for each step."""
    stepped_at: list[float] = []

    def watch(event: Event, state: State, now: float) -> None:
        if isinstance(event, Stepped):
            stepped_at.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run = make_handover_run(Path(folder), num_tokens)
        directory = RunDirectory(Path(run.execute.output))
        directory.open(run, resume=False)
        with token_directory(run.execute) as tokens:
            world = RealWorld(
                Trace(run, "real", {}, directory.trace_file),
                build_engine(run),
                InstantLauncher(directory, num_tokens),  # type: ignore[arg-type]  # starts other workers
                RolloutBuffer(PromptWorkload(run, Tokenizer()), run.num_trainers, directory=tokens),
                Verifier(run.verifier),
                Transfer,
                directory,
                watch=watch,
            )
            await world.run()
        directory.close()
    return [(end - begin) / ROLLOUTS for begin, end in pairwise(stepped_at)]


class Tokenizer:
    """A tokenizer that makes every prompt `PROMPT_TOKENS` long."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return [5] * PROMPT_TOKENS


def make_handover_run(folder: Path, num_tokens: int) -> Run:
    """Return a run of `STEPS` steps in its own folder."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "p", "answer": "1"}\n' * 100)
    table = read_table(
        RUN_FILE,
        [
            f"model.path={folder}",
            f"workload.prompts={prompts}",
            "verifier.scorer=exact",
            f"execute.output={folder / 'run'}",
            "rollout.replicas=2",
            "rollout.max_running=64",
            f"rollout.max_tokens={num_tokens}",
            "algorithm.name=grpo",
            f"algorithm.steps={STEPS}",
            f"algorithm.prompts_per_step={PROMPTS}",
            f"algorithm.group_size={GROUP}",
        ],
    )
    return make_run(table)


if __name__ == "__main__":
    main()
