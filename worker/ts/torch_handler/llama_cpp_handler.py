"""Language models in a GGUF file, run by llama.cpp in this process. Needs `xllamacpp`.

The engine's own server answers: it listens on a Unix socket in a folder that nobody else can enter, and gets OpenAI's
and Anthropic's requests as they come, so that whatever it can do is there (docs/language-models.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import httptools

from ts.context import Context
from ts.handler_utils.utils import needed
from ts.language.handler import Answer, Head, LanguageModelHandler
from ts.utils.util import PredictionException

SUFFIX = ".gguf"
#: Settings in model-config.yaml (`handler:`) and the engine's parameters.
_SETTINGS = {
    "contextTokens": "n_ctx",
    "parallel": "n_parallel",
    "batchTokens": "n_batch",
    "gpuLayers": "n_gpu_layers",
    "embeddings": "embedding",
    "pooling": "pooling_type",
    "chatTemplate": "chat_template",
    "verbosity": "verbosity",
}
#: The engine's errors alone are logged: its other messages, of which each request has several, wake the frontend.
_VERBOSITY = 1
#: `file` is the name of one of several files; `adapters` are files of LoRA by the names that requests give them.
_OTHERS = ("file", "adapters", "engine")
_PARALLEL = 4
#: The longest path of a folder for sockets, whose own paths have at most 107 characters.
_PLACE_MAX = 75
_READ_BYTES = 64 * 1024
#: What the engine says of calls that other settings allow, with the status and the words for clients.
_MEANT = (
    (
        b"Start it with `--embeddings`",
        501,
        "the model gives texts alone: vectors need `embeddings: true` in `handler:`",
    ),
    (
        b"Start it with `--reranking`",
        501,
        "the model is served as no reranker: one needs `embeddings: true` in `handler:`",
    ),
    (
        b"input is not supported",
        400,
        "this engine takes texts alone; the engine vllm takes images, with a model that does",
    ),
)
#: The engine's messages about requests that it can't read, which it calls errors of its own.
_OF_CLIENTS = re.compile(rb'"message":"(?:Failed to parse|\'\w+\' is required|Missing )')


class LlamaCppHandler(LanguageModelHandler):
    """The handler. `handler:` in model-config.yaml has `_SETTINGS` and `_OTHERS`. `parallel` requests run side
    by side."""

    paths = LanguageModelHandler.paths | {"apply-template", "infill"}

    def __init__(self) -> None:
        super().__init__()
        self._server: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket = ""
        self.adapters_fixed = (
            "Adapters of the engine llama.cpp are loaded with the model: name them in its model-config.yaml "
            "(handler: adapters). The engines vllm and transformers load them while the model runs"
        )

    def initialize(self, context: Context) -> None:
        """Starts the engine. Raises PackageMissing; ValueError for wrong settings or files, and what the engine
        says."""
        engine = needed("xllamacpp", "xllamacpp", "A GGUF file")
        section = context.model_yaml_config.get("handler") or {}
        place = tempfile.gettempdir()
        self._folder = tempfile.TemporaryDirectory(prefix="llama-", dir=place if len(place) < _PLACE_MAX else "/tmp")
        self._socket = os.path.join(self._folder.name, "engine.sock")
        options = engine.CommonParams()
        options.model.path = str(_file(Path(context.system_properties["model_dir"]), section, context.manifest))
        options.model_alias = {context.model_name} if isinstance(options.model_alias, set) else context.model_name
        options.hostnames, options.ui, options.n_parallel = [self._socket], False, _PARALLEL
        options.endpoint_slots = options.endpoint_props = False
        options.verbosity = _VERBOSITY
        if context.system_properties.get("gpu_id") is None:
            options.n_gpu_layers = 0
        threads = os.environ.get("OMP_NUM_THREADS", "")  # `cpuThreads`, or the share of one of several workers
        if threads.isdecimal():
            options.cpuparams.n_threads = int(threads)
        for name, value in section.items():
            if name == "pooling":
                value = _pooling(engine, value)
            if name in _SETTINGS:
                setattr(options, _SETTINGS[name], value)
            elif name not in _OTHERS:
                raise ValueError(f"handler: {name} is unknown; there are {', '.join([*_OTHERS, *_SETTINGS])}")
        adapters = section.get("adapters") or {}
        self.slots = options.n_parallel
        self.openai_adapters = {str(name): str(file) for name, file in adapters.items()}
        options.lora_adapters = [
            _adapter(engine, Path(context.system_properties["model_dir"]) / str(file)) for file in adapters.values()
        ]
        self._server = engine.Server(options)

    def ask(self, path: str, body: bytes) -> Answer:
        return _asked(self._socket, path, self._adapted(body) if self.openai_adapters else body)

    def _adapted(self, body: bytes) -> bytes:
        try:
            fields = json.loads(body)
            name = str(fields["model"]).rpartition(":")[2]
        except (ValueError, LookupError, TypeError, RecursionError):
            return body
        if name not in self.openai_adapters:
            return body
        number = list(self.openai_adapters).index(name)
        return json.dumps(fields | {"lora": [{"id": number, "scale": 1.0}]}).encode()


def _adapter(engine: Any, file: Path) -> Any:
    """An adapter that requests without its name don't have. Raises ValueError."""
    if not file.is_file():
        raise ValueError(f"handler: adapters: there is no file {file.name}")
    made = engine.CommonAdapterLoraInfo()
    made.path, made.scale = str(file), 0.0
    return made


def _file(folder: Path, section: dict[str, Any], manifest: dict[str, Any] | None) -> Path:
    """The model's file: the one that the settings or the manifest name, or the only one."""
    named = section.get("file") or ((manifest or {}).get("model") or {}).get("serializedFile")
    if named:
        return folder / str(named)
    files = sorted(one for one in folder.iterdir() if one.suffix == SUFFIX)
    first = [one for one in files if "-00001-of-" in one.name] or files  # the others of its parts follow by themselves
    if len(first) != 1:
        names = ", ".join(one.name for one in first) or "none"
        raise ValueError(f"one {SUFFIX} file is served; there are: {names}. Name one in handler: {{file: …}}")
    return first[0]


def _pooling(engine: Any, name: object) -> Any:
    """The engine's value for the way from the embeddings of tokens to that of a text."""
    known = {one.rpartition("_")[2].lower(): value for one, value in engine.llama_pooling_type.__members__.items()}
    if name not in known:
        raise ValueError(f"handler: pooling is {name!r}; there are {', '.join(known)}")
    return known[name]


class _Parts:
    """What httptools tells of an answer."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.content_type, self.begun, self.ended = "application/json", False, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        self.ended = True


async def _asked(address: str, path: str, body: bytes) -> Answer:
    """Yields the head of the engine's answer, then its bytes as they come. Leaving early closes the connection, which
    ends the request in the engine. Raises PredictionException (503) if the engine doesn't answer."""
    try:
        reader, writer = await asyncio.open_unix_connection(address)
    except OSError as error:
        raise PredictionException(f"The engine doesn't answer: {error.strerror}", 503) from error
    try:
        head = f"POST /{path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        parts = _Parts()
        parser = httptools.HttpResponseParser(parts)
        told = False
        while not parts.ended:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise PredictionException("The engine ended its answer early", 503)
            parser.feed_data(data)
            if parts.begun and not told:
                status = parser.get_status_code()
                if status >= 500:
                    if not parts.ended:
                        continue
                    status, whole = _refusal(status, b"".join(parts.pieces))
                    parts.pieces = [whole]
                told = True
                yield Head(status, parts.content_type)
            pieces, parts.pieces = parts.pieces, []
            if pieces:
                yield b"".join(pieces)
    finally:
        writer.close()


def _refusal(status: int, body: bytes) -> tuple[int, bytes]:
    """The engine's error in this server's words, where it means the client's fault or a setting."""
    for said, meant, words in _MEANT:
        if said in body:
            kind = "invalid_request_error" if meant < 500 else "not_supported_error"
            return meant, json.dumps({"error": {"message": words, "type": kind, "code": meant}}).encode()
    return (400 if status == 500 and _OF_CLIENTS.search(body) else status), body
