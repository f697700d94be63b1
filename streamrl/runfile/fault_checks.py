"""What each of `[[faults]]` must say, and what not."""

from __future__ import annotations

from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.faults_config import OF_REWARD_MODEL, FaultConfig, FaultKind

MOMENTS = ("step", "time", "count")
SAYS: dict[FaultKind, tuple[str, ...]] = {
    "link-slows": ("duration", "factor"),
    "verifier-stalls": ("duration",),
}
"""What a kind needs to be told beside its moment; the others need nothing, and take none of it."""


def check_faults(run: Run) -> None:
    """Raise `RunError` where a fault has no moment, or several, or says too little or too much."""
    for number, fault in enumerate(run.faults):
        key = f"faults.{number}"
        _check_victim(fault, f"{key}.kind", run)
        _check_moment(fault, key, run.algorithm.steps)
        for name in ("duration", "factor"):
            _check_said(fault, key, name)


def _check_victim(fault: FaultConfig, key: str, run: Run) -> None:
    if fault.kind in OF_REWARD_MODEL and run.verifier.reward_model is None:
        text = f"{key} {fault.kind!r} strikes a reward model, and no [[verifier.reward]] is one"
        raise RunError(key, fault.kind, None, text, ("verifier.reward",))


def _check_moment(fault: FaultConfig, key: str, steps: int) -> None:
    given = [name for name in MOMENTS if getattr(fault, name) is not None]
    if len(given) != 1:
        text = f"{key} ({fault.kind}) needs exactly one of step, time and count, got {', '.join(given) or 'none'}"
        others = tuple(f"{key}.{name}" for name in MOMENTS[1:])
        raise RunError(f"{key}.step", fault.step, None, text, others)
    last = fault.last_step(steps)
    if fault.step is not None and fault.step > last:
        why = " (the last version is not pushed)" if last < steps else ""
        text = (
            f"{key}.step must be at most {last} of algorithm.steps={steps}{why}, got {fault.step}"
        )
        raise RunError(f"{key}.step", fault.step, Bounds(1, last), text, ("algorithm.steps",))
    if fault.seed is not None and fault.count is None:
        text = f"{key}.seed={fault.seed} is of random moments: it needs {key}.count"
        raise RunError(f"{key}.seed", fault.seed, None, text, (f"{key}.count",))


def _check_said(fault: FaultConfig, key: str, name: str) -> None:
    value, is_needed = getattr(fault, name), name in SAYS.get(fault.kind, ())
    if (value is not None) != is_needed:
        kinds = [kind for kind, names in SAYS.items() if name in names]
        text = (
            f"{key}.{name} is missing: kind is {fault.kind!r}"
            if is_needed
            else f"{key}.{name}={value} is of {' and '.join(kinds)}, but kind is {fault.kind!r}"
        )
        raise RunError(f"{key}.{name}", value, OneOf(kinds), text, (f"{key}.kind",))
