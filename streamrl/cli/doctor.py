"""`streamrl doctor`: find the problems of a run file before it uses a GPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, Overrides, RunFile, print_json, stdout_console
from streamrl.doctor import diagnosis, files
from streamrl.doctor.examination import Examination, render
from streamrl.doctor.invalid_keys import fix_contradictions, fix_profile_names, read_leniently
from streamrl.hardware.resolved import ResolvedRun, longest_sequence, resolve
from streamrl.hardware.side_memory import SideMemory, memory_of
from streamrl.runfile.config import Run
from streamrl.runfile.files import read_table
from streamrl.runfile.findings import (
    TOPICS,
    Changes,
    Examine,
    Finding,
    Topic,
    changed,
    is_error,
    passes,
    say,
)
from streamrl.sim.checkup import checkup


def doctor(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Find the problems of a run file before it uses a GPU.

    The command checks memory, divisibility, batches, staleness, links, versions and files. Each error and warning has a
    fix. Fixes that name keys were tried. Exit status 1 means that there are errors.

    Example: streamrl doctor examples/h20-h800.toml --set rollout.max_running=512
    """
    table = read_table(run_file, overrides or ())
    report = examine(table, run_file)
    if as_json:
        print_json(report.as_json())
    else:
        stdout_console().print(render(report))
    if report.count("error"):
        raise typer.Exit(1)
    if not as_json:
        verb = "execute" if table.get("model", {}).get("path") else "simulate"
        echo(f"next: {shlex.join(['streamrl', verb, str(run_file)])}")


def examine(table: dict[str, Any], run_file: Path) -> Examination:
    """Examine the table of a run file, as far as its errors allow."""
    reading = read_leniently(table, run_file.parent)
    findings = list(reading.findings)
    run = reading.run
    if run is not None:
        consistency = fix_contradictions(run)
        findings += consistency.findings
        run = consistency.run
    if run is None:
        return _give_up(run_file, findings)
    profiles = fix_profile_names(run)
    findings += profiles.findings
    assert profiles.run is not None, "profiles are mended or left as they are"
    return _examine_run(profiles.run, run_file, findings)


def _examine_run(run: Run, run_file: Path, before: list[Finding]) -> Examination:
    """Examine a run file that was read. Errors are fixed first, so that the other checks can go on."""
    static = diagnosis.examine(run)
    errors = [finding for finding in static if is_error(finding)]
    known = {finding.text for finding in before}
    fixes, mended = _fix_all(run, errors)
    if fixes:
        static = [*errors, *diagnosis.examine(mended)]
    assumed = {**_all_changes(before), **fixes}
    return Examination(
        run_file=str(run_file),
        findings=[
            *before,
            *(finding for finding in static if finding.text not in known),
            *checkup.examine(mended),
            *(
                found
                for find in _checks_of_this_machine()
                for found in find(run)
                if found.text.removeprefix("execute: ") not in known
            ),
        ],
        memory=_memory(resolve(run)),
        not_examined=list(dict.fromkeys(f.topic for f in static if f.text in known)),
        assumed=say(assumed) if assumed else "",
    )


def _fix_all(run: Run, errors: list[Finding]) -> tuple[Changes, Run]:
    """Return the fixes of all errors and the fixed run; no fixes if they do not work together."""
    fixes = _all_changes(errors)
    mended = changed(run, fixes)
    if not passes(mended) or any(map(is_error, diagnosis.diagnose(mended))):
        return {}, run
    return fixes, mended


def _checks_of_this_machine() -> tuple[Examine, ...]:
    """Return the checks that look at files and installed packages. `streamrl.executor` is imported here."""
    from streamrl.executor.checkup import installed, readiness, run_paths, tested_paths

    return (
        installed.find,
        readiness.find,
        tested_paths.find,
        lambda run: files.find(
            run.model,
            run.workload,
            run.costs,
            longest_sequence(run.rollout, run.workload, run.environment),
        ),
        run_paths.find,
    )


def _give_up(run_file: Path, findings: list[Finding]) -> Examination:
    topics: list[Topic] = [topic for topic in TOPICS if topic != "run file"]
    return Examination(
        run_file=str(run_file), findings=findings, memory=[], not_examined=topics, assumed=""
    )


def _all_changes(findings: list[Finding]) -> Changes:
    return {key: value for finding in findings for key, value in finding.changes.items()}


def _memory(resolved: ResolvedRun) -> list[SideMemory]:
    try:
        return memory_of(resolved)
    except ValueError:
        return []
