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
    uses_network: bool = False
    """Whether it cannot run in the sandbox."""


ENVIRONMENTS: dict[str, EnvironmentChoice] = {
    "tools": EnvironmentChoice(
        "streamrl.executor.environment.tools:ToolEnvironment", has_tools=True
    ),
}

MCP = "mcp:"
"""Start of a tool that is an MCP server."""


def class_of(implementation: str) -> RewardFunction | None:
    """Return the class that an implementation names; None if it is a name, or malformed."""
    return None if implementation in ENVIRONMENTS else function_of(implementation)
