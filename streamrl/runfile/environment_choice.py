"""The environments that `environment.implementation` chooses among.

A value is a name of `ENVIRONMENTS`, or a class: "MODULE:CLASS" or "python:FILE.py:CLASS".
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.runfile.scorer_choice import RewardFunction, function_of


class EnvironmentChoice(NamedTuple):
    """One environment of this package."""

    make: str
    """Its class, as "module:NAME"."""
    needs: tuple[str, ...] = ()
    """Arguments that it must have."""
    has_tools: bool = False
    """Whether it needs `environment.tools`."""
    needs_scorer: bool = False
    """Whether it gives no reward itself."""
    reads_calls: bool = False
    """Whether it reads tool calls, in `environment.tool_format`."""
    leaves_sandbox: str = ""
    """What it does that the sandbox does not allow; empty if it can run there."""
    has_one_episode: bool = False
    """Whether it can run only one episode at a time."""


ENVIRONMENTS: dict[str, EnvironmentChoice] = {
    "tools": EnvironmentChoice(
        "streamrl.executor.environment.tools:ToolEnvironment",
        has_tools=True,
        needs_scorer=True,
        reads_calls=True,
    ),
    "reasoning-gym": EnvironmentChoice("streamrl.executor.environment.retry:Retry"),
    "verifiers": EnvironmentChoice(
        "streamrl.executor.environment.verifiers_environments:VerifiersEnvironment",
        ("environment",),
        reads_calls=True,
    ),
    "container": EnvironmentChoice(
        "streamrl.executor.environment.containers:ContainerEnvironment",
        reads_calls=True,
        leaves_sandbox="starts containers",
    ),
    "openenv": EnvironmentChoice(
        "streamrl.executor.environment.http_environments:OpenEnv",
        ("endpoint",),
        leaves_sandbox="uses the network",
        has_one_episode=True,
    ),
    "nemo-gym": EnvironmentChoice(
        "streamrl.executor.environment.http_environments:NemoGym",
        ("endpoint",),
        reads_calls=True,
        leaves_sandbox="uses the network",
    ),
}

MCP = "mcp:"
"""Start of a tool that is an MCP server."""


def class_of(implementation: str) -> RewardFunction | None:
    """Return the class that an implementation names; None if it is a name, or malformed."""
    return None if implementation in ENVIRONMENTS else function_of(implementation)
