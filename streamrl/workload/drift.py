"""How a workload changes over a run: linearly, from what its first step has to what a later one has."""

from __future__ import annotations

import numpy as np

from streamrl.hardware.tables import Floats
from streamrl.runfile.config import Run


class Drift:
    """The line on which lengths grow, and with them whatever else depends on how old a figure is."""

    def __init__(self, run: Run) -> None:
        lengths = run.workload.lengths
        steps = run.algorithm.steps
        if lengths is not None and lengths.drift_steps is not None:
            steps = lengths.drift_steps
        self._last = max(1, steps - 1)
        self._prompts_per_step = run.algorithm.prompts_per_step

    def at(self, groups: Floats, first: float, last: float | None) -> Floats:
        """Return a figure for each of `groups`: `first` in the first step, `last` from the end of the drift on.

        A group belongs to the step that it is drawn for where none before it is dropped. Where `last` is
        absent nothing drifts.
        """
        if last is None:
            return np.full(len(groups), first)
        share = np.minimum(1.0, groups // self._prompts_per_step / self._last)
        drifted: Floats = first + (last - first) * share
        return drifted
