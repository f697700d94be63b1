"""The rules of the house: who may import what, who is told the time, who may change the state."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import load as load_mutants

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "ray", "safetensors"}
CLOCKS = {"time", "datetime", "random", "asyncio", "threading", "os", "simpy", "ray", "torch"}
CHANGES = {
    *("append", "appendleft", "extend", "insert", "add", "update", "setdefault"),
    *("pop", "popleft", "popitem", "remove", "discard", "clear", "sort", "reverse"),
    *("observe", "commit", "heappush", "heappop"),
}
"""Calls that change what they are called on."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


CONTROL = [
    ROOT / "streamrl" / "engine" / f"{name}.py"
    for name in (
        *("messages", "entities", "fleet", "concurrency", "estimates", "failure_counts"),
        *("trainer_side", "state", "invariants", "engine"),
    )
] + sources("streamrl/engine/policies")
EVERYWHERE = [path for package in ("streamrl", "sim", "executor") for path in sources(package)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the full name of every module, or name in one, that `path` imports anywhere."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_any(path: Path, modules: set[str]) -> list[str]:
    return [name for name in imports(path) if any(f"{name}.".startswith(f"{m}.") for m in modules)]


# Imports ------------------------------------------------------------------------------------------


def is_front(path: Path) -> bool:
    """Return whether people come in here: by the command line, or from a notebook or a script."""
    return name_of(path).startswith(("streamrl/cli/", "streamrl/api/"))


WORLDS = {"streamrl.sim", "streamrl.executor"}
RESULTS = {
    "streamrl.sim.acceptance.result",
    "streamrl.sim.diagnosis.result",
    "streamrl.sim.jobs.plan",
    "streamrl.sim.planner.plan",
    "streamrl.sim.studies.results",
    "streamrl.sim.fidelity.paper_figure",
}
"""What reports read of a simulation: only definitions, so that a report loads no simulator."""


@pytest.mark.parametrize(
    ("package", "others", "allowed"),
    [
        ("streamrl", WORLDS, RESULTS),
        ("sim", {"streamrl.executor"}, set()),
        ("executor", {"streamrl.sim"}, set()),
    ],
)
def test_only_command_line_and_api_bring_the_worlds_together(
    package: str, others: set[str], allowed: set[str]
) -> None:
    for path in sources(package):
        if not is_front(path):
            found = {*imports_any(path, others)} - {*imports_any(path, allowed)}
            assert found == set(), name_of(path)


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_results_that_reports_read_need_no_other_file_of_the_simulation(name: str) -> None:
    path = ROOT / Path(*name.split(".")[1:]).with_suffix(".py")
    assert imports_any(path, WORLDS) == []


def test_nothing_imports_the_command_line_or_the_api() -> None:
    for path in EVERYWHERE:
        others = {"streamrl.api", "streamrl.cli"}
        if is_front(path):
            others.remove(f"streamrl.{path.parent.name}")
        assert imports_any(path, others) == [], name_of(path)


def test_heavy_libraries_are_imported_in_the_executor_only() -> None:
    for path in sources("streamrl") + sources("sim"):
        assert imports_any(path, HEAVY) == [], name_of(path)


def test_a_replica_knows_no_library_that_generates() -> None:
    engines = sources("executor/rollout")
    others = ("replica", "replica_worker", "engines", "inference_engine")
    for path in engines:
        if path.stem in others:
            assert imports_any(path, HEAVY) == [], name_of(path)
    assert set(others) < {path.stem for path in engines}


SIMULATE_WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked} or name.split(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import streamrl
from streamrl.sim.world import simulate
from tests.runs import small_run
print(len(simulate(small_run()).entries) > 0)
"""


def test_a_simulation_runs_where_no_heavy_library_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE_WITHOUT.format(blocked={*HEAVY, "streamrl.executor"})],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr


# Rooms --------------------------------------------------------------------------------------------

ROOMS = (
    *("runfile", "hardware", "engine", "export", "targets"),
    *("workload", "ranker", "record", "logs"),
    *("sim.costs", "sim.parallel", "sim.network_latency", "sim.cpu_contention", "sim.trace"),
    "sim.handling",
    *("sim.world_interface", "sim.prefix_cache", "sim.kv_cache", "sim.kv_transfer"),
    *(
        "sim.environment",
        "sim.replica",
        "sim.trainer",
        "sim.transfer",
        "sim.verifier",
        "sim.evaluation",
    ),
    *("sim.faults", "sim.world", "sim.steady_state", "sim.lone_batch"),
    "sim.idle_replica",
    "sim.batch_generation",
    *("executor.libc", "executor.checksums", "executor.directory_lock", "executor.http_deadline"),
    *(
        "executor.adapter_layers",
        "executor.attention",
        "executor.chat_template",
        "executor.expert_choices",
        "executor.pretrained",
        "executor.router_replay",
        "executor.tokens",
    ),
    "executor.sampling",
    *("executor.prompt_probe", "executor.monitoring", "executor.roles", "executor.checkpoints"),
    *(
        "executor.end_of_turn",
        "executor.prompts",
        "executor.token_files",
        "executor.buffer",
        "executor.record",
    ),
    *(
        "executor.launchers",
        "executor.chosen_classes",
        "executor.transfer",
        "executor.checkpoint_export",
        "executor.rollout",
    ),
    *(
        "executor.trainer",
        "executor.verifier",
        "executor.environment",
        "executor.evaluation",
        "executor.watchdog",
        "executor.run_guard",
        "executor.faults",
    ),
    "executor.run_log",
    *("executor.colocation", "executor.subscribers", "executor.world", "executor.execute"),
    *("sim.acceptance", "sim.calibration", "sim.diagnosis", "sim.planner", "sim.jobs"),
    "sim.studies",
    *("sim.fidelity", "doctor"),
    *("sim.checkup", "executor.checkup", "executor.profiling", "report", "cli", "api"),
)
"""All rooms, and files beside them, from low to high: each imports only what stands before it.

In `streamrl`, `sim` and `executor`: `sim.costs` is imported as `streamrl.sim.costs`.
"""
HEIGHTS = {f"streamrl.{room}": height for height, room in enumerate(ROOMS)}
PACKAGES = {"streamrl", "streamrl.sim", "streamrl.executor"}
"""Their own names, such as `streamrl.__version__`, are below all rooms."""
ROLES = {"replica": "Replica", "trainer": "Trainer", "transfer": "Transfer", "verifier": "Verifier"}
"""Files and classes that are there in simulated and in real time; `Replica` is also what the engine knows of one."""


def room_of(name: str) -> str:
    """Return the room of a dotted name: `streamrl.sim.costs.curves` is in `streamrl.sim.costs`."""
    parts = name.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["sim"], ["executor"]) else 2])


def dotted(path: Path) -> str:
    """Return the name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "streamrl" else ("streamrl", *parts))


def imports_from_above(path: Path, own: str) -> list[str]:
    """Return what a file of the room `own` imports that is not below that room, and not in it."""
    others = [name for name in imports(path) if name.startswith("streamrl.")]
    above = [name for name in others if room_of(name) != own]
    return [name for name in above if HEIGHTS.get(room_of(name), -1) >= HEIGHTS[own]]


def test_every_file_is_in_a_room_and_every_room_has_a_file() -> None:
    rooms = {room_of(dotted(path).removesuffix(".__init__")) for path in EVERYWHERE}
    assert len(HEIGHTS) == len(ROOMS)
    assert rooms - PACKAGES == set(HEIGHTS)


@pytest.mark.parametrize("room", HEIGHTS)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    for path in EVERYWHERE:
        if room_of(dotted(path).removesuffix(".__init__")) == room:
            assert imports_from_above(path, room) == [], name_of(path)


@pytest.mark.parametrize(
    "source",
    [
        "from streamrl.report.words import dollars\n",
        "import streamrl.report.words\n",
        "from streamrl import report\n",
        "if TYPE_CHECKING:\n    from streamrl.report.words import dollars\n",
        "def f() -> None:\n    from streamrl.report.words import dollars\n",
    ],
)
def test_a_planner_that_imports_a_report_is_found(tmp_path: Path, source: str) -> None:
    """The order goes across packages: `report` is of another package than `planner`."""
    below = "from streamrl import __version__\nfrom streamrl.sim.planner import plan\n"
    (tmp_path / "planner.py").write_text(f"from streamrl.record import ledger\n{below}{source}")
    (found,) = imports_from_above(tmp_path / "planner.py", "streamrl.sim.planner")
    assert found.startswith("streamrl.report")


def import_graph() -> dict[str, set[str]]:
    """Return the files that each file imports: at its top, under TYPE_CHECKING, in functions."""
    files = {dotted(path).removesuffix(".__init__"): path for path in EVERYWHERE}
    graph: dict[str, set[str]] = {}
    for file, path in files.items():
        found = {name if name in files else name.rpartition(".")[0] for name in imports(path)}
        graph[file] = found & files.keys()
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the files of one circle, the first again at its end; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circle(import_graph()) == []


def test_the_search_for_circles_finds_them(tmp_path: Path) -> None:
    hidden = "if TYPE_CHECKING:\n    from a.b import C\ndef f():\n    import d\n"
    (tmp_path / "hidden.py").write_text(hidden)
    assert list(imports(tmp_path / "hidden.py")) == ["a.b.C", "d"]
    graph = import_graph()
    assert graph["streamrl.sim.world"] > {"streamrl.sim.replica", "streamrl.engine.messages"}
    found = circle({**graph, "streamrl.sim.world_interface": {"streamrl.sim.world"}})
    assert {"streamrl.sim.world", "streamrl.sim.world_interface"} <= {*found}


def test_every_room_begins_with_a_sentence_and_names_files_that_are_there() -> None:
    rooms = {path.parent for path in EVERYWHERE}
    for room in rooms:
        said = ast.get_docstring(parse(room / "__init__.py"))
        assert said and said.splitlines()[0].endswith("."), name_of(room)
        named = re.findall(r"`([a-z_]+\.py)`", said)
        assert [name for name in named if not (room / name).exists()] == [], name_of(room)


def test_the_guide_names_files_that_are_there() -> None:
    """A file of `[a-z_/]+.py` alone is in the folder of the one named before it."""
    lost, folder = [], Path()
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", (ROOT / "CONTRIBUTING.md").read_text()):
        folder = Path(name).parent if "/" in name else folder
        if not (ROOT / folder / Path(name).name).is_file():
            lost.append(name)
    assert lost == []


IMPORT_ALL = """
import importlib, json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
refused = {{}}
for name in ("sim", "executor", "sim.world", "executor.world"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        refused[name] = str(error)
for name in {names}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "blocked" in str(error), error
files = [getattr(module, "__file__", None) for module in sys.modules.values()]
print(json.dumps({{"refused": refused, "files": [file for file in files if file]}}))
"""
LIGHT_FILES = 250
"""Fewer than the files that need no library of the executor."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a process imports and is refused that has the root of this checkout on its path."""
    names = [dotted(path).removesuffix(".__init__") for path in EVERYWHERE]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(blocked=HEAVY, names=names)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_file_is_imported_under_two_names(imported: dict[str, Any]) -> None:
    real = [Path(file).resolve() for file in imported["files"]]
    ours = [path for path in real if path.is_relative_to(ROOT) and path in EVERYWHERE]
    assert len(ours) > LIGHT_FILES
    assert {name_of(path) for path in ours if ours.count(path) > 1} == set()


def test_a_folder_of_the_root_is_no_package_of_its_own(imported: dict[str, Any]) -> None:
    for name in ("sim", "executor"):
        line = f"import streamrl.{name}: {name} is a folder of streamrl, not a package of its own"
        assert imported["refused"][name] == imported["refused"][f"{name}.world"] == line


# Two worlds, one story ----------------------------------------------------------------------------


Functions = dict[str, ast.FunctionDef | ast.AsyncFunctionDef]


def functions_of(path: Path, name: str) -> Functions:
    """Return the methods of one class of a file, in order."""
    (found,) = (n for n in parse(path).body if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.name: n for n in found.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def both(file: str, simulated: str, real: str) -> tuple[Functions, Functions]:
    """Return the methods of a class in simulated time, and of its twin in real time: in the file of the same name."""
    (twin,) = (path for path in sources("executor") if path.stem == file)
    return functions_of(ROOT / "sim" / f"{file}.py", simulated), functions_of(twin, real)


@pytest.mark.parametrize(("file", "role"), ROLES.items())
def test_a_role_has_the_same_methods_in_the_same_order_in_both_worlds(file: str, role: str) -> None:
    simulated, real = both(file, role, role)
    public = [name for name in simulated if not name.startswith("_")]
    assert public and public == [name for name in real if name in public]


def test_both_worlds_hand_commands_over_in_the_same_order_by_the_same_names() -> None:
    simulated, real = both("world", "SimWorld", "RealWorld")
    shared = [name for name in simulated if name in real]
    assert shared == [name for name in real if name in simulated]
    assert cases(simulated["_do"]) == cases(real["_do"])


@pytest.mark.parametrize(("world", "watchers"), [("SimWorld", {"_walk"}), ("RealWorld", {"emit"})])
def test_a_command_is_carried_out_without_a_look_at_the_engines_state(
    world: str, watchers: set[str]
) -> None:
    """What watches a run, and ends it, may look."""
    simulated, real = both("world", "SimWorld", "RealWorld")
    methods = {"SimWorld": simulated, "RealWorld": real}[world]
    looking = {name for name, body in methods.items() if ".engine.state" in ast.unparse(body)}
    assert looking == watchers


def cases(function: ast.AST) -> list[str]:
    """Return the classes that a function matches, in order."""
    found = (node for node in ast.walk(function) if isinstance(node, ast.MatchClass))
    return [ast.unparse(n.cls) for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))]


# Control code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONTROL, ids=name_of)
def test_control_code_is_told_the_time_and_never_asks(path: Path) -> None:
    assert imports_any(path, CLOCKS | {"numpy.random"}) == []


WALL_CLOCK = re.compile(
    r"\btime\.(time|time_ns|localtime|gmtime|strftime|ctime)\(|\.(now|utcnow)\(|from time import|st_mtime|getmtime"
)
AT_THE_WALL = {
    "executor/faults.py": "instant of a fault, beside those of other processes",
    "executor/launchers/ray_launcher.py": "deadline of a node, which Ray gives as a date; read once",
    "executor/monitoring.py": "dates of points in MLflow",
    "executor/subscribers/attach_requests.py": "names of requests of several machines",
    "executor/transfer/shared_memory.py": "the file that was written last",
    "sim/calibration/calibrate.py": "date of a calibration",
    "sim/studies/finished_jobs.py": "whether a file changed",
    "streamrl/cli/watch_run.py": "clock time of the end of a run",
    "streamrl/hardware/calibration_file.py": "whether a file changed",
    "streamrl/workload/data_files.py": "whether a file changed",
}
"""Files that read the wall clock or a date of a file, and for what. Durations and limits need time.monotonic: an
administrator or NTP may set the wall clock by an hour."""


def test_no_duration_or_limit_depends_on_the_wall_clock() -> None:
    found = {name_of(path) for path in EVERYWHERE if WALL_CLOCK.search(path.read_text())}
    assert found == AT_THE_WALL.keys()


def is_set(node: ast.expr | None, names: set[str]) -> bool:
    """Return whether an expression is a set, as far as its own file tells."""
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
        case ast.BinOp(left=left, right=right):
            return is_set(left, names) or is_set(right, names)
        case ast.Call(func=ast.Name(id="list" | "tuple" | "iter" | "enumerate"), args=[inner, *_]):
            return is_set(inner, names)
    return False


def names_of_sets(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=target, annotation=kind, value=value):
                if is_set(value, names) or ast.unparse(kind).startswith(("set", "frozenset")):
                    names.add(ast.unparse(target).split(".")[-1])
            case ast.Assign(targets=targets, value=value) if is_set(value, names):
                names |= {ast.unparse(target).split(".")[-1] for target in targets}
            case ast.arg(arg=name, annotation=ast.expr() as kind):
                if ast.unparse(kind).startswith(("set", "frozenset")):
                    names.add(name)
    return names


def iterated_sets(tree: ast.Module) -> list[str]:
    names = names_of_sets(tree)
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.comprehension)]
    return [ast.unparse(loop.iter) for loop in loops if is_set(loop.iter, names)]


@pytest.mark.parametrize(
    "path",
    [
        *CONTROL,
        *(ROOT / "streamrl" / "engine" / f"{n}.py" for n in ("systems", "world")),
        *sources("sim"),
    ],
    ids=name_of,
)
def test_no_decision_depends_on_the_order_of_a_set(path: Path) -> None:
    assert iterated_sets(parse(path)) == []


def test_the_search_for_iterated_sets_finds_them() -> None:
    source = "names: set[str]\na = {1} | b\n[x for x in a]\nfor n in self.names: pass\nlist(a)\n"
    assert iterated_sets(ast.parse(source)) == ["self.names", "a"]


def foreign_changes(tree: ast.Module) -> list[str]:
    """Return every assignment to, and changing call on, an attribute of anything but `self`."""
    found: list[str] = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as owner, attr=name)):
                targets = [owner] if name in CHANGES else []
            case ast.Call(func=ast.Attribute(value=ast.Name(id="state") as owner, attr=name)):
                found += [ast.unparse(node)] if name in CHANGES else []
            case ast.Call(func=ast.Name(id=name), args=[ast.Attribute() as owner, *_]):
                targets = [owner] if name in CHANGES | {"setattr"} else []
        found += [ast.unparse(t) for t in targets if isinstance(_owner(t), ast.Attribute)]
    return [text for text in found if not text.startswith("self.") or ".state." in text]


def _owner(target: ast.expr) -> ast.expr:
    while isinstance(target, ast.Subscript):
        target = target.value
    return target


@pytest.mark.parametrize(
    "path",
    [
        *sources("streamrl/engine/policies"),
        ROOT / "streamrl" / "engine" / "invariants.py",
        *sources("sim"),
    ],
    ids=name_of,
)
def test_the_state_changes_only_in_the_state_and_its_fleet(path: Path) -> None:
    changes = foreign_changes(parse(path))
    if path.parent.name == "sim":  # a replica fills in its own attempts
        changes = [text for text in changes if not text.startswith(("attempt.", "attempts["))]
    assert changes == []


def test_the_search_for_changes_to_the_state_finds_them() -> None:
    source = (
        "state.leader.version = 1\nstate.fleet.x += 1\nheappop(state.waiting)\nrollout.phase = 2\n"
    )
    source += "state.groups.pop(1)\ndel state.groups[1]\nstate.commit(c)\nself.most = 1\n"
    assert len(foreign_changes(ast.parse(source))) == 7


# What functions depend on -------------------------------------------------------------------------

MOST_WHOLE_RUNS = 148
"""Functions that may take the whole run file. It falls, because a signature tells what a function depends on.

Five of them decide what can run a plan, and two which start values contradict the rest: both depend on all of it.
"""


def takes_whole_run(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return any(
        each.arg == "run" and each.annotation is not None and ast.unparse(each.annotation) == "Run"
        for each in parameters
    )


def whole_runs(tree: ast.Module) -> int:
    """Return how many functions have a parameter `run: Run`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, kinds) and takes_whole_run(node) for node in ast.walk(tree))


def test_few_functions_take_the_whole_run_file() -> None:
    assert sum(whole_runs(parse(path)) for path in EVERYWHERE) <= MOST_WHOLE_RUNS


def test_the_count_of_whole_run_files_finds_them() -> None:
    source = "def a(run: Run): ...\nasync def b(x: int, *, run: Run): ...\ndef c(run: str): ...\n"
    source += "class D:\n    def e(self, run: Run, y: int): ...\n    def f(self, other: Run): ...\n"
    assert whole_runs(ast.parse(source)) == 3


# Mutants ------------------------------------------------------------------------------------------


def test_every_mutant_changes_a_line_that_is_there() -> None:
    """`make mutants` takes long, so a moved line would be noticed late."""
    assert load_mutants([])
