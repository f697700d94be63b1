"""Prepare the quickstart's model and prompts for benchmarks that execute it, with settings and profile limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from streamrl.executor.profiling.measurements import Limits
from streamrl.runfile.config import Run

EXAMPLES = Path(__file__).parent.parent / "examples"


def make_quickstart(data: Path) -> None:
    """Create model, prompts and lengths in a directory, if they do not exist."""
    if not (data / "model" / "config.json").is_file():
        make = [sys.executable, str(EXAMPLES / "make_quickstart.py"), "--out", str(data)]
        subprocess.run(make, check=True)


def settings_of(data: Path, steps: int) -> list[str]:
    """Return the settings of a run with `steps` steps on the model and data in a directory, without checkpoints."""
    return [
        f"model.path={(data / 'model').resolve()}",
        f"workload.prompts={(data / 'prompts.jsonl').resolve()}",
        f"workload.lengths.source={(data / 'lengths.csv').resolve()}",
        f"algorithm.steps={steps}",
        f"execute.checkpoint_every={10**6}",
    ]


def limits_of(run: Run) -> Limits:
    """Return the limits that a profile needs for a run."""
    return Limits(
        max_running=run.rollout.max_running,
        max_context=run.rollout.max_tokens + run.workload.max_prompt_tokens,
        max_tokens_per_pass=run.trainer.max_tokens_per_pass,
    )
