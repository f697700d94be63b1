"""Export a checkpoint of a run as a Hugging Face directory, or push it to the hub.

An exported directory has the weights, the config and the tokenizer, so `from_pretrained` and vLLM load it. It has no state
of the optimizer. With adapters apart it has the LoRA adapters in PEFT's format, and no weights.

`MARKER` in an exported directory has the id of the run. A later export of the same run replaces the directory, unless it
has files that the run did not write, or changed ones.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from streamrl.executor.adapter_layers import ADAPTERS
from streamrl.executor.checkpoints import POSITION, Checkpoint, Checkpoints
from streamrl.executor.checksums import (
    CHECKSUMS,
    find_damage,
    find_unlisted,
    write_checksums,
)
from streamrl.executor.sampling import SAMPLING_KEYS, sampling_keys
from streamrl.executor.transfer.shared_memory import replaced_directory
from streamrl.record.evaluation import EvaluationResult, best_step, read_evaluations
from streamrl.record.run_directory import RUN, TRACE
from streamrl.runfile.config import AdapterForm, CheckpointChoice, CheckpointsConfig
from streamrl.runfile.files import read_recorded_run
from streamrl.runfile.paths import check_writable
from streamrl.runfile.reading import read_json
from streamrl.runfile.result_files import listed_run_id
from streamrl.runfile.workload_config import HUB

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Files with the whole weights."""
OF_A_RESUME = (POSITION, CHECKSUMS, "trainer.pt")
"""Files that only a resume reads."""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
OF_CRITIC = "critic"
"""Begin of the names of a critic's files."""
MARKER = "exported.json"
"""File of an exported directory with the run and the step that it is from, and the sampling of its evaluations."""


class _Exported(msgspec.Struct, frozen=True):
    run: str
    step: int
    sampling: dict[str, Any] | None = None
    """As `sampling_keys`; None in exports of earlier versions."""


def choose_checkpoint(directory: Path, choice: CheckpointChoice | int) -> Checkpoint:
    """Return a checkpoint of a run: the last one, the one with the best evaluation score, or that of a step.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged.
    """
    checkpoints = Checkpoints(directory / "checkpoints")
    kept = checkpoints.versions()
    if not kept:
        raise ValueError(f"{directory}: the run has no complete checkpoint")
    if choice == "last":
        return checkpoints.read(kept[-1])
    if choice == "best":
        if not (scored := _scored(directory, kept)):
            raise ValueError(
                f"{directory}: no kept checkpoint has an evaluation score; set [evaluation] and "
                "execute.checkpoints.keep_best, or take the last one: --step last"
            )
        return checkpoints.read(best_step(scored))
    if choice not in kept:
        names = ", ".join(map(str, kept))
        raise ValueError(f"{directory}: no checkpoint of step {choice}; there are {names}")
    return checkpoints.read(int(choice))


def _scored(directory: Path, kept: Sequence[int]) -> list[EvaluationResult]:
    return [each for each in read_evaluations(directory) if each.step in kept]


def best_kept(directory: Path, kept: Sequence[int]) -> int | None:
    """Return the step of the kept checkpoint with the best score; None if none has a score."""
    scored = _scored(directory, kept)
    return best_step(scored) if scored else None


def say_choice(directory: Path, choice: CheckpointChoice | int, step: int) -> str:
    """Return why `choose_checkpoint` took a step: "best avg@2 of 4 checkpoints, 0.280"."""
    if choice != "best":
        return "the last checkpoint" if choice == "last" else "as named"
    scored = _scored(directory, Checkpoints(directory / "checkpoints").versions())
    (own,) = (each for each in scored if each.step == step)
    best = own.scores[own.main].value
    equal = sum(each.scores[own.main].value == best for each in scored)
    newest = f", the newest of {equal} equal ones" if equal > 1 else ""
    checkpoints = "checkpoint" if len(scored) == 1 else "checkpoints"
    return f"best {own.main} of {len(scored)} scored {checkpoints}, {best:.3f}{newest}"


def exported_step(directory: Path, config: CheckpointsConfig) -> int | None:
    """Return the step that is in the directory of `execute.checkpoints.export`; None if a run has no such export."""
    if config.export is None or config.export.startswith(HUB):
        return None
    marker, run_id = _marker_in(Path(config.export)), _run_id(directory)
    return marker.step if marker is not None and marker.run == run_id else None


def check_export(config: CheckpointsConfig, output: Path) -> None:
    """Raise `ValueError` if the run cannot export a checkpoint where `execute.checkpoints.export` says.

    Args:
        config: the section `[execute.checkpoints]`.
        output: the run directory, in which an export may be.
    """
    key, target = "execute.checkpoints.export", config.export
    if target is None:
        return
    if target.startswith(HUB):
        _check_repository(target, key)
        return
    try:
        path = _followed(Path(target))
        _check_outside(path, output)
        _check_free(path, _run_id(output), reads_all=False)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    check_writable(path.absolute().parent, key)


def _check_repository(target: str, key: str) -> None:
    """Raise `ValueError` unless a target is a repository of the hub."""
    if not _REPOSITORY.fullmatch(target.removeprefix(HUB)):
        raise ValueError(f"{key} must be {HUB}OWNER/NAME or a directory, got {target!r}")


def _followed(path: Path) -> Path:
    """Return the directory that a symbolic link names, so that the link stays; raise `ValueError` if it names none."""
    if not path.is_symlink():
        return path
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):  # of a loop, in older versions of Python
        raise ValueError(f"{path} is a link to nothing; choose another directory") from None


def _check_outside(path: Path, directory: Path) -> None:
    """Raise `ValueError` for a path among the checkpoints of a run directory, which the run itself removes."""
    own = directory / "checkpoints"
    if path.resolve().is_relative_to(own.resolve()):
        raise ValueError(
            f"{path} is in {own}, where the run removes checkpoints; choose another directory"
        )


def _run_id(directory: Path) -> str:
    """Return the id of the run in a directory; empty if it has none."""
    return listed_run_id(directory / TRACE)


def _check_free(path: Path, run_id: str, *, reads_all: bool) -> None:
    """Raise `ValueError` unless a directory is new, empty, or an unchanged export of the run with this id."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not run_id or _exporter_of(path) != run_id:
        raise ValueError(f"{path} is not empty; choose another directory, or remove it")
    if others := find_unlisted(path) or find_damage(path, reads_all=reads_all):
        raise ValueError(
            f"{path} is an export of this run, but {others}; choose another directory, or remove it"
        )


def _exporter_of(path: Path) -> str:
    """Return the id of the run that exported a directory; empty if none did."""
    marker = _marker_in(path)
    return "" if marker is None else marker.run


def _marker_in(path: Path) -> _Exported | None:
    try:
        return msgspec.convert(read_json(path / MARKER), _Exported)
    except (OSError, ValueError, RecursionError):
        return None


def sampling_of_export(path: Path) -> dict[str, Any]:
    """Return the values of `SAMPLING_KEYS` that the run of an export evaluated with; empty if the directory has none."""
    marker = _marker_in(path)
    found = {} if marker is None else marker.sampling or {}
    return {key: value for key, value in found.items() if key in SAMPLING_KEYS}


def export_checkpoint(checkpoint: Checkpoint, target: str, adapters: AdapterForm) -> str:
    """Write a checkpoint to a local directory, or push it to hf://OWNER/NAME; return where it is.

    An unchanged export of the same run is replaced.

    Raises:
        ValueError: the directory has other files, or the checkpoint is damaged or has no adapters to write.
        RuntimeError: the hub rejects it.
    """
    if damage := find_damage(checkpoint.path, reads_all=True):
        raise ValueError(f"{checkpoint.path}: {damage}; export another step: --step")
    if target.startswith(HUB):
        _check_repository(target, "the target")
        with TemporaryDirectory() as place:
            _copy(checkpoint.path, Path(place), adapters)
            write_checksums(Path(place))
            return _push(Path(place), target.removeprefix(HUB), checkpoint.version)
    path = _followed(Path(target))
    directory = checkpoint.path.parents[1]
    run_id = _run_id(directory)
    _check_outside(path, directory)
    _check_free(path, run_id, reads_all=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(path) as partial:
        _copy(checkpoint.path, partial, adapters)
        if run_id:
            marker = _Exported(run_id, checkpoint.version, _sampling_in(directory))
            (partial / MARKER).write_bytes(msgspec.json.encode(marker))
        write_checksums(partial)
    return str(path)


def _sampling_in(directory: Path) -> dict[str, Any] | None:
    if not (directory / RUN).is_file():
        return None
    run = read_recorded_run(directory / RUN)
    return sampling_keys(run.evaluation, run.rollout)


def _copy(checkpoint: Path, target: Path, adapters: AdapterForm) -> None:
    for file in _files(checkpoint, adapters):
        shutil.copyfile(file, target / file.name)


def _files(checkpoint: Path, adapters: AdapterForm) -> Iterator[Path]:
    weights = {file.name for pattern in WEIGHTS for file in checkpoint.glob(pattern)}
    for file in sorted(checkpoint.iterdir()):
        is_state = file.name in OF_A_RESUME or file.name.startswith(OF_CRITIC)
        is_left_out = adapters == "apart" and file.name in weights
        if file.is_file() and not is_state and not is_left_out:
            yield file
    if adapters == "apart":
        if not (checkpoint / ADAPTERS).is_dir():
            text = (
                "has no adapters: only runs with sync.mode 'lora' have some; set adapters to merged"
            )
            raise ValueError(f"{checkpoint} {text}")
        yield from sorted((checkpoint / ADAPTERS).iterdir())


def _push(directory: Path, name: str, version: int) -> str:
    """Push a directory to a model repository of the hub, which is created as a private one if it is missing."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(
            folder_path=directory, repo_id=name, commit_message=f"Upload step {version}"
        )
    except Exception as error:  # versions of the hub's library have errors of the network that are of other packages
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"{HUB}{name}: the hub does not take the checkpoint: {reason}"
        ) from error
    return f"{HUB}{name}"
