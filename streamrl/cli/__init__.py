"""The command line: puts core, simulation and execution together; nothing imports it."""

from streamrl.cli.main import main

__all__ = ["main"]
