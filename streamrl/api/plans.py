"""Plan from Python, as `streamrl plan` does."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.runfile.config import Run
from streamrl.runfile.files import Offer
from streamrl.sim.planner.planner import Planned, make_plan


def plan(
    run: Run | Offer,
    watch: Callable[[int, str], None] = lambda *_: None,
    *,
    shows_own: bool | None = None,
) -> Planned:
    """Choose a plan among everything that a run's offer and its section `[plan]` leave open, on all cores.

    Args:
        run: what `load_run` or `load_offer` returns.
        watch: called with the number of finished simulations and the name of the current phase.
        shows_own: whether the layout of the run file is a row of the answer. By default it is, unless
            `load_offer` replaced it or the file has none.

    Raises:
        ValueError: no plan fits, or none is within budget. The error names the constraint.
        RuntimeError: no plan reaches the run's last step.
        RunError: the run file has several trainers, or a pool has no price.
    """
    has_layout = not isinstance(run, Offer) or run.has_layout
    offered = run.run if isinstance(run, Offer) else run
    return make_plan(offered, watch, shows_own=has_layout if shows_own is None else shows_own)
