"""Score completions with a language model over HTTP (OpenAI's chat completions).

The controller's process asks it, because the verifier's workers have no network. One number is read from the reply.
Several requests run at the same time, while generation and training go on.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from streamrl.executor.http_deadline import connection_to
from streamrl.runfile.reading import parse_json
from streamrl.runfile.roles_config import RewardConfig
from streamrl.workload.render_limit import render_limit

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

TEMPLATE = """Judge an answer to a task.

Task:
{{ prompt }}
{% if answer is defined %}
A right answer, to compare with:
{{ answer }}
{% endif %}
Answer to judge:
{{ completion }}

Say in a sentence what is right and wrong with it. Then write, on a line of its own, "Score: X", where X is a number from {{ least }} (useless) to {{ most }} (entirely right)."""
SCORE = re.compile(r"score\W{0,4}[:=]\W{0,4}([-+]?\d+(?:\.\d+)?)", re.IGNORECASE)
"""The last match counts: earlier ones may quote the judged answer."""
WAITS = (0.5, 2.0, 8.0)
"""Seconds before the next attempt, if the endpoint does not reply or is overloaded."""
MOST_BYTES = 1 << 20
"""Maximum bytes of a reply."""


class Judge:
    """Asks one model, with a limited number of concurrent requests."""

    def __init__(self, reward: RewardConfig, key: str) -> None:
        """Store the settings of the run file's `key`.

        Raises:
            ValueError: the environment variable is missing, or the template is invalid.
        """
        assert reward.endpoint is not None, "check_rewards ensures it"
        self._reward, self._key = reward, key
        self._url = urlsplit(reward.endpoint)
        self._headers = {"Content-Type": "application/json"}
        if reward.key_variable is not None:
            secret = os.environ.get(reward.key_variable)
            if not secret:
                raise ValueError(
                    f"{key}.key_variable {reward.key_variable!r}: the environment has no such variable; export it"
                )
            self._headers["Authorization"] = f"Bearer {secret}"
        try:
            environment = SandboxedEnvironment(undefined=StrictUndefined)
            self._template = environment.from_string(reward.template or TEMPLATE)
        except TemplateError as error:
            raise ValueError(f"{key}.template is no valid Jinja template: {error}") from None

    @cached_property
    def _free(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._reward.at_once)

    async def score(self, completion: str, record: Record) -> tuple[float | None, str]:
        """Return a score within the reward's bounds, or None if the reply has none, and the reply.

        Raises:
            RuntimeError: the endpoint does not reply, or rejects the request.
        """
        least, most = self._reward.bounds
        try:
            with render_limit("the question", f"Check the loops of {self._key}.template"):
                text = self._template.render(
                    {**record, "completion": completion, "least": f"{least:g}", "most": f"{most:g}"}
                )
        except (TemplateError, ValueError) as error:
            raise RuntimeError(f"judge: the template cannot be filled in: {error}") from None
        async with self._free:
            reply = await self._ask(text)
        scores = SCORE.findall(reply)
        value = float(scores[-1]) if scores else None
        return (value if value is not None and least <= value <= most else None), reply

    async def _ask(self, text: str) -> str:
        body = {
            "model": self._reward.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
        }
        for wait in (*WAITS, None):
            try:
                status, data = await asyncio.to_thread(self._post, json.dumps(body).encode())
            except (OSError, http.client.HTTPException) as error:
                what = f"judge {self._reward.endpoint}: {type(error).__name__}: {error}"
            else:
                if status == 200:
                    return self._content(data)
                what = f"judge {self._reward.endpoint}: answers {status}"
                if status != 429 and status < 500:
                    break
            if wait is not None:
                await asyncio.sleep(wait)
        raise RuntimeError(what)

    def _content(self, data: bytes) -> str:
        try:
            return str(parse_json(data.decode())["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError):
            raise RuntimeError(
                f"judge {self._reward.endpoint}: the reply is no chat completion"
            ) from None

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Send one request; redirects are not followed, so that the key is not sent to another host."""
        connection = connection_to(self._url, float(self._reward.request_time))
        try:
            path = self._url.path.rstrip("/") + "/chat/completions"
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read(MOST_BYTES)
        finally:
            connection.close()
