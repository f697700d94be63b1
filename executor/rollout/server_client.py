"""Talk to an inference server over HTTP: requests, streams of events, and whether the server is alive.

No message and no log contains the API key. Redirects are not followed, so that the key goes to no other host.
"""

from __future__ import annotations

import asyncio
import json
import logging
import reprlib
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx

from streamrl.executor.rollout.server_api import AnswerError, Post, ServerSettings

MOST_SHOWN = 300
"""Characters of a server's error that a message contains."""
MOST_LINE = 2**24
"""Bytes of one line of a stream, or of another answer (an assumption): some 250,000 tokens of a server whose events have the whole output."""
DATA, DONE = b"data:", b"[DONE]"
"""Begin of an event in a stream (server-sent events), and the content of the last one."""
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request


class ServerError(RuntimeError):
    """A server rejected a request, or failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """One server and its connections."""

    def __init__(self, settings: ServerSettings) -> None:
        self.url = settings.url.rstrip("/")
        headers = {} if settings.key is None else {"Authorization": f"Bearer {settings.key}"}
        verify = _trusted(settings.certificate)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=settings.timeout),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            verify=verify,
            trust_env=False,  # no proxy between a run and its servers
        )

    async def get(self, path: str, seconds: float) -> Any:
        """Return the answer of a path, decoded if it is JSON.

        Raises:
            ServerError: another status than 200.
            AnswerError: the answer is malformed JSON.
            httpx.HTTPError: there is no whole answer within some seconds.
        """
        try:
            async with asyncio.timeout(seconds):  # httpx limits only the wait for each piece
                return await self._whole("GET", path)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from None

    async def post(self, post: Post, seconds: float | None = None) -> Any:
        """Send a request and return its answer; `seconds` limits the time until it is complete.

        Raises:
            ServerError: another status than 200.
            AnswerError: the answer is malformed JSON, or too long.
            httpx.HTTPError: the server is gone, or gives no whole answer in time.
        """
        try:
            async with asyncio.timeout(seconds):  # httpx limits only the wait for each piece
                return await self._whole("POST", post.path, json=post.body, params=post.query)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from None
        except ServerError as error:
            if error.status == httpx.codes.NOT_FOUND and post.may_be_missing:
                return None
            raise

    async def _whole(self, method: str, path: str, **options: Any) -> Any:
        """Return the decoded answer to a request, of at most `MOST_LINE` bytes."""
        content = bytearray()
        async with self._http.stream(method, path, **options) as answer:
            async for piece in answer.aiter_bytes():
                content += piece
                if len(content) > MOST_LINE:
                    raise AnswerError(
                        f"{self.url}{path} answers with more than {MOST_LINE >> 20} MiB"
                    )
        return self._content(answer, bytes(content))

    async def stream(self, post: Post) -> AsyncIterator[Any]:
        """Send a request and yield each event of its answer; closing the iterator ends the request on the server.

        Raises:
            ServerError: another status than 200.
            AnswerError: an event is malformed JSON or too long.
            httpx.HTTPError: the server is gone.
        """
        async with self._http.stream("POST", post.path, json=post.body) as answer:
            if answer.status_code != httpx.codes.OK:
                self._content(answer, (await anext(self._lines(answer), b""))[:MOST_SHOWN])
            async for line in self._lines(answer):
                content = line.removeprefix(DATA).strip()
                if not line.startswith(DATA) or content == DONE:
                    continue
                yield _decoded(content, f"{self.url}{post.path}")

    async def _lines(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        line = bytearray()
        async for piece in answer.aiter_bytes():
            first, *later = piece.split(b"\n")
            line += first
            for each in later:
                yield bytes(line)
                line = bytearray(each)
            if len(line) > MOST_LINE:
                where = f"{self.url}{answer.request.url.path}"
                raise AnswerError(f"{where} sends a line of more than {MOST_LINE >> 20} MiB")
        yield bytes(line)

    async def close(self) -> None:
        """Close all connections; the server aborts their requests."""
        await self._http.aclose()

    def _content(self, answer: httpx.Response, content: bytes) -> Any:
        where = f"{self.url}{answer.request.url.path}"
        if answer.status_code != httpx.codes.OK:
            text = " ".join(content.decode(errors="replace").split())[:MOST_SHOWN]
            raise ServerError(f"{where} answers {answer.status_code}: {text}", answer.status_code)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return _decoded(content, where) if is_json else content.decode(errors="replace")


def find_fault(settings: ServerSettings, paths: Iterable[str]) -> str | None:
    """Return why a server does not answer all paths with status 200; None if it does."""

    async def ask() -> str | None:
        client = ServerClient(settings)
        try:
            for path in paths:
                await client.get(path, settings.timeout)
        except (ServerError, AnswerError) as error:
            return str(error)
        except httpx.HTTPError as error:
            return f"{settings.url} does not answer: {type(error).__name__}"
        finally:
            await client.close()
        return None

    return asyncio.run(ask())


def _decoded(content: str | bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise AnswerError(f"{where} answers malformed JSON: {reprlib.repr(content)}") from None


def _trusted(certificate: str | None) -> ssl.SSLContext | bool:
    """Return the certificates to trust; those of the system without a file."""
    return True if certificate is None else ssl.create_default_context(cafile=certificate)
