"""Calls to any running server over HTTP and gRPC; the answers are data, in the format of the recorded exchanges.

A call is `{"http": "GET /ping", …}` or `{"grpc": "/package.Service/Method", …}`; an answer `{"status", "headers"}` with
`json`, `text` or `events`, or `{"code"}` with `base64` (of one whole message), `message`,
`messages` or `error`.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor

from ts.protocol.open_inference_pb2 import DESCRIPTOR as _OPEN_INFERENCE
from ts.protocol.pool import POOL
from ts_frontend.cli.operating import why_unanswered
from ts_frontend.protos import inference_pb2, management_pb2

Call: TypeAlias = Mapping[str, Any]
Reply: TypeAlias = "dict[str, Any]"

#: The package of TorchServe's Open Inference service; its messages are those of `inference`.
_TORCHSERVE_OIP = "org.pytorch.serve.grpc.openinference"
#: The modules whose import puts their messages into the pool.
_SERVICES = (_OPEN_INFERENCE, inference_pb2.DESCRIPTOR, management_pb2.DESCRIPTOR)
#: The most bytes of an answer that are read; a longer answer counts as text.
ANSWER_BYTES_MAX = 64 << 20
_GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
_HTTP_PLACES = ("inference", "management", "metrics")


class Unreachable(Exception):
    """No server answers at the address; the message says why."""


@dataclass(frozen=True, slots=True)
class Places:
    """The addresses of a server's APIs. `addresses`: by the place's name (`inference`, `management`, `metrics`: a URL;
    `grpc`, `grpc_management`: HOST:PORT); a place without an address is skipped. `tokens`: the key for a place, if any.
    `ca_file`: PEM file of the authority for TLS, which gRPC then speaks."""

    addresses: Mapping[str, str]
    tokens: Mapping[str, str] = field(default_factory=dict)
    ca_file: Path | None = None
    timeout_s: float = 30.0


class Asker:
    """Makes calls, one after another."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def ask(self, place: str, call: Call) -> Reply:
        """:raises Unreachable: there is no answer in the protocol of the place."""
        if place in _HTTP_PLACES:
            return self._over_http(place, call)
        return self._over_grpc(place, call)

    # --- HTTP

    def _over_http(self, place: str, call: Call) -> Reply:
        url = urlsplit(self._places.addresses[place])
        host, timeout_s = url.hostname or "127.0.0.1", self._places.timeout_s
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=self._places.ca_file)
            connection = http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, url.port, timeout=timeout_s)
        method, path = call["http"].split(" ", 1)
        body, kind = _body(call)
        headers = {"Content-Type": kind} if kind else {}
        if token := self._places.tokens.get(place):
            headers["Authorization"] = f"Bearer {token}"
        try:
            connection.request(method, url.path.rstrip("/") + quote(path, safe="/:?&=[]"), body, headers)
            response = connection.getresponse()
            return _http_reply(response, response.read(ANSWER_BYTES_MAX))
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._places.addresses[place]}: {why_unanswered(error)}") from None
        finally:
            connection.close()

    # --- gRPC

    def _channel(self, place: str) -> Any:
        address = self._places.addresses[place]
        if address not in self._channels:
            ca_file = self._places.ca_file
            self._channels[address] = (
                grpc.secure_channel(address, grpc.ssl_channel_credentials(ca_file.read_bytes()), _GRPC_OPTIONS)
                if ca_file
                else grpc.insecure_channel(address, _GRPC_OPTIONS)
            )
        return self._channels[address]

    def _over_grpc(self, place: str, call: Call) -> Reply:
        path = call["grpc"]
        method = _method(path)
        metadata = list(call.get("metadata", {}).items())
        if token := self._places.tokens.get(place):
            metadata.append(("authorization", f"Bearer {token}"))
        options = {"metadata": metadata, "timeout": self._places.timeout_s}
        data = b"" if method is None else _encoded(method, call.get("request", {}))
        channel = self._channel(place)
        try:
            if method is None or not method.server_streaming:
                answer = channel.unary_unary(path)(data, **options)
                whole = {"code": "OK", "base64": base64.b64encode(answer).decode()}
                return whole if method is None else whole | {"message": _decoded(method, answer)}
            streamed = (
                channel.stream_stream(path)(iter((data,)), **options)
                if method.client_streaming
                else channel.unary_stream(path)(data, **options)
            )
            return {"code": "OK", "messages": [_decoded(method, one) for one in streamed]}
        except grpc.RpcError as error:
            failed: Any = error
            code, details = failed.code().name, failed.details() or ""
            if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and not _is_answer(failed):
                raise Unreachable(f"{self._places.addresses[place]}: {code}: {details}") from None
            return {"code": code, "error": details}


def _is_answer(error: Any) -> bool:
    """Whether the status is the server's own: the text of such a status doesn't mention a connection."""
    details = (error.details() or "").lower()
    return not any(word in details for word in ("connect", "dns", "resol", "deadline exceeded", "socket"))


def _method(path: str) -> MethodDescriptor | None:
    """The method with its messages; None for a service with unknown messages, whose calls carry bytes."""
    service, name = path.removeprefix("/").split("/")
    package, _, own = service.rpartition(".")
    package = "inference" if package == _TORCHSERVE_OIP else package
    try:
        found = POOL.FindServiceByName(f"{package}.{own}")
    except KeyError:
        return None
    return found.methods_by_name[name]


def _encoded(method: MethodDescriptor, request: Any) -> bytes:
    kind = message_factory.GetMessageClass(method.input_type)
    return json_format.ParseDict(request, kind(), descriptor_pool=POOL).SerializeToString()


def _decoded(method: MethodDescriptor, data: bytes) -> Any:
    message = message_factory.GetMessageClass(method.output_type).FromString(data)
    return json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=POOL)


def _body(call: Call) -> tuple[bytes | None, str]:
    """The body of a call over HTTP, and its content type ("" for none)."""
    if "json" in call:
        return json.dumps(call["json"], ensure_ascii=False).encode(), "application/json"
    if "text" in call:
        return call["text"].encode(), "text/plain"
    if "body" in call:
        return base64.b64decode(call["body"]), call.get("type", "application/octet-stream")
    return (b"" if call["http"].startswith(("POST", "PUT")) else None), ""


def _http_reply(response: http.client.HTTPResponse, body: bytes) -> Reply:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return {"status": response.status, "headers": headers, **shown(body, headers.get("content-type", ""))}


def shown(body: bytes, kind: str) -> Reply:
    """A body: `events` of a stream of events, else `json`, else `text`."""
    text = body.decode(errors="replace")
    if kind.startswith("text/event-stream"):
        lines = text.replace("\r\n", "\n").split("\n")
        return {"events": list(_events(line.removeprefix("data:") for line in lines if line.startswith("data:")))}
    try:
        return {"json": json.loads(text)}
    except (ValueError, RecursionError):
        return {"text": text}


def _events(texts: Iterable[str]) -> Iterable[Any]:
    for text in texts:
        try:
            yield json.loads(text)
        except (ValueError, RecursionError):
            yield text.strip()
