"""KServe's predictors: the adapter of both protocols to their steps (docs/kserve.md)."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Sequence
from typing import Any

from ts.compat import new_loop
from ts.compat.kserve_api.messages import array_of
from ts.compat.kserve_api.predictor import WAITED_FOR_UNTIL_S
from ts.context import Context
from ts.protocol.text import name_of, text_of
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings, context_of, declared, openai_of
from ts.tensors import types
from ts.tensors.v1_form import V1Request, V1Response
from ts.utils.util import PredictionException

STEPS = ("preprocess", "explain", "predict", "postprocess")
_PREDICTING, _EXPLAINING = ("preprocess", "predict", "postprocess"), ("preprocess", "explain")


class Latency:
    """The times of one request's steps; `step` names the time since its last call."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._taken_ms = dict.fromkeys(STEPS, 0.0)
        self._since_s = time.perf_counter()

    def step(self, name: str) -> None:
        now_s = time.perf_counter()
        self._taken_ms[name] += (now_s - self._since_s) * 1000
        self._since_s = now_s

    def line(self) -> str:
        taken = ", ".join(f"{name}_ms: {taken_ms:.3f}" for name, taken_ms in self._taken_ms.items())
        return f"requestId: {self._id or 'N.A.'}, {taken}"


#: Statuses of KServe's errors, by the names of their types: those of its own package have no number.
STATUSES = {
    "InvalidInput": 400,
    "UnsupportedProtocol": 400,
    "ModelNotFound": 404,
    "ModelNotReady": 503,
    "ServerNotReady": 503,
    "NotImplementedError": 501,
}


def serving(model: Any, settings: Settings) -> Loaded:
    if not model.ready:
        raise HandlerNotUsable(f"load() of {type(model).__name__} {model.name!r} did not make it ready")
    loop = new_loop()
    asyncio.set_event_loop(loop)
    signature = {
        "platform": "",
        "inputs": loop.run_until_complete(_result(model.get_input_types())),
        "outputs": loop.run_until_complete(_result(model.get_output_types())),
    }
    served = KServeAdapter(model, bool(settings["adapter_settings"].get("latency_logging")))
    tensors = declared(settings | {"tensors": None})
    return Loaded(
        served.answers, context_of(settings), "async", loop, "requests", tensors, signature, openai=openai_of(model)
    )


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class KServeAdapter:
    """The adapter of a predictor: coroutines run concurrently, functions one after another."""

    def __init__(self, model: Any, latency_logging: bool) -> None:
        self._model, self._logs = model, latency_logging
        self._messages: Any = importlib.import_module("kserve.protocol.infer_type")
        self._taken: dict[tuple[type, str], int] = {}

    async def answers(self, data: Sequence[types.InferenceRequest], context: Context) -> list[Any]:
        found = []
        for index, request in enumerate(data):
            WAITED_FOR_UNTIL_S.set(time.monotonic() + context.remaining_s(index))
            found.append(await self._answer(request, context.get_request_id(index) or ""))
        return found

    async def _answer(self, request: types.InferenceRequest, request_id: str) -> Any:
        """The answer, or the exception that fails only this request."""
        latency = Latency(request_id) if self._logs else None
        try:
            answer = await self._through(request, latency)
        except Exception as error:
            known = [STATUSES[one.__name__] for one in type(error).__mro__ if one.__name__ in STATUSES]
            if not known and (isinstance(error, (PredictionException, MemoryError)) or "CUDA" in text_of(error)):
                raise
            if not known:
                raise PredictionException(f"{name_of(error)} : {text_of(error)}", 500) from error
            return PredictionException(str(getattr(error, "reason", "") or error), known[0])
        if latency is not None:
            print(latency.line(), flush=True)
        return answer

    async def _through(self, request: types.InferenceRequest, latency: Latency | None) -> Any:
        payload = request.payload if isinstance(request, V1Request) else self._infer_request(request)
        explain = isinstance(request, V1Request) and request.explain
        headers, more = request.headers, dict[str, str]()
        found = payload
        for name in _EXPLAINING if explain else _PREDICTING:
            found = self._called(name, found, headers, more)
            if hasattr(found, "__await__"):  # inspect.isawaitable takes 2 µs for most results
                found = await found
            if latency is not None:
                latency.step(name)
        return self._response(found, request)

    def _called(self, name: str, payload: Any, headers: dict[str, str], more: dict[str, str]) -> Any:
        """The result of a step, which gets the arguments that it accepts."""
        model = self._model
        key = type(model), name
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = _taken(type(model), name)
        arguments = (payload, headers) if name == "preprocess" else (payload, headers, more)
        return getattr(model, name)(*arguments[:taken])

    def _infer_request(self, request: types.InferenceRequest) -> Any:
        inputs = [self._input(tensor) for tensor in request.inputs]
        return self._messages.InferRequest(
            self._model.name, inputs, request.id or None, parameters=dict(request.parameters)
        )

    def _input(self, tensor: types.Tensor) -> Any:
        kind = self._messages.InferInput
        if tensor.datatype == "BYTES":
            return kind(tensor.name, tensor.shape, tensor.datatype, tensor.array.ravel().tolist(), tensor.parameters)
        return kind.of(tensor)

    def _response(self, found: Any, request: types.InferenceRequest) -> Any:
        if isinstance(found, tuple):  # with headers, of models made with return_response_headers
            found = found[0]
        if isinstance(found, dict) and "outputs" not in found:
            return V1Response([], payload=found)
        outputs = found["outputs"] if isinstance(found, dict) else getattr(found, "outputs", None)
        if outputs is None:
            raise TypeError(f"{type(self._model).__name__} answered {type(found).__name__}, no dict or InferResponse")
        said = found if isinstance(found, dict) else {"id": getattr(found, "id", None)}
        return types.InferenceResponse([self._output(one) for one in outputs], str(said.get("id") or request.id))

    def _output(self, output: Any) -> types.Tensor:
        if isinstance(output, dict):
            output = self._messages.InferOutput(output["name"], output["shape"], output["datatype"], output["data"])
        return types.Tensor(output.name, *array_of(output))


def _taken(kind: type, name: str) -> int:
    """The number of a method's arguments, without `self`."""
    parameters = list(inspect.signature(getattr(kind, name)).parameters.values())
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 3
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters) - 1
