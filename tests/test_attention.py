"""Attention of grouped queries is the same where keys and values are repeated for kernels that take no groups."""

from __future__ import annotations

import pytest
import torch

from streamrl.executor import attention
from streamrl.executor.attention import attend, repeats


@pytest.mark.parametrize("is_masked", [False, True])
def test_repeated_keys_give_what_groups_do(
    is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 6, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3) if is_masked else None
    options = {"mask": mask, "is_causal": not is_masked, "scaling": 0.3}
    grouped = attend(query, key, value, **options)  # type: ignore[arg-type]  # of three types
    monkeypatch.setattr(attention, "repeats", lambda *_: True)
    repeated = attend(query, key, value, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(repeated, grouped)
    one = attend(query, key.mean(1, keepdim=True), value[:, :1], **options)  # type: ignore[arg-type]
    assert one.shape == query.shape


class OnGpu:
    """As much of a tensor as is asked for."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("dtype", "is_masked", "is_cast", "expected"),
    [
        (torch.bfloat16, False, False, False),  # flash attention takes groups
        (torch.bfloat16, True, False, True),
        (torch.float32, False, False, True),
        (torch.float32, False, True, False),
        (torch.float32, True, True, True),
    ],
)
def test_groups_are_repeated_on_gpus_where_flash_attention_takes_them_not(
    dtype: torch.dtype, is_masked: bool, is_cast: bool, expected: bool
) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool) if is_masked else None
    torch.set_autocast_enabled("cuda", is_cast)  # `torch.autocast` does nothing without a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert repeats(OnGpu(dtype), mask) == expected  # type: ignore[arg-type]
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not repeats(torch.ones(1, dtype=dtype), mask)
