"""The trainer: one gradient for any split of a batch, versions in order, whole checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from streamrl.executor.roles import Sample
from streamrl.executor.tokens import (
    TokenSegment,
    count_tokens,
    decode_ids,
    encode_ids,
    read_blocks,
    write_block,
)
from streamrl.executor.trainer import losses
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker
from streamrl.executor.transfer.shared_memory import read_buckets
from streamrl.runfile.algorithm_config import LossMean
from tests.tiny_model import tiny_model

VOCABULARY = 40
TEMPERATURE = 0.8
LONGEST = 30
"""Maximum output tokens of a rollout."""
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen2 with tied embeddings, beside a file as a tokenizer has."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(
        VOCABULARY, initializer_range=0.2, tie_word_embeddings=True, attention_dropout=0.1
    )
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return str(path)


def make_config(model: str, **changes: Any) -> TrainerSettings:
    defaults = {"learning_rate": 1e-3, "temperature": TEMPERATURE, "correction": "token-tis"}
    return TrainerSettings(model=model, **{**defaults, **changes})


def make_sample(
    rollout: int, prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
) -> Sample:
    """A rollout whose output is the policy's, in one block."""
    return Sample(
        rollout=rollout,
        prompt=encode_ids(prompt),
        output=(write_block(tokens, logprobs, None),),
        segments=(TokenSegment(len(tokens), is_policy=True),),
        advantage=advantage,
    )


def make_samples(seed: int, count: int = 24) -> list[Sample]:
    """Rollouts of 1 to 30 tokens after prompts of 1 to 12; every fifth has advantage 0."""
    rng = random.Random(seed)
    samples = []
    for rollout in range(count):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        logprobs = [rng.uniform(-6, -2) for _ in tokens]
        advantage = 0.0 if rollout % 5 == 0 else rng.gauss(0, 1)
        samples.append(make_sample(rollout, prompt, tokens, logprobs, advantage))
    return samples


def split(samples: Sequence[Sample], seed: int) -> list[list[Sample]]:
    """The samples shuffled and cut into micro-batches of 1 to 6."""
    rng = random.Random(seed)
    rest = rng.sample(samples, len(samples))
    parts = []
    while rest:
        size = rng.randint(1, 6)
        parts.append(rest[:size])
        rest = rest[size:]
    return parts


def load_model(path: str) -> Any:
    """The initial model, computed without the trainer."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def logprobs_of(model: Any, sample: Sample) -> torch.Tensor:
    """Log-probabilities of the output tokens by a forward pass of this sample alone."""
    prompt, tokens = decode_ids(sample.prompt).tolist(), read_blocks(sample.output)[0].tolist()
    logits = model(torch.tensor([prompt + tokens])).logits[0]
    logprobs = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    chosen: torch.Tensor = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen


def with_logprobs(sample: Sample, logprobs: list[float]) -> Sample:
    """The sample with other behaviour log-probabilities."""
    ids, _ = read_blocks(sample.output)
    return replace(sample, output=(write_block(ids, logprobs, None),))


def own_samples(path: str, samples: list[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that the initial model gives them."""
    model = load_model(path)
    with torch.no_grad():
        return [with_logprobs(s, logprobs_of(model, s).tolist()) for s in samples]


@contextlib.asynccontextmanager
async def started(
    config: TrainerSettings, checkpoint: str | None = None, version: int = 0
) -> AsyncIterator[TrainerWorker]:
    trainer = TrainerWorker(config)
    assert await trainer.start(checkpoint) == version
    yield trainer
    await trainer.stop()


async def make_step(
    trainer: TrainerWorker, version: int, parts: list[list[Sample]]
) -> dict[str, float]:
    for part in parts:
        await trainer.score(part)
        await trainer.train(part)
    return await trainer.step(version)


async def weights(trainer: TrainerWorker, version: int, directory: Path) -> Weights:
    directory.mkdir(exist_ok=True)
    return dict(read_buckets(await trainer.push(version, str(directory))))


def step_once(
    config: TrainerSettings, parts: list[list[Sample]], directory: Path
) -> tuple[Weights, dict[str, float]]:
    """Weights and figures after one step from the initial weights."""

    async def run() -> tuple[Weights, dict[str, float]]:
        async with started(config) as trainer:
            figures = await make_step(trainer, 1, parts)
            return await weights(trainer, 1, directory), figures

    return asyncio.run(run())


def initial_weights(model_path: str) -> Weights:
    return dict(load_model(model_path).state_dict())


def distance(first: Weights, second: Weights) -> float:
    """`|first - second| / |first|` over all weights."""
    difference = sum((first[name] - second[name]).double().square().sum() for name in first)
    return math.sqrt(difference / sum(w.double().square().sum() for w in first.values()))


def step_by_hand(model: Any, terms: list[torch.Tensor], loss_mean: str) -> float:
    """Take one AdamW step on the mean of the terms of each rollout; return the norm of its gradient."""
    of_rollout: Any = {
        "rollout": torch.mean,
        "rollout-sum": torch.sum,
        "constant": lambda term: term.sum() / LONGEST,
    }
    if loss_mean == "token":
        loss: Any = torch.cat(terms).mean()
    else:
        loss = torch.stack([of_rollout[loss_mean](term) for term in terms]).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0).step()
    return float(norm)


@pytest.mark.parametrize("loss_mean", ["token", "rollout"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "changes",
    [{"correction": "token-tis"}, {"correction": "decoupled", "kl_coefficient": 0.1}],
    ids=["token-tis", "decoupled-kl"],
)
def test_any_split_and_order_makes_the_weights_of_one_batch(
    model_path: str, tmp_path: Path, loss_mean: str, seed: int, changes: dict[str, Any]
) -> None:
    config = make_config(model_path, loss_mean=loss_mean, max_grad_norm=0.05, **changes)
    small_passes = replace(config, max_tokens_per_pass=64)
    samples = make_samples(seed)
    whole, figures = step_once(config, [samples], tmp_path / "whole")
    streamed, others = step_once(small_passes, split(samples, seed), tmp_path / "streamed")
    assert distance(whole, streamed) < 1e-6
    assert distance(whole, initial_weights(model_path)) > 1e-4
    assert others == pytest.approx(figures, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss_mean", get_args(LossMean))
def test_the_step_is_that_of_the_written_out_loss(
    model_path: str, tmp_path: Path, loss_mean: str
) -> None:
    samples, masked = make_samples(7), {3, 4, 11}
    found, figures = step_once(
        make_config(model_path, loss_mean=loss_mean, max_grad_norm=1e9, max_tokens=LONGEST),
        [[replace(sample, is_masked=sample.rollout in masked) for sample in samples]],
        tmp_path,
    )
    assert figures["masked_rollouts"] == len(masked)
    model = load_model(model_path)
    terms = []
    for sample in samples:
        if sample.rollout in masked:
            continue
        chosen = logprobs_of(model, sample)
        ratio = (chosen.detach() - torch.tensor(read_blocks(sample.output)[1])).exp().clamp(max=2.0)
        terms.append(-ratio * sample.advantage * chosen)
    norm = step_by_hand(model, terms, loss_mean)
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert distance(found, dict(model.state_dict())) < 1e-5


def with_tool(sample: Sample, first: int, count: int, logprob: float = -9.0) -> Sample:
    """The sample with `count` tokens from `first` on a tool's, with a log-probability stored for them."""
    ids, logprobs = read_blocks(sample.output)
    logprobs[first : first + count] = logprob
    segments = [(first, True), (count, False), (len(ids) - first - count, True)]
    middle = first + count // 2  # blocks and segments need not end together
    return replace(
        sample,
        output=(
            write_block(ids[:middle], logprobs[:middle], None),
            write_block(ids[middle:], logprobs[middle:], None),
        ),
        segments=tuple(TokenSegment(length, is_policy) for length, is_policy in segments if length),
    )


def tool_samples(logprob: float = -9.0) -> list[Sample]:
    """Rollouts with a tool's answer in the middle, at the start, at the end, and without."""
    long = [s for s in make_samples(7) if count_tokens(s.output) >= 12 and s.advantage != 0][:4]
    middle, start, end, without = long
    return [
        with_tool(middle, 3, 5, logprob),
        with_tool(start, 0, 4, logprob),
        with_tool(end, count_tokens(end.output) - 6, 6, logprob),
        without,
    ]


@pytest.mark.parametrize("loss_mean", ["token", "rollout"])
@pytest.mark.parametrize("correction", ["none", "token-tis", "seq-tis", "decoupled"])
def test_what_a_tool_wrote_is_context_and_nothing_is_learned_from_it(
    model_path: str, tmp_path: Path, loss_mean: str, correction: str
) -> None:
    samples = tool_samples()
    config = make_config(
        model_path, loss_mean=loss_mean, correction=correction, max_grad_norm=1e9, clip=1e9
    )
    found, figures = step_once(config, [samples[:1], samples[1:]], tmp_path)
    model = load_model(model_path)
    terms, num_policy = [], 0
    for sample in samples:
        flags = [s.is_policy for s in sample.segments for _ in range(s.num_tokens)]
        mask = torch.tensor(flags)
        chosen = logprobs_of(model, sample)[mask]
        gap = chosen.detach() - torch.tensor(read_blocks(sample.output)[1])[mask]
        num_policy += sum(flags)
        if correction == "seq-tis":
            gap = gap.sum().expand_as(gap)
        ratio = gap.exp() if correction == "none" else gap.exp().clamp(max=2.0)
        terms.append(-ratio * sample.advantage * chosen)
    norm = step_by_hand(model, terms, loss_mean)
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert figures["tokens"] == num_policy < sum(count_tokens(s.output) for s in samples)
    assert distance(found, dict(model.state_dict())) < 1e-5


@pytest.mark.parametrize("correction", ["seq-tis", "decoupled"])
def test_log_probabilities_stored_for_a_tools_tokens_change_nothing(
    model_path: str, tmp_path: Path, correction: str
) -> None:
    config = make_config(model_path, correction=correction, kl_coefficient=0.1)
    results = [
        step_once(config, [tool_samples(logprob)], tmp_path / str(logprob))
        for logprob in (-9.0, 0.0, math.nan)
    ]
    (weights_of, figures), *others = results
    for other_weights, other_figures in others:
        assert all(torch.equal(weights_of[name], other_weights[name]) for name in weights_of)
        assert other_figures == figures


def test_at_the_behaviour_weights_the_ratio_is_one_and_k3_zero(model_path: str) -> None:
    samples = own_samples(model_path, make_samples(0))

    async def run() -> dict[str, float]:
        async with started(make_config(model_path, max_tokens_per_pass=100)) as trainer:
            return await trainer.train(samples)

    figures = asyncio.run(run())
    assert figures["mean_ratio"] == pytest.approx(1, abs=1e-5)
    assert figures["effective_sample_share"] == pytest.approx(1, abs=1e-5)
    assert figures["kl_k3"] == pytest.approx(0, abs=1e-8)
    assert figures["logprob_gap"] < 1e-5
    assert figures["clip_fraction"] == figures["truncated_fraction"] == 0


def test_on_policy_every_correction_makes_the_same_step(model_path: str, tmp_path: Path) -> None:
    samples = own_samples(model_path, make_samples(1))
    results = {
        correction: step_once(
            make_config(model_path, correction=correction), [samples], tmp_path / correction
        )[0]
        for correction in losses.CORRECTIONS
    }
    for correction, result in results.items():
        assert distance(results["none"], result) < 1e-5, correction


def test_the_kl_penalty_pulls_towards_the_initial_weights(model_path: str, tmp_path: Path) -> None:
    async def run(kl_coefficient: float) -> Weights:
        config = make_config(model_path, kl_coefficient=kl_coefficient, learning_rate=5e-3)
        async with started(config) as trainer:
            for version in range(1, 9):
                await make_step(trainer, version, [make_samples(0)])
            return await weights(trainer, 8, tmp_path / str(kl_coefficient))

    initial = initial_weights(model_path)
    free, held = (distance(initial, asyncio.run(run(kl))) for kl in (0.0, 10.0))
    assert held < 0.7 * free


def test_a_batch_of_zero_advantages_steps_with_a_zero_gradient_and_decays(
    model_path: str, tmp_path: Path
) -> None:
    samples = [s for s in make_samples(0) if s.advantage == 0]
    found, figures = step_once(make_config(model_path, weight_decay=10.0), [samples], tmp_path)
    assert figures["grad_norm"] == 0 and figures["rollouts"] == len(samples)
    decayed = {name: 0.99 * weight for name, weight in initial_weights(model_path).items()}
    assert distance(decayed, found) < 1e-6


@pytest.mark.parametrize("correction", ["token-tis", "decoupled"])
def test_a_checkpoint_continues_with_an_identical_step(
    model_path: str, tmp_path: Path, correction: str
) -> None:
    config = make_config(model_path, correction=correction, weight_decay=0.1, kl_coefficient=0.1)
    checkpoint = str(tmp_path / "checkpoint")

    async def first() -> Weights:
        async with started(config) as trainer:
            for version in (1, 2):
                await make_step(trainer, version, [make_samples(version)])
            await trainer.save(checkpoint)
            await make_step(trainer, 3, [make_samples(3)])
            return await weights(trainer, 3, tmp_path / "first")

    async def second() -> Weights:
        async with started(config, checkpoint, version=2) as trainer:
            await make_step(trainer, 3, [make_samples(3)])
            return await weights(trainer, 3, tmp_path / "second")

    expected, found = asyncio.run(first()), asyncio.run(second())
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_text() == "{}"


def test_steps_and_pushes_out_of_order_are_refused(model_path: str, tmp_path: Path) -> None:
    async def run() -> None:
        trainer = TrainerWorker(make_config(model_path))
        with pytest.raises(RuntimeError, match="call start first"):
            await trainer.step(1)
        await trainer.start(None)
        with pytest.raises(ValueError, match="nothing was trained on"):
            await trainer.step(1)
        await trainer.train(make_samples(0))
        for wrong in (0, 2):
            with pytest.raises(ValueError, match=f"must make version 1, got {wrong}"):
                await trainer.step(wrong)
        with pytest.raises(ValueError, match="current version 0, got 1"):
            await trainer.push(1, str(tmp_path))
        await trainer.step(1)
        with pytest.raises(ValueError, match="current version 1, got 0"):
            await trainer.push(0, str(tmp_path))
        with pytest.raises(ValueError, match="nothing was trained on"):
            await trainer.step(2)
        await trainer.stop()

    asyncio.run(run())


def test_a_refused_sample_leaves_the_batch_as_it_was(model_path: str, tmp_path: Path) -> None:
    good = make_samples(0)
    short = replace(good[1], rollout=99, segments=(TokenSegment(1, is_policy=True),))
    nan = make_sample(98, [1], [1], [-1.0], math.nan)
    empty = make_sample(97, [1], [], [], 1.0)
    foreign = replace(
        good[1], rollout=96, segments=(TokenSegment(count_tokens(good[1].output), is_policy=False),)
    )

    async def run() -> Weights:
        async with started(make_config(model_path)) as trainer:
            for bad in (short, nan, empty, foreign):
                with pytest.raises(ValueError, match=f"rollout {bad.rollout}"):
                    await trainer.train([*good, bad])
            await make_step(trainer, 1, [good])
            return await weights(trainer, 1, tmp_path / "after")

    expected, _ = step_once(make_config(model_path), [good], tmp_path / "alone")
    found = asyncio.run(run())
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_batch_in_which_train_failed_makes_no_version(model_path: str, tmp_path: Path) -> None:
    outside = make_sample(9, [VOCABULARY + 5], [1], [-1.0], 1.0)

    async def run() -> Weights:
        async with started(make_config(model_path)) as trainer:
            with pytest.raises(IndexError):
                await trainer.train([outside])
            await trainer.train(make_samples(0))
            with pytest.raises(ValueError, match="a call of train failed"):
                await trainer.step(1)
            return await weights(trainer, 0, tmp_path)

    assert distance(initial_weights(model_path), asyncio.run(run())) == 0


def test_a_gradient_that_is_not_finite_leaves_the_weights(model_path: str, tmp_path: Path) -> None:
    sample = make_sample(0, [1], [2], [math.nan], 1.0)

    async def run() -> Weights:
        async with started(make_config(model_path)) as trainer:
            await trainer.train([sample])
            with pytest.raises(FloatingPointError, match="nan"):
                await trainer.step(1)
            return await weights(trainer, 0, tmp_path)

    assert distance(initial_weights(model_path), asyncio.run(run())) == 0


def test_decoupled_refuses_rollouts_that_were_not_scored_since_they_were_trained_on(
    model_path: str,
) -> None:
    async def run() -> None:
        async with started(make_config(model_path, correction="decoupled")) as trainer:
            samples = make_samples(0, count=4)
            with pytest.raises(ValueError, match="rollout 1: call score before train"):
                await trainer.train(samples)
            assert (await trainer.score(samples))["scored_tokens"] > 0
            await trainer.train(samples)
            with pytest.raises(ValueError, match="rollout 1: call score before train"):
                await trainer.train(samples)

    asyncio.run(run())


def test_a_pushed_version_holds_the_tied_weights_under_both_names(
    model_path: str, tmp_path: Path
) -> None:
    async def run() -> Weights:
        async with started(make_config(model_path)) as trainer:
            for version in (1, 2, 3):
                await make_step(trainer, version, [make_samples(version)])
                found = await weights(trainer, version, tmp_path)
        return found

    found = asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002", "v000003"]
    load_model(model_path).load_state_dict(found, strict=True)
    head = found["lm_head.weight"]
    assert head.data_ptr() == found["model.embed_tokens.weight"].data_ptr()


def test_calls_keep_their_order_and_the_event_loop_stays_free(model_path: str) -> None:
    async def run() -> int:
        async with started(make_config(model_path)) as trainer:
            first = (trainer.train(make_samples(0)), trainer.step(1))
            second = (trainer.train(make_samples(1)), trainer.step(2))
            work = asyncio.gather(*first, *second)
            turns = 0
            while not work.done():
                await asyncio.sleep(0)
                turns += 1
            await work
        return turns

    assert asyncio.run(run()) > 20


def test_a_push_waits_for_no_training_and_no_training_shows_in_it(
    model_path: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        samples = make_samples(3, count=1000)
        async with started(make_config(model_path)) as trainer:
            ended: list[str] = []

            async def note(name: str, work: Awaitable[Any]) -> Any:
                result = await work
                ended.append(name)
                return result

            training = note("train", trainer.train(samples))
            _, pushed = await asyncio.gather(training, note("push", weights(trainer, 0, tmp_path)))
            assert ended == ["push", "train"]
            initial = load_model(model_path).state_dict()
            assert all(torch.equal(pushed[name], tensor) for name, tensor in initial.items())

    asyncio.run(scenario())


def test_a_step_waits_for_the_push_before_it_and_a_push_for_the_step(
    model_path: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with started(make_config(model_path)) as trainer:
            await trainer.train(make_samples(3))
            for thread in (trainer._pusher, trainer._thread):  # both are late, the one more so
                thread.submit(time.sleep, 0.5 if thread is trainer._pusher else 0.1)
            calls = [
                trainer.push(0, str(tmp_path)),
                trainer.step(1),
                trainer.push(1, str(tmp_path)),
            ]
            before, _, after = await asyncio.gather(*calls)
            old, new = dict(read_buckets(before)), dict(read_buckets(after))
            assert any(not torch.equal(old[name], new[name]) for name in old)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("field", "value"),
    [("correction", "vtrace"), ("loss_mean", "sum"), ("temperature", 0.0), ("correction_cap", 0.5)],
)
def test_a_config_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        make_config("somewhere", **{field: value})


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Hugging Face model directory"):
        asyncio.run(TrainerWorker(make_config(str(tmp_path / "none"))).start(None))
