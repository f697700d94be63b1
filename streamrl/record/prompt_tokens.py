"""The token ids of a run's prompts, beside its trace: what `DrawnGroup.prompt` is an index of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

PROMPTS = "prompts.npz"

Ids = npt.NDArray[np.int32]


def write_prompt_tokens(directory: Path, prompts: Sequence[Ids]) -> None:
    """Write the token ids of every prompt, in order, into a run directory."""
    ends = np.cumsum([len(ids) for ids in prompts], dtype=np.int64)
    np.savez(directory / PROMPTS, ids=np.concatenate(prompts), ends=ends)


def check_prompt_tokens(directory: Path, prompts: Sequence[Ids]) -> None:
    """Raise `ValueError` where a run that resumes has other prompts than it began with, which say what is done of them."""
    if not (directory / PROMPTS).exists():  # it died before it had any, or is of an earlier version
        return
    begun = read_prompt_tokens(directory)
    if len(begun) != len(prompts):
        raise ValueError(
            f"workload.prompts has {len(prompts)} lines, but the run in {str(directory)!r} was begun with {len(begun)}: "
            "--resume needs the same"
        )
    for line, (ids, was) in enumerate(zip(prompts, begun, strict=True), start=1):
        if not np.array_equal(ids, was):
            raise ValueError(
                f"workload.prompts: line {line} is another than the run in {str(directory)!r} was begun with: "
                "--resume needs the same"
            )


def read_prompt_tokens(directory: Path) -> list[Ids]:
    """Return the token ids of every prompt of a run, `[num_tokens]` each.

    Raises:
        ValueError: the directory holds none.
    """
    try:
        with np.load(directory / PROMPTS, allow_pickle=False) as arrays:
            return np.split(arrays["ids"], arrays["ends"][:-1])
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(f"{directory / PROMPTS}: no token ids of prompts: {error}") from None
