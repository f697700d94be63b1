"""Find the tokens that end a rollout in all files of a model that name them.

Three files can name one, and they often disagree:

| file                                          | key or content                      |
|-----------------------------------------------|-------------------------------------|
| generation_config.json, otherwise config.json | `eos_token_id`                      |
| tokenizer_config.json                         | `eos_token`                         |
| the chat template                             | special token after a model's turn  |

If one of them were ignored, the rollouts of a model that writes its token would run to `rollout.max_tokens`. So all of
them end a rollout, and each disagreement is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError

from streamrl.executor.chat_template import render
from streamrl.runfile.errors import RepeatedKeyError, RunError, unique_keys
from streamrl.runfile.reading import parse_json, read_text

EOS = "eos_token_id"
GENERATION, CONFIG = "generation_config.json", "config.json"
TURN = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})


class TurnEnds(NamedTuple):
    """The tokens that end a rollout."""

    tokens: frozenset[int]
    notes: tuple[str, ...]
    """Disagreements between files, one line each."""

    @classmethod
    def of(
        cls,
        directory: str,
        tokenizer: Any,
        arguments: Mapping[str, object] = MappingProxyType({}),
        *,
        has_chats: bool,
    ) -> TurnEnds:
        """Read the files of a Hugging Face directory.

        Args:
            directory: the directory.
            tokenizer: its tokenizer.
            arguments: arguments of its chat template.
            has_chats: whether the chat template renders prompts.
        """
        file, declared = _declared(Path(directory))
        own = getattr(tokenizer, EOS, None)
        of_tokenizer = frozenset(() if own is None else [own])
        of_template = frozenset(_of_template(tokenizer, arguments) if has_chats else ())
        notes = _notes(tokenizer, file, declared, of_tokenizer, of_template)
        return cls(declared | of_tokenizer | of_template, tuple(notes))


def _notes(
    tokenizer: Any,
    file: str,
    declared: frozenset[int],
    of_tokenizer: frozenset[int],
    of_template: frozenset[int],
) -> Iterator[str]:
    known = declared | of_tokenizer
    if not known | of_template:
        yield "model.path: no file names a token that ends a rollout, so every rollout has rollout.max_tokens tokens"
    if missing := of_tokenizer - declared:
        says = f"names {_shown(tokenizer, declared)}" if declared else "names none"
        yield (
            f"model.path: {_shown(tokenizer, missing)} of the tokenizer (eos_token) also ends rollouts, but {file} "
            f"(eos_token_id) {says}; add it there if other programs use this model"
        )
    if missing := of_template - known:
        yield (
            f"model.path: {_shown(tokenizer, missing)} of the chat template also ends rollouts, but {file} and the "
            f"tokenizer name {_shown(tokenizer, known) or 'none'}; add it to eos_token_id there"
        )


def _declared(directory: Path) -> tuple[str, frozenset[int]]:
    """Return the ids of the first file that names some, and the name of the file."""
    is_there = (directory / GENERATION).is_file()
    for name in (GENERATION, CONFIG):
        try:
            text = read_text(directory / name)
            found = parse_json(text, unique_keys).get(EOS)
        except RepeatedKeyError as error:
            told = f"model.path: {directory / name}: {error}"
            raise RunError("model.path", str(directory), text=told) from None
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            return name, frozenset(each for each in ids if isinstance(each, int))
    return GENERATION if is_there else CONFIG, frozenset()


def _of_template(tokenizer: Any, arguments: Mapping[str, object]) -> Iterator[int]:
    """Yield the last special token that the chat template puts after a turn of the model, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        question = render(tokenizer, TURN[:1], add_generation_prompt=True, **arguments)
        whole = render(tokenizer, TURN, add_generation_prompt=False, **arguments)
    except (TemplateError, TypeError, LookupError, ValueError):
        return
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if token.special}
    special |= set(getattr(tokenizer, "all_special_ids", ()))
    shared = next(
        (at for at, (one, other) in enumerate(zip(question, whole, strict=False)) if one != other),
        None,
    )
    answer = whole[len(question) if shared is None else shared :]
    yield from [each for each in answer if each in special][-1:]


def _shown(tokenizer: Any, ids: frozenset[int]) -> str:
    """Return tokens as text with their ids."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(each)} ({each})" for each in sorted(ids))
