"""Export a checkpoint of a run as a Hugging Face directory, or push it to the hub.

An exported directory has the weights, the config and the tokenizer, so `from_pretrained` and vLLM load it. It has no state
of the optimizer. With adapters apart it has the LoRA adapters in PEFT's format, and no weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from streamrl.executor.adapter_layers import ADAPTERS
from streamrl.executor.checkpoints import POSITION, Checkpoint, Checkpoints
from streamrl.executor.checksums import CHECKSUMS, find_damage, write_checksums
from streamrl.executor.transfer.shared_memory import replaced_directory
from streamrl.record.evaluation import best_step, read_evaluations
from streamrl.runfile.config import AdapterForm, CheckpointChoice, CheckpointsConfig
from streamrl.runfile.paths import check_writable
from streamrl.runfile.workload_config import HUB

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Files with the whole weights."""
OF_A_RESUME = (POSITION, CHECKSUMS, "trainer.pt")
"""Files that only a resume reads."""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
OF_CRITIC = "critic"
"""Begin of the names of a critic's files."""


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
        scored = [each for each in read_evaluations(directory) if each.step in kept]
        if not scored:
            raise ValueError(
                f"{directory}: no kept checkpoint has an evaluation score; set [evaluation] and "
                "execute.checkpoints.keep_best, or take the last one: --step last"
            )
        return checkpoints.read(best_step(scored))
    if choice not in kept:
        names = ", ".join(map(str, kept))
        raise ValueError(f"{directory}: no checkpoint of step {choice}; there are {names}")
    return checkpoints.read(int(choice))


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
        if not _REPOSITORY.fullmatch(target.removeprefix(HUB)):
            raise ValueError(f"{key} must be {HUB}OWNER/NAME or a directory, got {target!r}")
        return
    path = Path(target)
    try:
        _check_free(path)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    parent = path.absolute().parent
    if not parent.is_dir() and not parent.is_relative_to(output.absolute()):
        raise ValueError(f"{key} {path}: {parent} is no directory; make it, or name another")
    check_writable(parent, key)


def _check_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not empty; choose another directory, or remove it")


def export_checkpoint(checkpoint: Checkpoint, target: str, adapters: AdapterForm) -> str:
    """Write a checkpoint to a local directory, or push it to hf://OWNER/NAME; return where it is.

    Raises:
        ValueError: the directory is not empty, or the checkpoint is damaged or has no adapters to write.
        RuntimeError: the hub rejects it.
    """
    if damage := find_damage(checkpoint.path, reads_all=True):
        raise ValueError(f"{checkpoint.path}: {damage}; export another step: --step")
    if target.startswith(HUB):
        with TemporaryDirectory() as place:
            _copy(checkpoint.path, Path(place), adapters)
            return _push(Path(place), target.removeprefix(HUB), checkpoint.version)
    path = Path(target)
    _check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(path) as partial:
        _copy(checkpoint.path, partial, adapters)
    return str(path)


def _copy(checkpoint: Path, target: Path, adapters: AdapterForm) -> None:
    for file in _files(checkpoint, adapters):
        shutil.copyfile(file, target / file.name)
    write_checksums(target)


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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(
            folder_path=directory, repo_id=name, commit_message=f"Upload step {version}"
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"{HUB}{name}: the hub does not take the checkpoint: {reason}"
        ) from error
    return f"{HUB}{name}"
