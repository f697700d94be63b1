"""A reward model: what it reads, where it is asked for a score, and which models are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from streamrl.executor.roles import Exchange
from streamrl.executor.verifier.reward_checks import check_reward_model
from streamrl.executor.verifier.reward_model import RewardSettings, ScoringModel
from streamrl.runfile.config import Run
from tests.runs import small_run
from tests.tiny_model import save_tiny_model, save_tiny_reward_model

SYMBOLS = ["<pad>", "<eos>", *"0123456789+= ;"]
EXCHANGES = [
    Exchange(prompt="1+1=", completion="2"),
    Exchange(prompt="11+1=", completion="1+1=2;11+1=12;12"),
    Exchange(prompt="3+4=", completion="7;7"),
]


def ids(text: str) -> list[int]:
    return [SYMBOLS.index(character) for character in text]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tiny models: one that scores wholes, one that scores steps, one that generates."""
    path = tmp_path_factory.mktemp("models")
    save_tiny_reward_model(path / "whole", SYMBOLS)
    save_tiny_reward_model(path / "steps", SYMBOLS, by_token=True, outputs=2)
    save_tiny_model(path / "policy", SYMBOLS)
    return path


def scoring(models: Path, name: str, **changes: Any) -> ScoringModel:
    return ScoringModel(RewardSettings(model=str(models / name), **changes))


def test_a_score_is_the_output_at_the_last_token_whoever_is_scored_beside(models: Path) -> None:
    load: Any = AutoModelForSequenceClassification.from_pretrained
    model = load(models / "whole")
    expected = []
    for each in EXCHANGES:
        tokens = [*ids(each.prompt + each.completion), SYMBOLS.index("<eos>")]
        expected.append(model(input_ids=torch.tensor([tokens])).logits[0, 0].item())
    found = scoring(models, "whole").score(EXCHANGES)
    assert [each.score for each in found] == pytest.approx(expected, abs=1e-5)
    assert [each.num_tokens for each in found] == [6, 22, 8]
    assert len({round(value, 4) for value in expected}) == 3


def test_a_step_is_scored_at_its_last_token_by_the_probability_of_the_second_output(
    models: Path,
) -> None:
    load: Any = AutoModelForTokenClassification.from_pretrained
    model = load(models / "steps")
    tokens = ids("11+1=1+1=2;11+1=12;12;")
    shares = model(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)[:, 1]
    of_steps = [shares[place].item() for place in (10, 18, 21)]
    ways = {"min": min(of_steps), "mean": sum(of_steps) / 3, "last": of_steps[-1]}
    for way, expected in ways.items():
        model_of_way = scoring(models, "steps", step_end=";", over_steps=way)
        assert model_of_way.score(EXCHANGES)[1].score == pytest.approx(expected, abs=1e-5)


def test_what_is_too_long_says_so_and_keeps_no_other_from_its_score(models: Path) -> None:
    long = Exchange(prompt="1+1=", completion="1" * 60)
    found = scoring(models, "whole").score([EXCHANGES[0], long, EXCHANGES[2]])
    assert (
        found[1].score is None
        and found[1].fault == "65 tokens, but the reward model reads at most 64"
    )
    assert found[0].score is not None and found[2].score is not None
    steps = scoring(models, "steps", step_end=";")
    assert steps.score([Exchange(prompt="1", completion=" ")])[0].fault == "nothing to score"


def test_a_pass_holds_no_more_tokens_than_it_may_padding_included(models: Path) -> None:
    reads = {at: ids("1" * length) for at, length in enumerate([3, 20, 4, 9, 40])}
    model = scoring(models, "whole", max_tokens_per_pass=24)
    passes = list(
        model._passes(
            {
                at: model._read(Exchange(prompt="", completion="1" * (len(r) - 1)))
                for at, r in reads.items()
            }
        )
    )
    assert passes == [[4], [1], [3, 2], [0]]
    small, large = (model.score(EXCHANGES), scoring(models, "whole").score(EXCHANGES))
    assert [a.score for a in small] == pytest.approx([b.score for b in large], abs=1e-5)


def test_a_model_that_generates_is_no_reward_model(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy is no reward model: it lacks score\.weight"):
        scoring(models, "policy")
    two = save_tiny_reward_model(tmp_path, SYMBOLS, outputs=2)
    with pytest.raises(ValueError, match="must have one output, got 2"):
        ScoringModel(RewardSettings(model=str(two)))


def with_model(directory: Path, **changes: Any) -> Run:
    reward = {"scorer": "reward-model", "model": str(directory), **changes}
    return small_run(
        {"verifier.reward": [reward], "verifier.pool": "near", "verifier.gpus_per_worker": 1}
    )


def test_a_directory_without_a_reward_model_is_refused_before_a_process_is_started(
    models: Path, tmp_path: Path
) -> None:
    check_reward_model(with_model(models / "whole").verifier)
    check_reward_model(with_model(models / "steps", step_end=";").verifier)
    for directory, changes, says in (
        (
            models / "policy",
            {},
            "must have an architecture ...ForSequenceClassification, got Qwen2ForCausalLM",
        ),
        (
            models / "whole",
            {"step_end": ";"},
            r"\.\.\.ForTokenClassification, got Qwen2ForSequence",
        ),
        (tmp_path, {}, r"has no readable config\.json"),
    ):
        with pytest.raises(ValueError, match=rf"^verifier\.reward\.0\.model: .*{says}"):
            check_reward_model(with_model(directory, **changes).verifier)
