"""Prompts whose outputs' lengths are known: from an executed run, or from a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.ranker.score_files import PROMPT, TOKENS, read_table
from streamrl.runfile.reading import decode_run
from streamrl.workload.data_files import read_lines
from streamrl.workload.prompt_records import family_of, read_sources

TEXT = ("prompt", "text")  # columns that may hold a prompt's text, first one found


@dataclass(slots=True)
class KnownPrompt:
    """One prompt and what outputs to it took."""

    id: str
    family: str
    text: str | None = None
    lengths: list[int] = field(default_factory=list)
    """Output tokens, in order of generation."""


def read_known(source: Path, model: str | None = None) -> list[KnownPrompt]:
    """Read the directory of an executed run, or a CSV file with prompt_id and output_tokens, text and family if any.

    Args:
        source: the directory or file.
        model: of a file with several models, whose lengths.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    if source.is_dir():
        if model is not None:
            raise ValueError(f"--model: {source} is a run, which has one model")
        return list(_of_run(source))
    table = read_table(source, model)
    table.must_have(PROMPT, TOKENS)
    found: dict[str, KnownPrompt] = {}
    text = next((column for column in TEXT if column in table.columns), None)
    for index, row in enumerate(table.rows):
        tokens = table.tokens(index)
        if tokens is None:
            continue
        name = row[PROMPT]
        if name not in found:
            found[name] = KnownPrompt(name, table.family(index), row[text] if text else None)
        found[name].lengths.append(tokens)
    if not found:
        raise ValueError(f"{source} has no lengths")
    return list(found.values())


def _of_run(directory: Path) -> Iterator[KnownPrompt]:
    """Yield the prompts of a run that finished, in order of its data sets."""
    try:
        run = decode_run((directory / "run.json").read_bytes())
    except OSError as error:
        raise ValueError(f"{directory}: no executed run: {error}") from None
    if not run.workload.sources:
        raise ValueError(f"{directory}: was simulated: it has no prompts to read")
    sources = zip(run.workload.sources, read_sources(run.workload), strict=True)
    prompts = [
        (family_of(record, source), text_of(record["prompt"]))
        for source, read in sources
        for record in read.records
    ]
    found: dict[int, KnownPrompt] = {}
    for number, row in enumerate(read_lines(directory / "rollouts.jsonl"), start=1):
        line, tokens = row.get("line"), row.get("num_tokens")
        if not isinstance(line, int) or not isinstance(tokens, int) or not line < len(prompts):
            raise ValueError(
                f"{directory / 'rollouts.jsonl'}:{number}: no line and num_tokens of a prompt"
            )
        known = found.setdefault(line, KnownPrompt(str(line), *prompts[line]))
        known.lengths.append(tokens)
    if not found:
        raise ValueError(f"{directory}: no rollout has finished")
    yield from (found[line] for line in sorted(found))


def text_of(prompt: object) -> str:
    """Return what a prompt says: of chat messages their contents."""
    if isinstance(prompt, list):
        return "\n".join(str(each.get("content", "")) for each in prompt if isinstance(each, dict))
    return str(prompt)


def families_of(prompts: Iterable[KnownPrompt]) -> dict[str, list[KnownPrompt]]:
    """Return the prompts of each task family."""
    found: dict[str, list[KnownPrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.family, []).append(prompt)
    return found
