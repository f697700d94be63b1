"""Measure the seconds of each operation of a model on this machine, with the code that executes runs.

A replica and a trainer run in their own processes and get the same calls as in a run. Each round measures every point
once. So if the speed of the machine drifts, all points are affected equally. The model is loaded without
end-of-sequence tokens, so rollouts have the planned lengths.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median

from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.executor.launchers.handles import Handle, LocalProcess, remote
from streamrl.executor.launchers.launcher import worker_environment
from streamrl.executor.launchers.processes import begin_for, begin_imports
from streamrl.executor.profiling.contention import PartTimes, Work, run_beside, run_concurrently
from streamrl.executor.profiling.environment_times import MeasuredEnvironment, TimedEnvironments
from streamrl.executor.profiling.measurements import (
    JOIN_STEPS,
    SHORT,
    WINDOW,
    Company,
    Readings,
    RefillStream,
    Setup,
)
from streamrl.executor.profiling.role_benchmarks import RelayBench, time_rewards
from streamrl.executor.profiling.rollout_overhead import (
    LEAST,
    has_tokenizer,
    measured_environment,
    read_handling,
)
from streamrl.executor.profiling.synthetic import SyntheticTokens, vocabulary_of, without_end
from streamrl.executor.profiling.timed_roles import TimedReplicaRole, TimedTrainerRole
from streamrl.executor.roles import Request
from streamrl.executor.tokens import encode_ids
from streamrl.executor.transfer.shared_directory import SharedDirectory
from streamrl.hardware.node_readings import DecodeReading
from streamrl.runfile.backend_choice import engine_named

REPLICA = "streamrl.executor.profiling.timed_workers:TimedReplica"
TRAINER = "streamrl.executor.profiling.timed_workers:TimedTrainer"
REFILLS = 4
"""Rollouts of the stream that keeps a replica full, as a multiple of its batch size."""
HALF = 0.5
"""Share of GPU memory for a replica that allocates it at the start; the trainer is on the same GPU."""
LEARNING_RATE = 1e-6
"""Small, so that the weights remain those of a language model during the measurement."""

Watch = Callable[[str], None]
"""Called after each point, with the name of its table."""


def measure(setup: Setup, watch: Watch) -> Readings:
    """Measure every point of the plan.

    Raises:
        RuntimeError: a worker failed. The message has the reason; the worker's log is deleted.
    """
    readings = asyncio.run(_measure(setup, watch))
    read_handling(setup, readings, watch)
    return readings


def measure_decode(setup: Setup, running: int, context: int) -> DecodeReading:
    """Measure one decode step of `running` rollouts of about `context` tokens each; no trainer is started.

    Raises:
        RuntimeError: the replica failed. The message has the reason; its log is deleted.
    """
    return asyncio.run(_measure_decode(setup, running, context))


async def _measure_decode(setup: Setup, running: int, context: int) -> DecodeReading:
    readings = Readings()
    begin_imports(worker_environment(setup.threads), setup.device, setup.backend)
    with OwnedDirectory("profile") as scratch:
        bench = _bench(setup, readings, lambda what: None, scratch)
        async with bench.replica() as replica:
            for _ in range(1 + setup.plan.repeats):
                await bench.time_decode(replica, running, context)
    seconds, contexts = readings.decode[running, context], readings.decode_context[running, context]
    return DecodeReading(running=running, context=fmean(contexts), seconds=median(seconds))


def _bench(setup: Setup, readings: Readings, watch: Watch, scratch: Path) -> _Bench:
    endless = without_end(Path(setup.model), scratch / "model")
    common: dict[str, object] = {
        "model": str(endless),
        "device": setup.device,
        "dtype": setup.dtype,
        "num_threads": setup.threads,
    }
    synthetic = SyntheticTokens(vocabulary_of(endless))
    return _Bench(setup, readings, watch, synthetic, scratch, common)


async def _measure(setup: Setup, watch: Watch) -> Readings:
    readings = Readings()
    begin_imports(worker_environment(setup.threads), setup.device, setup.backend)
    with OwnedDirectory("profile") as scratch:
        bench = _bench(setup, readings, watch, scratch)
        async with bench.replica() as replica, bench.trainer("token-tis") as trainer:
            readings.pads_context = await replica.pads_context()
            readings.prefill_tokens = await replica.prefill_tokens()
            await bench.warm_up(replica, trainer)
            merges = not setup.serves_adapters
            async with RelayBench.open(bench.role, bench.model, setup.dtype, merges) as relays:
                for _ in range(setup.plan.repeats):
                    await bench.time_replica(replica)
                    await bench.time_sync(replica, trainer, relays)
                    await bench.time_trainer(trainer)
            if setup.plan.companies:
                await bench.time_companies(replica, trainer)
            if setup.plan.beside and has_tokenizer(Path(setup.model)):
                await bench.time_environments(replica, trainer, measured_environment(setup))
        async with bench.trainer("decoupled") as scorer:
            for _ in range(setup.plan.repeats):
                await bench.time_scores(scorer)
        if setup.reward_model is not None:
            await time_rewards(setup, bench.common, scratch, readings, watch)
    return readings


class _Bench:
    """Gives work to the roles and reads their stopwatches."""

    def __init__(
        self,
        setup: Setup,
        readings: Readings,
        watch: Watch,
        synthetic: SyntheticTokens,
        scratch: Path,
        common: dict[str, object],
    ) -> None:
        self._limits, self._plan = setup.limits, setup.plan
        self._training = setup.training
        self._has_adapters = setup.lora_rank is not None
        self._served_rank = setup.lora_rank if setup.serves_adapters else None
        self._backend = setup.backend
        engine = engine_named(setup.backend)
        self._sleeps = engine.can_sleep and not engine.reserves_memory
        """Whether a replica can sleep that was not started for that alone, in another mode."""
        self._readings = readings
        self._watch = watch
        self._random = random.Random(0)
        self._synthetic = synthetic
        self._scratch = scratch
        self.common = common
        self._has_tokenizer = has_tokenizer(Path(str(common["model"])))
        self._environment = worker_environment(setup.threads)
        self._num_rollouts = 0
        self._version = 0

    @property
    def model(self) -> str:
        """Directory of the model, without end-of-sequence tokens."""
        return str(self.common["model"])

    # Roles ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def replica(self) -> AsyncIterator[TimedReplicaRole]:
        """Start a replica, and end it with the context."""
        longest = self._limits.max_context
        config = {
            "max_running": self._limits.max_running,
            "max_tokens": longest,
            "max_prompt_tokens": longest,
            "temperature": 1.0,
            "seed": 0,
            "backend": self._backend,
            "takes_turns": self._sleeps,
            "adapter_rank": self._served_rank,
            "shares_prefixes": False,
            "memory_utilization": HALF,
            "tokenizer": self.common["model"] if self._has_tokenizer else None,
            **self.common,
        }
        async with self.role(REPLICA, config) as handle:
            replica = remote(TimedReplicaRole, handle)
            await replica.start(None, 0)
            yield replica

    @contextlib.asynccontextmanager
    async def trainer(self, correction: str) -> AsyncIterator[TimedTrainerRole]:
        """Start a trainer, and end it with the context."""
        config = {
            "learning_rate": LEARNING_RATE,
            "temperature": 1.0,
            "correction": correction,
            "max_tokens_per_pass": self._limits.max_tokens_per_pass,
            **self._training,
            **self.common,
        }
        async with self.role(TRAINER, config) as handle:
            trainer = remote(TimedTrainerRole, handle)
            await trainer.start(None)
            yield trainer

    @contextlib.asynccontextmanager
    async def role(self, path: str, config: dict[str, object]) -> AsyncIterator[Handle]:
        log = self._scratch / "worker.log"
        begin = begin_for(str(self.common["device"]), config.get("backend"))
        handle = await LocalProcess.start(path, config, log, self._environment, begin=begin)
        try:
            yield handle
        finally:
            await handle.close()

    async def warm_up(self, replica: TimedReplicaRole, trainer: TimedTrainerRole) -> None:
        """Run the largest batch and pass once, so that caches and allocators reach their final size."""
        most, longest = self._limits.max_running, self._limits.max_context
        await self._generate(replica, most, longest - WINDOW, WINDOW)
        await replica.passes()
        await self._train(trainer, *max(self._plan.passes, key=lambda p: p[0] * p[1]))

    # The replica ----------------------------------------------------------------------------------

    async def time_replica(self, replica: TimedReplicaRole) -> None:
        """Measure decode steps, prefills, joins, and how many passes a free slot stays empty."""
        for point in self._plan.decode:
            await self.time_decode(replica, *point)
            self._watch("decode")
        for point in self._plan.mixed:
            await self._time_mixed(replica, *point)
            self._watch("mixed")
        for point in self._plan.prefill:
            await self._time_prefill(replica, *point)
            self._watch("prefill")
        for point3 in self._plan.join:
            await self._time_join(replica, *point3)
            self._watch("join")
        await self._time_refill(replica)
        self._watch("refill")
        await self._time_turns(replica)
        self._watch("turns")

    async def time_decode(self, replica: TimedReplicaRole, running: int, context: int) -> None:
        """Decode `running` rollouts with about `context` tokens each.

        The first rollout decodes during the prefill of the others. `lead` adds tokens so that it does not end before.
        """
        lead = running * context // self._limits.longest_prefix + 1
        prompt = max(1, context - (WINDOW + lead) // 2)
        await self._generate(replica, running, prompt, WINDOW + lead)
        key = (running, context)
        for one in await replica.passes():
            if one.running == running and not one.prefixes:
                self._readings.decode[key].append(one.seconds)
                self._readings.decode_context[key].append(one.context / running)

    async def _time_mixed(self, replica: TimedReplicaRole, running: int, num_long: int) -> None:
        """Decode a batch in which some rollouts have the maximum length and the others are short."""
        longest = self._limits.max_context
        lead = (num_long * longest + running * SHORT) // self._limits.longest_prefix + 1
        steps = WINDOW + lead
        await asyncio.gather(
            self._generate(replica, num_long, max(1, longest - steps), steps),
            self._generate(replica, running - num_long, SHORT, steps),
        )
        key = (running, num_long)
        for one in await replica.passes():
            if one.running == running and not one.prefixes:
                self._readings.mixed[key].append(one.seconds)
                self._readings.mixed_context[key].append((one.context / running, one.longest))

    async def _time_prefill(self, replica: TimedReplicaRole, rollouts: int, tokens: int) -> None:
        await self._generate(
            replica, rollouts, tokens, 2
        )  # the second pass marks the end of the first
        for one in await replica.passes():
            if one.prefixes == [tokens] * rollouts and not one.running:
                self._readings.prefill[rollouts, tokens].append(one.seconds)

    async def _time_join(
        self, replica: TimedReplicaRole, running: int, joining: int, tokens: int
    ) -> None:
        """Repeatedly let rollouts of one output token join while others decode."""
        decoding = asyncio.ensure_future(self._generate(replica, running, SHORT, self._long_decode))
        while not decoding.done():
            await self._generate(replica, joining, tokens, 1)
        await decoding
        passes = await replica.passes()
        for before, one, after in zip(passes, passes[1:], passes[2:], strict=False):
            around = [p.seconds for p in (before, after) if not p.prefixes and p.running == running]
            if one.running == running and set(one.prefixes) == {tokens} and around:
                key = (running, len(one.prefixes), tokens)
                self._readings.join[key].append(one.seconds)
                self._readings.step[key] += around
                self._readings.join_context[key].append(one.context / running)

    async def _time_refill(self, replica: TimedReplicaRole) -> None:
        """Keep the replica's queue filled, count its empty slots, and write tokens to disk as a run does."""
        most, lengths = self._limits.max_running, self._stream_lengths()
        with tempfile.TemporaryDirectory(dir=self._scratch) as tokens:
            await asyncio.gather(
                *(self._generate(replica, 1, SHORT, n, Path(tokens)) for n in lengths)
            )
        passes = await replica.passes()
        self._readings.streams.append(RefillStream(len(lengths), passes))
        started = empty = refilled = 0
        for one in passes:
            if started >= most:
                empty += most - one.running - len(one.prefixes)
                refilled += len(one.prefixes)
            started += len(one.prefixes)
            if started >= len(lengths):
                break
        if refilled:
            self._readings.refill_passes.append(empty / refilled)

    async def _time_turns(self, replica: TimedReplicaRole) -> None:
        """Keep the batch filled by calls that arrive one by one, as those of the turns of episodes do."""
        self._readings.turns.append(await self._turns_of(replica))

    async def _turns_of(self, replica: TimedReplicaRole) -> RefillStream:
        """Answer each end of a rollout with the next call, so the queue of the replica is empty; return the stream."""
        planned = self._stream_lengths()
        lengths = iter(planned)  # shared: whoever ends first takes the next

        async def episode(tokens: Path) -> None:
            for length in lengths:
                await self._generate(replica, 1, SHORT, length, tokens)

        with tempfile.TemporaryDirectory(dir=self._scratch) as tokens:
            await asyncio.gather(*(episode(Path(tokens)) for _ in range(self._limits.max_running)))
        return RefillStream(len(planned), await replica.passes())

    def _stream_lengths(self) -> list[int]:
        """Return the output tokens of each rollout of a stream."""
        count = REFILLS * self._limits.max_running
        return [self._random.randint(SHORT // 2, 2 * SHORT) for _ in range(count)]

    async def _generate(
        self,
        replica: TimedReplicaRole,
        rollouts: int,
        prompt: int,
        tokens: int,
        directory: Path | None = None,
    ) -> None:
        """Generate rollouts; their tokens go to `directory`, as in a run, or come back with the answer."""
        requests = [
            Request(
                rollout=self._num_rollouts + index,
                prompt=encode_ids(self._synthetic.tokens(prompt)),
                priority=0,
                max_tokens=tokens,
                output_path=None
                if directory is None
                else str(directory / f"{self._num_rollouts + index}.0"),
            )
            for index in range(rollouts)
        ]
        self._num_rollouts += rollouts
        await asyncio.gather(*(replica.generate(r) for r in requests))

    # Contention -----------------------------------------------------------------------------------

    async def time_companies(self, first: TimedReplicaRole, trainer: TimedTrainerRole) -> None:
        """Measure the slowdown of roles that compute at the same time, relative to the same roles alone just before."""
        most = max(generating for generating, _ in self._plan.companies)
        async with contextlib.AsyncExitStack() as roles:
            more = [await roles.enter_async_context(self.replica()) for _ in range(most - 1)]
            for replica in more:
                await self.warm_up(replica, trainer)
            replicas = [first, *more]
            generate = [partial(self._decode_on, replica) for replica in replicas]
            train = self._training_on(trainer)
            for _ in range(self._plan.repeats):
                for key in (Company(*each) for each in self._plan.companies):
                    alone = await self._alone(generate[0], train)
                    part = train if key.training else None
                    shared = await run_concurrently(generate[: key.generating], part)
                    self._note_speeds(key, alone, shared)

    async def time_environments(
        self, replica: TimedReplicaRole, trainer: TimedTrainerRole, measured: MeasuredEnvironment
    ) -> None:
        """Measure environments beside roles that compute, and how much these are slowed down.

        A replica and a trainer compute, or a replica alone, while environments start and act. The replica is called for
        one turn after the other, as in a run: its server then needs the interpreter of its passes, and loses more.
        """
        generate, train = partial(self._turns_on, replica), self._training_on(trainer)
        environments = TimedEnvironments(measured)
        await environments.start()
        try:
            for _ in range(self._plan.repeats):
                for key in self._plan.beside:
                    alone = await self._alone(generate, train)
                    part = train if key.training else None
                    shared, times = await run_beside(generate, part, environments.round())
                    self._readings.environment_start[key].append(max(LEAST, times.start))
                    self._readings.environment_action[key].append(max(LEAST, times.action))
                    self._readings.acting[key].append(times.share)
                    self._note_speeds(key, alone, shared)
        finally:
            environments.close()

    async def _alone(self, generate: Work, train: Work) -> PartTimes:
        """Return the seconds of a replica that is alone, and of a trainer that is alone."""
        generated = await run_concurrently([generate], None)
        trained = await run_concurrently([], train)
        return PartTimes(generated.generating, trained.training)

    def _note_speeds(self, key: Company, alone: PartTimes, shared: PartTimes) -> None:
        self._readings.generation[key].append(alone.generating / shared.generating)
        if key.training:
            self._readings.training[key].append(alone.training / shared.training)
        self._watch("company")

    async def _decode_on(self, replica: TimedReplicaRole) -> list[float]:
        """Decode half a batch and return the seconds of each full step; decode longer if no step was full."""
        running = max(1, self._limits.max_running // 2)
        most = self._limits.max_context - SHORT
        for tokens in sorted({min(most, self._long_decode * longer) for longer in (1, 4, 16)}):
            await self._generate(replica, running, SHORT, tokens)
            passes = await replica.passes()
            steps = [one.seconds for one in passes if one.running == running and not one.prefixes]
            if steps:
                break
        return steps

    async def _turns_on(self, replica: TimedReplicaRole) -> list[float]:
        """Keep the batch filled by turns, and return the seconds of each rollout."""
        stream = await self._turns_of(replica)
        return [sum(one.seconds for one in stream.passes) / stream.num_rollouts]

    def _training_on(self, trainer: TimedTrainerRole) -> Work:
        """Return the work of a trainer: a pass of medium size, whose samples are prepared."""
        middle = sorted(self._plan.passes, key=lambda one: one[0] * one[1])
        samples = self._synthetic.samples(*middle[len(middle) // 2], advantage=1.0)

        async def train() -> list[float]:
            return await _timed(trainer, trainer.train(samples))

        return train

    @property
    def _long_decode(self) -> int:
        """Decode steps of rollouts during which others join or a trainer trains."""
        return min(JOIN_STEPS, self._limits.max_context - SHORT)

    # The trainer ----------------------------------------------------------------------------------

    async def time_trainer(self, trainer: TimedTrainerRole) -> None:
        """Measure training passes, and calls whose samples need no pass."""
        for rollouts, width in self._plan.passes:
            training = self._train(trainer, rollouts, width)
            self._readings.train[rollouts, width] += await _timed(trainer, training)
            self._watch("train")
        for rollouts, width in self._plan.calls:
            samples = self._synthetic.samples(rollouts, width, advantage=0.0)
            began_at = time.perf_counter()
            await trainer.train(samples)
            self._readings.call[rollouts * width].append(time.perf_counter() - began_at)
            self._watch("call")

    async def _time_switches(self, replica: TimedReplicaRole, trainer: TimedTrainerRole) -> None:
        """Measure the sleep of one role and the wake-up of the other, both ways, if the replica sleeps."""
        if not self._sleeps:
            return
        began_at = time.perf_counter()
        await replica.sleep()
        asleep_at = time.perf_counter()
        await trainer.sleep()
        await replica.wake()
        lent_at = time.perf_counter()
        await trainer.wake()
        self._readings.lend.append(lent_at - asleep_at)
        self._readings.take_back.append(asleep_at - began_at + time.perf_counter() - lent_at)

    async def time_sync(
        self, replica: TimedReplicaRole, trainer: TimedTrainerRole, relays: RelayBench
    ) -> None:
        """Measure an optimizer step, a push of the new weights, and a load, with cold caches.

        In a run the trainer is idle while the last rollouts of a step are generated, so its caches are cold.
        """
        await self._train(trainer, *self._plan.passes[0])
        self._version += 1
        self._readings.optimizer += await _timed(trainer, trainer.step(self._version))
        directory = SharedDirectory("profile")
        try:
            pushed = await trainer.push(self._version, str(directory.path))
            self._readings.push += await trainer.seconds()
            self._readings.pushed_bytes = pushed.num_bytes
            loaded = pushed
            if self._has_adapters:
                loaded = await relays.time_adapters(pushed, self._readings)
            self._readings.loaded_bytes = loaded.num_bytes
            began_at = time.perf_counter()
            await replica.load(loaded, drain=True)
            self._readings.load.append(time.perf_counter() - began_at)
            await self._time_switches(replica, trainer)
            if not self._has_adapters:
                await relays.time(pushed, self._readings)
        finally:
            directory.remove()
        self._watch("sync")

    async def time_scores(self, scorer: TimedTrainerRole) -> None:
        """Measure forward passes of the trainer that compute log-probabilities."""
        for rollouts, width in self._plan.passes:
            samples = self._synthetic.samples(rollouts, width, advantage=1.0)
            self._readings.score[rollouts, width] += await _timed(scorer, scorer.score(samples))
            self._watch("score")

    async def _train(self, trainer: TimedTrainerRole, rollouts: int, width: int) -> None:
        await trainer.train(self._synthetic.samples(rollouts, width, advantage=1.0))


async def _timed(trainer: TimedTrainerRole, call: Awaitable[object]) -> list[float]:
    """Make a call to a trainer and return its seconds alone, without those of earlier calls."""
    await trainer.seconds()
    await call
    return await trainer.seconds()
