"""gRPC's standard services: health (grpc.health.v1) of the server, its services and its models; reflection, v1 and
v1alpha (their messages differ only in the package)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from types import ModuleType
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from ts.protocol.pool import POOL
from ts_frontend.errors import Code, InvalidArgument, ServeError
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.models.health import Health
from ts_frontend.protos import grpc_reflection_v1_reflection_pb2, grpc_reflection_v1alpha_reflection_pb2
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest, HealthCheckResponse
from ts_frontend.tasks import owned

SERVICE = "grpc.health.v1.Health"
#: A larger request isn't one: its only field is a name. A watcher's stays in memory as long as it watches.
REQUEST_BYTES_MAX = 4096


class UnknownService(ServeError):
    """The name is neither a service nor a model of this server."""

    remedy = "Ask for the server (an empty name) or for a registered model."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"


def health_methods(source: Health) -> tuple[Method, Method]:
    service = HealthService(source)
    return (
        Method(f"/{SERVICE}/Check", Shape.UNARY, service.check),
        Method(f"/{SERVICE}/Watch", Shape.SERVER_STREAM, service.watch),
    )


class HealthService:
    def __init__(self, source: Health) -> None:
        self._source = source

    async def check(self, call: Call, data: bytes) -> bytes:
        name = _requested(data)
        serving = self._source.status(name)
        if serving is None:
            raise UnknownService(f"Unknown service: {name}")
        return _response(serving)

    async def watch(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        name = _requested(data)
        call.forget_head()
        sent: bytes | None = None
        while True:
            change = owned(self._source.changed())
            try:
                # Starts `changed` before reading the status, so that no change is missed.
                await asyncio.sleep(0)
                state = _response(self._source.status(name))
                if state != sent:
                    sent = state
                    yield [state]
                await change
            finally:
                change.cancel()
                del change  # breaks the cycle of its exception, this frame and the task


def _requested(data: bytes) -> str:
    if len(data) > REQUEST_BYTES_MAX:
        raise InvalidArgument(
            f"The message has {len(data)} bytes; a HealthCheckRequest has at most {REQUEST_BYTES_MAX}"
        )
    try:
        return HealthCheckRequest.FromString(data).service
    except DecodeError as error:
        raise InvalidArgument(f"The message is not a HealthCheckRequest: {error}") from None


def _response(serving: bool | None) -> bytes:
    if serving is None:
        status = HealthCheckResponse.SERVICE_UNKNOWN
    else:
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status).SerializeToString()


_VERSIONS = (grpc_reflection_v1_reflection_pb2, grpc_reflection_v1alpha_reflection_pb2)


def reflection_methods(served: Iterable[Method]) -> tuple[Method, ...]:
    names = {method.path.split("/")[1] for method in served} | {_service(messages) for messages in _VERSIONS}
    services = tuple(sorted(names))
    return tuple(
        Method(f"/{_service(messages)}/ServerReflectionInfo", Shape.BIDI, ReflectionService(messages, services).info)
        for messages in _VERSIONS
    )


def _service(messages: ModuleType) -> str:
    return f"{messages.DESCRIPTOR.package}.ServerReflection"


def _file_of_symbol(name: str) -> FileDescriptor:
    """Returns the file with that type, service or method, field or value of one. Raises KeyError."""
    try:
        return POOL.FindFileContainingSymbol(name)
    except KeyError:
        pass
    # Pools don't find members (protobuf 7.36): look for their owners.
    owner, _, member = name.rpartition(".")
    file = POOL.FindFileContainingSymbol(owner)
    if member not in _members(file, owner):
        raise KeyError(name)
    return file


def _members(file: FileDescriptor, owner: str) -> set[str]:
    local = owner.removeprefix(file.package).lstrip(".")
    if local in file.services_by_name:
        return set(file.services_by_name[local].methods_by_name)
    try:
        message = POOL.FindMessageTypeByName(owner)
    except KeyError:
        return set(POOL.FindEnumTypeByName(owner).values_by_name)
    return {*message.fields_by_name, *message.oneofs_by_name}


class ReflectionService:
    """One version of the service; answers from the descriptor pool of the generated modules."""

    def __init__(self, messages: Any, services: Sequence[str]) -> None:
        self._messages = messages
        self._services = services
        self._answers = {
            "file_by_filename": lambda name: self._files(POOL.FindFileByName(name)),
            "file_containing_symbol": lambda name: self._files(_file_of_symbol(name)),
            "file_containing_extension": self._extension,
            "all_extension_numbers_of_type": self._extension_numbers,
            "list_services": self._list,
        }

    async def info(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
        call.forget_head()
        async for data in requests:
            answer = self._answer(data)
            del data  # the stream may rest
            yield [answer]
            del answer

    def _answer(self, data: bytes) -> bytes:
        try:
            request = self._messages.ServerReflectionRequest.FromString(data)
        except DecodeError as error:
            raise InvalidArgument(f"The message is not a ServerReflectionRequest: {error}") from None
        kind = request.WhichOneof("message_request")
        if kind is None:
            answer = self._error(Code.INVALID_ARGUMENT, "The request asks nothing")
        else:
            answer = self._look_up(kind, getattr(request, kind))
        response = self._messages.ServerReflectionResponse(valid_host=request.host, original_request=request, **answer)
        return bytes(response.SerializeToString())

    def _look_up(self, kind: str, wanted: Any) -> dict[str, Any]:
        try:
            return self._answers[kind](wanted)
        except KeyError:
            return self._error(Code.NOT_FOUND, f"Not found: {str(wanted).strip()}")

    def _files(self, file: FileDescriptor) -> dict[str, Any]:
        found: dict[str, bytes] = {}
        waiting = [file]
        while waiting:
            one = waiting.pop()
            if one.name not in found:
                found[one.name] = one.serialized_pb
                waiting.extend(one.dependencies)
        response = self._messages.FileDescriptorResponse(file_descriptor_proto=found.values())
        return {"file_descriptor_response": response}

    def _extension(self, wanted: Any) -> dict[str, Any]:
        """Raises KeyError: the files are proto3 and have no extensions."""
        raise KeyError(wanted)

    def _extension_numbers(self, name: str) -> dict[str, Any]:
        POOL.FindMessageTypeByName(name)
        return {"all_extension_numbers_response": self._messages.ExtensionNumberResponse(base_type_name=name)}

    def _list(self, _: str) -> dict[str, Any]:
        services = [self._messages.ServiceResponse(name=name) for name in self._services]
        return {"list_services_response": self._messages.ListServiceResponse(service=services)}

    def _error(self, code: Code, message: str) -> dict[str, Any]:
        return {"error_response": self._messages.ErrorResponse(error_code=int(code), error_message=message)}
