"""Train with torch's FSDP2: weights, gradients and optimizer are split over the ranks, each parameter on its own.

Trained weights are float32 shards. A layer is gathered in `trainer.dtype` for its pass and freed after it, so that no
rank has a whole copy of the weights. Gradients are summed over the ranks in float32 in every pass. The optimizer works
on the local shards as on plain tensors, because AdamW computes each value alone.

With `offload`, moments wait in host memory between steps. A step moves those of one layer at a time to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamrl.executor.trainer.adapters import save_model
from streamrl.executor.trainer.losses import scale_gradients
from streamrl.executor.trainer.optimizer_state import (
    STATE_FILE,
    States,
    has_states,
    no_state,
    read_states,
    states_by_name,
    write_states,
)
from streamrl.executor.trainer.optimizers import make_optimizer, restate, set_rate
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.sharding import like, local, num_copies, own_part, shard, whole
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.training_backend import state_of


def make_split(settings: TrainerSettings, model: Any) -> Any:
    """Return a model that is not trained, split over the ranks."""
    shard(settings, model, learns=False)
    return model.requires_grad_(False)


class Fsdp2Backend:
    """A model in shards, and an optimizer for each unit that is gathered at once."""

    in_step = True

    def __init__(self, settings: TrainerSettings, model: Any, ranks: RankGroup) -> None:
        self._settings = settings
        self._ranks = ranks
        self._units = shard(settings, model, learns=True)
        self.model = model
        self._trained = {n: each for n, each in model.named_parameters() if each.requires_grad}
        self._shards = {n: torch.nn.Parameter(local(each)) for n, each in self._trained.items()}
        """The local part of each trained weight, in the same memory."""
        self._names = {id(own): name for name, own in self._shards.items()}
        self._optimizers = [
            make_optimizer(settings, torch.nn.ParameterList(shards))
            for shards in self._shards_by_unit()
        ]

    def _shards_by_unit(self) -> Iterator[list[torch.nn.Parameter]]:
        names = {id(parameter): name for name, parameter in self._trained.items()}
        for unit in self._units:
            own = [names.pop(id(parameter), None) for parameter in unit.parameters()]
            if some := [self._shards[name] for name in own if name is not None]:
                yield some

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss, summed over the ranks."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def step(self, count: float) -> float:
        """Turn the gradient into the batch's mean, clip it, and update the weights."""
        self._free_gathered()
        for name, own in self._shards.items():
            gradient = self._trained[name].grad
            own.grad = torch.zeros_like(own) if gradient is None else local(gradient)
        gradients = [own.grad for own in self._shards.values() if own.grad is not None]
        norm = scale_gradients(gradients, self._norm(), count, self._settings.max_grad_norm)
        for optimizer in self._optimizers:
            if self._settings.offload:
                _move_state(optimizer, self._settings.device)
            optimizer.step()
            if self._settings.offload:
                _move_state(optimizer, "cpu")
        for name, own in self._shards.items():
            own.grad = self._trained[name].grad = None
        return norm

    def _norm(self) -> float:
        """Return the norm of the summed gradient over all ranks; a shard that several ranks have counts once."""
        squares = [
            own.grad.double().square().sum() / num_copies(self._trained[name], self._ranks.size)
            for name, own in self._shards.items()
            if own.grad is not None
        ]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def set_rate(self, rate: float) -> None:
        """Use a learning rate from the next step on."""
        for optimizer in self._optimizers:
            set_rate(optimizer, rate)

    def weights(
        self, *, learned: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's tensors, each gathered when it is asked for, and kept by nobody."""
        self._free_gathered()
        last: tuple[Any, torch.Tensor] | None = None
        for name, tensor in state_of(self.model, learned=learned).items():
            if last is None or last[0] is not tensor:
                last = tensor, whole(tensor, dtype)
            yield name, last[1]

    def save(self, path: Path, version: int) -> None:
        """Write whole weights on the first rank, and on every rank its part of the optimizer's state."""
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.weights():
            if self._ranks.is_first:
                weights[name] = tensor.to("cpu")
        if self._ranks.is_first:
            save_model(self.model, weights.items(), path)
        self._ranks.wait()
        states: States = {}
        for optimizer in self._optimizers:
            for own, fields in optimizer.state.items():
                name = self._names[id(own)]
                states[name] = {
                    field: like(self._trained[name], each) if each.shape == own.shape else each
                    for field, each in fields.items()
                }
        write_states(path, states, version)

    def load(self, path: Path) -> int:
        """Load the optimizer's state, written by any back end on any number of ranks."""
        if has_states(path):
            states, version = read_states(path, self._blank)
        elif (path / STATE_FILE).is_file():
            states, version = self._states_of_torch(path / STATE_FILE)
        else:
            raise ValueError(no_state(path))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for own in group["params"]:
                    fields = states.get(self._names[id(own)], {})
                    if fields:
                        optimizer.state[own] = {
                            n: local(each).to(own.device) for n, each in fields.items()
                        }
            restate(optimizer, self._settings)
            if self._settings.offload:
                _move_state(optimizer, "cpu")
        return version

    def _blank(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor for a saved state of a weight: split as the weight is, or whole if it has another shape."""
        if name not in self._trained:
            return None
        if shape != self._trained[name].shape:
            return torch.zeros(shape, dtype=dtype)
        return like(self._trained[name], torch.zeros_like(self._shards[name].data, dtype=dtype))

    def _states_of_torch(self, file: Path) -> tuple[States, int]:
        saved = torch.load(file, "cpu", weights_only=True, mmap=True)
        states: States = {}
        for name, fields in states_by_name(saved["optimizer"], list(self._trained)):
            whole_shape, device = self._trained[name].shape, self._settings.device
            states[name] = {
                field: own_part(self._trained[name], each).to(device, copy=True)
                if each.shape == whole_shape
                else each.clone()
                for field, each in fields.items()
            }
        return states, saved["version"]

    def move(self, device: str) -> None:
        """Move weights, gradient and optimizer state to a device."""
        self._free_gathered()
        self.model.to(device)  # moves the gradient too
        for name, own in self._shards.items():
            own.data = local(self._trained[name])
        if not self._settings.offload:
            for optimizer in self._optimizers:
                _move_state(optimizer, device)

    def _free_gathered(self) -> None:
        """Free weights that a pass without gradient left gathered; they would miss the next step."""
        for unit in self._units:
            unit.reshard()


def _move_state(optimizer: Any, device: str) -> None:
    for fields in optimizer.state.values():
        moved = {name: each.to(device) for name, each in fields.items() if each.ndim}
        fields.update(moved)
