"""Causal language models of Hugging Face directories, loaded one at a time in a process."""

from __future__ import annotations

import threading
from typing import Any

from transformers import AutoModelForCausalLM

_LOADING = threading.Lock()
"""While it loads, transformers takes `tie_weights` out of its base class: two loads that overlap in threads put
back what the other took out, and no model of the process has tied weights any more (seen in 5.23)."""


def load_pretrained(directory: str, **options: Any) -> Any:
    """Load a model on the CPU; `options` are those of `from_pretrained`."""
    load: Any = AutoModelForCausalLM.from_pretrained
    with _LOADING:
        return load(directory, **options)
