"""Router replay: experts that an engine recorded, their files, and the trainer's passes that take them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.executor.expert_choices import (
    UNKNOWN,
    decode_choices,
    encode_choices,
    end_of,
    merge_choices,
)
from streamrl.executor.roles import Completion, Request, Sample
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.router_replay import Routers, routers_of
from streamrl.executor.token_files import merge, read_choices, read_records
from streamrl.executor.tokens import TokenSegment, encode_ids, read_blocks, write_block
from streamrl.executor.trainer.learner import Learner, load_learner
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.hardware.profiles import load_gpu
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.targets import execute_limits
from tests.runs import small_run
from tests.test_ranks import ALONE, Shape, run, shapes, trainer
from tests.tiny_model import SHAPE, WIDE_HEADS

VOCABULARY = 48
NUM_LAYERS = int(SHAPE["num_hidden_layers"])
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16},
    "deepseek_v3": {**GROUPS, **LATENT, "q_lora_rank": None, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
}
"""A kind of router each: softmax over all experts, with and without a rest; groups; softmax over the chosen ones."""


def mixture(kind: str, **changes: Any) -> Any:
    """Return a random model with 8 experts a layer, 2 for each token, whose scores are close to each other."""
    shape = {**SHAPE, "vocab_size": VOCABULARY, "initializer_range": 0.3, "eos_token_id": None}
    more = {"num_experts_per_tok": 2, "max_position_embeddings": 256}
    if kind == "deepseek_v3":
        more["num_key_value_heads"] = shape["num_attention_heads"]
    config = AutoConfig.for_model(kind, **{**shape, **more, **MIXTURES[kind], **changes})
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    model = models.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            weight.data *= 0.1
    return model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    mixture("qwen3_moe").save_pretrained(path)
    return path


# Routers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MIXTURES)
def test_replayed_experts_replace_those_of_the_router(kind: str) -> None:
    model, ids = mixture(kind), torch.arange(12)[None]
    with torch.no_grad():
        plain = model(ids).logits
        routers = Routers(model)
        assert torch.equal(model(ids).logits, plain)
        own = routers.take()
        assert own.shape == (12, NUM_LAYERS, 2)
        routers.replay(own.flip(-1))  # the weights follow the experts
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-5)
        others = (own + 1) % 8
        routers.replay(others)
        assert not torch.allclose(model(ids).logits, plain, atol=1e-3)
        assert torch.equal(routers.take(), others)
        others[3:] = UNKNOWN
        routers.replay(others)
        mixed = model(ids).logits
        routers.replay(torch.full_like(own, UNKNOWN))
        assert torch.equal(model(ids).logits, plain)
        assert not torch.allclose(mixed[:, :3], plain[:, :3], atol=1e-3)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm.router_replay must be false: Linear has no"):
        Routers(torch.nn.Linear(2, 2))


# Files --------------------------------------------------------------------------------------------


def test_choices_of_several_attempts_are_merged_and_the_first_one_counts() -> None:
    first = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    parts = [encode_choices(0, first), b"", encode_choices(2, first + 50)]
    assert end_of(parts) == 5
    merged = merge_choices(parts, 7)
    assert merged is not None
    assert merged[:, 0, 0].tolist() == [0, 4, 8, 54, 58, UNKNOWN, UNKNOWN]
    assert merge_choices([b""], 7) is None and end_of([]) == 0
    start, again = decode_choices(parts[2])
    assert start == 2 and len(parts[0]) == 8 + first.size * 2 and (again == first + 50).all()
    with pytest.raises(ValueError, match="damaged expert choices"):
        decode_choices(parts[0][:-1])
    with pytest.raises(ValueError, match=r"\(2, 1\) and \(2, 2\)"):
        merge_choices([parts[0], encode_choices(0, first[:, :, :1])], 7)


# Engine -------------------------------------------------------------------------------------------


Attempts = list[tuple[Request, Completion]]


@pytest.fixture(scope="module")
def generated(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Attempts:
    """The attempts of an engine of this process."""
    return attempts_of(model_path, tmp_path_factory.mktemp("tokens"))


def attempts_of(model: Path, directory: Path, **changes: Any) -> Attempts:
    """Return the two attempts of a rollout, and one attempt of another in the same batch."""
    limits = {"max_running": 4, "max_tokens": 100, "max_prompt_tokens": 16, **changes}
    replica = ReplicaWorker(
        ReplicaSettings(model=str(model), temperature=1.0, seed=0, router_replay=True, **limits)
    )

    def ask(rollout: int, most: int, **fields: Any) -> Request:
        path = str(directory / f"{rollout}.{len(fields)}")
        prompt = encode_ids(range(1, 6))  # the same one: an engine may compute it once
        return Request(
            rollout=rollout, prompt=prompt, priority=0, max_tokens=most, output_path=path, **fields
        )

    async def go() -> Attempts:
        await replica.start(None, 0)
        both = ask(0, 40), ask(1, 100)
        first, other = await asyncio.gather(*map(replica.generate, both))
        again = ask(0, 100, prefix=(first.output,))
        second = await replica.generate(again)
        await replica.stop()
        return [(both[0], first), (again, second), (both[1], other)]

    return asyncio.run(asyncio.wait_for(go(), 60))


def sample_of(*attempts: tuple[Request, Completion]) -> Sample:
    return Sample(
        rollout=attempts[0][0].rollout,
        prompt=attempts[0][0].prompt,
        output=tuple(done.output for _, done in attempts),
        segments=(TokenSegment(sum(d.output.num_tokens for _, d in attempts), is_policy=True),),
        advantage=1.0,
    )


def check_experts(model: Any, found: Attempts) -> None:
    """Assert that the recorded experts are those that a model chooses in a whole forward pass."""
    first, second, other = found
    routers = Routers(model)
    for attempts in ([first, second], [other]):
        sample = sample_of(*attempts)
        prompt = np.frombuffer(sample.prompt, np.int32).tolist()
        tokens = prompt + read_blocks(sample.output)[0].tolist()
        with torch.no_grad():
            model(torch.tensor([tokens[:-1]]))
        merged = merge_choices(read_choices(sample.output), len(tokens) - 1)
        assert merged is not None
        assert (np.sort(merged, -1) == np.sort(routers.take().numpy(), -1)).all()
    starts = [decode_choices(data)[0] for data in read_choices([first[1].output, second[1].output])]
    assert starts == [0, 5 + 40 - 1], "a later attempt records only what is new"


def test_an_engine_records_the_experts_of_a_whole_forward_pass(generated: Attempts) -> None:
    check_experts(mixture("qwen3_moe"), generated)
    _, second, _ = generated
    (record,) = read_records(str(second[1].output.path))
    whole = merge([record], 0, 40)
    assert whole is not None and whole.head.experts == record.head.experts


@pytest.mark.vllm
def test_vllm_records_the_experts_of_a_whole_forward_pass(tmp_path: Path) -> None:
    """VLLM tells them with its V2 model runner, which a process of its own has on CPUs."""
    done = subprocess.run(
        [sys.executable, "-c", IN_VLLM, str(tmp_path)],
        cwd=ROOT,
        env={
            **os.environ,
            **{"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "v2_runner"), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


ROOT = Path(__file__).parents[1]
IN_VLLM = """
import sys
from pathlib import Path
from tests.test_router_replay import check_vllm
if __name__ == "__main__":
    check_vllm(Path(sys.argv[1]))
"""


def check_vllm(directory: Path) -> None:
    """Assert the same of vLLM, whose kernels for CPUs take no heads of less than 32."""
    shape = {**WIDE_HEADS, "head_dim": 32}
    mixture("qwen3_moe", **shape).save_pretrained(directory / "model")
    found = attempts_of(directory / "model", directory, backend="vllm")
    check_experts(mixture("qwen3_moe", **shape), found)


# Trainer ------------------------------------------------------------------------------------------


def learner(model: Path, **changes: Any) -> Learner:
    settings = {"learning_rate": 0.1, "temperature": 1.0, "correction": None, **changes}
    return load_learner(TrainerSettings(model=str(model), **settings), None)


def with_other_routers(found: Learner) -> None:
    """Change the routers' weights by about as much as bfloat16 rounds them."""
    torch.manual_seed(1)
    for name, weight in found.backend.model.named_parameters():
        if name.endswith("gate.weight"):
            weight.data *= 1 + 0.01 * torch.randn_like(weight)


@pytest.mark.parametrize("how", [{}, {"packing": "padded"}, {"logits_chunk": 8}])
def test_replay_narrows_the_gap_between_engine_and_trainer(
    model_path: Path, generated: Attempts, how: dict[str, Any]
) -> None:
    first, second, other = generated
    samples = [sample_of(first, second), sample_of(other)]
    gaps = []
    for replays in (False, True):
        found = learner(model_path, router_replay=replays, **how)
        with_other_routers(found)
        gaps.append(found.train(samples)["logprob_gap"])
    assert gaps[1] < gaps[0] / 5


@pytest.mark.parametrize("shape", shapes("fsdp2-2", "deepspeed-1-zero-2", "deepspeed-2-zero-3"))
def test_split_trainers_replay_as_one_rank_does(
    model_path: Path, generated: Attempts, tmp_path: Path, shape: Shape
) -> None:
    first, second, other = generated
    samples = [sample_of(first, second), sample_of(other)]
    own = {"temperature": 1.0, "dtype": "bfloat16", "recompute": "full", "correction": "none"}

    async def gap_of(split: Shape, replays: bool) -> float:
        ranks = trainer(str(model_path), tmp_path, split, router_replay=replays, **own)
        async with ranks as (role, _):
            await role.start(None)
            return (await role.train(samples))["logprob_gap"]

    async def go() -> None:
        without, replayed = [await gap_of(shape, each) for each in (False, True)]
        assert replayed < 0.9 * without
        alone = await gap_of(ALONE, True)
        assert replayed == pytest.approx(alone, rel=0.3)  # their roundings in bfloat16 differ

    run(go())


def test_replayed_experts_have_the_gradient_of_the_same_experts(
    model_path: Path, generated: Attempts
) -> None:
    sample, gradients = sample_of(generated[0]), []
    for replays in (False, True):
        found = learner(model_path, router_replay=replays, recompute="full")
        found.train([sample])
        gradients.append(
            {
                n: w.grad.clone()
                for n, w in found.backend.model.named_parameters()
                if w.grad is not None
            }
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)
    assert any("gate" in name and gradient.any() for name, gradient in gradients[1].items())


def test_experts_of_another_model_are_refused(model_path: Path, generated: Attempts) -> None:
    found = learner(model_path, router_replay=True)
    routers = routers_of(found.backend.model)
    assert routers is not None
    with pytest.raises(ValueError, match=f"experts are of 7 layers, the model has {NUM_LAYERS}"):
        routers.replay(torch.zeros(1, 7, 2))
    plain = sample_of(generated[0])
    ids, logprobs = read_blocks(plain.output)
    in_memory = replace(plain, output=(write_block(ids, logprobs, None),))
    assert found.train([in_memory])["rollouts"] == 1, "without recorded experts the router chooses"


# Simulation and refusals --------------------------------------------------------------------------


MIXTURE: dict[str, Any] = {
    "model": {"name": "qwen3-30b-a3b"},
    "cluster.pools.near.gpus_per_node": 8,
    "trainer.tensor_parallel": 8,
    "algorithm.router_replay": True,
}


def test_simulated_passes_copy_the_experts_of_their_tokens() -> None:
    without = Costs.load(small_run({**MIXTURE, "algorithm.router_replay": False}))
    costs = Costs.load(small_run(MIXTURE))
    size = 48 * 8 * 2  # layers, experts of a token, bytes
    seconds = size / load_gpu("h20").host_link
    most = len(costs.decode.base) - 1
    added = costs.decode.base[most] - without.decode.base[most]
    assert most > 1 and added == pytest.approx(most * seconds)
    added = costs.prefill_time(1000, 500_000, 0) - without.prefill_time(1000, 500_000, 0)
    assert added == pytest.approx(1000 * seconds)
    training = costs.training
    assert isinstance(training, TrainingCosts) and min(training.transfer_times) > 0
    assert any("768 bytes a token" in each for each in costs.facts["sources"])


def test_replay_needs_a_mixture_and_an_engine_that_tells_its_experts() -> None:
    with pytest.raises(
        RunError, match=r"algorithm.router_replay must be false: model .* no experts"
    ):
        Costs.load(small_run({"algorithm.router_replay": True}))
    for changes, message in (
        ({"rollout.backend": "static"}, "router_replay must be false for backend static"),
        (
            {"rollout.backend": "vllm", "rollout.shares_prefixes": False},
            "rollout.shares_prefixes must be true for algorithm.router_replay",
        ),
        (
            {"trainer.tensor_parallel": 4, "trainer.context_parallel": 2},
            "trainer.context_parallel must be 1 for algorithm.router_replay",
        ),
    ):
        with pytest.raises(RunError, match=message):
            check_replay_limits(small_run({**MIXTURE, **changes}))


def check_replay_limits(run: Run) -> None:
    execute_limits._refuse(execute_limits._limits_of_replay(run.rollout.kinds, run.trainers))
