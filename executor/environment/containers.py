"""The environment "container": each episode has a container of its own, in which the policy runs commands.

A program starts a shell in the container and keeps its standard input open. Commands are written there, and a random mark
ends the output of each. A command that exceeds `environment.action_time_limit` ends its container, and the next turn ends
the episode without a reward. When the worker of the episode ends, however it ends, the shell reads the end of its input, and the
container is removed. Each command is a process of its own: files stay, variables and the working directory do not.

| program   | a container                                                                      |
|-----------|----------------------------------------------------------------------------------|
| docker    | `docker run --rm -i --network none --memory BYTES --cpus N IMAGE sh`             |
| podman    | the same                                                                         |
| apptainer | `apptainer exec --containall --writable-tmpfs --net --network none IMAGE sh`     |

The turn of the policy calls the tool `bash`. A turn without a call ends the episode. Then `test`, a command, decides about the
reward: 1 if it exits with 0, else 0. It runs in the same container, so the image must protect files that a test relies on.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from streamrl.executor.environment.tool_calls import ToolCallError, find_tool_calls

Json = dict[str, Any]
MOST_SHOWN = 20_000
"""Characters of a command's output that the policy sees, about 5,000 tokens. The middle is left out."""
LAST_TIME = 5.0
"""Seconds for the program to remove a container."""
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


def _docker(program: str, image: str, limits: Limits) -> list[str]:
    network = [] if limits.network else ["--network", "none"]
    size = ["--memory", limits.memory, "--cpus", f"{limits.cpus:g}"]
    return [program, "run", "--rm", "-i", *network, *size, image, "sh"]


def _apptainer(program: str, image: str, limits: Limits) -> list[str]:
    network = [] if limits.network else ["--net", "--network", "none"]
    return [program, "exec", "--containall", "--writable-tmpfs", *network, image, "sh"]


PROGRAMS: dict[str, Callable[[str, str, Limits], list[str]]] = {
    "docker": _docker,
    "podman": _docker,
    "apptainer": _apptainer,
}
"""By program: its command that starts a shell in a container. The first one on the PATH is used."""


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
        self._shell = subprocess.Popen(
            PROGRAMS[name](name, image, self._limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")},
        )
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
            is_right = self._shell is not None and self._test and self._run(self._test)[1] == 0
            return None, float(bool(is_right)), True
        return [_answer(self._shown(call.arguments.get("command"))) for call in calls], 0.0, False

    def _shown(self, command: object) -> str:
        if not isinstance(command, str):
            return "Error: bash needs the argument command, a string"
        output, status = self._run(command)
        if len(output) > MOST_SHOWN:
            half = MOST_SHOWN // 2
            left_out = len(output) - 2 * half
            output = f"{output[:half]}\n[{left_out:,} characters left out]\n{output[-half:]}"
        return output if status == 0 else f"{output}\n[exit status {status}]"

    def _run(self, command: str) -> tuple[str, int | None]:
        """Return the output of a command, and its exit status; None if the container has ended."""
        shell = self._shell
        assert shell is not None and shell.stdin is not None and shell.stdout is not None
        mark = secrets.token_hex(16)
        text = base64.b64encode(command.encode()).decode()
        line = f'sh -c "$(echo {text} | base64 -d)" </dev/null 2>&1; s=$?; echo; echo {mark} $s\n'
        lines: list[bytes] = []
        with suppress(BrokenPipeError):
            shell.stdin.write(line.encode())
            shell.stdin.flush()
        try:
            for got in shell.stdout:
                if got.startswith(mark.encode()):
                    output = b"".join(lines).removesuffix(b"\n")
                    return output.decode(errors="replace"), int(got.split()[1])
                lines.append(got)
        except BaseException:  # the action's time is over, and the command cannot be stopped alone
            self._shell = None
            shell.kill()
            raise
        return b"".join(lines).decode(errors="replace"), None

    def close(self) -> None:
        """End the shell, which removes the container."""
        shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None:
            return
        with suppress(BrokenPipeError):
            shell.stdin.close()
        try:
            shell.wait(LAST_TIME)
        except subprocess.TimeoutExpired:
            shell.kill()


def _answer(text: str) -> Json:
    return {"role": "tool", "name": "bash", "content": text}
