"""Check before a run that prompts have the fields that their scorers need, and check the reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from streamrl.executor.verifier.scorers import (
    OWN_FIELDS,
    SIGNATURES,
    Scorer,
    field_of,
    is_scored,
    make_scorer,
)
from streamrl.executor.verifier.verifier import Verifier
from streamrl.hardware.hugging_face import weight_problems
from streamrl.hardware.resolved import reward_model_key
from streamrl.runfile.errors import shown, unique_keys
from streamrl.runfile.reading import parse_json, read_text
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.runfile.scorer_choice import function_of
from streamrl.runfile.workload_config import HUB, WorkloadConfig
from streamrl.workload.prompt_families import FAMILY
from streamrl.workload.prompt_records import PromptSource, Record, read_sources

OF_TOKENS, OF_SEQUENCES = "ForTokenClassification", "ForSequenceClassification"


def check_reward_model(verifier: VerifierConfig) -> None:
    """Raise `ValueError` if a local reward model is unusable; a replica checks a model from the hub."""
    reward = verifier.reward_model
    if reward is None or reward.model is None or reward.model.startswith(HUB):
        return
    key, path = reward_model_key(verifier), Path(reward.model)
    try:
        text = read_text(path / "config.json")
        table = parse_json(text, unique_keys)
        names = [str(name) for name in table.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{key}: {path} has no readable config.json: {error}") from None
    kind = OF_SEQUENCES if reward.step_end is None else OF_TOKENS
    if not any(name.endswith(kind) for name in names):
        found = ", ".join(names) or "none"
        raise ValueError(f"{key}: {path} must have an architecture ...{kind}, got {found}")
    for problem in weight_problems(path):
        raise ValueError(f"{key}: {path} {problem}")


SHOWN = 3
"""Maximum number of lines that an error names."""


class MissingFields(NamedTuple):
    """Lines of a prompts file that lack all of some alternative fields."""

    fields: tuple[str, ...]
    lines: list[int]
    """Line numbers, from 1."""

    def say(self, source: PromptSource) -> str:
        """Return an error text with the field and the first lines that lack it."""
        names = " or ".join(map(repr, self.fields))
        more = ", ..." if len(self.lines) > SHOWN else ""
        shown = ", ".join(map(str, self.lines[:SHOWN])) + more
        return f"{source.key}: {len(self.lines)} lines of {source.name} have no {names} (lines {shown})"


def find_missing_fields(
    source: PromptSource,
    wanted: Iterable[tuple[str, ...]],
    counts: Callable[[Record], bool] = lambda record: True,
) -> Iterator[MissingFields]:
    """Yield missing fields: each record for which `counts` is true needs one field of every tuple."""
    for fields in wanted:
        numbered = enumerate(source.records, start=1)
        lines = [
            number
            for number, record in numbered
            if counts(record) and all(field_of(record, name) is None for name in fields)
        ]
        if lines:
            yield MissingFields(fields, lines)


def check_prompts(verifier: VerifierConfig, workload: WorkloadConfig) -> None:
    """Raise `ValueError` if the run's scorers cannot score every rollout of every prompt."""
    check_sources(verifier, read_sources(workload))


def check_sources(verifier: VerifierConfig, sources: Sequence[PromptSource]) -> None:
    """Raise `ValueError` if scorers cannot score every rollout of every prompt of data sets."""
    for source in sources:
        _check_all_are_scored(source, verifier.rewards)
    for number, reward in enumerate(verifier.rewards):
        scorer, key = make_scorer(reward), verifier.key(number)
        for source in sources:
            for lack in find_missing_fields(
                source, scorer.fields, partial(is_scored, reward=reward)
            ):
                field = f"{source.fields_key}.{lack.fields[-1]}"
                columns = ", ".join(source.records[0])
                raise ValueError(
                    f"{lack.say(source)}: {key} {reward.scorer!r} needs it; name its column in {field} (columns: {columns})"
                )
        _check_records(sources, reward, scorer)
    _try_scorers(verifier, sources)


def _check_all_are_scored(source: PromptSource, rewards: Sequence[RewardConfig]) -> None:
    """Reject a prompt that no reward applies to: all its rollouts would have reward 0."""
    for at, record in enumerate(source.records):
        if not any(is_scored(record, reward) for reward in rewards):
            raise ValueError(
                f"{source.key}: {source.line(at)}: no verifier.reward applies to its family {shown(record.get(FAMILY))}"
            )


def _check_records(sources: Iterable[PromptSource], reward: RewardConfig, scorer: Scorer) -> None:
    """Reject records that have all fields but still cannot be scored."""
    check = scorer.make_check()
    records = ((source, at) for source in sources for at in range(len(source.records)))
    scored = (each for each in records if is_scored(each[0].records[each[1]], reward))
    for source, at in islice(scored, scorer.most_checked):
        if (complaint := check(source.records[at])) is not None:
            remedy = complaint.replace(OWN_FIELDS, source.fields_key)
            raise ValueError(f"{source.key}: {source.line(at)}: {remedy}")


MOST_TRIED = 16
"""Maximum records of a data set whose own answers are scored before a run, one for each task."""


def _try_scorers(verifier: VerifierConfig, sources: Iterable[PromptSource]) -> None:
    """Score own answers of records in a worker, with functions of the user and with scorers that evaluate.

    The import of a function may fail, or the sandbox may block it. A record may have an answer that its scorer rejects.
    """
    made = enumerate(map(make_scorer, verifier.rewards))
    places = [place for place, scorer in made if scorer.must_win or not scorer.is_own]
    trials = list(_trials(verifier, places, sources))
    if trials:
        asyncio.run(_try_out(verifier, trials))


class _Trial(NamedTuple):
    """One record that is scored by one scorer before a run."""

    place: int
    record: Record
    line: str


def _trials(
    verifier: VerifierConfig, places: Iterable[int], sources: Iterable[PromptSource]
) -> Iterator[_Trial]:
    for place, source in product(places, sources):
        reward = verifier.rewards[place]
        scorer = make_scorer(reward)
        scored: Iterator[int] = (
            at for at, each in enumerate(source.records) if is_scored(each, reward)
        )
        if not scorer.is_own:
            scored = islice(scored, 1)
        else:
            answered = (at for at in scored if scorer.expected(source.records[at]) is not None)
            scored = islice(_first_of_tasks(source, answered), MOST_TRIED)
        for at in scored:
            yield _Trial(place, source.records[at], source.line(at))


def _first_of_tasks(source: PromptSource, places: Iterable[int]) -> Iterator[int]:
    """Yield the places of records whose task no record before them has."""
    seen: set[str] = set()
    for at in places:
        task = str(source.records[at].get("task"))
        if task not in seen:
            seen.add(task)
            yield at


async def _try_out(config: VerifierConfig, trials: Iterable[_Trial]) -> None:
    with closing(Verifier(config)) as verifier:
        for place, record, line in trials:
            try:
                await verifier.try_out(place, record)
            except RuntimeError as error:
                reward, key = config.rewards[place], config.key(place)
                text = f"{key}: {reward.scorer} cannot score {line}: {error}"
                raise ValueError(f"{text}{_other_signature(reward, str(error))}") from None


def _other_signature(reward: RewardConfig, error: str) -> str:
    """Return how to name the signature of a function that was called with wrong arguments; "" for another error."""
    function = function_of(reward.scorer)
    if function is None or not error.startswith(f"TypeError: {function.name}() "):
        return ""
    others = " or ".join(f'"{name}"' for name in SIGNATURES if name != reward.signature)
    return (
        f"; a function with the signature of another framework needs signature={others}: "
        f"--set 'verifier.reward=[{{scorer=\"{reward.scorer}\", signature=...}}]' instead of another scorer"
    )
