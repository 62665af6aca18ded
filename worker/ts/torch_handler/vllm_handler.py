"""Language models in vLLM. Needs `vllm`.

vLLM's own web application answers: it is called in this process and its event loop, without a socket, so that each path
of each release is there (docs/language-models.md).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

from ts.context import Context
from ts.handler_utils.utils import http_scope, needed
from ts.language.handler import Answer, Head, LanguageModelHandler, message_of
from ts.language.tally import WAITING, Tally
from ts.utils.util import PredictionException

Event: TypeAlias = "MutableMapping[str, Any]"
#: The modules of vLLM's functions, those of newer releases first.
_PLACES = {
    "make_arg_parser": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"),
    "build_async_engine_client": (
        *("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"),
    ),
}
MODELS = "v1/models"
#: The answer of a web application at a path that it doesn't have.
_NO_ROUTE = b'{"detail":"Not Found"}'
#: What vLLM's own registry tells: the engine knows it better than the answers.
_TOLD = (
    *("vllm:num_requests_running", WAITING, "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
)
#: How often the engine's health and its counts are looked at.
_LOOK_S = 1.0
#: The bytes of an answer that may wait for its reader.
_HELD_BYTES = 64 * 1024


class VLLMHandler(LanguageModelHandler):
    """The handler. `handler:` in model-config.yaml has `model_path` (a folder of the model's, or a name on the Hugging
    Face hub; by default the model's own folder), `vllm_engine_config` (options of `vllm serve`), `adapters` (LoRA's
    weights by name) and `chat_template`."""

    paths = LanguageModelHandler.paths | {"classify", "pooling", "generative_scoring", "v2/embed", "v2/rerank"}

    def __init__(self) -> None:
        super().__init__()
        #: Further names that requests may give as their model.
        self.openai_models: list[str] = []
        self._prefix = ""
        self._app: Any = None
        self._engine: Any = None
        self._kept = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def initialize(self, context: Context) -> None:
        """Starts the engine. Raises PackageMissing, ValueError for wrong settings, and vLLM's errors."""
        section = context.model_yaml_config.get("handler")
        needed("vllm", "vllm", "vllm_handler")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        folder = Path(context.system_properties["model_dir"])
        args = _arguments(section if isinstance(section, dict) else {}, folder, context.model_name)
        self.openai_adapters = {one.name: one.path for one in args.lora_modules or ()}
        self._prefix = f"{context.model_name}:"
        self.openai_models = args.served_model_name[1:]
        if args.enable_lora:
            os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # adds the paths, which clients don't reach
        else:
            self.adapters_fixed = (
                "vLLM computes adapters if its engine is started for them: set enable_lora: true in "
                "vllm_engine_config of the model's model-config.yaml"
            )
        client = _of_vllm("build_async_engine_client")(args)
        self._engine = engine = await self._kept.enter_async_context(client)
        given = {"args": args, "engine_client": engine, "vllm_config": getattr(engine, "vllm_config", None)}
        given["model_config"] = getattr(engine, "model_config", None)
        if hasattr(engine, "get_supported_tasks"):
            given["supported_tasks"] = await engine.get_supported_tasks()
        self._app = _called("build_app", given)
        self._app.state.server = SimpleNamespace(should_exit=False)  # vLLM's handlers tell it that the engine is dead
        await _called("init_app_state", given | {"state": self._app.state})
        scheduler = getattr(given["vllm_config"], "scheduler_config", None)
        self.slots = getattr(scheduler, "max_num_seqs", 0) * getattr(args, "data_parallel_size", 1)
        if not args.disable_log_stats:
            self.tally = Tally(_TOLD)
        self._keep(self._watch())

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._change_adapter("v1/load_lora_adapter", lora_name=name, lora_path=folder)

    async def unload_adapter(self, name: str) -> None:
        await self._change_adapter("v1/unload_lora_adapter", lora_name=name)

    async def _change_adapter(self, path: str, **asked: str) -> None:
        """Raises PredictionException with vLLM's own message."""
        if self.adapters_fixed:
            raise PredictionException(self.adapters_fixed, 501)
        async with aclosing(self._asked(path, json.dumps(asked).encode())) as pieces:
            head, whole = None, b""
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                else:
                    whole += piece
        if head is None or head.status != 200:
            status = 400 if head is None or head.status == 500 else head.status
            raise PredictionException(f"vLLM refuses the adapter {asked['lora_name']}: {message_of(whole)}", status)

    def ask(self, path: str, body: bytes) -> Answer:
        return self._asked(path, self._adapted(body) if self.openai_adapters else body)

    def _adapted(self, body: bytes) -> bytes:
        """The body with vLLM's name of an adapter in the place of MODEL:ADAPTER."""
        if self._prefix.encode() not in body:
            return body
        try:
            fields = json.loads(body)
            name = str(fields["model"]).removeprefix(self._prefix)
        except (ValueError, LookupError, TypeError, RecursionError):
            return body  # vLLM says what is wrong
        return json.dumps(fields | {"model": name}).encode() if name in self.openai_adapters else body

    async def _asked(self, path: str, body: bytes) -> Answer:
        call = _Call(body)
        task = self._keep(self._app(_scope(path, body), call.receive, call.send))
        task.add_done_callback(call.end)
        try:
            head = await call.head()
            piece = await call.piece()
            if (head.status, piece) == (404, _NO_ROUTE):
                raise PredictionException(f"vLLM has no /{path[:80]} for this model", 404)
            yield head
            while piece:
                yield piece
                piece = await call.piece()
        finally:
            call.leave()

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        """Ends the worker when the engine is dead, and tells the engine's counts."""
        counts = _Counts(self.tally) if self.tally.told else None
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._engine.check_health()
            except Exception as error:
                _end(error)
            if counts is not None:
                counts.tell()


def _end(error: Exception) -> NoReturn:
    raise SystemExit(f"vLLM's engine is dead ({type(error).__name__}: {error}): its worker ends") from error


class _Call:
    """One call of the application, as ASGI's server. What it sends waits here for the reader of the answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._head: Head | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._ended = False
        self._error: BaseException | None = None

    # --- the application's side

    async def receive(self) -> Event:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            kinds = [value for name, value in event.get("headers", ()) if bytes(name).lower() == b"content-type"]
            self._head = Head(event["status"], bytes(kinds[0]).decode("latin-1") if kinds else "text/plain")
        elif event["type"] == "http.response.body":
            if piece := event.get("body", b""):
                self._held.append(piece)
                self._held_bytes += len(piece)
            self._ended = not event.get("more_body", False)
        self._news.set()
        if self._held_bytes > _HELD_BYTES and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()

    def end(self, task: asyncio.Task[None]) -> None:
        self._error = None if task.cancelled() else task.exception()
        self._ended = True
        self._news.set()

    # --- the reader's side

    async def head(self) -> Head:
        """Raises the application's exception if it ends before it has answered."""
        while self._head is None:
            if self._ended:
                raise self._error or PredictionException("vLLM has not answered", 503)
            await self._more()
        return self._head

    async def piece(self) -> bytes:
        """All that has come; b"" at the end."""
        while not self._held:
            if self._ended:
                return b""
            await self._more()
        held, self._held, self._held_bytes = self._held, [], 0
        self._room.set()
        return held[0] if len(held) == 1 else b"".join(held)

    def leave(self) -> None:
        self._gone.set()
        self._room.set()

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()


class _Counts:
    """vLLM's metrics, of which those that have changed are told."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._registry = needed("prometheus_client", "prometheus_client", "vllm_handler").REGISTRY
        self._last: dict[str, float] = {}

    def tell(self) -> None:
        found: dict[str, float] = {}
        for family in self._registry.restricted_registry(_TOLD).collect():
            for sample in family.samples:
                if sample.name in _TOLD:  # one for each of several engines
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        for name, value in found.items():
            before = self._last.get(name, 0.0)
            if value != before:
                self._tally.tell(name, value, value - before)
        self._last = found


def _scope(path: str, body: bytes) -> Event:
    headers = [
        (b"host", b"engine"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    return http_scope("GET" if path == MODELS else "POST", f"/{path}", b"", headers)


def _of_vllm(name: str) -> Callable[..., Any]:
    """A function of vLLM's server. Raises RuntimeError in releases that have none where it was so far."""
    for place in _PLACES[name]:
        try:
            found: Callable[..., Any] | None = getattr(importlib.import_module(place), name, None)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("vllm"):
                raise
            continue
        if found is not None:
            return found
    version = importlib.import_module("vllm").__version__
    raise RuntimeError(f"vllm_handler doesn't know where vLLM {version} has {name}: not in {', '.join(_PLACES[name])}")


def _called(name: str, given: Mapping[str, Any]) -> Any:
    """Calls a function of vLLM's with those of the arguments that its release takes, by name."""
    function = _of_vllm(name)
    return function(**{one: given[one] for one in inspect.signature(function).parameters if one in given})


def _arguments(section: Mapping[str, Any], folder: Path, name: str) -> Namespace:
    """vLLM's arguments. Raises ValueError for those that the release doesn't take."""
    options = dict(section.get("vllm_engine_config") or {})
    path = options.pop("model", None) or section.get("model_path") or "."
    own = folder / str(path)
    named = options.pop("served_model_name", None) or []
    names = [name, *([named] if isinstance(named, str) else named)]
    words = ["--model", str(own) if own.exists() else str(path), "--served-model-name", *dict.fromkeys(names)]
    adapters = dict(section.get("adapters") or {})
    if adapters:
        places = {one: str(folder / where) if (folder / where).exists() else where for one, where in adapters.items()}
        modules = [json.dumps({"name": one, "path": where}) for one, where in places.items()]
        words += ["--enable-lora", "--lora-modules", *modules]
    if template := section.get("chat_template"):
        file = folder / template if len(template) < 256 and "\n" not in template else None
        words += ["--chat-template", str(file) if file is not None and file.is_file() else template]
    if os.environ.get("VLLM_API_KEY") or options.get("api_key"):
        raise ValueError("vLLM's own API key is set; keys are this server's: see docs/security.md")
    make = _of_vllm("make_arg_parser")
    parser: Any = inspect.getmodule(make).FlexibleArgumentParser()  # type: ignore[union-attr]
    parser.error = _refuse
    parser = make(parser)
    known = vars(parser.parse_args([]))
    if unknown := ", ".join(one for one in options if one not in known):
        version = importlib.import_module("vllm").__version__
        raise ValueError(f"vllm_engine_config has {unknown}, which vLLM {version} does not take")
    # Texts are read as on the command line, among them JSON; numbers, flags and lists are already values.
    parser.set_defaults(
        **{one: json.dumps(value) if isinstance(value, dict) else value for one, value in options.items()}
    )
    args: Namespace = parser.parse_args(words)
    return args


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"vLLM refuses its options: {message}")
