"""How long the rollouts of a run are, as far as its run file says."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from streamrl.runfile.config import Run
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.recorded import Recorded
from streamrl.workload.workload import BLOCK, load_source


class MeanLengths(NamedTuple):
    """Tokens of a mean rollout."""

    prompt: float
    output: float
    context: float
    """Of a rollout while it is decoded, at a moment drawn at random: long ones are seen most."""
    cut_off: float
    """Share of the outputs that would be longer than `rollout.max_tokens`, and end there."""

    @property
    def total(self) -> float:
        """Prompt and output."""
        return self.prompt + self.output


def mean_lengths(run: Run) -> MeanLengths | None:
    """Return the mean over the first groups of a run, without drift; None where the run file names no lengths.

    Lengths that cannot be read are None too: that is a finding on files.
    """
    if run.workload.lengths is None:
        return None
    try:
        return _mean(
            run.workload.lengths, run.algorithm.group_size, run.rollout.max_tokens, run.seed
        )
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _mean(config: LengthsConfig, group_size: int, most: int, seed: int) -> MeanLengths:
    source = load_source(config)
    if isinstance(source, Recorded):
        lengths, prompts = source.block(0, BLOCK, group_size)
    else:
        lengths, prompts = source.sample(np.random.default_rng([seed, 0]), BLOCK, group_size)
    whole = np.rint(lengths * config.scale)
    capped = np.clip(whole, 1, most)
    prompt, halfway = float(prompts.mean()), float((capped**2).sum() / capped.sum() / 2)
    return MeanLengths(prompt, float(capped.mean()), prompt + halfway, float((whole > most).mean()))
