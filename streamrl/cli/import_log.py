"""`streamrl import`: make a workload from a log, an executed run or recorded rollouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.shared import (
    AsJson,
    RolloutFields,
    claim_directory,
    holds_run,
    keep_private,
    open_trace,
    print_json,
    trace_file,
)
from streamrl.logs.agent_logs import (
    CHARACTERS_PER_TOKEN,
    Tokens,
    assumed_tokens,
    looks_like_agent_log,
    read_agent_log,
    write_episodes,
)
from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.imported_workload import (
    EPISODES,
    LENGTHS,
    PROMPTS,
    SHAPE,
    STEPS,
    WORKLOAD,
    Fragment,
    replay_episodes,
    replay_rollouts,
    replay_steps,
    replay_trace,
)
from streamrl.logs.measured_steps import write_steps
from streamrl.logs.recorded_rollouts import (
    looks_like_rollouts,
    parse_fields,
    read_rollouts,
    write_lengths,
    write_prompts,
)
from streamrl.runfile.result_files import write_results
from streamrl.runfile.workload_config import HUB
from streamrl.sim.calibration.calibrate import measured_steps
from streamrl.workload.data_files import read_csv

ROLLOUTS, AGENT = "rollouts", "agent"
"""The format names for data sets, and for message logs of agents."""


def import_log(
    recorded: Annotated[
        str,
        typer.Argument(
            metavar="LOG|DATASET",
            help="A log, the directory of an executed run, message logs of agents (JSON, JSONL, or a directory of .traj files), or "
            "rollouts: JSONL, Parquet, CSV, a directory of `datasets`, hf://NAME.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Write the files to this directory.", rich_help_panel=OUTPUT
        ),
    ],
    log_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="areal, nemo-rl, openrlhf, prime-rl, roll, skyrl, slime, torchforge, trl, verl, csv, agent or rollouts. Default: detect it.",
        ),
    ] = None,
    fields: RolloutFields = None,
    split: Annotated[str | None, typer.Option(help="Split of a data set, such as train.")] = None,
    shape: Annotated[
        str,
        typer.Option(
            help="Length distribution if a log has only means: a name in profiles/lengths."
        ),
    ] = SHAPE,
    is_asynchronous: Annotated[
        bool | None,
        typer.Option(
            "--asynchronous/--in-turns",
            help="Whether the run generated during training. Default: read it from the log's keys.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of the tokenizer that counts the tokens of an agent's log."),
    ] = None,
    characters: Annotated[
        float,
        typer.Option(
            "--characters-per-token",
            min=0.1,
            help="Without --model: characters of an agent's log that count as one token, an assumption.",
        ),
    ] = CHARACTERS_PER_TOKEN,
    as_json: AsJson = False,
) -> None:
    """Make a workload from a log, an executed run or recorded rollouts.

    From rollouts, it writes lengths.csv and workload.toml, the section [workload] that replays them. lengths.csv has the
    length of each output by prompt.

    From a log, it writes steps.csv for `streamrl calibrate`, and workload.toml. Its lengths follow a known distribution,
    scaled to the logged mean.

    From message logs of agents (SWE-agent, mini-swe-agent, OpenHands, tau-bench, or chat messages with tool calls), it writes
    episodes.csv, one turn a row, and workload.toml.

    From an executed run, it writes steps.csv and workload.toml with the recorded lengths.

    Example: streamrl import rollouts.jsonl -o recorded
    """
    chosen = parse_fields(fields or ())
    keep_private(Path(recorded))
    is_agent = log_format == AGENT or (log_format is None and _is_agent_log(recorded))
    if model is not None and not is_agent:
        raise ValueError("--model applies only to message logs of agents: add --format agent")
    claim_directory(output)
    files: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    if not recorded.startswith(HUB) and log_format is None and holds_run(Path(recorded)):
        fragment, files[STEPS], notes = _of_run(Path(recorded), output)
        kind = "streamrl"
    elif log_format == ROLLOUTS or (log_format is None and not is_agent and _is_data_set(recorded)):
        rollouts = read_rollouts(recorded, chosen, split)
        fragment, kind = replay_rollouts(rollouts, recorded), ROLLOUTS
        notes = rollouts.notes
        files[LENGTHS] = write_lengths(rollouts, recorded)
        if rollouts.records:
            files[PROMPTS] = write_prompts(rollouts)
    elif is_agent:
        _refuse_of_data_sets(chosen, split)
        count, tokens = _counter(model, characters)
        log = read_agent_log(recorded, count)
        fragment, kind = replay_episodes(log, recorded, tokens), log.format
        notes = (f"tokens: {tokens}", *log.notes)
        files[EPISODES] = write_episodes(log, recorded, tokens)
    else:
        _refuse_of_data_sets(chosen, split)
        steps = read_measured_file(Path(recorded), log_format, is_asynchronous)
        fragment, kind, notes = replay_steps(steps, shape), steps.framework, steps.notes
        files[STEPS] = write_steps(steps.steps, steps.source)
    files[WORKLOAD] = fragment.text
    for name in files:
        if (output / name).is_file() and (output / name).samefile(recorded):
            raise ValueError(f"--output {output}: {name} is the input; name another directory")
    write_results(output, files)
    if as_json:
        print_json({"format": kind, **fragment.facts, "files": sorted(files), "notes": notes})
        return
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fragment.facts.items())
    echo(f"{recorded}: {kind}: {told}")
    for note in notes:
        echo(f"note: {note}")
    echo(f"written: {', '.join(str(output / name) for name in sorted(files))}")


def _is_data_set(recorded: str) -> bool:
    """Return whether a path holds rollouts. A CSV of steps has lengths too, but also step numbers or seconds."""
    if not looks_like_rollouts(recorded):
        return False
    if not recorded.endswith((".csv", ".csv.gz")):
        return True
    return not {"step", "step_time"} & set(read_csv(Path(recorded))[0])


def _is_agent_log(recorded: str) -> bool:
    """Return whether a path holds message logs, not rollouts whose columns have lengths."""
    return looks_like_agent_log(recorded) and (
        Path(recorded).is_dir() or not _is_data_set(recorded)
    )


def _counter(model: Path | None, characters: float) -> tuple[Tokens, str]:
    """Return a function that counts the tokens of a text, and what it counts with."""
    if model is None:
        return assumed_tokens(characters), f"{characters:g} characters each, an assumption"
    from streamrl.executor.prompts import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    return (
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        f"tokenizer of {model}",
    )


def _of_run(recorded: Path, output: Path) -> tuple[Fragment, str, tuple[str, ...]]:
    file = trace_file(recorded)
    trace = open_trace(file)
    steps = measured_steps(trace, str(recorded))
    fragment = replay_trace(trace, str(file), os.path.relpath(file, output), str(recorded))
    return fragment, write_steps(steps.steps, steps.source), steps.notes


def _refuse_of_data_sets(fields: dict[str, str], split: str | None) -> None:
    if fields or split is not None:
        raise ValueError(
            "--field and --split apply only to data sets of rollouts: add --format rollouts"
        )
