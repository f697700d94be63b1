"""The environment "container", with programs that start a shell on this machine instead of a container."""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
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
cd "$(dirname "$0")"
case "$*" in *"kill -"*) exit 0;; esac
case "$1" in
run)
    for word; do image="$before"; before="$word"; done
    [ "$image" = missing ] && { echo "no such image"; exit 125; }
    exec 3<&0
    setsid sh <&3 3<&- &
    echo $! > "$5"
    wait
    echo ended >> "$0.calls";;
exec) shift 2; exec "$@";;
rm) kill -9 -"$(cat "$3")"; echo removed >> "$0.calls";;
*) exit 2;;
esac
"""
"""Starts a shell that is no child of the client, like a container, and notes calls. It kills no other processes."""


APPTAINER = """#!/bin/sh
echo "$@" >> "$0.calls"
cd "$(dirname "$0")"
case "$*" in *"kill -"*) exit 0;; esac
case "$1 $2" in
"instance start") [ "$8" = missing ] && { echo "no such image"; exit 255; }; : > "$9";;
"instance stop") [ -e "$4" ] && echo removed >> "$0.calls";;
"exec instance://"*) [ -e "${2#instance://}" ] || exit 1; shift 2; exec "$@";;
*) exit 2;;
esac
"""
"""Runs commands in "instances" that were started."""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the programs on the PATH, and return the record of docker's calls."""
    for name, text in (("docker", DOCKER), ("apptainer", APPTAINER)):
        program = tmp_path / name
        program.write_text(text)
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
    assert told(environment, "seq 20000").count("bytes left out") == 1
    messages, *_ = environment.step("<tool_call>{</tool_call>")
    assert messages is not None and "not valid JSON" in messages[0]["content"]
    told(environment, "touch made")
    assert environment.step("done") == (None, 1.0, True)
    environment.close()
    call, others, test, removal, *ends = docker.read_text().splitlines()
    name = call.split()[4]
    assert call == f"run --rm -i --name {name} --network none --memory 1g --cpus 2 python:3.12 sh"
    assert others == f"exec {name} sh -c kill -9 -1" and test == f"exec {name} sh -c test -f made"
    assert removal == f"rm --force {name}" and "removed" in ends


def test_a_record_has_an_image_and_a_test_of_its_own(docker: Path) -> None:
    environment = ContainerEnvironment(image="other", network=True)
    environment.reset({"image": "own", "test": "exit 1"})
    assert environment.step("done") == (None, 0.0, True)
    environment.close()
    call = docker.read_text().splitlines()[0]
    assert "--network" not in call and call.endswith(" own sh")


SLEEP = "echo $$ > pid; exec sleep 60"
"""A command that writes the number of its process and lasts."""


def assert_ended(file: Path) -> None:
    """Wait until the process whose number a file has is gone."""
    place = Path("/proc", file.read_text().strip(), "cmdline")
    until = time.monotonic() + 10
    while place.exists() and place.read_bytes():
        assert time.monotonic() < until, "the process of a container is still there"
        time.sleep(0.01)


def test_a_command_that_is_stopped_ends_its_container(
    docker: Path,
) -> None:
    def stop(*arguments: Any) -> None:
        raise ActionTimeoutError

    environment = ContainerEnvironment(image="any", test="true")
    environment.reset({})
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(ActionTimeoutError):
            environment.step(bash(SLEEP))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_ended(docker.with_name("pid"))
    assert environment.step(bash("true")) == (None, 0.0, True)
    environment.close()


def test_a_worker_that_is_killed_leaves_no_container(docker: Path) -> None:
    worker = os.fork()
    if worker == 0:
        try:
            os.setpgid(0, 0)
            environment = ContainerEnvironment(image="any")
            environment.reset({})
            environment.step(bash(SLEEP))
        finally:
            os._exit(0)
    pid = docker.with_name("pid")
    until = time.monotonic() + 10
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert_ended(pid)


@pytest.mark.parametrize("program", ["docker", "apptainer"])
def test_a_process_that_reads_the_input_of_the_shell_does_not_decide_about_the_reward(
    docker: Path, program: str
) -> None:
    docker.with_name("forge").write_text(
        "line=$(dd bs=8192 count=1 2>/dev/null); line=${line##*echo }; echo; echo ${line%% *} 0\n"
    )
    environment = ContainerEnvironment(image="any", test="exit 1", program=program)
    environment.reset({})
    files = "cd /proc/$PPID/fd; [ -e 10 ] && file=10 || file=0"  # dash keeps its input as 10
    told(environment, f"{files}; setsid sh $OLDPWD/forge <$file >1 2>&1 & sleep 0.3")
    assert environment.step("done") == (None, 0.0, True)
    environment.close()


def test_apptainer_runs_the_test_in_the_instance_of_the_commands(docker: Path) -> None:
    environment = ContainerEnvironment(image="any", test="test -f made", program="apptainer")
    environment.reset({})
    told(environment, "touch made")
    assert environment.step("done") == (None, 1.0, True)
    environment.close()
    calls = docker.with_name("apptainer.calls").read_text().splitlines()
    start, shell, others, test, stop, removed = calls
    name = start.split()[-1]
    options = "--containall --writable-tmpfs --net --network none"
    assert start == f"instance start {options} any {name}" and shell == f"exec instance://{name} sh"
    own = Path("/proc/self/ns/pid").readlink()
    assert f'[ "$own" != "{own}" ] && kill -9 -1' in others
    assert test == f"exec instance://{name} sh -c test -f made"
    assert stop == f"instance stop --force {name}" and removed == "removed"
    with pytest.raises(RuntimeError, match=r"apptainer did not start .* no such image"):
        ContainerEnvironment(image="missing", program="apptainer").reset({})


def test_output_of_any_length_takes_little_memory(docker: Path) -> None:
    environment = ContainerEnvironment(image="any")
    environment.reset({})
    tracemalloc.start()
    try:
        text = told(environment, "printf start; head -c 20000000 /dev/zero; printf end; exit 4")
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
    assert text.startswith("start") and text.endswith("\0end\n[exit status 4]")
    assert "[19,980,008 bytes left out]" in text
    assert told(environment, "echo next") == "next\n"
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
