"""Load causal language models from Hugging Face directories, one at a time in each process.

cuDNN's attention is disabled. torch 2.11 and later prefer it on Hopper and Blackwell. It creates a plan for each new
shape (0.4 s forward and 0.6 s backward on a B200: modelscope/FunASR issue 3704). Rollouts differ in length, so nearly
every pass has a new shape. On an H200, quickstart's trainer took 4 s a step in bfloat16. In float32, which cuDNN does
not support, it took 0.15 s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.initialization import no_init_weights

_LOADING = threading.Lock()
"""Allows one load at a time. While transformers loads, it replaces `tie_weights` of its base class. If two threads load
at once, the replacement can stay, and then no model of the process ties its weights (seen in 5.23)."""
VALUES = ("score.", "classifier.")
"""Prefixes of an output layer's tensors that are initialized at random if the directory has none."""
SHOWN = 3
"""Number of tensors that a message names."""


@contextmanager
def _loading() -> Iterator[None]:
    """Disable cuDNN's attention for this process, and wait until no other thread loads a model."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    with _LOADING:
        yield


def load_pretrained(
    directory: str, *, has_values: bool = False, is_aligned: bool = False, **options: Any
) -> Any:
    """Load a model on the CPU.

    Args:
        directory: the directory of the model.
        has_values: whether the output layer has one value per token instead of logits. If the directory has no such
            layer, it is initialized at random.
        is_aligned: whether to copy weights to memory that torch allocates. Loaded weights have the alignment of their
            file, and the last bits of a matrix product depend on alignment.
        options: options of `from_pretrained`.

    Raises:
        ValueError: the directory lacks weights of the model, or has some with other shapes or that are not finite.
    """
    load = _kind(has_values).from_pretrained
    with _loading():
        model, report = load(
            directory, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _check_weights(directory, model, report, drawn=VALUES if has_values else ())
    if is_aligned:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def blank_model(
    directory: str, *, has_values: bool = False, dtype: torch.dtype, **options: Any
) -> Any:
    """Return a model on the CPU with uninitialized weights, which use no memory until they are written."""
    configs: Any = AutoConfig
    config = configs.from_pretrained(directory, local_files_only=True, **options)
    with _loading(), no_init_weights():
        model = _kind(has_values).from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def _kind(has_values: bool) -> Any:
    return AutoModelForTokenClassification if has_values else AutoModelForCausalLM


def load_reward_model(model: str, *, by_token: bool, **options: Any) -> Any:
    """Load a reward model on the CPU.

    Args:
        model: its directory, or its name on the hub.
        by_token: whether it scores each token, or the whole sequence.
        options: options of `from_pretrained`.

    Raises:
        ValueError: it lacks weights of its output layer, or has some with other shapes or that are not finite.
    """
    kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    load: Any = kind.from_pretrained
    with _loading():
        found, report = load(
            model, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{model} is no reward model: it lacks {', '.join(missing[:SHOWN])}")
    _check_weights(model, found, report, key="verifier.reward_model.model")
    return found


def _check_weights(
    directory: str,
    model: Any,
    report: Mapping[str, Any],
    drawn: tuple[str, ...] = (),
    key: str = "model.path",
) -> None:
    """Raise `ValueError` if weights are missing, have wrong shapes, or are not finite.

    transformers would only warn and initialize them at random. Then replicas and trainer would have different policies.
    """
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(drawn))
    if missing:
        raise ValueError(f"{key} {directory!r} lacks weights of {_some(missing)}")
    others = [
        f"{name} {tuple(found)} for {tuple(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
        if not name.startswith(drawn)
    ]
    if others:
        raise ValueError(
            f"{key} {directory!r} has weights of other shapes than its config.json: {_some(others)}"
        )
    for name, parameter in model.named_parameters():
        has_order = parameter.numel() and parameter.element_size() > 1  # torch compares no 8 bits
        if has_order and not all(bound.isfinite() for bound in parameter.aminmax()):
            raise ValueError(f"{key} {directory!r} has weights that are no numbers: {name}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
