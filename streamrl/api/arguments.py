"""Check the arguments of the functions for notebooks and scripts: an error names the argument and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import wraps
from inspect import BoundArguments, Parameter, isfunction, signature
from pkgutil import resolve_name
from typing import Any, NamedTuple

RUN, OFFER = "streamrl.runfile.config:Run", "streamrl.runfile.files:Offer"
PLAN = "streamrl.sim.planner.plan:Plan"
SOURCE = ("pathlib:Path", "builtins:str", "collections.abc:Mapping")
"""What `load_run` reads."""
NONE = " | None"
PATH = ("pathlib:Path", "builtins:str")
BUBBLES = "streamrl.report.bubbles:Bubbles"
PARTS = ("run", "plan")
"""Names under which offers, answers, traces and results of `plan` have a run or a plan."""


class Wanted(NamedTuple):
    """What an argument must be."""

    words: str
    kinds: tuple[str, ...]
    """Its types, each as module:name."""
    items: tuple[str, ...] = ()
    """Types of its items, if it must be a sequence with at least one."""

    def find_error(self, value: object) -> str | None:
        """Return why a value cannot be the argument; None if it can be."""
        kinds = tuple(map(resolve_name, self.kinds))
        if isinstance(value, kinds):
            return None
        if self.items and isinstance(value, Collection) and not isinstance(value, str):
            items = tuple(map(resolve_name, self.items))
            wrong = (type(each).__name__ for each in value if not isinstance(each, items))
            found = next(wrong, None) if len(value) else "no items"
            return None if found is None else f"must be {self.words}, got one with {found}"
        parts = (part for part in PARTS if isinstance(getattr(value, part, None), kinds))
        part = next(parts, None)
        hint = "" if part is None else f"; pass its attribute {part!r}"
        return f"must be {self.words}, got a value of type {type(value).__name__}{hint}"


WANTED = {
    "Run": Wanted("a run, as load_run returns it", (RUN,)),
    "Run | Offer": Wanted("what load_run or load_offer returns", (RUN, OFFER)),
    "Run | Path | str | Mapping[str, Any]": Wanted(
        "a run, the path of a run file or a dict of its tables", (RUN, *SOURCE)
    ),
    "Path | str | Mapping[str, Any]": Wanted(
        "the path of a run file or a dict of its tables", SOURCE
    ),
    "Path | str": Wanted("a path or its text", PATH),
    "Changes": Wanted(
        "texts 'key=value', or values by dotted key",
        ("collections.abc:Mapping", "collections.abc:Iterable"),
    ),
    "int": Wanted("a whole number", ("numbers:Integral",)),
    "ModelConfig": Wanted(
        "the section model of a run, as load_run(...).model",
        ("streamrl.runfile.cluster_config:ModelConfig",),
    ),
    "Plan": Wanted("a plan, as read_plan returns it", (PLAN,)),
    "Trace": Wanted(
        "a trace, as simulate or read_trace returns it", ("streamrl.engine.trace:Trace",)
    ),
    "Metrics": Wanted("metrics, as measure returns them", ("streamrl.record.metrics:Metrics",)),
    "Against": Wanted(
        "a comparison, as compare_runs returns it", ("streamrl.record.run_comparison:Against",)
    ),
    "Jobs": Wanted("jobs, as load_jobs returns them", ("streamrl.runfile.jobs_file:Jobs",)),
    "ClusterPlan": Wanted(
        "a plan of jobs, as plan_jobs returns it", ("streamrl.sim.jobs.plan:ClusterPlan",)
    ),
    "Bubbles": Wanted("idle time, as read_bubbles returns it", (BUBBLES,)),
    "Sequence[Bubbles]": Wanted(
        "a list of idle times, as read_bubbles returns one", (), (BUBBLES,)
    ),
    "Sequence[GenerationCurve]": Wanted(
        "a list of curves, as study_generation returns one",
        (),
        ("streamrl.sim.studies.results:GenerationCurve",),
    ),
    "ModelShape": Wanted(
        "a model, as load_model returns it", ("streamrl.hardware.model_shape:ModelShape",)
    ),
    "Sequence[Path | str] | Path | str": Wanted("a path, or a list of them", PATH, PATH),
    "Sequence[float]": Wanted("a list of numbers", (), ("numbers:Real",)),
    "Sequence[int]": Wanted("a list of whole numbers", (), ("numbers:Integral",)),
    "float": Wanted("a number", ("numbers:Real",)),
    "bool": Wanted("True or False", ("builtins:bool",)),
    "str": Wanted("a text", ("builtins:str",)),
    "int | str": Wanted("a number or its text", ("numbers:Integral", "builtins:str")),
    "float | str": Wanted("a number or its text", ("numbers:Real", "builtins:str")),
    "Callable[[int, str], None]": Wanted("a function", ("collections.abc:Callable",)),
    "Callable[[int], None]": Wanted("a function", ("collections.abc:Callable",)),
    "StudyResult": Wanted(
        "a study, as sweep returns it", ("streamrl.report.study_report:StudyResult",)
    ),
}
"""What arguments must be, by their annotation without "| None"."""


def checked(name: str, function: Any) -> Any:
    """Return a function that raises `TypeError` for wrong arguments; other objects stay as they are.

    Args:
        name: the function's name for its callers.
        function: the function, or a class.
    """
    if not isfunction(function):
        return function
    wanted = {}
    for each in signature(function).parameters.values():
        annotation = str(each.annotation).removesuffix(NONE)
        if annotation in WANTED:
            wanted[each.name] = WANTED[annotation]
    return _checking(name, function, wanted) if wanted else function


def _checking(name: str, function: Callable[..., Any], wanted: dict[str, Wanted]) -> Any:
    own = signature(function)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for key, parameter, value in _each_value(own.bind_partial(*arguments, **named)):
            may_be_absent = value is None and str(parameter.annotation).endswith(NONE)
            if (
                parameter.name in wanted
                and not may_be_absent
                and (error := wanted[parameter.name].find_error(value)) is not None
            ):
                raise TypeError(f"{name}: {key} {error}")
        return function(*arguments, **named)

    return call


def _each_value(bound: BoundArguments) -> Iterator[tuple[str, Parameter, Any]]:
    """Yield each argument with its name and parameter; those that `**shape` takes have one parameter."""
    for key, value in bound.arguments.items():
        parameter = bound.signature.parameters[key]
        if parameter.kind is Parameter.VAR_KEYWORD:
            yield from ((name, parameter, each) for name, each in value.items())
        else:
            yield key, parameter, value
