"""Data of a running server's console for programs: its events, its workers' last lines (docs/console.md)."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ts_frontend.cli.client import CallFailed, ClientKeys, server_here
from ts_frontend.config.keys import KeyKind

EVENTS = "/console/events"
#: The seconds without an event after which the server counts as gone; events come at least every half second.
SILENCE_S_MAX = 30.0
#: The longest line of an event: the state of a thousand models.
LINE_BYTES_MAX = 64 << 20
#: How a TLS server's answer to a request without TLS begins: an alert.
_TLS_ALERT = "\x15\x03"
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


@dataclass(frozen=True, slots=True)
class ManagementUrl:
    """The management address of a server. `ca_file`: PEM file of the authority that signed its certificate."""

    url: str
    keys: ClientKeys = ClientKeys()
    ca_file: Path | None = None

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallFailed("INVALID_ARGUMENT", f"--url {self.url!r} is not an http:// or https:// address")
        try:
            port = parts.port
        except ValueError:
            raise CallFailed("INVALID_ARGUMENT", f"--url {self.url!r} has no valid port") from None
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            return http.client.HTTPSConnection(parts.hostname, port, timeout=SILENCE_S_MAX, context=context)
        return http.client.HTTPConnection(parts.hostname, port, timeout=SILENCE_S_MAX)

    @contextmanager
    def get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET, as long as the block runs. Raises CallFailed for anything but 200."""
        headers = {name.title(): value for name, value in self.keys.metadata(KeyKind.MANAGEMENT)}
        connection = self._connection()
        try:
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise CallFailed("UNAVAILABLE", _unreached(self.url, error)) from None
            if answer.status != 200:
                raise self._refused(path, answer.status, answer.read(4096))
            try:
                yield answer
            except (OSError, http.client.HTTPException) as error:
                raise CallFailed("UNAVAILABLE", f"The server at {self.url} went away: {error}") from None
        finally:
            connection.close()

    def _refused(self, path: str, status: int, body: bytes) -> CallFailed:
        try:
            message = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            message = f"status {status}"
        if status in (401, 403):
            return CallFailed("PERMISSION_DENIED", f"{message}\n{self.keys.advice(KeyKind.MANAGEMENT)}")
        if status in (404, 405) and path == EVENTS:
            message = f"{self.url} has no console: it isn't torchrelay's management address, or enable_console is off"
        return CallFailed("NOT_FOUND" if status == 404 else "UNKNOWN", message)

    def events(self) -> Iterator[tuple[str, Any]]:
        """The console's events by name, until the server ends the stream. Raises CallFailed."""
        with self.get(EVENTS) as answer:
            name = ""
            while line := answer.readline(LINE_BYTES_MAX):
                word, _, rest = line.decode().rstrip("\n").partition(": ")
                if word == "event":
                    name = rest
                elif word == "data":
                    yield name, json.loads(rest)

    def worker_lines(self, model: str, version: str, worker_id: str) -> list[str]:
        """The last lines that a worker printed, up to a hundred; none if the worker is gone. Raises CallFailed."""
        words = (quote(word, safe="") for word in (model, version, "workers", worker_id))
        try:
            with self.get("/models/" + "/".join(words) + "/log") as answer:
                return [str(line) for line in json.loads(answer.read())["lines"]]
        except CallFailed as error:
            if error.code == "NOT_FOUND":
                return []
            raise


def _unreached(url: str, error: OSError | http.client.HTTPException) -> str:
    return (
        f"No server answers at {url} ({why_unanswered(error)}).\n"
        "Is it running? Start one with: torchserve --start --model-store DIRECTORY --models all\n"
        f"{server_here(urlsplit(url).netloc)}"
        "Is it elsewhere? Give its management address with --url or TORCHSERVE_MANAGEMENT_URL."
    )


def new_lines(before: Sequence[str], now: Sequence[str]) -> Sequence[str]:
    """The lines of `now`, a worker's last ones, that came after `before`, the last ones of an earlier read."""
    for start in range(len(before)):
        tail = before[start:]
        if list(now[: len(tail)]) == list(tail):
            return now[len(tail) :]
    return now


def why_unanswered(error: OSError | http.client.HTTPException) -> str:
    """The reason why an HTTP request got no answer, for people."""
    if isinstance(error, http.client.BadStatusLine) and str(error).startswith(_TLS_ALERT):
        return "it speaks TLS: write https:// instead of http://"
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection without an answer; if it speaks TLS, write https:// instead of http://"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't trusted: {error.verify_message}; name its authority's with --ca-file"
    if isinstance(error, ssl.SSLError) and error.reason and any(word in error.reason for word in _NO_TLS):
        return f"it doesn't seem to speak TLS: write http:// instead of https://; {error}"
    return str(error) or type(error).__name__
