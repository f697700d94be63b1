"""Compare predicted weight syncs with published timings; rows with a large error state the reason.

The constants of profiles/sync are fitted to the rows marked "fit". If a backend has three or more of
them, each row is also predicted from constants fitted to the others. The output ends with one JSON
object per figure.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from streamrl.hardware.profiles import PROFILES, load_gpu
from streamrl.sim.costs.sync_profiles import load_backend, load_delta, load_transport

ROWS = PROFILES / "measured" / "weight_sync.csv"
TOLERANCE = 0.25
FEWEST_TO_LEAVE_ONE_OUT = 3
CONSTANTS = {
    "nccl-broadcast": ("s a tensor", "s a byte"),
    "nccl-buckets": ("s a byte",),
    "nccl-packed": ("s a byte",),
    "checkpoint-engine": ("s", "s a byte", "s an offloaded byte"),
    "nccl-reshard": ("s",),
    "delta": ("s a byte", "s a payload byte"),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One published timing, in bytes and seconds."""

    hardware: str
    model: str
    num_bytes: float
    num_tensors: float
    payload_bytes: float
    receivers: int
    ways: int
    method: str
    seconds: float
    use: str
    note: str

    @property
    def backend(self) -> str:
        """Return the name of the profile that predicts it."""
        return self.method.removesuffix(" update")

    @property
    def name(self) -> str:
        """Return the name of the row, for readers."""
        gpus = f" {self.receivers} GPUs" if self.receivers else ""
        return f"{self.hardware} {self.model}{gpus} {self.method}"


def main() -> None:
    """Print a table of rows, then the figures."""
    rows = read_rows(ROWS)
    known = [row for row in rows if row.backend in CONSTANTS]
    left_out = leave_one_out([row for row in known if row.use == "fit"])
    print(f"{'row':62}{'use':>13}{'measured':>10}{'predicted':>10}{'error':>8}{'left out':>9}")
    for row in rows:
        print(describe(row, left_out))
    print_constants(known)
    fitted = [row for row in known if row.use == "fit"]
    report("sync rows fitted to", len(fitted), "rows")
    for use in ("fit", "held out"):
        errors = [abs(error(row)) for row in known if row.use == use]
        name = f"sync rows ({use}) within {TOLERANCE:.0%}"
        report(name, sum(e <= TOLERANCE for e in errors) / len(errors), "share")
        report(f"sync median error ({use})", 100 * median(errors), "%")
    report("sync worst error (fit)", 100 * max(abs(error(row)) for row in fitted), "%")
    alone = [abs(e) for e in left_out.values()]
    name = f"sync rows within {TOLERANCE:.0%}, each row left out"
    report(name, sum(e <= TOLERANCE for e in alone) / len(alone), "share")
    report("sync median error, each row left out", 100 * median(alone), "%")
    report("sync worst error, each row left out", 100 * max(alone), "%")


def read_rows(path: Path) -> list[Row]:
    """Read the table. An unknown number is 0, and no prediction uses it."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    numbers = ("num_bytes", "num_tensors", "payload_bytes", "receivers", "ways")
    tables = [{**row, **{key: row[key] or 0 for key in numbers}} for row in csv.DictReader(lines)]
    return msgspec.convert(tables, list[Row], strict=False)


def predict(row: Row) -> float:
    """Return the predicted seconds of a row, with the constants of profiles/sync."""
    if row.backend == "delta":
        delta = load_delta()
        return row.num_bytes / delta.compare_bandwidth + row.payload_bytes / delta.codec_bandwidth
    backend = load_backend(row.backend)
    fixed = backend.fixed_time(row.num_bytes, round(row.num_tensors))
    if row.method.endswith(" update") and backend.offload_bandwidth is not None:
        fixed -= row.num_bytes / backend.offload_bandwidth
    broadcast = row.num_bytes * backend.broadcast_share
    return fixed + broadcast / backend.sender_bandwidth + shard_time(row)


def shard_time(row: Row) -> float:
    """Return the seconds that a receiving rank takes for its shard at the network's rate."""
    rank_bandwidth = load_gpu(row.hardware.lower()).network * load_transport("rdma").efficiency
    share = 1 - load_backend(row.backend).broadcast_share
    return share * row.num_bytes / row.ways / rank_bandwidth


def error(row: Row) -> float:
    """Return predicted over measured seconds, minus 1."""
    return predict(row) / row.seconds - 1


def features(row: Row) -> np.ndarray:
    """Return the factors of a row's fitted constants."""
    match row.backend:
        case "nccl-broadcast":
            return np.array([row.num_tensors, row.num_bytes])
        case "nccl-buckets" | "nccl-packed":
            return np.array([row.num_bytes])
        case "checkpoint-engine":
            offloaded = 0.0 if row.method.endswith(" update") else row.num_bytes
            return np.array([1.0, row.num_bytes, offloaded])
        case "nccl-reshard":
            return np.array([1.0])
        case _:
            return np.array([row.num_bytes, row.payload_bytes])


def physical_time(row: Row) -> float:
    """Return the seconds of a row that are computed and not fitted."""
    if row.backend != "nccl-reshard":
        return 0.0
    backend = load_backend(row.backend)
    broadcast = row.num_bytes * backend.broadcast_share / backend.sender_bandwidth
    return broadcast + shard_time(row)


def fit(rows: list[Row]) -> np.ndarray:
    """Fit the constants of one backend: least squares of relative errors."""
    seconds = np.array([row.seconds for row in rows])
    matrix = np.array([features(row) for row in rows]) / seconds[:, None]
    known = np.array([physical_time(row) for row in rows]) / seconds
    solution: np.ndarray = np.linalg.lstsq(matrix, 1 - known, rcond=None)[0]
    return solution


def leave_one_out(rows: list[Row]) -> dict[str, float]:
    """Return by name the error of each row, predicted from the others."""
    errors = {}
    for same in group(rows).values():
        if len(same) >= FEWEST_TO_LEAVE_ONE_OUT:
            for row in same:
                constants = fit([other for other in same if other is not row])
                seconds = physical_time(row) + float(features(row) @ constants)
                errors[row.name] = seconds / row.seconds - 1
    return errors


def group(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows by the backend that predicts them."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.backend].append(row)
    return groups


def describe(row: Row, left_out: dict[str, float]) -> str:
    """Return the line of a row. If its error is large, or it has no prediction, the reason follows."""
    line = f"{row.name:62}{row.use:>13}{row.seconds:10.3f}"
    if row.backend not in CONSTANTS:
        return f"{line}{'-':>10}{'-':>8}{'':9}  {row.note}"
    line += f"{predict(row):10.3f}{error(row):8.1%}"
    alone = left_out.get(row.name)
    line += f"{'':9}" if alone is None else f"{alone:9.1%}"
    is_missed = abs(error(row)) > TOLERANCE
    return f"{line}  {row.note}" if is_missed else line


def print_constants(rows: list[Row]) -> None:
    """Print the fitted constants, to compare with profiles/sync."""
    for backend, same in group([row for row in rows if row.use == "fit"]).items():
        values = zip(fit(same), CONSTANTS[backend], strict=True)
        text = ", ".join(f"{value:.5g} {unit}" for value, unit in values)
        print(f"{backend}: {text}, from {len(same)} rows")


def report(name: str, value: float, unit: str) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


if __name__ == "__main__":
    main()
