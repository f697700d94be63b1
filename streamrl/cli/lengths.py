"""`streamrl lengths`: show the statistics and the histogram of output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import (
    AsJson,
    RolloutFields,
    holds_run,
    print_json,
    trace_file,
)
from streamrl.logs.agent_logs import (
    CHARACTERS_PER_TOKEN,
    assumed_tokens,
    looks_like_agent_log,
    read_agent_log,
)
from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.recorded_rollouts import (
    ASSUMED_PROMPTS,
    looks_like_rollouts,
    parse_fields,
    read_rollouts,
)
from streamrl.record.restarts import traces_up_to
from streamrl.report.length_histogram import histogram_lines
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_offer
from streamrl.runfile.length_words import CATALOGUE, FIGURES, lengths_in_full, stated_figures
from streamrl.runfile.workload_config import HUB, LengthsConfig
from streamrl.workload.data_files import read_csv
from streamrl.workload.length_statistics import Lengths, length_statistics
from streamrl.workload.workload import (
    RecordedGroups,
    SimulatedWorkload,
    load_source,
    read_lengths,
)

DRAWN = 1 << 16
"""Number of lengths that are drawn from a distribution."""


class Found(NamedTuple):
    """Output lengths, and what they are of."""

    text: str
    lengths: Lengths
    prompt_tokens: float | None = None
    """Mean tokens of a prompt, if known."""
    cap: int | None = None
    notes: Sequence[str] = ()


def lengths(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|WORDS",
            help="A run file, rollouts or a trace of requests (as in `import`), a run directory, a name such as "
            "'math reasoning', or figures such as 'mean 6k, p95 20k, max 32k'.",
        ),
    ],
    cap: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help="Cut outputs off here. Default: rollout.max_tokens of a run file, else the longest output.",
        ),
    ] = None,
    fields: RolloutFields = None,
    as_json: AsJson = False,
) -> None:
    """Show the statistics and a histogram of output lengths.

    It prints mean, median, p95, maximum, and the share of outputs at the cap.

    Example: streamrl lengths "math reasoning" --max-tokens 16384
    """
    found = _find(source, fields or ())
    statistics = length_statistics(found.lengths, cap or found.cap)
    if as_json:
        facts = {"source": found.text, "prompt_tokens": found.prompt_tokens, "notes": found.notes}
        print_json({**facts, "statistics": statistics})
        return
    prompts = (
        "" if found.prompt_tokens is None else f", prompts of {found.prompt_tokens:,.0f} tokens"
    )
    echo(f"{found.text}: {statistics.rollouts:,} outputs{prompts}")
    for line in [*histogram_lines(statistics), *(f"note: {note}" for note in found.notes)]:
        echo(line)


def _find(source: str, fields: Sequence[str]) -> Found:
    path = Path(source)
    if not source.strip() or not (source.startswith(HUB) or path.exists()):
        if fields:
            raise ValueError(f"--field applies only to data sets of rollouts; {source!r} is none")
        return _of_words(source)
    if not fields and path.suffix == ".csv" and _is_histogram(path):
        return Found(source, _drawn(LengthsConfig(kind="histogram", source=source)))
    if fields or source.startswith(HUB) or not (holds_run(path) or path.suffix == ".toml"):
        return _of_rollouts(source, fields)
    return _of_run_file(path) if path.suffix == ".toml" else _of_run(path)


def _is_histogram(path: Path) -> bool:
    rows = read_csv(path)
    return bool(rows) and "density" in rows[0]


def _of_words(text: str) -> Found:
    """Return lengths drawn from a name or from stated figures."""
    is_stated = text.strip().startswith(FIGURES)
    table = {"kind": "stated", "source": text} if is_stated else lengths_in_full(text)
    config = LengthsConfig(**table)
    try:
        cap = stated_figures(text).max if is_stated else None
        drawn = _drawn(config)
    except RunError as error:
        names = ", ".join(CATALOGUE)
        raise ValueError(
            f"{text!r} is no file and no lengths in words ({error}); write a file, one of {names}, or figures such as "
            "'mean 6k, p95 20k, max 32k'"
        ) from None
    return Found(f"{config.kind} {config.source}", drawn, cap=cap)


def _drawn(config: LengthsConfig) -> Lengths:
    source = load_source(config)
    assert not isinstance(source, RecordedGroups), "of another kind"
    found, _ = source.sample(np.random.default_rng(0), DRAWN, 1)
    return found[:, 0]


def _of_run_file(path: Path) -> Found:
    """Return lengths that a simulation of a run file draws."""
    run = load_offer(path).run
    size = run.algorithm.group_size
    draws = SimulatedWorkload(run).draw(0, -(-DRAWN // size))
    return Found(
        f"workload of {path}",
        np.array([length for draw in draws for length in draw.lengths]),
        fmean(draw.drawn.prompt_tokens for draw in draws),
        run.rollout.max_tokens,
    )


def _of_run(path: Path) -> Found:
    """Return the recorded lengths of all starts of a run; a rollout that was made again counts once."""
    groups: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for file in traces_up_to(trace_file(path)):
        found = read_lengths(file)
        groups.update((number, group.prompt_tokens) for number, group in found.drawn.items())
        tokens |= found.tokens
    if not tokens:
        raise ValueError(f"{path} has no finished rollout")
    prompts = [*groups.values()]
    return Found(f"run {path}", np.array([*tokens.values()]), fmean(prompts))


def _of_rollouts(source: str, fields: Sequence[str]) -> Found:
    """Return the lengths of a data set; a log has only means, which the error says."""
    is_data_set = looks_like_rollouts(source) and not Path(source).is_dir()
    if not fields and not is_data_set and looks_like_agent_log(source):
        log = read_agent_log(source, assumed_tokens(CHARACTERS_PER_TOKEN))
        outputs = np.array([each.episode.ends[-1] for each in log.episodes])
        told = f"{CHARACTERS_PER_TOKEN:g} characters count as a token (assumed); `streamrl import --model DIR` counts them"
        return Found(f"{log.format} {source}", outputs, notes=[told, *log.notes])
    if not fields and not looks_like_rollouts(source):
        measured = read_measured_file(Path(source))
        mean = measured.mean("output_tokens")
        known = "no lengths" if mean is None else f"only means ({mean:,.0f} output tokens)"
        raise ValueError(
            f"{source} is a log of {measured.framework}, which has {known}; `streamrl import` makes a workload from it"
        )
    found = read_rollouts(source, parse_fields(fields))
    prompts = None if found.prompt_tokens is None else fmean(found.prompt_tokens)
    notes = [note for note in found.notes if note != ASSUMED_PROMPTS]
    return Found(source, np.array(found.lengths), prompts, notes=notes)
