"""Read the records of a run's prompts from its data sets; all code reads prompts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.workload_config import HUB, SourceConfig, TemplateConfig, WorkloadConfig
from streamrl.workload.chats import read_prompt
from streamrl.workload.data_files import read_rows
from streamrl.workload.prompt_families import FAMILY
from streamrl.workload.render_limit import render_limit

Record = dict[str, Any]
"""A prompt and the data for its scorer: a row of the data set, with its columns renamed to the run file's fields."""

MOST_EXPECTED = 10**9
EXPECTED = "expected_tokens"  # field with the output tokens that a ranker expects
PROMPT_COLUMNS = {
    "messages": "chat messages",
    "conversations": "a ShareGPT chat",
    "conversation": "a chat",
    "question": "a text",
    "problem": "a text",
    "instruction": "a text",
    "query": "a text",
    "input": "a text",
    "text": "a text",
}
"""Columns of public data sets that may be the prompt, and their content."""


class PromptSource(NamedTuple):
    """The records of one data set."""

    key: str
    """Key of the run file for this data set."""
    name: str
    """Its path, or its name on the hub."""
    records: list[Record]
    is_templated: bool
    """Whether the run file's template builds its prompts as chats."""
    cut: tuple[int, ...] = ()
    """Rows, from 1, whose chats ended with the assistant's answer, which was cut off."""

    @property
    def fields_key(self) -> str:
        """Return the key of the run file that names its columns."""
        return f"{self.key.removesuffix('prompts')}fields"

    @property
    def notes(self) -> list[str]:
        """Return what was changed in the data, one line each."""
        if not self.cut:
            return []
        return [
            f"{self.key}: {len(self.cut)} of {len(self.records)} chats of {self.name} end with the assistant's "
            f"answer (first: row {self.cut[0]}); it was cut off, because a prompt must not contain it"
        ]

    def line(self, index: int) -> str:
        """Return the location of a record for errors: the file and the line, from 1."""
        return f"{self.name}:{index + 1}"


def read_sources(workload: WorkloadConfig) -> list[PromptSource]:
    """Read all data sets of a run; a `ValueError` names the file, line and field."""
    numbered = enumerate(workload.sources)
    return [read_source(source, workload.key(place)) for place, source in numbered]


def read_source(source: SourceConfig, key: str = "workload.prompts") -> PromptSource:
    """Read one data set. `key` is its key in the run file; see `read_sources` for the errors."""
    rows = read_rows(source, key)
    fill = None if source.template is None else _compiled(source.template, key)
    records, cut = [], []
    for number, row in enumerate(rows, start=1):
        line = f"{source.prompts}:{number}"
        record = _renamed(row, source.fields, line)
        if fill is not None:
            record["prompt"] = fill(record, line)
        elif _normalize(record, line, key):
            cut.append(number)
        _check_expected(record, line)
        if source.name is not None:
            record[FAMILY] = source.name
        records.append(record)
    return PromptSource(key, source.prompts, records, fill is not None, tuple(cut))


def family_of(record: Mapping[str, object], source: SourceConfig) -> str:
    """Return the family of a prompt in tables of rankers: its task, its family, or its data set."""
    name = source.prompts.removeprefix(HUB) if source.prompts.startswith(HUB) else None
    return str(record.get("task", record.get(FAMILY, name or Path(source.prompts).stem)))


def _renamed(row: Record, fields: Mapping[str, str], line: str) -> Record:
    """Return a row with the run file's fields added; the original columns stay."""
    return {**row, **{name: _value(row, column, line, name) for name, column in fields.items()}}


def _value(row: Record, column: str, line: str, name: str) -> object:
    if column in row:
        return row[column]
    place: object = row
    for part in column.split("."):
        if not isinstance(place, dict) or part not in place:
            raise ValueError(f"{line}: has no field {column!r}, which fields.{name} names")
        place = place[part]
    return place


def _normalize(record: Record, line: str, key: str) -> bool:
    """Replace a record's prompt by a text or by plain chat messages; return whether an answer was cut off."""
    if "prompt" not in record:
        needs = f'{line}: needs a "prompt": a text, or a list of chat messages'
        raise ValueError(f"{needs}; {_columns_of(record, key)}")
    prompt = read_prompt(record["prompt"], line)
    if isinstance(prompt, str):
        record["prompt"] = prompt
        return False
    record["prompt"] = prompt.messages
    return prompt.num_cut > 0


def _columns_of(record: Record, key: str) -> str:
    """Return which columns a record has, and how to name the one that is the prompt."""
    field = f"{key.removesuffix('prompts')}fields.prompt"
    known = next((name for name in PROMPT_COLUMNS if name in record), None)
    if known is not None:
        return f'its column "{known}" has {PROMPT_COLUMNS[known]}: set {field} = "{known}"'
    return f"name the column with {field}; its columns are {', '.join(record)}"


def _check_expected(record: Record, line: str) -> None:
    expected = record.get(EXPECTED, 1)
    is_number = isinstance(expected, int | float) and not isinstance(expected, bool)
    if not is_number or not 1 <= expected <= MOST_EXPECTED:
        raise ValueError(
            f"{line}: {EXPECTED} must be from 1 to {MOST_EXPECTED:.0e}, got {shown(expected)}"
        )


# Templates ----------------------------------------------------------------------------------------


def _compiled(template: TemplateConfig, key: str) -> Callable[[Record, str], list[Record]]:
    """Return a function that builds chat messages from a record; it takes the line for errors."""
    environment = SandboxedEnvironment(undefined=StrictUndefined, finalize=_insertable)
    section = f"{key.removesuffix('prompts')}template"
    _check_uses_record(environment, template, f"{section}.user")
    messages: list[tuple[str, Template]] = []
    for role, text in (("system", template.system), ("user", template.user)):
        try:
            if text is not None:
                messages.append((role, environment.from_string(text)))
        except TemplateError as error:
            raise ValueError(
                f"{section}.{role} is not a Jinja template: {error}, got {shown(text)}"
            ) from None

    def fill(record: Record, line: str) -> list[Record]:
        return [
            {"role": role, "content": _rendered(made, record, line, f"{section}.{role}")}
            for role, made in messages
        ]

    return fill


def _check_uses_record(
    environment: SandboxedEnvironment, template: TemplateConfig, key: str
) -> None:
    """Raise `RunError` if all prompts of a template are the same text, since it reads no field of a record."""
    texts = [text for text in (template.system, template.user) if text is not None]
    try:
        used = [find_undeclared_variables(environment.parse(text)) for text in texts]
    except TemplateError:
        return  # it is refused with its place when it is compiled
    if not any(used):
        text = (
            f"{key} {shown(template.user)} has no field of a record, so every prompt would be this text: write a field "
            'in double braces, such as "{{ prompt }}"'
        )
        raise RunError(key, template.user, text=text)


def _rendered(template: Template, record: Record, line: str, key: str) -> str:
    try:
        with render_limit("one prompt", f"Check the loops of {key}"):
            return template.render(record)
    except (
        Exception
    ) as error:  # an expression can raise anything: TypeError, ZeroDivisionError, ...
        raise ValueError(f"{line}: {key} cannot be filled in: {error}") from None


def _insertable(value: object) -> object:
    """Return a value that can be inserted into a text as it is.

    Raises:
        TypeError: the value is something else, such as a list of messages.
    """
    if isinstance(value, str | int | float | StrictUndefined):
        return value
    raise TypeError(f"must be a text or a number, got {shown(value)}")
