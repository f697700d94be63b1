"""What only an engine in other processes can get wrong: who outlives whom, and keys of older weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.executor.adapter_layers import A, B, adapted_layers
from streamrl.executor.launchers.handles import LocalProcess, WorkerLostError, remote
from streamrl.executor.launchers.launcher import REPLICA
from streamrl.executor.roles import Completion, ReplicaRole, Request, RoleLostError
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.tokens import encode_ids, read_block
from streamrl.executor.transfer.adapters import merged
from streamrl.executor.transfer.shared_memory import write_buckets
from tests.engines import HANG
from tests.kept_replica import Kept, Served, started
from tests.tiny_model import SHAPE, WIDE_HEADS, Weights, changed_weights, reference, tiny_model

pytestmark = pytest.mark.vllm

VOCABULARY = 64
PROMPT = [1 + (3 * place) % 60 for place in range(300)]
"""Longer than two pages of the cache."""
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = {"max_position_embeddings": 2048, "initializer_range": 0.2, **WIDE_HEADS}
    tiny_model(VOCABULARY, eos_token_id=None, **shape).save_pretrained(path)
    return path


def settings(model: Path) -> dict[str, Any]:
    limits = {"max_running": 4, "max_tokens": 1000, "max_prompt_tokens": 400}
    return {"model": str(model), "temperature": 1.0, "seed": 0, "backend": "vllm", **limits}


_kept = Kept(0)


@pytest.fixture(scope="module", autouse=True)
def _end_what_was_kept() -> Iterator[None]:
    yield
    _kept.close()


@pytest.fixture
def served(model: Path) -> Served:
    """Return the one for tests that load versions of their own; who kills it closes it."""
    return _kept.of(ReplicaSettings(**settings(model)))


@contextmanager
def alone(settings: ReplicaSettings) -> Iterator[Served]:
    """Have a replica of other settings, in whose stead none is kept."""
    _kept.close()
    with started(settings, None, 0) as served:
        yield served


def ask(rollout: int, max_tokens: int, priority: int = 0) -> Request:
    prompt = encode_ids(PROMPT)
    return Request(rollout=rollout, prompt=prompt, priority=priority, max_tokens=max_tokens)


@torch.no_grad()
def gap(model: Any, done: Completion) -> float:
    """Return how far the log-probabilities of a completion are from those of a full forward pass."""
    ids, logprobs = read_block(done.output)
    logits = model(torch.tensor([PROMPT + ids.tolist()])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids.tolist())]
    return float((expected - torch.tensor(logprobs.tolist())).abs().max())


def test_vllm_leaves_no_temporary_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # a path that is short enough for sockets
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with alone(ReplicaSettings(**settings(model))):
        (owned,) = place.glob("streamrl-vllm-*")
        assert [each for each in owned.iterdir() if each.is_socket()]
        assert tempfile.gettempdir() == str(place)
    assert not [*place.iterdir()]
    place.rmdir()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_reach_vllm_under_the_names_that_it_has(kind: str, tmp_path: Path) -> None:
    experts = {
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
        "mixtral": {"num_local_experts": 4},
    }
    mixture = {**experts[kind], "num_experts_per_tok": 2}
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "initializer_range": 0.2}
    config = AutoConfig.for_model(kind, **{**SHAPE, **WIDE_HEADS}, **shape, **mixture, head_dim=32)
    models: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    models.from_config(config).save_pretrained(tmp_path / "model")
    new = changed_weights(tmp_path / "model")

    async def go(replica: ReplicaRole) -> None:
        await replica.load(write_buckets(new.items(), tmp_path, 1), drain=True)
        after = await replica.generate(ask(0, 20))
        model = tmp_path / "model"
        assert gap(reference(model, new), after) < 1e-3 < gap(reference(model), after)

    with alone(ReplicaSettings(**settings(tmp_path / "model"))) as (runner, replica):
        runner.run(go(replica))


RANK = 4


def adapters_like(model: Path, seed: int) -> Weights:
    """Make adapters of a saved model that say as much as its weights do, the same every time by seed."""
    torch.manual_seed(seed)
    found = {}
    for name, layer in adapted_layers(reference(model)).items():
        found[name + A] = 0.2 * torch.randn(RANK, layer.in_features)
        found[name + B] = 0.2 * torch.randn(layer.out_features, RANK)
    return found


def with_adapters(model: Path, adapters: Weights) -> Any:
    plain = reference(model)
    weights = {name: merged(name, own, adapters) for name, own in plain.state_dict().items()}
    return reference(model, weights)


def test_adapters_are_computed_with_beside_the_weights_and_replaced_under_what_runs(
    model: Path, tmp_path: Path
) -> None:
    new, newer = adapters_like(model, 1), adapters_like(model, 2)
    narrow = {name: each[:1] if name.endswith(A) else each[:, :1] for name, each in new.items()}
    whole = changed_weights(model)

    async def go(replica: ReplicaRole) -> list[Completion]:
        done = [await replica.generate(ask(0, 20))]
        await replica.load(write_buckets(new.items(), tmp_path, 1), drain=True)
        done.append(await replica.generate(ask(1, 20)))
        running = asyncio.ensure_future(replica.generate(ask(2, 400)))
        await asyncio.sleep(0.2)
        for number, wrong in enumerate((narrow, whole), 3):
            with pytest.raises(ValueError, match=f"version {number}: .*(rank 4|is missing)"):
                await replica.load(write_buckets(wrong.items(), tmp_path, number), drain=False)
        await replica.load(write_buckets(newer.items(), tmp_path, 2), drain=False)
        return [*done, await replica.generate(ask(3, 20)), await running]

    with alone(ReplicaSettings(**settings(model), adapter_rank=RANK)) as (runner, replica):
        *done, both = runner.run(go(replica))
    models = [reference(model), with_adapters(model, new), with_adapters(model, newer)]
    for number, each in enumerate(done):
        assert gap(models[number], each) < 1e-3 < gap(models[number - 1], each)
    assert [version for version, _ in both.versions] == [1, 2]
    assert not list(tmp_path.glob("v*/adapters-*")), "what vLLM has read stays nowhere"


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started, also what those did."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def called(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it has ended, as those of an earlier engine have
        return " ".join([process.name(), *process.cmdline()])
    return ""


async def in_the_midst(replica: ReplicaRole) -> list[asyncio.Future[Completion]]:
    """Return rollouts of which some run: so many that even on a machine that stands still the last are far from done."""
    pending = [asyncio.ensure_future(replica.generate(ask(n, 1000))) for n in range(40)]
    await replica.generate(ask(99, 2, priority=-1))
    return pending


async def outcomes(pending: list[asyncio.Future[Completion]]) -> list[Completion | BaseException]:
    return await asyncio.gather(*pending, return_exceptions=True)


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def shared_by(process: psutil.Process) -> set[Path]:
    """Return the files of shared memory that a process has mapped."""
    mapped = {Path(mapping.path) for mapping in process.memory_maps()}
    return {path for path in mapped if path.parent == SHARED_MEMORY and path.exists()}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_replica_takes_its_shards_of_every_version_and_nothing_outlives_it_where_it_is_killed(
    num_devices: int, model: Path, tmp_path: Path
) -> None:
    versions = [reference(model).state_dict(), changed_weights(model, 1), changed_weights(model, 2)]
    families: list[psutil.Process] = []
    shared: set[Path] = set()

    async def go() -> None:
        config = settings(model) | {"tensor_parallel": num_devices}
        handle = await LocalProcess.start(REPLICA, config, tmp_path / "log", {})
        replica = remote(ReplicaRole, handle)
        await replica.start(None, 0)
        families.extend(family(handle.pid))
        shared.update(path for process in families for path in shared_by(process))
        for number in (1, 2):
            manifest = write_buckets(versions[number].items(), tmp_path, number)
            assert (await replica.load(manifest, True)).checksum == manifest.checksum
            done = await replica.generate(ask(number, 20))
            assert gap(reference(model, versions[number]), done) < 1e-4
            assert gap(reference(model, versions[number - 1]), done) > 1e-3
        pending = await in_the_midst(replica)
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await pending[-1]
        assert all(
            isinstance(each, Completion | WorkerLostError) for each in await outcomes(pending)
        )
        with pytest.raises(WorkerLostError):
            await replica.generate(ask(98, 2))
        await handle.close()

    asyncio.run(go())
    assert len(families) >= 3, "the replica, vLLM's core, and a guard"
    wait_until(lambda: all(map(is_over, families)), 10)
    assert shared or num_devices == 1, "by which workers talk"
    wait_until(lambda: not any(path.exists() for path in shared), 10)


def test_a_prompt_is_computed_once_under_one_version_and_again_under_the_next(
    served: Served, model: Path, tmp_path: Path
) -> None:
    runner, replica = served
    plain, new = reference(model).state_dict(), changed_weights(model)

    async def go() -> None:
        await replica.load(write_buckets(plain.items(), tmp_path, 0), drain=True)
        await replica._engine.time_passes()
        before = [await replica.generate(ask(rollout, 20)) for rollout in range(2)]
        checksums = [await replica._engine._llm.compute_weight_checksums()]  # type: ignore[attr-defined]
        await replica.load(write_buckets(new.items(), tmp_path, 1), drain=True)
        checksums.append(await replica._engine._llm.compute_weight_checksums())  # type: ignore[attr-defined]
        after = await replica.generate(ask(2, 20))
        prefixes = [sum(one.prefixes) for one in await replica._engine.passes() if one.prefixes]
        assert max(gap(reference(model), done) for done in before) < 1e-4
        assert gap(reference(model, new), after) < 1e-4 < gap(reference(model), after)
        assert prefixes == [len(PROMPT), len(PROMPT) % 128, len(PROMPT)]
        assert checksums[0] != checksums[1]

    runner.run(go())


def test_weights_that_replace_others_of_their_version_share_no_prompt_with_them(
    served: Served, model: Path, tmp_path: Path
) -> None:
    """A trainer that was lost makes other weights of a version that was served before."""
    runner, replica = served
    lost, new = changed_weights(model, 2), changed_weights(model, 3)
    outside = Request(rollout=9, prompt=encode_ids([VOCABULARY]), priority=0, max_tokens=4)

    for name in ("lost", "new"):
        (tmp_path / name).mkdir()

    async def go() -> None:
        await replica.load(write_buckets(lost.items(), tmp_path / "lost", 2), drain=True)
        await replica.generate(ask(0, 20))
        running = asyncio.ensure_future(replica.generate(ask(1, 400)))
        await asyncio.sleep(0.2)
        await replica.load(write_buckets(new.items(), tmp_path / "new", 2), drain=False)
        after = await replica.generate(ask(2, 20))
        await running  # whose spans are of both
        with pytest.raises(
            ValueError, match="token 64 is not in the model's vocabulary of 64 tokens"
        ):
            await replica.generate(outside)
        await replica.generate(ask(3, 2))
        assert gap(reference(model, new), after) < 1e-4 < gap(reference(model, lost), after)

    runner.run(go())


def test_when_the_core_dies_every_pending_rollout_raises_and_later_ones_are_lost(
    served: Served,
) -> None:
    runner, replica = served

    async def go() -> None:
        pending = await in_the_midst(replica)
        for process in psutil.Process().children():
            if "EngineCore" in called(process):
                process.kill()
        ended = await outcomes(pending)
        assert isinstance(ended[-1], RuntimeError)
        assert all(isinstance(each, Completion | RuntimeError) for each in ended)
        with pytest.raises(RoleLostError, match="not running"):
            await replica.generate(ask(1, 5))
        with pytest.raises(RuntimeError, match="not running"):
            async with replica._engine.paused():
                pass

    runner.run(go())
    _kept.close()


V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
"""On GPUs vLLM takes its V2 model runner by itself."""
OF_RUNNER = ("load_in_flight", "smallest_priority", "abort_returns", "one_logprob")
"""Tests of the contract that depend on the runner: versions, priorities, aborts, and log-probabilities."""


def test_the_v2_model_runner_keeps_the_contract_of_a_replica() -> None:
    root = Path(__file__).parents[1]
    search = [str(root / "tests" / "v2_runner"), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = f"vllm-in-process and ({' or '.join(OF_RUNNER)})"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "vllm",
            "tests/test_contracts.py",
            "-k",
            words,
        ],
        cwd=root,
        env={**os.environ, **V2, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        timeout=2 * HANG,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("." * len(OF_RUNNER))
