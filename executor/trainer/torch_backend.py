"""Train with torch alone: every rank has all weights and the whole optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from streamrl.executor.trainer.adapters import save_model
from streamrl.executor.trainer.losses import average_gradients
from streamrl.executor.trainer.optimizer_state import (
    STATE_FILE,
    has_states,
    no_state,
    numbered_states,
    read_states,
)
from streamrl.executor.trainer.optimizers import make_optimizer, restate, set_rate
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.training_backend import state_of


class TorchBackend:
    """A model, its gradient in the parameters, and its optimizer."""

    in_step = False

    def __init__(self, settings: TrainerSettings, model: Any, ranks: RankGroup) -> None:
        self.model = model
        self.optimizer = make_optimizer(settings, model)
        self._settings = settings
        self._ranks = ranks
        for parameter in self._trained():
            # Zeros, not None: a batch with only zero advantages then steps like any zero gradient.
            parameter.grad = torch.zeros_like(parameter)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def step(self, count: float) -> float:
        """Sum the gradient over ranks, turn it into a mean, clip it, and update the weights."""
        self._ranks.sum_tensors([parameter.grad for parameter in self._trained()])
        norm = average_gradients(self.model, count, self._settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def set_rate(self, rate: float) -> None:
        """Use a learning rate from the next step on."""
        set_rate(self.optimizer, rate)

    def weights(
        self, *, learned: bool = False, dtype: torch.dtype | None = None
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the model's tensors by name."""
        state = state_of(self.model, learned=learned)
        return [(name, tensor.detach()) for name, tensor in state.items()]

    def save(self, path: Path, version: int) -> None:
        """Write weights and optimizer state on the first rank; all ranks have the same."""
        if self._ranks.is_first:
            save_model(self.model, self.weights(), path)
            state = {"optimizer": self.optimizer.state_dict(), "version": version}
            torch.save(state, path / STATE_FILE)

    def load(self, path: Path) -> int:
        """Load the optimizer state of a checkpoint, also of one that another back end wrote."""
        if has_states(path):
            return self._load_states(path)
        if not (path / STATE_FILE).is_file():
            raise ValueError(no_state(path))
        state = torch.load(path / STATE_FILE, self._settings.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        restate(self.optimizer, self._settings)
        version: int = state["version"]
        return version

    def _load_states(self, path: Path) -> int:
        if self._settings.optimizer != "adamw":
            raise ValueError(
                f"{path}: its optimizer is adamw, not {self._settings.optimizer}; resume with "
                "--set algorithm.optimizer.name=adamw"
            )
        names = [name for name, each in self.model.named_parameters() if each.requires_grad]
        states, version = read_states(
            path, lambda _, shape, dtype: torch.zeros(shape, dtype=dtype), alone=True
        )
        saved = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**saved, "state": numbered_states(states, names)})
        return version

    def state(self) -> dict[str, Any]:
        """Return all that training changes, for a rank that joins; weights below adapters are not among it."""
        return {"weights": self._changing(), "optimizer": self.optimizer.state_dict()}

    def take_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of another rank."""
        for own, received in zip(self._changing(), state["weights"], strict=True):
            own.data = received.to(own.dtype)
        self.optimizer.load_state_dict(state["optimizer"])

    def _changing(self) -> list[torch.Tensor]:
        """Return the tensors of the model that a new rank must receive, each once."""
        tensors = state_of(self.model, learned=self._settings.adapter_rank is not None).values()
        return list({id(tensor): tensor for tensor in tensors}.values())

    def _trained(self) -> list[Any]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def move(self, device: str) -> None:
        """Move weights, gradient and optimizer state to a device."""
        self.model.to(device)  # moves the gradient too
        for held in self.optimizer.state.values():
            tensors = {name: each for name, each in held.items() if torch.is_tensor(each)}
            held.update({name: tensor.to(device) for name, tensor in tensors.items()})
