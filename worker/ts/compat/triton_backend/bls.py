"""Calls from a Triton Python model to its server: other models (business logic scripting), and model control."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from typing import Any

from ts.compat.triton_backend import messages
from ts.compat.triton_backend.messages import InferenceResponse, Tensor, TritonError, TritonModelException, of_status
from ts.runtime.calls import NestedCallFailed, ServerCall, here, turn
from ts.tensors import types
from ts.tensors.grpc_form import request_bytes, response_from
from ts.tensors.types import BadTensor


class InferenceRequest(messages.InferenceRequest):
    """A request to this model, or one of its own to another model."""

    def exec(self, decoupled: bool = False) -> Any:
        """Calls the named model and returns its InferenceResponse, or with `decoupled` an iterator of all its
        responses. Failures are returned as a response's error."""
        call = self._begun(decoupled)
        if decoupled:
            return ResponseIterator(call)
        return next(ResponseIterator(call), None) or _none()

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """`exec` for coroutines: begins the call and returns an awaitable of its result."""
        if decoupled:
            found = asyncio.get_running_loop().create_future()
            found.set_result(ResponseIterator(self._begun(True)))
            return found
        return asyncio.ensure_future(self._answered())

    async def _answered(self) -> InferenceResponse:
        async with turn():
            return await anext(ResponseIterator(self._begun(False)), None) or _none()

    def _begun(self, stream: bool) -> ServerCall:
        if not self.model_name:
            raise TritonModelException("an InferenceRequest needs the model_name of the model to call")
        reserved = self._reserved()
        version = "" if self.model_version == "-1" else self.model_version
        request = types.InferenceRequest(
            [tensor._tensor for tensor in self.inputs()],
            self.request_id(),
            self.model_name,
            version,
            {**json.loads(self.parameters()), **reserved},
            [types.RequestedOutput(name) for name in self.requested_output_names()],
        )
        what = {"operation": "infer", "model": self.model_name, "version": version, "stream": stream}
        what |= {"request_id": self.request_id(), "parameters": reserved}
        return here().begin(what, request_bytes(request))

    def _reserved(self) -> dict[str, Any]:
        """The parameters that the server itself uses."""
        found: dict[str, Any] = {"timeout": self.timeout()} if self.timeout() else {}
        if sequence_id := self.correlation_id():
            found["sequence_id"] = sequence_id if isinstance(sequence_id, str) else int(sequence_id)
            found["sequence_start"] = bool(self.flags() & messages.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            found["sequence_end"] = bool(self.flags() & messages.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        return found


class ResponseIterator:
    """The responses of a decoupled model; an error is the last one."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call
        self._failed = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        try:
            piece = None if self._failed else self._call.next()
        except NestedCallFailed as error:
            return self._failure(error)
        if piece is None:
            raise StopIteration
        return self._response(piece)

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        try:
            piece = None if self._failed else await self._call.anext()
        except NestedCallFailed as error:
            return self._failure(error)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if piece is None:
            raise StopAsyncIteration
        return self._response(piece)

    def cancel(self) -> None:
        """Cancels the call: the called model sees the cancellation, and the last response is an error."""
        self._call.cancel()

    def __del__(self) -> None:
        self._call.abandon()

    def _failure(self, error: NestedCallFailed) -> InferenceResponse:
        self._failed = True
        return InferenceResponse([], of_status(error.code, error.message))

    def _response(self, piece: Any) -> InferenceResponse:
        try:
            found = response_from(piece)
        except BadTensor as error:
            return InferenceResponse([], TritonError(str(error)))
        return InferenceResponse([Tensor.wrapping(one) for one in found.outputs], parameters=found.parameters)


def _none() -> InferenceResponse:
    return InferenceResponse([], TritonError("the model sent no answer"))


# --- model control


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Loads a model of the repository; `config`: JSON in place of its own ModelConfig. Raises TritonModelException."""
    if files:
        raise TritonModelException(
            "load_model: models aren't loaded from files in a call; put them into the repository"
        )
    _done({"operation": "load", "model": model_name, **({"config": config} if config else {})})


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model. Raises TritonModelException."""
    _done({"operation": "unload", "model": model_name})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns whether a model can accept requests; False for an unknown one."""
    return bool(_done({"operation": "ready", "model": model_name, "version": model_version})["ready"])


def _done(what: dict[str, Any]) -> dict[str, Any]:
    call = here().begin(what)
    try:
        pieces = b"".join(map(bytes, iter(call.next, None)))
    except NestedCallFailed as error:
        raise TritonModelException(error.message) from None
    found: dict[str, Any] = json.loads(pieces)
    return found
