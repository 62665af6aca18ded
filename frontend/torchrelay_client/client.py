"""The blocking client. Its calls are made from those in `aio.py` by `ts_scripts/make_blocking_calls.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import grpc

import torchrelay_client.calls as calls
from torchrelay_client.answers import Answer, ModelMetadata, ModelState, ServerMetadata
from torchrelay_client.calls import Call, Data, Request
from torchrelay_client.connecting import (
    CHANNELS,
    TIMEOUT_S,
    TLS,
    USUAL,
    CallPolicy,
    Cancelled,
    Channels,
    Options,
    Retry,
    channel_options,
    failure,
)

T = TypeVar("T")
#: Takes a call and the seconds left for it, returns grpc's result.
Attempt = Callable[[Call[Any], float | None], Any]
Requests: TypeAlias = Iterable[Request]


class Client:
    """Calls to one server, from any number of threads.

    `target`: `host:port`, or gRPC's other forms (`unix:/path`). `channels`: connections, used in turn. `tls`: None
    for plain text, `TLS()` for a server that a public authority signed. `token`: sent as a bearer token.
    `timeout_s`: of each call with all its attempts, None for none. `retry`: how calls are repeated that the server did
    not take or lost (UNAVAILABLE); `idempotent`: whether that is right for predictions, too, which may then run twice;
    calls that only read are always repeated. `metadata`: sent with every call. `options`: more of gRPC's channel
    options, which win over the client's own.

    Every call raises CallFailed (one of its subclasses, by status) for anything but an answer.
    """

    def __init__(
        self,
        target: str,
        *,
        channels: int = CHANNELS,
        tls: TLS | None = None,
        token: str = "",
        timeout_s: float | None = TIMEOUT_S,
        retry: Retry | None = USUAL,
        idempotent: bool = False,
        metadata: Sequence[tuple[str, str]] = (),
        options: Options = (),
    ) -> None:
        settings = channel_options(tls, options)
        credentials = tls.credentials() if tls else None
        self._channels = Channels(lambda: _channel(target, credentials, settings), channels)
        self._policy = CallPolicy(token, metadata, timeout_s, retry, idempotent)
        self._closed = threading.Event()

    def close(self) -> None:
        """Closes the connections; calls that are under way raise Cancelled."""
        self._closed.set()
        for channel in self._channels.all:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the Open Inference Protocol

    def live(self, *, timeout_s: float | None = None) -> bool:
        return self._run(calls.live(), timeout_s)

    def ready(self, *, timeout_s: float | None = None) -> bool:
        return self._run(calls.ready(), timeout_s)

    def model_ready(self, model: str, version: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the model is ready; False also for an unknown model."""
        return self._run(calls.model_ready(model, version), timeout_s)

    def server_metadata(self, *, timeout_s: float | None = None) -> ServerMetadata:
        return self._run(calls.about_server(), timeout_s)

    def model_metadata(self, model: str, version: str = "", *, timeout_s: float | None = None) -> ModelMetadata:
        """The inputs and outputs of the model. Raises NotFound."""
        return self._run(calls.about_model(model, version), timeout_s)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float | None = None,
        idempotent: bool | None = None,
    ) -> Answer:
        """The model's answer to `inputs` (name -> array, list, text, bytes or Typed; see docs/client.md).

        `id` comes back with the answer and is in the server's logs ("": one is made). `parameters`: bools, ints, floats
        and texts. `outputs`: those to send ((): all). `metadata`: of this call alone. Raises BadTensor for an input
        that is no tensor, InvalidArgument for one the model doesn't take, NotFound, and the other kinds of CallFailed.
        """
        request = Request(model, inputs, version, id, parameters or {}, outputs)
        return self._run(calls.infer(request, metadata), timeout_s, idempotent)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
        idempotent: bool | None = None,
    ) -> Answers[Answer]:
        """The model's answers to one request, each as the model sends it. Without `timeout_s` it may take for ever.
        It is tried again only while no answer has come."""
        request = Request(model, inputs, version, id, parameters or {}, outputs)
        return self._stream(calls.stream(request), timeout_s, idempotent)

    def converse(self, requests: Requests, *, timeout_s: float | None = None) -> Answers[Answer]:
        """The answers to any number of requests over one stream; `requests` is read as the server takes them. An
        answer's `id` says to which request it belongs, its `error` why that has none. Never tried again."""
        return self._stream(calls.converse(_messages(requests)), timeout_s, False)

    # --- the repository

    def models(self, *, only_ready: bool = False, timeout_s: float | None = None) -> list[ModelState]:
        return self._run(calls.models(only_ready), timeout_s)

    def load(self, model: str, *, path: str = "", config: str = "", timeout_s: float | None = None) -> None:
        """Loads a model of the server's repository, or of `path` (an archive's file or URL); `config` takes the place
        of its config.pbtxt, as JSON. Returns when it is ready. Raises InvalidArgument, NotFound, Refused."""
        self._run(calls.load(model, path, config), timeout_s)

    def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        self._run(calls.unload(model), timeout_s)

    # --- TorchServe's predictions

    def predict(
        self,
        model: str,
        data: Data,
        *,
        version: str = "",
        timeout_s: float | None = None,
        idempotent: bool | None = None,
    ) -> bytes:
        """TorchServe's `Predictions`: `data` are bytes or a text for the handler's `data`, or several by name."""
        return self._run(calls.predict(model, data, version), timeout_s, idempotent)

    def predict_stream(
        self,
        model: str,
        data: Data,
        *,
        version: str = "",
        timeout_s: float | None = None,
        idempotent: bool | None = None,
    ) -> Answers[bytes]:
        """TorchServe's `StreamPredictions`: yields the pieces as the handler sends them."""
        return self._stream(calls.predict_stream(model, data, version), timeout_s, idempotent)

    # --- how they are made

    def _run(self, call: Call[T], timeout_s: float | None, idempotent: bool | None = None) -> T:
        answer: T = self._attempts(call, self._policy.timeout_s(timeout_s), idempotent, self._once)
        return answer

    def _once(self, call: Call[T], left_s: float | None) -> T:
        return call.read(self._begun(call, left_s))

    def _begun(self, call: Call[Any], left_s: float | None) -> Any:
        if self._closed.is_set():
            raise Cancelled(grpc.StatusCode.CANCELLED, "the client is closed")
        try:
            return self._channels.method(call)(call.message, timeout=left_s, metadata=self._policy.sent_with(call))
        except ValueError:  # grpc's word for a channel that was closed meanwhile
            if not self._closed.is_set():
                raise
            raise Cancelled(grpc.StatusCode.CANCELLED, "the client is closed") from None

    def _attempts(self, call: Call[Any], timeout_s: float | None, idempotent: bool | None, attempt: Attempt) -> Any:
        """`attempt(call, seconds left)` until it succeeds or may not be repeated."""
        attempts = self._policy.attempts(call, timeout_s, idempotent)
        while True:
            try:
                return attempt(call, attempts.left_s())
            except grpc.RpcError as error:
                pause = attempts.pause_s(error)
                if pause is None or self._closed.wait(pause):
                    raise attempts.failure(error) from None

    def _stream(self, call: Call[T], timeout_s: float | None, idempotent: bool | None) -> Answers[T]:
        def attempts(attempt: Attempt) -> Any:
            return self._attempts(call, timeout_s, idempotent, attempt)

        return Answers(attempts, self._begun, call.read)


class Answers(Iterator[T]):
    """The answers of a stream, as they come. It is asked with the first `next`. `cancel()`, or leaving it as a context,
    ends it, and the model is told; from then on there are no more. Iterating raises CallFailed when the stream fails,
    and Cancelled in a thread that waited for an answer when another one cancelled."""

    def __init__(self, attempts: Callable[[Attempt], Any], begin: Attempt, read: Callable[[Any], T]) -> None:
        self._attempts, self._begin, self._read = attempts, begin, read
        self._call: Any = None
        self._ended = False

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        try:
            return self._read(self._next())
        except grpc.RpcError as error:
            self._ended = True
            raise failure(error, 1) from None
        except BaseException:
            self.cancel()
            raise

    def _next(self) -> Any:
        return next(self._call) if self._call is not None else self._attempts(self._first)

    def _first(self, call: Call[Any], left_s: float | None) -> Any:
        self._call = self._begin(call, left_s)
        if self._ended:
            self._call.cancel()
        return next(self._call)

    def cancel(self) -> None:
        """Ends the stream; from any thread."""
        self._ended = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Answers[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _messages(requests: Requests) -> Iterator[Any]:
    return (request.message() for request in requests)


def _channel(target: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)
