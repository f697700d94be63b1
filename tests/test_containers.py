"""The environment "container", with a program `docker` that starts a shell on this machine instead of a container."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.environment.containers import ContainerEnvironment, find_program
from streamrl.executor.environment.host import ActionTimeoutError
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from tests.runs import make_table

DOCKER = """#!/bin/sh
echo "$@" >> "$0.calls"
[ "$1" = run ] || exit 2
for word; do image="$before"; before="$word"; done
[ "$image" = missing ] && { echo "no such image"; exit 125; }
cd "$(dirname "$0")" && sh
echo ended >> "$0.calls"
"""
"""Starts the shell that follows the image, and notes its arguments and its end."""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the program on the PATH, and return its record of calls."""
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "docker.calls"


def bash(command: str) -> str:
    text = command.replace('"', '\\"')
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{text}"}}}}</tool_call>'


def told(environment: ContainerEnvironment, command: str) -> Any:
    messages, reward, is_over = environment.step(bash(command))
    assert messages is not None and (reward, is_over) == (0.0, False)
    return messages[0]["content"]


def test_commands_run_in_a_container_of_the_episode_and_its_test_gives_the_reward(
    docker: Path,
) -> None:
    environment = ContainerEnvironment(image="python:3.12", test="test -f made", memory="1g")
    environment.reset({"prompt": "make a file"})
    assert told(environment, "printf 'a\\nb'") == "a\nb"
    assert told(environment, "echo wrong >&2; exit 3") == "wrong\n\n[exit status 3]"
    assert told(environment, "cat; echo read") == "read\n"
    assert told(environment, "seq 20000").count("characters left out") == 1
    messages, *_ = environment.step("<tool_call>{</tool_call>")
    assert messages is not None and "not valid JSON" in messages[0]["content"]
    told(environment, "touch made")
    assert environment.step("done") == (None, 1.0, True)
    environment.close()
    call, end = docker.read_text().splitlines()
    assert call == "run --rm -i --network none --memory 1g --cpus 2 python:3.12 sh"
    assert end == "ended"


def test_a_record_has_an_image_and_a_test_of_its_own(docker: Path) -> None:
    environment = ContainerEnvironment(image="other", network=True)
    environment.reset({"image": "own", "test": "exit 1"})
    assert environment.step("done") == (None, 0.0, True)
    environment.close()
    assert "--network" not in docker.read_text() and docker.read_text().split()[-3:-1] == [
        "own",
        "sh",
    ]


def test_a_command_that_is_stopped_ends_its_container(docker: Path) -> None:
    environment = ContainerEnvironment(image="any", test="true")
    environment.reset({})
    shell = environment._shell
    assert shell is not None and shell.stdout is not None

    class Late:
        """Standard output whose reader is stopped at the time limit."""

        def __iter__(self) -> Late:
            return self

        def __next__(self) -> bytes:
            raise ActionTimeoutError

    shell.stdout.close()
    shell.stdout = Late()  # type: ignore[assignment]  # only iterated
    with pytest.raises(ActionTimeoutError):
        environment.step(bash("sleep 60"))
    assert shell.wait(5) != 0
    assert environment.step(bash("true")) == (None, 0.0, True)
    environment.close()


def test_a_container_that_does_not_start_is_a_fault_with_its_reason(docker: Path) -> None:
    began_at = time.monotonic()
    environment = ContainerEnvironment(image="missing")
    with pytest.raises(RuntimeError, match="docker did not start a container of missing: no such"):
        environment.reset({})
    with pytest.raises(LookupError, match=r"set environment.arguments.image, or a field image"):
        ContainerEnvironment().reset({})
    assert time.monotonic() - began_at < 5


def test_without_a_program_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LookupError, match="docker or podman or apptainer is not on the PATH"):
        ContainerEnvironment.prepare()
    with pytest.raises(LookupError, match="podman is not on the PATH"):
        find_program("podman")
    with pytest.raises(LookupError, match="program is 'lxc'; write one of docker"):
        find_program("lxc")


def container_run(**environment: Any) -> Run:
    table = {"implementation": "container", "max_turns": 2, "max_context": 4096, **environment}
    return make_run(make_table({"environment": table}))


def test_containers_need_trusted_code() -> None:
    with pytest.raises(RunError, match=r"environment.sandbox must be false .* starts containers"):
        container_run()
    assert container_run(sandbox=False).environment is not None
