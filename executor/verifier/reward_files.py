"""Is what a run file names a reward model? What its directory says, before a process is started for it."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.hardware.reward_memory import reward_model_key
from streamrl.hardware.weight_files import weight_problems
from streamrl.runfile.config import Run
from streamrl.runfile.workload_config import HUB

OF_TOKENS, OF_SEQUENCES = "ForTokenClassification", "ForSequenceClassification"


def check_reward_model(run: Run) -> None:
    """Raise `ValueError` where a run's reward model lies here and is none; of one on the hub its replica says so."""
    reward = run.verifier.reward_model
    if reward is None or reward.model is None or reward.model.startswith(HUB):
        return
    key, path = reward_model_key(run), Path(reward.model)
    try:
        table = json.loads((path / "config.json").read_text(encoding="utf-8-sig"))
        names = [str(name) for name in table.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{key}: {path} has no config.json that can be read: {error}") from None
    kind = OF_SEQUENCES if reward.step_end is None else OF_TOKENS
    if not any(name.endswith(kind) for name in names):
        found = ", ".join(names) or "none"
        raise ValueError(f"{key}: {path} must have an architecture ...{kind}, got {found}")
    for problem in weight_problems(path):
        raise ValueError(f"{key}: {path} {problem}")
