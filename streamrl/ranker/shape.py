"""What a prompt's shape tells of the length of its outputs: sizes, numbers, symbols."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUMBER = re.compile(r"\d+")
MOST_DIGITS = 15  # of a number whose size counts: a float holds it, and none asks for so much
COUNTED = ("+-*/=^<>", "\\", "\n", "?", ",.;:", "([{", "_$")
"""Sets of characters; how many of each a prompt has."""
NAMES = ("characters", "words", "numbers", "largest", "last", "sum", "upper", *COUNTED)


def shape_of(texts: Sequence[str]) -> Floats:
    """Return the features of prompts [prompts, len(NAMES)], each log(1 + a count or a size)."""
    return np.log1p(
        np.array([_features(text) for text in texts], dtype=np.float64).reshape(-1, len(NAMES))
    )


def _features(text: str) -> list[float]:
    numbers = [float(digits[:MOST_DIGITS]) for digits in NUMBER.findall(text)] or [0.0]
    return [
        len(text),
        len(text.split()),
        len(numbers),
        max(numbers),
        numbers[-1],
        sum(numbers),
        sum(map(str.isupper, text)),
        *(sum(map(text.count, symbols)) for symbols in COUNTED),
    ]
