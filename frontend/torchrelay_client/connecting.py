"""Connections to the server (TLS, keys, channel options; the same for blocking and asyncio), the exceptions that calls
raise, and retries: whether and after which pause a call is tried again, its attempts, and their metadata and time
limits."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from grpc import StatusCode

from torchrelay_client.calls import Call


class CallFailed(Exception):
    """The server refused the call, failed in it, or was not reached.

    `code` is the gRPC status, `message` the server's reason ("" when it gave none), `attempts` how often it was tried.
    """

    def __init__(self, code: StatusCode, message: str, attempts: int = 1) -> None:
        tried = f" (tried {attempts} times)" if attempts > 1 else ""
        super().__init__(f"{code.name}: {message or 'the server gave no reason'}{tried}")
        self.code, self.message, self.attempts = code, message, attempts


class InvalidArgument(CallFailed):
    """The request is invalid; the message gives the reason."""


class NotFound(CallFailed):
    """No such model or version."""


class AlreadyThere(CallFailed):
    """The model, region or file to create already exists."""


class Refused(CallFailed):
    """No key, a wrong one, or one that isn't for this call."""


class Unavailable(CallFailed):
    """The server can't be reached, the connection broke, or no worker can take the call now."""


class DeadlineExceeded(CallFailed):
    """No answer in the time that the caller gave."""


class Cancelled(CallFailed):
    """The caller, or the end of the client, cancelled it."""


class ServerError(CallFailed):
    """The server, or the model, failed."""


_KINDS: dict[StatusCode, type[CallFailed]] = {
    StatusCode.INVALID_ARGUMENT: InvalidArgument,
    StatusCode.NOT_FOUND: NotFound,
    StatusCode.ALREADY_EXISTS: AlreadyThere,
    StatusCode.UNAUTHENTICATED: Refused,
    StatusCode.PERMISSION_DENIED: Refused,
    StatusCode.UNAVAILABLE: Unavailable,
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.CANCELLED: Cancelled,
    StatusCode.INTERNAL: ServerError,
    StatusCode.UNKNOWN: ServerError,
    StatusCode.DATA_LOSS: ServerError,
}


#: gRPC's message for an answer that isn't gRPC's.
_NOT_GRPC = "Received http2 header with status"


def failure(error: Any, attempts: int) -> CallFailed:
    """The exception for an error of grpc's (`grpc.RpcError`, `grpc.aio.AioRpcError`)."""
    code = error.code() or StatusCode.UNKNOWN
    details = error.details() or ""
    if _NOT_GRPC in details:
        details += ": it isn't gRPC that answers there, but HTTP. A server's gRPC ports are 7070 and 7071 by default"
    return _KINDS.get(code, CallFailed)(code, details, attempts)


CHANNELS = 4
TIMEOUT_S = 60.0
#: How soon a broken connection is tried again, at first and at most.
RECONNECT_FIRST_MS, RECONNECT_MOST_MS = 100, 2000

Options = Sequence[tuple[str, Any]]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM files: `ca`, the authority that signed the server's certificate (None: the machine's own); `certificate` and
    `key`, the client's, for servers that ask for one. `server_name`: the name to check, if not the address's."""

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file can't be read, ValueError for a certificate without its key."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS: a client's certificate and its key belong together, one of them is missing")
        files = [None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.certificate)]
        return grpc.ssl_channel_credentials(*files)


def channel_options(tls: TLS | None, more: Options) -> list[tuple[str, Any]]:
    """Each channel has a connection of its own, which comes back soon after the server does; messages of any size."""
    own: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is not None and tls.server_name:
        own.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*own, *more]


class Channels(Generic[C]):
    """`count` channels made by `make`, used in turn. A channel connects with its first call."""

    def __init__(self, make: Callable[[], C], count: int) -> None:
        if count < 1:
            raise ValueError(f"channels={count}: at least one is needed")
        self.all = [make() for _ in range(count)]
        self._methods: list[dict[str, Any]] = [{} for _ in range(count)]
        self._turns = itertools.count()

    def method(self, call: Call[Any]) -> Any:
        turn = next(self._turns) % len(self.all)
        known = self._methods[turn]
        if call.path not in known:
            make = getattr(self.all[turn], call.arity)
            known[call.path] = make(call.path, request_serializer=_written, response_deserializer=call.answer)
        return known[call.path]


def _written(message: Any) -> bytes:
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True)
class Retry:
    """At most `attempts_max` attempts in all. The pause before the next doubles from `first_s` up to `most_s`; each is
    a random part, at least half, of it, so that many clients don't come back at once."""

    attempts_max: int = 5
    first_s: float = 0.1
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or not 0 <= self.first_s <= self.most_s:
            raise ValueError(f"{self}: attempts_max is at least 1, and 0 <= first_s <= most_s")

    def pause_s(self, code: StatusCode, attempts: int, left_s: float | None, chance: float) -> float | None:
        """The seconds to wait before the next attempt, None for giving up: it isn't UNAVAILABLE, `attempts` were
        enough, or there would be nothing left of the deadline. `chance` is a random number from 0 to 1."""
        if code is not StatusCode.UNAVAILABLE or attempts >= self.attempts_max:
            return None
        doublings = min(attempts - 1, 60)
        pause = min(self.most_s, self.first_s * 2**doublings) * (0.5 + chance / 2)
        return pause if left_s is None or pause < left_s else None


USUAL, NEVER = Retry(), Retry(attempts_max=1)


class Attempts:
    """The attempts of one call, which begins now. `timeout_s`: for all of them together, None for no limit."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        self._retry = retry
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._made = 0

    def left_s(self) -> float | None:
        """Seconds left for the next attempt, None without a limit."""
        return None if self._end_s is None else self._end_s - time.monotonic()

    def pause_s(self, error: Any) -> float | None:
        """Counts an attempt that failed with an error of grpc; seconds until the next one, None to give up."""
        self._made += 1
        return self._retry.pause_s(error.code(), self._made, self.left_s(), random.random())

    def failure(self, error: Any) -> CallFailed:
        """The error that the caller gets, made of the last attempt's."""
        return failure(error, self._made)


class CallPolicy:
    """The metadata, time limit and retries that a client adds to each of its calls."""

    def __init__(
        self,
        token: str,
        metadata: Sequence[tuple[str, str]],
        timeout_s: float | None,
        retry: Retry | None,
        idempotent: bool,
    ) -> None:
        given = tuple((name.lower(), value) for name, value in metadata)
        self._metadata = (*given, ("authorization", f"Bearer {token}")) if token else given
        self._timeout_s, self._retry, self._idempotent = timeout_s, retry or NEVER, idempotent

    def sent_with(self, call: Call[Any]) -> tuple[tuple[str, str], ...]:
        return (*call.metadata, *self._metadata)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """The time limit of a call with one answer; None stands for that of the client."""
        return self._timeout_s if asked_s is None else asked_s

    def attempts(self, call: Call[Any], timeout_s: float | None, idempotent: bool | None) -> Attempts:
        """The attempts of a call. `idempotent` None: the client's setting."""
        repeated = call.safe or (self._idempotent if idempotent is None else idempotent)
        return Attempts(self._retry if repeated else NEVER, timeout_s)
