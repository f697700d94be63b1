"""The environment "container": each episode has a container of its own, in which the policy runs commands.

A program starts a shell in the container and keeps its standard input open. Commands are written there, and a random mark
ends the output of each. Each command is a process of its own: files stay, variables and the working directory do not.
A guard, a process of its own, removes the container when the episode or its worker ends, however it ends. A command
that exceeds `environment.action_time_limit` also ends its container, and the next turn ends the episode without a reward.

| program   | a container                                                                      | its removal             |
|-----------|----------------------------------------------------------------------------------|-------------------------|
| docker    | `docker run --rm -i --name NAME --network none --memory BYTES --cpus N IMAGE sh` | `docker rm --force`     |
| podman    | the same                                                                         | `podman rm --force`     |
| apptainer | `apptainer instance start --containall --writable-tmpfs --net --network none     | `apptainer instance     |
|           | IMAGE NAME`, and `apptainer exec instance://NAME sh`                             | stop --force`           |

The turn of the policy calls the tool `bash`. A turn without a call ends the episode. Then `test`, a command, decides about the
reward: 1 if it exits with 0, else 0. First the other processes of the container are killed. The test runs with `exec`. So its
status comes from the program, and no command of the policy can answer for it. The test reads the files of the policy's
container, so the image must protect files that a test relies on.
"""

from __future__ import annotations

import base64
import io
import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.executor.environment.tool_calls import ToolCallError, find_tool_calls

Json = dict[str, Any]
MOST_SHOWN = 20_000
"""Bytes of a command's output that are kept and shown, about 5,000 tokens. The middle is left out."""
CHUNK = 2**16
"""Bytes of output that are read at once."""
LAST_TIME = 5.0
"""Seconds for the program to remove a container."""
GUARD = 'cat >/dev/null; "$@" >/dev/null 2>&1'
"""Shell script that executes its arguments when its standard input ends."""
END_OTHERS = "kill -9 -1"
"""Kills all processes of a container but its first one."""
END_OTHERS_APART = (
    'own=$(readlink /proc/self/ns/pid); [ -n "$own" ] && [ "$own" != "{host}" ] && kill -9 -1'
)
"""The same, unless the container has the processes of this machine: apptainer can be configured so."""
BASH: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell. Each command starts in the same directory.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}


class Limits(NamedTuple):
    """Limits of one container."""

    memory: str
    """As the program reads it, such as "4g"."""
    cpus: float
    network: bool


class Program(NamedTuple):
    """The commands of a program that starts containers, without its own name at the front."""

    start: Callable[[str, str, Limits], list[list[str]]]
    """Start a container of a name, an image and limits; the last command is a shell in it."""
    remove: tuple[str, ...]
    """Removes the container whose name follows."""
    execute: tuple[str, str] = ("exec", "")
    """Runs a command in a container: the command, and what the name follows."""
    end_others: str = END_OTHERS
    """Shell command that kills the other processes of a container."""


def _docker(name: str, image: str, limits: Limits) -> list[list[str]]:
    network = [] if limits.network else ["--network", "none"]
    size = ["--memory", limits.memory, "--cpus", f"{limits.cpus:g}"]
    return [["run", "--rm", "-i", "--name", name, *network, *size, image, "sh"]]


def _apptainer(name: str, image: str, limits: Limits) -> list[list[str]]:
    network = [] if limits.network else ["--net", "--network", "none"]
    start = ["instance", "start", "--containall", "--writable-tmpfs", *network, image, name]
    return [start, ["exec", f"{INSTANCE}{name}", "sh"]]


INSTANCE = "instance://"
PROGRAMS = {
    "docker": Program(_docker, ("rm", "--force")),
    "podman": Program(_docker, ("rm", "--force")),
    "apptainer": Program(
        _apptainer, ("instance", "stop", "--force"), ("exec", INSTANCE), END_OTHERS_APART
    ),
}
"""Programs by name. The first one on the PATH is used."""


def find_program(wanted: str = "auto") -> str:
    """Return the name of a program that starts containers.

    Raises:
        LookupError: there is none on the PATH.
    """
    names = [*PROGRAMS] if wanted == "auto" else [wanted]
    for name in names:
        if name in PROGRAMS and shutil.which(name) is not None:
            return name
    if wanted not in ("auto", *PROGRAMS):
        raise LookupError(f"argument program is {wanted!r}; write one of {', '.join(PROGRAMS)}")
    raise LookupError(
        f"{' or '.join(names)} is not on the PATH; install it, or use another environment"
    )


class ContainerEnvironment:
    """A shell in a container."""

    tools = (BASH,)

    def __init__(
        self,
        tool_format: str = "hermes",
        image: str = "",
        test: str = "",
        program: str = "auto",
        memory: str = "4g",
        cpus: float = 2,
        network: bool = False,
    ) -> None:
        """Set what containers have; a record's fields `image` and `test` replace the arguments.

        Args:
            tool_format: the format of tool calls.
            image: image of the container; for apptainer such as "docker://python:3.12-slim".
            test: command whose exit status gives the reward. Without it the verifier scores the last turn.
            program: docker, podman or apptainer; "auto": the first one on the PATH.
            memory: memory of a container, for docker and podman.
            cpus: CPUs of a container, for docker and podman.
            network: whether it has network.
        """
        self._format = tool_format
        self._image, self._test = image, test
        self._program = program
        self._limits = Limits(memory, cpus, network)
        self._shell: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._execute: list[str] = []
        """Runs a command in the container, before the command."""
        self._end_others = END_OTHERS

    @classmethod
    def prepare(cls, program: str = "auto", **others: Any) -> None:
        """Check that containers can be started."""
        find_program(program)

    def reset(self, task: Json) -> None:
        """Start the container of a task.

        Raises:
            RuntimeError: it does not start.
        """
        image = str(task.get("image") or self._image)
        if not image:
            raise LookupError(
                "no image: set environment.arguments.image, or a field image in each record"
            )
        self._test = str(task.get("test") or self._test)
        name = find_program(self._program)
        program, container = PROGRAMS[name], f"streamrl-{secrets.token_hex(8)}"
        do, prefix = program.execute
        self._execute = [name, do, f"{prefix}{container}"]
        self._end_others = program.end_others.format(host=Path("/proc/self/ns/pid").readlink())
        commands = program.start(container, image, self._limits)
        self._shell = _start(_in_turn([[name, *each] for each in commands]))
        self._guard = _start(["sh", "-c", GUARD, "sh", name, *program.remove, container])
        told, status = self._run("true")
        if status != 0:
            raise RuntimeError(
                f"{name} did not start a container of {image}: {told[-500:].strip()}"
            )

    def step(self, action: str) -> tuple[list[Json] | None, float, bool]:
        """Run the commands of a turn; without one, run the test and end the episode."""
        schemas = {"bash": BASH["function"]["parameters"]}
        try:
            calls = find_tool_calls(action, self._format, schemas)
        except ToolCallError as error:
            return [_answer(f"Error: {error}")], 0.0, False
        if not calls or self._shell is None:
            return None, float(self._shell is not None and self._is_right()), True
        return [_answer(self._shown(call.arguments.get("command"))) for call in calls], 0.0, False

    def _shown(self, command: object) -> str:
        if not isinstance(command, str):
            return "Error: bash needs the argument command, a string"
        output, status = self._run(command)
        return output if status == 0 else f"{output}\n[exit status {status}]"

    def _is_right(self) -> bool:
        """Return whether the test exits with 0."""
        if not self._test:
            return False
        try:
            for command in (self._end_others, self._test):
                status = subprocess.call(
                    [*self._execute, "sh", "-c", command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_variables(),
                )
        except BaseException:
            self.close()
            raise
        return status == 0

    def _run(self, command: str) -> tuple[str, int | None]:
        """Return the output of a command, and its exit status; None if the container has ended."""
        shell = self._shell
        assert shell is not None and shell.stdin is not None
        mark = secrets.token_hex(16)
        text = base64.b64encode(command.encode()).decode()
        line = f'sh -c "$(echo {text} | base64 -d)" </dev/null 2>&1; s=$?; echo; echo {mark} $s\n'
        with suppress(BrokenPipeError):
            shell.stdin.write(line.encode())
            shell.stdin.flush()
        try:
            return self._read(f"\n{mark} ".encode())
        except BaseException:  # the action's time is over, and the command cannot be stopped alone
            self.close()
            raise

    def _read(self, mark: bytes) -> tuple[str, int | None]:
        """Return the output before a mark, and the exit status after it."""
        assert self._shell is not None and isinstance(self._shell.stdout, io.BufferedReader)
        half = MOST_SHOWN // 2
        head, tail, left_out, status = b"", b"", 0, None
        while status is None and (part := self._shell.stdout.read1(CHUNK)):
            tail += part
            output, found, after = tail.partition(mark)
            number, is_whole, _ = after.partition(b"\n")  # a process left behind may write more
            if found and is_whole:
                tail, status = output, int(number) if number.isdigit() else 1
            if not head and len(tail) > MOST_SHOWN:
                head, tail = tail[:half], tail[half:]
            if head:
                kept = half if status is not None else half + len(mark) + 8
                left_out += max(0, len(tail) - kept)
                tail = tail[-kept:]
        middle = f"\n[{left_out:,} bytes left out]\n" if left_out else ""
        return f"{head.decode(errors='replace')}{middle}{tail.decode(errors='replace')}", status

    def close(self) -> None:
        """Remove the container."""
        shell, self._shell = self._shell, None
        guard, self._guard = self._guard, None
        for process in (guard, shell):
            if process is None or process.stdin is None:
                continue
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(LAST_TIME)
            except subprocess.TimeoutExpired:
                process.kill()


def _in_turn(commands: list[list[str]]) -> list[str]:
    """Return a command that runs commands one after the other. The last one takes its place, and has its input."""
    *before, last = commands
    if not before:
        return last
    script = " && ".join(f"{shlex.join(each)} </dev/null" for each in before)
    return ["sh", "-c", f"{script} && exec {shlex.join(last)}"]


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that no signal to the group of this one reaches."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_variables(),
        start_new_session=True,
    )


def _variables() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")}


def _answer(text: str) -> Json:
    return {"role": "tool", "name": "bash", "content": text}
