"""The door of the Open Inference Protocol over HTTP: `/v2` (docs/open-inference.md).

Bodies pass through as bytes: the worker reads and writes them. Errors are `{"error": text}`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.errors import Code, InvalidArgument, MessageTooLarge, ModelNotFound, ServeError
from ts_frontend.http.app import MethodNotAllowed, retry_headers
from ts_frontend.http.request import Header, HttpAnswer, HttpRequest, Serve, compact_json, json_object
from ts_frontend.job import Job
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.signature import TensorSpec, as_json
from ts_frontend.open_inference import models as tensor_models
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.repository import check_unload_parameters, config_of, load_parameters
from ts_frontend.open_inference.requests import joined_generate, joined_json
from ts_frontend.open_inference.shared_memory import Regions
from ts_frontend.scheduling.sequence_queue import SequenceHeaders

log = logging.getLogger(__name__)

ACCEPTED: Header = (b"accept-encoding", b"gzip, deflate")
#: Smaller answers go as they are: one packet holds them.
COMPRESSED_BYTES_MIN = 1400
#: Larger bodies are compressed and decompressed in a thread, beside other requests.
INLINE_BYTES_MAX = 16 * 1024
_GZIP, _ZLIB, _FAST = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, 1


class UnknownEncoding(ServeError):
    """A body in an encoding that isn't read here."""

    code, http_status, type_name = Code.UNIMPLEMENTED, 501, "NotImplementedException"


class UnknownPath(ServeError):
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"


def served(methods: Sequence[str], serve: Serve) -> Serve:
    """Answers these methods (HEAD with GET) and tells errors in the protocol's form."""

    async def run(request: HttpRequest) -> HttpAnswer:
        try:
            if request.method not in methods and not (request.method == "HEAD" and "GET" in methods):
                raise MethodNotAllowed
            return await serve(request)
        except ServeError as error:
            log.debug("%s %r ended %s: %s", request.method, request.path, error.http_status, error.message)
            return refusal(error)

    return run


def refusal(error: ServeError) -> HttpAnswer:
    """The protocol's form of an error."""
    status = error.http_status
    answer = compact_json(status if 400 <= status < 600 else 500, {"error": error.message})
    own = (ACCEPTED,) if isinstance(error, UnknownEncoding) else retry_headers(error)
    return answer._replace(headers=(*answer.headers, *own))


def unknown(request: HttpRequest) -> Serve | None:
    """The route of what no other knows under `/v2`."""
    return _unknown if request.segments[:1] == ["v2"] else None


async def _unknown(request: HttpRequest) -> HttpAnswer:
    return refusal(UnknownPath(f"Not Found: nothing answers {request.method} {request.path}"))


async def body_of(request: HttpRequest) -> bytes:
    """The body, decompressed. UnknownEncoding; InvalidArgument for one that can't be; MessageTooLarge."""
    data = await request.body()
    encoding = request.header(b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding not in ("gzip", "deflate"):
        raise UnknownEncoding(f"content-encoding {encoding!r} is not read; gzip and deflate are")
    limit = request.limits.bytes_max
    return await asyncio.to_thread(decompressed, data, encoding, limit)


def decompressed(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """At most `bytes_max`. A deflate body may lack zlib's header, as of some clients."""
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
    """The answer as the request's accept-encoding wants it: gzip before deflate."""
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

Act: TypeAlias = "Callable[[HttpRequest, Model], Awaitable[HttpAnswer]]"


class HttpOpenInference:
    """`keys`: as in `OpenInferenceService`.

    `always`: also `/v2/models/M/infer` of models that declare no tensors; TorchServe hands their body to the handler
    as it is."""

    def __init__(
        self,
        models: Registry,
        health: Health,
        repository: Repository,
        about: tensor_models.About,
        regions: Regions,
        keys: SequenceHeaders,
        *,
        always: bool,
    ) -> None:
        self._models = models
        self._repository = repository
        self._health = health
        self._about = about
        self._regions = regions
        self._keys = keys
        self._always = always
        self._of_model: dict[tuple[str, ...], tuple[str, Act]] = {
            (): ("GET", self._metadata),
            ("ready",): ("GET", self._ready),
            ("config",): ("GET", self._config),
            ("infer",): ("POST", self._infer),
            ("infer_stream",): ("POST", self._infer_stream),
            ("generate",): ("POST", self._generate),
            ("generate_stream",): ("POST", self._generate_stream),
        }

    def route(self, request: HttpRequest) -> Serve | None:
        segments = request.segments
        if not segments or segments[0] != "v2":
            return None
        match segments[1:]:
            case []:
                return served(["GET"], self._server)
            case ["health", "live"]:
                return served(["GET"], self._live)
            case ["health", "ready"]:
                return served(["GET"], self._server_ready)
            case ["models"]:
                return served(["GET"], self._list)
            case ["models", name, "versions", version, *rest] if tuple(rest) in self._of_model:
                return self._model(name, version, tuple(rest))
            case ["models", name, *rest] if tuple(rest) in self._of_model and not self._is_torchserves(request, rest):
                return self._model(name, "", tuple(rest))
            case ["repository", "index"] | ["repository", _, "index"]:
                return served(["POST"], self._index)
        return None

    def managing(self, request: HttpRequest) -> Serve | None:
        """The calls that change what is served."""
        match request.segments:
            case ["v2", "repository", "models", name, "load"] | ["v2", "repository", _, "models", name, "load"]:
                return served(["POST"], partial(self._load, name))
            case ["v2", "repository", "models", name, "unload"] | ["v2", "repository", _, "models", name, "unload"]:
                return served(["POST"], partial(self._unload, name))
        return None

    def _is_torchserves(self, request: HttpRequest, rest: list[str]) -> bool:
        """Whether a request goes to the handler as TorchServe would hand it on. One with binary tensors never does."""
        if rest != ["infer"] or self._always or request.header(tensor_requests.LENGTH_HEADER):
            return False
        try:
            return not self._models.find(request.segments[2]).takes_tensors
        except ModelNotFound:
            return False

    def _model(self, name: str, version: str, rest: tuple[str, ...]) -> Serve:
        method, act = self._of_model[rest]

        async def serve(request: HttpRequest) -> HttpAnswer:
            return await act(request, tensor_models.find(self._models, name, version))

        return served([method], serve)

    # --- health and metadata

    async def _server(self, request: HttpRequest) -> HttpAnswer:
        extensions = tensor_models.extensions(self._regions)
        return compact_json(200, {**self._about._asdict(), "extensions": extensions})

    async def _live(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"live": True})

    async def _server_ready(self, request: HttpRequest) -> HttpAnswer:
        """KServe's clients read `ready`, the protocol's text says `live`."""
        ready = self._health.ready
        return compact_json(200 if ready else 503, {"ready": ready, "live": ready})

    async def _list(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"models": sorted(model.name for model in self._models.defaults())})

    async def _ready(self, request: HttpRequest, model: Model) -> HttpAnswer:
        return compact_json(200 if model.ready else 503, {"name": model.name, "ready": model.ready})

    async def _metadata(self, request: HttpRequest, model: Model) -> HttpAnswer:
        signature = model.signature
        found: dict[str, Any] = {
            "name": model.name,
            "versions": [one.version for one in self._models.versions(model.name)],
            "platform": signature.platform,
            "inputs": [tensor_metadata(spec) for spec in signature.inputs],
            "outputs": [tensor_metadata(spec) for spec in signature.outputs],
        }
        if signature.metadata:
            found["parameters"] = dict(signature.metadata)
        return compact_json(200, found)

    async def _index(self, request: HttpRequest) -> HttpAnswer:
        asked = json_object(await request.body())
        found = await self._repository.index(asked.get("ready") is True)
        return compact_json(
            200, [{"name": one.name, "version": one.version, "state": one.state, "reason": one.reason} for one in found]
        )

    async def _config(self, request: HttpRequest, model: Model) -> HttpAnswer:
        return compact_json(200, as_json(config_of(self._models, model.name, model.version)))

    async def _load(self, name: str, request: HttpRequest) -> HttpAnswer:
        await self._repository.load(name, *load_parameters(_parameters(json_object(await request.body()))))
        return compact_json(200, {"name": name, "load": True})

    async def _unload(self, name: str, request: HttpRequest) -> HttpAnswer:
        check_unload_parameters(set(_parameters(json_object(await request.body()))))
        await self._repository.unload(name)
        return compact_json(200, {"name": name, "unload": True})

    # --- inference

    async def _submit(self, request: HttpRequest, model: Model, form: str) -> Job:
        """Of a form that isn't streamed all answers together may take max_response_size."""
        body = await body_of(request)
        given = await tensor_requests.of_json(body, request.header(tensor_requests.LENGTH_HEADER))
        named = "versions" in request.segments
        model = tensor_models.find(self._models, model.name, model.version if named else "")  # replaced meanwhile?
        headers: Pairs = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.headers]
        deadline_s = math.inf
        if given:
            headers, deadline_s = tensor_requests.scheduled(model, given, headers, deadline_s, self._keys)
        answer = model.submit(
            [Input("", f"\0{form}{self._regions.option(body)}", body)],
            headers=headers,
            deadline_s=deadline_s,
            request_id=request.request_id,
            stream=form.endswith(";stream"),
            version_named=named,
        )
        request.when_gone(answer.cancel)
        return answer

    async def _infer(self, request: HttpRequest, model: Model) -> HttpAnswer:
        answer = await self._one(await self._submit(request, model, "json"), joined_json)
        return await compressed(request, answer)

    async def _infer_stream(self, request: HttpRequest, model: Model) -> HttpAnswer:
        return await self._events(await self._submit(request, model, "json;stream"))

    async def _generate(self, request: HttpRequest, model: Model) -> HttpAnswer:
        return await self._one(await self._submit(request, model, "generate"), joined_generate)

    async def _generate_stream(self, request: HttpRequest, model: Model) -> HttpAnswer:
        return await self._events(await self._submit(request, model, "generate;stream"))

    async def _one(self, answer: Job, join: Callable[[list[Buffer]], bytes]) -> HttpAnswer:
        pieces = await answer.pieces()
        body = pieces[0] if len(pieces) == 1 else join(pieces)
        return HttpAnswer(200, [(name.encode(), value.encode("latin-1")) for name, value in answer.headers], body)

    async def _events(self, answer: Job) -> HttpAnswer:
        """An event for each answer; a failure before the first has its status, a later one is an event."""
        pieces = answer.chunks()
        first = await anext(pieces)
        return HttpAnswer(200, (EVENTS,), _events(first, pieces))


async def _events(first: list[Buffer], rest: AsyncIterator[list[Buffer]]) -> AsyncIterator[list[bytes]]:
    try:
        yield [event(piece) for piece in first if len(piece)]
        async for pieces in rest:
            yield [event(piece) for piece in pieces if len(piece)]
    except ServeError as error:
        yield [event(refusal(error).body)]  # type: ignore[arg-type]
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters") or {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"parameters is an object, not {found!r}")
    return found


def event(data: Buffer) -> bytes:
    """A server-sent event."""
    return b"data: " + bytes(data) + b"\n\n"


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    if spec.parameters:
        found["parameters"] = dict(spec.parameters)
    return found
