"""Files as people and their editors leave them, and values that no run can have: read, or refused in one line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from streamrl.executor.buffer import BufferedRollout
from streamrl.executor.prompts import PromptWorkload, load_tokenizer
from streamrl.executor.record import RunDirectory
from streamrl.executor.roles import Scoring
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.field_checks import bounds_of
from streamrl.runfile.files import load_run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.section import Section
from streamrl.runfile.units import QUANTITIES
from streamrl.runfile.workload_config import SourceConfig
from streamrl.workload.data_files import read_csv
from streamrl.workload.prompt_records import read_source
from tests.command_line import streamrl
from tests.scripted import ScriptedTokenizer, make_world
from tests.test_execute import real_run
from tests.tiny_model import save_tiny_model

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
SMALL = ["--set", "algorithm.prompts_per_step=64", "--set", "simulate.max_steps=3"]
BOM = b"\xef\xbb\xbf"

# Text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["{}", '{"a": 1}', "not JSON", None])
def test_a_damaged_tokenizer_is_told_of_by_its_directory(
    tmp_path: Path, damage: str | None
) -> None:
    save_tiny_model(tmp_path, ["<pad>", "<eos>", "a"])
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    if damage is not None:
        (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(
        ValueError, match=r"model\.path .*its tokenizer cannot be read|makes no token"
    ):
        PromptWorkload(real_run(tmp_path), load_tokenizer(str(tmp_path)))


def test_tokens_that_the_model_has_not_are_told_of_by_their_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, ["<pad>", "<eos>", "p", *"0123456789"])
    workload = PromptWorkload(real_run(tmp_path), load_tokenizer(str(tmp_path)))
    workload.check_vocabulary(10)
    with pytest.raises(ValueError, match=r"jsonl:7: .* makes token 9, but the model has 9"):
        workload.check_vocabulary(9)


@pytest.mark.parametrize(
    "text",
    [
        BOM + b'{"prompt": "a"}\n{"prompt": "b"}\n',
        b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
        b'{"prompt": "a"}\n{"prompt": "b"}\n\n  \n',
        b'{"prompt": "a"}\n{"prompt": "b"}',
        BOM + b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n\r\n',
    ],
    ids=["BOM", "CRLF", "blank last lines", "no last newline", "BOM, CRLF, a blank last line"],
)
def test_prompts_are_read_as_editors_leave_them(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text)
    assert [
        record["prompt"] for record in read_source(SourceConfig(prompts=str(path))).records
    ] == ["a", "b"]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c"])
def test_what_ends_a_line_elsewhere_is_text_inside_json(tmp_path: Path, end: str) -> None:
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": f"a{end}b"}, ensure_ascii=False)
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert [
        record["prompt"] for record in read_source(SourceConfig(prompts=str(path))).records
    ] == [f"a{end}b"] * 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000 + "]" * 100_000, "not JSON"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"prompt": []}', "chat messages"),
        ('{"prompt": [1]}', "chat messages"),
        ('{"prompt": [{"content": "no role"}]}', "chat messages"),
        ('{"prompt": "a", "expected_tokens": 1e999}', "expected_tokens must be from 1"),
        ('{"prompt": "a", "expected_tokens": NaN}', "expected_tokens must be from 1"),
        (
            '{"prompt": "a", "expected_tokens": 1' + "0" * 400 + "}",
            "expected_tokens must be from 1",
        ),
        ("", "not JSON"),
    ],
    ids=range(10),
)
def test_a_prompt_that_is_none_is_refused_by_its_line(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n')
    with pytest.raises(ValueError, match=f"{path}:2: .*{words}") as found:
        read_source(SourceConfig(prompts=str(path)))
    assert len(str(found.value)) < 400 and "\n" not in str(found.value)


def test_a_chat_that_the_template_cannot_take_is_refused_by_its_line(tmp_path: Path) -> None:
    class Picky(ScriptedTokenizer):
        def apply_chat_template(self, prompt: Any, **_: Any) -> dict[str, list[int]]:
            raise TypeError("content is None")

    run = real_run(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: the model's chat template"):
        PromptWorkload(run, Picky())


def test_run_files_and_tables_are_read_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(BOM + EXAMPLE.read_bytes())
    assert load_run(tmp_path / "run.toml").rollout == load_run(EXAMPLE).rollout
    (tmp_path / "lengths.csv").write_bytes(BOM + b"prompt_id,output_tokens\n1,2\n\n")
    assert read_csv(tmp_path / "lengths.csv") == [{"prompt_id": "1", "output_tokens": "2"}]


def test_a_compressed_table_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + bytes(range(1, 200)))
    with pytest.raises(ValueError, match=f"{path}: "):
        read_csv(path)


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_every_locale_shows_what_it_can(tmp_path: Path, locale: str) -> None:
    run = tmp_path / "run.toml"
    run.write_bytes("# ±\n".encode() + EXAMPLE.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", "from streamrl.cli import main; main()", "simulate", run, *SMALL],
        env={"PATH": "", "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        cwd=EXAMPLE.parent.parent,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b"step time" in done.stdout, done.stderr


# Values -------------------------------------------------------------------------------------------


def numbers_without_bounds() -> list[str]:
    """Return the keys of a run file that may be any number."""
    found, kinds = [], [Run]
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            types = [field.type]
            for each in types:
                types += get_args(each)
                if not isinstance(each, type):
                    continue
                if issubclass(each, Section):
                    kinds += [each] if each not in kinds else []
                elif issubclass(each, int | float) and not issubclass(each, (bool, *QUANTITIES)):
                    known = field.name in bounds_of(kind) or kind is PlanConfig
                    found += [] if known else [f"{kind.__name__}.{field.name}"]
    return list(dict.fromkeys(found))


def test_every_number_of_a_run_file_has_bounds() -> None:
    latencies = ["PoliciesConfig.latency", "ReplicasConfig.latency"]
    rewards = [
        f"RewardConfig.{name}" for name in ("at_once", "beyond", "bounds", "until", "weight")
    ]
    of_checks = [
        "EnvironmentConfig.arguments",
        "EvaluationConfig.k",
        "LengthsConfig.prompt_tokens",
        "OptimizerConfig.betas",
        *latencies,
        *rewards,
        "RolloutConfig.stop_token_ids",
        "WorkloadConfig.group_rewards",
        "WorkloadConfig.template_arguments",
    ]
    assert sorted(numbers_without_bounds()) == of_checks


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "key",
    [
        *("cluster.pools.h20.price", "rollout.temperature", "algorithm.learning_rate"),
        *("algorithm.clip", "algorithm.kl_coefficient", "policies.context_time", "plan.budget"),
    ],
)
def test_a_number_that_none_can_be_is_refused_by_its_key(key: str, value: str) -> None:
    done = streamrl("simulate", EXAMPLE, "--set", f"{key}={value}")
    assert done.returncode == 2 and done.stderr.startswith(f"streamrl: {key} must be ")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("key", ["rollout.temperature", "evaluation.temperature"])
def test_a_temperature_that_leaves_nothing_of_the_model_is_refused(key: str) -> None:
    with pytest.raises(RunError, match=rf"^{key} must be in .*100\], got 1e\+308"):
        load_run(EXAMPLE, [f"{key}=1e308", "evaluation.prompts=held-out.jsonl"])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_none_enters_nowhere(reward: float) -> None:
    with pytest.raises(ValueError, match="a reward must be a finite number"):
        BufferedRollout((0,), 0).enter(Scoring(reward, None))


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/proc/streamrl", "file", "file/inside"])
@pytest.mark.parametrize(
    "command",
    [
        ("simulate", EXAMPLE, *SMALL, "-o"),
        ("plan", EXAMPLE, "-o"),
        ("profile", "show", "qwen2.5-7b", "--gpu", "h20", "-o"),
        ("validate", "-o"),
    ],
    ids=lambda command: command[0],
)
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(
    tmp_path: Path, command: tuple[str | Path, ...], place: str
) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / place
    if command[0] == "profile":
        output = output / "curve.png"
    done = streamrl(*command, output)
    assert done.returncode == 2 and "cannot be written" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("place", ["/proc/streamrl", "file", "file/inside"])
def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    run = real_run(tmp_path, execute__output=str(tmp_path / place))
    with pytest.raises(ValueError, match=r"^execute\.output .*: cannot be written: "):
        RunDirectory(tmp_path / place).find_checkpoint(run, resume=False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokens", "Not a directory"),
        ("control", "Not a directory"),
        ("logs", "Not a directory"),
        ("lock", "Is a directory"),
        ("metrics.jsonl", "Is a directory"),
    ],
)
def test_what_is_in_the_way_of_a_run_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, says: str
) -> None:
    there = tmp_path / "run"
    run = real_run(tmp_path)
    there.mkdir()
    (there / name).write_text("mine") if says.startswith("Not") else (there / name).mkdir()
    with pytest.raises(ValueError, match=rf"^execute\.output .*/{name}: cannot be written: {says}"):
        RunDirectory(there).find_checkpoint(run, resume=False)
    assert [each.name for each in there.iterdir()] == [name]


def test_a_profile_that_could_not_be_written_is_not_measured(tmp_path: Path) -> None:
    done = streamrl("profile", tmp_path / "model", "-o", tmp_path)
    assert done.returncode == 2 and "Is a directory" in done.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device", "runs/trace.jsonl"), "runs/trace.jsonl: No space"),
        (OSError(28, "No space left on device"), "No space left on device; free some space"),
    ],
)
def test_a_disk_that_is_full_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, error: OSError, text: str
) -> None:
    def fail(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(sys.modules["streamrl.cli.main"], "app", fail)
    done = streamrl("simulate", EXAMPLE)
    assert done.returncode == 1 and text in done.stderr and done.stderr.count("\n") == 1


def test_a_run_whose_disk_is_full_says_what_is_saved_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        run = real_run(tmp_path, algorithm__steps=2, execute__checkpoint_every=2)
        asyncio.run(asyncio.wait_for(make_world(run, {}).run(), timeout=60))
        raise OSError(28, "No space left on device", "runs/trace.jsonl")

    monkeypatch.setattr("streamrl.executor.execute.execute", fill)
    done = streamrl("execute", EXAMPLE, "--set", f"execute.output={tmp_path / 'run'}")
    ledger, look, saved, error = done.stderr.splitlines()[-4:]
    assert done.returncode == 1 and "No space left" in error
    assert ledger.startswith("ledger: ") and look.startswith("what it did and learned: ")
    assert saved.startswith("step 2 is saved; go on with: streamrl execute ")


def test_a_run_whose_last_checkpoint_cannot_be_saved_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = real_run(tmp_path, algorithm__steps=2)

    def full(self: object, position: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamrl.executor.checkpoints.Checkpoints.finish", full)

    async def go() -> None:
        await make_world(run, {}).run()

    with pytest.raises(RuntimeError, match=r"SaveCheckpoint: .*No space left"):
        asyncio.run(asyncio.wait_for(go(), timeout=60))
