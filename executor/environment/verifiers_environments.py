"""The environment "verifiers": a `ToolEnv` or another `MultiTurnEnv` of the `verifiers` package, version 0.1.

The package would call a model itself. Here the policy's turns come from the run's replicas. So this adapter does for each
turn what the package's `rollout` does between two calls of the model (verifiers 0.1.14, envs/multiturn_env.py). The
reward is that of the environment's rubric, at the end.

    python -m streamrl.executor.environment.verifiers_environments ENVIRONMENT prompts.jsonl

writes the data set of an environment as the prompts of a run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from streamrl.executor.environment.tool_calls import ToolCallError, find_tool_calls

Json = dict[str, Any]
INPUTS = ("prompt", "answer", "info", "example_id")
"""Fields of a data set that an environment reads."""


@cache
def loaded(environment: str, arguments: str) -> Any:
    """Return an environment with its data set; `arguments` are JSON."""
    verifiers = import_module("verifiers")
    return verifiers.load_environment(environment, **json.loads(arguments))


class VerifiersEnvironment:
    """One rollout of an environment of the package."""

    def __init__(self, environment: str, tool_format: str = "hermes", **arguments: Any) -> None:
        """Load an environment by name; other arguments are those of its `load_environment`."""
        self._environment = loaded(environment, json.dumps(arguments))
        self._types = import_module("verifiers.types")
        self._format = tool_format
        self._loop = asyncio.new_event_loop()
        self._state: Any = None
        self._messages: list[Any] = []

    @classmethod
    def prepare(cls, environment: str, tool_format: str = "hermes", **arguments: Any) -> None:
        """Load the environment once, for all workers."""
        loaded(environment, json.dumps(arguments))

    @property
    def tools(self) -> list[Json]:
        """Return the schemas of the environment's tools."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in self._environment.tool_defs or ()
        ]

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def reset(self, task: Json) -> None:
        """Begin a rollout of a record."""
        given = {"example_id": 0, **{key: task[key] for key in INPUTS if key in task}}
        client = self._types.ClientConfig(api_base_url="http://localhost", api_key_var="NONE")
        self._state = self._run(self._environment.init_state(given, client, "policy"))
        self._run(self._environment.setup_state(self._state))
        self._messages = list(self._state["prompt"])

    def step(self, action: str) -> tuple[list[Json] | None, float, bool]:
        """Add a turn, and return the answer of the environment; at the end, the reward of the rubric."""
        try:
            message = self._message(action)
        except ToolCallError as error:
            return [{"role": "tool", "name": "error", "content": f"Error: {error}"}], 0.0, False
        return self._run(self._answer(message))  # type: ignore[no-any-return]  # the loop does not know

    def _message(self, action: str) -> Any:
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in self.tools}
        calls = find_tool_calls(action, self._format, schemas) if schemas else []
        made = [
            self._types.ToolCall(
                id=f"call_{len(self._messages)}_{place}",
                name=call.name,
                arguments=json.dumps(call.arguments),
            )
            for place, call in enumerate(calls)
        ]
        return self._types.AssistantMessage(content=action, tool_calls=made or None)

    async def _answer(self, message: Any) -> tuple[list[Json] | None, float, bool]:
        environment, state = self._environment, self._state
        turn = {
            "prompt": self._messages,
            "completion": [message],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state["trajectory_id"],
            "extras": {},
        }
        await environment.add_trajectory_step(state, turn)
        if await environment.is_completed(state):
            return None, await self._score(), True
        messages = await environment.get_prompt_messages(state)
        if await environment.is_completed(state):
            return None, await self._score(), True
        new = messages[len(self._messages) + 1 :]
        self._messages = list(messages)
        return [_as_table(each) for each in new], 0.0, False

    async def _score(self) -> float:
        """Return the reward of the whole rollout."""
        await self._environment.cleanup(self._state)
        await self._environment.rubric.score_rollout(self._state)
        return float(self._state["reward"])

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()


def _as_table(message: Any) -> Json:
    """Return a message of the package as a chat template reads it."""
    found: Json = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return {"name": "tool", **found} if found["role"] == "tool" else found


def write_prompts(environment: str, path: Path, **arguments: Any) -> int:
    """Write the data set of an environment as prompts of a run; return their number."""
    rows = loaded(environment, json.dumps(arguments)).get_dataset()
    records = [{key: row[key] for key in INPUTS if key in row} for row in rows]
    lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    print(f"{write_prompts(sys.argv[1], Path(sys.argv[2])):,} prompts written to {sys.argv[2]}")
