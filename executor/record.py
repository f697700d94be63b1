"""The run directory: what a run leaves on disk, and what a resumed one finds there.

run.json                 the run file as it was read
trace.jsonl              every event and command; earlier parts of a resumed run: trace.1.jsonl …
prompts.npz              token ids of the prompts that its trace speaks of
inputs/                  what it was read from, as far as reports and comparisons need it
metrics.jsonl            a line for each step
rollouts.jsonl           a line for each verified rollout
checkpoints/v000050/     weights, optimizer, and where in the prompts the run was
logs/                    output of the worker processes
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from executor.buffer import BufferedRollout
from streamrl.record.inputs import keep_inputs
from streamrl.runfile.config import Run
from streamrl.runfile.reading import encode_run

KEPT_CHECKPOINTS = 2  # the newest may be the one that a crash left useless


class Checkpoint(NamedTuple):
    """Where a run can resume."""

    path: Path
    version: int
    groups_done: int
    baseline: float = 0.0
    """Mean reward of the batch that made `version`, which `reinforce++` goes by."""


class RunDirectory:
    """Owns the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self._checkpoints = path / "checkpoints"
        self.trace_file: IO[bytes]
        self._metrics: IO[str]
        self._rollouts: IO[bytes]

    def open(self, run: Run, resume: bool) -> Checkpoint | None:
        """Make or reopen the directory; return the checkpoint to resume from, or None to begin at version 0.

        Raises:
            ValueError: see `find_checkpoint`; nothing is written then.
        """
        checkpoint = self.find_checkpoint(run, resume)
        self.logs.mkdir(parents=True, exist_ok=True)
        self._checkpoints.mkdir(exist_ok=True)
        self._put_old_trace_aside()
        (self.path / "run.json").write_bytes(encode_run(run))
        keep_inputs(run, self.path)
        self.trace_file = (self.path / "trace.jsonl").open("wb", buffering=0)
        self._metrics = (self.path / "metrics.jsonl").open("a", buffering=1)
        self._rollouts = (self.path / "rollouts.jsonl").open("ab", buffering=0)
        return checkpoint

    def find_checkpoint(self, run: Run, resume: bool) -> Checkpoint | None:
        """Return the checkpoint that `run` resumes from; None where it begins, or no checkpoint is complete.

        Raises:
            ValueError: a run is there already, none to resume, or one that has all its steps.
        """
        has_run = (self.path / "trace.jsonl").exists()
        if has_run and not resume:
            raise ValueError(
                f"execute.output {str(self.path)!r} holds a run; resume it with --resume, or name "
                "another directory with --set execute.output=…"
            )
        if resume and not has_run:
            raise ValueError(f"execute.output {str(self.path)!r} holds no run to resume")
        checkpoint = self.newest_checkpoint() if resume else None
        if checkpoint is not None and checkpoint.version >= run.algorithm.steps:
            raise ValueError(
                f"execute.output {str(self.path)!r} holds a run that has all its steps: "
                f"algorithm.steps is {run.algorithm.steps}, its checkpoint is of step "
                f"{checkpoint.version}; --set algorithm.steps={2 * checkpoint.version} goes on with it"
            )
        return checkpoint

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, None where there is none."""
        saved = sorted(self._checkpoints.glob("v*/position.json"))
        if not saved:
            return None
        return _read_checkpoint(saved[-1].parent)

    def checkpoint(self, version: int) -> Checkpoint:
        """Return a complete checkpoint."""
        return _read_checkpoint(self.checkpoint_path(version))

    def checkpoint_path(self, version: int) -> Path:
        """Return the directory of one checkpoint."""
        return self._checkpoints / f"v{version:06d}"

    def finish_checkpoint(self, version: int, groups_done: int, baseline: float) -> None:
        """Mark a checkpoint complete and remove those that are not kept."""
        position = {"version": version, "groups_done": groups_done, "baseline": baseline}
        path = self.checkpoint_path(version) / "position.json"
        path.with_suffix(".tmp").write_text(json.dumps(position))
        path.with_suffix(".tmp").rename(path)
        for old in sorted(self._checkpoints.glob("v*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def write_step(self, figures: dict[str, float]) -> None:
        """Add a line to metrics.jsonl."""
        self._metrics.write(json.dumps(figures) + "\n")

    def roll_back(self, time: float) -> None:
        """Add a line to metrics.jsonl: the steps after the newest checkpoint are taken back, and will be made again."""
        saved = self.newest_checkpoint()
        self.write_step({"rolled_back_to": saved.version if saved else 0, "time": time})

    def write_rollout(
        self, rollout: int, buffered: BufferedRollout, text: str, facts: dict[str, Any]
    ) -> None:
        """Add a line to rollouts.jsonl."""
        line = {
            "rollout": rollout,
            "line": buffered.line,
            "text": text,
            "num_tokens": buffered.num_tokens,
            "versions": buffered.versions,
            "reward": buffered.reward,
            **({} if buffered.fault is None else {"verifier": buffered.fault}),
            **facts,
        }
        self._rollouts.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close every file."""
        for file in (self.trace_file, self._metrics, self._rollouts):
            file.close()

    def _put_old_trace_aside(self) -> None:
        trace = self.path / "trace.jsonl"
        if trace.exists():
            number = 1 + len(list(self.path.glob("trace.*.jsonl")))
            trace.rename(self.path / f"trace.{number}.jsonl")


def _read_checkpoint(path: Path) -> Checkpoint:
    position = json.loads((path / "position.json").read_text())
    return Checkpoint(path, **position)
