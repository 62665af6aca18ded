"""The services `ManagementAPIsService`: registers, scales, describes and unregisters models
(`protos/management.proto`); and `torchrelay.rollouts.Rollouts`: rollouts of new versions (`protos/rollouts.proto`,
docs/rollouts.md).

Zero and "" count as not given, as in proto3.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ts_frontend.config.parameters import REGISTER, SCALE, CallParameter
from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.grpc.open_inference import message
from ts_frontend.models.manager import LIST_LIMIT, ModelManager
from ts_frontend.protos.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    ManagementResponse,
    RegisterModelRequest,
    ScaleWorkerRequest,
    SetDefaultRequest,
    UnregisterModelRequest,
)
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub as Names
from ts_frontend.protos.rollouts_pb2 import RolloutRequest, RolloutResponse
from ts_frontend.protos.rollouts_pb2_grpc import RolloutsStub
from ts_frontend.rollouts.manager import Rollouts
from ts_frontend.rollouts.rule import read_settings

Request = TypeVar("Request", bound=Message)


def _pretty(value: object) -> str:
    # A handler's description may have halves of surrogate pairs, which no message takes.
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace").decode()


def _parsed(kind: type[Request], call: Call, data: bytes) -> Request:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"{call.path}: the {len(data)} bytes of the request aren't a {kind.__name__}") from error


def _given(table: Sequence[CallParameter], request: Message) -> dict[str, Any]:
    """The values of a call's parameters by name, or their defaults. Raises InvalidArgument."""
    signed = {row.name for row in table if row.least < 0}
    for field, value in request.ListFields():
        if isinstance(value, int) and value < 0 and field.name not in signed:
            raise InvalidArgument(f"Parameter {field.name} must not be negative: {value}")
    found: dict[str, Any] = {}
    for row in table:
        value = getattr(request, row.name)
        if row.required:
            found[row.name] = _required(row.name, value)
        elif request.DESCRIPTOR.fields_by_name[row.name].has_presence:
            found[row.name] = value if request.HasField(row.name) else row.default
        else:
            found[row.name] = value if row.kind is bool else value or row.default
    return found


def _required(name: str, value: str) -> str:
    if not value:
        raise InvalidArgument(f"Parameter {name} is required.")
    return value


class ManagementService:
    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def methods(self) -> tuple[Method, ...]:
        def method(path: str, run: Callable[[Call, bytes], Awaitable[str]]) -> Method:
            async def unary(call: Call, data: bytes) -> bytes:
                return ManagementResponse(msg=await run(call, data)).SerializeToString()

            return Method(path, Shape.UNARY, unary)

        return (
            method(Names.DescribeModel_PATH, self._describe),
            method(Names.ListModels_PATH, self._list),
            method(Names.RegisterModel_PATH, self._register),
            method(Names.ScaleWorker_PATH, self._scale),
            method(Names.SetDefault_PATH, self._set_default),
            method(Names.UnregisterModel_PATH, self._unregister),
        )

    async def _describe(self, call: Call, data: bytes) -> str:
        request = _parsed(DescribeModelRequest, call, data)
        name = _required("model_name", request.model_name)
        version = request.model_version or None
        return _pretty(await self._manager.describe(name, version=version, customized=request.customized))

    async def _list(self, call: Call, data: bytes) -> str:
        request = _parsed(ListModelsRequest, call, data)
        limit = request.limit if 0 < request.limit <= LIST_LIMIT else LIST_LIMIT
        token = max(0, request.next_page_token)
        return _pretty(self._manager.list_models(limit=limit, next_page_token=token))

    async def _register(self, call: Call, data: bytes) -> str:
        asked = _given(REGISTER, _parsed(RegisterModelRequest, call, data))
        return (await self._manager.register(asked.pop("url"), **asked)).status

    async def _scale(self, call: Call, data: bytes) -> str:
        request = _parsed(ScaleWorkerRequest, call, data)
        asked = _given(SCALE, request)
        name = _required("model_name", request.model_name)
        return (await self._manager.scale(name, version=request.model_version or None, **asked)).status

    async def _set_default(self, call: Call, data: bytes) -> str:
        request = _parsed(SetDefaultRequest, call, data)
        name = _required("model_name", request.model_name)
        outcome = await self._manager.set_default(name, _required("model_version", request.model_version))
        return outcome.status

    async def _unregister(self, call: Call, data: bytes) -> str:
        request = _parsed(UnregisterModelRequest, call, data)
        name = _required("model_name", request.model_name)
        return (await self._manager.unregister(name, version=request.model_version or None)).status


class RolloutService:
    """The only method."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def methods(self) -> tuple[Method, ...]:
        return (Method(RolloutsStub.Rollout_PATH, Shape.UNARY, self._rollout),)

    async def _rollout(self, call: Call, data: bytes) -> bytes:
        request = message(RolloutRequest, data)
        name, action = request.model_name, request.action
        if not name:
            raise InvalidArgument("Parameter model_name is required.")
        if action == "start":
            found = self._rollouts.start(name, read_settings(request.settings.encode()))
        elif action in ("", "status"):
            found = self._rollouts.status(name)
        else:
            found = self._rollouts.act(name, action)
        text = json.dumps(found, indent=2, ensure_ascii=False).encode("utf-8", "replace").decode()
        return RolloutResponse(msg=text).SerializeToString()
