"""Runs MLServer's inference runtimes, unchanged (docs/mlserver.md)."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from ts.compat import add_shims, mlserver_messages, new_loop
from ts.compat.mlserver_messages import CloudEvents, Messages
from ts.compat.mlserver_routes import Routes
from ts.context import Context
from ts.metrics.metric_type_enum import MetricTypes
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings, context_of, declared, openai_of
from ts.runtime.running import Ended
from ts.tensors.route_form import RouteRequest
from ts.tensors.types import InferenceRequest, InferenceResponse
from ts.utils.util import PredictionException

NOT_IMPLEMENTED = 501


def load(settings: Settings) -> Loaded:
    """`adapter_settings`: `model_settings`, the path of model-settings.json, "" without one; `defaults`, the values
    of missing fields; `server_name`; `python_path`, further importable folders."""
    add_shims()
    adapted = settings["adapter_settings"]
    folder = str(Path(adapted["model_settings"]).parent) if adapted["model_settings"] else str(settings["model_dir"])
    sys.path[:0] = dict.fromkeys((folder, *adapted.get("python_path", ())))
    os.chdir(folder)
    context = context_of(settings)
    loop = new_loop()
    asyncio.set_event_loop(loop)
    model = _model(folder, settings)
    _prepare_package(model, context)
    served = MLServerAdapter(model, CloudEvents(adapted.get("server_name") or "mlserver", model.name))
    loop.run_until_complete(served.load())
    atexit.register(lambda: loop.run_until_complete(_unload(model)))
    signature = loop.run_until_complete(_signature(model))
    unchecked = declared(settings | {"tensors": {}}) | {"loose": True}
    return Loaded(
        served.answers,
        context,
        "async",
        loop,
        "requests",
        unchecked,
        signature,
        takes_streams=served.streams,
        routes=served.routes.declared,
        openai=openai_of(model),
    )


def _model(folder: str, settings: Settings) -> Any:
    """The runtime, constructed as in MLServer with its settings, whose `uri` defaults to the folder."""
    module = importlib.import_module("mlserver.settings")
    found = module.ModelSettings.model_validate(_values(settings["adapter_settings"]))
    found.name = settings.get("model_name") or found.name or Path(folder).name
    if found.parameters is None:
        found.parameters = module.ModelParameters()
    if not found.parameters.uri:
        found.parameters.uri = folder
    implementation = found.implementation
    if not isinstance(implementation, type) or not callable(getattr(implementation, "load", None)):
        raise HandlerNotUsable(
            f"implementation of {folder} names {implementation!r}, which is not a class like MLModel"
        )
    return implementation(found)


def _values(adapted: dict[str, Any]) -> dict[str, Any]:
    """The fields of model-settings.json, completed with the defaults; `_source` is its path."""
    source, defaults = adapted["model_settings"], adapted.get("defaults") or {}
    if not source:
        return dict(defaults)
    own = json.loads(Path(source).read_bytes())
    parameters = {**(defaults.get("parameters") or {}), **(own.get("parameters") or {})}
    return {**defaults, **own, **({"parameters": parameters} if parameters else {}), "_source": source}


def _prepare_package(model: Any, context: Context) -> None:
    metrics = importlib.import_module("mlserver.metrics")
    if hasattr(metrics, "send_to"):
        importlib.import_module("mlserver.logging").configure()
        metrics.send_to(_sink(context))
    else:
        names = importlib.import_module("mlserver.context")
        names.model_name_var.set(model.name)
        names.model_version_var.set(model.version or "")


def _sink(context: Context) -> Any:
    def take(name: str, value: float) -> None:
        metric = context.metrics.add_metric_to_cache(name, None, ["ModelName"], MetricTypes.HISTOGRAM)
        metric.add_or_update(value, [context.model_name])

    return take


async def _unload(model: Any) -> None:
    with contextlib.suppress(NotImplementedError):
        await model.unload()


async def _signature(model: Any) -> dict[str, Any]:
    """The platform, the tensors and the content type of the loaded model's metadata."""
    found = (await model.metadata()).model_dump(mode="json")
    tensors = {name: [_spec(one) for one in found.get(name) or ()] for name in ("inputs", "outputs")}
    content_type = (found.get("parameters") or {}).get("content_type")
    metadata = {"content_type": str(content_type)} if content_type else {}
    return {"platform": found.get("platform") or "", **tensors, "metadata": metadata}


def _spec(found: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": {}, **{name: value for name, value in found.items() if value is not None}}


class MLServerAdapter:
    """The adapter of a runtime."""

    def __init__(self, model: Any, events: CloudEvents) -> None:
        self._model, self._events = model, events
        package = importlib.import_module("mlserver")
        self._error = importlib.import_module("mlserver.errors").MLServerError
        self._messages = Messages(importlib.import_module("mlserver.types"))
        self.routes = Routes(model)
        self.streams = type(model).predict_stream is not package.MLModel.predict_stream

    async def load(self) -> None:
        self._model.ready = await self._model.load() is not False
        if not self._model.ready:
            raise HandlerNotUsable("load() returned False: the runtime says that its model isn't ready")

    def answers(self, data: Sequence[InferenceRequest], context: Context) -> Any:
        """A coroutine of all answers, or an async generator of the answers to streams."""
        if isinstance(data[0], RouteRequest):  # which share no batch
            return self.routes.answers(data[0], context)
        if not self.streams or not any(request.stream for request in data):
            return self._predicted(data, context)
        if len(data) == 1:
            return self._streamed(0, data[0], context)
        return self._mixed(data, context)

    # --- one answer each

    async def _predicted(self, data: Sequence[InferenceRequest], context: Context) -> list[Any]:
        if len(data) == 1:
            return [await self._predict(0, data[0], context)]
        together = mlserver_messages.joined(data)
        if together is not None:
            with contextlib.suppress(Exception):  # one may be at fault: each is asked by itself
                found = mlserver_messages.split(await self._predict(0, together, context), data)
                if found is not None:
                    return list(found)
        tasks = [self._predict(index, request, context) for index, request in enumerate(data)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def _predict(self, index: int, request: InferenceRequest, context: Context) -> InferenceResponse:
        request_id = request.id or str(context.get_request_id(index) or "")
        with self._failures():
            found = await self._model.predict(self._payload(request, request_id))
        return self._neutral(index, request, found, request_id, context)

    def _neutral(
        self, index: int, request: InferenceRequest, found: Any, request_id: str, context: Context
    ) -> InferenceResponse:
        response, headers = self._messages.response(found, request.texts)
        response.id = response.id or request_id
        if request.outputs:  # the runtime decides which outputs exist
            names = {tensor.name for tensor in response.outputs}
            request.outputs = [one for one in request.outputs if one.name in names]
        for name, value in {**headers, **self._events.response(response.id)}.items():
            context.set_response_header(index, name, value)
        return response

    def _payload(self, request: InferenceRequest, request_id: str) -> Any:
        request.headers = {**request.headers, **self._events.request(request_id)}
        return self._messages.payload(request, request_id)

    @contextlib.contextmanager
    def _failures(self) -> Any:
        """Turns exceptions of a runtime into PredictionExceptions with their statuses."""
        try:
            yield
        except self._error as error:
            raise PredictionException(str(error), error.status_code) from error
        except NotImplementedError as error:
            raise PredictionException(str(error) or "not implemented", NOT_IMPLEMENTED) from error

    # --- any number of answers

    async def _streamed(self, index: int, request: InferenceRequest, context: Context) -> AsyncIterator[Any]:
        """All answers to a stream have the id of its first request."""
        request_id = request.id or str(context.get_request_id(index) or "")
        with self._failures():
            answers = self._model.predict_stream(self._payloads(request, request_id))
            try:
                async for found in answers:
                    found.id = request_id
                    yield self._neutral(index, request, found, request_id, context)
            finally:
                if hasattr(answers, "aclose"):
                    await answers.aclose()

    async def _payloads(self, request: InferenceRequest, request_id: str) -> AsyncIterator[Any]:
        yield self._payload(request, request_id)
        if request.following is not None:
            async for following in request.following:
                yield self._payload(following, request_id)

    async def _mixed(self, data: Sequence[InferenceRequest], context: Context) -> AsyncIterator[list[Any]]:
        """Answers a batch with streams in it: each request runs as a separate task."""
        ready: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(data))
        tasks = [asyncio.create_task(self._one(index, one, context, ready)) for index, one in enumerate(data)]
        try:
            left = len(data)
            while left:
                index, value = await ready.get()
                left -= isinstance(value, Ended)
                values: list[Any] = [None] * len(data)
                values[index] = value
                yield values
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, index: int, request: InferenceRequest, context: Context, ready: asyncio.Queue[Any]) -> None:
        end = Ended(None)
        try:
            if request.stream:
                async for response in self._streamed(index, request, context):
                    await ready.put((index, response))
            else:
                end = Ended(await self._predict(index, request, context))
        except Exception as error:
            end = Ended(error)
        await ready.put((index, end))
