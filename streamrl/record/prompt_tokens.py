"""Write and read prompts.npz, the token ids of all prompts of a run. `DrawnGroup.prompt` is an index into it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from streamrl.runfile.result_files import write_file

PROMPTS = "prompts.npz"

Ids = npt.NDArray[np.int32]


def write_prompt_tokens(directory: Path, prompts: Sequence[Ids]) -> None:
    """Write the token ids of every prompt, in order, into a run directory, all or none of them."""
    ends = np.cumsum([len(ids) for ids in prompts], dtype=np.int64)
    data = BytesIO()
    np.savez(data, ids=np.concatenate(prompts), ends=ends)
    write_file(directory / PROMPTS, data.getvalue())


def check_prompt_tokens(directory: Path, prompts: Sequence[Ids]) -> None:
    """Raise `ValueError` if a resumed run has other prompts than the run started with.

    A checkpoint records finished prompts by their index, so other prompts would be skipped or repeated.
    """
    path = directory / PROMPTS
    if not path.exists():  # an earlier version, or the run died before it was written
        return
    try:
        old_prompts = read_prompt_tokens(directory)
    except ValueError as error:
        raise ValueError(
            f"{error}; if workload.prompts is as it was, remove this file: --resume writes it again"
        ) from None
    if len(old_prompts) != len(prompts):
        raise ValueError(
            f"workload.prompts has {len(prompts)} lines, but the run in {str(directory)!r} was begun with "
            f"{len(old_prompts)}: --resume needs the same prompts"
        )
    for line, (ids, old_ids) in enumerate(zip(prompts, old_prompts, strict=True), start=1):
        if not np.array_equal(ids, old_ids):
            raise ValueError(
                f"workload.prompts: line {line} differs from the prompt with which the run in {str(directory)!r} was "
                "begun: --resume needs the same prompts"
            )


def read_prompt_tokens(directory: Path) -> list[Ids]:
    """Return the token ids of every prompt of a run, each of shape `[num_tokens]`.

    Raises:
        ValueError: prompts.npz is missing or damaged.
    """
    try:
        with np.load(directory / PROMPTS, allow_pickle=False) as arrays:
            return np.split(arrays["ids"], arrays["ends"][:-1])
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{directory / PROMPTS}: cannot read token ids of prompts: {error}"
        ) from None
