"""Calls to a running server; each refusal becomes one kind of error with a readable text."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
from google.protobuf import empty_pb2, wrappers_pb2

from ts_frontend.authorization.authorization import NAME, read_keys
from ts_frontend.config.keys import BadKeys, KeyKind, Keys, time_text
from ts_frontend.config.kinds import is_loopback
from ts_frontend.process import PidFileError, pid_path, running_server
from ts_frontend.protos import (
    inference_pb2,
    inference_pb2_grpc,
    management_pb2,
    management_pb2_grpc,
    rollouts_pb2,
    rollouts_pb2_grpc,
)
from ts_frontend.protos.google_rpc_status_pb2 import Status


class NoKeys(Exception):
    """The named key file can't be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of a client: `token` is sent with every call; without it, the key in `file` for the kind of call."""

    token: str | None = None
    keys: Keys | None = None
    file: Path | None = None

    def metadata(self, kind: KeyKind) -> tuple[tuple[str, str], ...]:
        """The metadata for a call of that kind, () without a key."""
        text = self.token
        if text is None and self.keys and self.keys.get(kind):
            text = self.keys[kind][0].secret.decode("ascii")
        return (("authorization", f"Bearer {text}"),) if text else ()

    def advice(self, kind: KeyKind, now_s: float | None = None) -> str:
        """The advice after a refused call: which key was sent, and where to find a valid one."""
        return (
            f"The server requires its {kind.value} key; {self._sent(kind, time.time() if now_s is None else now_s)}.\n"
            f"The server's keys are in {NAME} in the directory in which it was started: run the command there, or say\n"
            "where the file is with --key-file. Or give the key: --token, or TORCHSERVE_TOKEN in the environment.\n"
            f"A new key, if the old one has expired: curl -H 'Authorization: Bearer API_KEY' "
            f"'http://HOST:8081/token?type={kind.value}'"
        )

    def _sent(self, kind: KeyKind, now_s: float) -> str:
        if self.token is not None:
            return "the one of --token (or TORCHSERVE_TOKEN) isn't that"
        if self.keys is None or self.file is None:
            return "none was sent"
        if not self.keys.get(kind):
            return f"{self.file} has none, and none was sent"
        expires_s = self.keys[kind][0].expires_s
        if expires_s <= now_s:
            return f"the one of {self.file} has expired, at {time_text(expires_s)}"
        return f"the one of {self.file} isn't that"


def find_keys(token: str | None, file: Path | None, host: str) -> ClientKeys:
    """The keys for a server at `host`. Without `file`, the key_file.json of this directory is used if the server is on
    this machine: other machines' servers mustn't get its keys.

    :raises NoKeys: `token` can't be a key; `file` was named and holds none.
    """
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise NoKeys("--token (or TORCHSERVE_TOKEN): a key has printable ASCII characters and no blanks")
    if token:
        return ClientKeys(token)
    found = file or Path(NAME).absolute()
    if file is None and not (is_loopback(host) and found.is_file()):
        return ClientKeys()
    try:
        return ClientKeys(None, read_keys(found), found)
    except BadKeys as error:
        if file is None:
            return ClientKeys()
        raise NoKeys(str(error)) from None


PING_TIMEOUT_S = 10.0
LIST_LIMIT = 100

#: gRPC's messages when no server listens, as opposed to a server that answers UNAVAILABLE.
_UNREACHED = ("failed to connect", "connection refused", "dns resolution failed", "name resolution", "no route to host")

#: The beginning of a server's message to a call without a valid key, also of TorchServe's.
_TOKEN_REFUSED = "Token Auth"

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


class CallFailed(Exception):
    """The server refused, failed or can't be reached; `code` is the name of the gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address and connection options. `timeout_s`: of one call, None for none. PEM files: `ca_file`, for
    TLS; `certificate_file` and `certificate_key_file`, the client's own, for servers that ask for one."""

    host: str = "127.0.0.1"
    inference_port: int = 7070
    management_port: int = 7071
    timeout_s: float | None = None
    ca_file: Path | None = None
    keys: ClientKeys = ClientKeys()
    certificate_file: Path | None = None
    certificate_key_file: Path | None = None

    def address(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{port}"

    def channel(self, address: str, kind: Any) -> Any:
        """A channel to the address; `kind`: grpc or grpc.aio."""
        if self.ca_file is None:
            return kind.insecure_channel(address, options=_OPTIONS)
        files = (self.ca_file, self.certificate_key_file, self.certificate_file)
        pem = [file.read_bytes() if file else None for file in files]
        return kind.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=_OPTIONS)


#: gRPC's message for an answer of another protocol, and the server's for a call of another API.
_NOT_GRPC, _OTHER_API = "received http2 header with status", "is unimplemented"


#: The type of a RequestInfo, whose first field is the request's ID, a text.
_REQUEST_INFO = "type.googleapis.com/google.rpc.RequestInfo"


def _failure(error: Any, address: str) -> CallFailed:
    code, details = error.code().name, error.details() or ""
    if _NOT_GRPC in details.lower():
        text = (
            f"{address} answers, but not gRPC ({details}): it is the address of an HTTP API, or of a proxy.\n"
            "The gRPC ports are 7070 and 7071, unless the server says others when it starts: --inference-port, "
            "--management-port"
        )
        return CallFailed(code, text)
    if code == "UNIMPLEMENTED" and _OTHER_API in details:
        text = (
            f"{code}: {details} at {address}.\nThe inference and the management API have ports of their own: is one "
            "given for the other? --inference-port (7070), --management-port (7071)"
        )
        return CallFailed(code, text)
    if code == "UNAVAILABLE" and any(text in details.lower() for text in _UNREACHED):
        text = (
            f"No server answers at {address} ({details}).\n"
            "Is it running? Start one with: torchserve --start --model-store DIRECTORY --models all\n"
            f"{server_here(address)}"
            "Is it elsewhere? Give its address with --host, --inference-port and --management-port.\n"
            "Does it speak TLS? Name its authority's certificate with --ca-file; if it asks for yours, --cert. "
            "If it has no TLS, leave out --ca-file."
        )
        return CallFailed(code, text)
    return CallFailed(code, f"{code}: {details or 'the server gave no reason'}{_where_logged(error, details)}")


def _where_logged(error: Any, details: str) -> str:
    """A hint at the request's ID in the log, for an error of the handler or of its worker."""
    status = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    for one in Status.FromString(status).details:
        if one.type_url == _REQUEST_INFO:
            request_id = wrappers_pb2.StringValue.FromString(one.value).value
            hint = "torchserve logs MODEL shows the worker's last output, the server's log has all of it"
            return f"\n{hint}" if request_id in details else f" (request ID {request_id})\n{hint}"
    return ""


def server_here(address: str) -> str:
    """A line about the server on this machine, for an `address` (HOST:PORT) that did not answer; "" if none runs, or
    for an address of another machine."""
    host = address.rpartition(":")[0].strip("[]")
    if not is_loopback(host):
        return ""
    with contextlib.suppress(PidFileError, psutil.Error):
        if server := running_server(pid_path()):
            listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            ports = sorted({one.laddr.port for one in listening if one.laddr and one.pid == server.pid})
            at = f", and listens on the ports {', '.join(map(str, ports))}" if ports else ""
            return f"A server runs on this machine as process {server.pid}{at}.\n"
    return ""


class Client:
    """A client of a server's inference and management services. Every call raises CallFailed on failure."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._inference_address = target.address(target.inference_port)
        self._management_address = target.address(target.management_port)
        self._inference_channel = target.channel(self._inference_address, grpc)
        self._management_channel = target.channel(self._management_address, grpc)
        self._inference = inference_pb2_grpc.InferenceAPIsServiceStub(self._inference_channel)
        self._management = management_pb2_grpc.ManagementAPIsServiceStub(self._management_channel)
        self._rollouts = rollouts_pb2_grpc.RolloutsStub(self._management_channel)
        self._metadata = {kind: target.keys.metadata(kind) for kind in (KeyKind.INFERENCE, KeyKind.MANAGEMENT)}

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inference_channel.close()
        self._management_channel.close()

    def _ask(self, method: Callable[..., Any], request: Any, kind: KeyKind, timeout_s: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout_s or self.target.timeout_s, metadata=self._metadata[kind])
        except grpc.RpcError as error:
            raise self._failed(error, kind) from None

    def _failed(self, error: Any, kind: KeyKind) -> CallFailed:
        failure = _failure(error, self._inference_address if kind is KeyKind.INFERENCE else self._management_address)
        if failure.code == "PERMISSION_DENIED" and _TOKEN_REFUSED in failure.message:
            return CallFailed(failure.code, f"{failure.message}\n{self.target.keys.advice(kind)}")
        return failure

    def _manage(self, method: Callable[..., Any], request: Any) -> str:
        return str(self._ask(method, request, KeyKind.MANAGEMENT).msg)

    # --- inference

    def ping(self) -> dict[str, Any]:
        """{"status": "Healthy"} or another status."""
        timeout_s = self.target.timeout_s or PING_TIMEOUT_S
        answer = self._ask(self._inference.Ping, empty_pb2.Empty(), KeyKind.INFERENCE, timeout_s)
        health: dict[str, Any] = json.loads(answer.health)
        return health

    def predict(self, name: str, version: str, inputs: Mapping[str, bytes]) -> bytes:
        request = inference_pb2.PredictionsRequest(model_name=name, model_version=version, input=inputs)
        return bytes(self._ask(self._inference.Predictions, request, KeyKind.INFERENCE).prediction)

    def stream(self, name: str, version: str, inputs: Mapping[str, bytes]) -> Iterator[bytes]:
        """Yields the pieces as they arrive. Closing the iterator, or Ctrl-C, cancels the request."""
        request = inference_pb2.PredictionsRequest(model_name=name, model_version=version, input=inputs)
        call = self._ask(self._inference.StreamPredictions, request, KeyKind.INFERENCE)
        try:
            for piece in call:
                yield piece.prediction
        except grpc.RpcError as error:
            raise self._failed(error, KeyKind.INFERENCE) from None
        finally:
            call.cancel()

    # --- management

    def register(self, url: str, **settings: Any) -> str:
        """Returns the server's message. `settings`: fields of RegisterModelRequest, None for not given."""
        return self._manage(self._management.RegisterModel, management_pb2.RegisterModelRequest(url=url, **settings))

    def unregister(self, name: str, version: str = "") -> str:
        request = management_pb2.UnregisterModelRequest(model_name=name, model_version=version)
        return self._manage(self._management.UnregisterModel, request)

    def scale(self, name: str, version: str, least: int, most: int | None, timeout_s: int | None) -> str:
        """Sets the numbers of workers without waiting for them."""
        request = management_pb2.ScaleWorkerRequest(
            model_name=name, model_version=version, min_worker=least, max_worker=most, timeout=timeout_s
        )
        return self._manage(self._management.ScaleWorker, request)

    def set_default(self, name: str, version: str) -> str:
        request = management_pb2.SetDefaultRequest(model_name=name, model_version=version)
        return self._manage(self._management.SetDefault, request)

    def rollout(self, name: str, action: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The rollout after the action."""
        request = rollouts_pb2.RolloutRequest(model_name=name, action=action, settings=json.dumps(settings))
        found: dict[str, Any] = json.loads(self._manage(self._rollouts.Rollout, request))
        return found

    def describe(
        self, name: str, version: str = "", customized: bool = False, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        request = management_pb2.DescribeModelRequest(model_name=name, model_version=version, customized=customized)
        answer = self._ask(self._management.DescribeModel, request, KeyKind.MANAGEMENT, timeout_s)
        descriptions: list[dict[str, Any]] = json.loads(answer.msg)
        return descriptions

    def models(self, timeout_s: float | None = None) -> Iterator[dict[str, str]]:
        """All models, page by page: {"modelName", "modelUrl"} of each one's default version."""
        token = 0
        while True:
            request = management_pb2.ListModelsRequest(limit=LIST_LIMIT, next_page_token=token)
            page = json.loads(self._ask(self._management.ListModels, request, KeyKind.MANAGEMENT, timeout_s).msg)
            yield from page["models"]
            if "nextPageToken" not in page or not page["models"]:
                return
            token = int(page["nextPageToken"])


POLL_S = 0.2

Description = dict[str, Any]


class WorkersFailed(Exception):
    """A worker failed during the wait for its model; `last` is the description's `lastWorkerFailure`."""

    def __init__(self, description: Description) -> None:
        self.name = str(description["modelName"])
        self.model = f"{self.name} {description['modelVersion']}"
        self.last: dict[str, Any] = description["lastWorkerFailure"]
        super().__init__(f"{self.model}: {self.last.get('reason', '')}")


def count_ready(description: Description) -> int:
    return sum(worker["status"] == "READY" for worker in description["workers"])


def wait_for_workers(
    describe: Callable[[], Description],
    count: int,
    known_failure: object,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> Description:
    """Polls until exactly `count` workers are ready, and reports progress; returns the last description.

    Ends early if another client sets another number.

    `known_failure`: the previous `lastWorkerFailure`; another one raises WorkersFailed. There is no timeout: the server
    ends a load that takes too long, and that is a failure.
    """
    said = ""
    while True:
        description = describe()
        if description["minWorkers"] != count:
            say(f"another client asks for {description['minWorkers']} workers now")
            return description
        ready, running = count_ready(description), len(description["workers"])
        state = f"{ready} of {count} workers ready" + (f", {running - count} ending" if running > count else "")
        if state != said:
            say(f"{description['modelName']} {description['modelVersion']}: {state}")
            said = state
        if ready == running == count:
            return description
        last = description.get("lastWorkerFailure")
        if last is not None and last != known_failure:
            raise WorkersFailed(description)
        pause(POLL_S)
