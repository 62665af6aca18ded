"""The client for asyncio. `ts_scripts/make_blocking_calls.py` makes the blocking client's calls from these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

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
Requests: TypeAlias = Iterable[Request] | AsyncIterable[Request]


class AsyncClient:
    """Calls to one server from one event loop. Arguments, answers and errors as those of `Client`; cancelling the task
    that awaits a call, or reads a stream, cancels the call."""

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
        self._make: Callable[[], Channels[grpc.aio.Channel]] = lambda: Channels(
            lambda: _channel(target, credentials, settings), channels
        )
        self._made: Channels[grpc.aio.Channel] | None = None
        self._policy = CallPolicy(token, metadata, timeout_s, retry, idempotent)
        self._closed = False

    async def close(self) -> None:
        """Closes the connections; calls that are under way raise Cancelled."""
        self._closed = True
        if self._made is not None:
            await asyncio.gather(*(channel.close() for channel in self._made.all))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the Open Inference Protocol

    async def live(self, *, timeout_s: float | None = None) -> bool:
        return await self._run(calls.live(), timeout_s)

    async def ready(self, *, timeout_s: float | None = None) -> bool:
        return await self._run(calls.ready(), timeout_s)

    async def model_ready(self, model: str, version: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the model is ready; False also for an unknown model."""
        return await self._run(calls.model_ready(model, version), timeout_s)

    async def server_metadata(self, *, timeout_s: float | None = None) -> ServerMetadata:
        return await self._run(calls.about_server(), timeout_s)

    async def model_metadata(self, model: str, version: str = "", *, timeout_s: float | None = None) -> ModelMetadata:
        """The inputs and outputs of the model. Raises NotFound."""
        return await self._run(calls.about_model(model, version), timeout_s)

    async def infer(
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
        return await self._run(calls.infer(request, metadata), timeout_s, idempotent)

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
    ) -> AsyncAnswers[Answer]:
        """The model's answers to one request, each as the model sends it. Without `timeout_s` it may take for ever.
        It is tried again only while no answer has come."""
        request = Request(model, inputs, version, id, parameters or {}, outputs)
        return self._stream(calls.stream(request), timeout_s, idempotent)

    def converse(self, requests: Requests, *, timeout_s: float | None = None) -> AsyncAnswers[Answer]:
        """The answers to any number of requests over one stream; `requests` is read as the server takes them. An
        answer's `id` says to which request it belongs, its `error` why that has none. Never tried again."""
        return self._stream(calls.converse(_messages(requests)), timeout_s, False)

    # --- the repository

    async def models(self, *, only_ready: bool = False, timeout_s: float | None = None) -> list[ModelState]:
        return await self._run(calls.models(only_ready), timeout_s)

    async def load(self, model: str, *, path: str = "", config: str = "", timeout_s: float | None = None) -> None:
        """Loads a model of the server's repository, or of `path` (an archive's file or URL); `config` takes the place
        of its config.pbtxt, as JSON. Returns when it is ready. Raises InvalidArgument, NotFound, Refused."""
        await self._run(calls.load(model, path, config), timeout_s)

    async def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        await self._run(calls.unload(model), timeout_s)

    # --- TorchServe's predictions

    async def predict(
        self,
        model: str,
        data: Data,
        *,
        version: str = "",
        timeout_s: float | None = None,
        idempotent: bool | None = None,
    ) -> bytes:
        """TorchServe's `Predictions`: `data` are bytes or a text for the handler's `data`, or several by name."""
        return await self._run(calls.predict(model, data, version), timeout_s, idempotent)

    def predict_stream(
        self,
        model: str,
        data: Data,
        *,
        version: str = "",
        timeout_s: float | None = None,
        idempotent: bool | None = None,
    ) -> AsyncAnswers[bytes]:
        """TorchServe's `StreamPredictions`: yields the pieces as the handler sends them."""
        return self._stream(calls.predict_stream(model, data, version), timeout_s, idempotent)

    # --- how they are made

    async def _run(self, call: Call[T], timeout_s: float | None, idempotent: bool | None = None) -> T:
        answer: T = await self._attempts(call, self._policy.timeout_s(timeout_s), idempotent, self._once)
        return answer

    async def _once(self, call: Call[T], left_s: float | None) -> T:
        return call.read(await self._begun(call, left_s))

    def _begun(self, call: Call[Any], left_s: float | None) -> Any:
        if self._closed:
            raise _closed()
        if self._made is None:  # with the first call, because grpc binds channels to the running loop
            self._made = self._make()
        return self._made.method(call)(call.message, timeout=left_s, metadata=self._policy.sent_with(call))

    async def _attempts(
        self, call: Call[Any], timeout_s: float | None, idempotent: bool | None, attempt: Callable[..., Any]
    ) -> Any:
        """`attempt(call, seconds left)` until it succeeds or may not be repeated."""
        attempts = self._policy.attempts(call, timeout_s, idempotent)
        while True:
            try:
                return await attempt(call, attempts.left_s())
            except grpc.aio.UsageError:
                raise _closed() from None
            except grpc.RpcError as error:
                pause = attempts.pause_s(error)
                if pause is None or self._closed:
                    raise attempts.failure(error) from None
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                if self._closed and not _cancelled():
                    raise _closed() from None
                raise

    def _stream(self, call: Call[T], timeout_s: float | None, idempotent: bool | None) -> AsyncAnswers[T]:
        async def attempts(attempt: Callable[..., Any]) -> Any:
            return await self._attempts(call, timeout_s, idempotent, attempt)

        return AsyncAnswers(attempts, self._begun, call.read)


class AsyncAnswers(AsyncIterator[T]):
    """The answers of a stream, as they come; as `Answers` of the blocking client, awaited."""

    def __init__(self, attempts: Callable[..., Any], begin: Callable[..., Any], read: Callable[[Any], T]) -> None:
        self._attempts, self._begin, self._read = attempts, begin, read
        self._call: Any = None
        self._ended = False

    async def __anext__(self) -> T:
        if self._ended:
            raise StopAsyncIteration
        try:
            message = await (self._call.read() if self._call is not None else self._attempts(self._first))
            if message is grpc.aio.EOF:
                self._ended = True
                raise StopAsyncIteration
            return self._read(message)
        except grpc.RpcError as error:
            self._ended = True
            raise failure(error, 1) from None
        except asyncio.CancelledError:
            if not _cancelled():
                self._ended = True
                raise Cancelled(grpc.StatusCode.CANCELLED, "the stream was cancelled") from None
            self.cancel()
            raise
        except BaseException:
            self.cancel()
            raise

    async def _first(self, call: Call[Any], left_s: float | None) -> Any:
        self._call = self._begin(call, left_s)
        return await self._call.read()

    def cancel(self) -> None:
        """Ends the stream."""
        self._ended = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> AsyncAnswers[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


async def _messages(requests: Requests) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request.message()
    else:
        for request in requests:
            yield request.message()


def _closed() -> Cancelled:
    return Cancelled(grpc.StatusCode.CANCELLED, "the client is closed")


def _cancelled() -> bool:
    """Whether somebody cancelled the running task, as opposed to the call."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def _channel(target: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, credentials, options)
