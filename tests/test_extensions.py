"""A package outside the tree adds an algorithm, a dispatch policy, an engine, a training backend and a scorer."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from streamrl.engine.messages import Failed, Generate
from streamrl.engine.policies.dispatch import FromOutside, LeastLoaded
from streamrl.engine.systems import build_dispatch
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.execute import check_installed
from streamrl.record.samples import read_completions
from streamrl.runfile.algorithms import ALGORITHMS
from streamrl.runfile.backend_choice import ENGINES, SERVER_APIS, TRAINING_BACKENDS
from streamrl.runfile.choices import ExtensionError
from streamrl.runfile.dispatch_choice import DISPATCH
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import write_run
from streamrl.runfile.scorer_choice import SCORERS
from streamrl.sim.batch_generation import DrawnBatch, generate_batch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.world import simulate
from streamrl.workload.workload import SimulatedWorkload
from tests.command_line import streamrl
from tests.ray_actors import start_actor
from tests.runs import small_run
from tests.test_architecture import EVERYWHERE, ROOT, name_of
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.test_execute import execute, real_run
from tests.tiny_model import save_tiny_model

PACKAGE = '''
from streamrl.engine.policies.dispatch import Dispatch
from streamrl.runfile.algorithms import Algorithm
from streamrl.runfile.backend_choice import EngineChoice, Torch


class Halves(Algorithm):
    """1/2 for each reward above the worst of its group, else -1/2."""

    def advantages(self, rewards, baseline=0.0):
        return [0.5 if reward > min(rewards) else -0.5 for reward in rewards]


class LastReplica(Dispatch):
    """Send all rollouts to the replica with the highest number."""

    def choose(self, state, rollout):
        fresh = state.fleet.fresh(rollout.group.oldest_version)
        return fresh[-1] if fresh else None


class MarkedEngine(EngineChoice):
    engine = "brought.compute:MarkedEngine"


class Untimed(EngineChoice):
    engine = "brought.compute:MarkedEngine"
    not_simulated = "nobody timed it"


class MarkedTrainer(Torch):
    backend = "brought.compute:MarkedBackend"


def digits(completion, record):
    return sum(letter.isdigit() for letter in completion) / 100
'''
COMPUTE = """
from pathlib import Path

from streamrl.executor.rollout.transformers_engine import TransformersEngine
from streamrl.executor.trainer.torch_backend import TorchBackend


class MarkedEngine(TransformersEngine):
    def __init__(self, settings):
        (Path(settings.model) / "generated").touch()
        super().__init__(settings)


class MarkedBackend(TorchBackend):
    def __init__(self, settings, model, ranks):
        (Path(settings.model) / "trained").touch()
        super().__init__(settings, model, ranks)
"""
ENTRY_POINTS = """
[streamrl.algorithms]
halves = brought:Halves
[streamrl.dispatch]
last-replica = brought:LastReplica
[streamrl.engines]
marked = brought:MarkedEngine
[streamrl.training_backends]
marked = brought:MarkedTrainer
[streamrl.scorers]
digits = brought:digits
"""
KEYS = (
    *("algorithm.name", "policies.dispatch", "rollout.backend", "trainer.backend"),
    "verifier.scorer",
)
BY_PATH = (
    *("brought:Halves", "brought:LastReplica", "brought:MarkedEngine", "brought:MarkedTrainer"),
    "brought:digits",
)
BY_NAME = ("halves", "last-replica", "marked", "marked", "digits")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with an installed package, which this process and its workers import from."""
    path = tmp_path_factory.mktemp("site")
    package, info = path / "brought", path / "brought-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "compute.py").write_text(COMPUTE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(path), os.environ.get("PYTHONPATH", ""))))
        yield path
    for name in [name for name in sys.modules if name.split(".")[0] == "brought"]:
        del sys.modules[name]


def replicas_of(trace: Trace) -> set[int]:
    """Return the replicas that rollouts were sent to."""
    commands = [command for entry in trace.entries for command in entry.commands]
    return {command.replica for command in commands if isinstance(command, Generate)}


# Both worlds --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("values", [BY_PATH, BY_NAME], ids=["module:Class", "entry point"])
def test_what_a_package_brings_is_simulated_and_replays(values: tuple[str, ...]) -> None:
    run = small_run(dict(zip(KEYS[:4], values[:4], strict=True)))
    assert run.algorithm.trains_whole_groups and not run.algorithm.has_critic
    trace = simulate(run)
    assert trace.run == run and len(replicas_of(trace)) == 1
    assert len(replicas_of(simulate(small_run()))) == 2
    assert replay(trace) is None


@pytest.mark.parametrize("values", [BY_PATH, BY_NAME], ids=["module:Class", "entry point"])
def test_what_a_package_brings_is_executed_and_replays(
    site: Path, tmp_path: Path, values: tuple[str, ...]
) -> None:
    save_tiny_model(tmp_path / "model", SYMBOLS)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    chosen = [f"{key}={value}" for key, value in zip(KEYS, values, strict=True)]
    settings = [*chosen, "algorithm.steps=2", "execute.samples_per_step=16"]
    options = [part for setting in settings for part in ("--set", setting)]
    done = streamrl("execute", tmp_path / "run.toml", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "generated").exists(), "the engine made it"
    assert (tmp_path / "model" / "trained").exists(), "the training backend made it"
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    assert len(replicas_of(trace)) == 1
    assert replay(trace) is None
    groups = read_completions(tmp_path / "run")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert rollouts and {rollout.advantage for rollout in rollouts} <= {0.5, -0.5}
    assert [rollout.reward for rollout in rollouts] == pytest.approx(
        [sum(letter.isdigit() for letter in rollout.text) / 100 for rollout in rollouts]
    )


def test_each_list_knows_what_installed_packages_declare(site: Path) -> None:
    for choices, name in zip(
        (ALGORITHMS, DISPATCH, ENGINES, TRAINING_BACKENDS), BY_NAME, strict=False
    ):
        assert choices.names() == (*choices.own, name)
        with pytest.raises(
            RunError, match=rf"{choices.key} must be one of .*, {name}.*, got 'nobody'"
        ):
            small_run({choices.key: "nobody"})


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("key", KEYS[:4])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_package:Thing", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("brought:Nothing", "ImportError: module brought has no Nothing"),
        ("brought:digits", "TypeError: brought:digits is not a subclass of "),
    ],
)
def test_what_cannot_be_imported_is_refused_before_anything_is_written(
    tmp_path: Path, key: str, value: str, why: str
) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    done = streamrl("execute", tmp_path / "run.toml", "--set", f"{key}={value}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"streamrl: {key} '{value}' cannot be used: {why}")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"]


@pytest.mark.usefixtures("site")
def test_an_engine_says_why_it_is_not_simulated() -> None:
    with pytest.raises(
        RunError, match=r"'brought:Untimed' can be executed only, as nobody timed it"
    ):
        simulate(small_run({"rollout.backend": "brought:Untimed"}))


def test_names_of_this_package_import_nothing_to_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.runfile.choices.import_module", None)
    monkeypatch.setattr("streamrl.runfile.choices.entry_points", None)
    assert not any(
        choices.find_error(name, choices.key)
        for choices in (ALGORITHMS, DISPATCH, ENGINES, TRAINING_BACKENDS)
        for name in choices.own
    )


# One list -----------------------------------------------------------------------------------------

LISTS: dict[str, dict[str, str]] = {
    "an algorithm": dict(ALGORITHMS.own),
    "a dispatch policy": dict(DISPATCH.own),
    "an inference engine": dict(ENGINES.own),
    "an API of external servers": dict(SERVER_APIS.own),
    "a training backend": dict(TRAINING_BACKENDS.own),
    "a scorer": {name: choice.make for name, choice in SCORERS.items()},
}
NAMES = {name for own in LISTS.values() for name in own}


def compared(path: Path) -> list[str]:
    """Return the names of choices that a file compares something with."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            found += [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            found.append(node.value)
    found += [each for tuples in found if isinstance(tuples, ast.Tuple) for each in tuples.elts]
    return [
        str(each.value) for each in found if isinstance(each, ast.Constant) and each.value in NAMES
    ]


def test_nobody_compares_the_name_of_a_choice() -> None:
    assert {name_of(path): names for path in EVERYWHERE if (names := compared(path))} == {}


@pytest.mark.parametrize("what", LISTS)
def test_the_guide_names_the_files_that_a_choice_is_in(what: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {what} |"))
    paths = set(LISTS[what].values())
    holders = [path for path in EVERYWHERE if paths & constants(path)]
    assert [name_of(path) for path in holders if f"`{name_of(path)}`" not in row] == []
    assert len(holders) == 1, "there is one list"


@cache
def constants(path: Path) -> frozenset[str]:
    """Return the texts that a file has as whole literals."""
    nodes = ast.walk(ast.parse(path.read_text()))
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    return frozenset(value for value in values if isinstance(value, str))


class Reversed(LeastLoaded):
    """A policy of a user's own, which overrides where rollouts go."""


def test_a_subclass_of_a_policy_that_can_wait_is_refused_and_never_replaced() -> None:
    changes = {
        "policies.learns_from_siblings": True,
        "policies.order": "longest-first",
        "algorithm.group_size": 2,
    }
    small_run({**changes, "policies.dispatch": "least-loaded"})
    with pytest.raises(RunError) as caught:
        small_run({**changes, "policies.dispatch": "tests.test_extensions:Reversed"})
    assert caught.value.key == "policies.dispatch"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise ValueError('\\x1b[31mred\\nnext')", r"ValueError: \x1b[31mred next"),
        (
            "from streamrl.engine.policies.dispatch import Dispatch\nclass Own(Dispatch): ...",
            "TypeError: odd:Own does not define choose",
        ),
    ],
)
def test_a_module_that_exits_or_a_class_without_its_method_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (tmp_path / "odd.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    with pytest.raises(RunError) as caught:
        small_run({"policies.dispatch": "odd:Own"})
    assert caught.value.key == "policies.dispatch"
    assert f"cannot be used: {why}; make its module importable" in str(caught.value)


def test_what_a_module_prints_at_import_does_not_reach_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from streamrl.engine.policies.dispatch import LeastLoaded as Own\nprint('hello')"
    (tmp_path / "loud.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    small_run({"policies.dispatch": "loud:Own"})
    printed = capsys.readouterr()
    assert printed.out == "" and "hello" in printed.err


# Faults of a class --------------------------------------------------------------------------------

POLICIES = """
from streamrl.engine.entities import Replica
from streamrl.engine.policies.dispatch import Dispatch


class Number(Dispatch):
    def choose(self, state, rollout):
        return 7


class Dead(Dispatch):
    def choose(self, state, rollout):
        return Replica(99, 0)


class Stale(Dispatch):
    def choose(self, state, rollout):
        return state.fleet.replicas[0]


class Never(Dispatch):
    def choose(self, state, rollout):
        return None


class Raises(Dispatch):
    def choose(self, state, rollout):
        raise ValueError("first\\nsecond")


class Exits(Dispatch):
    def choose(self, state, rollout):
        raise SystemExit(0)


class MakesNothing(Never):
    @classmethod
    def make(cls, policies, rollout, seed, order):
        return None


class Tail(Never):
    has_tail = True
"""
CONSTRUCTORS = """
from streamrl.engine.policies.dispatch import LeastLoaded
from streamrl.runfile.algorithms import Grpo
from streamrl.runfile.backend_choice import Torch, Transformers


class Raises:
    def __init__(self, *arguments):
        print("made")
        raise OSError("no settings\\nhere")


class OwnAlgorithm(Raises, Grpo): ...
class OwnDispatch(Raises, LeastLoaded): ...
class OwnEngine(Raises, Transformers): ...
class OwnTrainer(Raises, Torch): ...
"""


ALGORITHMS_AND_BACKENDS = """
from streamrl.runfile.algorithms import Algorithm
from streamrl.runfile.backend_choice import EngineChoice, Torch

COMPUTE = "streamrl.executor.rollout.transformers_engine:TransformersEngine"


class Short(Algorithm):
    def advantages(self, rewards):
        return rewards[1:]


class NoNumber(Algorithm):
    def advantages(self, rewards):
        return [float("nan") for _ in rewards]


class Texts(Algorithm):
    def advantages(self, rewards):
        return ["high" for _ in rewards]


class OddLoss(Short):
    objective = "odd_loss:Loss"


class OddEngine(EngineChoice):
    engine = "no_such_package:Engine"


class OddPreload(EngineChoice):
    engine = COMPUTE
    preload = ("no_such_package",)


class OddLimits(EngineChoice):
    engine = COMPUTE
    limits = "no_such_package:limits"


class NoEngine(EngineChoice): ...


class OddTrainer(Torch):
    backend = "streamrl.executor.trainer.torch_backend:Nothing"
"""
MODULES = {
    "odd_policies": POLICIES,
    "odd_constructors": CONSTRUCTORS,
    "odd_choices": ALGORITHMS_AND_BACKENDS,
    "odd_loss": "import os\nos._exit(7)",
}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run file, next to modules that can be imported, here and in workers."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    write_run(small_run(), tmp_path / "run.toml")
    return tmp_path / "run.toml"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("Number", "returned 7, which is not a replica; choose must return one of"),
        ("Dead", "returned replica 99, which does not run; choose must return one of"),
        ("Stale", "returned replica 0, whose weights are too old for rollout "),
        ("Raises", "raised ValueError: first second\n"),
        ("Exits", "raised SystemExit: 0\n"),
    ],
)
def test_a_fault_of_a_dispatch_policy_names_its_class_and_is_no_wrong_input(
    faulty: Path, policy: str, why: str
) -> None:
    chosen = f"policies.dispatch=odd_policies:{policy}"
    done = streamrl("simulate", faulty, "--set", chosen, "--set", "policies.system=stream-sync")
    assert done.returncode == 1 and done.stdout == ""
    *above, last = done.stderr.splitlines(keepends=True)
    assert last.startswith(f"streamrl: policies.dispatch 'odd_policies:{policy}' {why}")
    of_class = any("odd_policies.py" in line for line in above)
    assert of_class == (policy in ("Raises", "Exits")), "its traceback is shown where it raised"


def test_a_fault_of_a_policy_can_be_sent_between_processes(faulty: Path) -> None:
    with pytest.raises(ExtensionError) as caught:
        simulate(small_run({"policies.dispatch": "odd_policies:Raises"}))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and "odd_policies.py" in again.traceback


@pytest.mark.usefixtures("faulty")
def test_policies_of_this_package_run_without_checks() -> None:
    runs = (small_run(), small_run({"policies.dispatch": "odd_policies:Never"}))
    (own,), (other,) = (build_dispatch(run.policies, run.rollout, run.seed) for run in runs)
    assert isinstance(own, LeastLoaded) and "choose" not in vars(own)
    assert isinstance(other, FromOutside)


def test_a_policy_that_sends_nothing_is_named(faulty: Path) -> None:
    run = small_run({"policies.dispatch": "odd_policies:Never"})
    with pytest.raises(RuntimeError, match=r"'odd_policies:Never' sends none of the waiting"):
        simulate(run)
    draws = DrawnBatch(SimulatedWorkload(run).draw(0, 2))
    with pytest.raises(RunError, match=r"policies.dispatch 'odd_policies:Never' sends no rollout"):
        generate_batch(run, Costs.load(run), draws)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"policies.dispatch": "odd_policies:MakesNothing"}, "its make returned None"),
        (
            {"policies.dispatch": "odd_policies:Tail", "policies.migration": "overrun"},
            "needs a subclass of SkewnessAware",
        ),
    ],
)
def test_a_policy_that_is_none_is_refused(
    faulty: Path, changes: dict[str, object], why: str
) -> None:
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    done = streamrl("simulate", faulty, *settings)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"streamrl: policies.dispatch '{changes['policies.dispatch']}'")
    assert why in done.stderr


@pytest.mark.parametrize(
    ("key", "name"),
    zip(KEYS, ("OwnAlgorithm", "OwnDispatch", "OwnEngine", "OwnTrainer"), strict=False),
)
def test_a_constructor_that_raises_is_refused_in_one_line_with_its_key(
    faulty: Path, key: str, name: str
) -> None:
    done = streamrl("simulate", faulty, "--json", "--set", f"{key}=odd_constructors:{name}")
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.replace("made\n", "")
    why = "cannot be used: OSError: no settings here; mend it, or use one of "
    assert line.startswith(f"streamrl: {key} 'odd_constructors:{name}' {why}")
    assert line.count("\n") == 1


@pytest.mark.parametrize("key", KEYS[:4])
@pytest.mark.parametrize("value", [":B", ".a:B", "a:", "a.b", "a:b:c", "a-b:C"])
def test_a_path_of_another_form_is_refused_with_the_form(key: str, value: str) -> None:
    with pytest.raises(RunError) as caught:
        small_run({key: value})
    assert str(caught.value).startswith(f"{key} must be one of ")
    assert " or module:Class" in str(caught.value) and str(caught.value).endswith(f"got '{value}'")


@pytest.mark.parametrize(
    ("key", "name", "why"),
    [
        ("algorithm.name", "OddLoss", "objective 'odd_loss:Loss': its import ended the process"),
        ("rollout.backend", "OddEngine", "engine 'no_such_package:Engine': ModuleNotFoundError"),
        ("rollout.backend", "OddPreload", "preload 'no_such_package:__name__': ModuleNotFound"),
        ("rollout.backend", "OddLimits", "cannot be used: ModuleNotFoundError: No module named"),
        ("rollout.backend", "NoEngine", "odd_choices:NoEngine does not define engine"),
        ("trainer.backend", "OddTrainer", "torch_backend:Nothing': ImportError: module streamrl"),
    ],
)
def test_what_workers_cannot_import_is_refused_before_anything_is_written(
    faulty: Path, tmp_path: Path, key: str, name: str, why: str
) -> None:
    save_tiny_model(tmp_path / "model", SYMBOLS)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    faulty.write_text(RUN_FILE)
    before = {*tmp_path.iterdir(), tmp_path / "__pycache__"}
    done = streamrl("execute", faulty, "--set", f"{key}=odd_choices:{name}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"streamrl: {key} 'odd_choices:{name}' cannot be used: ")
    assert why in done.stderr
    assert {*tmp_path.iterdir()} <= before


def test_a_module_of_a_package_that_is_not_installed_is_not_installed() -> None:
    with pytest.raises(ValueError, match=r"no_such_package.part not installed"):
        check_installed(("no_such_package.part",), "executor")


def test_the_doctor_examines_a_run_with_classes_from_outside(faulty: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", SYMBOLS)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    faulty.write_text(RUN_FILE)
    done = streamrl("doctor", faulty, "--set", "rollout.backend=odd_choices:OddEngine", "--json")
    found = {each["text"]: each["level"] for each in json.loads(done.stdout)["findings"]}
    levels = [level for text, level in found.items() if "'no_such_package:Engine'" in text]
    assert levels == ["error"]
    never = [text for text in found if "never run on a CPU" in text]
    levels = [found[text] for text in never if "odd_choices:OddEngine" in text]
    assert levels == ["warning"]


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Short", r"returned advantages \[.*\]; it must return 2 finite numbers"),
        ("NoNumber", r"returned advantages \[nan, nan\]; it must return 2 finite numbers"),
        ("Texts", "raised ValueError: could not convert string to float: 'high'"),
    ],
)
def test_a_fault_of_an_algorithm_names_its_class_and_ends_the_run_at_once(
    tmp_path: Path, name: str, why: str
) -> None:
    run = real_run(tmp_path, algorithm__name=f"odd_choices:{name}")
    with pytest.raises(ExtensionError, match=rf"^algorithm.name 'odd_choices:{name}' {why}"):
        execute(run)
    trace = read_trace(Path(run.execute.output) / "trace.jsonl")
    assert not any(isinstance(entry.event, Failed) for entry in trace.entries)


@pytest.mark.parametrize(
    ("key", "value"),
    [("algorithm.name", "odd_choices:Short"), ("policies.dispatch", "odd_policies:Tail")],
)
def test_a_trace_whose_classes_are_missing_here_says_which(
    faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(Trace(small_run({key: value}), "simulated").encode())
    module = value.partition(":")[0]
    (tmp_path / f"{module}.py").unlink()
    monkeypatch.delitem(sys.modules, module, raising=False)
    for choices in (ALGORITHMS, DISPATCH):
        monkeypatch.setattr(choices, "_loaded", {})
    done = streamrl("replay", path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{path}:1: the recorded run cannot be read here: {key} '{value}'" in done.stderr
    assert f"No module named '{module}'" in done.stderr


@pytest.mark.parametrize(
    ("scorer", "missing"),
    [
        ("no_such_package.part:score", "no_such_package.part"),
        ("python:no_file.py:score", "no_file.py"),
        ("odd_choices:score", ""),
    ],
)
def test_the_doctor_warns_of_a_scorer_that_execute_would_not_find(
    faulty: Path, scorer: str, missing: str
) -> None:
    done = streamrl("doctor", faulty, "--set", f"verifier.scorer={scorer}", "--json")
    found = [each for each in json.loads(done.stdout)["findings"] if each["name"] == "scorer"]
    assert [each["level"] for each in found] == (["warning"] if missing else [])
    assert not missing or f"{missing} here" in found[0]["text"]


PLACED = """
class Placed:
    def __init__(self, config: dict) -> None: ...

    async def where(self) -> list:
        import os

        return [__file__, os.getcwd()]
"""


@pytest.mark.ray
def test_an_actor_imports_from_the_drivers_search_path_and_is_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> list[str]:
        import ray

        if not ray.is_initialized():
            ray.init("local", num_cpus=1, log_to_driver=False, include_dashboard=False)
        module = tmp_path / "late" / "placed.py"
        module.parent.mkdir()
        module.write_text(PLACED)
        monkeypatch.syspath_prepend(str(module.parent))
        monkeypatch.chdir(tmp_path)
        handle = await start_actor("placed:Placed", {}, tmp_path / "log")
        return await handle.call("where", returns=list[str])

    found = asyncio.run(go())
    assert found == [str(tmp_path / "late" / "placed.py"), str(tmp_path)]
