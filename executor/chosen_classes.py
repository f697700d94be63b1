"""Import what the choices from outside this package name, before a run starts.

Only worker processes import an inference engine, a training backend or a loss, because these bring torch or vLLM.
So a process of its own imports them here, in the environment of a worker. Its import takes seconds; choices of this
package are not imported.

    python -m streamrl.executor.chosen_classes < {"search": [...], "paths": ["module:NAME", ...]}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from typing import NamedTuple

from streamrl.runfile.algorithms import ALGORITHMS, algorithm_named
from streamrl.runfile.backend_choice import (
    ENGINES,
    TRAINING_BACKENDS,
    engine_named,
    training_backend_named,
)
from streamrl.runfile.choices import ChoiceList, import_object, one_line
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig

IMPORT_TIME = 300.0
"""Seconds that the imports may take. vLLM takes half a minute on a busy machine."""
IMPORTED = "imported"
"""What the process says of a path that it has imported."""


class NamedObject(NamedTuple):
    """An object that workers import because of a choice."""

    choices: ChoiceList
    name: str
    """Value of the key."""
    attribute: str
    """Attribute of the choice that has the path; empty for the choice itself."""
    path: str

    def say(self, why: str) -> str:
        """Return the reason of a refusal."""
        what = f"its {self.attribute} {self.path!r}" if self.attribute else repr(self.path)
        return f"cannot be used: a worker cannot import {what}: {why}; mend it"


def check_chosen_classes(run: Run) -> None:
    """Raise `RunError` if workers could not import what choices from outside this package name."""
    seen = map(run.as_seen_by, range(run.num_trainers))
    algorithms = [each.algorithm.name for each in seen]
    named = list(dict.fromkeys(_named_objects(algorithms, run.rollout.kinds, run.trainers)))
    if not named:
        return
    search = [] if run.execute.launcher == "local" else sys.path  # only its workers do without
    answers = _import_apart([each.path for each in named], search)
    for each, answer in zip(named, answers, strict=True):
        if answer != IMPORTED:
            raise each.choices.refusal(each.name, each.say(answer))


def _named_objects(
    algorithms: Iterable[str],
    kinds: tuple[RolloutConfig, ...],
    trainers: tuple[TrainerConfig, ...],
) -> Iterator[NamedObject]:
    for name in algorithms:
        yield from _paths_of(ALGORITHMS, name, algorithm_named(name), "objective")
    for own in kinds:
        engine = engine_named(own.backend)
        yield from _paths_of(ENGINES, own.backend, engine, "engine")
        if own.backend not in ENGINES.own:
            for module in engine.preload:
                yield NamedObject(
                    ENGINES, own.backend, "preload", f"{module}:__name__"
                )  # a module has one
    for config in trainers:
        chosen = training_backend_named(config.backend)
        yield from _paths_of(TRAINING_BACKENDS, config.backend, chosen, "backend", "split")


def _paths_of(
    choices: ChoiceList, name: str, chosen: object, *attributes: str
) -> Iterator[NamedObject]:
    """Yield a choice from outside and the paths that it names, without those that choices of this package name."""
    if name in choices.own:
        return
    yield NamedObject(choices, name, "", choices.path_of(name))
    own = [import_object(path) for path in (choices.base, *choices.own.values())]
    for attribute in attributes:
        path = getattr(chosen, attribute)
        if path not in {getattr(each, attribute, None) for each in own}:
            yield NamedObject(choices, name, attribute, str(path))


def _import_apart(paths: list[str], search: list[str]) -> list[str]:
    """Return for each path `IMPORTED`, or why a process of its own could not import it."""
    words = [sys.executable, "-m", "streamrl.executor.chosen_classes"]
    question = json.dumps({"search": search, "paths": paths})
    try:
        done = subprocess.run(
            words, input=question, capture_output=True, text=True, timeout=IMPORT_TIME, check=False
        )
        answers, end = (
            done.stdout.splitlines(),
            f"its import ended the process with status {done.returncode}",
        )
    except subprocess.TimeoutExpired as error:
        answers = (error.stdout or b"").decode().splitlines()
        end = f"its import took more than {IMPORT_TIME:.0f} s"
    return [*answers, *[end] * (len(paths) - len(answers))]


def _answer() -> None:
    """Import the paths of a question on standard input, and say a line of each."""
    question = json.load(sys.stdin)
    sys.path += [path for path in question["search"] if path not in sys.path]
    for path in question["paths"]:
        with redirect_stdout(sys.stderr):
            answer = _try(path)
        print(answer, flush=True)


def _try(path: str) -> str:
    try:
        import_object(path)
    except (Exception, SystemExit) as error:
        return one_line(error)
    return IMPORTED


if __name__ == "__main__":
    _answer()
