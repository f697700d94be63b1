"""The contracts of the roles, held against everything that plays one, wherever it lives."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.checksums import combine
from streamrl.executor.launchers.handles import (
    Handle,
    InProcess,
    LocalProcess,
    Process,
    WorkerLostError,
    remote,
)
from streamrl.executor.launchers.launcher import (
    COUNTER,
    RELAY,
    REPLICA,
    REWARD_MODEL,
    TRAINER,
    worker_environment,
)
from streamrl.executor.launchers.processes import begin_for, spawn
from streamrl.executor.roles import (
    Bucket,
    Completion,
    Exchange,
    Manifest,
    ReplicaRole,
    Request,
    RewardRole,
    Sample,
    TrainerRole,
    TransferRole,
    VerifierRole,
    Write,
)
from streamrl.executor.tokens import TokenSegment, count_tokens, encode_ids, read_block, write_block
from streamrl.executor.transfer.relayed_transfer import RelayedTransfer
from streamrl.executor.transfer.shared_memory import write_buckets
from streamrl.executor.transfer.transfer import Transfer
from streamrl.executor.verifier.verifier import Verifier
from streamrl.runfile.policies_config import SyncConfig
from tests import scripted
from tests.engines import HANG, NAMES, params
from tests.ray_actors import start_actor
from tests.scripted_roles import tokens_of
from tests.tiny_model import WIDE_HEADS, save_tiny_reward_model, tiny_model
from tests.verifying import config as verifier_config

T = TypeVar("T")
VOCABULARY = 32
PROMPT = encode_ids([3, 4, 5])
MAX_TOKENS = 8000
"""Seconds of generation by a real engine: what is this long is aborted."""
SLOWNESS = 0.1
"""Seconds of everything that scripted roles do."""
REPLICAS = (*NAMES, "scripted")
CARRIERS = ("in-process", "local", "ray")
TRIALS = 3
"""A machine that stalls for seconds lets a rollout end before it is asked, or begin after: it is tried so often."""
SCRIPTED = {"seed": 0, "fastest": SLOWNESS, "slowest": SLOWNESS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = {"max_position_embeddings": 8192, **WIDE_HEADS}
    tiny_model(VOCABULARY, eos_token_id=None, **shape).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> list[Bucket]:
    """Weights that the model takes."""
    weights = tiny_model(VOCABULARY, **WIDE_HEADS).state_dict()
    return write_buckets(weights.items(), tmp_path_factory.mktemp("weights"), 1).buckets


async def start(carrier: str, path: str, config: dict[str, Any], log: Path) -> Handle:
    if carrier == "in-process":
        return InProcess(path, config)
    if carrier == "ray":
        return await start_actor(path, config, log)
    begin = begin_for("cpu", config.get("backend")) if "model" in config else spawn  # as on GPUs
    return await LocalProcess.start(path, config, log, worker_environment(1), begin=begin)


# Replicas -----------------------------------------------------------------------------------------


def replica_of(kind: str, model: Path) -> tuple[str, dict[str, Any]]:
    """Return role and configuration of a replica that runs one rollout at a time."""
    limits = {"max_running": 1, "max_tokens": MAX_TOKENS, "max_prompt_tokens": 16, "seed": 0}
    if kind == "scripted":
        return scripted.REPLICA, {**SCRIPTED, **limits}
    return REPLICA, {**limits, "model": str(model), "temperature": 1.0, "backend": kind}


@dataclass
class Served:
    """A replica that serves, and the event loop that it is called on."""

    runner: asyncio.Runner
    handle: Handle
    role: ReplicaRole
    buckets: list[Bucket]
    version: int = 0

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(asyncio.wait_for(scenario(), timeout=HANG))

    def next_manifest(self) -> Manifest:
        self.version += 1
        return Manifest(version=self.version, buckets=self.buckets)


@pytest.fixture(
    scope="module",
    params=params(REPLICAS, *CARRIERS),
)
def served(
    request: pytest.FixtureRequest,
    model: Path,
    buckets: list[Bucket],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Every replica on every carrier, one for all tests that leave it as they found it."""
    kind, carrier = request.param
    log = tmp_path_factory.mktemp("logs") / "log"
    with asyncio.Runner() as runner:
        handle = runner.run(start(carrier, *replica_of(kind, model), log))
        try:
            role = remote(ReplicaRole, handle)
            runner.run(role.start(None, 0))
            yield Served(runner, handle, role, buckets)
        finally:
            runner.run(handle.close())


def short(rollout: int, priority: int = 0, **fields: Any) -> Request:
    return Request(
        rollout=rollout, priority=priority, **{"prompt": PROMPT, "max_tokens": 9, **fields}
    )


def long(rollout: int) -> Request:
    """A rollout that goes first, and is still running when the tests look at it."""
    return short(rollout, priority=-1, max_tokens=MAX_TOKENS)


def task(work: Awaitable[T]) -> asyncio.Task[T]:
    return asyncio.ensure_future(work)  # type: ignore[return-value]


def check(completion: Completion, request: Request, versions: list[int]) -> None:
    """Check what holds of every completion."""
    num_tokens = completion.output.num_tokens
    ids, logprobs = read_block(completion.output)
    assert completion.rollout == request.rollout
    assert num_tokens == len(ids) == len(logprobs)
    assert num_tokens <= request.max_tokens - count_tokens(request.prefix)
    assert completion.segments == (TokenSegment(num_tokens, is_policy=True),) * bool(num_tokens)
    assert (np.isfinite(logprobs) & (logprobs <= 0)).all()
    assert completion.run_time >= completion.prefill_time >= 0
    starts = [start for _, start in completion.versions]
    assert starts == sorted(set(starts)) and starts[:1] == [0] * bool(num_tokens)
    assert all(start < num_tokens for start in starts)
    assert [version for version, _ in completion.versions] == versions


def test_a_rollout_ends_with_one_logprob_a_token_and_the_version_of_each(served: Served) -> None:
    async def go() -> None:
        asked = short(1)
        done = await served.role.generate(asked)
        assert done.output.num_tokens and done.finish in ("stop", "length")
        check(done, asked, [served.version])

    served.run(go)


def test_a_replica_tells_how_full_its_cache_is_or_that_it_has_none_of_one_size(
    served: Served, request: pytest.FixtureRequest
) -> None:
    async def go() -> None:
        first = task(served.role.generate(long(0)))
        await asyncio.sleep(SLOWNESS / 2)
        while (during := await served.role.cache()) is not None and not during.use:
            await asyncio.sleep(SLOWNESS / 2)  # its first pass is still to come
        await served.role.abort(0)
        done = await first
        after = await served.role.cache()
        if request.node.callspec.params["served"][0] not in ("transformers", "vllm"):
            assert during is after is done.cache is None
            return
        assert during is not None and after is not None and done.cache is not None
        assert after.tokens == during.tokens and (after.tokens or 0) >= MAX_TOKENS
        assert 0 < during.use <= 1 and 0 <= after.use <= 1 and done.cache.num_preempted == 0

    served.run(go)


def test_the_smallest_priority_starts_first_and_ties_by_rollout(served: Served) -> None:
    ended: list[int] = []

    async def go() -> None:
        async def generate(rollout: int, priority: int) -> None:
            await served.role.generate(short(rollout, priority))
            ended.append(rollout)

        first = task(served.role.generate(long(0)))
        pairs = [(4, 2), (3, 1), (2, 1), (1, 7), (5, 0)]
        others = [task(generate(*pair)) for pair in pairs]
        await asyncio.sleep(SLOWNESS / 2)
        await served.role.abort(0)
        await asyncio.gather(first, *others)

    served.run(go)
    assert ended == [5, 2, 3, 4, 1]


def test_an_abort_returns_what_is_there_and_resuming_goes_on_after_it(served: Served) -> None:
    async def go() -> None:
        for _ in range(TRIALS):
            running = task(served.role.generate(long(0)))
            waiting = task(served.role.generate(short(1)))
            await asyncio.sleep(SLOWNESS * 0.7)
            for rollout in (1, 0, 99):
                await served.role.abort(rollout)
            part, never_ran = await running, await waiting
            if part.finish == "aborted":
                break
        assert part.finish == never_ran.finish == "aborted"
        check(never_ran, short(1), [])
        check(part, long(0), [served.version])
        asked = short(0, prefix=(part.output,), max_tokens=part.output.num_tokens + 20)
        rest = await served.role.generate(asked)
        assert rest.output.num_tokens and rest.finish != "aborted"
        check(rest, asked, [served.version])

    served.run(go)


def test_who_slept_generates_as_before_and_who_generates_does_not_sleep(served: Served) -> None:
    async def go() -> None:
        for _ in range(2):
            await served.role.sleep()
        for _ in range(2):
            await served.role.wake()
        check(await served.role.generate(short(1)), short(1), [served.version])
        for _ in range(TRIALS):
            running = task(served.role.generate(long(0)))
            await asyncio.sleep(SLOWNESS / 2)
            try:
                await served.role.sleep()
            except Exception as error:
                assert "1 rollouts are being generated" in str(error)
                await served.role.abort(0)
                if (await running).finish == "aborted":
                    return
                continue  # it ended between the two calls
            assert running.done() and (await running).finish != "aborted"
            await served.role.wake()
        pytest.fail("it always ended before it was asked, or told to abort")

    served.run(go)


def test_a_load_in_flight_changes_the_version_amid_what_runs(served: Served) -> None:
    async def go() -> None:
        for _ in range(TRIALS):
            old = served.version
            running = task(served.role.generate(long(0)))
            await asyncio.sleep(SLOWNESS * 0.7)
            manifest = served.next_manifest()
            loaded = await served.role.load(manifest, drain=False)
            assert loaded.load_time >= 0 and loaded.checksum == manifest.checksum
            await asyncio.sleep(SLOWNESS / 5)
            await served.role.abort(0)
            if len((await running).versions) > 1:
                break
        check(await running, long(0), [old, served.version])

    served.run(go)


def test_a_drained_load_waits_for_what_runs_and_comes_before_what_is_sent_later(
    served: Served,
) -> None:
    async def go() -> None:
        for _ in range(TRIALS):
            old, before, after = served.version, short(0, max_tokens=200), short(1)
            running = task(served.role.generate(before))
            await asyncio.sleep(SLOWNESS / 5)
            loading = task(served.role.load(served.next_manifest(), drain=True))
            await asyncio.sleep(0)
            later = task(served.role.generate(after))
            ended: list[asyncio.Task[Any]] = []
            for each in (running, loading, later):
                each.add_done_callback(ended.append)
            await asyncio.gather(running, loading, later)
            if (await running).versions[0] == (old, 0):  # it ran when it was loaded
                break
        assert ended == [running, loading, later] and loading.result().load_time >= 0
        check(await running, before, [old])
        check(await later, after, [served.version])

    served.run(go)


def test_a_bad_manifest_is_refused_and_the_old_weights_go_on_serving(served: Served) -> None:
    async def go() -> None:
        nowhere = Bucket("/nowhere/bucket.safetensors", 1, "0" * 32)
        with pytest.raises(Exception, match="/nowhere"):
            await served.role.load(Manifest(version=99, buckets=[nowhere]), drain=False)
        check(await served.role.generate(short(0)), short(0), [served.version])

    served.run(go)


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("prompt", short(5, prompt=encode_ids([1] * 17))),
        ("max_tokens", short(5, max_tokens=MAX_TOKENS + 1)),
        ("prefix", short(5, max_tokens=2, prefix=(write_block([1, 2], [-1.0] * 2, None),))),
    ],
)
def test_a_request_without_room_is_refused_with_its_key(
    served: Served, key: str, asked: Request
) -> None:
    async def go() -> None:
        with pytest.raises((ValueError, RuntimeError), match=f"rollout 5: {key} "):
            await served.role.generate(asked)
        await served.role.generate(short(5))

    served.run(go)


def lose(kind: str, carrier: str, model: Path, log: Path, end: Callable[[Any], Any]) -> list[Any]:
    """Return what a running, a waiting and a later call raise where a replica ends as `end` lets it."""

    async def go() -> list[Any]:
        handle = await start(carrier, *replica_of(kind, model), log)
        role = remote(ReplicaRole, handle)
        try:
            await role.start(None, 0)
            pending = [task(role.generate(long(n))) for n in range(2)]
            await asyncio.sleep(SLOWNESS / 2)
            if (ending := end(handle)) is not None:
                await ending
            later = task(role.generate(short(3)))
            return await asyncio.gather(*pending, later, return_exceptions=True)
        finally:
            await handle.close()

    return asyncio.run(asyncio.wait_for(go(), timeout=HANG))


@pytest.mark.parametrize("kind", params(REPLICAS))
def test_a_stop_ends_every_pending_rollout_with_an_error_that_says_so(
    kind: str, model: Path, tmp_path: Path
) -> None:
    errors = lose(kind, "in-process", model, tmp_path / "log", lambda handle: handle.close())
    assert [type(error) for error in errors] == [RuntimeError] * 3
    assert all("the replica was stopped" in str(error) for error in errors)


@pytest.mark.parametrize(
    "kind_and_carrier",  # vLLM beside this process is killed in test_vllm, and what becomes of its own ones is seen
    [one for one in params(REPLICAS, *CARRIERS[1:]) if one.values[0] != ("vllm", "local")],
)
def test_a_killed_process_is_lost_to_pending_and_later_calls(
    kind_and_carrier: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    def kill(handle: Process) -> None:
        handle.send_signal(signal.SIGKILL)

    errors = lose(*kind_and_carrier, model, tmp_path / "log", kill)
    assert [type(error) for error in errors] == [WorkerLostError] * 3


# Trainers -----------------------------------------------------------------------------------------

TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": (TRAINER, {"learning_rate": 1e-3, "temperature": 1.0, "correction": "token-tis"}),
    "scripted": (scripted.TRAINER, SCRIPTED),
    "counting": (COUNTER, {}),
}


def sample(rollout: int) -> Sample:
    tokens = tokens_of(rollout)  # the scripted trainer looks at them
    return Sample(
        rollout=rollout,
        prompt=PROMPT,
        output=(write_block(tokens, [-1.0] * len(tokens), None),),
        segments=(TokenSegment(len(tokens), is_policy=True),),
        advantage=1.0,
    )


@pytest.mark.parametrize("carrier", params(CARRIERS))
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_trainer_makes_versions_in_order_of_all_it_was_given_and_comes_back_from_its_checkpoint(
    kind: str, carrier: str, model: Path, tmp_path: Path
) -> None:
    path, config = TRAINERS[kind]
    config = config | ({"model": str(model)} if kind == "torch" else {})
    checkpoint = tmp_path / "checkpoint"

    async def first(role: TrainerRole) -> None:
        assert await role.start(None) == 0
        with pytest.raises((ValueError, RuntimeError), match="trained on"):
            await role.step(1)
        calls = [role.train([sample(0), sample(1)]), role.score([sample(2)])]
        *_, figures = await asyncio.gather(*calls, role.train([sample(2)]), role.step(1))
        assert figures["rollouts"] == 3
        await role.train([sample(3)])
        with pytest.raises((ValueError, RuntimeError), match="version 2, got 3"):
            await role.step(3)
        if kind == "counting":  # has no weights
            with pytest.raises((ValueError, RuntimeError), match="no weights"):
                await role.push(1, str(tmp_path))
        else:
            with pytest.raises((ValueError, RuntimeError), match="version 1, got 0"):
                await role.push(0, str(tmp_path))
            assert (await role.push(1, str(tmp_path))).version == 1
        await role.save(str(checkpoint))

    async def again(role: TrainerRole) -> None:
        assert await role.start(str(checkpoint)) == 1
        with pytest.raises((ValueError, RuntimeError), match="trained on"):
            await role.step(2)
        await role.train([sample(4)])
        assert (await role.step(2))["rollouts"] == 1

    async def go() -> None:
        for life, where in ((first, carrier), (again, "in-process")):
            handle = await start(where, path, config, tmp_path / "log")
            try:
                await life(remote(TrainerRole, handle))
            finally:
                await handle.close()

    asyncio.run(asyncio.wait_for(go(), timeout=120))


# The reward model --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind_and_carrier",
    [*params(["torch"], "in-process", "ray"), *params(["scripted"], *CARRIERS)],
)
def test_a_reward_model_answers_in_order_and_one_it_cannot_score_costs_no_other_its_score(
    kind_and_carrier: tuple[str, str], tmp_path: Path
) -> None:
    kind, carrier = kind_and_carrier
    path, config = scripted.REWARD_MODEL, dict(SCRIPTED)
    if kind == "torch":
        judge = save_tiny_reward_model(tmp_path / "judge", ["<pad>", "<eos>", "p", "x"])
        path, config = REWARD_MODEL, {"model": str(judge)}
    completions = ["x" * length for length in (1, 3, 2)]
    none = "x" * 99 if kind == "torch" else ""

    async def go() -> None:
        handle = await start(carrier, path, config, tmp_path / "log")
        try:
            role = remote(RewardRole, handle)
            await role.start()
            asked = [Exchange(prompt="p", completion=text) for text in (*completions, none)]
            *scored, last = await role.score(asked)
            assert last.score is None and last.fault
            alone = [(await role.score([each]))[0].score for each in asked[:3]]
            wanted = pytest.approx([each.score for each in scored], abs=0.05)
            assert alone == wanted and None not in alone
        finally:
            await handle.close()

    asyncio.run(asyncio.wait_for(go(), timeout=HANG))


# The verifier and the transfer --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sandboxed", "scripted"])
def test_a_verifier_gives_rewards_and_refuses_a_record_that_nothing_can_be_held_against(
    kind: str,
) -> None:
    async def go() -> None:
        verifier: VerifierRole = scripted.ScriptedVerifier()
        if kind == "sandboxed":
            verifier = Verifier(verifier_config("exact"))
        try:
            await verifier.start()
            record = {"answer": "4"}
            scorings = [verifier.verify(text, 3, record) for text in ("2+2=\n4", "2+2=\n5", "")]
            assert await asyncio.gather(*scorings) == [
                (score, None, {}) for score in (1.0, 0.0, 0.0)
            ]
            with pytest.raises(RuntimeError, match="answer"):
                await verifier.verify("4", 1, {})
        finally:
            verifier.close()

    asyncio.run(asyncio.wait_for(go(), timeout=HANG))


def relayed(write: Write) -> RelayedTransfer:
    """Return a transfer whose relays live in this process."""

    async def start(place: str | None) -> InProcess:
        return InProcess(RELAY, {"model": "", "dtype": "float32"})

    return RelayedTransfer(write, SyncConfig(), start, lambda: "here")


@pytest.mark.parametrize("kind", [Transfer, scripted.ScriptedTransfer, relayed])
def test_a_transfer_keeps_what_is_wanted_and_leaves_nothing(
    kind: Callable[[Write], TransferRole], buckets: list[Bucket]
) -> None:
    found: list[Path] = []

    async def pushed(transfer: TransferRole, version: int) -> WeightsPushed:
        event = await transfer.push(PushWeights(version, 0))
        return WeightsPushed(event.version, event.num_bytes, event.checksum)

    async def versions(transfer: TransferRole) -> list[int]:
        found = []
        for version in range(4):
            with suppress(ConnectionError):  # it is gone
                manifest = await transfer.fetch(version, 0)
                found += [] if manifest is None else [manifest.version]
        return found

    async def write(version: int, directory: Path) -> Manifest:
        found.append(directory)
        return Manifest(version=version, buckets=buckets)

    async def go() -> None:
        transfer = kind(write)
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        checksum = combine(bucket.checksum for bucket in buckets)
        await transfer.prepare()
        transfer.join(0, "here")
        assert await versions(transfer) == []
        assert await pushed(transfer, 1) == WeightsPushed(1, num_bytes, checksum)
        transfer.hold(1)
        assert await pushed(transfer, 2) == WeightsPushed(2, num_bytes, checksum)
        assert await versions(transfer) == [1, 2]
        transfer.release(1)
        assert await versions(transfer) == [2]
        transfer.hold(2)
        transfer.release(2)
        assert await versions(transfer) == [2]
        with pytest.raises(ConnectionError):
            await transfer.fetch(1, 0)
        transfer.leave(0)
        await transfer.close()

    asyncio.run(go())
    assert not found[0].is_dir()
