"""A whole real run with a real model, through the command line and in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import psutil
import pytest

from streamrl.cli.evaluate import KEPT, keep_results, run_to_evaluate
from streamrl.engine.trace import read_trace, replay
from streamrl.executor import checkpoint_export
from streamrl.executor import execute as executing
from streamrl.executor.directory_lock import LOCK, readable_by
from streamrl.executor.evaluation import check_held_out, verifier_of
from streamrl.executor.launchers import prefork_server as prefork_server
from streamrl.record.evaluation import EvaluationResult, Score
from streamrl.record.run_directory import read_metrics, read_rollouts
from streamrl.runfile.config import Run
from streamrl.runfile.files import encode_run, load_run
from tests.command_line import streamrl
from tests.engines import params
from tests.test_resume import saved
from tests.tiny_model import save_tiny_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

SYMBOLS = ["<pad>", "<eos>", *"0123456789+= "]

RUN_FILE = """
[model]
path = "model"
dtype = "float32"
[cluster.pools.local]
gpu = "cpu"
gpus_per_node = 3
[rollout]
pool = "local"
replicas = 2
max_running = 8
max_tokens = 12
[trainer]
pool = "local"
micro_batch = 4
[algorithm]
steps = 3
prompts_per_step = 4
group_size = 4
learning_rate = 1e-3
[workload]
prompts = "prompts.jsonl"
max_prompt_tokens = 16
[verifier]
scorer = "exact"
[policies]
system = "fully-async"
[execute]
output = "run"
checkpoint_every = 2
"""
OF_TRL = """
def accuracy(prompts, completions, answer, **columns):
    return [float(said == right) for said, right in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model, its tokenizer, prompts and a run file."""
    path = tmp_path_factory.mktemp("project")
    save_tiny_model(path / "model", SYMBOLS)
    prompts = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(5)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    (path / "run.toml").write_text(RUN_FILE)
    return path


def children_of(pid: int) -> list[int]:
    """Return the processes that a process, or one that it has started, has started and that still run."""
    found = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE]


def is_running(pid: int) -> bool:
    """Return whether a process is there, and not only its exit status for who never asks."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_to_others(directory: Path) -> list[Path]:
    """Return the files of a run directory, and itself, that others than its owner may read or enter."""
    return [path for path in (directory, *directory.rglob("*")) if path.stat().st_mode & 0o077]


@pytest.mark.parametrize(("readers", "mode"), [("owner", 0), ("group", 0o040), ("everyone", 0o044)])
def test_files_are_made_for_the_readers_alone(tmp_path: Path, readers: str, mode: int) -> None:
    before = os.umask(0o022)
    try:
        with readable_by(readers, tmp_path):
            (tmp_path / "file").touch()
        assert os.umask(0o022) == 0o022, "the umask of before is back"
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o077 == mode
    assert tmp_path.stat().st_mode & 0o044 == mode


def test_a_real_run_trains_resumes_replays_and_compares(project: Path) -> None:
    done = streamrl("execute", project / "run.toml", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["num_steps"] == 3 and figures["world"] == "real"
    assert sum(figures["busy"].values()) + sum(figures["idle"].values()) == pytest.approx(1.0)
    trace = read_trace(project / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert open_to_others(project / "run") == []
    (project / "run").chmod(0o755)
    again = streamrl("execute", project / "run.toml")
    assert again.returncode == 2 and "--resume" in again.stderr
    (project / "run" / "timeline.png").unlink()
    (project / "run" / "timeline.png").mkdir(mode=0o700)
    resumed = streamrl(
        "execute", project / "run.toml", "--resume", "--json", "--set", "algorithm.steps=5"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "some pictures of the run could not be written" in resumed.stderr
    ledger = json.loads(resumed.stdout)["ledger"]
    assert ledger["is_balanced"] and ledger["legs"] == 2 and ledger["checksummed"] >= 3
    assert open_to_others(project / "run") == []
    assert ledger["drawn"] == 5 * 16 + sum(ledger["trainers"][0]["dropped"].values())
    steps = read_metrics(project / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(step["grad_norm"] >= 0 and step["rollouts"] == 16 for step in steps)
    rollouts = read_rollouts(project / "run")
    assert len(rollouts) == 5 * 16
    assert all(rollout["versions"][0][1] == 0 for rollout in rollouts)
    both = streamrl("replay", project / "run", project / "run" / "trace.1.jsonl")
    assert both.returncode == 0, both.stdout
    assert streamrl("compare", project / "run", "--json").returncode == 0
    check_that_earlier_starts_are_told(project)


def check_that_earlier_starts_are_told(project: Path) -> None:
    """Check that a run of five steps, which was resumed after three, is not told as what its last start made."""
    done = streamrl("report", project / "run", "-o", project / "report.html")
    said = "Resumed after step 3. At the rate of the steps since then, 5 steps take "
    assert done.stdout.startswith(said), done.stderr
    done = streamrl("lengths", project / "run", "--json")
    assert json.loads(done.stdout)["statistics"]["rollouts"] == 5 * 16
    done = streamrl("import", project / "run", "-o", project / "imported")
    assert "start 2 of the run alone, after its step 3: earlier steps are in trace.1" in done.stdout


MAIN = "from streamrl.cli import main; main()"
IMPATIENT = f"from streamrl.executor import world; world.STOP_TIME = 1.0; {MAIN}"
HANGING = """
import sys, time
from pathlib import Path
from streamrl.executor import execute as module, world
from streamrl.executor.execute import execute
from streamrl.engine.messages import Stepped
from streamrl.runfile.files import load_run

module.LAST_TIME = 2.0
world.STOP_TIME = 1.0

run = load_run(Path(sys.argv[1]), sys.argv[2:])

def watch(event, state, now):
    if isinstance(event, Stepped) and event.version == 3:
        (Path(run.execute.output) / "hangs").touch()
        time.sleep(3600)

execute(run, watch=watch)
"""
"""A program whose event loop hangs in the third step."""


Begin: TypeAlias = Callable[..., tuple[subprocess.Popen[str], list[int]]]


def has_two_steps(output: Path) -> bool:
    """Return whether a run has made that many."""
    metrics = output / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= 2


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Give what starts a run, and returns it with its workers once it is time."""
    begun: list[subprocess.Popen[str]] = []

    def start(
        program: str, *arguments: object, until: Callable[[], bool]
    ) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        begun.append(process)
        deadline = time.monotonic() + 90
        while not until():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        workers = children_of(process.pid)
        assert len(workers) >= 4, "a verifier, a prefork_server, and a worker of each role"
        return process, workers

    yield start
    for process in begun:
        with process:
            process.kill()  # a run of a test that failed would go on beside all others


def check_is_gone(driver: int, workers: Iterable[int]) -> None:
    """Raise `AssertionError` where a worker, or what a driver shared with others, is still there."""
    deadline = time.monotonic() + 2
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert driver not in map(owner_of, Path("/dev/shm").glob("streamrl-*"))


def owner_of(shared: Path) -> int | None:
    """Return who signed the lock of a directory; None where that is gone meanwhile, or not signed yet."""
    with suppress(FileNotFoundError):
        return int((shared / LOCK).read_text() or 0)
    return None


IN_TIME = 40
"""Seconds: 9 where nothing else runs; tests side by side share the processors with each other."""


@pytest.mark.parametrize("who", ["everybody stopped", "the loop"])
def test_ctrl_c_ends_a_run_soon_after_its_grace_whatever_hangs(
    project: Path, begin: Begin, who: str
) -> None:
    output = project / who.replace(" ", "-")
    settings = [f"execute.output={output}", "algorithm.steps=10000", "execute.checkpoint_every=1"]
    settings.append("execute.grace=1 s")
    if who == "the loop":
        until = (output / "hangs").exists
        process, workers = begin(HANGING, project / "run.toml", *settings, until=until)
    else:
        words = [word for setting in settings for word in ("--set", setting)]
        until = partial(has_two_steps, output)
        process, workers = begin(IMPATIENT, "execute", project / "run.toml", *words, until=until)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=IN_TIME)
    assert process.returncode == 130
    told = errors.splitlines()[-1]
    assert re.fullmatch(
        r"streamrl: Ctrl-C after step \d+: step \d+ is saved; go on with: streamrl execute .* --resume",
        told,
    )
    check_is_gone(process.pid, workers)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGTERM, "terminated"),
        pytest.param(signal.SIGHUP, "the terminal was closed", marks=pytest.mark.signals),
        pytest.param(signal.SIGQUIT, "Ctrl-\\", marks=pytest.mark.signals),
    ],
)
def test_a_polite_signal_saves_the_last_step_and_leaves_nothing(
    project: Path, begin: Begin, number: signal.Signals, name: str
) -> None:
    output = project / number.name
    settings = [f"execute.output={output}", "algorithm.steps=10000"]
    words = [word for setting in settings for word in ("--set", setting)]
    until = partial(has_two_steps, output)
    process, workers = begin(MAIN, "execute", project / "run.toml", *words, until=until)
    process.send_signal(number)
    _, errors = process.communicate(timeout=IN_TIME)
    assert process.returncode == 128 + number
    found = re.match(
        rf"streamrl: {re.escape(name)} after step (\d+): step (\d+) is", errors.splitlines()[-1]
    )
    assert found is not None and found[1] == found[2] and int(found[1]) >= 2
    check_is_gone(process.pid, workers)


def workers_of(driver: int) -> set[int]:
    """Return the processes that a driver has started, but for those that workers are forked from: they end with it."""
    return {pid for pid in children_of(driver) if prefork_server.__name__ not in cmdline_of(pid)}


def cmdline_of(pid: int) -> list[str]:
    with suppress(psutil.Error):  # it has ended meanwhile
        return psutil.Process(pid).cmdline()
    return []


def test_ctrl_c_ends_an_evaluation_as_interrupted(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*given: object) -> None:
        (interruption,) = [each for each in given if isinstance(each, executing.Interruption)]
        interruption.signal = signal.SIGINT  # the engine of a run without steps then ends as usual

    monkeypatch.setattr(executing, "_execute", interrupted)
    model, kept = project / "model", tmp_path / "kept"
    records = str(project / "prompts.jsonl")
    options = ["--prompts", records, "--scorer", "exact", "--output", str(kept)]
    done = streamrl("evaluate", model, *options)
    assert done.returncode == 130
    told = f"streamrl: Ctrl-C: the evaluation of {model} was interrupted"
    assert done.stderr.splitlines()[-1] == told
    assert not (kept / "0").exists()


@pytest.mark.parametrize("hides", ["replaced", "dropped"])
def test_a_signal_whose_error_a_library_hides_ends_a_run_before_it_begins(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hides: str
) -> None:
    async def imports(*given: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5.0)
        except Exception as error:
            if hides == "replaced":
                raise ModuleNotFoundError("Could not import module 'AutoTokenizer'") from error
        (interruption,) = [each for each in given if isinstance(each, executing.Interruption)]
        interruption.watch_over(executing.Ending(*[None] * 5))  # type: ignore[arg-type]

    monkeypatch.setattr(executing, "_execute", imports)
    done = streamrl("execute", project / "run.toml", "--set", f"execute.output={tmp_path / 'run'}")
    assert done.returncode == 143
    assert done.stderr.splitlines()[-1] == "streamrl: terminated: nothing was begun"


def test_the_second_model_is_checked_before_the_first_is_scored(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[Run] = []
    monkeypatch.setattr(executing, "carry_out", scored.append)
    options = ["--prompts", str(project / "prompts.jsonl"), "--scorer", "exact"]
    for other, told in (("none", "neither a run directory nor a model"), ("cut", "model.path")):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "config.json").write_bytes(
            (project / "model" / "config.json").read_bytes()
        )
        done = streamrl("evaluate", project / "model", "--against", tmp_path / other, *options)
        assert done.returncode == 2 and told in done.stderr
    assert not scored


def test_an_evaluation_takes_a_reward_with_its_signature(project: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(OF_TRL)
    function = f"python:{tmp_path / 'theirs.py'}:accuracy"
    rewards = (f'verifier.reward=[{{scorer = "{function}", signature = "trl"}}]',)
    saved(tmp_path / "checkpoints", 4)
    own = {"evaluation.prompts": str(project / "prompts.jsonl"), "evaluation.scorer": "exact"}
    run = load_run(project / "run.toml", [f"{key}={value}" for key, value in own.items()])
    (tmp_path / "run.json").write_bytes(encode_run(run))
    options = {"prompts": str(project / "prompts.jsonl")}
    for path in (project / "model", tmp_path):
        found, _ = run_to_evaluate(path, "last", options, rewards)
        assert found.evaluation is not None
        (reward,) = verifier_of(found.evaluation, found.verifier).rewards
        assert (reward.scorer, reward.signature) == (function, "trl")
        with pytest.raises(ValueError, match="both name scorers"):
            run_to_evaluate(path, "last", {**options, "scorer": "exact"}, rewards)
    check_held_out(found.evaluation, found.verifier, found.workload)
    plain, _ = run_to_evaluate(project / "model", "last", {**options, "scorer": function}, ())
    assert plain.evaluation is not None
    with pytest.raises(ValueError, match=r'needs signature="verl" or "trl": --set '):
        check_held_out(plain.evaluation, plain.verifier, plain.workload)


def test_an_evaluation_names_the_step_of_its_checkpoint(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(project / "run.toml")
    saved(tmp_path / "checkpoints", 4, 6)
    (tmp_path / "run.json").write_bytes(encode_run(run))

    def scored(each: Run) -> None:
        found = EvaluationResult(
            step=0,
            time=1.0,
            seconds=1.0,
            num_prompts=1,
            samples=1,
            confidence=0.95,
            scores={"avg@1": Score(1.0, 0.5, 1.0)},
            mean_tokens=1.0,
            truncated_share=0.0,
        )
        place = Path(each.execute.output)
        place.mkdir()
        (place / "evaluations.jsonl").write_bytes(msgspec.json.encode(found) + b"\n")

    monkeypatch.setattr(executing, "carry_out", scored)
    options = ["--prompts", str(project / "prompts.jsonl"), "--step", "4", "--json"]
    done = streamrl("evaluate", tmp_path, *options)
    (found,) = json.loads(done.stdout)["evaluations"].values()
    assert found["step"] == 4


@pytest.mark.parametrize("target", ["full", "full/file/model", "hf://model", "hf://a/b/c"])
def test_where_nothing_can_be_exported_is_refused_before_the_first_step(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.delattr(executing, "_execute")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    place = target if target.startswith("hf:") else tmp_path / target
    options = [f"execute.checkpoints.export={place}", f"execute.output={tmp_path / 'run'}"]
    done = streamrl("execute", project / "run.toml", "--set", options[0], "--set", options[1])
    assert done.returncode == 2
    assert done.stderr.startswith("streamrl: execute.checkpoints.export")
    assert len(done.stderr.splitlines()) == 1


def test_a_failed_export_leaves_a_complete_run_with_its_tables(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obeyed: list[object] = []

    def fail(*given: object) -> None:
        obeyed.append(signal.getsignal(signal.SIGTERM))
        raise RuntimeError("the hub is down")

    monkeypatch.setattr(checkpoint_export, "export_checkpoint", fail)
    changes = {"algorithm.steps": 1, "rollout.replicas": 1, "execute.launcher": "in-process"}
    changes |= {"execute.output": tmp_path / "run", "execute.checkpoints.export": "hf://me/model"}
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = streamrl("execute", project / "run.toml", *sets)
    assert done.returncode == 1 and "run directory:" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("streamrl: execute.checkpoints.export: the hub is down")
    assert f"streamrl checkpoint export {tmp_path / 'run'} --step 1" in last
    assert len(obeyed) == 1
    assert not isinstance(getattr(obeyed[0], "__self__", None), executing.Interruption), (
        "a signal ends an export that hangs"
    )


def test_an_evaluation_keeps_no_trace_of_a_run_without_steps(tmp_path: Path) -> None:
    for name in (*KEPT, "trace.jsonl"):
        (tmp_path / name).write_text("{}\n")
    keep_results(tmp_path, tmp_path / "kept" / "0", "owner", 7)
    assert json.loads((tmp_path / "kept" / "0" / "evaluations.jsonl").read_text())["step"] == 7
    assert {each.name for each in (tmp_path / "kept" / "0").iterdir()} == {
        "run.json",
        "evaluations.jsonl",
        "evaluation_rollouts.jsonl",
    }
    assert open_to_others(tmp_path / "kept") == []


def test_ctrl_c_leaves_a_readable_trace_and_no_process(project: Path) -> None:
    output, driver = project / "interrupted", os.getpid()
    settings = ["--set", "algorithm.steps=10000", "--set", f"execute.output={output}"]
    others, workers, is_over = workers_of(driver), set[int](), threading.Event()

    def interrupt() -> None:
        while not has_two_steps(output):
            if is_over.wait(0.1):
                return  # it has failed
        workers.update(workers_of(driver) - others)
        os.kill(driver, signal.SIGINT)

    beside = threading.Thread(target=interrupt)
    beside.start()
    done = streamrl("execute", project / "run.toml", *settings)
    is_over.set()
    beside.join()
    *progress, ledger, look, told = done.stderr.splitlines()
    assert ledger.startswith("ledger: ") and "not balance" not in ledger
    assert look == f"what it did and learned: streamrl report {output}"
    assert (output / "chrome_trace.json").stat().st_size > 0
    assert done.returncode == 130 and told.startswith("streamrl: Ctrl-C after step ")
    assert told.endswith(
        f" saved; go on with: streamrl execute {project / 'run.toml'} {' '.join(settings)} --resume"
    )
    assert all(line.startswith("step") for line in progress)
    assert len(workers) >= 4, "a verifier, two replicas and a trainer"
    check_is_gone(driver, workers)
    trace = read_trace(output / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace) is None


@pytest.mark.parametrize("backend", params())
def test_a_run_file_executes_on_every_engine_and_the_trainer_finds_its_logprobs_the_same(
    project: Path, backend: str
) -> None:
    """Completions of nothing but the end are right, so that every few are and weights change from step to step."""
    output, prompts, scorer = project / backend, project / "easy.jsonl", project / "empty.py"
    prompts.write_text('{"prompt": "1+1="}\n')
    scorer.write_text("def is_empty(text, record):\n    return float(not text.strip())\n")
    changes = {
        "rollout.backend": backend,
        "policies.system": "disaggregated",
        "algorithm.prompts_per_step": 8,
        "algorithm.group_size": 8,
        "algorithm.kl_coefficient": 0.01,
        "workload.prompts": prompts,
        "verifier.scorer": f"python:{scorer}:is_empty",
        "execute.launcher": "in-process",
        "execute.output": output,
        **(
            {"rollout.replicas": 1} if backend == "vllm" else {}
        ),  # two of its engines are two processes
    }
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    done = streamrl("execute", project / "run.toml", *settings)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert len(steps) == 3 and max(step["grad_norm"] for step in steps[:2]) > 0
    assert max(step["logprob_gap"] for step in steps) < 1e-5
