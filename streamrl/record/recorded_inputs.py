"""Separate what a predictor may read of a recorded run from what was measured.

A record has three parts:

- manifest: what ran, where, and with which versions.
- workload: the prompts' and the responses' lengths, groups, families and expected lengths, in the order of their arrival. It
  also has the share of informative groups and the rewards of groups, because they decide what is trained on.
- outcomes: seconds, tokens per second, staleness, losses. `streamrl.record.metrics` and `streamrl.logs.measured_steps` read
  them.

A predictor takes `RecordedInputs`, which has no outcomes and no reference to the trace.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.engine.messages import EvaluationDrawn, StartTrainer, Stepped, TrainerResized
from streamrl.engine.trace import Facts, Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.recorded_workload import recorded_workload
from streamrl.record.run_directory import with_kept_inputs
from streamrl.runfile.config import Run
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.roles_config import TrainerResize
from streamrl.runfile.workload_config import WorkloadConfig


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ran, where, and with which versions."""

    run: Run
    """The run file. Its paths name the copies in the run directory, and `evaluation.num_prompts` is the recorded number.
    `trainer.resize` has the ranks of each step, also those of `streamrl resize`."""
    world: Literal["simulated", "real"]
    versions: Facts
    """Of an executed run, the host and the versions of packages; of a simulation, the sources of its seconds."""
    num_starts: int
    """Starts and resumes of the run."""


class RecordedInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest and the workload of a recorded run: all that a predictor may read."""

    manifest: Manifest
    workload: WorkloadConfig
    """It names the trace file as the source of lengths. `RecordedGroups` reads only lengths from there."""


def recorded_inputs(trace: Trace, file: Path) -> RecordedInputs:
    """Return the manifest and the workload of a recorded run.

    Args:
        trace: the recorded run.
        file: its trace file, which has the lengths.
    """
    run = with_ranks_of_steps(with_kept_inputs(trace.run, file.parent), trace)
    manifest = Manifest(
        run=msgspec.structs.replace(run, evaluation=_as_drawn(run.evaluation, trace)),
        world=trace.world,
        versions=trace.facts,
        num_starts=trace.leg,
    )
    return RecordedInputs(manifest=manifest, workload=recorded_workload(trace, file))


def with_ranks_of_steps(run: Run, trace: Trace) -> Run:
    """Return a run whose primary trainer has the data-parallel ranks with which each step of a trace was made."""
    if run.trainer.borrows:  # its ranks follow from the policy
        return run
    ranks, of_step = run.trainer.data_parallel, dict[int, int]()
    for _, event, commands in trace.entries:
        match event:
            case TrainerResized(trainer=0):
                ranks = event.data_parallel
            case Stepped(trainer=0):
                of_step[event.version] = ranks
            case _:
                pass
        for command in commands:
            if isinstance(command, StartTrainer) and command.trainer == LEADER:
                ranks = command.data_parallel or run.trainer.data_parallel
    sizes = [of_step[version] for version in sorted(of_step)]
    changes = tuple(
        TrainerResize(step=step, data_parallel=after)
        for step, (before, after) in enumerate(pairwise(sizes), start=2)
        if after != before
    )
    first = sizes[0] if sizes else run.trainer.data_parallel
    trainer = msgspec.structs.replace(run.trainer, data_parallel=first, resize=changes)
    found: Run = msgspec.structs.replace(run, trainer=trainer)
    return found


def _as_drawn(config: EvaluationConfig | None, trace: Trace) -> EvaluationConfig | None:
    """Return `[evaluation]` with the number of prompts that were drawn; as it is if none were."""
    if config is None:
        return None
    drawn = (event for _, event, _ in trace.entries if isinstance(event, EvaluationDrawn))
    first = next(drawn, None)
    if first is None:
        return config
    recorded: EvaluationConfig = msgspec.structs.replace(
        config, num_prompts=len(first.prompt_tokens)
    )
    return recorded
