"""A model in a test: a worker of the server that runs in a thread of the test's process, and the test as its
frontend. Requests, batches, streams, cancels and failures use the same code as in a server."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ts.model_loader import read_manifest
from ts.protocol import frames
from ts.protocol.codes import Code, code_of_http
from ts.protocol.decoder import Decoder
from ts.protocol.shared import PROGRESS_BYTES
from ts.runtime.main import live_in_process
from ts.runtime.process import modules_in
from ts.runtime.renewal import SourceImports

#: The longest wait of a test.
LIMIT_S = 60.0
READ_BYTES = 1 << 20
MESSAGE_BYTES_MAX = 1 << 32
#: The statuses for an ended worker, and for calls to other models, which a test doesn't have.
DIED_STATUS, NO_SERVER_STATUS = 500, 501
CANCELLED_STATUS = 499
_NOT_GIVEN: Any = object()


@dataclass(frozen=True)
class Request:
    """A request. `body`: the body of an HTTP request: bytes, text, or a value that is sent as JSON; `content_type`:
    its content type, by default the fitting one. `inputs`: inputs by name, as in gRPC. `timeout_s`: seconds that its
    caller waits."""

    body: Any = _NOT_GIVEN
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None
    timeout_s: float | None = None
    request_id: str | None = None

    def parts(self) -> list[frames.Input]:
        found = [frames.Input(name, "", bytes(value)) for name, value in self.inputs.items()]
        if self.body is _NOT_GIVEN:
            return found
        given = self.content_type
        if isinstance(self.body, (bytes, bytearray, memoryview)):
            return [*found, frames.Input("body", given or "", bytes(self.body))]
        if isinstance(self.body, str):
            return [*found, frames.Input("body", "text/plain" if given is None else given, self.body.encode())]
        data = json.dumps(self.body).encode()
        return [*found, frames.Input("body", "application/json" if given is None else given, data)]

    @staticmethod
    def of(value: Any) -> Request:
        return value if isinstance(value, Request) else Request(value)


@dataclass(frozen=True)
class Answer:
    """An answer: `data` is its joined pieces. Status, phrase and headers: 200, "" and {}, or the handler's."""

    pieces: tuple[bytes, ...]
    status: int = 200
    phrase: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def text(self) -> str:
        return self.data.decode()

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def grpc_code(self) -> str:
        """The status of a gRPC call, by its name."""
        return code_of_http(self.status).name


class RequestFailed(Exception):
    """A request has no answer. `status`: HTTP's; `grpc_code`: gRPC's, by its name; `traceback`: of the handler's
    exception, "" where it isn't known. The message is the one that clients see while the server explains errors
    (docs/handlers.md)."""

    def __init__(self, status: int, message: str, grpc_code: str, traceback: str = "") -> None:
        super().__init__(f"HTTP {status}, gRPC {grpc_code}: {message}" + (f"\n{traceback}" if traceback else ""))
        self.status, self.message, self.grpc_code, self.traceback = status, message, grpc_code, traceback

    @staticmethod
    def of(failed: frames.Failed) -> RequestFailed:
        code = Code.INTERNAL if failed.by_handler else code_of_http(failed.code)
        return RequestFailed(failed.code, failed.message, code.name, failed.traceback)


class Streamed:
    """A running request: an iterator over the pieces of its answer. `send` sends messages to the worker; `limit_s`:
    seconds for a piece, after which TimeoutError is raised. Leaving it as a context manager cancels it."""

    def __init__(self, job_id: int, send: Callable[[frames.Message], None], limit_s: float) -> None:
        self.job_id = job_id
        self._send, self.limit_s = send, limit_s
        self._came: queue.SimpleQueue[frames.Chunk | frames.Failed] = queue.SimpleQueue()
        self._first: frames.Chunk | None = None
        self._failed: frames.Failed | None = None
        self._over = False

    def put(self, message: frames.Chunk | frames.Failed) -> None:
        """Takes a message of the worker; from its thread."""
        self._came.put(message)

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over:
            self.cancel()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next piece; empty ones, which clients don't see, are left out. Raises RequestFailed."""
        while not self._over:
            data = self._next()
            if data:
                return data
        if self._failed is not None:
            raise RequestFailed.of(self._failed)
        raise StopIteration

    def _next(self) -> bytes:
        try:
            message = self._came.get(timeout=self.limit_s)
        except queue.Empty:
            raise TimeoutError(f"the handler gave nothing for {self.limit_s:g} s") from None
        if isinstance(message, frames.Failed):
            self._failed, self._over = message, True
            return b""
        self._first = self._first or message
        self._over = message.last
        if not message.last:
            self._send(frames.Credit(self.job_id, len(message.data) + frames.CHUNK_COST_BYTES))
        return bytes(message.data)

    def cancel(self) -> None:
        """Cancels the request, like a client that closes its connection, and returns when the handler has ended it."""
        if self._over:
            return
        self._send(frames.Cancel(self.job_id))
        while not self._over:
            self._next()

    @property
    def cancelled(self) -> bool:
        """Whether it ended by the caller's cancel."""
        return self._failed is not None and self._failed.code == CANCELLED_STATUS

    def answer(self) -> Answer:
        """The rest of the answer, whole. Raises RequestFailed."""
        pieces = tuple(self)
        head = self._first or frames.Chunk(self.job_id, b"")
        return Answer(pieces, head.status, head.phrase, dict(head.headers))


class NotLoaded(Exception):
    """The handler couldn't be loaded. `message`: the register call's error; `traceback`: that of the log."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message + (f"\n{traceback}" if traceback else ""))
        self.message, self.traceback = message, traceback


class ServedModel:
    """A model loaded from `source`: a handler's file, a model's folder, or an archive (.mar).

    `handler`: replaces the archive's, for example by `file.py:function`. `config`: the content of model-config.yaml,
    which replaces that of the archive. `files`: the manifest's members for a handler's file, such as `modelFile` and
    `serializedFile`. `envelope`: as `service_envelope`. `settings`: further settings for the worker. `explain`: callers
    see a handler's exception, as with `debug_errors=true`. `limit_s`: seconds for each operation, after which
    TimeoutError is raised.

    Use it as a context manager, or `close` it: the current directory, `sys.path` and PYTHONPATH are the model's until
    then. Raises NotLoaded.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        handler: str | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        name: str | None = None,
        envelope: str | None = None,
        settings: Mapping[str, Any] | None = None,
        explain: bool = True,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.limit_s = limit_s
        self._before = os.getcwd(), list(sys.path), os.environ.get("PYTHONPATH")
        self._modules = set(sys.modules)
        self._ids = itertools.count(1)
        self._open: dict[int, Streamed] = {}
        self._loaded = threading.Event()
        self._outcome: frames.Ready | frames.LoadFailed | None = None
        self._sending = threading.Lock()
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None
        told = self._settings(Path(source).absolute(), handler, config, files, name)
        told |= {"envelope": envelope, "debug_errors": explain, **(settings or {})}
        self.name: str = told["model_name"]
        self._folder_of_model = os.path.join(os.path.realpath(told["model_dir"]), "")
        self._imports = SourceImports(told["model_dir"])
        self._imports.begin()
        self._handler = Path(str(told["handler"]).partition(":")[0]).name.removesuffix(".py")
        self._sock, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as progress:
            progress.truncate(PROGRESS_BYTES)
            fds = theirs.detach(), os.dup(progress.fileno())
        self._worker = threading.Thread(target=live_in_process, args=fds, name=f"handler-{self.name}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"answers-{self.name}", daemon=True)
        self._worker.start()
        self._reader.start()
        self._send(frames.Load(told))
        self._wait_loaded()

    # --- loading

    def _settings(
        self,
        source: Path,
        handler: str | None,
        config: Mapping[str, Any] | None,
        files: Mapping[str, str] | None,
        name: str | None,
    ) -> dict[str, Any]:
        if source.suffix == ".py":
            folder, manifest = source.parent, {"model": {"handler": source.name, **(files or {})}}
        else:
            folder = self._folder(source)
            manifest = read_manifest(folder) or {"model": {}}
        model = manifest.get("model", {})
        own = handler or str(model.get("handler") or "")
        model_name = name or str(model.get("modelName") or source.stem)
        read = None if config is not None else model.get("configFile")
        settings = _config_of(folder, read) if config is None else dict(config)
        return {
            "model_name": model_name,
            "model_version": str(model.get("modelVersion") or "1.0"),
            "model_dir": str(folder),
            "handler": own,
            "manifest": {**manifest, "model": {**model, "modelName": model_name, "handler": own}},
            "config_file": read,
            "model_config": settings,
            "batch_size": settings.get("batchSize", 1),
            "continuous": settings.get("continuousBatching", False),
            "asynchronous": settings.get("asyncCommunication", False),
            "adapter": model.get("adapter"),
            "adapter_settings": model.get("adapterSettings") or {},
            "gpu_id": None,
        }

    def _folder(self, source: Path) -> Path:
        if source.is_dir():
            return source
        if not zipfile.is_zipfile(source):
            raise NotLoaded(f"{source} is neither a handler's file (.py), nor a model's folder, nor an archive (.mar)")
        self._unpacked = tempfile.TemporaryDirectory(prefix="ts-testing-")
        with zipfile.ZipFile(source) as archive:
            archive.extractall(self._unpacked.name)
        return Path(self._unpacked.name)

    def _wait_loaded(self) -> None:
        there = self._loaded.wait(self.limit_s)
        outcome = self._outcome
        if isinstance(outcome, frames.Ready):
            return
        self.close()
        if not there:
            raise TimeoutError(f"the handler wasn't loaded within {self.limit_s:g} s")
        info = outcome.info if outcome is not None else {"message": "the worker ended while it loaded the handler"}
        raise NotLoaded(str(info["message"]), str(info.get("traceback") or ""))

    @property
    def kind(self) -> str:
        """The kind of its handler: blocking, generator, async or continuous."""
        assert isinstance(self._outcome, frames.Ready)
        return str(self._outcome.info["handler_kind"])

    @property
    def module(self) -> ModuleType:
        """The handler's module, to read or replace its attributes. Raises LookupError for a built-in handler."""
        for module in modules_in(self._folder_of_model).values():
            if Path(str(module.__file__)).stem == self._handler:
                return module
        raise LookupError(f"{self._handler} is not a module of {self._folder_of_model}")

    # --- requests

    def predict(self, body: Any = None, **request: Any) -> Answer:
        """One request and its answer, of one or more pieces; arguments as of `Request`. Raises RequestFailed."""
        return self.stream(body, **request).answer()

    def stream(self, body: Any = None, **request: Any) -> Streamed:
        """One request whose pieces are read one by one, and which can be cancelled."""
        made = body if isinstance(body, Request) else _request(body, request)
        (streamed,) = self._begin([made])
        return streamed

    def batch(self, bodies: Sequence[Any]) -> list[Answer | RequestFailed]:
        """Requests that the handler gets together, as bodies or `Request`s; returns the result of each caller."""
        return [_ended(streamed) for streamed in self._begin([Request.of(body) for body in bodies])]

    def begin_batch(self, bodies: Sequence[Any]) -> list[Streamed]:
        """The same, with answers that are read one by one, and requests that can be cancelled."""
        return self._begin([Request.of(body) for body in bodies])

    def describe(self) -> Answer:
        """The handler's answer to a describe call with `customized=true`."""
        (streamed,) = self._begin([Request(headers={"describe": "True"})])
        return streamed.answer()

    def _begin(self, requests: Sequence[Request]) -> list[Streamed]:
        now_s = time.monotonic()
        items, made = [], []
        for request in requests:
            streamed = Streamed(next(self._ids), self._send, self.limit_s)
            self._open[streamed.job_id] = streamed
            made.append(streamed)
            deadline_s = math.inf if request.timeout_s is None else now_s + request.timeout_s
            request_id = request.request_id or f"test-{streamed.job_id}"
            items.append(
                frames.Item(streamed.job_id, request_id, deadline_s, list(request.headers.items()), request.parts())
            )
        self._send(frames.Predict(items[0].job_id, items))
        if not self._reader.is_alive():
            self._end_all()
        return made

    # --- the worker's socket

    def _send(self, message: frames.Message) -> None:
        with self._sending:
            try:
                self._sock.sendall(frames.encode_bytes(message))
            except OSError:  # the worker has ended: what is open is failed by the reader
                pass

    def _read(self) -> None:
        """Gives the worker's messages to those who wait for them, until the worker ends."""
        decoder = Decoder(MESSAGE_BYTES_MAX)
        while data := self._receive():
            for message in decoder.feed(data):
                self._take(message)
        self._loaded.set()
        self._end_all()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(READ_BYTES)
        except OSError:
            return b""

    def _take(self, message: frames.Message) -> None:
        if isinstance(message, (frames.Ready, frames.LoadFailed)):
            self._outcome = message
            self._loaded.set()
        elif isinstance(message, frames.Call):
            self._send(frames.Failed(message.call_id, NO_SERVER_STATUS, "a model in a test has no server to call"))
        elif isinstance(message, frames.Pieces):
            for chunk in frames.chunks_of(message):
                self._take(chunk)
        elif isinstance(message, (frames.Chunk, frames.Failed)):
            ended = isinstance(message, frames.Failed) or message.last
            streamed = self._open.pop(message.job_id, None) if ended else self._open.get(message.job_id)
            if streamed is not None:
                streamed.put(message)

    def _end_all(self) -> None:
        while self._open:
            _, streamed = self._open.popitem()
            streamed.put(frames.Failed(streamed.job_id, DIED_STATUS, "The worker ended before it had answered"))

    # --- the end

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets the worker finish, and restores this process. Raises TimeoutError if a handler doesn't return."""
        if self._sock.fileno() == -1:
            return
        for job_id in list(self._open):
            self._send(frames.Cancel(job_id))  # nobody reads it any more
        self._send(frames.Stop())
        self._worker.join(self.limit_s)
        with contextlib.suppress(OSError):  # the worker has closed its end
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join(self.limit_s)
        self._sock.close()
        for name in modules_in(self._folder_of_model).keys() - self._modules:
            del sys.modules[name]
        self._imports.end()
        directory, path, python_path = self._before
        os.chdir(directory)
        sys.path[:] = path
        if python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = python_path
        if self._unpacked is not None:
            self._unpacked.cleanup()
        if self._worker.is_alive():
            raise TimeoutError(f"the handler did not return within {self.limit_s:g} s")


def _request(body: Any, given: Mapping[str, Any]) -> Request:
    """A request with a body, unless it has inputs by name and no body."""
    return Request(**given) if body is None and "inputs" in given else Request(body, **given)


def _ended(streamed: Streamed) -> Answer | RequestFailed:
    try:
        return streamed.answer()
    except RequestFailed as failure:
        return failure


def _config_of(folder: Path, file: str | None) -> dict[str, Any]:
    if not file:
        return {}
    import yaml

    found = yaml.safe_load((folder / file).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
