"""Runs MLServer's inference runtimes, unchanged (docs/mlserver.md)."""

from __future__ import annotations

import asyncio
import atexit
import base64
import binascii
import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ts.compat import add_shims, new_loop
from ts.context import Context
from ts.handler_utils.utils import http_scope
from ts.metrics.metric_type_enum import MetricTypes
from ts.protocol.datatypes import DATATYPES
from ts.protocol.path_template import PathTemplate
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings, context_of, declared, openai_of
from ts.runtime.running import Ended
from ts.runtime.tracebacks import say, traceback_of
from ts.tensors.route_form import RouteRequest, RouteResponse
from ts.tensors.types import Array, InferenceRequest, InferenceResponse, Tensor, as_bytes, loose_bytes
from ts.utils.util import PredictionException

NOT_IMPLEMENTED, FAILED = 501, 500


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
        together = joined(data)
        if together is not None:
            with contextlib.suppress(Exception):  # one may be at fault: each is asked by itself
                found = split(await self._predict(0, together, context), data)
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


# --- batches, joined along their first dimension and split again


def joined(requests: Sequence[InferenceRequest]) -> InferenceRequest | None:
    """One request with all rows; None if the requests can't be joined."""
    first = requests[0]
    if any(_rows(request) == 0 or _form(request) != _form(first) for request in requests):
        return None
    tensors = [
        Tensor(
            tensor.name,
            tensor.datatype,
            np.concatenate([request.inputs[index].array for request in requests]),
            _common([request.inputs[index].parameters for request in requests]),
        )
        for index, tensor in enumerate(first.inputs)
    ]
    return replace(first, inputs=tensors, parameters=_common([request.parameters for request in requests]))


def _rows(request: InferenceRequest) -> int:
    """The first dimension of all inputs; 0 if they differ, or if an input's elements don't fill its shape."""
    if any(tensor.stated is not None for tensor in request.inputs):
        return 0
    sizes = {tensor.shape[0] if tensor.shape else 0 for tensor in request.inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _form(request: InferenceRequest) -> tuple[Any, ...]:
    tensors = tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in request.inputs)
    return tensors, tuple(output.name for output in request.outputs), request.texts


def _common(parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parameters for a batch, merged as by MLServer: the value that all requests share, or the list of all."""
    names = dict.fromkeys(name for one in parameters for name in one)
    found = {}
    for name in names:
        values = [one.get(name) for one in parameters]
        found[name] = values[0] if all(value == values[0] for value in values) else values
    return found


def split(response: InferenceResponse, requests: Sequence[InferenceRequest]) -> list[InferenceResponse] | None:
    """The answer to each request; None if an output's number of rows doesn't match."""
    sizes = [_rows(request) for request in requests]
    total = sum(sizes)
    if any(not tensor.shape or tensor.shape[0] != total or tensor.stated for tensor in response.outputs):
        return None
    found, start = [], 0
    for index, size in enumerate(sizes):
        rows = slice(start, start + size)
        outputs = [
            Tensor(tensor.name, tensor.datatype, tensor.array[rows], _shares(tensor.parameters, index, len(sizes)))
            for tensor in response.outputs
        ]
        parameters = _shares(response.parameters, index, len(sizes))
        found.append(replace(response, outputs=outputs, id="", parameters=parameters))
        start += size
    return found


def _shares(parameters: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """One request's share of a batch's parameters: its element of a list with one for each, or the value."""
    return {
        name: value[index] if isinstance(value, list) and len(value) == count else value
        for name, value in parameters.items()
    }


BASE64 = "base64"


class Messages:
    """Conversion between this server's tensor requests and those of `types`, the module `mlserver.types` of the real
    package or of the shim."""

    def __init__(self, types: Any) -> None:
        self._types = types
        self._takes_arrays = hasattr(types.TensorData, "array")  # the shim's

    # --- requests

    def payload(self, request: InferenceRequest, request_id: str) -> Any:
        """An `InferenceRequest` with the request's headers in its parameters, as in MLServer."""
        types = self._types
        return types.InferenceRequest(
            id=request_id,
            parameters=types.Parameters(**{**request.parameters, "headers": dict(request.headers)}),
            inputs=[self._input(tensor, request.texts) for tensor in request.inputs],
            outputs=[
                types.RequestOutput(name=one.name, parameters=self._parameters(one.parameters))
                for one in request.outputs
            ]
            or None,
        )

    def _input(self, tensor: Tensor, texts: bool) -> Any:
        if DATATYPES[tensor.datatype].extension:
            text = f"input {tensor.name!r}: MLServer's runtimes have no datatype {tensor.datatype}"
            raise PredictionException(text, 400)
        return self._types.RequestInput(
            name=tensor.name,
            shape=list(tensor.shape),
            datatype=tensor.datatype,
            parameters=self._parameters(tensor.parameters),
            data=self._types.TensorData(self._elements(tensor, texts)),
        )

    def _elements(self, tensor: Tensor, texts: bool) -> Any:
        """The elements of a BYTES tensor; `texts`: as str, which runtimes expect from JSON requests."""
        flat = tensor.array.ravel()
        if tensor.datatype != "BYTES":
            return flat if self._takes_arrays else flat.tolist()
        values = [as_bytes(value) for value in flat]
        if not texts:
            return values
        if tensor.parameters.get("content_type") == BASE64:
            return [base64.b64encode(value).decode() for value in values]
        return [value.decode("utf-8", "surrogatepass") for value in values]

    def _parameters(self, values: Mapping[str, Any]) -> Any:
        return self._types.Parameters(**values) if values else None

    # --- answers

    def response(self, found: Any, texts: bool) -> tuple[InferenceResponse, dict[str, str]]:
        """The answer and its headers. Raises PredictionException for an invalid result."""
        if not isinstance(found, self._types.InferenceResponse):
            raise PredictionException(f"the model gave {type(found).__name__} instead of an InferenceResponse", 500)
        parameters = _plain(found.parameters)
        headers = parameters.pop("headers", None) or {}
        outputs = [_tensor(output, texts) for output in found.outputs]
        response = InferenceResponse(
            outputs, found.id or "", found.model_name or "", found.model_version or "", parameters
        )
        return response, {str(name): str(value) for name, value in headers.items()}


def _plain(parameters: Any) -> dict[str, Any]:
    if parameters is None:
        return {}
    return {name: value for name, value in parameters.model_dump().items() if name[:1] != "_" and value is not None}


def _tensor(output: Any, texts: bool) -> Tensor:
    datatype = str(getattr(output.datatype, "value", output.datatype))
    parameters, shape = _plain(output.parameters), tuple(output.shape)
    is_base64 = texts and parameters.get("content_type") == BASE64
    try:
        if datatype == "BYTES":
            values = _bytes(output.data, shape, is_base64)
            return loose_bytes(output.name, values, shape, parameters, f"output {output.name!r}")
        array = _numbers(output.data, datatype, shape)
    except (ValueError, TypeError, OverflowError) as error:
        message = f"the model's output {output.name!r} is no {datatype} of shape {list(shape)}: {error}"
        raise PredictionException(message, 500) from error
    return Tensor(output.name, datatype, array, parameters)


def _numbers(data: Any, datatype: str, shape: tuple[int, ...]) -> Array:
    array = data.array() if hasattr(data, "array") else None
    return np.asarray(data.root if array is None else array, DATATYPES[datatype].dtype).reshape(shape)


def _bytes(data: Any, shape: tuple[int, ...], is_base64: bool) -> list[bytes]:
    """The elements as bytes. `is_base64`: they are decoded, because the answer's form encodes them again."""
    count, bare = math.prod(shape), isinstance(data.root, bytes)
    values = [data.root] if bare else _flat(data.root if isinstance(data.root, (list, tuple)) else [data.root])
    if bare and count > 1:
        size = len(data.root) // count  # an array of bytes of one size, as the real NumpyCodec writes it
        values = [data.root[at * size : (at + 1) * size].rstrip(b"\0") for at in range(count)]
    raw = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value) for value in values]
    return [_unpacked(value) for value in raw] if is_base64 else raw


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found.extend(_flat(value) if isinstance(value, (list, tuple)) else (value,))
    return found


def _unpacked(value: bytes) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        return value


SPECVERSION = "0.3"
#: The file with the namespace of a pod in Kubernetes.
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_KIND = "io.seldon.serving.inference."


class CloudEvents:
    """The CloudEvents headers of one model's requests and answers. `server`: MLServer's `server_name`."""

    def __init__(self, server: str, model: str, namespace_file: str = NAMESPACE_FILE) -> None:
        namespace = _namespace(namespace_file)
        source = f"io.seldon.serving.deployment.{server}"
        self._common = {
            "Ce-Specversion": SPECVERSION,
            "Ce-Source": f"{source}.{namespace}" if namespace else source,
            "Ce-Type": "",
            "Ce-Modelid": model,
            "Ce-Inferenceservicename": server,
            "Ce-Endpoint": model,
        }
        self._more = {"Ce-Namespace": namespace} if namespace else {}

    def request(self, request_id: str) -> Mapping[str, str]:
        return self._headers("request", request_id)

    def response(self, request_id: str) -> Mapping[str, str]:
        return self._headers("response", request_id)

    def _headers(self, kind: str, request_id: str) -> dict[str, str]:
        ids = {"Ce-Id": request_id, "Ce-Requestid": request_id} if request_id else {}
        return {**self._common, "Ce-Type": _KIND + kind, **ids, **self._more}


def _namespace(file: str) -> str:
    try:
        if os.path.isfile(file):
            with open(file) as text:
                return text.read().strip()
    except OSError:
        pass
    return ""


# --- a runtime's `@custom_handler` methods, called by FastAPI, as in MLServer


class Routes:
    """The custom handlers of `model`. Raises BadTemplate for a path that can't be matched, HandlerNotUsable without
    FastAPI and for a method whose signature it can't read."""

    def __init__(self, model: Any) -> None:
        found = importlib.import_module("mlserver.handlers.custom").get_custom_handlers(model)
        #: For the frontend: each route's method, and the template of its paths.
        self.declared = [
            {"method": one.rest_method.upper(), "path": PathTemplate(one.rest_path).text} for one, _ in found
        ]
        self._app = _fastapi(found) if found else None

    async def answers(self, request: RouteRequest, context: Context) -> AsyncIterator[list[RouteResponse]]:
        """Pieces of the answer; the first has its headers, and sets its status."""
        async for status, response in _asgi_answer(self._app, request):
            if status:
                context.set_response_status(status)
            yield [response]


def _fastapi(found: Sequence[tuple[Any, Callable[..., Any]]]) -> Any:
    """An application with the routes. The types of this server's own package leave out of answers what isn't set."""
    try:
        fastapi = importlib.import_module("fastapi")
    except ImportError as error:
        text = f"custom handlers need FastAPI: pip install 'torchrelay[mlserver]' ({error})"
        raise HandlerNotUsable(text) from error

    async def failed(_: Any, raised: Any) -> Any:
        return fastapi.responses.JSONResponse({"error": str(raised)}, raised.status_code)

    async def broken(_: Any, raised: Any) -> Any:
        return fastapi.responses.JSONResponse({"error": "Internal Server Error"}, FAILED)

    errors = {importlib.import_module("mlserver.errors").MLServerError: failed, Exception: broken}
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=errors)
    real = sys.modules.get("mlserver.rest.app") or _imported("mlserver.rest.app")
    if real is not None:
        app.router.route_class = real.APIRoute
    given = {"response_model_exclude_unset": True, "response_model_exclude_none": True}
    for handler, call in found:
        try:
            app.add_api_route(handler.rest_path, call, methods=[handler.rest_method.upper()], **given)
        except fastapi.exceptions.FastAPIError as error:
            raise HandlerNotUsable(f"FastAPI can't read the custom handler {call.__name__}: {error}") from error
    return app


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


async def _asgi_answer(app: Any, request: RouteRequest) -> AsyncIterator[tuple[int, RouteResponse]]:
    """The answer of an ASGI application in pieces, each with the status: the real one first, then 0."""
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1)
    running = asyncio.create_task(_run(app, request, sent))
    head: dict[str, Any] = {}
    failed = False
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                head, failed = message, message["status"] == FAILED
                continue
            pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.get("headers", ())]
            yield head.get("status", 0), RouteResponse([], pairs=pairs, body=message.get("body", b""))
            head = {}
        try:
            await running
        except Exception as error:
            if not failed:
                raise
            say(traceback_of(error))  # its client has been told
    finally:
        running.cancel()


async def _run(app: Any, request: RouteRequest, sent: asyncio.Queue[dict[str, Any] | None]) -> None:
    received = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(received, None)
        if message is None:
            await asyncio.Event().wait()  # a client that leaves cancels this task
        return message or {"type": "http.disconnect"}

    put: Callable[[dict[str, Any]], Awaitable[None]] = sent.put
    try:
        await app(_scope(request), receive, put)
    except Exception:
        await sent.put(None)
        raise
    await sent.put(None)


def _scope(request: RouteRequest) -> dict[str, Any]:
    """A body that begins like JSON is JSON, whatever its type says: many clients send none, or that of forms."""
    headers = dict(request.headers)
    if request.body.lstrip()[:1] in (b"{", b"["):
        headers["content-type"] = "application/json"
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return http_scope(request.method, request.path, request.query.encode("latin-1"), pairs)
