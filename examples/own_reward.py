"""A reward function of your own: the last number of a completion must be the answer."""

from __future__ import annotations

import re
from typing import Any


def compute_score(completion: str, record: dict[str, Any]) -> float:
    """Return 1 for the right answer, 0.1 for another number, and 0 for none."""
    numbers = re.findall(r"-?\d+", completion)
    if not numbers:
        return 0.0
    return 1.0 if int(numbers[-1]) == int(record["ground_truth"]) else 0.1
