"""Calls to a running server, and its refusals as one kind of error with a text for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import empty_pb2

from ts_frontend.authorization.keys import Kind
from ts_frontend.client.keys import ClientKeys
from ts_frontend.protos import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc

PING_TIMEOUT_S = 10.0
LIST_LIMIT = 100

#: What gRPC says when nobody listens, as opposed to a server that answers UNAVAILABLE.
_UNREACHED = ("failed to connect", "connection refused", "dns resolution failed", "name resolution", "no route to host")

#: How a server begins what it says to a call without a good key; TorchServe does, too.
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
    """Where the server is and how to speak to it. `timeout_s`: of one call, None for none. PEM files: `ca_file`, for
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


def _failure(error: Any, address: str) -> CallFailed:
    code, details = error.code().name, error.details() or ""
    if code == "UNAVAILABLE" and any(text in details.lower() for text in _UNREACHED):
        text = (
            f"No server answers at {address} ({details}).\n"
            "Is it running? Start one with: torchserve --start --model-store DIRECTORY --models all\n"
            "Is it elsewhere? Say where with --host, --inference-port and --management-port.\n"
            "Does it speak TLS? Name its authority's certificate with --ca-file; if it asks for yours, --cert."
        )
        return CallFailed(code, text)
    return CallFailed(code, f"{code}: {details or 'the server gave no reason'}")


class Client:
    """One server's two services. Every call raises CallFailed for anything but an answer."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._inference_address = target.address(target.inference_port)
        self._management_address = target.address(target.management_port)
        self._inference_channel = self._channel(self._inference_address)
        self._management_channel = self._channel(self._management_address)
        self._inference = inference_pb2_grpc.InferenceAPIsServiceStub(self._inference_channel)
        self._management = management_pb2_grpc.ManagementAPIsServiceStub(self._management_channel)
        self._metadata = {kind: target.keys.metadata(kind) for kind in (Kind.INFERENCE, Kind.MANAGEMENT)}

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inference_channel.close()
        self._management_channel.close()

    def _channel(self, address: str) -> Any:
        target = self._target
        if target.ca_file is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        files = (target.ca_file, target.certificate_key_file, target.certificate_file)
        pem = [file.read_bytes() if file else None for file in files]
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=_OPTIONS)

    def _ask(self, method: Callable[..., Any], request: Any, kind: Kind, timeout_s: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout_s or self._target.timeout_s, metadata=self._metadata[kind])
        except grpc.RpcError as error:
            raise self._failed(error, kind) from None

    def _failed(self, error: Any, kind: Kind) -> CallFailed:
        failure = _failure(error, self._inference_address if kind is Kind.INFERENCE else self._management_address)
        if failure.code == "PERMISSION_DENIED" and _TOKEN_REFUSED in failure.message:
            return CallFailed(failure.code, f"{failure.message}\n{self._target.keys.advice(kind)}")
        return failure

    def _manage(self, method: Callable[..., Any], request: Any) -> str:
        return str(self._ask(method, request, Kind.MANAGEMENT).msg)

    # --- inference

    def ping(self) -> dict[str, Any]:
        """{"status": "Healthy"} or another word."""
        timeout_s = self._target.timeout_s or PING_TIMEOUT_S
        answer = self._ask(self._inference.Ping, empty_pb2.Empty(), Kind.INFERENCE, timeout_s)
        health: dict[str, Any] = json.loads(answer.health)
        return health

    def predict(self, name: str, version: str, inputs: Mapping[str, bytes]) -> bytes:
        request = inference_pb2.PredictionsRequest(model_name=name, model_version=version, input=inputs)
        return bytes(self._ask(self._inference.Predictions, request, Kind.INFERENCE).prediction)

    def stream(self, name: str, version: str, inputs: Mapping[str, bytes]) -> Iterator[bytes]:
        """The pieces as they come. Closing the iterator, or Ctrl-C, cancels the request."""
        request = inference_pb2.PredictionsRequest(model_name=name, model_version=version, input=inputs)
        call = self._ask(self._inference.StreamPredictions, request, Kind.INFERENCE)
        try:
            for piece in call:
                yield piece.prediction
        except grpc.RpcError as error:
            raise self._failed(error, Kind.INFERENCE) from None
        finally:
            call.cancel()

    # --- management

    def register(self, url: str, **settings: Any) -> str:
        """The server's sentence. `settings`: fields of RegisterModelRequest, None for not given."""
        return self._manage(self._management.RegisterModel, management_pb2.RegisterModelRequest(url=url, **settings))

    def unregister(self, name: str, version: str = "") -> str:
        request = management_pb2.UnregisterModelRequest(model_name=name, model_version=version)
        return self._manage(self._management.UnregisterModel, request)

    def scale(self, name: str, version: str, least: int, most: int | None, timeout_s: int | None) -> str:
        """Asks for so many workers and doesn't wait for them."""
        request = management_pb2.ScaleWorkerRequest(
            model_name=name, model_version=version, min_worker=least, max_worker=most, timeout=timeout_s
        )
        return self._manage(self._management.ScaleWorker, request)

    def set_default(self, name: str, version: str) -> str:
        request = management_pb2.SetDefaultRequest(model_name=name, model_version=version)
        return self._manage(self._management.SetDefault, request)

    def describe(self, name: str, version: str = "", customized: bool = False) -> list[dict[str, Any]]:
        """One description, or all for version "all"."""
        request = management_pb2.DescribeModelRequest(model_name=name, model_version=version, customized=customized)
        descriptions: list[dict[str, Any]] = json.loads(self._manage(self._management.DescribeModel, request))
        return descriptions

    def models(self) -> Iterator[dict[str, str]]:
        """All models, page by page: {"modelName", "modelUrl"} of each one's default version."""
        token = 0
        while True:
            request = management_pb2.ListModelsRequest(limit=LIST_LIMIT, next_page_token=token)
            page = json.loads(self._manage(self._management.ListModels, request))
            yield from page["models"]
            if "nextPageToken" not in page or not page["models"]:
                return
            token = int(page["nextPageToken"])
