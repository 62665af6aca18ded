"""The service `torchrelay.rollouts.Rollouts`: rollouts of new versions (`protos/rollouts.proto`, docs/rollouts.md)."""

from __future__ import annotations

import json

from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.grpc.open_inference import message
from ts_frontend.protos.rollouts_pb2 import RolloutRequest, RolloutResponse
from ts_frontend.protos.rollouts_pb2_grpc import RolloutsStub as Names
from ts_frontend.rollouts.manager import Rollouts
from ts_frontend.rollouts.rule import read_settings


class RolloutService:
    """The only method."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def methods(self) -> tuple[Method, ...]:
        return (Method(Names.Rollout_PATH, Shape.UNARY, self._rollout),)

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
