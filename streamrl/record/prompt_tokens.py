"""The token ids of a run's prompts, beside its trace: what `DrawnGroup.prompt` is an index of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

PROMPTS = "prompts.npz"

Ids = npt.NDArray[np.int32]


def write_prompt_tokens(directory: Path, prompts: Sequence[Ids]) -> None:
    """Write the token ids of every prompt, in order, into a run directory."""
    ends = np.cumsum([len(ids) for ids in prompts], dtype=np.int64)
    np.savez(directory / PROMPTS, ids=np.concatenate(prompts), ends=ends)


def read_prompt_tokens(directory: Path) -> list[Ids]:
    """Return the token ids of every prompt of a run, `[num_tokens]` each.

    Raises:
        ValueError: the directory holds none.
    """
    try:
        with np.load(directory / PROMPTS, allow_pickle=False) as arrays:
            return np.split(arrays["ids"], arrays["ends"][:-1])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{directory / PROMPTS}: no token ids of prompts: {error}") from None
