"""gRPC's standard health service (grpc.health.v1), for the server, its services and its models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import DecodeError

from ts_frontend.errors import Code, InvalidArgument, ServeError
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.models.health import Health
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest, HealthCheckResponse
from ts_frontend.tasks import owned

SERVICE = "grpc.health.v1.Health"
#: A larger request isn't one: its only field is a name. A watcher's stays in memory as long as it watches.
REQUEST_BYTES_MAX = 4096


class UnknownService(ServeError):
    """The name is neither a service nor a model of this server."""

    remedy = "Ask for the server (an empty name) or for a registered model."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"


def methods(source: Health) -> tuple[Method, Method]:
    service = HealthService(source)
    return (
        Method(f"/{SERVICE}/Check", Shape.UNARY, service.check),
        Method(f"/{SERVICE}/Watch", Shape.SERVER_STREAM, service.watch),
    )


class HealthService:
    """The health service over `source`."""

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
