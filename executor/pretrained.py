"""Causal language models of Hugging Face directories, loaded one at a time in a process.

Their attention is computed without cuDNN, which torch (2.11, and later) takes first on Hopper and Blackwell, and which plans anew
for every shape that it has not seen (0.4 s forward and 0.6 s backward on a B200: modelscope/FunASR issue 3704).
Rollouts differ in length, so nearly every pass would be planned: on an H200 quickstart's trainer took 4 s a step in
bfloat16, and 0.15 s in float32, which cuDNN does not compute.
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
"""While it loads, transformers takes `tie_weights` out of its base class: two loads that overlap in threads put
back what the other took out, and no model of the process has tied weights any more (seen in 5.23)."""
VALUES = ("score.", "classifier.")
"""How the names of a last layer begin that is drawn at random where a directory has none."""
SHOWN = 3
"""Tensors that a message names."""


@contextmanager
def _loading() -> Iterator[None]:
    """Leave cuDNN's attention out from now on, and wait until no other thread loads."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    with _LOADING:
        yield


def load_pretrained(
    directory: str, *, has_values: bool = False, is_aligned: bool = False, **options: Any
) -> Any:
    """Load a model on the CPU.

    Args:
        directory: where it lies.
        has_values: whether its last layer has one output, drawn at random where the directory has none, in place of one
            for each token of the vocabulary.
        is_aligned: whether its weights are copied to where torch puts its own. As they are loaded they lie as in their
            file, and the last bits of a product depend on how its factors are aligned.
        options: those of `from_pretrained`.

    Raises:
        ValueError: the directory lacks weights of the model, has some of other shapes, or some that are no numbers.
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
    """Return such a model on the CPU whose weights are what memory held, and take none until they are written to."""
    configs: Any = AutoConfig
    config = configs.from_pretrained(directory, local_files_only=True, **options)
    with _loading(), no_init_weights():
        model = _kind(has_values).from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def _kind(has_values: bool) -> Any:
    return AutoModelForTokenClassification if has_values else AutoModelForCausalLM


def load_reward_model(model: str, *, by_token: bool, **options: Any) -> Any:
    """Load a model that scores, on the CPU.

    Args:
        model: its directory, or its name on the hub.
        by_token: whether it scores each token, or a sequence as a whole.
        options: those of `from_pretrained`.

    Raises:
        ValueError: it has no weights for what scores, some of other shapes, or some that are no numbers.
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
    """Raise `ValueError` where weights are not what the directory says, which transformers draws at random with a warning.

    Two processes would draw other ones, and replicas sample from another policy than the trainer has.
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
