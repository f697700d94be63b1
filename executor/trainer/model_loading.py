"""A model as its trainer's ranks begin with it: whole on each, or on the first alone where all get a share of its weights."""

from __future__ import annotations

from typing import Any

import torch

from streamrl.executor.pretrained import blank_model, load_pretrained
from streamrl.executor.trainer.half_experts import follow_autocast
from streamrl.executor.trainer.passes import attend_apart
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings


def load_model(
    directory: str,
    settings: TrainerSettings,
    ranks: RankGroup,
    *,
    learns: bool = True,
    **options: Any,
) -> Any:
    """Return the model of a directory, prepared for passes; every rank calls this.

    Weights that learn are in float32, whatever passes compute in; those that adapters lie beside are as passes want them.

    Where ZeRO 3 splits weights, nobody has room for all of them on a GPU, nor a machine for one copy a rank: they are in
    the first rank's host memory, and the others' tensors are blank, until a backend deals them out.

    Raises:
        ValueError: as `load_pretrained`, on every rank.
    """
    dtype = torch.float32 if learns else DTYPES[settings.dtype]
    is_blank = settings.splits_weights and not ranks.is_first

    def load() -> Any:
        if is_blank:
            model = blank_model(directory, dtype=DTYPES[settings.dtype], **options)
        else:
            own = {"is_aligned": settings.deterministic, "local_files_only": True, **options}
            model = load_pretrained(directory, dtype=dtype, **own)
        if not settings.splits_weights:
            model = model.to(settings.device)
        model.eval()  # without dropout: a ratio must say how the weights differ, not which units are off
        follow_autocast(model)
        if settings.packing == "packed":
            attend_apart(model, is_blank=is_blank)
        return model

    return ranks.agree(load)
