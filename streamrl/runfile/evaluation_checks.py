"""Check `[evaluation]`, and refuse what cannot be evaluated."""

from __future__ import annotations

from streamrl.runfile.config import CheckpointsConfig
from streamrl.runfile.errors import Bounds, RunError, shown
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.field_checks import MOST_ROLLOUTS, check_filled
from streamrl.runfile.workload_config import WorkloadConfig

OF_PROMPTS = ("subset", "split", "fields", "template")
"""Keys that say how `evaluation.prompts` is read."""


def check_evaluation(
    config: EvaluationConfig | None,
    workload: WorkloadConfig,
) -> None:
    """Raise `RunError` if a value does not fit the others."""
    if config is None:
        return
    _check_source(config, workload)
    if config.num_prompts is not None and config.num_prompts * config.samples > MOST_ROLLOUTS:
        most = MOST_ROLLOUTS // config.samples
        text = (
            f"evaluation.num_prompts={config.num_prompts} x samples={config.samples} must be at most {MOST_ROLLOUTS} "
            f"rollouts; set evaluation.num_prompts to at most {most}"
        )
        raise RunError(
            "evaluation.num_prompts",
            config.num_prompts,
            Bounds(1, most),
            text,
            ("evaluation.samples",),
        )
    check_filled("evaluation.k", config.k, "values of k")
    for k in config.k or ():
        if not 1 <= k <= config.samples:
            text = f"evaluation.k must be in [1, {config.samples}] (evaluation.samples), got {k}"
            raise RunError(
                "evaluation.k", k, Bounds(1, config.samples), text, ("evaluation.samples",)
            )


def check_checkpoints(config: CheckpointsConfig, evaluation: EvaluationConfig | None) -> None:
    """Raise `RunError` if the best checkpoint is asked for, and nothing tells which one it is."""
    if evaluation is None and config.keep_best:
        key, value = "execute.checkpoints.keep_best", config.keep_best
        text = (
            f"{key}={value} needs the section [evaluation], whose scores decide; add it, or set 0"
        )
        raise RunError(key, value, text=text, others=("evaluation",))
    if config.choice == "best" and not config.keep_best:
        key = "execute.checkpoints.choice"
        text = f"{key} 'best' needs execute.checkpoints.keep_best of at least 1, got {config.keep_best}"
        raise RunError(key, "best", text=text, others=("execute.checkpoints.keep_best",))


def _check_source(config: EvaluationConfig, workload: WorkloadConfig) -> None:
    """Refuse held-out prompts from two places or from none, and keys that nothing reads."""
    if config.prompts is not None and config.share is not None:
        text = (
            f"evaluation.share {config.share:g} cannot be combined with evaluation.prompts "
            f"{shown(config.prompts)}; remove one of them"
        )
        raise RunError("evaluation.share", config.share, text=text, others=("evaluation.prompts",))
    if config.prompts is not None:
        return
    for name in OF_PROMPTS:
        if value := getattr(config, name):
            text = f"evaluation.{name} needs evaluation.prompts, got {shown(value)}"
            raise RunError(f"evaluation.{name}", value, text=text, others=("evaluation.prompts",))
    if config.share is None and config.num_prompts is None:
        text = (
            "evaluation has no prompts; set evaluation.prompts to a file of held-out prompts, or evaluation.share "
            "to hold out a part of workload.prompts"
        )
        raise RunError("evaluation.prompts", None, str, text)
    if config.share is not None and not workload.sources:
        text = f"evaluation.share {config.share:g} needs workload.prompts, of which it holds out a part"
        raise RunError("evaluation.share", config.share, text=text, others=("workload.prompts",))
