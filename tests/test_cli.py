"""The command line: what it prints, and what it says of wrong input."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from streamrl.cli.main import end_by_signals
from streamrl.cli.shared import sole_writer
from streamrl.runfile.files import write_run
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_plan import few

PROGRESS = re.compile(r" done, \d+ s$")
"""What a command says that takes seconds, as on a busy machine."""

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
SMALL = ["--set", "algorithm.prompts_per_step=64", "--set", "simulate.max_steps=3"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `simulate -o` has written, for many to read."""
    path = tmp_path_factory.mktemp("simulated")
    done = streamrl("simulate", EXAMPLE, *SMALL, "-o", path)
    assert done.returncode == 0 and "unmeasured" in done.stdout, done.stderr
    return path


@pytest.fixture
def executed(simulated: Path, tmp_path: Path) -> Path:
    """A copy of it that says that it was executed."""
    path = shutil.copytree(simulated, tmp_path / "executed")
    trace = path / "trace.jsonl"
    trace.write_text(trace.read_text().replace('"world":"simulated"', '"world":"real"', 1))
    (path / "results.json").unlink()
    return path


def test_simulate_prints_the_figures_that_scripts_rely_on() -> None:
    done = streamrl("simulate", EXAMPLE, "--json", *SMALL)
    assert done.returncode == 0 and done.stderr == ""
    figures = json.loads(done.stdout)
    for key in (
        "step_time",
        "throughput",
        "goodput",
        "samples_per_second",
        "cost_per_step",
        "cost_per_million_tokens",
    ):
        assert figures[key] > 0
    total = sum(figures["busy"].values()) + sum(figures["idle"].values())
    assert total == pytest.approx(1.0, abs=1e-9)
    assert sum(figures["staleness"].values()) == 2 * 64  # of three steps the first does not count
    assert figures["step_time_interval"] is None and figures["median_step_time"] > 0
    assert figures["note"] == "2 steps count, too few for an interval"
    assert sum(figures["tiers"].values()) == pytest.approx(1.0)
    assert figures["tiers"]["composed"] > 0.5


def test_simulate_writes_the_same_trace_for_the_same_seed_and_views_of_it(
    simulated: Path, tmp_path: Path
) -> None:
    for name, seed in (("same", "0"), ("other", "1")):
        done = streamrl("simulate", EXAMPLE, *SMALL, "--set", f"seed={seed}", "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
    first = (simulated / "trace.jsonl").read_bytes()
    same, other = ((tmp_path / name / "trace.jsonl").read_bytes() for name in ("same", "other"))
    assert first == same != other
    assert json.loads((simulated / "chrome_trace.json").read_bytes())
    assert (simulated / "timeline.png").stat().st_size > 10_000


def test_replay_and_compare_read_what_was_recorded(simulated: Path, executed: Path) -> None:
    replayed = streamrl("replay", simulated, "--json")
    assert replayed.returncode == 0 and json.loads(replayed.stdout)["is_identical"] is True
    compared = streamrl("compare", executed, "--json")
    assert compared.returncode == 0, compared.stderr
    assert abs(json.loads(compared.stdout)["step_time"]["error"]) < 1e-9


def test_compare_refuses_a_simulation_in_the_place_of_an_executed_run(simulated: Path) -> None:
    compared = streamrl("compare", simulated, "--json")
    assert compared.returncode == 2 and "executed run" in compared.stderr
    assert compared.stderr.count("\n") == 1 and compared.stdout == ""


def test_replay_fails_where_a_decision_was_another(simulated: Path, tmp_path: Path) -> None:
    lines = (simulated / "trace.jsonl").read_text().splitlines(keepends=True)
    index = next(n for n, line in enumerate(lines) if '"type":"Train"' in line)
    lines[index] = lines[index].replace(
        '{"type":"Train","rollouts":[', '{"type":"Train","rollouts":[9999,'
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(lines))
    done = streamrl("replay", trace)
    assert done.returncode == 1 and f"at entry {index - 1}: recorded [{{" in done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "nowhere.toml"], ["nowhere.toml"]),
        (["simulate", EXAMPLE, "--set", "rollout.replicsa=3"], ["rollout.replicsa", "replicas"]),
        (
            ["simulate", EXAMPLE, "--set", "cluster.links.0.bandwidth=80"],
            ["bandwidth", "80", "Gbps"],
        ),
        (["simulate", EXAMPLE, "--set", "rollout.tensor_parallel=3"], ["tensor_parallel", "3"]),
        (["simulate", EXAMPLE, "--set", "model.name=qwen2.5-72b"], ["145.4 GB", "tensor_parallel"]),
        (["simulate", EXAMPLE, "--set", "model.name=qwen"], ["qwen", "qwen2.5-7b"]),
        (["simulate", EXAMPLE, "--set", "workload.lengths.source=no.csv"], ["no.csv"]),
        (["simulate", EXAMPLE, "--set", "rollout.backend=static"], ["rollout.backend", "executed"]),
        (["plan", EXAMPLE, "--set", "rollout.backend=static"], ["rollout.backend", "executed"]),
        (["execute", EXAMPLE], ["model.path"]),
        (["replay", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["compare", EXAMPLE], ["h20-h800.toml:1"]),
    ],
)
def test_wrong_input_gets_one_line_and_exit_status_2_and_writes_nothing(
    arguments: list[str | Path], words: list[str], tmp_path: Path
) -> None:
    output = ["-o", tmp_path / "out"] if arguments[0] == "simulate" else []
    done = streamrl(*arguments, *output)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["plan", "--gpu", "8xH100"], "no option --gpu; did you mean --gpus?"),
        (["simulate", "--zzzz"], "no option --zzzz; see `streamrl simulate --help`"),
        (["profile", "show", "--xx"], "no option --xx; see `streamrl profile show --help`"),
        (["--versio"], "no option --versio; did you mean --version?"),
        (["simulat"], "no command simulat; did you mean simulate?"),
        (["ranker", "fitt"], "no command fitt; did you mean fit?"),
        (["plan", "a.toml", "b.toml"], "too many arguments, from 'b.toml' on; see `streamrl plan"),
        (["plan", "--model"], "--model needs a value: a model profile or Hugging Face name"),
        (["simulate", "a.toml", "--json=3"], "--json takes no value"),
        (["init"], "RUN.toml is missing: the file to write"),
        (["simulate", "a.toml", "--seeds", "many"], "--seeds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_gets_one_line_with_the_nearest_name(
    arguments: list[str], reason: str
) -> None:
    done = streamrl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"streamrl: {reason}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "qwen2.5-7b", "--gpus", "8xH20", "-o", ""],
        ["plan", EXAMPLE, "--output="],
        ["simulate", EXAMPLE, "--output", ""],
        ["export", EXAMPLE, "--framework", "verl", "-o", ""],
        ["report", "plans", "-o", ""],
        ["ranker", "fit", "log.csv", "--output", ""],
        ["validate", "serving", "-o", ""],
    ],
)
def test_an_empty_path_is_refused_and_not_read_as_the_current_directory(
    arguments: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = streamrl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "streamrl: --output is empty; write a path\n"
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_the_current_directory_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = streamrl("simulate", EXAMPLE, "--output", ".", "--set", "rollout.replicas=")
    assert done.returncode == 2 and "rollout.replicas" in done.stderr


def test_a_second_plan_into_one_directory_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("the first one's")
    arguments = ["plan", "--model", "qwen2.5-7b", "--gpus", "8xH20", "--force", "-o", tmp_path]
    with sole_writer(tmp_path):
        done = streamrl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"streamrl: {tmp_path} is in use by process {os.getpid()} (")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "plan.toml").read_text() == "the first one's"
    with sole_writer(tmp_path):  # it ends with the command that holds it
        assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize("more", [(), ("--sweep", "seed=1,2"), ("--against", EXAMPLE)])
def test_a_second_simulation_into_one_directory_is_refused(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    with sole_writer(tmp_path):
        done = streamrl("simulate", EXAMPLE, *more, "-o", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"streamrl: {tmp_path} is in use by process {os.getpid()} (")
    assert not list(tmp_path.iterdir())


def test_a_plan_that_fails_leaves_no_directory(tmp_path: Path) -> None:
    no_room = ["--set", "plan.trainer_gpus=[1]", "--set", "model.name=qwen2.5-72b"]
    done = streamrl("plan", EXAMPLE, *no_room, "-o", tmp_path / "new" / "plan")
    assert done.returncode == 2 and "no trainer" in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_ends_with_an_example_and_shows_options_in_groups() -> None:
    shown = streamrl("plan", "--help").stdout
    assert re.search(r"\n Example: streamrl plan [^│]*$", shown)
    groups = re.findall(r"─ ([A-Z][^─]*) ─", shown)
    assert {"Options", "Output", "Model and GPUs", "Training", "Limits"} <= {*groups}
    listed = streamrl("--help").stdout
    assert {"Plan and simulate", "Run"} <= {*re.findall(r"─ ([A-Z][^─]*) ─", listed)}
    assert "<bool>" not in shown + listed


def test_a_simulation_does_not_overwrite_an_executed_run(executed: Path) -> None:
    real = (executed / "trace.jsonl").read_text()
    done = streamrl("simulate", EXAMPLE, *SMALL, "-o", executed)
    assert done.returncode == 2 and "executed run" in done.stderr
    assert (executed / "trace.jsonl").read_text() == real


def test_a_corrupt_trace_is_refused_by_file_and_line(simulated: Path, tmp_path: Path) -> None:
    lines = (simulated / "trace.jsonl").read_text().splitlines(keepends=True)
    lines[4] = lines[4][:20] + "\n"
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(lines))
    done = streamrl("replay", trace)
    assert done.returncode == 2 and "trace.jsonl:5" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("simulate", "plan", "execute", "replay", "compare", "report", "samples", "validate"),
        "export",
        *("doctor", "profile", "profile show", "profile check", "profile measure", "ranker"),
        *("ranker eval", "calibrate", "diagnose", "import", "lengths", "model", "model show"),
    ],
)
def test_help_has_an_example(command: str) -> None:
    done = streamrl(*command.split(), "--help")
    assert done.returncode == 0
    assert f"Example: streamrl {command.partition(' measure')[0]}" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("attach", "one [[trainer]] section"),
        ("import", "the section [workload] that"),
        ("ranker fit", "pip install 'streamrl[ranker]'"),
    ],
)
def test_help_shows_brackets_as_they_are_written(command: str, words: str) -> None:
    shown = streamrl(*command.split(), "--help").stdout.replace("│", " ")
    assert words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["simulate", EXAMPLE, *SMALL], "step time"),
        (["plan", "{offer}", "-o", "{out}", "--set", "plan.seeds=1"], "is the bottleneck"),
        (["replay", "{executed}"], "all decided identically"),
        (["compare", "{executed}"], "predicted"),
        (["report", "{executed}", "-o", "{out}.html"], "written to"),
        (["validate", "--figure", "fig6"], "Figure 6"),
        (["doctor", EXAMPLE], "no errors"),
        (["export", EXAMPLE, "--framework", "verl"], "data.train_batch_size="),
        (["profile", "show", "qwen2.5-7b"], "tokens"),
        (["model", "show", "qwen2.5-7b"], "7.616B"),
        (["ranker", "eval", "{scores}"], "recall@20%"),
        (["calibrate", EXAMPLE, "{steps}", *SMALL], "whole step"),
        (["diagnose", "--run", EXAMPLE, "--stage", "step=9", *SMALL], "longest stage"),
        (["import", "{scores}", "-o", "{out}"], "lengths.csv"),
        (["lengths", "math reasoning"], "at the cap of"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_works_in_a_process_of_its_own(
    arguments: list[str | Path], shown: str, executed: Path, tmp_path: Path
) -> None:
    """`execute` does so in `test_end_to_end`."""
    offer, scores = tmp_path / "offer.toml", tmp_path / "scores.csv"
    write_run(few(), offer)
    scores.write_text("score,output_tokens\n1,10\n2,20\n")
    steps = tmp_path / "steps.csv"
    steps.write_text("step,sync\n1,9\n")
    names = {"executed": executed, "offer": offer, "scores": scores, "steps": steps}
    names |= {"out": tmp_path / "out"}
    given = [str(argument).format(**names) for argument in arguments]
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    told = [line for line in lines if not PROGRESS.search(line)]
    assert done.returncode == 0 and not told, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize("end", ["2>&-", "2</dev/null"], ids=["closed", "read-only"])
def test_an_error_is_not_written_to_standard_output_if_standard_error_is_closed(
    end: str,
) -> None:
    shell = ["sh", "-c", f'exec "$0" -c "$1" simulate nowhere.toml --json {end}']
    words = (sys.executable, "from streamrl.cli import main; main()")
    done = subprocess.run([*shell, *words], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_closed_standard_output_is_one_line() -> None:
    shell = ["sh", "-c", 'exec "$0" -c "$1" explain >&-']
    words = (sys.executable, "from streamrl.cli import main; main()")
    done = subprocess.run([*shell, *words], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "standard output is closed" in done.stderr


def test_tables_have_no_blanks_at_the_ends_of_lines_where_output_is_no_terminal() -> None:
    done = streamrl("explain")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 20
    assert not [line for line in done.stdout.splitlines() if line.endswith(" ")]


def test_ctrl_c_while_the_command_line_is_imported_prints_no_traceback() -> None:
    code = """
import sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == "streamrl.cli.lazy_commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from streamrl.cli import main
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "streamrl: Ctrl-C\n")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "Ctrl-C"),
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "the terminal was closed"),
        (signal.SIGQUIT, "Ctrl-\\"),
    ],
)
@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_signal_ends_a_command_as_ctrl_c_does(
    number: signal.Signals,
    said: str,
    is_in_loop: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        with TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)
            await asyncio.sleep(60)

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, end_by_signals():
        if is_in_loop:
            asyncio.run(work())
        with TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)
    assert ended.value.code == 128 + number and not [*tmp_path.iterdir()]
    assert capsys.readouterr().err == f"streamrl: {said}\n"
    assert signal.getsignal(number) == before


def test_a_library_for_which_the_limit_of_memory_leaves_no_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(place: str) -> None:
        raise ImportError("libblas.so: failed to map segment from shared object")

    monkeypatch.setattr("streamrl.cli.lazy_commands.resolve_name", find)
    done = streamrl("explain")
    assert done.returncode == 2 and done.stderr == (
        "streamrl: libblas.so: failed to map segment from shared object; raise the limit of memory (ulimit -v)\n"
    )


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with end_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_samples_of_a_simulated_run_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_run(small_run(), tmp_path / "run.toml")
    assert streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "made").returncode == 0
    done = streamrl("samples", tmp_path / "made")
    assert done.returncode == 2 and "is a simulated run, which has no texts" in done.stderr
    assert done.stderr.count("\n") == 1
