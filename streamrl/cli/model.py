"""`streamrl model`: the group of commands about models."""

from __future__ import annotations

from typing import ClassVar

import typer

from streamrl.cli.lazy_commands import CommandTable, LazyGroup


class ModelCommands(LazyGroup):
    """The commands about models."""

    panels: ClassVar[dict[str, CommandTable]] = {
        "Commands": {
            "show": (
                "streamrl.cli.model_show:show",
                "Show a model's parameters, KV cache and states by layer kind.",
            ),
        }
    }


model = typer.Typer(
    name="model",
    cls=ModelCommands,
    no_args_is_help=True,
    help="Show what a config.json or a profile says about a model.\n\n"
    "Example: streamrl model show deepseek-v3",
)
