"""Measure how often to fit a text ranker again while outputs grow from 10,000 to 20,000 tokens.

The ranker is assumed to know half of the variance between prompts at the time of its fit. The ranks
of prompts change slowly: after twelve epochs their correlation with the initial ranks is a half.
The results are recall@20% over all windows, by text alone and with past lengths of prompts, and the
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from math import exp, log, sqrt
from statistics import mean, stdev

import numpy as np

from benchmarks.bench_drift import LENGTH, PROMPTS, SEEDS, SPREAD, learn, order_of
from streamrl.hardware.operator_tables import Floats
from streamrl.ranker.text_ranker import fit_text

EPOCHS = 12
EVERY = (1, 3, 6, EPOCHS)
"""Epochs from one fit to the next. The last value fits once, at the start."""
KNOWN_BY_TEXT = 0.5
"""Share of the variance between prompts that a text ranker knows."""
KEPT = 0.5
"""Correlation of the final lengths of prompts with the initial ones."""


def main() -> None:
    """Print one JSON object per figure."""
    seconds = fit_time()
    for every in EVERY:
        print(json.dumps({"name": f"retune/{_name(every)}", **row(every, seconds)}), flush=True)


def row(every: int, seconds: float) -> dict[str, object]:
    """Return the recall and the cost of a fit every `every` epochs."""
    found: dict[str, object] = {
        "fits": EPOCHS // every,
        "value": round(EPOCHS // every * seconds, 3),
    }
    found["unit"] = "s"
    for name, has_history in (("text", False), ("text and past", True)):
        each = [mean(recalls(seed, every, has_history=has_history)) for seed in range(SEEDS)]
        found[name] = round(mean(each), 3)
        found[f"{name} error"] = round(stdev(each) / sqrt(SEEDS), 3)
    return found


def recalls(seed: int, every: int, *, has_history: bool) -> list[float]:
    """Return the recall of each window of a training."""
    lengths = PromptLengths(seed)

    def groups() -> Iterator[tuple[int, float, int]]:
        for group, prompt in enumerate(order_of(seed, EPOCHS * PROMPTS)):
            now, epoch = group / PROMPTS, group // PROMPTS
            own = lengths.at(now)[prompt] + log(2) * now / EPOCHS
            text = lengths.by_text(epoch - epoch % every)[prompt]
            yield prompt, float(own), round(LENGTH * exp(text))

    return [recall for recall, _ in learn(seed, groups(), has_history=has_history)]


class PromptLengths:
    """The log lengths of prompts over the epochs of a training."""

    def __init__(self, seed: int) -> None:
        self._old, self._new = np.random.default_rng([2, seed]).normal(0, SPREAD, (2, 2, PROMPTS))

    def at(self, epoch: float) -> Floats:
        """Return the log lengths of all prompts at an epoch, minus their mean."""
        known, rest = self._parts(epoch)
        found: Floats = known + rest
        return found

    def by_text(self, epoch: float) -> Floats:
        """Return the part of the log lengths that a text ranker knows if it is fitted at an epoch."""
        return self._parts(epoch)[0]

    def _parts(self, epoch: float) -> tuple[Floats, Floats]:
        kept = 1 - (1 - KEPT) * epoch / EPOCHS
        known, rest = kept * self._old + sqrt(1 - kept**2) * self._new
        return sqrt(KNOWN_BY_TEXT) * known, sqrt(1 - KNOWN_BY_TEXT) * rest


def fit_time() -> float:
    """Return the seconds of one fit to the texts and lengths of all prompts."""
    rng = np.random.default_rng(0)
    words = [f"word{n}" for n in range(3000)]
    texts = [" ".join(rng.choice(words, 60)) + f" {n}?" for n in range(PROMPTS)]
    lengths = rng.normal(8, 1, PROMPTS)
    fit_text(texts, lengths)  # imports
    began = time.perf_counter()
    fit_text(texts, lengths)
    return time.perf_counter() - began


def _name(every: int) -> str:
    return f"every {every} epochs" if every < EPOCHS else "once"


if __name__ == "__main__":
    main()
