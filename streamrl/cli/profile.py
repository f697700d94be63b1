"""`streamrl profile`: the group of profile commands; `streamrl profile MODELDIR` measures a model, and `--accept PLAN` tests a node."""

from __future__ import annotations

from typing import Any, ClassVar

import typer

from streamrl.cli.lazy_commands import CommandTable, LazyGroup

MEASURE, ACCEPT = "measure", "accept"


class ProfileCommands(LazyGroup):
    """A group that runs `measure` if the first argument is not one of its commands."""

    panels: ClassVar[dict[str, CommandTable]] = {
        "Commands": {
            "show": (
                "streamrl.cli.profile_show:show",
                "Show how fast a model decodes on a GPU.",
            ),
            "check": (
                "streamrl.cli.profile_check:check",
                "Check every profile: schema, units, sources and physical limits.",
            ),
            MEASURE: (
                "streamrl.cli.profile_measure:measure",
                "Measure a model on this machine, for use in simulations.",
            ),
            ACCEPT: (
                "streamrl.cli.profile_accept:accept",
                "Test a rented node: keep it, or return it?",
            ),
            "listen": (
                "streamrl.cli.profile_accept:listen",
                "Be the other end of the link that `profile accept --peer` measures.",
            ),
        }
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's, or typer's copy of it
        """Insert `measure` before an argument that is not a command of this group; `--accept` is a command too."""
        if f"--{ACCEPT}" in args:
            args = [ACCEPT, *(each for each in args if each != f"--{ACCEPT}")]
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [MEASURE, *args]
        return super().parse_args(ctx, args)


profile = typer.Typer(
    name="profile",
    cls=ProfileCommands,
    no_args_is_help=True,
    help="Measure a model on this machine, or show and check profiles.\n\n"
    "Example: streamrl profile build/quickstart/model",
)
