"""What engines sample from under each option, against the trainer's log-probabilities; and stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.roles import Completion, Request
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.sampling import StopStrings, Truncation, truncated
from streamrl.executor.tokens import encode_ids, read_block, write_block
from streamrl.executor.trainer.losses import token_entropies, token_logprobs
from streamrl.executor.trainer.passes import output_logprobs
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.runfile.files import load_run
from streamrl.targets.execute_limits import check_back_ends
from tests.engines import HANG, params
from tests.kept_replica import Kept
from tests.tiny_model import WIDE_HEADS, reference, tiny_model

VOCABULARY = 120
PROMPT = [3, 14, 15, 92, 65]
GAP, MEAN_GAP = 3e-5, 2e-6
"""Largest and mean difference of log-probabilities, in nats: both sides compute in float32."""
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
}
SYMBOLS = [chr(33 + number) for number in range(VOCABULARY)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a peaked model, whose tokens are single characters."""
    path = tmp_path_factory.mktemp("model")
    shape = {"max_position_embeddings": 512, "initializer_range": 0.2, **WIDE_HEADS}
    tiny_model(VOCABULARY, eos_token_id=None, **shape).save_pretrained(path)
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="!"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=core).save_pretrained(path / "tokenizer")
    return path


_kept = Kept(0)


@pytest.fixture(scope="module", autouse=True)
def _end_what_was_kept() -> Iterator[None]:
    yield
    _kept.close()


def generate(
    path: Path, backend: str, asked: list[Request], **changes: Any
) -> tuple[ReplicaWorker, list[Completion]]:
    limits = {"max_running": 4, "max_tokens": 200, "max_prompt_tokens": 16}
    own = {"model": str(path), "tokenizer": str(path / "tokenizer"), "backend": backend}
    settings = ReplicaSettings(**{**own, **limits, "temperature": 0.7, "seed": 0, **changes})
    runner, replica = _kept.of(settings)

    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*map(replica.generate, asked)))

    return replica, runner.run(asyncio.wait_for(all_of_them(), HANG))


def ask(rollout: int, max_tokens: int = 60, **fields: Any) -> Request:
    return Request(
        rollout=rollout, prompt=encode_ids(PROMPT), priority=0, max_tokens=max_tokens, **fields
    )


def tokens_of(done: Completion) -> list[int]:
    ids: list[int] = read_block(done.output)[0].tolist()
    return ids


def sequence_of(done: Completion) -> TokenSequence:
    tokens, logprobs = read_block(done.output)
    return TokenSequence(
        rollout=done.rollout,
        prompt=np.array(PROMPT, tokens.dtype),
        tokens=tokens,
        logprobs=logprobs,
        is_policy=np.ones(len(tokens), bool),
        advantage=1.0,
    )


@pytest.mark.parametrize("option", TRUNCATIONS)
@pytest.mark.parametrize("backend", params())
def test_engine_and_trainer_agree_on_logprobs(model_path: Path, backend: str, option: str) -> None:
    truncation = Truncation(**TRUNCATIONS[option])
    _, found = generate(
        model_path, backend, [ask(rollout) for rollout in range(6)], truncation=truncation
    )
    sequences = [sequence_of(done) for done in found]
    sampled = torch.from_numpy(np.concatenate([s.logprobs for s in sequences]))
    model = reference(model_path)
    with torch.no_grad():
        whole = output_logprobs(model, sequences, 0.7, "padded")
        for chunk in (None, 16):
            ours = output_logprobs(
                model, sequences, 0.7, "padded", chunk=chunk, truncation=truncation
            )
            gaps = (ours - sampled).abs()
            assert gaps.max() < GAP and gaps.mean() < MEAN_GAP
    assert (whole - sampled).abs().max() > 100 * GAP, "without the truncation they differ"


@pytest.mark.parametrize("option", TRUNCATIONS)
def test_truncation_leaves_the_tokens_that_a_sorted_list_leaves(option: str) -> None:
    keys = {"top_p": 1.0, "top_k": VOCABULARY, "min_p": 0.0, **TRUNCATIONS[option]}
    torch.manual_seed(0)
    for row in 2 * torch.randn(50, VOCABULARY):
        probabilities = torch.softmax(row.double(), -1)
        order = probabilities.argsort(descending=True).tolist()
        first = probabilities[order[0]]
        left = [t for t in order if probabilities[t] >= keys["min_p"] * first][: keys["top_k"]]
        mass = probabilities[left].sum()
        kept, filled = [], 0.0
        for token in left:
            if filled >= keys["top_p"] * float(mass):
                break
            kept.append(token)
            filled += float(probabilities[token])
        cut = truncated(row[None], Truncation(**TRUNCATIONS[option]))[0]
        assert set(kept) == set(torch.nonzero(cut > -1e8)[:, 0].tolist())


def test_the_sampled_token_stays_whatever_the_trainers_logits_are() -> None:
    logits = torch.tensor([[5.0, 4.0, -3.0, -4.0]], requires_grad=True)
    least = torch.tensor([3])
    logprob = token_logprobs(logits, least, 1.0, Truncation(top_k=2))
    kept = torch.log_softmax(logits[:, [0, 1, 3]], -1)[:, 2]
    torch.testing.assert_close(logprob, kept)
    (gradient,) = torch.autograd.grad(logprob.sum(), logits)
    assert gradient[0, 2] == 0 and gradient.isfinite().all()


def test_the_entropy_is_that_of_the_tokens_that_remain() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    entropy = token_entropies(logits, 1.0, Truncation(top_k=2), torch.tensor([0]))
    remaining = torch.softmax(logits[0, :2], -1)
    torch.testing.assert_close(entropy[0], -(remaining * remaining.log()).sum())
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert gradient.isfinite().all() and (gradient[0, 2:] == 0).all()


@pytest.mark.parametrize("backend", params())
def test_a_stop_string_ends_a_rollout_with_the_token_that_completes_it(
    model_path: Path, backend: str
) -> None:
    """First see what comes without one, then end the same rollouts at two of their characters."""
    asked = [ask(rollout, 80, seed=rollout) for rollout in range(4)]
    _, free = generate(model_path, backend, asked)
    stop = SYMBOLS[tokens_of(free[0])[20]] + SYMBOLS[tokens_of(free[0])[21]]
    _, found = generate(model_path, backend, asked, stop=(stop,))
    assert any(done.finish == "stop" for done in found)
    for done in found:
        text = "".join(SYMBOLS[token] for token in tokens_of(done))
        logprobs = read_block(done.output)[1]
        assert len(logprobs) == len(text)
        if done.finish == "stop":
            assert text.endswith(stop) and stop not in text[:-1]
        else:
            assert stop not in text and len(text) == 80


@pytest.mark.parametrize("backend", params())
def test_a_stop_string_may_begin_in_the_prefix(model_path: Path, backend: str) -> None:
    """Every character ends the rollout after this prefix, and none without it."""
    prefix = (write_block([7], [-1.0], None),)
    stop = tuple(SYMBOLS[7] + second for second in SYMBOLS)
    _, (done,) = generate(model_path, backend, [ask(0, prefix=prefix)], stop=stop)
    assert (len(tokens_of(done)), done.finish) == (1, "stop")


def test_a_stop_string_is_found_at_its_last_token_only() -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    stops = StopStrings(["€.", "##"], Bytes())
    text = list("a€. b".encode())
    assert [stops.ends([], text[:n]) for n in range(len(text) + 1)].index(True) == 5
    assert not stops.ends([], list(b"# # "))
    assert stops.ends(list(b"x#"), list(b"#"))
    assert not StopStrings([], Bytes()).ends([], text)


@pytest.mark.parametrize("backend", params(("static", "vllm")))
def test_a_seed_of_its_own_makes_a_rollout_independent_of_others(
    model_path: Path, backend: str
) -> None:
    _, (alone,) = generate(model_path, backend, [ask(3, seed=33)])
    _, among = generate(model_path, backend, [ask(n, seed=30 + n) for n in (1, 3, 2)])
    assert tokens_of(alone) == tokens_of(among[1]) != tokens_of(among[0])


RUN: dict[str, Any] = {
    "model": {"path": "."},
    "cluster": {"pools": {"box": {"gpu": "cpu", "nodes": 1, "gpus_per_node": 2}}},
    "rollout": {"pool": "box", "replicas": 1, "max_tokens": 8},
    "trainer": {"pool": "box"},
    "algorithm": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
}


def test_replicas_and_trainer_get_the_same_distribution(model_path: Path) -> None:
    run = load_run(
        RUN,
        {"model.path": str(model_path), "rollout.top_k": 5, "rollout.stop_token_ids": [9, 4]},
    )
    configs = RoleConfigs(run)
    configs.end_rollouts_at([4, 2])
    replica, trainer = configs.replica(0, 0, str(model_path)), configs.trainer(0, "cpu")
    assert replica["truncation"] == trainer["truncation"] == {"top_k": 5, "top_p": 1.0, "min_p": 0}
    assert replica["end_tokens"] == [2, 4, 9]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rollout.top_p", 0.0, "rollout.top_p must be in"),
        ("rollout.top_k", 0, "rollout.top_k must be at least 1"),
        ("rollout.stop", ["", "a"], "rollout.stop has an empty text"),
        ("rollout.stop_token_ids", [-1], "rollout.stop_token_ids must be at least 0"),
        ("rollout.repetition_penalty", 1.1, "remove it: a penalty changes each log-probability"),
        ("rollout.stop_token_ids", [VOCABULARY], "below 120, the vocabulary"),
        ("rollout.seed_rollouts", True, "left out for backend transformers"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    model_path: Path, key: str, value: object, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        check_back_ends(load_run(RUN, {"model.path": str(model_path), key: value}))
