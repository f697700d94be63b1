"""Environments of the `verifiers` package and a real MCP server, where both are installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from streamrl.executor.environment.mcp_client import connect
from streamrl.executor.environment.verifiers_environments import VerifiersEnvironment, write_prompts

pytestmark = pytest.mark.environments

SERVER = '''
from mcp.server.{module} import {name}
server = {name}("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

server.run()
'''


@pytest.fixture(autouse=True)
def two_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package find the environment of the tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def call(name: str, a: int, b: int) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_a_tool_environment_answers_calls_and_its_rubric_gives_the_reward() -> None:
    environment = VerifiersEnvironment("two-tools")
    assert [each["function"]["name"] for each in environment.tools] == ["add", "subtract"]
    prompt = [{"role": "user", "content": "a3+b3-c1="}]
    environment.reset({"prompt": prompt, "answer": "5"})
    for action, told in ((call("add", 3, 3), "6"), (call("subtract", 6, 1), "5")):
        messages, reward, is_over = environment.step(action)
        assert messages is not None and [each["content"] for each in messages] == [told]
        assert messages[0]["role"] == "tool" and (reward, is_over) == (0.0, False)
    messages, _, is_over = environment.step("<tool_call>{</tool_call>")
    assert messages is not None and "not valid JSON" in messages[0]["content"] and not is_over
    messages, _, is_over = environment.step(call("subtract", 1, 100))
    assert messages is not None and messages[0]["content"] == "too large"
    assert environment.step("5") == (None, 1.0, True)
    environment.close()


def test_a_wrong_answer_and_the_last_turn_end_a_rollout() -> None:
    environment = VerifiersEnvironment("two-tools", max_turns=1)
    prompt = [{"role": "user", "content": "a3+b3-c1="}]
    environment.reset({"prompt": prompt, "answer": "5"})
    assert environment.step(call("add", 3, 3)) == (None, 0.0, True)
    environment.close()


def test_the_data_set_of_an_environment_becomes_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    assert write_prompts("two-tools", path) == 8
    record = json.loads(path.read_text().splitlines()[0])
    assert record["prompt"][-1]["content"] == "a1+b1-c1=" and record["answer"] == "1"


def test_tools_of_a_server_of_the_mcp_package_are_called(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp")
    is_new = hasattr(mcp, "server") and (Path(mcp.__file__).parent / "server/mcpserver").is_dir()
    names = (
        {"module": "mcpserver", "name": "MCPServer"}
        if is_new
        else {"module": "fastmcp", "name": "FastMCP"}
    )
    (tmp_path / "server.py").write_text(SERVER.format(**names))
    connection = connect(f"{sys.executable} {tmp_path / 'server.py'}")
    assert [each["function"]["name"] for each in connection.schemas()] == ["add"]
    assert connection.call("add", {"a": 1, "b": 2}) == "3"
    connection.close()
