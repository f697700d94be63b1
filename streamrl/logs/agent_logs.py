"""Read the message logs of agents as episodes: tokens of turns and observations, and seconds of actions.

A log is recognised by its structure:

| log            | structure                                                                 | seconds of an action      |
|----------------|---------------------------------------------------------------------------|---------------------------|
| SWE-agent      | `trajectory`: steps with `response`, `action` and `observation`           | `execution_time`          |
| mini-swe-agent | `messages`, each with `extra`                                             | `extra.timestamp`         |
| OpenHands      | events with `action` or `observation`, in a list or in `history`          | `timestamp`               |
| tau-bench      | `traj`: messages                                                          | none                      |
| messages       | a list of messages, or `messages`, of OpenAI's chat API with tool calls   | `timestamp`, if present   |

Sources: swe-agent.com/latest/usage/trajectories and sweagent/types.py @ 05ff843f8 (SWE-agent);
src/minisweagent/models/litellm_model.py @ 01018ad8a (mini-swe-agent);
openhands/events/serialization/event.py @ 04e28400a (OpenHands); tau_bench/types.py @ 01ed5e313 (tau-bench).
"""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from streamrl.runfile.errors import shown
from streamrl.runfile.escaping import visible
from streamrl.runfile.reading import parse_json, read_text
from streamrl.workload.data_files import read_lines
from streamrl.workload.episodes import RecordedEpisode, RecordedTurn

CHARACTERS_PER_TOKEN = 4.0
"""An assumption for English text; platform.openai.com/tokenizer states it as a rule of thumb."""
SUFFIXES = (".traj", ".json", ".jsonl")
TRAJECTORIES = (".traj", ".traj.json")
"""Ends of file names that mark a directory as one of trajectories."""
GIVEN = ("system", "developer", "user", "tool", "function")
"""Roles of messages that the policy did not generate."""
ENDS = ("exit",)
"""Roles of messages after the end of an episode, which the policy does not read."""
READ = (
    "role",
    "content",
    "reasoning_content",
    "reasoning",
    "refusal",
    "tool_calls",
    "function_call",
)
"""Keys of the policy's messages that are read."""
UNCOUNTED = (
    *(
        "timestamp",
        "extra",
        "id",
        "name",
        "type",
        "model",
        "tool_call_id",
        "finish_reason",
        "annotations",
    ),
    *("reasoning_details", "thinking_blocks", "provider_specific_fields"),
)
"""Keys of the policy's messages without text of the policy, or with text that another key has too."""
SILENT = (
    *("system", "recall", "change_agent_state", "agent_state_changed", "null"),
    *("condensation", "condensation_request", "loop_recovery"),
)
"""OpenHands' events that are neither a turn nor an observation."""
ARGUMENTS = (
    *("command", "code", "content", "path", "url", "query", "browser_actions"),
    *("file_text", "old_str", "new_str", "name", "arguments", "inputs", "final_thought"),
    *("task_list", "view_range", "reason", "outputs"),
)
"""Arguments of OpenHands' actions that the policy writes, besides its thought."""
UNCOUNTED_ARGUMENTS = (
    *("security_risk", "confirmation_state", "is_confirmed", "kernel_init_code", "impl_source"),
    *("cwd", "image_urls", "file_urls", "task_completed"),
)
"""Those that OpenHands writes, or with one word of the policy."""

Document = Mapping[str, object] | Sequence[object]
Tokens = Callable[[str], int]


class Item(NamedTuple):
    """A text that the policy generated, or that it was given."""

    is_turn: bool
    text: str
    at: float | None = None
    """Seconds since any fixed instant at which it was complete."""
    seconds: float | None = None
    """Seconds of the action that a given text answers, if the log states them."""
    unread: tuple[str, ...] = ()
    """Unknown keys with text, which is not counted."""


class AgentLog(NamedTuple):
    """Episodes of a log."""

    format: str
    episodes: list[RecordedEpisode]
    notes: tuple[str, ...]

    @property
    def max_turns(self) -> int:
        """Most turns of an episode."""
        return max(len(each.turns) for each in self.episodes)

    @property
    def max_context(self) -> int:
        """Most tokens of an episode: prompt, generated tokens and observations."""
        return max(each.prompt_tokens + each.episode.tokens for each in self.episodes)


def looks_like_agent_log(path: str) -> bool:
    """Return whether a file, or a directory of trajectories, has the structure of a known log."""
    place = Path(path)
    if place.is_dir():
        return any(each.name.endswith(TRAJECTORIES) for each in place.rglob("*"))
    if not place.is_file() or place.suffix not in SUFFIXES:
        return False
    try:
        return _format_of(next(_documents(place))) is not None
    except (ValueError, StopIteration):
        return False


def assumed_tokens(characters_per_token: float) -> Tokens:
    """Return a function that estimates the tokens of a text from its characters.

    Raises:
        ValueError: the number is not finite and above 0.
    """
    if not 0 < characters_per_token < inf:
        raise ValueError(
            f"--characters-per-token must be a number above 0, got {characters_per_token:g}"
        )
    return lambda text: round(len(text) / characters_per_token)


def read_agent_log(path: str, count: Tokens) -> AgentLog:
    """Return the episodes of a file, or of all files of a directory.

    Args:
        path: a JSON or JSONL file, or a directory of them.
        count: returns the tokens of a text.

    Raises:
        ValueError: it cannot be read, has an unknown structure, or has no episode.
    """
    place = Path(path)
    found: list[RecordedEpisode] = []
    names: dict[str, None] = {}
    unread: dict[str, None] = {}
    num_empty = 0
    for file in _files(place):
        for number, document in enumerate(_documents(file), start=1):
            name = _format_of(document)
            if name is None:
                known = ", ".join(FORMATS)
                raise ValueError(
                    f"{file}: document {number} is no message log of an agent; the known structures are {known}"
                )
            names[name] = None
            try:
                items = list(FORMATS[name](document))
                episode = _episode(items, count)
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"{file}: document {number} ({name}): {error}") from None
            found += [] if episode is None else [episode]
            num_empty += episode is None
            unread.update(dict.fromkeys(key for item in items for key in item.unread))
    if not found:
        raise ValueError(f"{path} has no episode: no text was generated by the policy")
    return AgentLog(" and ".join(names), found, tuple(_notes(found, num_empty, unread)))


def _notes(
    found: Sequence[RecordedEpisode], num_empty: int, unread: Iterable[str]
) -> Iterator[str]:
    if num_empty:
        yield f"{num_empty} documents without a turn are left out"
    answered = [turn for each in found for turn in each.turns[:-1]]
    unknown = sum(turn.action_time is None for turn in answered)
    if unknown:
        yield (
            f"{unknown} of {len(answered)} actions have no time in the log; fill in action_time (seconds) before a "
            "simulation reads the file"
        )
    if any(not each.prompt_tokens for each in found):
        yield "a prompt is not in the log; set workload.lengths.prompt_tokens"
    if unread:
        yield f"unknown keys of the policy's messages are not counted: {', '.join(map(visible, unread))}"
    yield "tokens that a chat template adds are not counted"


def write_episodes(log: AgentLog, source: str, tokens: str) -> str:
    """Return episodes as a CSV for `workload.lengths` of kind episodes.

    Args:
        log: the episodes.
        source: the name of the log.
        tokens: how tokens were counted.
    """
    text = io.StringIO()
    name = visible(" ".join(source.split()))
    text.write(f"# Episodes of {name}, {log.format}; tokens: {visible(tokens)}; seconds.\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["episode", "prompt_tokens", "output_tokens", "observation_tokens", "action_time"]
    )
    for number, episode in enumerate(log.episodes):
        for turn in episode.turns:
            is_last = turn is episode.turns[-1]
            time = turn.action_time if turn.action_time is not None or not is_last else 0
            shown = "" if time is None else round(time, 6)
            prompt = episode.prompt_tokens or ""
            writer.writerow([number, prompt, turn.tokens, turn.observation_tokens, shown])
    return text.getvalue()


def mean_facts(log: AgentLog) -> dict[str, float | int | str]:
    """Return means over the episodes, for people and scripts."""
    turns = [turn for each in log.episodes for turn in each.turns]
    answered = [turn for each in log.episodes for turn in each.turns[:-1]]
    times = [turn.action_time for turn in answered if turn.action_time is not None]
    return {
        "episodes": len(log.episodes),
        "mean_turns": round(len(turns) / len(log.episodes), 2),
        "mean_output_tokens": round(sum(t.tokens for t in turns) / len(log.episodes), 2),
        "mean_observation_tokens": round(
            fmean(t.observation_tokens for t in answered) if answered else 0.0, 2
        ),
        **({"mean_action_time": round(fmean(times), 4)} if times else {}),
        "max_turns": log.max_turns,
        "max_context": log.max_context,
    }


# Structures ---------------------------------------------------------------------------------------


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    found = sorted(each for each in place.rglob("*") if each.suffix in SUFFIXES and each.is_file())
    if not found:
        raise ValueError(f"{place} has no file that ends in {', '.join(SUFFIXES)}")
    return found


def _documents(file: Path) -> Iterator[Document]:
    """Yield the episodes of a file. A list of messages or events is one episode, another list has one each."""
    whole: object
    try:
        whole = parse_json(read_text(file))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError:
        whole = list(read_lines(file))
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply") from None
    if isinstance(whole, dict) or (isinstance(whole, list) and _format_of(whole) is not None):
        yield whole
    elif isinstance(whole, list):
        for each in whole:
            yield each if isinstance(each, dict | list) else {}
    else:
        raise ValueError(f"{file}: neither a JSON object nor a list")


def _format_of(document: Document) -> str | None:
    """Return the name of the structure of a document; None if it is unknown."""
    if not isinstance(document, Mapping):
        return _format_of_list(document)
    if _is_list(document.get("trajectory"), "action", "observation"):
        return "SWE-agent"
    if isinstance(history := document.get("history"), list):
        return "OpenHands" if _format_of_list(history) == "OpenHands" else None
    if _is_list(document.get("traj"), "role"):
        return "tau-bench"
    if _is_list(document.get("messages"), "role"):
        return "mini-swe-agent" if "trajectory_format" in document else "messages"
    return None


def _format_of_list(entries: object) -> str | None:
    if _is_list(entries, "role"):
        return "messages"
    is_event = isinstance(entries, list) and all(
        isinstance(each, dict) and {"action", "observation"} & set(each) for each in entries
    )
    return "OpenHands" if entries and is_event else None


def _is_list(value: object, *keys: str) -> bool:
    """Return whether a value is a list of objects that all have some keys."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and set(keys) <= set(each) for each in value)
    )


def _list_in(document: Document, *keys: str) -> list[dict[str, object]]:
    if isinstance(document, Mapping):
        document = next(document[key] for key in keys if key in document)  # type: ignore[assignment]  # checked before
    return list(document)  # type: ignore[arg-type]  # its entries were checked before


def _of_swe_agent(document: Document) -> Iterator[Item]:
    steps = _list_in(document, "trajectory")
    query = steps[0].get("query")
    if isinstance(query, list):
        for message in query:
            yield Item(False, _text(message.get("content")))
    for step in steps:
        response, action = _text(step.get("response")), _text(step.get("action"))
        yield Item(True, response if action.strip() in response else f"{response}\n{action}")
        yield Item(False, _text(step.get("observation")), seconds=_seconds(step, "execution_time"))


def _of_messages(document: Document) -> Iterator[Item]:
    for message in _list_in(document, "messages", "traj"):
        role = message["role"]
        extra = message.get("extra")
        at = _instant((extra if isinstance(extra, dict) else message).get("timestamp"))
        if role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            parts = [
                _text(part) for part in (reasoning, message.get("content"), message.get("refusal"))
            ]
            parts += [*_calls(message.get("tool_calls")), *_calls(message.get("function_call"))]
            unread = [
                key for key in message if key not in READ + UNCOUNTED and _has_text(message[key])
            ]
            yield Item(True, "\n".join(part for part in parts if part), at, unread=tuple(unread))
        elif role in GIVEN:
            yield Item(False, _text(message.get("content")), at)
        elif role not in ENDS:
            raise ValueError(f"the role {role!r} is unknown")


def _of_openhands(document: Document) -> Iterator[Item]:
    for event in _list_in(document, "history"):
        kind = event.get("action") or event.get("observation")
        if not isinstance(kind, str):
            raise ValueError(f"an event's action or observation must be a name, got {shown(kind)}")
        at = _instant(event.get("timestamp"))
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        if "action" in event and event.get("source") == "agent" and kind not in SILENT:
            thought = _thought(arguments.get("thought"))
            rest = [_text(arguments[key]) for key in ARGUMENTS if arguments.get(key)]
            made = [thought, *rest] if thought else rest
            known = ("thought", *ARGUMENTS, *UNCOUNTED_ARGUMENTS)
            unread = [key for key in arguments if key not in known and _has_text(arguments[key])]
            yield Item(True, "\n".join(made), at, unread=tuple(unread))
        elif "action" in event and (kind == "system" or event.get("source") == "user"):
            yield Item(False, _text(arguments.get("content")), at)
        elif "observation" in event and kind not in SILENT:
            yield Item(False, _text(event.get("content")), at)


FORMATS: dict[str, Callable[[Document], Iterator[Item]]] = {
    "SWE-agent": _of_swe_agent,
    "mini-swe-agent": _of_messages,
    "OpenHands": _of_openhands,
    "tau-bench": _of_messages,
    "messages": _of_messages,
}


def _text(content: object) -> str:
    """Return the text of a message's content: a text, parts, or a value as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text(part) for part in content)
    if isinstance(content, dict):
        if "image" in str(content.get("type", "")):
            raise ValueError("it has images, whose tokens are unknown")
        if isinstance(content.get("text"), str):
            return str(content["text"])
    return json.dumps(content, ensure_ascii=False)


def _thought(value: object) -> str:
    """Return the text of a thought, which may be a table of its text and what the model reasoned before."""
    parts = value.values() if isinstance(value, dict) else [value]
    return "\n".join(filter(None, map(_text, parts)))


def _has_text(value: object) -> bool:
    return isinstance(value, str | list | dict) and bool(value)


def _calls(calls: object) -> list[str]:
    """Return the name and the arguments of each tool call, or a call of another structure as JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [calls] if calls else ():
        if not isinstance(call, dict):
            raise ValueError(f"a tool call must be an object, got {shown(call)}")
        body = call.get("function") or call.get("custom") or call
        written = body.get("arguments", body.get("input")) if isinstance(body, dict) else None
        is_known = isinstance(body, dict) and "name" in body and written is not None
        found.append(f"{_text(body['name'])} {_text(written)}" if is_known else _text(body))
    return found


UNITS = (1e11, 1e14, 1e17)
"""Bounds of a Unix time in seconds, milliseconds and microseconds. Above them it has the next unit; in seconds, the first
is in the year 5138."""


def _instant(value: object) -> float | None:
    """Return a Unix time or an ISO 8601 text in seconds; None without one. A text without a zone counts as UTC."""
    if isinstance(value, str):
        time = datetime.fromisoformat(value)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    at = _seconds({"": value}, "")
    return None if at is None else at / 1000 ** sum(at >= bound for bound in UNITS)


def _seconds(table: Mapping[str, object], key: str) -> float | None:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not isfinite(value) or value < 0:
        raise ValueError(f"a time must be a number of at least 0, got {value!r}")
    return float(value)


def _episode(items: Iterable[Item], count: Tokens) -> RecordedEpisode | None:
    """Return the episode of texts in their order; None if the policy generated none."""
    prompt = 0
    turns: list[RecordedTurn] = []
    ended_at: float | None = None
    """When the last turn was complete."""
    was_turn = False
    for item in items:
        num = count(item.text)
        if item.is_turn and was_turn:  # two messages in a row are one turn
            turns[-1] = RecordedTurn(turns[-1].tokens + num)
            ended_at = item.at
        elif item.is_turn:
            turns.append(RecordedTurn(max(1, num)))
            ended_at = item.at
        elif not turns:
            prompt += num
        else:
            turns[-1] = RecordedTurn(
                turns[-1].tokens, turns[-1].observation_tokens + num, _time(item, ended_at)
            )
        was_turn = item.is_turn
    if not turns:
        return None
    return RecordedEpisode(prompt_tokens=prompt, turns=tuple(turns))


def _time(item: Item, ended_at: float | None) -> float | None:
    """Return the seconds from the end of a turn to the answer; None if unknown."""
    if item.seconds is not None or item.at is None or ended_at is None:
        return item.seconds
    if item.at < ended_at:
        raise ValueError(f"an answer has the time {item.at}, which is before its turn's {ended_at}")
    return item.at - ended_at
