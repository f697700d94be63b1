"""Store the optimizer's state in a checkpoint, in forms that every back end reads.

| back end         | file                                                                                        |
|------------------|---------------------------------------------------------------------------------------------|
| torch            | `STATE_FILE`: the state of one optimizer, whole                                             |
| fsdp2, deepspeed | `DIRECTORY`: each state of each weight, such as AdamW's first moment, under `WEIGHT/STATE`  |

torch.distributed.checkpoint writes the directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

STATE_FILE = "trainer.pt"
DIRECTORY = "optimizer"
"""Subdirectory of a checkpoint."""
VERSION = "version"
"""Key of the version."""
STEP, MOMENTS = "step", ("exp_avg", "exp_avg_sq")
"""Names of AdamW's states."""
MASTER = "master"
"""Name of the float32 copy of a weight that a back end keeps in half precision."""
States = dict[str, dict[str, torch.Tensor]]
"""States of each weight by their names."""


def write_states(
    path: Path, states: Mapping[str, Mapping[str, torch.Tensor]], version: int
) -> None:
    """Write the states of all weights; every rank must call this."""
    flat = {
        f"{name}/{field}": tensor for name, own in states.items() for field, tensor in own.items()
    }
    save(
        {**flat, VERSION: torch.tensor(version)}, storage_writer=FileSystemWriter(path / DIRECTORY)
    )


def read_states(
    path: Path, blanks: Any, *, alone: bool = False, with_masters: bool = False
) -> tuple[States, int]:
    """Read the states of weights, and the version.

    Args:
        path: the checkpoint.
        blanks: returns the tensor to fill from a weight's name, a shape and a dtype; None to skip the weight.
        alone: whether this process reads whole tensors for itself. Otherwise every rank must call this.
        with_masters: whether the float32 copies of weights are read too. The weights of the checkpoint equal them.
    """
    reader = FileSystemReader(path / DIRECTORY)
    flat: dict[str, Any] = {VERSION: torch.tensor(0)}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        name, _, field = key.rpartition("/")
        if field == MASTER and not with_masters:
            continue
        if name and isinstance(saved, TensorStorageMetadata):
            blank = blanks(name, saved.size, saved.properties.dtype)
            if blank is not None:
                flat[key] = blank
    load(flat, storage_reader=reader, no_dist=alone)
    version = int(flat.pop(VERSION))
    states: States = {}
    for key, tensor in flat.items():
        name, _, field = key.rpartition("/")
        states.setdefault(name, {})[field] = tensor
    return states, version


def has_states(path: Path) -> bool:
    """Return whether a checkpoint has states in this format."""
    return (path / DIRECTORY).is_dir()


def no_state(path: Path) -> str:
    """Return the error of a checkpoint without a state that this version reads."""
    return f"{path}: no optimizer state that this version reads; begin a new run with --set model.path={path}"


def states_by_name(saved: Mapping[str, Any], names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the states of each weight from the state of one torch optimizer, whose weights have numbers.

    Args:
        saved: what `state_dict` of the optimizer returned.
        names: names of its weights, in order.

    Raises:
        ValueError: it is not the state of one optimizer over these weights.
    """
    groups = saved.get("param_groups", [])
    if len(groups) != 1 or len(groups[0]["params"]) != len(names):
        raise ValueError(
            "the checkpoint is of another optimizer; resume with its algorithm.optimizer.name"
        )
    for number, states in saved["state"].items():
        yield names[number], states


def numbered_states(states: States, names: list[str]) -> dict[int, dict[str, torch.Tensor]]:
    """Return states by the numbers that weights have in one torch optimizer."""
    return {number: states[name] for number, name in enumerate(names) if name in states}
