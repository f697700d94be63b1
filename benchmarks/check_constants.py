"""Compare unverified constants with what they were not made of, and say how much of a step rests on them.

    python -m benchmarks.check_constants engines     served points with other overheads of an engine
    python -m benchmarks.check_constants steps       published RL steps, if all unverified constants were 10 % worse

A constant of an engine agrees with served points if their mean error is least at 0.75 to 1.5 times its value,
and rises by half a percentage point without it. No constant is fitted to a served point.
One JSON object is printed per figure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from msgspec.structs import force_setattr

from streamrl.hardware.profiles import PROFILES
from streamrl.runfile.profile_folder import VARIABLE
from streamrl.runfile.units import Duration
from streamrl.sim.costs.overheads import Overheads, load_engine
from streamrl.sim.fidelity import served
from streamrl.sim.fidelity.constants import all_constants
from streamrl.sim.fidelity.rl_steps import choices_of, load_published, simulate_step
from streamrl.sim.parallel import worker_pool

TIMES = (0, 0.5, 0.75, 1, 1.25, 1.5, 2)
MOST_POINTS = 120
"""Points of an engine, spread over its list."""
WORSE = 1.1
AFFECTING_SECONDS = ("frameworks", "engines", "sync", "transports", "gpus", "measured")
"""Folders of constants that take part in seconds. Others are about memory."""
RATES = ("bandwidth", "network", "host_link", "efficiency", "flops")
"""Keys that are divided to be worse; others are multiplied."""
ASIDE = ("price", "reserve", "memory", "bytes_per_value")


def main() -> None:
    """Print what was asked for."""
    match sys.argv[1:]:
        case ["engines"]:
            lines = engine_lines()
        case ["steps"]:
            lines = step_lines()
        case ["seconds"]:
            lines = iter([published_seconds()])
        case _:
            sys.exit(__doc__)
    for line in lines:
        print(json.dumps(line), flush=True)


def engine_lines() -> Iterator[dict[str, Any]]:
    """Yield the mean absolute log error of served points on Hopper with each constant multiplied."""
    for name in sorted({point.engine for point in served.covered()}):
        points = [
            point
            for point in served.covered()
            if point.engine == name and point.gpu in ("h100", "h200")
            if not (point.is_split or point.may_draft)
        ]
        points = points[:: -(-len(points) // MOST_POINTS)]
        constants = load_engine(name).constants
        for key in ("step", "layer", "request", "logit"):
            if getattr(constants, key):
                errors = {times: _error(points, constants, key, times) for times in TIMES}
                yield {"engine": name, "constant": key, "points": len(points), "errors": errors}


def _error(points: list[served.ServedPoint], constants: Overheads, key: str, times: float) -> float:
    usual = getattr(constants, key)
    force_setattr(constants, key, Duration(usual * times))
    served._decode_curve.cache_clear()
    served._prefill_curve.cache_clear()
    ratios = [
        served.predict(point, next(served.workers(point)), point.most_running) / point.tpot
        for point in points
    ]
    force_setattr(constants, key, usual)
    return round(float(np.mean(np.abs(np.log(ratios)))), 4)


def step_lines() -> Iterator[dict[str, Any]]:
    """Yield by how much longer published steps take with unverified constants that are 10 % worse."""
    usual = published_seconds()
    with tempfile.TemporaryDirectory() as folder:
        number = write_worse(Path(folder))
        command = [sys.executable, "-m", "benchmarks.check_constants", "seconds"]
        found = subprocess.run(
            command, env={**os.environ, VARIABLE: folder}, capture_output=True, check=True
        )
    worse = json.loads(found.stdout)
    longer = [worse[name] / usual[name] - 1 for name in usual]
    median, p90 = (round(float(each), 4) for each in np.quantile(longer, [0.5, 0.9]))
    worse = round(WORSE - 1, 4)
    yield {"constants": number, "worse": worse, "steps": len(longer), "median": median, "p90": p90}


def published_seconds() -> dict[str, float]:
    """Return the simulated seconds of each published RL step, with the first of its unknown inputs."""
    steps = load_published()
    with worker_pool() as pool:
        found = list(pool.map(simulate_step, steps, [next(choices_of(step)) for step in steps]))
    pairs = zip(steps, found, strict=True)
    return {step.name: each.seconds["step"] for step, each in pairs if each is not None}


def write_worse(folder: Path) -> int:
    """Write a copy of the profiles whose unverified constants are 10 % worse; return their number."""
    for path in PROFILES.iterdir():
        (folder / path.name).symlink_to(path)
    keys: dict[str, list[str]] = {}
    for each in all_constants():
        file = each.where.removeprefix("profiles/")
        in_seconds = file.partition("/")[0] in AFFECTING_SECONDS
        is_aside = any(name in each.key for name in ASIDE)
        if (
            each.standing.startswith("**")
            and each.kind != "numerics"
            and in_seconds
            and not is_aside
        ):
            keys.setdefault(file, []).append(each.key)
    for pattern, own in keys.items():
        for path in PROFILES.glob(pattern):
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            for key in own:
                _make_worse(table, key.split("."))
            place = folder / path.relative_to(PROFILES)
            if place.parent.is_symlink():
                place.parent.unlink()
                place.parent.mkdir()
                for other in (PROFILES / place.parent.name).iterdir():
                    (place.parent / other.name).symlink_to(other)
            place.unlink()
            place.write_text(tomli_w.dumps(table), encoding="utf-8")
    return sum(map(len, keys.values()))


def _make_worse(table: Any, key: list[str]) -> None:
    """Change one dotted key of a table; tables of a list are all changed."""
    if isinstance(table, list):
        for each in table:
            _make_worse(each, key)
    elif len(key) > 1 and key[0] in table:
        _make_worse(table[key[0]], key[1:])
    elif key[0] in table:
        times = 1 / WORSE if any(name in key[0] for name in RATES) else WORSE
        table[key[0]] = _times(table[key[0]], times)


def _times(value: Any, times: float) -> Any:
    if isinstance(value, list):
        return [each * times for each in value]
    if isinstance(value, str):
        number, _, unit = value.partition(" ")
        return f"{float(number) * times:.6f} {unit}"
    return value * times


if __name__ == "__main__":
    main()
