"""Store the experts that routers of a mixture chose for each token, so that the trainer can replay them.

Engine and trainer round differently, so their routers choose other experts for some tokens. Then the trainer computes
other probabilities than those that sampled. With `algorithm.router_replay` it takes the choices of the engine instead
(rollout routing replay, arXiv 2510.11370).

Choices are part of a token file's head (`streamrl.executor.token_files`). So they are removed with the tokens. A token
of a context takes layers x experts per token x 2 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Choices: TypeAlias = npt.NDArray[np.int16]
"""Numbers of the chosen experts, [tokens, layers, experts per token]; `UNKNOWN` for tokens without a choice."""
UNKNOWN = -1
CHOICE = np.dtype("<i2")  # the same bytes on every machine
SHAPE = struct.Struct("<IHH")
"""First position in the context, layers, experts per token."""


def encode_choices(first: int, choices: Choices) -> bytes:
    """Return the choices of the tokens of a context from position `first` on, as bytes; none without tokens."""
    if not len(choices):
        return b""
    _, layers, chosen = choices.shape
    return SHAPE.pack(first, layers, chosen) + np.ascontiguousarray(choices, CHOICE).tobytes()


def decode_choices(data: bytes) -> tuple[int, Choices]:
    """Return the first position and the choices in bytes of `encode_choices`.

    Raises:
        ValueError: the bytes are damaged.
    """
    try:
        first, layers, chosen = SHAPE.unpack_from(data)
        choices = np.frombuffer(data, CHOICE, offset=SHAPE.size).reshape(-1, layers, chosen)
    except (struct.error, ValueError) as error:
        raise ValueError(f"damaged expert choices: {error}") from None
    return first, choices


def end_of(parts: Iterable[bytes]) -> int:
    """Return the number of tokens at the start of a context whose choices are known."""
    ends = (first + len(choices) for first, choices in map(decode_choices, filter(None, parts)))
    return max(ends, default=0)


def merge_choices(parts: Iterable[bytes], num_tokens: int) -> Choices | None:
    """Return the choices of the first `num_tokens` tokens of a context; None if none are known.

    Where parts overlap, the earlier one counts: it is the one of the token's sampling.

    Raises:
        ValueError: the parts are of different models, or damaged.
    """
    merged: Choices | None = None
    for first, choices in map(decode_choices, filter(None, parts)):
        if merged is None:
            merged = np.full((num_tokens, *choices.shape[1:]), UNKNOWN, np.int16)
        if merged.shape[1:] != choices.shape[1:]:
            raise ValueError(f"expert choices of {choices.shape[1:]} and {merged.shape[1:]}")
        part = merged[first : first + len(choices)]
        np.copyto(part, choices[: len(part)], where=part == UNKNOWN)
    return merged
