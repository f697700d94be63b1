"""Find the class of an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamrl.executor.verifier.scorers import import_function
from streamrl.runfile.choices import import_object
from streamrl.runfile.environment_choice import ENVIRONMENTS, class_of


def find_class(implementation: str) -> Callable[..., Any]:
    """Return the class, or function that makes an environment, that `environment.implementation` names.

    Raises:
        TypeError: it names nothing.
    """
    chosen = ENVIRONMENTS.get(implementation)
    if chosen is not None:
        own = import_object(chosen.make)
        assert callable(own), chosen.make
        return own
    named = class_of(implementation)
    if named is None:
        raise TypeError(f"{implementation!r} is no environment")
    return import_function(named)
