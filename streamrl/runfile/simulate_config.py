"""The section `[simulate]` of a run file: how long a run is simulated, whatever the length of its training."""

from __future__ import annotations

from streamrl.runfile.section import Section


class SimulateConfig(Section, frozen=True, kw_only=True):
    """When enough steps are simulated: once their mean time is known well enough, or there are too many."""

    interval: float = 0.01
    """Half the 95 % interval of the mean step time that is wanted, as a share of the mean."""
    max_steps: int = 400
    """Most steps that are simulated; where the interval is still wider then, every output says so."""
