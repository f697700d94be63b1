"""Drive a headless Chromium through its debugging pipe: messages are JSON, each ended by a zero byte."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
PATIENCE = 60.0  # seconds for one answer, on a machine that is busy with something else
CHUNK = 1 << 16


def find_chromium() -> str | None:
    """Return the path of a Chromium, where one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    program = find_chromium()
    assert program is not None, "find_chromium says whether there is one"
    child_reads, we_write = os.pipe()
    we_read, child_writes = os.pipe()
    # the browser reads from descriptor 3 and writes to 4, whatever numbers the pipes have here
    command = f'exec "$0" "$@" 3<&{child_reads} 4>&{child_writes}'
    arguments = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, *arguments],
        pass_fds=(child_reads, child_writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_reads)
    os.close(child_writes)
    try:
        yield Browser(we_read, we_write)
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(we_read)
        os.close(we_write)


class Browser:
    """One page, and everything that happened while it was open."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._unread = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file at a width, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true in the page, which may be loading again."""
        until = time.monotonic() + PATIENCE
        while not self._is_true(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.05)

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(f"Boolean({expression})"))
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            return False

    def complaints(self) -> list[str]:
        """Return everything that the console would show since the page was opened."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the address of everything that the page asked for."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def print_pdf(self) -> bytes:
        """Return the page as it would be printed on A4."""
        paper = {"printBackground": True, "preferCSSPageSize": True}
        return base64.b64decode(self.call("Page.printToPDF", **paper)["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; events that come before it are kept."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reading], [], [], PATIENCE)
            assert ready, f"the browser said nothing for {PATIENCE:.0f} seconds"
            chunk = os.read(self._reading, CHUNK)
            assert chunk, "the browser has ended"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))
