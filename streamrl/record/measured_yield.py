"""What a full batch yields on a machine that was measured: what an executed run knows of it beforehand."""

from __future__ import annotations

from pathlib import Path

from streamrl.hardware.machine_fit import fit_decode
from streamrl.hardware.machine_profile import read_measured
from streamrl.hardware.profile_match import check_fits
from streamrl.hardware.profile_pace import at_its_pace
from streamrl.record.decode_yield import DecodeYield
from streamrl.runfile.config import Run


def measured_yield(run: Run) -> list[DecodeYield]:
    """Return what a full batch of each kind of replica yields by the profile that the run file names, if it is of this run.

    Executed replicas have memory for the longest output of `max_running` rollouts, so nothing else bounds a batch.
    """
    if run.costs.profile is None:
        return []
    path = Path(run.costs.profile)
    try:
        profile = at_its_pace(read_measured(path))
        for kind in range(run.num_kinds):
            check_fits(profile, run.of_kind(kind), path)
    except ValueError:
        return []
    fits = [fit_decode(profile.decode, own.max_running) for own in run.rollout.kinds]
    return [DecodeYield.of(fit.base, fit.per_context_token, None) for fit in fits]
