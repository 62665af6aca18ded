"""The kinds of errors, with their statuses for clients.

`code` is the gRPC status code, `http_status` the HTTP one, `type_name` the `type` member of TorchServe's JSON
error bodies (as of TorchServe 0.12). The message gives the reason, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ts.protocol.codes import Code as Code
from ts.protocol.codes import code_of_http as code_of_http

#: The line of TorchServe's worker before the traceback of a model that it couldn't load.
PROCESS_DIED = "Backend worker process died."


class ServeError(Exception):
    """The base of all errors; each kind is a subclass."""

    code = Code.INTERNAL
    http_status = 500
    type_name = "InternalServerException"
    #: The remedy for callers or the operator: a sentence of docs/errors.md.
    remedy = ""
    #: Seconds after which the same request may succeed, if known.
    retry_after_s: float | None = None
    #: Makes the end of the message that names what is served. Only callers who may see that are told it.
    hint: Callable[[], str] | None = None

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.__class__.__name__

    def told(self) -> str:
        """The message with the names of what is there, for callers who may see them."""
        return self.message if self.hint is None else f"{self.message}{self.hint()}"

    def ending(self) -> Ending:
        """The error as a value, which can be kept without the frames that raised it."""
        return Ending(type(self), self.args, dict(self.__dict__))


class Ending(NamedTuple):
    """An error as a value. A raised exception refers to the frames that it went through and the request's bytes in
    them; an object in one of these frames that keeps the exception is freed only by the garbage collector. So objects
    keep an Ending, and every raise makes a new exception."""

    kind: type[ServeError]
    arguments: tuple[Any, ...]
    details: Mapping[str, Any]

    def error(self) -> ServeError:
        """A new exception of that kind, made without calling its constructor."""
        found = self.kind.__new__(self.kind, *self.arguments)
        found.__dict__.update(self.details)
        return found

    def plain(self) -> tuple[str, list[Any], dict[str, Any]]:
        """The error for another process, which `ending_of` reads; without its hint."""
        details = {key: value for key, value in self.details.items() if isinstance(value, (str, int, float))}
        return self.kind.__name__, [value for value in self.arguments if isinstance(value, (str, int))], details


def ending_of(name: str, arguments: Sequence[Any], details: Mapping[str, Any]) -> Ending:
    """The Ending of which another process has sent the `plain` form; a kind that isn't known here is a ServeError."""
    kinds: list[type[ServeError]] = [ServeError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next((one for one in kinds if one.__name__ == name), ServeError)
    code = {"code": Code(details["code"])} if "code" in details else {}
    return Ending(kind, tuple(arguments), {**details, **code})


class InvalidArgument(ServeError):
    remedy = "Correct the value that the message names; repeating it fails again."
    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "BadRequestException"


class InvalidArchive(ServeError):
    """The archive can't be used: broken, unsafe, or made for something else."""

    remedy = "Correct the archive; `torchserve check ARCHIVE` shows the fault without a server."
    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "InvalidModelException"


class DownloadFailed(ServeError):
    remedy = "Check that the server's machine can reach the URL, then register again."
    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "DownloadArchiveException"


class ArchiveNotFound(ServeError):
    """No archive at that URL."""

    remedy = "Name a file of the model store, or open the URL with `allowed_urls`."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ModelNotFoundException"


class UrlForbidden(ArchiveNotFound):
    """The URL isn't one that may be used; its status is TorchServe's."""

    remedy = "Open the URL with `allowed_urls`, or put the model into the model store."


class ArchiveExists(ServeError):
    """A download would overwrite a file of the model store."""

    remedy = "Delete the file from the model store, or register it by its name there."
    code, http_status, type_name = Code.ALREADY_EXISTS, 500, "InternalServerException"


class ModelNotFound(ServeError):
    remedy = "See `torchserve list`; register the model, or correct its name."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ModelNotFoundException"

    def __init__(self, name: str, hint: Callable[[], str] | None = None) -> None:
        super().__init__(f"Model not found: {name}")
        self.hint = hint


class ModelVersionNotFound(ServeError):
    remedy = "See `torchserve describe MODEL`; leave the version out for the default one."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ModelVersionNotFoundException"

    def __init__(self, name: str, version: str, message: str = "", hint: Callable[[], str] | None = None) -> None:
        super().__init__(message or f"Model version: {version} does not exist for model: {name}")
        self.hint = hint


class ModelExists(ServeError):
    remedy = "Unregister that version first, or pack the archive with a new version."
    code, http_status, type_name = Code.ALREADY_EXISTS, 409, "ConflictStatusException"

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"Model version {version} is already registered for model {name}")


class AdapterNotFound(ServeError):
    remedy = "See `GET /models/MODEL/adapters`; load the adapter, or correct its name."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ModelNotFoundException"


class AdapterExists(ServeError):
    """The name is that of a model, or of an adapter from another folder."""

    remedy = "Unload the adapter first, or give another name."
    code, http_status, type_name = Code.ALREADY_EXISTS, 409, "ConflictStatusException"


class MemoryFull(ServeError):
    """A model doesn't fit into the memory beside the others."""

    remedy = "Unregister a model that isn't needed, or raise `registered_memory_max`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 507, "InsufficientStorageException"


class DefaultVersionInUse(ServeError):
    remedy = "Make another version the default, then unregister this one."
    code, http_status, type_name = Code.FAILED_PRECONDITION, 403, "InvalidModelVersionException"

    def __init__(self, name: str) -> None:
        super().__init__(f"Cannot remove default version for model {name}")


class RolloutNotFound(ServeError):
    """The model has no rollout, or none that the call could change."""

    remedy = "Begin one: `torchserve rollout MODEL VERSION`."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ModelNotFoundException"


class WorkflowNotFound(ServeError):
    """No workflow of that name, or no archive at that URL."""

    remedy = "See `GET /workflows`; register the workflow, or correct its name."
    code, http_status, type_name = Code.NOT_FOUND, 404, "WorkflowNotFoundException"


class WorkflowExists(ServeError):
    remedy = "Unregister the workflow first."
    code, http_status, type_name = Code.ALREADY_EXISTS, 409, "ConflictStatusException"

    def __init__(self, name: str) -> None:
        super().__init__(f"Workflow {name} is already registered.")


class InvalidWorkflow(ServeError):
    """The workflow's archive or specification can't be used."""

    remedy = "Correct the archive or the specification at the node that the message names."
    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "InvalidWorkflowException"


class InvalidGraph(InvalidWorkflow):
    type_name = "InvalidDAGException"


class WorkflowFailed(ServeError):
    """Nodes of the workflow couldn't be registered, or couldn't be removed in time."""

    remedy = "Fix the node that the message names, and register again."
    type_name = "WorkflowException"


class NoWorker(ServeError):
    """The model has no worker, and none will be started for the request."""

    remedy = "Give the model a worker: `torchserve scale MODEL 1`."
    code, http_status, type_name = Code.UNAVAILABLE, 503, "ServiceUnavailableException"


class ModelNotLoaded(NoWorker):
    """The last start of every worker ended before it had loaded the model; the message carries the cause."""

    remedy = "Fix the cause that the message names; the server keeps trying, and `Retry-After` says when."

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(ServeError):
    remedy = "Repeat after a pause; more workers or a larger `job_queue_size` make room."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableException"


class LimitExceeded(ServeError):
    """The client has used up one of its limits; the message names the limit. `kind`: of which quantity it is."""

    remedy = "Repeat after the time that the message and `Retry-After` name; `limits.yaml` has the limits."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 429, "TooManyRequestsException"

    def __init__(self, message: str, retry_after_s: float, kind: str) -> None:
        super().__init__(message)
        self.retry_after_s, self.kind = retry_after_s, kind


class SequenceOver(ServeError):
    """The sequence has ended with the state that its requests need: start it again."""

    remedy = "Begin the sequence again."
    code, http_status, type_name = Code.ABORTED, 503, "ServiceUnavailableException"


class Draining(ServeError):
    """The server or the model is shutting down and takes no new requests."""

    remedy = "Send the request to another server; this one is shutting down."
    code, http_status, type_name = Code.UNAVAILABLE, 503, "ServiceUnavailableException"


class DeadlineExceeded(ServeError):
    remedy = "Give the request more time, or the model more workers."
    code, http_status, type_name = Code.DEADLINE_EXCEEDED, 504, "RequestTimeoutException"


class Cancelled(ServeError):
    remedy = "Nothing: the client itself ended the call."
    code, http_status, type_name = Code.CANCELLED, 499, "RequestCancelledException"


class MessageTooLarge(ServeError):
    remedy = "Send less, or raise `max_request_size` or `max_response_size`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 413, "TooLargeException"


class PermissionDenied(ServeError):
    remedy = "Send `Authorization: Bearer KEY` with a valid key of the right kind."
    code, http_status, type_name = Code.PERMISSION_DENIED, 400, "InvalidKeyException"


class ModelApiDisabled(ServeError):
    remedy = "Start the server with `--enable-model-api`."
    code, http_status, type_name = Code.PERMISSION_DENIED, 405, "MethodNotAllowedException"

    def __init__(self) -> None:
        super().__init__("Model API disabled. Start the server with --enable-model-api to register and unregister.")


class Unimplemented(ServeError):
    remedy = "Use another call: this server, or this model, doesn't have it."
    code, http_status, type_name = Code.UNIMPLEMENTED, 501, "NotImplementedException"


class UnregisterTimeout(ServeError):
    remedy = "Repeat the call; a larger `unregister_model_timeout` gives it more time."
    code, http_status, type_name = Code.DEADLINE_EXCEEDED, 408, "RequestTimeoutException"

    def __init__(self, name: str) -> None:
        super().__init__(f"Timed out while cleaning resources: {name}")


class WorkerStartFailed(ServeError):
    """No worker of the model could be started or could load it; the message carries the reason. `asked_for`: a call
    stopped the worker, which is no fault."""

    asked_for = False
    remedy = "Fix the cause that the message names; the model's log has the whole traceback."
    code, http_status = Code.INTERNAL, 500


class HandlerFailed(ServeError):
    """The user's handler raised, or answered with an error, which has TorchServe's HTTP status. A fault of the handler,
    not the request, is INTERNAL, as gRPC clients retry UNAVAILABLE calls. `by_handler`: it is such a fault.
    `traceback`: of the handler's exception, where callers may see it."""

    remedy = "Fix the handler, or the request; the model's log has the traceback."

    def __init__(self, http_status: int, message: str, traceback: str = "", *, by_handler: bool = False) -> None:
        super().__init__(message)
        self.http_status, self.traceback, self.by_handler = http_status, traceback, by_handler
        self.code = Code.INTERNAL if by_handler else code_of_http(http_status)


#: The client's pause before it asks again after a worker's death: about the time that the next one takes to start.
RETRY_AFTER_S = 1.0


class WorkerDied(ServeError):
    """The worker ended while it ran the request. Only this request is lost: UNAVAILABLE with a delay, which gRPC
    clients retry. A request that hung its worker (`hung`) would also hang the next one: INTERNAL. Over HTTP it has
    TorchServe's status: 500, or 507 for a process killed by signal 9, as by the kernel when memory runs out."""

    remedy = "Repeat the request; if it happens again, check memory limits and the log."

    def __init__(self, message: str, http_status: int = 500, *, hung: bool = False) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.code = Code.INTERNAL if hung else Code.UNAVAILABLE
        self.retry_after_s = None if hung else RETRY_AFTER_S


class Quarantined(ServeError):
    """The request ran alone on a second worker that also died. INTERNAL, which gRPC clients don't retry: it would kill
    a third worker."""

    remedy = "Don't repeat it: the request has ended two workers. The log has its ID."


class ClientGone(Exception):
    """The client reset the stream or closed the connection: no answer can be sent."""
