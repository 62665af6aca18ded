"""The exceptions that calls raise."""

from typing import Any

from grpc import StatusCode


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
