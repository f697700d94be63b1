"""Write pushed weights as a checkpoint directory, which an inference server can load from a path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.torch_model import has_names_of_files, named_as_in_files
from streamrl.executor.transfer.shared_memory import read_buckets, write_version

CONFIG = "config.json"


@contextmanager
def weight_directory(model: str, manifest: Manifest, beside: Path) -> Iterator[Callable[[], Path]]:
    """Yield a function that writes a version to a new directory and returns it; remove it at the end.

    Files of weights whose names need no change are linked, or copied to another file system.

    Args:
        model: the Hugging Face directory of the model.
        manifest: the pushed weights.
        beside: where the directory is created.
    """
    target = beside / f"weights-{manifest.version:06d}-{os.getpid()}"

    def write() -> Path:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        shutil.copy(Path(model) / CONFIG, target / CONFIG)
        if has_names_of_files(model):
            for bucket in manifest.buckets:
                _link(Path(bucket.path), target / Path(bucket.path).name)
        else:
            write_version(
                named_as_in_files(model, read_buckets(manifest)), target, manifest.version
            )
        return target

    try:
        yield write
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copy(source, target)
