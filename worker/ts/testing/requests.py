"""Requests of clients and their results: answers, pieces of streams, failures with both statuses."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ts.protocol.codes import Code, code_of_http
from ts.protocol.frames import CHUNK_COST_BYTES, Cancel, Chunk, Credit, Failed, Input, Message

CANCELLED_STATUS = 499
_NOT_GIVEN: Any = object()


@dataclass(frozen=True)
class Request:
    """A request. `body`: the body of an HTTP request: bytes, text, or a value that is sent as JSON; `content_type`:
    its content type, by default the fitting one. `inputs`: inputs by name, as in gRPC. `timeout_s`: seconds that its
    caller waits."""

    body: Any = _NOT_GIVEN
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None
    timeout_s: float | None = None
    request_id: str | None = None

    def parts(self) -> list[Input]:
        """The request's parts for the worker."""
        found = [Input(name, "", bytes(value)) for name, value in self.inputs.items()]
        if self.body is _NOT_GIVEN:
            return found
        given = self.content_type
        if isinstance(self.body, (bytes, bytearray, memoryview)):
            return [*found, Input("body", given or "", bytes(self.body))]
        if isinstance(self.body, str):
            return [*found, Input("body", "text/plain" if given is None else given, self.body.encode())]
        data = json.dumps(self.body).encode()
        return [*found, Input("body", "application/json" if given is None else given, data)]

    @staticmethod
    def of(value: Any) -> Request:
        """A request, or one with that body."""
        return value if isinstance(value, Request) else Request(value)


@dataclass(frozen=True)
class Answer:
    """An answer: `data` is its joined pieces. Status, phrase and headers: 200, "" and {}, or the handler's."""

    pieces: tuple[bytes, ...]
    status: int = 200
    phrase: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def text(self) -> str:
        return self.data.decode()

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def grpc_code(self) -> str:
        """The status of a gRPC call, by its name."""
        return code_of_http(self.status).name


class RequestFailed(Exception):
    """A request has no answer. `status`: HTTP's; `grpc_code`: gRPC's, by its name; `traceback`: of the handler's
    exception, "" where it isn't known. The message is the one that clients see while the server explains errors
    (docs/handlers.md)."""

    def __init__(self, status: int, message: str, grpc_code: str, traceback: str = "") -> None:
        super().__init__(f"HTTP {status}, gRPC {grpc_code}: {message}" + (f"\n{traceback}" if traceback else ""))
        self.status, self.message, self.grpc_code, self.traceback = status, message, grpc_code, traceback

    @staticmethod
    def of(failed: Failed) -> RequestFailed:
        code = Code.INTERNAL if failed.by_handler else code_of_http(failed.code)
        return RequestFailed(failed.code, failed.message, code.name, failed.traceback)


class Streamed:
    """A running request: an iterator over the pieces of its answer. `send` sends messages to the worker; `limit_s`:
    seconds for a piece, after which TimeoutError is raised. Leaving it as a context manager cancels it."""

    def __init__(self, job_id: int, send: Callable[[Message], None], limit_s: float) -> None:
        self.job_id = job_id
        self._send, self.limit_s = send, limit_s
        self._came: queue.SimpleQueue[Chunk | Failed] = queue.SimpleQueue()
        self._first: Chunk | None = None
        self._failed: Failed | None = None
        self._over = False

    def put(self, message: Chunk | Failed) -> None:
        """Takes a message of the worker; from its thread."""
        self._came.put(message)

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over:
            self.cancel()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next piece; empty ones, which clients don't see, are left out. Raises RequestFailed."""
        while not self._over:
            data = self._next()
            if data:
                return data
        if self._failed is not None:
            raise RequestFailed.of(self._failed)
        raise StopIteration

    def _next(self) -> bytes:
        try:
            message = self._came.get(timeout=self.limit_s)
        except queue.Empty:
            raise TimeoutError(f"the handler gave nothing for {self.limit_s:g} s") from None
        if isinstance(message, Failed):
            self._failed, self._over = message, True
            return b""
        self._first = self._first or message
        self._over = message.last
        if not message.last:
            self._send(Credit(self.job_id, len(message.data) + CHUNK_COST_BYTES))
        return bytes(message.data)

    def cancel(self) -> None:
        """Cancels the request, like a client that closes its connection, and returns when the handler has ended it."""
        if self._over:
            return
        self._send(Cancel(self.job_id))
        while not self._over:
            self._next()

    @property
    def cancelled(self) -> bool:
        """Whether it ended by the caller's cancel."""
        return self._failed is not None and self._failed.code == CANCELLED_STATUS

    def answer(self) -> Answer:
        """The rest of the answer, whole. Raises RequestFailed."""
        pieces = tuple(self)
        head = self._first or Chunk(self.job_id, b"")
        return Answer(pieces, head.status, head.phrase, dict(head.headers))
