"""The Open Inference Protocol over HTTP: `/v2` (docs/open-inference.md) with Triton's extensions, KServe's V1 protocol
(docs/kserve.md), and the paths that models declare (`@custom_handler` of MLServer's runtimes, docs/mlserver.md).

Bodies pass through as bytes: the worker reads and writes them. Errors are `{"error": text}`. Of V1, models written for
other servers get tensors; TorchServe handlers get the body (`torchserve.py`).
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.config.keys import KeyKind
from ts_frontend.errors import InvalidArgument, MessageTooLarge, ModelNotFound, ServeError, Unimplemented
from ts_frontend.http.errors import ErrorDialect, MethodNotAllowed, UnknownEncoding, refusal
from ts_frontend.http.request import Header, HttpAnswer, HttpRequest, compact_json, json_object
from ts_frontend.http.routing import Effect, Match
from ts_frontend.http.torchserve import EXPLAIN, PREDICT, HttpInference, answer_of, handler_headers, json_of_model
from ts_frontend.job import Job
from ts_frontend.models.health import Health
from ts_frontend.models.model import ROUTE_MARK, Model, Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.settings import TensorSpec, as_json
from ts_frontend.open_inference import models as tensor_models
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.models import (
    LogSettings,
    TraceSettings,
    config_of,
    load_parameters_of_json,
    statistics_json,
    trace_given,
    unloads_dependents,
)
from ts_frontend.open_inference.requests import (
    WHOLE_BYTES_MAX,
    Regions,
    check_cuda,
    count_items,
    joined_generate,
    joined_json,
    refuse_cuda,
    refused,
    region_given,
)
from ts_frontend.scheduling.queues import SequenceHeaders
from ts_frontend.scheduling.stream import chunks

#: Smaller answers are not compressed: they fit into one packet.
COMPRESSED_BYTES_MIN = 1400
#: Larger bodies are compressed and decompressed in a thread.
INLINE_BYTES_MAX = 16 * 1024
_GZIP, _ZLIB, _FAST = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, 1


async def body_of(request: HttpRequest) -> bytes:
    """Returns the decompressed body. Raises UnknownEncoding, InvalidArgument for a corrupt one, MessageTooLarge."""
    data = await request.body()
    encoding = request.header(b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding not in ("gzip", "deflate"):
        raise UnknownEncoding(f"content-encoding {encoding!r} is not supported; gzip and deflate are")
    limit = request.limits.bytes_max
    return await asyncio.to_thread(decompressed, data, encoding, limit)


def decompressed(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """The decompressed body, at most `bytes_max`. Some clients send deflate without zlib's header."""
    bits = _GZIP if encoding == "gzip" else _ZLIB if data[:1] and data[0] & 15 == 8 else -zlib.MAX_WBITS
    reader = zlib.decompressobj(bits)
    try:
        found = reader.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise InvalidArgument(f"The body is not {encoding}, as its content-encoding says: {error}") from None
    if len(found) > bytes_max:
        raise MessageTooLarge(f"Request of over {bytes_max} bytes, decompressed, is over max_request_size")
    if not reader.eof or reader.unused_data:
        raise InvalidArgument(f"The body is not {encoding}, as its content-encoding says: it is cut short or too long")
    return found


async def compressed(request: HttpRequest, answer: HttpAnswer) -> HttpAnswer:
    """Returns the answer, compressed by the request's accept-encoding: gzip before deflate."""
    body = answer.body
    if not isinstance(body, (bytes, bytearray, memoryview)) or len(body) < COMPRESSED_BYTES_MIN:
        return answer
    wanted = _wanted(request.header(b"accept-encoding"))
    if not wanted:
        return answer
    small = len(body) <= INLINE_BYTES_MAX
    data = _packed(body, wanted) if small else await asyncio.to_thread(_packed, body, wanted)
    return answer._replace(headers=(*answer.headers, (b"content-encoding", wanted.encode())), body=data)


def _wanted(accepted: str) -> str:
    names = set()
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if weight.replace(" ", "").rstrip("0") not in ("q=", "q=0."):
            names.add(name.strip())
    return next((name for name in ("gzip", "deflate") if name in names), "")


def _packed(data: bytes | bytearray | memoryview, encoding: str) -> bytes:
    writer = zlib.compressobj(_FAST, zlib.DEFLATED, _GZIP if encoding == "gzip" else _ZLIB)
    return writer.compress(data) + writer.flush()


EVENTS: Header = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(eq=False)
class HttpOpenInference:
    """`keys`: as in `OpenInferenceService`.

    `always`: `/v2/models/M/infer` also reads tensors for models that declare none; otherwise `torchserve` passes the
    body to their handlers unchanged."""

    models: Registry
    health: Health
    repository: Repository
    about: tensor_models.About
    regions: Regions
    keys: SequenceHeaders
    _: KW_ONLY
    always: bool
    torchserve: HttpInference

    def _model(self, request: HttpRequest) -> Model:
        params = request.path_params
        return tensor_requests.find(self.models, params["model_name"], params.get("model_version", ""))

    # --- health and metadata

    async def server_metadata(self, request: HttpRequest) -> HttpAnswer:
        extensions = tensor_models.extensions(self.regions)
        return compact_json(200, {**self.about._asdict(), "extensions": extensions})

    async def live(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"live": True})

    async def server_ready(self, request: HttpRequest) -> HttpAnswer:
        """Answers with `live`, as the protocol specifies, and `ready`, which KServe's clients read."""
        ready = self.health.ready
        return compact_json(200 if ready else 503, {"ready": ready, "live": ready})

    async def list_models(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"models": sorted(model.name for model in self.models.defaults())})

    async def ready(self, request: HttpRequest) -> HttpAnswer:
        model = self._model(request)
        ready = self.health.serves(model)
        return compact_json(200 if ready else 503, {"name": model.name, "ready": ready})

    async def metadata(self, request: HttpRequest) -> HttpAnswer:
        model = self._model(request)
        signature = model.signature
        found: dict[str, Any] = {
            "name": model.name,
            "versions": [one.version for one in self.models.versions(model.name)],
            "platform": signature.platform,
            "inputs": [tensor_metadata(spec) for spec in signature.inputs],
            "outputs": [tensor_metadata(spec) for spec in signature.outputs],
        }
        if signature.metadata:
            found["parameters"] = dict(signature.metadata)
        return compact_json(200, found)

    async def index(self, request: HttpRequest) -> HttpAnswer:
        asked = json_object(await request.body())
        found = await self.repository.index(asked.get("ready") is True)
        return compact_json(
            200, [{"name": one.name, "version": one.version, "state": one.state, "reason": one.reason} for one in found]
        )

    async def config(self, request: HttpRequest) -> HttpAnswer:
        model = self._model(request)
        return compact_json(200, as_json(config_of(self.models, model.name, model.version)))

    async def load(self, request: HttpRequest) -> HttpAnswer:
        name = request.path_params["model_name"]
        parameters = await asyncio.to_thread(load_parameters_of_json, await request.body())
        await self.repository.load(name, *parameters)
        return compact_json(200, {"name": name, "load": True})

    async def unload(self, request: HttpRequest) -> HttpAnswer:
        name = request.path_params["model_name"]
        dependents = unloads_dependents(_parameters(json_object(await request.body())))
        await self.repository.unload(name, dependents=dependents)
        return compact_json(200, {"name": name, "unload": True})

    # --- inference

    async def _submit(self, request: HttpRequest, form: str) -> Job:
        """Submits a request. If `form` isn't streamed, max_response_size limits all answers together."""
        self._model(request)  # refuses an unknown model before reading a large body
        body = await body_of(request)
        head = tensor_requests.head_of_json(body, request.header(tensor_requests.LENGTH_HEADER))
        small = len(head) <= WHOLE_BYTES_MAX
        given = tensor_requests.of_json(head) if small else await tensor_requests.of_large_json(head)
        await tensor_requests.count_items(self._model(request), head)
        model = self._model(request)  # the model may have been replaced meanwhile
        headers, deadline_s = request.for_handler(), math.inf
        if given:
            headers, deadline_s = tensor_requests.scheduled(model, given, headers, deadline_s, self.keys)
        answer = model.submit(
            [Input("", f"\0{form}{self.regions.option(body)}", body)],
            headers=headers,
            deadline_s=deadline_s,
            request_id=request.request_id,
            stream=form.endswith(";stream"),
            version_named="model_version" in request.path_params,
        )
        request.when_gone(answer.cancel)
        return answer

    async def infer(self, request: HttpRequest) -> HttpAnswer:
        if self._is_torchserves(request):
            return await self.torchserve.of_v2(request, PREDICT)
        if request.method != "POST":
            raise MethodNotAllowed("POST")
        answer = await self._one(await self._submit(request, "json"), joined_json)
        return await compressed(request, answer)

    def _is_torchserves(self, request: HttpRequest) -> bool:
        """Whether a body goes to the handler unchanged, as in TorchServe; never with binary tensors."""
        params = request.path_params
        if self.always or "model_version" in params or request.header(tensor_requests.LENGTH_HEADER):
            return False
        try:
            return not self.models.find(params["model_name"]).takes_tensors
        except ModelNotFound:
            return False

    async def infer_stream(self, request: HttpRequest) -> HttpAnswer:
        return await self._events(await self._submit(request, "json;stream"))

    async def generate(self, request: HttpRequest) -> HttpAnswer:
        return await self._one(await self._submit(request, "generate"), joined_generate)

    async def generate_stream(self, request: HttpRequest) -> HttpAnswer:
        return await self._events(await self._submit(request, "generate;stream"))

    async def _one(self, answer: Job, join: Callable[[list[Buffer]], bytes]) -> HttpAnswer:
        pieces = await answer.pieces()
        body = pieces[0] if len(pieces) == 1 else join(pieces)
        return json_of_model(body, answer.headers)

    async def _events(self, answer: Job) -> HttpAnswer:
        """Answers with an event for each result. A failure before the first event raises; a later one is an event."""
        pieces = chunks(answer)
        first = await anext(pieces)
        return HttpAnswer(200, (EVENTS, *handler_headers(answer.told)), _events(first, pieces))


async def _events(first: list[Buffer], rest: AsyncIterator[list[Buffer]]) -> AsyncIterator[list[bytes]]:
    try:
        yield [event(piece) for piece in first if len(piece)]
        async for pieces in rest:
            yield [event(piece) for piece in pieces if len(piece)]
    except ServeError as error:
        yield [event(refusal(error, ErrorDialect.OPEN_INFERENCE).body)]  # type: ignore[arg-type]
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters") or {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"parameters must be an object, not {found!r}")
    return found


def event(data: Buffer) -> bytes:
    return b"data: " + bytes(data) + b"\n\n"


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    if spec.parameters:
        found["parameters"] = dict(spec.parameters)
    return found


class HttpTriton:
    def __init__(self, models: Registry, regions: Regions, logs: LogSettings, traces: TraceSettings) -> None:
        self._models, self._regions = models, regions
        self._logs, self._traces = logs, traces

    # --- statistics and settings

    async def statistics(self, request: HttpRequest) -> HttpAnswer:
        params = request.path_params
        found = statistics_json(self._models, params.get("model_name", ""), params.get("model_version", ""))
        return compact_json(200, found)

    async def logging(self, request: HttpRequest) -> HttpAnswer:
        given = json_object(await request.body()) if request.method == "POST" else {}
        return compact_json(200, self._logs.change(given))

    async def trace_setting(self, request: HttpRequest) -> HttpAnswer:
        given = trace_given(json_object(await request.body())) if request.method == "POST" else {}
        found = self._traces.change(given, request.path_params.get("model_name", ""))
        return compact_json(200, {name: all_ if name == "trace_level" else all_[0] for name, all_ in found.items()})

    # --- shared memory: of one region, or of all

    async def regions(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, [one._asdict() for one in self._regions.status(_region(request))])

    async def register_region(self, request: HttpRequest) -> HttpAnswer:
        self._regions.register(*region_given(_region(request), json_object(await request.body())))
        return compact_json(200, {})

    async def unregister_regions(self, request: HttpRequest) -> HttpAnswer:
        self._regions.unregister(_region(request))
        return compact_json(200, {})

    async def cuda_regions(self, request: HttpRequest) -> HttpAnswer:
        check_cuda(_region(request))
        return compact_json(200, [])

    async def register_cuda_region(self, request: HttpRequest) -> HttpAnswer:
        refuse_cuda()

    async def unregister_cuda_regions(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {})


def _region(request: HttpRequest) -> str:
    return request.path_params.get("region_name", "")


#: The adapter of programs, the only one with explanations.
PROGRAM = "program"


class HttpKServe:
    """Calls of models for other servers, with KServe's errors; `torchserve` answers those of TorchServe handlers."""

    def __init__(self, models: Registry, torchserve: HttpInference) -> None:
        self._models, self._torchserve = models, torchserve

    async def alive(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"status": "alive"})

    async def predict(self, request: HttpRequest) -> HttpAnswer:
        model = self._models.find(request.path_params["model_name"])
        of_tensors = model.adapter or model.is_language_model
        return await (self._ask(model, "v1", request) if of_tensors else self._torchserve.of_kserve(request, PREDICT))

    async def explain(self, request: HttpRequest) -> HttpAnswer:
        model = self._models.find(request.path_params["model_name"])
        if model.adapter not in ("", PROGRAM):
            return _refusal(Unimplemented(f"Model {model.name} gives no explanations"))
        if model.adapter:
            return await self._ask(model, "v1;explain", request)
        return await self._torchserve.of_kserve(request, EXPLAIN)

    async def _ask(self, model: Model, form: str, request: HttpRequest) -> HttpAnswer:
        try:
            body = await request.body()
            await count_items(model, body)
            job = submitted(request, model, Input("", f"\0{form}", body))
            found = [piece async for pieces in chunks(job) for piece in pieces if len(piece)]
            if len(found) != 1:
                raise refused(len(found))
        except ServeError as error:
            return _refusal(error)
        return json_of_model(found[0], job.headers)


def submitted(request: HttpRequest, model: Model, given: Input, more: Pairs = (), **how: Any) -> Job:
    """Submits a request, which is cancelled when its client leaves. `more`: further headers for the handler; `how`: as
    of `Model.submit`."""
    job = model.submit([given], headers=request.for_handler(more), request_id=request.request_id, **how)
    request.when_gone(job.cancel)
    return job


def _refusal(error: ServeError) -> HttpAnswer:
    return refusal(error, ErrorDialect.OPEN_INFERENCE)


#: Prefixes of the server's own paths; a model can't declare a path below them.
RESERVED = frozenset({"predictions", "explanations", "ping", "models", "v1", "workflows", "wfpredict", "metrics"})
#: Headers about the body's encoding; the model gets the body decoded.
_ENCODING = b"content-encoding"
#: The keys for models' paths: those for inference.
_MATCH = Match(Effect.RUNS, False, False, ErrorDialect.OPEN_INFERENCE, (KeyKind.INFERENCE,))


class HttpCustomHandlers:
    """The paths of models' default versions. If two models declare the same path, the first one has it."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    def find(self, method: str, path: str) -> Match | None:
        if path.partition("/")[2].partition("/")[0] in RESERVED:
            return None
        found = {
            one.method: model
            for model in reversed(self._models.defaults())
            for one in reversed(model.routes)
            if one.fits(path)
        }
        if method in found:
            return _MATCH._replace(serve=partial(_asked, found[method]))
        return _MATCH._replace(allowed=sorted(found)) if found else None


async def _asked(model: Model, request: HttpRequest) -> HttpAnswer:
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers if name != _ENCODING
    ]
    line = {":method": request.method, ":path": request.path, ":query": request.query.decode("latin-1")}
    job = model.submit(
        [Input("", ROUTE_MARK, await body_of(request))],
        headers=[*headers, *line.items()],
        request_id=request.request_id,
        stream=True,
        alone=True,
        counted=False,
    )
    request.when_gone(job.cancel)
    return await answer_of(job)
