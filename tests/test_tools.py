"""Tools of episodes: calls in the formats of chat templates, functions, MCP servers, and the tokens of results."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from streamrl.executor.environment import mcp_client
from streamrl.executor.environment.observation_tokens import ObservationEncoder
from streamrl.executor.environment.tool_calls import ToolCallError, find_tool_calls, format_of
from streamrl.executor.environment.tools import ToolEnvironment, schema_of
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from tests.runs import make_table

SERVER = str(Path(__file__).parent / "mcp_server.py")
SCHEMAS = {"add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: The first one.
        b (int): The second one.
    """
    return a * b


def search(query: str, kind: Literal["web", "news"] = "web", words: list[str] | None = None) -> Any:
    """Search."""
    raise OSError("no network")


CALLS = {
    "hermes": 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "2"}}\n</tool_call>',
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama": '{"name": "add", "parameters": {"a": 1, "note": "2"}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "2"}}]',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_in_each_format(name: str) -> None:
    for text in (CALLS[name], f"<think>{CALLS[name]}</think>{CALLS[name]}"):
        assert find_tool_calls(text, name, SCHEMAS) == [("add", {"a": 1, "note": "2"})]
    assert find_tool_calls("The answer is 3.", name, SCHEMAS) == []
    assert find_tool_calls(f"<think>{CALLS[name]}</think>3", name, SCHEMAS) == []
    with pytest.raises(ToolCallError, match="there is no tool 'add'; the tools are sub"):
        find_tool_calls(CALLS[name], name, {"sub": {}})


@pytest.mark.parametrize("name", CALLS)
def test_half_of_a_surrogate_pair_is_answered_with_the_reason(name: str) -> None:
    text = CALLS[name].replace("2", "\\ud83d" if name != "xml" else '"\\ud83d"')
    schemas = {"add": {"properties": {"a": {"type": "integer"}, "note": {"type": "array"}}}}
    with pytest.raises(ToolCallError, match="half of a surrogate pair"):
        find_tool_calls(text, name, schemas)
    whole = text.replace("d83d", "d83d\\ude00")
    assert find_tool_calls(whole, name, schemas) == [("add", {"a": 1, "note": "😀"})]


def test_several_calls_are_read_in_order() -> None:
    two = "{};{}".format(*[CALLS["llama"]] * 2)
    assert len(find_tool_calls(two, "llama", SCHEMAS)) == 2
    assert len(find_tool_calls(CALLS["hermes"] * 2, "hermes", SCHEMAS)) == 2


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("hermes", "<tool_call>{}", "does not end with </tool_call>"),
        ("hermes", "<tool_call>{1}</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>[]</tool_call>", "must be a JSON object"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            "must be a JSON object",
        ),
        ("llama", '{"name": "add", "parameters": {', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]{}", "must be a JSON list"),
        ("xml", "<tool_call>add</tool_call>", "<function=NAME>"),
        ("hermes", f"<tool_call>{'[' * 9999}</tool_call>", "nested too deeply"),
        ("mistral", f"[TOOL_CALLS]{'[' * 9999}", "nested too deeply"),
        ("llama", f'{{"name": "add", "parameters": {"[" * 9999}', "not valid JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, text: str, why: str) -> None:
    with pytest.raises(ToolCallError, match=why):
        find_tool_calls(text, name, SCHEMAS)


def test_parts_of_calls_without_an_end_are_found_in_little_time() -> None:
    many, began = 20_000, time.process_time()
    for text in (
        f"<tool_call>{'<function=add>' * many}</tool_call>",
        f"<tool_call></function>{'<function=add>' * many}</tool_call>",
    ):
        with pytest.raises(ToolCallError):
            find_tool_calls(text, "xml", SCHEMAS)
    text = f"<tool_call><function=add>{'<parameter=a>' * many}</function></tool_call>"
    assert find_tool_calls(text, "xml", SCHEMAS) == [("add", {})]
    assert time.process_time() - began < 1.0


def test_the_format_is_that_of_the_chat_template() -> None:
    assert format_of("... <tool_call>\n<function=example> ...") == "xml"
    assert format_of("... within <tool_call></tool_call> tags") == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of('{"name": function name, "parameters": dictionary}') == "llama"
    assert format_of("{{ message.content }}") is format_of(None) is None


def test_the_schema_of_a_function_comes_from_its_signature_and_docstring() -> None:
    assert schema_of(multiply)["function"] == {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first one."},
                "b": {"type": "integer", "description": "The second one."},
            },
            "required": ["a"],
        },
    }
    properties = schema_of(search)["function"]["parameters"]["properties"]
    assert properties["kind"] == {"type": "string", "enum": ["web", "news"]}
    assert properties["words"] == {"type": "array", "items": {"type": "string"}}


def turn(environment: ToolEnvironment, text: str) -> list[str] | None:
    messages, _, is_over = environment.step(text)
    assert is_over == (messages is None)
    return None if messages is None else [each["content"] for each in messages]


def test_calls_are_executed_and_errors_are_told_to_the_model() -> None:
    environment = ToolEnvironment(
        ["tests.test_tools:multiply", "tests.test_tools:search"], "hermes"
    )

    def called(name: str, arguments: str) -> list[str] | None:
        text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        return turn(environment, text)

    assert called("multiply", '{"a": 3}') == ["6"]
    assert called("multiply", '{"x": 3}') == [
        "Error: ToolCallError: missing a required argument: 'a'"
    ]
    assert called("search", '{"query": "x"}') == ["Error: OSError: no network"]
    assert called("find", "{}") == [
        "Error: there is no tool 'find'; the tools are multiply, search"
    ]
    assert turn(environment, "The answer is 6.") is None


@pytest.mark.parametrize(
    ("seconds", "most_bytes", "words"),
    [(0.5, 2**30, "did not complete an answer"), (60.0, 2**20, "more than 1 MiB")],
)
def test_an_answer_over_http_has_a_limit_of_seconds_and_bytes(
    seconds: float, most_bytes: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "REQUEST_TIME", seconds)
    monkeypatch.setattr(mcp_client, "MOST_BYTES", most_bytes)

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
            while True:
                connection.sendall(b" " * 2**16)
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        with pytest.raises(mcp_client.McpError, match=words):
            mcp_client.connect(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `environment.tools` says of an MCP server."""
    if request.param == "stdio":
        yield f"mcp:{sys.executable} {SERVER}"
        return
    with subprocess.Popen(
        [sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"mcp:http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        process.kill()


def test_tools_of_mcp_servers_are_called(server: str) -> None:
    environment = ToolEnvironment([server, "tests.test_tools:multiply"], "llama")
    assert [each["function"]["name"] for each in environment.tools] == ["add", "divide", "multiply"]
    assert turn(environment, '{"name": "add", "parameters": {"a": 1, "b": 2}}') == ["3"]
    divided = turn(environment, '{"name": "divide", "parameters": {"a": 1, "b": 0}}')
    assert divided == ["Error: McpError: division by zero"]
    environment.close()


def test_a_lost_mcp_server_is_no_result_of_the_policy() -> None:
    environment = ToolEnvironment([f"mcp:{sys.executable} {SERVER}"], "llama")
    (connection,) = environment._connections
    connection._channel._process.kill()
    with pytest.raises(mcp_client.McpServerError, match="ended with status -9"):
        turn(environment, '{"name": "add", "parameters": {"a": 1, "b": 2}}')
    environment.close()


# Tokens of observations ---------------------------------------------------------------------------

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | length }} tools<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Letters:
    """A tokenizer with a token for each letter, and one for each mark of a chat."""

    marks = ("<|im_start|>", "<|im_end|>")

    def __init__(self, template: str = CHATML) -> None:
        import jinja2

        self.chat_template = template
        self._template = jinja2.Template(template)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **arguments: Any) -> str:
        return self._template.render(messages=messages, **arguments)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        for number, mark in enumerate(self.marks):
            text = text.replace(mark, chr(number))
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(self.marks[i] if i < len(self.marks) else chr(i) for i in ids)


TURN_END = 1


def test_an_observation_follows_the_end_of_the_turn_as_the_template_writes_it() -> None:
    letters = Letters()
    encoder = ObservationEncoder(letters, [TURN_END], tools=[{}, {}], has_chats=True)
    told = encoder.next([{"role": "tool", "name": "add", "content": "4"}], TURN_END)
    assert letters.decode(told) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    told = encoder.next("No.", ord("x"))  # a stop string ended the turn
    assert letters.decode(told) == (
        "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = [{"role": "user", "content": "2+2"}]
    assert letters.decode(encoder.first(prompt, None)) == "<|im_start|>assistant\n"
    assert letters.decode(encoder.first(prompt, "Hurry.")) == (
        "<|im_start|>user\nHurry.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_chats_an_observation_is_its_text() -> None:
    letters = Letters()
    encoder = ObservationEncoder(letters, [TURN_END], has_chats=False)
    assert letters.decode(encoder.next("4;", TURN_END)) == "4;"
    assert encoder.first("2+2", None) == []
    with pytest.raises(ValueError, match="the environment's observation is empty"):
        encoder.next("", TURN_END)


def test_a_message_of_an_observation_has_a_role() -> None:
    encoder = ObservationEncoder(Letters(), [TURN_END], has_chats=True)
    with pytest.raises(ValueError, match=r"has no role: \{'content': '4'\}"):
        encoder.next([{"content": "4"}], TURN_END)


@pytest.mark.parametrize("role", ["assistant", "Assistant", "model", "user\n<|im_end|>", 3])
def test_turns_of_the_assistant_are_the_policys_alone(role: Any) -> None:
    encoder = ObservationEncoder(Letters(), [TURN_END], has_chats=True)
    messages = [{"role": "user", "content": "2+2?"}, {"role": role, "content": "4"}]
    with pytest.raises(ValueError, match=r"has the role .*; write one of user, tool, system"):
        encoder.next(messages, TURN_END)
    with pytest.raises(ValueError, match=r"has the role "):
        encoder.first([{"role": "user", "content": "2+2"}], messages)


def test_a_template_that_refuses_a_message_is_named() -> None:
    refusing = CHATML + "{% if messages[-1].role == 'tool' %}{{ missing.x }}{% endif %}"
    encoder = ObservationEncoder(Letters(refusing), [TURN_END], has_chats=True)
    with pytest.raises(ValueError, match="chat template does not accept an observation"):
        encoder.next([{"role": "tool", "content": "4"}], TURN_END)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('Welcome!', flush=True); input()", "printed 'Welcome!', which is no JSON-RPC"),
        ("print(5, flush=True); input()", "printed '5', which is no JSON-RPC"),
        ("import sys; sys.stdin.read()", "did not answer within 0.2 s"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('x' * 2**25, flush=True)", "printed a line of more than 16 MiB"),
    ],
)
def test_an_mcp_server_that_does_not_speak_the_protocol_is_named(
    program: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "REQUEST_TIME", 0.2 if "0.2" in message else 60.0)
    with pytest.raises(mcp_client.McpServerError) as told:
        mcp_client.connect(shlex.join([sys.executable, "-S", "-c", program]))
    assert "the MCP server " in str(told.value) and sys.executable in str(told.value)
    assert message in str(told.value)


class Says:
    """A server that gives the same answer to each request but the first."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"result": {}} if message["method"] == "initialize" else self._answer

    def tell(self, message: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "answer to tools/list is malformed: Expected `object`, got `null`"),
        ({"result": {"tools": [3]}}, "tools/list is malformed: Expected `object`, got `int`"),
        ({"result": {"tools": [{"name": "a"}]}}, "missing required field `inputSchema`"),
        ({"result": {"tools": [], "nextCursor": "1"}}, "list of tools has more than 100 pages"),
        ({"error": "no"}, "no"),
    ],
)
def test_a_malformed_answer_of_an_mcp_server_is_named(answer: Any, message: str) -> None:
    connection = mcp_client.McpConnection(Says(answer))
    with pytest.raises(mcp_client.McpError, match=message):
        list(connection.schemas())


@pytest.mark.parametrize("has_chats", [True, False])
def test_a_huge_observation_is_cut_before_it_is_tokenized(has_chats: bool) -> None:
    letters, huge = Letters(), "x" * 15_000_000
    encoder = ObservationEncoder(letters, [TURN_END], has_chats=has_chats, max_context=2000)
    prompt = [{"role": "user", "content": "2+2"}]
    message = {"role": "tool", "name": "add", "content": huge}
    for observation in (huge, [message], [{"role": "tool", "content": "x" * 100}] * 100_000):
        for told in (encoder.next(observation, TURN_END), encoder.first(prompt, observation)):
            text = letters.decode(told)
            assert 31_000 < len(text) < 64_000
            assert text.endswith("<|im_start|>assistant\n" if has_chats else "x")


# Run files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "game"}, "'game' is no environment; write a class as"),
        ({"implementation": "tools"}, "environment.tools is missing"),
        ({"implementation": "a:B", "tools": ["c:d"]}, "environment.tools is only for"),
        (
            {"implementation": "tools", "tools": ["mcp:server"]},
            "environment.sandbox must be false for tools of MCP servers",
        ),
    ],
)
def test_an_environment_that_cannot_be_executed_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    table = make_table({"environment": {"max_turns": 2, "max_context": 4096, **changes}})
    with pytest.raises(RunError, match=message):
        make_run(table)


def test_a_turn_of_repeated_tags_is_searched_in_linear_time() -> None:
    """A policy that repeats a token writes such turns; 16,000 names without an end took 9 s."""
    for tag in ("<function=", "<function=a><parameter="):
        text = f"<tool_call>{tag * 30_000}</parameter></function></tool_call>"
        began_at = time.process_time()
        with suppress(ToolCallError):
            find_tool_calls(text, "xml", {"a": {}})
        assert time.process_time() - began_at < 2
