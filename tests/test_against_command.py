"""`simulate --against` on a terminal, as JSON, in a directory and in the report of that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.record.run_comparison import Against, BreakEvenBandwidth
from streamrl.report.against_report import break_even_lines, verdict
from streamrl.runfile.files import write_run
from streamrl.sim.studies.comparison import LEAST_BANDWIDTH, compare_runs
from tests.against_pair import FAR, colocated, disaggregated, render
from tests.command_line import streamrl

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def found() -> Against:
    """A disaggregated run against a colocated one."""
    return compare_runs(disaggregated(FAR), colocated())


def test_the_report_has_both_runs_and_what_makes_them_even(found: Against) -> None:
    text = render(found)
    assert "A  one" in text and "B  other" in text and verdict(found) in text
    assert "even with the 2 far that A has more at $0 a token costs more with A" in text
    assert "A costs more even with a free link far - near (it has 80 Gbps)" in text
    link = {"between": ("far", "near"), "bandwidth": 1e9, "least": LEAST_BANDWIDTH}
    for more, said in (
        ({"break_even": 5e8, "is_cheaper": False}, "about 4 Gbps on the link far - near"),
        (
            {"break_even": None, "is_cheaper": True},
            "A costs less at any of the link far - near down",
        ),
    ):
        bandwidth = BreakEvenBandwidth(**link, **more)  # type: ignore[arg-type]  # as keywords
        lines = list(break_even_lines(replace(found, bandwidths=[bandwidth])))
        assert said in lines[-1]
    assert list(break_even_lines(replace(found, prices=[], bandwidths=[]))) == [
        "A rents no GPUs beyond those of B, so no price of them makes up for anything."
    ]


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run files of a disaggregated and a colocated run."""
    base = tmp_path_factory.mktemp("runs")
    for name, run in (("a.toml", disaggregated(FAR)), ("b.toml", colocated())):
        write_run(run, base / name)
    return base / "a.toml", base / "b.toml"


def test_the_command_prints_the_table_and_the_verdict(
    files: tuple[Path, Path], found: Against
) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b)
    assert done.returncode == 0 and done.stderr == ""
    text = " ".join(done.stdout.split())
    assert verdict(found) in text and "A a.toml: 2" in text and "B b.toml: 4" in text


def test_the_command_gives_the_same_as_json(files: tuple[Path, Path], found: Against) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b, "--json")
    data = json.loads(done.stdout)
    assert data["verdict"] == verdict(found) and data["outcome"] == found.outcome
    assert data["cost_ratio"]["value"] == found.cost_ratio.value
    assert data["counted_steps"] == list(found.counted_steps)


def test_settings_are_of_both_or_of_the_one_they_are_written_for(files: tuple[Path, Path]) -> None:
    a, _ = files
    both = streamrl("simulate", a, "--against", a, "--json", "--set", "rollout.replicas=1")
    assert json.loads(both.stdout)["b"]["generation"]["num_gpus"] == 1
    settings = ("--set", "A:rollout.replicas=1", "--set", "B:rollout.replicas=3")
    one = json.loads(streamrl("simulate", a, "--against", a, "--json", *settings).stdout)
    assert [one[letter]["generation"]["num_gpus"] for letter in "ab"] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "B:algorithm.group_size=4"), "algorithm.group_size is 2 in A and 4 in B"),
        (("--set", "A:rollout.replicas=99"), "pool 'far' has 8 GPUs"),
        (("--sweep", "rollout.replicas=1,2"), "--sweep does not go with --against"),
        (("--seeds", "2"), "--seeds does not go with --against"),
    ],
)
def test_bad_input_is_one_line(
    files: tuple[Path, Path], arguments: tuple[str, ...], said: str
) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and said in done.stderr


def test_a_missing_file_and_a_study_are_refused(files: tuple[Path, Path]) -> None:
    a, _ = files
    missing = streamrl("simulate", a, "--against", "nowhere.toml")
    assert missing.returncode == 2 and "nowhere.toml: no such run file" in missing.stderr
    study = EXAMPLES / "studies" / "bandwidth.toml"
    done = streamrl("simulate", a, "--against", study)
    assert done.returncode == 2 and "bandwidth.toml is a study" in done.stderr


def test_the_example_asks_what_readme_answers() -> None:
    quick = ("--set", "simulate.interval=0.1", "--set", "simulate.max_steps=22")
    few = ("--set", "algorithm.prompts_per_step=64")
    done = streamrl(
        "simulate", EXAMPLES / "against.toml", "--against", EXAMPLES / "against-colocated.toml",
        *quick, *few, "--json",
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert data["a"]["generation"]["num_gpus"] == 32 and data["b"]["shares_gpus"]
    assert data["prices"][0]["pool"] == "h20" and len(data["bandwidths"]) == 1


def test_the_report_gives_the_answer_of_the_command(
    files: tuple[Path, Path], found: Against, tmp_path: Path
) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b, "-o", tmp_path / "pair", "--json")
    reported = streamrl("report", tmp_path / "pair", "--markdown", tmp_path / "page.md", "--json")
    data = json.loads(reported.stdout)
    assert data["answer"] == verdict(found) == json.loads(done.stdout)["verdict"]
    assert data["against"] == [json.loads(done.stdout)]
    page = (tmp_path / "page.md").read_text()
    assert verdict(found) in page and all(line in page for line in break_even_lines(found))
    assert "| whole training, 50 steps |" in page


@pytest.mark.parametrize("text", ["", "{}", '{"names": ["a", "b"]}', "[1]"])
def test_a_file_that_holds_no_comparison_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "against.json").write_text(text)
    done = streamrl("report", tmp_path)
    assert done.returncode == 2 and "against.json: not a run set against another" in done.stderr
    assert done.stderr.count("\n") == 1
