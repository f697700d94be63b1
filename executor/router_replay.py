"""Record the choices of a transformers model's routers in a forward pass, or replace them.

A router computes a score for each expert, takes the largest ones with `topk`, and turns them into weights. Inside a
router's `forward`, `topk` over all experts returns the replayed experts and their own scores. So the weights come from
the current router, and gradients reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ATTRIBUTE = "streamrl_routers"
"""Name under which a model has its `Routers`."""


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, model: Any) -> None:
        """Take over the routers of a model.

        Raises:
            ValueError: it has none that this module knows.
        """
        found = [module for module in model.modules() if _is_router(module)]
        if not found:
            raise ValueError(
                f"algorithm.router_replay must be false: {type(model).__name__} has no routers of experts that are known"
            )
        self._replayed: torch.Tensor | None = None
        self._seen: list[torch.Tensor | None] = [None] * len(found)
        for place, router in enumerate(found):
            router.forward = self._wrapped(place, router, router.forward)
        setattr(model, ATTRIBUTE, self)

    def replay(self, choices: torch.Tensor | None) -> None:
        """Set the experts of the next passes, [tokens, layers, experts per token]; negative numbers choose anew.

        They stay until the next call, because recomputed activations need them in the backward pass.

        Raises:
            ValueError: they are of another number of layers.
        """
        if choices is not None and choices.shape[1] != len(self._seen):
            raise ValueError(
                f"recorded experts are of {choices.shape[1]} layers, the model has {len(self._seen)} routers"
            )
        self._replayed = choices

    def take(self) -> torch.Tensor:
        """Return the experts of the last pass, [tokens, layers, experts per token]."""
        seen, self._seen = self._seen, [None] * len(self._seen)
        chosen = [each for each in seen if each is not None]
        if len(chosen) != len(seen):
            raise RuntimeError(f"{len(seen) - len(chosen)} of {len(seen)} routers chose no experts")
        return torch.stack(chosen, dim=1)

    def _wrapped(self, place: int, router: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def route(*args: Any, **kwargs: Any) -> Any:
            replayed = None if self._replayed is None else self._replayed[:, place]
            mode = _Choice(int(router.num_experts), int(router.top_k), replayed)
            with mode:
                output = forward(*args, **kwargs)
            self._seen[place] = mode.chosen
            return output

        return route


class _Choice(TorchFunctionMode):
    """Records the result of `topk` over all experts, or replaces it."""

    def __init__(self, num_experts: int, top_k: int, replayed: torch.Tensor | None) -> None:
        super().__init__()
        self._shape = num_experts, top_k
        self._replayed = replayed
        self.chosen: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, (values, experts) = args[0], result
        if scores.dim() != 2 or (scores.shape[-1], experts.shape[-1]) != self._shape:
            return result  # a choice of groups of experts
        if self._replayed is not None:
            own = self._replayed.to(experts)
            experts = torch.where(own < 0, experts, own)
            values = scores.gather(-1, experts)
        self.chosen = experts.detach()
        return values, experts


def routers_of(model: Any) -> Routers | None:
    """Return the routers that were taken over of a model, or of the model inside a wrapper such as DeepSpeed's."""
    found: Routers | None = getattr(getattr(model, "module", model), ATTRIBUTE, None)
    return found


def _is_router(module: Any) -> bool:
    """Return whether a module chooses experts: in transformers 5 these have `top_k` and `num_experts`."""
    is_named = "router" in type(module).__name__.lower()
    return is_named and hasattr(module, "top_k") and hasattr(module, "num_experts")
