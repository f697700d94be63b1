"""Names of number formats: what weights, KV caches and products of a run are kept in and computed in."""

from __future__ import annotations

from typing import Literal, get_args

WideDtype = Literal["bfloat16", "float16", "float32"]
"""Formats of one value each, without scales."""
WeightDtype = Literal["bfloat16", "float16", "float32", "fp8", "mxfp8", "int8", "int4", "nvfp4"]
"""What a replica may keep weights in. fp8: a scale for each block of 128 by 128, or each row; mxfp8: for each 32 values;
int8: for each row; int4: for each 128 values; nvfp4: for each 16."""
CacheDtype = Literal["bfloat16", "float16", "float32", "fp8"]
"""What a replica may keep keys and values in."""
TrainingDtype = Literal["bfloat16", "float16", "float32", "fp8", "mxfp8"]
"""What a trainer may compute products in."""

NARROW = tuple(name for name in get_args(WeightDtype) if name not in get_args(WideDtype))
"""Formats of weights that have scales."""
