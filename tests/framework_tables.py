"""Write the tables of docs/frameworks.md that compare predictions with published seconds: `python -m tests.framework_tables`.

Refits are predicted anew. Stages are those of docs/fidelity-residuals.csv, which `streamrl validate --output docs` writes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

from streamrl.sim.fidelity.switches import predict, readings

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "frameworks.md"
SOURCE = "NVIDIA-NeMo/RL issue 959"
BACK_ENDS = {1: "Megatron", 3: "DTensor"}
NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.1-70b": "Llama-3.1-70B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "deepseek-v3": "DeepSeek-V3",
}
FRAMEWORKS = {"nemo-rl": "NeMo-RL", "slime": "slime"}
RUNS = {
    "Llama-3.1-8B, 8 H100, Megatron (fused)": "NeMo-RL 0.3: Llama-3.1-8B",
    "Llama-3.1-8B, 8 H100, DTensor (eager)": "NeMo-RL 0.3, DTensor: Llama-3.1-8B",
    "Llama-3.1-70B, 64 H100, Megatron (fused)": "NeMo-RL 0.3: Llama-3.1-70B",
    "Llama-3.1-70B, 64 H100, DTensor (eager)": "NeMo-RL 0.3, DTensor: Llama-3.1-70B",
}
"""Rows of the table of stages, and how the names of their published steps begin."""
WIDE = 0.1
"""Width of a prediction that is told as a range: the highest over the lowest, less 1."""
REFITS, STAGES = "| refit | published", "| | log-probs, published"
"""How the tables begin."""


def page_with_tables(page: str) -> str:
    """Return the page with both tables as they are now."""
    for head, table in ((REFITS, refit_lines()), (STAGES, stage_lines())):
        before, found, after = page.partition(head)
        assert found, f"docs/frameworks.md has no table that begins with {head!r}"
        page = before + "\n".join(table) + "\n\n" + after.partition("\n\n")[2]
    return page


def refit_lines() -> Iterator[str]:
    """Yield the table of refits and switches to which nothing was fitted."""
    yield f"{REFITS} | predicted |"
    yield "|---|---|---|"
    for lines in readings():
        row = lines[0]
        if row.kind not in ("refit", "switch") or row.constant or row.model not in NAMES:
            continue
        gpus = " or ".join(str(line.gpus) for line in lines)
        predicted = [predict(line).seconds for line in lines]
        where = f"{gpus} {row.gpu.upper()}, {FRAMEWORKS[row.framework]}"
        back_end = f", {BACK_ENDS[row.zero]}" if row.model.startswith("llama") else ""
        published = _range(row.low, row.high)
        yield f"| {NAMES[row.model]}, {where}{back_end} | {published} s | {_range(min(predicted), max(predicted))} s |"


def stage_lines() -> Iterator[str]:
    """Yield the table of scoring and training of NeMo-RL 0.3."""
    yield f"{STAGES} | predicted | training, published | predicted |"
    yield "|---|---|---|---|---|"
    with (DOCS / "fidelity-residuals.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == SOURCE]
    for label, start in RUNS.items():
        cells = [label]
        for stage in ("score", "train"):
            own = [r for r in rows if r["stage"] == stage and r["name"].startswith(f"{start} on")]
            published = [float(row["published"]) for row in own]
            ends = [end for row in own for end in _ends(row)]
            cells += [f"{_range(min(some), max(some))} s" for some in (published, ends)]
        yield f"| {' | '.join(cells)} |"


def _ends(row: dict[str, str]) -> tuple[float, float]:
    """Return the lowest and highest prediction of a row with unknown inputs, else its middle twice."""
    middle, width = float(row["predicted"]), float(row["width"])
    factor = sqrt(1 + width) if width > WIDE else 1.0
    return middle / factor, middle * factor


def _range(low: float, high: float) -> str:
    texts = (f"{low:.3g}", f"{high:.3g}")
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
