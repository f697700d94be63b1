"""`streamrl export`: write launch arguments for another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.shared import ANY, AsJson, Overrides, RunFile, claim_file, print_json
from streamrl.export.launch_file import find_arguments, launch_script
from streamrl.export.option_table import export_name
from streamrl.runfile.files import load_run
from streamrl.runfile.result_files import write_file
from streamrl.runfile.simulation_config import FrameworkName


def export(
    run_file: RunFile,
    overrides: Overrides = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework",
            metavar="NAME",
            help="verl, nemo-rl, slime or openrlhf. Default: framework.name of the run file.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the script to this file. Default: print it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write launch arguments for verl, NeMo-RL, slime or OpenRLHF.

    RUN.toml is a plan or any other run file. Each option in the script names its key and the framework's source file.
    Comments at the end list settings that the framework has no option for.

    Example: streamrl export plans/7b/plan.toml --framework verl
    """
    run = load_run(run_file, overrides or ())
    name = _name(run.framework.name, framework)
    if output is not None:
        claim_script(output, force=force)
    script = launch_script(find_arguments(run, export_name(*name)))
    if output is not None:
        write_file(output, script)
    if as_json:
        print_json({"framework": name[0], "script": script, "file": output and str(output)})
    elif output is None:
        echo(script, nl=False)
    else:
        echo(f"written to {output}")


def claim_script(path: Path, *, force: bool) -> None:
    """Raise `ValueError` before any work if a script cannot be written or exists already."""
    if path.exists() and not force:
        raise ValueError(f"{path} exists already; use --force to replace it")
    claim_file(path, ANY)


def _name(name: FrameworkName | None, framework: str | None) -> tuple[str, str]:
    """Return the framework of the script, and the key or option that names it."""
    if framework is not None:
        return framework, "--framework"
    if name is None:
        raise ValueError(
            "--framework is missing, and the run file has no framework.name: add one of them"
        )
    return name, "framework.name"
