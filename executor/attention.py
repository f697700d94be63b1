"""Call torch's attention so that a fused kernel can compute it.

Fused kernels on GPUs (torch 2.11 to 2.13, `sdp_utils.cpp`):

| kernel           | mask | float32 | grouped queries |
|------------------|------|---------|-----------------|
| flash attention  | no   | no      | yes             |
| memory-efficient | yes  | yes     | no              |

cuDNN's kernel takes masks and grouped queries in half precision, but `streamrl.executor.pretrained` disables it.
Without a fused kernel, torch computes the matrix of all attention scores, and training keeps it in memory.
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
    """Return attention of shape (batch, heads, queries, size); `key` and `value` may have fewer heads (grouped queries)."""
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
    """Return whether keys and values must be repeated, because no fused kernel supports grouped queries here."""
    if query.device.type != "cuda":
        return False
    is_cast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if is_cast else query.dtype
    return mask is not None or dtype == torch.float32
