"""Read lengths and scores for rankers from CSV files and from the directories of executed runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.runfile.files import read_recorded_run
from streamrl.workload.data_files import parse_number, read_csv, read_lines
from streamrl.workload.prompt_records import family_of, read_sources

FAMILY = (
    "family",
    "source",
    "dataset",
)  # columns that may name a row's task family; the first existing one counts
PROMPT, TOKENS, SCORE, MODEL = "prompt_id", "output_tokens", "score", "model"
MOST_TOKENS = 1e15
"""Largest output length, as in tables of lengths."""


class ScoreFile(NamedTuple):
    """The rows of a CSV file."""

    path: Path
    rows: list[dict[str, str]]

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.rows[0])

    def must_have(self, *columns: str) -> None:
        """Raise `ValueError` with the first of `columns` that is missing."""
        for column in columns:
            if column not in self.rows[0]:
                close = difflib.get_close_matches(column, self.columns, n=1)
                hint = (
                    f"; did you mean {close[0]}?" if close else f" among {', '.join(self.columns)}"
                )
                raise ValueError(f"{self.path}: no column {column!r}{hint}")

    def number(self, index: int, column: str) -> float | None:
        """Return a number, or None if the field is empty; errors count rows from 1."""
        text = self.rows[index][column]
        try:
            value = parse_number(text) if text else None
        except ValueError:
            value = np.nan
        if value is not None and not np.isfinite(value):
            raise ValueError(
                f"{self.path}: row {index + 1}, {column} must be a number, got {text!r}"
            )
        return value

    def tokens(self, index: int) -> int | None:
        """Return the length of a row's output, or None if the field is empty."""
        value = self.number(index, TOKENS)
        if value is not None and not 0 <= value <= MOST_TOKENS:
            text = f"must be a number from 0 to {MOST_TOKENS:.0e}, got {value:g}"
            raise ValueError(f"{self.path}: row {index + 1}, {TOKENS} {text}")
        return None if value is None else int(value)

    def family(self, index: int) -> str:
        """Return the task family of a row; without such a column, the file's name."""
        row = self.rows[index]
        found = next((row[column] for column in FAMILY if row.get(column)), None)
        return found or self.path.name.split(".")[0]


def read_table(path: Path, model: str | None = None) -> ScoreFile:
    """Read a file of scores or lengths; with several models, only the rows of `model`.

    Raises:
        ValueError: the file is wrong; the message names it and the reason.
    """
    rows = read_csv(path)
    names = list(dict.fromkeys(row[MODEL] for row in rows if row.get(MODEL)))
    if model is not None:
        rows = [row for row in rows if row.get(MODEL) == model]
        if not rows:
            close = difflib.get_close_matches(model, names, n=1, cutoff=0.3)
            raise ValueError(
                f"{path}: no rows of model {model!r}; it has {', '.join(close or names)}"
            )
    elif len(names) > 1:
        raise ValueError(
            f"{path} has rows of {len(names)} models, such as {names[0]!r}; name one with --model"
        )
    if not rows:
        raise ValueError(f"{path} has no rows")
    return ScoreFile(path, rows)


def score_columns(scores: ScoreFile, chosen: Sequence[str], has_lengths_apart: bool) -> list[str]:
    """Return the columns with scores: the chosen ones, "score", or all if lengths are in another file."""
    if chosen:
        scores.must_have(*chosen)
        return list(chosen)
    if has_lengths_apart and SCORE not in scores.columns:
        return [c for c in scores.columns if c not in (PROMPT, TOKENS, MODEL, *FAMILY)]
    scores.must_have(SCORE)
    return [SCORE]


def lengths_by_prompt(tables: Iterable[ScoreFile]) -> dict[str, list[int]]:
    """Return the lengths of every prompt's samples.

    Raises:
        ValueError: a file lacks a column, or two files have the same prompt.
    """
    found: dict[str, list[int]] = {}
    for table in tables:
        table.must_have(PROMPT, TOKENS)
        own: dict[str, list[int]] = {}
        for index, row in enumerate(table.rows):
            tokens = table.tokens(index)
            if tokens is not None:
                own.setdefault(row[PROMPT], []).append(tokens)
        for prompt in own:
            if prompt in found:
                raise ValueError(
                    f"{table.path} has lengths of prompt {prompt!r}, but another file has them too; remove one of the two"
                )
        found |= own
    return found


def scores_by_prompt(scores: ScoreFile, chosen: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the scores of every prompt, by column."""
    scores.must_have(PROMPT)
    found: dict[str, dict[str, float]] = {}
    for column in score_columns(scores, chosen, has_lengths_apart=True):
        own = found.setdefault(column, {})
        for index, row in enumerate(scores.rows):
            value = scores.number(index, column)
            if value is not None:
                own[row[PROMPT]] = value
    return found


TEXT = ("prompt", "text")  # columns that may hold a prompt's text; the first existing one counts


@dataclass(slots=True)
class KnownPrompt:
    """One prompt and the lengths of its outputs."""

    id: str
    family: str
    text: str | None = None
    lengths: list[int] = field(default_factory=list)
    """Output tokens, in order of generation."""


def read_known(source: Path, model: str | None = None) -> list[KnownPrompt]:
    """Read prompts and lengths from an executed run's directory or from a CSV file.

    The CSV file has columns prompt_id and output_tokens, and optionally text and family.

    Args:
        source: the directory or file.
        model: the model whose lengths to read, if the file has several.

    Raises:
        ValueError: the file is wrong; the message names it and the reason.
    """
    if source.is_dir():
        if model is not None:
            raise ValueError(f"--model: {source} is a run, which has one model; leave --model out")
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
    """Yield the prompts of a finished run, in order of its data sets."""
    try:
        run = read_recorded_run(directory / "run.json")
    except OSError as error:
        raise ValueError(f"{directory}: not the directory of an executed run: {error}") from None
    if not run.workload.sources:
        raise ValueError(
            f"{directory} is a simulated run, which has no prompts; name an executed run"
        )
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
                f"{directory / 'rollouts.jsonl'}:{number}: needs the keys line and num_tokens of a known prompt"
            )
        known = found.setdefault(line, KnownPrompt(str(line), *prompts[line]))
        known.lengths.append(tokens)
    if not found:
        raise ValueError(f"{directory}: no rollout has finished")
    yield from (found[line] for line in sorted(found))


def text_of(prompt: object) -> str:
    """Return the text of a prompt; for chat messages, their contents."""
    if isinstance(prompt, list):
        return "\n".join(str(each.get("content", "")) for each in prompt if isinstance(each, dict))
    return str(prompt)


def families_of(prompts: Iterable[KnownPrompt]) -> dict[str, list[KnownPrompt]]:
    """Return the prompts of each task family."""
    found: dict[str, list[KnownPrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.family, []).append(prompt)
    return found
