"""Read the name of a GPU as people write it: "h100" for "NVIDIA H100 80GB HBM3"."""

from __future__ import annotations

import re

_GPU_MAKER = re.compile(
    r"^(nvidia|amd|google|cloud|tesla|geforce|instinct)[\s\-_]+",
)
_GPU_FORM = re.compile(
    r"[\s\-_]+(sxm\d?|hbm\d?e?|hgx|ac|nvl72|blackwell([\s\-_]+server[\s\-_]+edition)?)$"
)
"""What a GPU's full name adds for the usual form: NVIDIA-H100-80GB-HBM3, H100-SXM5, GB200-NVL72."""
_MEMORY = re.compile(r"(.+?)[\s\-_]+(\d+)\s*gb?")
_USUAL_MEMORY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("a100", "h100", "h800", "a100-pcie", "h100-pcie"), ("80",)),
    **{"h200": ("141",), "h20": ("96",), "h100-nvl": ("94",), "l40s": ("48",), "l4": ("24",)},
    **{"b200": ("180", "192"), "gb200": ("186", "192"), "b300": ("288",), "gb300": ("288",)},
    **{"rtx-pro-6000": ("96",), "rtx-4090": ("24",), "a6000": ("48",), "rtx-a6000": ("48",)},
    **{"mi300x": ("192",), "mi325x": ("256",), "mi355x": ("288",)},
}
"""GB of the usual form. A name with another memory is another GPU."""
_OTHER_NAMES = {
    **dict.fromkeys(("a100-40g", "a100-sxm-40gb", "a100-sxm4-40gb"), "a100-40gb"),
    **{"a100-80gb-pcie": "a100-pcie", "h100-80gb-pcie": "h100-pcie", "h100nvl": "h100-nvl"},
    **{"rtx-a6000": "a6000", "4090": "rtx-4090", "rtx4090": "rtx-4090"},
    **dict.fromkeys(("pro-6000", "rtx-6000-pro", "rtxpro6000"), "rtx-pro-6000"),
    **{"v5p": "tpu-v5p", "tpuv5p": "tpu-v5p"},
    **dict.fromkeys(("v6e", "tpuv6e", "trillium", "tpu-trillium"), "tpu-v6e"),
}
"""Further names that people write, without the maker."""


def gpu_name(text: str) -> str:
    """Return a GPU's name as profiles/gpus has it: "h100" for "H100-SXM5" or "NVIDIA H100 80GB HBM3".

    Other forms of a GPU (PCIe, NVL, another memory) are other hardware, so that they stay in the name.
    """
    name = text.strip().lower()
    while (shorter := _without_memory(_GPU_FORM.sub("", _GPU_MAKER.sub("", name)))) != name:
        name = shorter
    name = _joined(name)
    return _OTHER_NAMES.get(name, name)


def _joined(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name)


def _without_memory(name: str) -> str:
    match = _MEMORY.fullmatch(name)
    if match is None:
        return name
    usual = _USUAL_MEMORY.get(_joined(_GPU_FORM.sub("", match[1])), ())
    return match[1] if match[2] in usual else name
