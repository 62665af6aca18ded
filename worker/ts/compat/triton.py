"""Runs the `TritonPythonModel` of an unchanged Triton model repository (docs/triton.md)."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ts.compat import add_shims
from ts.compat.triton_backend import graphs
from ts.compat.triton_backend.bls import InferenceRequest
from ts.compat.triton_backend.edges import Edges, tensors_of
from ts.compat.triton_backend.messages import (
    InferenceResponse,
    InferenceResponseSender,
    TritonModelException,
    as_failure,
)
from ts.compat.triton_backend.model_config import (
    ModelConfig,
    NobodyWaits,
    check_warmup,
    checked,
    is_decoupled,
    signature_of,
    warmup_samples,
)
from ts.context import Context, RequestCancelled
from ts.runtime import calls
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings, context_of, declared, openai_of
from ts.runtime.running import Ended, Refused, Together
from ts.tensors import types
from ts.tensors.types import BadTensor
from ts.utils.util import PredictionException

CLASS = "TritonPythonModel"
PYTHON = "python"
BAD_REQUEST = 400
#: The most responses of a decoupled model that are sent in one turn of the loop.
TOGETHER_MAX = 64


def load(settings: Settings) -> Loaded:
    """`adapter_settings`: `config` (config.pbtxt as a dict), the paths `model_file` and `model_repository`, and
    `auto_complete`, whether the model may add to the configuration."""
    adapted = settings["adapter_settings"]
    if adapted.get("backend", PYTHON) != PYTHON:
        return graphs.load(settings)
    model_class = _import(Path(adapted["model_file"]))
    config = _completed(model_class, adapted)
    context = context_of(settings)
    model = model_class()
    decoupled = is_decoupled(config)
    served = TritonAdapter(model, config, adapted, settings)
    asynchronous = decoupled or inspect.iscoroutinefunction(getattr(model, "execute", None))
    served.initialize(asynchronous)
    signature = signature_of(config)
    tensors = declared(settings | {"tensors": tensors_of(config, signature, adapted.get("labels") or {})})
    entry: Any = served.decoupled if decoupled else served.answers_async if asynchronous else served.answers
    kind = "async" if asynchronous else "blocking"
    loop = asyncio.new_event_loop() if asynchronous else None
    _warm_up(entry, loop, config, Path(settings["model_dir"]).parent)
    completed = None if config is adapted["config"] else config
    return Loaded(
        entry, context, kind, loop, "requests", tensors, signature, completed=completed, openai=openai_of(model)
    )


def _warm_up(entry: Any, loop: asyncio.AbstractEventLoop | None, config: dict[str, Any], model_dir: Path) -> None:
    """Makes the model answer its samples. Raises HandlerNotUsable if it fails."""
    for sample in warmup_samples(config, model_dir):
        context = NobodyWaits()
        if loop is None:
            check_warmup(sample, entry([sample.request], context))
        else:
            check_warmup(sample, loop.run_until_complete(_all(entry([sample.request], context))))


async def _all(answering: Any) -> list[Any]:
    if inspect.isawaitable(answering):
        return list(await answering)
    found = [value async for together in answering for _, value in together.pieces]
    return [value.value if isinstance(value, Ended) else value for value in found]


def _import(file: Path) -> Any:
    """Imports the model's class, with the directories of its version and its model on the path."""
    add_shims()
    sys.path[:0] = [str(file.parent), str(file.parent.parent)]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise HandlerNotUsable(f"there is no {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, CLASS, None)
    if not inspect.isclass(found):
        raise HandlerNotUsable(f"{file.name} has no class {CLASS}")
    if not callable(getattr(found, "execute", None)):
        raise HandlerNotUsable(f"class {CLASS} of {file.name} has no method execute(requests)")
    return found


def _completed(model_class: Any, adapted: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = adapted["config"]
    complete = getattr(model_class, "auto_complete_config", None)
    if complete is None or not adapted.get("auto_complete", True):
        return checked(config)
    found = complete(ModelConfig(config))
    if not isinstance(found, ModelConfig):
        raise HandlerNotUsable(f"auto_complete_config returned {type(found).__name__}, not the ModelConfig it got")
    return checked(found.as_dict())


class TritonAdapter:
    """The adapter of a Triton Python model."""

    def __init__(self, model: Any, config: dict[str, Any], adapted: dict[str, Any], settings: Settings) -> None:
        self._model, self._config = model, config
        self._adapted, self._settings = adapted, settings
        self._outputs = [one["name"] for one in config.get("output") or ()]
        self._edges = Edges(config, strict=False)
        self._thread: ThreadPoolExecutor | None = None

    def initialize(self, own_thread: bool) -> None:
        """Calls `initialize`. With `own_thread` all blocking calls of the model run in one thread."""
        initialize = getattr(self._model, "initialize", None)
        if own_thread:
            self._thread = ThreadPoolExecutor(1, "triton-model")
        if initialize is None:
            return
        if self._thread is None:
            initialize(self._arguments())
        else:
            self._thread.submit(initialize, self._arguments()).result()

    def _arguments(self) -> dict[str, str]:
        settings, gpu = self._settings, self._settings.get("gpu_id")
        name = str(settings.get("model_name", ""))
        return {
            "model_config": json.dumps(self._config),
            "model_instance_kind": "CPU" if gpu is None else "GPU",
            "model_instance_name": f"{name}_0_{settings.get('worker_id', 0)}",
            "model_instance_device_id": str(gpu or 0),
            "model_repository": str(self._adapted.get("model_repository", "")),
            "model_version": str(settings.get("model_version", "")),
            "model_name": name,
        }

    def _requests(
        self, data: Sequence[types.InferenceRequest], context: Context
    ) -> tuple[dict[int, InferenceRequest], dict[int, Exception]]:
        found: dict[int, InferenceRequest] = {}
        refused: dict[int, Exception] = {}
        for index, one in enumerate(data):
            try:
                inputs = self._edges.taken(one)
            except BadTensor as error:
                refused[index] = PredictionException(str(error), BAD_REQUEST)
                continue
            is_cancelled = partial(context.is_cancelled, index)
            found[index] = InferenceRequest.of(one, inputs, self._outputs, is_cancelled)
        return found, refused

    # --- one response for each request

    def answers(self, data: Sequence[types.InferenceRequest], context: Context) -> list[Any]:
        here = calls.here()
        here.batch_id = calls.batch_of(context)
        requests, refused = self._requests(data, context)
        try:
            found = self._model.execute(list(requests.values())) if requests else []
            return self._answers(found, requests, refused)
        except Exception as error:
            raise _raised(error, context) from error
        finally:
            here.sweep()

    async def answers_async(self, data: Sequence[types.InferenceRequest], context: Context) -> list[Any]:
        calls.belong_to(calls.batch_of(context))
        requests, refused = self._requests(data, context)
        try:
            found = await self._model.execute(list(requests.values())) if requests else []
            return self._answers(found, requests, refused)
        except Exception as error:
            raise _raised(error, context) from error
        finally:
            calls.here().sweep()

    def _answers(self, found: Any, requests: Collection[int], refused: dict[int, Exception]) -> list[Any]:
        if not isinstance(found, (list, tuple)) or len(found) != len(requests):
            size = len(found) if isinstance(found, (list, tuple)) else type(found).__name__
            raise TritonModelException(
                f"execute returns a list of one InferenceResponse for each of {len(requests)} requests: {size}"
            )
        if not refused:
            return [self._answer(response) for response in found]
        given: dict[int, Any] = dict(zip(requests, map(self._answer, found), strict=True)) | refused
        return [given[index] for index in range(len(given))]

    def _answer(self, response: Any) -> Any:
        """A response for the runtime; an error, or one that doesn't fit its declaration, fails only its request."""
        if not isinstance(response, InferenceResponse):
            return as_failure(f"execute gave {type(response).__name__} instead of an InferenceResponse")
        if response._error is not None:
            return as_failure(response._error)
        try:
            return self._edges.given(response.neutral())
        except TritonModelException as error:
            return as_failure(error)

    # --- any number of responses

    async def decoupled(self, data: Sequence[types.InferenceRequest], context: Context) -> AsyncIterator[Together]:
        """Yields the responses that the model sends, in order; responses that are ready together are in one list."""
        calls.belong_to(calls.batch_of(context))
        (requests, refused), loop = self._requests(data, context), asyncio.get_running_loop()
        if refused:
            yield Together([(index, Ended(error)) for index, error in refused.items()])
        sent = _Sent(loop)
        open_requests = set(requests)
        for index, request in requests.items():
            request._sender = InferenceResponseSender(partial(sent.put, index), request.is_cancelled)
        running = asyncio.ensure_future(self._execute(list(requests.values())))
        running.add_done_callback(sent.wake)
        while open_requests:
            pieces: list[tuple[int, Any]] = []
            for index, response, final in await sent.taken(running):
                if index in open_requests:
                    pieces.append((index, self._piece(response, final)))
                    if final:
                        open_requests.discard(index)
            if pieces:
                yield Together(pieces)
        await running

    def _piece(self, response: InferenceResponse | None, final: bool) -> Any:
        """One response to a request. An error without the final flag doesn't end it."""
        piece = None if response is None else self._answer(response)
        return Ended(piece) if final else Refused(piece) if isinstance(piece, Exception) else piece

    async def _execute(self, requests: list[InferenceRequest]) -> None:
        try:
            if inspect.iscoroutinefunction(self._model.execute):
                found = await self._model.execute(requests)
            else:
                found = await self._in_thread(requests)
        except Exception as error:
            raise as_failure(error) from error
        finally:
            calls.here().sweep()
        if found is not None:
            raise TritonModelException("execute of a decoupled model returns None and sends responses by the senders")

    async def _in_thread(self, requests: list[InferenceRequest]) -> Any:
        """Runs a blocking `execute` in a thread; its calls to the server belong to this task's batch."""
        batch_id = calls.current_batch()

        def execute() -> Any:
            calls.belong_to(batch_id, coroutines=False)
            return self._model.execute(requests)

        return await asyncio.get_running_loop().run_in_executor(self._thread, execute)


def _raised(error: Exception, context: Context) -> BaseException:
    """An exception as the runtime's result. A request without a client counts as cancelled by the model."""
    return RequestCancelled() if context.cancelled else as_failure(error)


class _Sent:
    """The responses of a decoupled model, from any thread. The loop is woken once for all it has not taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[int, InferenceResponse | None, bool]] = deque()
        self._news = asyncio.Event()
        self._is_waking = False

    def put(self, index: int, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response to the request at that position of the batch; `final`: its last one."""
        self._waiting.append((index, response, final))
        if not self._is_waking:  # it's reset before the loop looks, so that nothing is overlooked
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._news.set)

    def wake(self, _: object) -> None:
        self._news.set()

    async def taken(self, running: asyncio.Future[None]) -> list[tuple[int, InferenceResponse | None, bool]]:
        """The next responses, at least one, as soon as there is any; when there is none, exceptions of `execute`
        (`running`) pass through. A model may continue sending after `execute` has returned."""
        while True:
            self._news.clear()
            self._is_waking = False
            waiting = self._waiting
            if waiting:
                return [waiting.popleft() for _ in range(min(len(waiting), TOGETHER_MAX))]
            if running.done():
                running.result()
            await self._news.wait()
