"""Write and read prompts.npz, the token ids of all prompts of a run. `DrawnGroup.prompt` is an index into it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamrl.runfile.reading import DAMAGE_OF_ARRAYS
from streamrl.runfile.result_files import write_file

PROMPTS = "prompts.npz"
DIGEST_BYTES = 16
"""Size of a BLAKE2b-128 digest, which detects any change that nobody forged."""

Ids = npt.NDArray[np.int32]


def write_prompt_tokens(directory: Path, prompts: Sequence[Ids]) -> None:
    """Write the token ids of every prompt, in order, into a run directory, all or none of them."""
    ends = np.cumsum([len(ids) for ids in prompts], dtype=np.int64)
    data = BytesIO()
    np.savez(data, ids=np.concatenate(prompts), ends=ends)
    write_file(directory / PROMPTS, data.getvalue())


def digest_of(prompts: Sequence[Ids]) -> str:
    """Return a digest of the token ids of every prompt, in order; the trace of an executed run has it."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for ids in prompts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def check_prompt_tokens(directory: Path, prompts: Sequence[Ids], digest: str = "") -> None:
    """Raise `ValueError` if a resumed run has other prompts than the run started with.

    A checkpoint records finished prompts by their index, so other prompts would be skipped or repeated.

    Args:
        directory: the run directory. Its prompts.npz names the line that differs; it may be lost.
        prompts: token ids of every prompt, each of shape `[num_tokens]`.
        digest: that of the prompts in the traces of the run; empty if none has it.
    """
    if (directory / PROMPTS).exists():
        _check_lines(directory, prompts)
    if digest not in ("", digest_of(prompts)):
        raise ValueError(
            f"workload.prompts: not the prompts with which the run in {str(directory)!r} was begun, as its trace says: "
            "--resume needs the same prompts"
        )


def _check_lines(directory: Path, prompts: Sequence[Ids]) -> None:
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
    except (OSError, *DAMAGE_OF_ARRAYS) as error:
        raise ValueError(
            f"{directory / PROMPTS}: cannot read token ids of prompts: {error}"
        ) from None
