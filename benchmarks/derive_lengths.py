"""Write profiles/lengths/*.csv, histograms of real output lengths, from measured data.

python -m benchmarks.derive_lengths SHARED/data/workloads
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent.parent / "profiles" / "lengths"
BINS = 48
"""Bins of equal width in log tokens. Each is at most 20 % wide, which has no effect on dispatch."""

Floats = npt.NDArray[np.float64]


class Source(NamedTuple):
    """A file of lengths, and the profile that is made from it."""

    file: str
    name: str
    says: str
    model: str | None = None
    dataset: str | None = None


SOURCES = (
    Source(
        "lcb_qwen3_1p7b_lengths.csv.gz",
        "qwen3-lcb",
        "1,055 outputs of Qwen3-1.7B (thinking) to LiveCodeBench, at most 40,680 tokens, measured in 2026",
    ),
    Source(
        "servegen_reason_deepseek_r1_output_hist.csv.gz",
        "servegen-r1",
        "DeepSeek-R1 in production: alibaba/ServeGen f891d11 (Apache-2.0)",
    ),
    Source(
        "skythought_math_prompts_lengths.csv.gz",
        "skythought-math500",
        "Sky-T1-32B checkpoints on MATH-500, 1,000 outputs: NovaSky-AI/SkyThought (Apache-2.0)",
        "Sky-T1-math-correct-5K-32B-short-ckpts",
        "math500",
    ),
    Source(
        "skythought_math_prompts_lengths.csv.gz",
        "qwen-14b-math",
        "Qwen2.5-14B-Instruct on five sets of mathematics, 1,487 outputs: NovaSky-AI/SkyThought (Apache-2.0)",
        "Qwen__Qwen2.5-14B-Instruct",
    ),
    Source(
        "skythought_math_prompts_lengths.csv.gz",
        "gemma-27b-math",
        "Gemma-2-27B-it on five sets of mathematics, 1,487 outputs: NovaSky-AI/SkyThought (Apache-2.0)",
        "google__gemma-2-27b-it",
    ),
)


def main() -> None:
    """Write every histogram."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="directory of the measured lengths")
    data = parser.parse_args().data
    for source in SOURCES:
        tokens, weights = read(data / source.file, source)
        path = HERE / f"{source.name}.csv"
        path.write_text("\n".join(lines(source, tokens, weights)) + "\n")
        print(f"{path}: mean {np.average(tokens, weights=weights):,.0f} tokens")


def read(path: Path, source: Source) -> tuple[Floats, Floats]:
    """Return the lengths and their weights."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [row for row in csv.DictReader(file) if _is_of(row, source)]
    tokens = np.array([max(1.0, float(row["output_tokens"])) for row in rows])
    return tokens, np.array([float(row.get("prob", 1.0)) for row in rows])


def _is_of(row: dict[str, str], source: Source) -> bool:
    return (source.model is None or row["model"] == source.model) and (
        source.dataset is None or row["dataset"] == source.dataset
    )


def lines(source: Source, tokens: Floats, weights: Floats) -> Iterator[str]:
    """Yield the lines of a histogram file."""
    yield f"# Source: {source.says};"
    yield "# here as a histogram."
    yield "start,end,density"
    edges = np.unique(np.rint(np.geomspace(tokens.min(), tokens.max() + 1, BINS + 1)))
    counts, _ = np.histogram(tokens, edges, weights=weights)
    for start, end, count in zip(edges, edges[1:], counts, strict=False):
        yield f"{start:.0f},{end:.0f},{count / weights.sum() / (end - start):.3e}"


if __name__ == "__main__":
    main()
