"""Message logs of agents become episodes that a simulation replays."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.logs.agent_logs import AgentLog, _instant, assumed_tokens, read_agent_log
from streamrl.workload.episodes import Episode, RecordedEpisodes
from streamrl.workload.workload import SimulatedWorkload
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_import import write_lines

CALL = [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "ssss"},
    {"role": "user", "content": [{"type": "text", "text": "uuuuuu"}]},
    {"role": "assistant", "content": "abc", "tool_calls": CALL},
    {"role": "tool", "tool_call_id": "1", "content": "x" * 20},
    {"role": "assistant", "content": "done"},
]
TIMED = [
    {**each, "extra": {"timestamp": 100.0 + 2.5 * number}} for number, each in enumerate(MESSAGES)
]
STEPS = [
    {
        "response": "think\nls -F",
        "action": "ls -F\n",
        "observation": "o" * 7,
        "execution_time": 0.5,
    },
    {"response": "", "action": "submit", "observation": "", "execution_time": 1.5},
]
EVENTS = [
    {"id": 0, "source": "agent", "action": "system", "args": {"content": "ssss"}},
    {"id": 1, "source": "user", "action": "message", "args": {"content": "task"}},
    {"id": 2, "source": "agent", "action": "recall", "args": {"query": "task"}},
    {
        **{"id": 3, "source": "agent", "action": "run", "timestamp": "2026-06-20T10:00:05"},
        "args": {"command": "ls -la", "thought": "list", "is_confirmed": "confirmed"},
    },
    {
        **{
            "id": 4,
            "source": "agent",
            "observation": "run",
            "timestamp": "2026-06-20T10:00:07.250",
        },
        **{"cause": 3, "content": "total 8"},
    },
    {"id": 5, "source": "agent", "action": "finish", "args": {"final_thought": "ready"}},
]


def read(path: Path, document: Any) -> AgentLog:
    """Return a log of which each character is a token."""
    path.write_text(json.dumps(document))
    return read_agent_log(str(path), assumed_tokens(1))


@pytest.mark.parametrize(
    ("document", "name", "prompt", "episode"),
    [
        (MESSAGES, "messages", 10, Episode((9, 13), (20,), (0.0,))),
        ({"messages": MESSAGES}, "messages", 10, Episode((9, 13), (20,), (0.0,))),
        ([{"task_id": 3, "traj": MESSAGES}], "tau-bench", 10, Episode((9, 13), (20,), (0.0,))),
        (
            {
                "trajectory_format": "mini-swe-agent-1.1",
                "messages": [*TIMED, {"role": "exit", "content": "e"}],
            },
            "mini-swe-agent",
            10,
            Episode((9, 13), (20,), (2.5,)),
        ),
        ({"trajectory": STEPS}, "SWE-agent", 0, Episode((11, 18), (7,), (0.5, 1.5))),
        (EVENTS, "OpenHands", 8, Episode((11, 16), (7,), (2.25,))),
        ({"history": EVENTS, "metrics": {}}, "OpenHands", 8, Episode((11, 16), (7,), (2.25,))),
    ],
)
def test_a_log_is_recognised_by_its_structure(
    tmp_path: Path, document: Any, name: str, prompt: int, episode: Episode
) -> None:
    log = read(tmp_path / "log.json", document)
    (found,) = log.episodes
    assert (log.format, found.prompt_tokens, found.episode) == (name, prompt, episode)
    is_timed = any(episode.action_times)
    assert is_timed != any("1 of 1 actions have no time" in note for note in log.notes)


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_times_may_be_in_parts_of_a_second(unit: int, tmp_path: Path) -> None:
    times = (1_700_000_000, 1_700_000_001, 1_700_000_002, 1_700_000_004, 1_700_000_005)
    timed = [{**each, "timestamp": at * unit} for each, at in zip(MESSAGES, times, strict=True)]
    assert read(tmp_path / "log.json", timed).episodes[0].episode.action_times == (2.0,)


@pytest.mark.parametrize(
    "written",
    [
        {"reasoning": "abcdef"},
        {"reasoning": "abcdef", "reasoning_content": "abcdef"},
        {"content": "abcdef"},
        {"refusal": "abcdef"},
        {"function_call": {"name": "ls", "arguments": "abc"}},
        {"tool_calls": {"function": {"name": "ls", "arguments": "abc"}}},
        {"tool_calls": [{"type": "custom", "custom": {"name": "ls", "input": "abc"}}]},
        {"tool_calls": [{"name": "ls", "arguments": "abc"}]},
        {"tool_calls": ["abcd"]},
        {"tool_calls": [{"function": "abcdef"}]},
    ],
)
def test_all_text_of_the_policy_counts(written: dict[str, Any], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", **written}]
    if written.get("tool_calls") == ["abcd"]:
        with pytest.raises(ValueError, match="a tool call must be an object, got 'abcd'"):
            read(tmp_path / "log.json", messages)
        return
    log = read(tmp_path / "log.json", messages)
    assert log.episodes[0].episode.ends == (6,) and len(log.notes) == 1


def test_unknown_keys_of_the_policy_with_text_are_told(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "x", "plan": "long", "id": "7", "cost": 1.5, "seen": []}
    log = read(tmp_path / "log.json", [{"role": "user", "content": "u", "plan": ""}, turn])
    assert "unknown keys of the policy's messages are not counted: plan" in log.notes


def test_unknown_arguments_of_openhands_with_text_are_told(tmp_path: Path) -> None:
    arguments = {"command": "ls", "plan": "long", "security_risk": "LOW", "timeout": 3, "seen": []}
    log = read(tmp_path / "log.json", [{"source": "agent", "action": "run", "args": arguments}])
    assert "unknown keys of the policy's messages are not counted: plan" in log.notes
    assert log.episodes[0].episode.ends == (2,)


def test_a_thought_of_openhands_may_have_two_texts(tmp_path: Path) -> None:
    arguments = {"thought": {"text": "abc", "reasoning_content": "de"}, "command": "ls"}
    log = read(tmp_path / "log.json", [{"source": "agent", "action": "run", "args": arguments}])
    assert log.episodes[0].episode.ends == (9,) and len(log.notes) == 2


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_characters_per_token_are_a_number(number: float) -> None:
    with pytest.raises(ValueError, match="--characters-per-token must be a number above 0, got"):
        assumed_tokens(number)


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ({"steps": []}, "document 1 is no message log of an agent; the known structures are SWE-"),
        ([{"role": "critic", "content": "x"}], "the role 'critic' is unknown"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "it has images, whose tokens"),
        ([{"role": "user", "content": "x"}], "has no episode"),
        ([{"source": "agent", "action": {"kind": "a"}}], "action or observation must be a name"),
        ([TIMED[2], {**TIMED[3], "extra": {"timestamp": 1.0}}], "which is before its turn's 105"),
    ],
)
def test_a_wrong_log_is_refused_in_one_line(tmp_path: Path, document: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        read(tmp_path / "log.json", document)
    assert "\n" not in str(caught.value)


def test_an_imported_log_is_simulated(tmp_path: Path) -> None:
    table = {"trajectory_format": "mini-swe-agent-1.1", "messages": TIMED}
    logs, out = tmp_path / "logs", tmp_path / "out"
    logs.mkdir()
    (logs / "one.traj.json").write_text(json.dumps(table))
    done = streamrl("import", logs, "-o", out, "--characters-per-token", "2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["format"], told["max_turns"], told["max_context"]) == ("mini-swe-agent", 2, 21)
    assert "tokens: 2 characters each, an assumption" in told["notes"]
    lengths = {"kind": "episodes", "source": str(out / "episodes.csv")}
    environment = {"max_turns": 4, "max_context": 4096}
    run = small_run({"environment": environment, "workload.lengths": lengths})
    (draw,) = SimulatedWorkload(run).draw(0, 1)
    assert set(draw.episodes) == {Episode((4, 6), (10,), (2.5,))}
    assert draw.drawn.prompt_tokens == 5

    refused = streamrl("import", out / "episodes.csv", "-o", tmp_path / "no", "--model", "m")
    assert refused.returncode == 2 and "--model applies only to message logs" in refused.stderr
    path = write_lines(tmp_path / "log.jsonl", [{"messages": MESSAGES}] * 2)
    shown = streamrl("lengths", path)
    assert shown.returncode == 0 and "messages" in shown.stdout, shown.stderr
    assert "4 characters count as a token (assumed)" in shown.stdout


def test_times_of_episodes_may_have_another_unit(tmp_path: Path) -> None:
    file = tmp_path / "episodes.csv"
    file.write_text(
        "episode,output_tokens,observation_tokens,action_time_ms,start_time (min)\n"
        "a,5,3,250,2\na,4,0,0,\n"
    )
    (episode,) = RecordedEpisodes(file, 10).episodes([0], 100)
    assert (episode.action_times, episode.start_time) == ((0.25,), 120.0)


def test_a_time_without_a_zone_is_read_as_utc_wherever_the_reader_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        before, after = _instant("2026-03-08T01:59:00"), _instant("2026-03-08T03:01:00")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert before is not None and after is not None and after - before == 3720.0
