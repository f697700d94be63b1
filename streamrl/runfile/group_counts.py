"""How many whole groups a share of a step's prompts is, by the digits that a run file has: no float decides."""

from __future__ import annotations

from fractions import Fraction

from streamrl.runfile.config import Run


def whole_groups(share: float, prompts_per_step: int) -> int:
    """Return `share` steps as groups, rounded down: 0.29 of 100 prompts are 29, which floats make 28 of."""
    return int(Fraction(repr(share)) * prompts_per_step)


def num_extra(run: Run) -> int:
    """Return the groups that are drawn for a step beyond those that it is made of (`policies.oversampling`)."""
    prompts = run.algorithm.prompts_per_step
    return whole_groups(run.policies.oversampling, prompts) - prompts
