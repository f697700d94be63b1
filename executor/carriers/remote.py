"""A role at the other end of a handle, called by its contract instead of by names of methods."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_type_hints

from streamrl.executor.carriers.handles import Handle

R = TypeVar("R")


def remote(role: Callable[..., R], handle: Handle) -> R:
    """Return the role that lives behind `handle`: each async method of its Protocol is a call.

    Args:
        role: the Protocol, as a callable only because a type checker takes no abstract class for `type[R]`.
        handle: reaches an implementation of it; closing it is the caller's, as `stop` alone leaves its process.
    """
    methods = inspect.getmembers(role, inspect.iscoroutinefunction)
    return cast(R, SimpleNamespace(**{name: _caller(handle, each) for name, each in methods}))


def _caller(handle: Handle, method: Any) -> Callable[..., Awaitable[Any]]:
    """Return what calls one method, its arguments in the order and its result of the type that it declares."""
    name, signature = method.__name__, inspect.signature(method)
    returns = get_type_hints(method)["return"]

    def call(*arguments: object, **named: object) -> Awaitable[Any]:
        if named:  # binding takes longer than the rest of a call
            arguments = signature.bind(None, *arguments, **named).args[1:]
        return handle.call(name, *arguments, returns=returns)

    return call
