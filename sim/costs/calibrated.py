"""What the calibration that a run file names makes of the seconds of its sides; see `streamrl.hardware.calibration_file`."""

from __future__ import annotations

from streamrl.hardware.calibration_file import StageName, load_calibration
from streamrl.runfile.config import Run


def generation_factor(run: Run) -> float:
    """Return how fast prefill and decode are relative to the profiles, by the calibration."""
    return _factor(run, "generation", run.rollout.pool)


def training_factors(run: Run) -> tuple[float, float]:
    """Return the same of passes that score, and of those that train with the optimizer step."""
    pool = run.trainer.pool
    return _factor(run, "score", pool), _factor(run, "train", pool)


def stated_overhead(run: Run) -> float | None:
    """Return the seconds of a step beside its stages: the run file's, else the calibration's; None where neither says."""
    if run.framework.step_time is not None:
        return run.framework.step_time
    calibration = load_calibration(run)
    if calibration is None or calibration.overhead is None:
        return None
    return calibration.overhead.seconds


def calibrated_sources(run: Run) -> dict[str, str]:
    """Return by operation what the calibration says of its seconds; those that it says nothing of are left out."""
    calibration = load_calibration(run)
    if calibration is None:
        return {}
    path, pools = str(run.costs.calibration), run.cluster.pools
    generates, trains = pools[run.rollout.pool].gpu, pools[run.trainer.pool].gpu
    told = {
        "prefill": calibration.tell("generation", generates, path),
        "decode": calibration.tell("generation", generates, path),
        "score": calibration.tell("score", trains, path),
        "train": calibration.tell("train", trains, path),
    }
    return {operation: text for operation, text in told.items() if text}


def _factor(run: Run, stage: StageName, pool: str) -> float:
    calibration = load_calibration(run)
    return 1.0 if calibration is None else calibration.factor(stage, run.cluster.pools[pool].gpu)
