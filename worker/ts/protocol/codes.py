"""gRPC's status codes, their mapping from handlers' HTTP statuses, and workers' exit codes. Pure."""

from __future__ import annotations

import signal
from enum import IntEnum


class Code(IntEnum):
    """gRPC status codes (grpc.github.io/grpc/core/md_doc_statuscodes.html)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


#: Has a worker write the stacks of its threads to stderr, as it has a JVM.
SHOWS_STACKS = signal.SIGQUIT
#: Exit codes with which a worker says why it ends.
BROKEN_FRAME, DEVICE_LOST = 70, 71
REASON_OF_EXIT = {
    BROKEN_FRAME: "The frontend sent it no valid frame",
    DEVICE_LOST: "Its GPU failed, and can't be used by its process any more",
}

_CODE_OF_HTTP = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    413: Code.RESOURCE_EXHAUSTED,
    416: Code.OUT_OF_RANGE,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}


def code_of_http(status: int) -> Code:
    """The gRPC code for a status that a handler set or raised (TorchServe's mapping)."""
    if status in _CODE_OF_HTTP:
        return _CODE_OF_HTTP[status]
    if 200 <= status < 300:
        return Code.OK
    if 400 <= status < 500:
        return Code.FAILED_PRECONDITION
    return Code.INTERNAL if 500 <= status < 600 else Code.UNKNOWN
