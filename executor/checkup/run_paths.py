"""Check that prompts can be read and scored, and that the run directory and the export's directory are free."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.doctor.files import TOKENIZERS
from streamrl.executor.checkpoint_export import check_export
from streamrl.executor.evaluation import check_held_out, held_out_prompts
from streamrl.executor.prompts import PromptWorkload, expecting_policy, load_tokenizer
from streamrl.executor.record import RunDirectory
from streamrl.executor.verifier.reward_checks import (
    check_prompts,
    check_reward_model,
    find_missing_fields,
)
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import CheckpointsConfig, Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.findings import Changes, Finding, Level, say
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.runfile.scorer_choice import function_of, scorer_names
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.prompt_records import EXPECTED, read_sources

AS_IT_SAYS = "add the field, or name its column with the key that the text names"
SHORTER = "leave it out, or set workload.max_prompt_tokens to what prompts have"


def find(run: Run) -> Iterator[Finding]:
    """Yield findings on prompts, reward model and run directory; of a run without weights, only on its scorers."""
    if run.model.path is None:
        yield from _find_scorers(run.verifier)
    if run.model.path is not None:
        tokenize = cache(partial(_try_tokenizer, run.model, partial(PromptWorkload, run)))
        gives_reward = run.environment is not None and run.environment.implementation is not None
        yield from _find_prompts(
            run.verifier, run.workload, run.policies, tokenize, gives_reward=gives_reward
        )
        if run.evaluation is not None:
            yield from _find_held_out(run.evaluation, run.verifier, run.workload, tokenize)
        yield from _find_reward_model(run.verifier)
        yield from _find_output(run.execute.output, run.algorithm.steps)
        yield from _find_export(run.execute.checkpoints, Path(run.execute.output))


def _find_scorers(verifier: VerifierConfig) -> Iterator[Finding]:
    """Warn of functions that execute would not find; import nothing."""
    for number, reward in enumerate(verifier.rewards):
        function = function_of(reward.scorer)
        if function is None:
            continue
        top, _, _ = function.place.partition(".")
        is_there = Path(function.place).is_file() if function.is_in_file else find_spec(top)
        if not is_there:
            text = f"{verifier.key(number)}: {reward.scorer}: there is no {function.place} here"
            fix = "simulate does without it; for execute, create the file or make its module importable (PYTHONPATH or pip install)"
            yield _finding("warning", "scorer", text, fix)


def _find_prompts(
    verifier: VerifierConfig,
    workload: WorkloadConfig,
    policies: PoliciesConfig,
    tokenize: Callable[[], Tokenized],
    *,
    gives_reward: bool,
) -> Iterator[Finding]:
    """Check that prompts can be read, and that they have the fields that the verifier's scorers need.

    Without scorers, the environment must give the reward. `tokenize` returns the error of prompts that are tokenized, and notes; see `_try_tokenizer`.
    """
    rewards = verifier.rewards
    if not workload.sources or not (rewards or gives_reward):
        text = f"workload.prompts={workload.prompts} with verifier.scorer={verifier.scorer}: execute needs both"
        fix = f"name a data set, and a verifier.scorer: {', '.join(scorer_names())}"
        yield _finding("error", "prompts", text, fix)
        return
    try:
        sources = read_sources(workload)
    except ValueError as error:
        yield _finding("error", "prompts", str(error), _fix_of_data(error, "workload"))
        return
    lacks = []
    if (policy := expecting_policy(policies, workload.ranker)) is not None:
        lacks = [
            lack.say(source)
            for source in sources
            for lack in find_missing_fields(source, [(EXPECTED,)])
        ]
    for text in lacks:
        fix = f"add it, or choose another policy ({policy} goes by it)"
        yield _finding("error", "prompts", text, fix)
    try:
        if rewards:
            check_prompts(verifier, workload)
    except ValueError as error:
        fix = f"{AS_IT_SAYS}, or choose another verifier.scorer"
        yield _finding("error", "prompts", str(error), fix)
        return
    refusal, notes, _ = tokenize()
    for note in notes or [note for source in sources for note in source.notes]:
        name = "end-tokens" if note.startswith("model.path") else "prompts"
        yield _finding("warning", name, note, "correct the files, or leave it as it is")
    if not lacks and refusal:
        fix = AS_IT_SAYS if "fields." in refusal else SHORTER
        yield _finding("error", "prompts", refusal, fix)
    elif not lacks:
        num_prompts = sum(len(source.records) for source in sources)
        by = ", ".join(reward.label for reward in rewards)
        text = f"workload.prompts: {num_prompts:,} prompts, with all that scoring reads: {by}"
        yield _finding("ok", "prompts", text)


def _fix_of_data(error: ValueError, section: str) -> str:
    """Return what to do about the data set of a section that cannot be read."""
    if isinstance(error, RunError):
        return f"change {error.key}"
    if "fields." in str(error):
        return AS_IT_SAYS
    return (
        'write a line {"prompt": "...", "answer": "..."} for each prompt, or name its columns in '
        f"{section}.fields"
    )


def _find_held_out(
    evaluation: EvaluationConfig,
    verifier: VerifierConfig,
    workload: WorkloadConfig,
    tokenize: Callable[[], Tokenized],
) -> Iterator[Finding]:
    """Check that the prompts of evaluations can be read, scored and tokenized; see `_find_prompts`."""
    try:
        check_held_out(evaluation, verifier, workload)
    except ValueError as error:
        fix = _fix_of_data(error, "evaluation")
        yield _finding("error", "held-out", str(error), fix)
        return
    own = tokenize().workload
    if own is None:  # a finding on the run's own prompts says why
        return
    try:
        prompts = held_out_prompts(evaluation, workload, own)
    except ValueError as error:
        yield _finding("error", "held-out", str(error), SHORTER)
        return
    text = f"evaluation: {len(prompts):,} held-out prompts, with all that scoring reads"
    yield _finding("ok", "held-out", text)


class Tokenized(NamedTuple):
    """What happens if prompts are tokenized."""

    refusal: str
    """The error; empty if there is none."""
    notes: list[str]
    workload: PromptWorkload | None = None
    """The prompts, if they can be tokenized."""


def _try_tokenizer(model: ModelConfig, make: Callable[[Any], PromptWorkload]) -> Tokenized:
    """Tokenize the prompts; skip a model without a tokenizer, which another check reports."""
    path = Path(str(model.path))
    if not any((path / name).is_file() for name in TOKENIZERS):
        return Tokenized("", [])
    try:
        workload = make(load_tokenizer(str(path)))
        workload.check_vocabulary(load_model(model).vocab_size)
    except ValueError as error:
        return Tokenized(str(error), [])
    return Tokenized("", workload.notes, workload)


def _find_reward_model(verifier: VerifierConfig) -> Iterator[Finding]:
    """Check that a local reward model is a model that scores."""
    try:
        check_reward_model(verifier)
    except ValueError as error:
        fix = "name a directory with a model that was trained to score, or hf://NAME of one on the hub"
        yield _finding("error", "reward-model", str(error), fix)
        return
    if verifier.reward_model is not None:
        text = f"verifier.reward: {verifier.reward_model.model} is what a replica of the reward model loads"
        yield _finding("ok", "reward-model", text)


def _find_output(output: str, steps: int) -> Iterator[Finding]:
    """Check that the run directory can be created; if it has a run, report the step of its checkpoint."""
    path = Path(output)
    if RunDirectory(path).has_run:
        yield _taken(steps, path)
    elif (parent := _nearest_existing(path)) and not _is_writable(parent):
        text = f"execute.output: {path} cannot be made, as {parent} is no directory to write to"
        yield _finding("error", "output", text, "set execute.output=runs/run")
    else:
        yield _finding("ok", "output", f"execute.output: {path} is free")


def _find_export(config: CheckpointsConfig, output: Path) -> Iterator[Finding]:
    """Check that the run can export a checkpoint at its end."""
    try:
        check_export(config, output)
    except ValueError as error:
        yield _finding("error", "export", str(error), "name another directory, or remove the key")


def _taken(steps: int, path: Path) -> Finding:
    """Return a finding with the progress of the run in the directory, and how to continue it."""
    saved = RunDirectory(path).checkpoints.newest()
    where = "no checkpoint yet" if saved is None else f"a checkpoint of step {saved.version}"
    goes_on = "streamrl execute --resume goes on with it"
    if saved is not None and saved.version >= steps:
        where += f", so algorithm.steps={steps} leaves nothing to do"
        goes_on += f" where --set algorithm.steps is above {saved.version}"
    changes: Changes = {"execute.output": str(_free_sibling(path))}
    text = f"execute.output: {path} holds a run with {where}"
    return _finding("warning", "output", text, f"{goes_on}; {say(changes)} begins another", changes)


def _free_sibling(path: Path) -> Path:
    number, path = 2, path.absolute()
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _is_writable(path: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _finding(
    level: Level, name: str, text: str, fix: str = "", changes: Changes | None = None
) -> Finding:
    return Finding(level=level, topic="files", name=name, text=text, fix=fix, changes=changes or {})
