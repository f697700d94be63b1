"""Special tokens of prompts and the ends of turns, where the files of a model disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from streamrl.executor.end_of_turn import TurnEnds
from streamrl.executor.launchers.role_configs import RoleConfigs, sampling_seed
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.tokens import decode_ids
from streamrl.runfile.errors import RunError
from tests.test_execute import real_run

WORDS = ("<pad>", "<bos>", "<end>", "<im_start>", "<im_end>", "a", "b", "user", "assistant", "<n>")
BOS, END, IM_END = 1, 2, 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<im_start>{{ m.role }} {{ m.content }} <im_end> <n> {% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant {% endif %}"
)


def tokenizer(
    around: str = "<bos> $A", *, template: str | None = None, end: str | None = "<end>"
) -> Any:
    """Return a tokenizer of words; `around` is what it adds to every text."""
    core = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    pairs = [(word, WORDS.index(word)) for word in ("<bos>", "<end>")]
    core.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=around, special_tokens=pairs
    )
    ends = {} if end is None else {"eos_token": end}
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        additional_special_tokens=["<im_start>", "<im_end>"],
        **ends,
    )
    made.chat_template = template
    return made


def ids_of(directory: Path, prompt: Any, made: Any) -> list[int]:
    run = real_run(directory)
    (directory / "prompts.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "a"}))
    (ids,) = PromptWorkload(run, made).prompts
    return decode_ids(ids).tolist()


# Beginnings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", ["<bos> $A", "<bos> $A <end>", "$A", "$A <end>"])
@pytest.mark.parametrize("text", ["a b", "<bos> a b"])
def test_a_prompt_has_one_beginning_and_no_end(around: str, text: str, tmp_path: Path) -> None:
    found = ids_of(tmp_path, text, tokenizer(around))
    has_beginning = "<bos>" in around or "<bos>" in text
    assert found == [*([BOS] if has_beginning else []), 5, 6]


def test_a_beginning_of_several_tokens_is_not_doubled(tmp_path: Path) -> None:
    made = tokenizer("<bos> <end> $A")
    assert ids_of(tmp_path, "<bos> <end> a", made) == [BOS, END, 5]
    assert ids_of(tmp_path, "<end> a", made) == [BOS, END, END, 5]


def test_a_chat_has_the_one_beginning_of_its_template(tmp_path: Path) -> None:
    found = ids_of(tmp_path, [{"role": "user", "content": "a"}], tokenizer(template=TEMPLATE))
    assert found.count(BOS) == 1 and found[0] == BOS


# Ends ---------------------------------------------------------------------------------------------


def test_the_chat_template_gets_the_arguments_of_the_run(tmp_path: Path) -> None:
    run = real_run(tmp_path, **{"workload.template_arguments": {"thinks": False, "word": "b"}})
    prompt = [{"role": "user", "content": "a"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "a"}))
    ends = " {% if thinks is defined and not thinks %}{{ word }}{% endif %}"
    (ids,) = PromptWorkload(run, tokenizer(template=TEMPLATE + ends)).prompts
    assert decode_ids(ids).tolist() == [1, 3, 7, 5, 4, 9, 3, 8, 6]


def test_overlong_prompts_are_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    def workload(**keys: Any) -> PromptWorkload:
        run = real_run(tmp_path, **{"workload.max_prompt_tokens": 50, **keys})
        lines = [{"prompt": "a " * n, "answer": "a"} for n in (10, 90, 20, 120, 30)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return PromptWorkload(run, tokenizer())

    with pytest.raises(ValueError, match=r"jsonl:2: 91 prompt tokens, .*overlong_prompts=filter"):
        workload()
    filtered = workload(**{"workload.overlong_prompts": "filter"})
    assert {filtered.line(group) for group in range(30)} == {0, 2, 4}
    (note,) = (note for note in filtered.notes if "left out" in note)
    assert "2 of 5 prompts" in note and "longest: 121" in note
    none = {"workload.max_prompt_tokens": 5, "workload.lengths.prompt_tokens": 1}
    with pytest.raises(ValueError, match=r"5 of 5 prompts.*no prompt is left"):
        workload(**none, **{"workload.overlong_prompts": "filter"})


def ends_of(directory: Path, made: Any, *, has_chats: bool = True, **files: Any) -> TurnEnds:
    for name, end in files.items():
        (directory / f"{name}.json").write_text(json.dumps({"eos_token_id": end}))
    return TurnEnds.of(str(directory), made, has_chats=has_chats)


def test_files_that_agree_are_no_news(tmp_path: Path) -> None:
    made = tokenizer(template=TEMPLATE, end="<im_end>")
    assert ends_of(tmp_path, made, generation_config=[IM_END, END]) == ({IM_END, END}, ())
    assert ends_of(tmp_path, made, generation_config=None, config=IM_END) == ({IM_END}, ())


@pytest.mark.parametrize("declared", [None, BOS])
def test_the_end_of_the_tokenizer_ends_a_rollout_and_is_named(
    declared: int | None, tmp_path: Path
) -> None:
    found = ends_of(tmp_path, tokenizer(), generation_config=declared)
    assert END in found.tokens and found.tokens <= {END, BOS}
    (note,) = found.notes
    assert "<end> (2) of the tokenizer" in note
    assert ("names none" if declared is None else "names <bos> (1)") in note


def test_the_end_of_the_chat_template_ends_a_rollout_and_is_named(tmp_path: Path) -> None:
    made = tokenizer(template=TEMPLATE)
    found = ends_of(tmp_path, made, generation_config=END)
    assert found.tokens == {END, IM_END}
    (note,) = found.notes
    assert "<im_end> (4) of the chat template" in note and "name <end> (2)" in note
    assert ends_of(tmp_path, made, has_chats=False) == ({END}, ())


def test_a_model_without_any_end_is_named(tmp_path: Path) -> None:
    found = ends_of(tmp_path, tokenizer(end=None), generation_config=None)
    assert not found.tokens and "every rollout has rollout.max_tokens tokens" in found.notes[0]


def test_a_file_that_names_the_end_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "eos_token_id": 4}')
    with pytest.raises(RunError, match=r"generation_config\.json: the key 'eos_token_id' appears"):
        TurnEnds.of(str(tmp_path), tokenizer(), has_chats=True)


def test_replicas_get_the_ends_of_all_files(tmp_path: Path) -> None:
    run = real_run(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    workload = PromptWorkload(run, tokenizer())
    assert workload.end_tokens == {END} and "of the tokenizer" in workload.notes[0]
    configs = RoleConfigs(run)
    configs.end_rollouts_at(workload.end_tokens)
    assert configs.replica(0, 0, str(tmp_path))["end_tokens"] == [END]


# Noise --------------------------------------------------------------------------------------------


def test_a_resumed_run_has_other_sampling_noise_than_its_first_start(tmp_path: Path) -> None:
    run = real_run(tmp_path, seed=7)
    starts = 1

    def seed_of(replica: int) -> Any:
        return RoleConfigs(run, lambda: starts).replica(replica, 0, str(tmp_path))["seed"]

    assert [seed_of(replica) for replica in range(3)] == [7, 8, 9]
    seeds = {sampling_seed(7, replica, start) for replica in range(9) for start in range(1, 9)}
    assert len(seeds) == 81 - 9
    starts = 2
    assert seed_of(0) not in (7, 8, 9) and seed_of(0) == sampling_seed(7, 0, 2)
