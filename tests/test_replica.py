"""The replica against full forward passes, on every engine: what it sampled, under which weights, in which order."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from streamrl.executor.roles import Completion, Manifest, Request
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.rollout.torch_model import cache_name
from streamrl.executor.tokens import (
    TokenBlock,
    TokenSegment,
    count_ids,
    count_tokens,
    decode_ids,
    encode_ids,
    read_block,
    read_blocks,
    write_block,
)
from streamrl.executor.transfer.shared_memory import write_buckets
from tests.engines import HANG, params
from tests.kept_replica import Kept, started
from tests.tiny_model import WIDE_HEADS, Weights, changed_weights, reference, tiny_model

VOCABULARY = 120
VERSION = 3
NOTHING = TokenBlock(0, None)
ENDLESS = 100_000  # output tokens: minutes of generation, past the timeout of `serve`


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A peaked random model whose generation config asks for truncation, which must not happen."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(
        VOCABULARY,
        **WIDE_HEADS,
        max_position_embeddings=2 * ENDLESS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model.generation_config.update(top_k=5, repetition_penalty=1.5, do_sample=True)
    model.save_pretrained(path)
    save_tokenizer(path / TOKENIZER)
    return path


TOKENIZER = "tokenizer"
"""Its directory in the model's; beside its config, it would be one of the model's kind."""


def save_tokenizer(path: Path) -> None:
    """Write one with a word for every token, of which every fifth is special."""
    words = {f"w{token}": token for token in range(VOCABULARY)}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    special = [f"w{token}" for token in range(0, VOCABULARY, 5)]
    tokenizer: Any = PreTrainedTokenizerFast
    made = tokenizer(tokenizer_object=model, additional_special_tokens=special)
    made.save_pretrained(path)


@pytest.fixture(scope="session")
def new_weights(model_path: Path) -> Weights:
    return changed_weights(model_path)


_kept = Kept(VERSION)


@pytest.fixture(scope="module", autouse=True)
def _end_what_was_kept() -> Iterator[None]:
    yield
    _kept.close()


OURS = ("transformers", "static")
"""For what the contract of replicas holds vLLM to as well (`test_contracts`): another one would have to start."""


@pytest.fixture(params=params())
def backend(request: pytest.FixtureRequest) -> str:
    """Every engine in turn."""
    return str(request.param)


def serve(
    path: Path,
    backend: str,
    scenario: Callable[[ReplicaWorker], Coroutine[Any, Any, None]],
    manifest: Manifest | None = None,
    **changes: Any,
) -> None:
    """Run `scenario` with a started replica, and stop it whatever happens.

    One of vLLM's goes on to the next scenario if that wants the same settings: such tests stand together.
    """
    settings = make_settings(path, backend, **changes)
    if backend != "vllm" or manifest is not None:
        _kept.close()  # vLLM's processes in one are each other's
        version = manifest.version if manifest else VERSION
        with started(settings, manifest, version) as (runner, replica):
            runner.run(asyncio.wait_for(scenario(replica), HANG))
        return
    runner, replica = _kept.of(settings)
    try:
        runner.run(asyncio.wait_for(scenario(replica), HANG))
        with tempfile.TemporaryDirectory() as directory:
            own = write_buckets(reference(path).state_dict().items(), Path(directory), VERSION)
            runner.run(replica.load(own, drain=True))
    except BaseException:
        _kept.close()
        raise


def make_settings(path: Path, backend: str, **changes: Any) -> ReplicaSettings:
    limits = {"max_running": 4, "max_tokens": 400, "max_prompt_tokens": 16}
    own = {"model": str(path), "tokenizer": str(path / TOKENIZER), "backend": backend}
    return ReplicaSettings(**{**own, **limits, "temperature": 1.0, "seed": 0, **changes})


def request(rollout: int, max_tokens: int, priority: int = 0, **fields: Any) -> Request:
    prompt = [1 + (7 * rollout + place) % 90 for place in range(5 + rollout % 4)]
    return Request(
        rollout=rollout,
        prompt=encode_ids(prompt),
        priority=priority,
        max_tokens=max_tokens,
        **fields,
    )


def sampled_logprobs(logits: torch.Tensor, tokens: list[int], temperature: float) -> torch.Tensor:
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]


@torch.no_grad()
def full_forward(model: Any, asked: Request, done: Completion, temperature: float) -> torch.Tensor:
    context = ids_of(asked.prompt) + read_blocks(asked.prefix)[0].tolist()
    tokens = tokens_of(done)
    logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    return sampled_logprobs(logits, tokens, temperature)


def ids_of(prompt: bytes) -> list[int]:
    ids: list[int] = decode_ids(prompt).tolist()
    return ids


def tokens_of(done: Completion) -> list[int]:
    ids: list[int] = read_block(done.output)[0].tolist()
    return ids


def assert_close(done: Completion, expected: torch.Tensor, atol: float = 3e-5) -> None:
    logprobs = torch.tensor(read_block(done.output)[1].copy())
    torch.testing.assert_close(logprobs, expected, atol=atol, rtol=2e-6)


def test_the_same_seed_gives_the_same_tokens(model_path: Path, backend: str) -> None:
    tokens: list[list[int]] = []

    async def scenario(replica: ReplicaWorker) -> None:
        tokens.append(tokens_of(await replica.generate(request(0, 40))))

    _kept.close()  # the first of them is as new as the last, which goes on to what follows
    for seed in (0, 5, 0):
        serve(model_path, backend, scenario, seed=seed)
    assert tokens[0] == tokens[2] != tokens[1]


def test_weights_that_were_pushed_are_there_after_a_sleep(
    model_path: Path, new_weights: Weights, backend: str, tmp_path: Path
) -> None:
    manifest = write_buckets(new_weights.items(), tmp_path, 4)
    model = reference(model_path)
    model.load_state_dict(new_weights)

    async def scenario(replica: ReplicaWorker) -> None:
        for rollout in range(3):
            await replica.sleep()
            if rollout == 1:  # asleep and awake, as it comes
                await replica.wake()
                await replica.load(manifest, drain=True)
                await replica.sleep()
            await replica.wake()
            asked = request(rollout, 30)
            done = await replica.generate(asked)
            weights = reference(model_path) if rollout == 0 else model
            assert_close(done, full_forward(weights, asked, done, 1.0))

    turns = {} if backend == "vllm" else {"takes_turns": True}  # which vLLM on CPUs has no look at
    serve(model_path, backend, scenario, **turns)


def test_tokens_go_to_the_file_that_a_request_names(
    model_path: Path, backend: str, tmp_path: Path
) -> None:
    first, second = (str(tmp_path / name) for name in ("a", "b"))

    async def scenario(replica: ReplicaWorker) -> None:
        done = await replica.generate(request(0, 9, output_path=first))
        assert done.output == TokenBlock(9, first)
        again = request(0, 20, prefix=(done.output,), output_path=second)
        rest = await replica.generate(again)
        assert rest.output == TokenBlock(11, second)
        assert_close(rest, full_forward(reference(model_path), again, rest, 1.0))

    serve(model_path, backend, scenario)


def test_an_engine_says_what_each_of_its_passes_held(model_path: Path, backend: str) -> None:
    async def scenario(replica: ReplicaWorker) -> None:
        await replica._engine.time_passes()
        asked = [request(0, 4), request(1, 4)]
        if backend == "vllm":  # which takes in what has come when it looks
            asked.pop()
        await asyncio.gather(*map(replica.generate, asked))
        prefill, *decodes = await replica._engine.passes()
        assert (prefill.running, sorted(prefill.prefixes)) == (
            0,
            [count_ids(a.prompt) for a in asked],
        )
        prompts = sum(count_ids(each.prompt) for each in asked)
        assert [one.context for one in decodes] == [prompts + len(asked) * made for made in (1, 2)]
        assert all(one.running == len(asked) and one.seconds > 0 for one in decodes)
        assert await replica._engine.passes() == []

    serve(model_path, backend, scenario)


@torch.no_grad()
def across_a_load(old: Any, new: Any, prompt: list[int], tokens: list[int], start: int) -> Any:
    """Log-probabilities where the weights changed in flight after `start` tokens.

    The last token sampled before the load is the first one the new weights read, over the keys
    that the old weights computed for everything before it.
    """
    name = cache_name(old)
    before = old(torch.tensor([prompt + tokens[: start - 1]]), use_cache=True)
    after = new(torch.tensor([tokens[start - 1 : -1]]), **{name: before[name]}).logits[0]
    return torch.cat([before.logits[0, len(prompt) - 1 :], after])


def test_a_load_in_flight_splits_the_tokens_exactly_where_the_weights_changed(
    model_path: Path, backend: str, new_weights: Weights, tmp_path: Path
) -> None:
    manifest = write_buckets(new_weights.items(), tmp_path, version=4)
    old, new = reference(model_path), reference(model_path, new_weights)

    async def scenario(replica: ReplicaWorker) -> None:
        asked = [request(rollout, 300) for rollout in range(3)]
        running = [asyncio.create_task(replica.generate(ask)) for ask in asked]
        await replica.generate(request(9, 10))
        assert (await replica.load(manifest, drain=False)).load_time > 0
        later = request(10, 20)
        done = await replica.generate(later)
        assert done.versions == [(4, 0)]
        assert_close(done, full_forward(new, later, done, 1.0))
        for ask, done in zip(asked, await asyncio.gather(*running), strict=True):
            (first, zero), (second, start) = done.versions
            assert (first, zero, second) == (3, 0, 4) and 5 <= start < 300
            logits = across_a_load(old, new, ids_of(ask.prompt), tokens_of(done), start)
            assert_close(done, sampled_logprobs(logits, tokens_of(done), 1.0), atol=1e-4)

    serve(model_path, backend, scenario)


def test_a_rollout_after_a_load_shares_no_prefix_of_the_old_weights(
    model_path: Path, new_weights: Weights, tmp_path: Path
) -> None:
    manifest = write_buckets(new_weights.items(), tmp_path, version=4)

    async def scenario(replica: ReplicaWorker) -> None:
        older = asyncio.create_task(replica.generate(request(0, 300)))
        await replica.generate(request(9, 10))
        await replica.load(manifest, drain=False)
        sibling = msgspec.structs.replace(request(0, 20), rollout=1)
        done = await replica.generate(sibling)
        assert not older.done()
        assert_close(done, full_forward(reference(model_path, new_weights), sibling, done, 1.0))
        await replica.abort(0)
        await older

    serve(model_path, "transformers", scenario)


def test_generation_goes_on_after_a_pause_that_was_cancelled(model_path: Path) -> None:
    async def scenario(replica: ReplicaWorker) -> None:
        async def pause() -> None:
            async with replica._engine.paused():
                pass

        running = asyncio.create_task(replica.generate(request(0, 100)))
        await replica.generate(request(9, 3))
        pausing = asyncio.create_task(pause())
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        assert len(tokens_of(await running)) == 100

    serve(model_path, "transformers", scenario)


def corrupt(manifest: Manifest) -> Manifest:
    path = Path(manifest.buckets[-1].path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return manifest


@pytest.mark.parametrize("drain", [False, True])
def test_bad_weights_are_refused_and_the_old_ones_go_on_serving(
    model_path: Path, backend: str, new_weights: Weights, tmp_path: Path, drain: bool
) -> None:
    name = "model.norm.weight"
    others = {key: tensor for key, tensor in new_weights.items() if key != name}
    bad = {
        "checksum": new_weights,
        f"'{name}' is missing": others,
        "no tensor 'surprise'": new_weights | {"surprise": torch.zeros(2)},
        f"shape of '{name}'": others | {name: torch.zeros(7)},
    }
    model = reference(model_path)

    async def scenario(replica: ReplicaWorker) -> None:
        for number, (message, weights) in enumerate(bad.items()):
            manifest = write_buckets(weights.items(), tmp_path, number, bucket_bytes=2**14)
            if message == "checksum":
                manifest = corrupt(manifest)
            with pytest.raises(ValueError, match=message):
                await replica.load(manifest, drain)
            ask = request(0, 20)
            done = await replica.generate(ask)
            assert done.versions == [(3, 0)]
            assert_close(done, full_forward(model, ask, done, 1.0))

    serve(model_path, backend, scenario)


def test_a_request_without_room_is_refused(model_path: Path, backend: str) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": encode_ids([1] * 17)}, "prompt .* 16 .* got 17"),
        ({"max_tokens": 401}, "max_tokens .* got 401"),
        ({"prompt": b""}, "prompt"),
        ({"max_tokens": 2, "prefix": (write_block([1, 2], [-1.0] * 2, None),)}, "prefix"),
    ]

    async def scenario(replica: ReplicaWorker) -> None:
        for changes, message in wrong:
            with pytest.raises(ValueError, match=f"rollout 5.*{message}"):
                await replica.generate(replace(request(5, 4), **changes))
            assert (await replica.generate(request(5, 3))).output.num_tokens == 3

    serve(model_path, backend, scenario)


def test_the_text_is_that_of_the_whole_output_without_special_tokens(
    model_path: Path, backend: str
) -> None:
    prefix = write_block([5, 6, 7], [-1.0] * 3, None)

    async def scenario(replica: ReplicaWorker) -> None:
        done = await replica.generate(request(0, 30, prefix=(prefix,)))
        words = [f"w{token}" for token in [5, 6, 7, *tokens_of(done)] if token % 5]
        assert done.text == " ".join(words) and len(words) < 30
        running = asyncio.create_task(replica.generate(request(1, 400)))
        await replica.generate(request(2, 5))
        await replica.abort(1)
        assert (await running).text is None

    serve(model_path, backend, scenario)


WARM = {"temperature": 2.0, "max_running": 64}


@pytest.mark.parametrize("changes", [{}, WARM], ids=["1.0", "2.0"])
def test_logprobs_are_those_of_a_full_forward_pass(
    model_path: Path, backend: str, changes: dict[str, Any]
) -> None:
    asked = [request(rollout, 20 + 5 * rollout) for rollout in range(7)]
    asked.append(request(7, 30, prefix=(write_block([4, 5, 6], [-1.0] * 3, None),)))
    model = reference(model_path)

    async def scenario(replica: ReplicaWorker) -> None:
        completions = await asyncio.gather(*map(replica.generate, asked))
        for ask, done in zip(asked, completions, strict=True):
            assert done.rollout == ask.rollout
            assert done.output.num_tokens == ask.max_tokens - count_tokens(ask.prefix)
            assert done.segments == (TokenSegment(done.output.num_tokens, is_policy=True),)
            assert (done.finish, done.versions) == ("length", [(3, 0)])
            assert 0 < done.prefill_time < done.run_time
            assert_close(done, full_forward(model, ask, done, changes.get("temperature", 1.0)))

    serve(model_path, backend, scenario, **changes)


def test_tokens_are_sampled_from_the_whole_vocabulary(model_path: Path, backend: str) -> None:
    """One step, many times: the shares of the first token are the model's probabilities."""
    with torch.no_grad():
        logits = reference(model_path)(torch.tensor([ids_of(request(0, 1).prompt)])).logits[0, -1]
    probabilities = torch.softmax(logits / 2.0, dim=-1)
    count = 2000

    async def scenario(replica: ReplicaWorker) -> None:
        prompt = request(0, 1).prompt
        asked = [Request(rollout=n, prompt=prompt, priority=0, max_tokens=1) for n in range(count)]
        done = await asyncio.gather(*map(replica.generate, asked))
        tokens = torch.tensor([tokens_of(completion)[0] for completion in done])
        shares = torch.bincount(tokens, minlength=VOCABULARY) / count
        distance = (shares - probabilities).abs().sum() / 2
        assert distance < 0.15, "a top-k of 50 or less, or temperature 1, is further away"

    serve(model_path, backend, scenario, **WARM)


PAIR = {"max_running": 2, "max_tokens": ENDLESS}
"""Two places, which what never ends can keep."""


def test_a_short_rollout_returns_before_its_long_sibling(model_path: Path, backend: str) -> None:
    async def scenario(replica: ReplicaWorker) -> None:
        long = asyncio.create_task(replica.generate(request(0, ENDLESS)))
        short = await replica.generate(request(1, 10))
        assert short.output.num_tokens == 10 and not long.done()
        await replica.abort(0)
        assert (await long).finish == "aborted"

    serve(model_path, backend, scenario, **PAIR)


def test_an_abort_keeps_the_tokens_and_resuming_goes_on_after_them(
    model_path: Path, backend: str
) -> None:
    model = reference(model_path)

    async def scenario(replica: ReplicaWorker) -> None:
        first = request(0, 400)
        running = asyncio.create_task(replica.generate(first))
        just_started = asyncio.create_task(replica.generate(request(8, 400, priority=1)))
        waiting = asyncio.create_task(replica.generate(request(9, 400, priority=2)))
        await replica.generate(request(1, 10))
        await asyncio.gather(*(replica.abort(rollout) for rollout in (9, 8, 0, 1234)))
        part, never_ran = await running, await waiting
        assert {part.finish, never_ran.finish, (await just_started).finish} == {"aborted"}
        assert (never_ran.output, never_ran.versions, never_ran.run_time) == (NOTHING, [], 0.0)
        assert never_ran.segments == ()
        assert 5 <= part.output.num_tokens < 400
        assert_close(part, full_forward(model, first, part, 1.0))

        again = request(0, 400, prefix=(part.output,))
        rest = await replica.generate(again)
        assert part.output.num_tokens + rest.output.num_tokens == 400
        assert_close(rest, full_forward(model, again, rest, 1.0))

    serve(model_path, backend, scenario, **PAIR)


def test_a_cancelled_generate_gives_its_place_to_the_next(model_path: Path, backend: str) -> None:
    async def scenario(replica: ReplicaWorker) -> None:
        first = [asyncio.create_task(replica.generate(request(n, ENDLESS))) for n in range(2)]
        next_one = asyncio.create_task(replica.generate(request(2, 5)))
        await asyncio.sleep(0.05)
        for each in first:  # of a static batch both, or nobody is let in
            each.cancel()
        assert (await next_one).output.num_tokens == 5
        for each in first:
            with pytest.raises(asyncio.CancelledError):
                await each

    serve(model_path, backend, scenario, **PAIR)


def test_a_drained_load_gives_every_rollout_one_version(
    model_path: Path, backend: str, new_weights: Weights, tmp_path: Path
) -> None:
    manifest = write_buckets(new_weights.items(), tmp_path, version=4)
    models = {3: reference(model_path), 4: reference(model_path, new_weights)}

    async def scenario(replica: ReplicaWorker) -> None:
        asked = [request(rollout, 40 + rollout) for rollout in range(6)]
        running = [asyncio.create_task(replica.generate(ask)) for ask in asked]
        await asyncio.sleep(0.02)
        await replica.load(manifest, drain=True)
        done = await asyncio.gather(*running)
        assert [completion.versions for completion in done] == [[(3, 0)]] * 2 + [[(4, 0)]] * 4
        for ask, completion in zip(asked, done, strict=True):
            model = models[completion.versions[0][0]]
            assert_close(completion, full_forward(model, ask, completion, 1.0))

    serve(model_path, backend, scenario, **PAIR)


def test_a_replica_starts_with_the_weights_of_its_manifest(
    model_path: Path, backend: str, new_weights: Weights, tmp_path: Path
) -> None:
    manifest = write_buckets(new_weights.items(), tmp_path, version=8)

    model, ask = reference(model_path, new_weights), request(0, 20)

    async def scenario(replica: ReplicaWorker) -> None:
        done = await replica.generate(ask)
        assert done.versions == [(8, 0)]
        assert_close(done, full_forward(model, ask, done, 1.0))

    serve(model_path, backend, scenario, manifest)


def test_a_rollout_ends_at_the_end_of_sequence_token_and_includes_it(
    model_path: Path, backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    settings = json.loads((path / "generation_config.json").read_text())
    ends = list(range(0, VOCABULARY, 10))
    (path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ends}))

    async def scenario(replica: ReplicaWorker) -> None:
        asked = [request(rollout, 6) for rollout in range(30)]
        done = await asyncio.gather(*map(replica.generate, asked))
        for completion in done:
            *body, last = tokens_of(completion)
            assert not set(body) & set(ends)
            assert completion.finish == ("stop" if last in ends else "length")
        assert {completion.finish for completion in done} == {"stop", "length"}

    serve(path, backend, scenario)


def test_a_token_of_the_tokenizer_ends_a_rollout_of_a_model_that_names_none(
    model_path: Path, backend: str
) -> None:
    ends = list(range(0, VOCABULARY, 10))

    async def scenario(replica: ReplicaWorker) -> None:
        asked = [request(rollout, 6) for rollout in range(30)]
        done = await asyncio.gather(*map(replica.generate, asked))
        assert {completion.finish for completion in done} == {"stop", "length"}
        for completion in done:
            assert not set(tokens_of(completion)[:-1]) & set(ends)

    serve(model_path, backend, scenario, end_tokens=tuple(ends))


def test_a_static_batch_takes_nothing_in_until_all_of_it_is_over(model_path: Path) -> None:
    ended: list[int] = []

    async def scenario(replica: ReplicaWorker) -> None:
        async def generate(rollout: int, max_tokens: int) -> None:
            await replica.generate(request(rollout, max_tokens, priority=rollout))
            ended.append(rollout)

        await asyncio.gather(*(generate(*pair) for pair in [(0, 5), (1, 60), (2, 5), (3, 60)]))

    serve(model_path, "static", scenario, max_running=2)
    assert ended == [0, 1, 2, 3]
    ended.clear()
    serve(model_path, "transformers", scenario, max_running=2)
    assert ended == [0, 2, 1, 3]


@pytest.mark.parametrize("backend", OURS)
def test_the_smallest_priority_starts_first_and_ties_by_rollout(
    model_path: Path, backend: str
) -> None:
    order, ended = [(4, 2), (3, 1), (2, 1), (1, 7), (5, 0)], []

    async def scenario(replica: ReplicaWorker) -> None:
        async def generate(rollout: int, priority: int) -> None:
            await replica.generate(request(rollout, 5, priority))
            ended.append(rollout)

        await asyncio.gather(*(generate(*pair) for pair in order))

    serve(model_path, backend, scenario, max_running=1)
    assert ended == [5, 2, 3, 4, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("backend", "error"),
    [("transformers", ValueError), ("transformers", SystemExit), ("static", ValueError)],
)
def test_when_generation_dies_every_pending_rollout_raises(
    model_path: Path, backend: str, error: type[BaseException]
) -> None:
    """`SystemExit` ends the thread past the error handling of transformers."""

    def die(*_: Any) -> None:
        raise error("broken")

    async def scenario(replica: ReplicaWorker) -> None:
        tasks = [asyncio.create_task(replica.generate(request(n, 400))) for n in range(50)]
        await replica.generate(request(99, 5, priority=-1))
        replica._engine._model.lm_head.register_forward_pre_hook(die)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
        assert "batching failed" in str(outcomes[0])
        with pytest.raises(RuntimeError, match="not running"):
            await replica.generate(request(1, 5))

    serve(model_path, backend, scenario, max_running=2)


@pytest.mark.parametrize("backend", OURS)
def test_a_stop_ends_every_pending_rollout_with_an_error(model_path: Path, backend: str) -> None:
    async def scenario(replica: ReplicaWorker) -> None:
        tasks = [asyncio.create_task(replica.generate(request(n, 400))) for n in range(50)]
        await replica.generate(request(99, 5, priority=-1))
        await replica.stop()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
        assert "stopped" in str(outcomes[0])

    serve(model_path, backend, scenario, max_running=2)
