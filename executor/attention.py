"""Torch's attention, called so that one of its fused kernels computes it where there is one.

On GPUs (torch 2.11 to 2.13, `sdp_utils.cpp`): flash attention takes neither a mask nor float32, and the memory-efficient kernel,
which takes both, no groups of queries. cuDNN's, which takes masks of groups in half precision, is left out
(`streamrl.executor.pretrained`). What no kernel takes is computed with a matrix of all scores, which training keeps.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Return attention, (batch, heads, queries, size); `key` and `value` may have fewer heads, each for a group of queries."""
    times = query.shape[1] // key.shape[1]
    if times > 1 and repeats(query, mask):
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def repeats(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether keys and values are repeated for each query of a group, as no fused kernel takes groups here."""
    if query.device.type != "cuda":
        return False
    is_cast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if is_cast else query.dtype
    return mask is not None or dtype == torch.float32
