"""Limit the time of a whole answer over HTTP. The standard library limits only each wait for more bytes.

A server that sends a byte a second is then as late as one that sends nothing. The limit begins with the connection.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from typing import Any
from urllib.parse import SplitResult


def connection_to(url: SplitResult, seconds: float) -> http.client.HTTPConnection:
    """Return a connection for one request; reading raises `TimeoutError` after some seconds."""
    kind = _HttpsConnection if url.scheme == "https" else _HttpConnection
    assert url.hostname is not None, "the URL was checked"
    return kind(url.hostname, url.port, timeout=seconds)


def limited_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return an opener whose `timeout` is that of a whole answer; reading raises `TimeoutError` then."""
    return urllib.request.build_opener(_HttpHandler, _HttpsHandler, *handlers)


class _UntilDeadline(io.RawIOBase):
    """The bytes of a socket until an instant."""

    def __init__(self, connection: socket.socket, seconds: float, ends_at: float) -> None:
        self._connection = connection
        self._raw = connection.makefile("rb", buffering=0)
        self._seconds, self._ends_at = seconds, ends_at

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._ends_at - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            return self._raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {self._seconds:g} s") from None

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Limited(http.client.HTTPConnection):
    """A connection for one request, whose `timeout` is that of the whole answer."""

    def connect(self) -> None:
        assert self.timeout is not None, "each request has a limit"
        seconds, ends_at = self.timeout, time.monotonic() + self.timeout
        super().connect()

        class Response(http.client.HTTPResponse):
            def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
                super().__init__(sock, *args, **options)
                self.fp.close()
                self.fp = io.BufferedReader(_UntilDeadline(sock, seconds, ends_at))

        self.response_class = Response


class _HttpConnection(_Limited):
    """Without TLS."""


class _HttpsConnection(_Limited, http.client.HTTPSConnection):
    """With TLS."""


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req)
