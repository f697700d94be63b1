"""Own the run directory: write the files of a run, and find the state that a resume needs.

| file              | content                                                                                   |
|-------------------|-------------------------------------------------------------------------------------------|
| run.json          | the run file, with trainers that were attached later                                      |
| attached.json     | attached and detached trainers; see `streamrl.executor.subscribers.attach_requests`       |
| control/          | requests to the running job; see `streamrl.executor.subscribers.attach_requests`          |
| trace.jsonl       | every event and command since the last restart; earlier ones are in trace.1.jsonl and so on |
| prompts.npz       | token ids of the prompts in the trace                                                     |
| inputs/           | copies of input files that reports and comparisons need                                   |
| metrics.jsonl     | a line for each step, and for each roll-back                                              |
| rollouts.jsonl    | a line for each verified rollout, and for each resume                                     |
| samples.jsonl     | a line for each step with some of its samples, for people to read                         |
| evaluations.jsonl | a line for each evaluation; see `streamrl.record.evaluation`                              |
| evaluation_rollouts.jsonl | a line for each of their rollouts                                                 |
| chrome_trace.json | the run since the last restart as a Chrome trace; see `streamrl.executor.monitoring`      |
| faults.jsonl      | a line for each injected fault; see `streamrl.executor.faults`                            |
| checkpoints/      | see `streamrl.executor.checkpoints`                                                       |
| followers/        | files of secondary trainers; see `streamrl.executor.subscribers.secondary_records`        |
| tokens/           | tokens of rollouts that were not trained on yet; removed at the end of the run            |
| logs/             | output of the worker processes                                                            |
| lock              | id of the process that executes the run                                                   |

A start that fails before its first event leaves the files of the last one as they were.

Lines of steps that a resume or a lost trainer discards stay in the .jsonl files. `streamrl.record.run_directory` reads
only the lines that count.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec

from streamrl.engine.trace import LineFile, open_at_end, recorded_run_id
from streamrl.engine.trainer_side import LEADER
from streamrl.executor.buffer import BufferedRollout
from streamrl.executor.checkpoints import (
    Checkpoint,
    Checkpoints,
    Position,
    Retention,
    TrainerRecord,
    check_position,
)
from streamrl.executor.directory_lock import LOCK, DirectoryLock
from streamrl.executor.monitoring import Trackers
from streamrl.executor.sampling import scored_with
from streamrl.executor.token_files import remove_all
from streamrl.record.chrome_trace import CHROME_TRACE
from streamrl.record.evaluation import EVALUATED, EVALUATIONS, EvaluationResult, read_evaluations
from streamrl.record.prompt_tokens import Ids, write_prompt_tokens
from streamrl.record.restarts import (
    KEPT_BY_A_RESUME,
    RecordedStarts,
    earlier_trace_numbers,
    earlier_trace_path,
    first_difference,
    has_first_line,
    read_starts,
)
from streamrl.record.run_directory import (
    ATTACHED,
    CONTROL,
    METRICS,
    ROLLED_BACK_TO,
    ROLLOUTS,
    RUN,
    RUN_ID,
    SAMPLES,
    TRACE,
    RolledBack,
    read_inputs,
)
from streamrl.record.samples import SampledGroup
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.files import decode_run, encode_run, values_by_key
from streamrl.runfile.formatting import listing
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.paths import (
    check_file_writable,
    check_no_directory,
    check_writable,
    paths_of,
)
from streamrl.runfile.result_files import listed_run_id, write_files, write_results

logger = logging.getLogger(__name__)

SAMPLED_WITH = (
    *("model.path", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
    *("rollout.stop", "rollout.stop_token_ids", "rollout.max_tokens"),
)
"""Keys on which the sampling distribution depends. Tokens sampled with other values are discarded."""


def changes(before: Run, now: Run) -> dict[str, str]:
    """Return the keys whose values differ, each with a text that has both values."""
    old, new = values_by_key(before), values_by_key(now)
    return {
        key: f"{key} {old.get(key)!r} -> {new.get(key)!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }


TOKENS = "tokens"
DIRECTORIES = (TOKENS, "checkpoints", "logs", CONTROL)
NEXT_TRACE = ".trace.next.jsonl"
"""The trace of a start that has no event yet; then it gets the name of the last one."""
GROWING = (METRICS, ROLLOUTS, SAMPLES, EVALUATIONS, EVALUATED)
"""Files to which each start adds lines."""


class Start(NamedTuple):
    """A start of a run whose directory is open."""

    run: Run
    is_resumed: bool
    checkpoint: Checkpoint | None
    prompts: Sequence[Ids]
    """Token ids of every prompt, each of shape `[num_tokens]`."""


class RunDirectory(TrainerRecord):
    """Owns the files of one run, including those of its trainers."""

    def __init__(
        self, path: Path, take: Callable[[Mapping[str, object]], None] = lambda line: None
    ) -> None:
        self.path = path
        self._take = take
        """Called with each line of metrics.jsonl."""
        self.logs = path / "logs"
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.leg = 1
        """Number of starts of the run, counting the first one and each restart."""
        self.trace_file: LineFile
        self._metrics: LineFile
        self._rollouts: LineFile
        self._samples: LineFile | None = None
        """None before `begin`, and after a write error."""
        self._evaluations: LineFile | None = None
        self._evaluated: LineFile | None = None
        """None in runs without [evaluation]."""
        self._files: list[LineFile] = []
        self._trackers = Trackers((), path)
        self._lock = DirectoryLock(path)
        self.recorded: RecordedStarts | None = None
        """What the traces of earlier starts say; reading them takes seconds for each 100 MB."""
        self._start: Start | None = None
        """The start that `begin` begins."""
        self.run_id = ""
        """The id of the run, the same after a resume."""
        self.changes: dict[str, str] = {}
        """Keys that changed since the last restart, each with both values."""

    def open(self, run: Run, resume: bool, prompts: Sequence[Ids] = ()) -> Checkpoint | None:
        """Lock the directory; return the checkpoint to resume from, or None to start at version 0.

        The trace of this start goes to a file of its own until `begin` is called. No other file is written.

        Args:
            run: the run.
            resume: whether it continues the run in the directory.
            prompts: token ids of every prompt, each of shape `[num_tokens]`.

        Raises:
            ValueError: see `find_checkpoint`; then nothing was written.
        """
        checkpoint = self.find_checkpoint(run, resume)
        self.logs.mkdir(parents=True, exist_ok=True)
        (self.path / "checkpoints").mkdir(exist_ok=True)
        self._claim(self._lock.take())
        if not resume:
            (self.path / ATTACHED).unlink(missing_ok=True)
        self.leg = self._next_leg()
        self.run_id = (self._kept_id() if resume else "") or token_hex(8)
        self.trace_file = LineFile((self.path / NEXT_TRACE).open("wb", buffering=0))
        self._files = [self.trace_file]
        self._start = Start(run, resume, checkpoint, prompts)
        return checkpoint

    def begin(self) -> None:
        """Write the files of this start; its trace takes the place of the last one, which gets its number.

        Call it when everything else is ready for the first event. After an error, the lines of earlier starts are as
        they were, and the last trace keeps its name.
        """
        assert self._start is not None, "call open first"
        run, is_resumed, checkpoint, prompts = self._start
        with _unchanged_after_error([self.path / name for name in GROWING]):
            self._open_files(run)
            if is_resumed:
                self._mark_resume(checkpoint)
            self._write_inputs(run, prompts)
            self._rename_traces()
        self._start = None
        self._trackers = Trackers(run.execute.trackers, self.path)
        self.checkpoints.retention = self._retention(run.execute, run.evaluation, run.algorithm)

    def _open_files(self, run: Run) -> None:
        self._metrics = open_at_end(self.path / METRICS)
        self._rollouts = open_at_end(self.path / ROLLOUTS)
        self._samples = open_at_end(self.path / SAMPLES)
        self._files += [self._metrics, self._rollouts, self._samples]
        if run.evaluation is not None:
            self._evaluations = open_at_end(self.path / EVALUATIONS)
            self._evaluated = open_at_end(self.path / EVALUATED)
            self._files += [self._evaluations, self._evaluated]

    def _write_inputs(self, run: Run, prompts: Sequence[Ids]) -> None:
        """Write the run file and its inputs, all or none of them.

        Tokens of another distribution are removed before run.json names the new one. A start that ends between the two
        finds the change again.
        """
        grown = dict.fromkeys((RUN, METRICS, ROLLOUTS, SAMPLES, CHROME_TRACE, TRACE))
        write_results(self.path, grown, self.run_id)
        if prompts:
            write_prompt_tokens(self.path, prompts)
        self._forget_other_samples()
        files = {**read_inputs(paths_of(run), self.path), RUN: encode_run(run)}
        write_files({self.path / name: data for name, data in files.items()})

    @property
    def other_samples(self) -> list[str]:
        """Changed keys on which the sampling distribution depends: saved tokens are of another one."""
        return [key for key in SAMPLED_WITH if key in self.changes]

    def _forget_other_samples(self) -> None:
        tokens = self.path / TOKENS
        if self.other_samples and tokens.is_dir():
            remove_all(tokens)
            tokens.mkdir(exist_ok=True)
            other = self.other_samples[0]
            logger.info(
                f"saved tokens were sampled with another {other}: their rollouts start again"
            )

    @property
    def is_gone(self) -> bool:
        """Whether someone removed or moved the directory while the run used it."""
        return not any((self.path / name).is_file() for name in (RUN, LOCK))

    @property
    def has_run(self) -> bool:
        """Whether the directory has a run: a trace or a checkpoint."""
        is_recorded = (self.path / TRACE).exists() or bool(earlier_trace_numbers(self.path))
        return is_recorded or self.checkpoints.newest() is not None

    def find_checkpoint(self, run: Run, resume: bool) -> Checkpoint | None:
        """Return the checkpoint from which `run` resumes, or None if it is new or has no complete checkpoint.

        Raises:
            ValueError: the directory is not writable, or another process uses it. Without `resume`: it has a run
                already. With `resume`: it has no run, the run has all its steps or was started with other settings,
                or every checkpoint is damaged. A trace is missing or damaged, or none saved the newest checkpoint.
        """
        if self.has_run and not resume:
            raise ValueError(
                f"execute.output {str(self.path)!r} holds a run; resume it with --resume, or name "
                "another directory with --set execute.output=…"
            )
        if not self.has_run and not resume:
            others = [
                name for name in (RUN, METRICS, ROLLOUTS, SAMPLES) if (self.path / name).is_file()
            ]
            if others:
                raise ValueError(
                    f"execute.output {str(self.path)!r} has {listing(others)} and no run; name another directory "
                    "with --set execute.output=…"
                )
        remedy = "copy the directory to a place that you can write to, and set execute.output to the copy"
        check_run_directory(self.path, remedy if resume else "")
        if not resume:
            return None
        if not self.has_run:
            raise ValueError(f"execute.output {str(self.path)!r} holds no run to resume")
        try:
            self._claim(self._lock.take_if_there())
            self._check_steps(run.algorithm.steps)
            self._check_settings(run)
            checkpoint = self.checkpoints.newest_whole()
            self._check_traces(checkpoint)
            return checkpoint
        except ValueError:
            self._lock.release()
            raise

    def write_step(self, figures: Mapping[str, object]) -> None:
        """Add a line to metrics.jsonl, and pass it to the trackers if it is a step."""
        self._metrics.write(json.dumps({**figures, RUN_ID: self.run_id}).encode() + b"\n")
        self._take(figures)
        step = figures.get("step")
        if isinstance(step, int):
            self._trackers.write(step, figures)
            return
        for file in (self._evaluations, self._evaluated):
            if file is not None:
                file.write(json.dumps(figures).encode() + b"\n")
        if self._samples is not None:
            self.write_samples(lambda: figures)

    def write_evaluation(self, result: EvaluationResult) -> None:
        """Add a line to evaluations.jsonl, and pass its scores to the trackers."""
        assert self._evaluations is not None, "only a run with [evaluation] evaluates"
        self._evaluations.write(msgspec.json.encode(result) + b"\n")
        self._trackers.write(result.step, result.figures)
        self.checkpoints.remove_old()

    def write_evaluated(self, line: Mapping[str, object]) -> None:
        """Add a line to evaluation_rollouts.jsonl."""
        assert self._evaluated is not None, "only a run with [evaluation] evaluates"
        self._evaluated.write(msgspec.json.encode(line) + b"\n")

    def is_evaluated(self, version: int) -> bool:
        """Return whether a version has a result that was not rolled back."""
        return any(result.step == version for result in read_evaluations(self.path))

    def write_samples(self, make: Callable[[], SampledGroup | Mapping[str, object]]) -> None:
        """Add the result of `make` to samples.jsonl; after an error, write no further samples and continue the run."""
        if self._samples is None:
            return
        try:
            sample = {**msgspec.to_builtins(make()), RUN_ID: self.run_id}
            self._samples.write(msgspec.json.encode(sample) + b"\n")
        except Exception as error:
            self._samples = None
            what = f"{self.path / SAMPLES} is no longer written: {type(error).__name__}: {error}"
            logger.warning(what)

    def write_rollout(
        self, rollout: int, buffered: BufferedRollout, text: str, facts: dict[str, Any]
    ) -> None:
        """Add a line to rollouts.jsonl."""
        line = {
            "rollout": rollout,
            "group": rollout // len(buffered.group),
            "line": buffered.line,
            "text": text,
            "num_tokens": buffered.num_tokens,
            "versions": buffered.versions,
            "reward": buffered.reward,
            **({"rewards": buffered.scores} if buffered.scores else {}),
            **({} if buffered.fault is None else {"verifier": buffered.fault}),
            **facts,
            RUN_ID: self.run_id,
        }
        self._rollouts.write(msgspec.json.encode(line) + b"\n")

    def _retention(
        self,
        execute: ExecuteConfig,
        evaluation: EvaluationConfig | None,
        algorithm: AlgorithmConfig,
    ) -> Retention:
        """Return which checkpoints the run keeps."""
        keep = execute.checkpoints
        if evaluation is None:
            return Retention(keep.keep_last)
        return Retention(
            keep.keep_last,
            keep.keep_best,
            lambda: {
                each.step: each.scores[each.main].value for each in read_evaluations(self.path)
            },
            lambda version: evaluation.is_due(version, algorithm.steps),
        )

    def close(self) -> None:
        """Close every file, and release the lock."""
        self._trackers.close()
        for file in self._files:
            file.close()
        if self._start is not None:  # it never began
            with suppress(OSError):
                (self.path / NEXT_TRACE).unlink(missing_ok=True)
        self._lock.release()

    def _claim(self, who: str) -> None:
        """Raise an error if `who` is the id of another process that has the lock."""
        if who:
            raise ValueError(
                f"execute.output {str(self.path)!r} is in use by process {who}: a directory has one run at a time"
            )

    def _check_steps(self, steps: int) -> None:
        """Refuse to resume a run that has all its steps."""
        checkpoint = self.checkpoints.newest()
        if checkpoint is not None and checkpoint.version >= steps:
            raise ValueError(
                f"execute.output {str(self.path)!r} holds a run that has all its steps: "
                f"algorithm.steps is {steps}, its checkpoint is of step "
                f"{checkpoint.version}; --set algorithm.steps={2 * checkpoint.version} goes on with it"
            )

    def _check_settings(self, run: Run) -> None:
        """Refuse to resume with settings that change the prompts of groups or the trained weights.

        Raises:
            RunError: the first such key whose value differs from that of the run.
            ValueError: run.json cannot be read.
        """
        path = self.path / RUN
        try:
            begun = decode_run(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: cannot be read, so the run cannot be resumed: {error}"
            ) from None
        for key in KEPT_BY_A_RESUME:
            value, was = (attrgetter(key)(each) for each in (run, begun))
            if value != was:
                its, now, then = first_difference(key, value, was)
                text = f"{its} is {now}, but the run in {str(self.path)!r} was begun with {then}: --resume needs the same"
                raise RunError(its, value, text=text)
        ranks = run.sync.adapter_rank, begun.sync.adapter_rank
        if ranks[0] != ranks[1]:
            key = "sync.mode" if None in ranks else "sync.lora_rank"
            value, was = (attrgetter(key)(each) for each in (run, begun))
            text = f"{key} is {value!r}, but the run in {str(self.path)!r} was begun with {was!r}: its checkpoints have no other weights"
            raise RunError(key, value, text=text)
        for trainer in range(run.num_trainers):
            algorithms = (each.as_seen_by(trainer).algorithm for each in (run, begun))
            key = f"{trainer_key(trainer)}.algorithm" if trainer else "algorithm"
            self._check_states(key, *algorithms)
        self._check_scores(
            *(scored_with(each.evaluation, each.rollout, each.verifier) for each in (run, begun))
        )
        self.changes = changes(begun, run)

    def _check_scores(self, now: Mapping[str, object], then: Mapping[str, object]) -> None:
        """Refuse evaluations whose scores cannot be compared with the earlier ones."""
        for name in now:
            if name in then and now[name] != then[name]:
                key = f"evaluation.{name}"
                text = (
                    f"{key} is {now[name]!r}, but the run in {str(self.path)!r} was begun with {then[name]!r}: --resume needs "
                    "the same, because the scores of a run are compared with each other"
                )
                raise RunError(key, now[name], text=text)

    def _check_states(self, key: str, now: AlgorithmConfig, then: AlgorithmConfig) -> None:
        """Refuse the algorithm of a trainer if it needs states that its checkpoints do not have."""
        start = f"but the run in {str(self.path)!r} was begun with"
        if now.optimizer.name != then.optimizer.name:
            key, value = f"{key}.optimizer.name", now.optimizer.name
            text = f"{key} is {value!r}, {start} {then.optimizer.name!r}: its checkpoints have the state of no other optimizer"
            raise RunError(key, value, text=text)
        if now.has_critic and not then.has_critic:
            key = f"{key}.name"
            text = f"{key} is {now.name!r}, {start} {then.name!r}: its checkpoints have no critic"
            raise RunError(key, now.name, text=text)

    def _mark_resume(self, checkpoint: Checkpoint | None) -> None:
        """Set newer checkpoints aside, and mark in the files of lines that later steps are discarded."""
        at = Position(version=0, groups_done=0) if checkpoint is None else checkpoint.position
        damaged = self.checkpoints.resume_from(checkpoint)
        for damage in damaged:
            logger.warning(f"a damaged checkpoint is skipped: {damage}")
        mark = {ROLLED_BACK_TO: at.version, "leg": self.leg}
        self.write_step({**mark, **({"damaged": damaged} if damaged else {})})
        prompts = {"groups_done": at.groups_done, "done_ahead": at.done_ahead}
        self._rollouts.write(msgspec.json.encode({**mark, **prompts, RUN_ID: self.run_id}) + b"\n")

    def _check_traces(self, checkpoint: Checkpoint | None) -> None:
        """Refuse a resume if a trace is missing or damaged, or none saved this checkpoint: the ledger could not balance."""
        if self.recorded is not None:
            return
        version = 0 if checkpoint is None else checkpoint.version
        remedy = "begin the run again with another execute.output"
        if version:
            remedy = (
                f"move trace*.jsonl to another directory: the ledger then begins at step {version}"
            )
        try:
            self.recorded = read_starts(self.path)
        except ValueError as error:
            raise ValueError(f"{error}; restore the whole file, or {remedy}") from None
        if checkpoint is None or self.recorded is None or not version:
            return
        saved = self.recorded.saved.get((LEADER, version))
        if saved is None:
            raise ValueError(
                f"{self.path / TRACE}: ends before step {version} was saved, whose checkpoint is there; restore the "
                f"whole file, or {remedy}"
            )
        check_position(checkpoint, saved)

    def _kept_id(self) -> str:
        """Return the id of a resumed run; if results.json was lost, the newest trace has it. Empty if none has it."""
        trace = self.path / TRACE
        newest = trace if has_first_line(trace) else earlier_trace_path(self.path, self.leg - 1)
        recorded = recorded_run_id(newest) if newest.is_file() else ""
        return listed_run_id(trace) or recorded

    def _next_leg(self) -> int:
        """Return the number of this start. A trace without a complete line is of no start, and is overwritten."""
        num_earlier = max(earlier_trace_numbers(self.path), default=0)
        return num_earlier + 1 + has_first_line(self.path / TRACE)

    def _rename_traces(self) -> None:
        """Give the trace of the last start its number, and its name to that of this start."""
        trace = self.path / TRACE
        if has_first_line(trace):
            trace.rename(earlier_trace_path(self.path, self.leg - 1))
        self.trace_file.rename(trace)


def rollback_to(checkpoint: Checkpoint | None) -> RolledBack:
    """Return the rollback of a resume from a checkpoint, or from the start."""
    if checkpoint is None:
        return RolledBack(rolled_back_to=0)
    at = checkpoint.position
    return RolledBack(
        rolled_back_to=at.version,
        groups_done=at.groups_done,
        done_ahead=frozenset(at.done_ahead),
    )


def check_run_directory(path: Path, remedy: str = "") -> None:
    """Raise `ValueError` if a run could not write to its directory; nothing is left there.

    Args:
        path: the run directory, which may not exist yet.
        remedy: what to do; by default to name another directory.
    """
    end = f"; {remedy or 'name another directory with --set execute.output=…'}"
    try:
        for each in (path, *(path / name for name in DIRECTORIES)):
            check_writable(each, "execute.output")
        check_no_directory(path / RUN, "execute.output")
        for name in (LOCK, *GROWING):
            check_file_writable(path / name, "execute.output")
    except ValueError as error:
        raise ValueError(f"{error}{end}") from None


@contextmanager
def _unchanged_after_error(files: Sequence[Path]) -> Iterator[None]:
    """Cut files to their size, or remove new ones, if this block raises an error."""
    sizes = {path: path.stat().st_size if path.exists() else None for path in files}
    try:
        yield
    except BaseException:
        for path, size in sizes.items():
            with suppress(OSError):
                if size is None:
                    path.unlink(missing_ok=True)
                else:
                    os.truncate(path, size)
        raise
