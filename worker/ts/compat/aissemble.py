"""aiSSEMBLE's handlers: the class by which programs serve them, and the adapter for requests (docs/aissemble.md)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ts.compat.aissemble_api.handlers import DataplaneHandler, ModelHandler
from ts.compat.aissemble_api.types import plain
from ts.compat.kserve import Latency
from ts.compat.start import serve
from ts.context import Context
from ts.protocol.datatypes import DATATYPES
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings, context_of, declared
from ts.tensors import types
from ts.tensors.types import BadTensor, bytes_array, datatype
from ts.utils.util import PredictionException

TYPES = "aissemble_open_inference_protocol_shared.types.dataplane"


class AissembleOIPKServe:
    """A handler under a model's name. Call `load()` before `start_server()`: an unloaded model isn't ready."""

    def __init__(self, name: str, model_handler: ModelHandler) -> None:
        self.name = name
        self.model_handler = model_handler
        self.dataplane_handler = DataplaneHandler(model_handler)
        self.ready = False

    def model_load(self, model_name: str) -> bool:
        return self.model_handler.model_load(model_name)

    def load(self) -> bool:
        """Loads the model in this process; each worker does so when it runs the program."""
        self.ready = bool(self.dataplane_handler.model_load(self.name))
        return self.ready

    def start_server(self) -> NoReturn:
        """Turns this process into the server, with the options of its arguments, environment and oip.properties."""
        serve("aissemble", {self.name: self}, {})


# --- in a worker


def serving(service: Any, settings: Settings) -> Loaded:
    if not service.ready:
        raise HandlerNotUsable(f"model_load({service.name!r}) of its handler returned False, or load() was not called")
    logging = bool(settings["adapter_settings"].get("latency_logging"))
    served = AissembleAdapter(service.name, service.dataplane_handler, logging)
    tensors = declared(settings | {"tensors": None})
    return Loaded(served.answers, context_of(settings), "blocking", None, "requests", tensors, signature_of(service))


def signature_of(service: Any) -> dict[str, Any] | None:
    try:
        found = service.dataplane_handler.model_metadata(service.name)
    except NotImplementedError:
        return None
    return {
        "platform": found.platform,
        "inputs": [_tensor_metadata(one) for one in found.inputs],
        "outputs": [_tensor_metadata(one) for one in found.outputs],
    }


def _tensor_metadata(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": plain(tensor.datatype), "shape": list(tensor.shape)}


class AissembleAdapter:
    """The adapter of a handler: one request after another."""

    def __init__(self, name: str, handler: Any, latency_logging: bool) -> None:
        self._name, self._handler, self._logs = name, handler, latency_logging
        self._types: Any = importlib.import_module(TYPES)

    def answers(self, data: Sequence[types.InferenceRequest], context: Context) -> list[Any]:
        return [self._answer(request, context.get_request_id(index) or "") for index, request in enumerate(data)]

    def _answer(self, request: types.InferenceRequest, request_id: str) -> Any:
        """The answer, or the exception that fails only this request."""
        latency = Latency(request_id)
        if getattr(request, "explain", False):
            return PredictionException(f"model {self._name!r} gives no explanations", 501)
        try:
            payload = self._checked(request)
        except (BadTensor, TypeError, ValueError) as error:
            return PredictionException(f"Failed to validate Inference! {error}", 400)
        latency.step("preprocess")
        try:
            found = self._handler.model_handler.infer(payload, self._name, request.model_version or None)
        except NotImplementedError as error:
            return PredictionException(f"the handler doesn't implement this: {error}", 501)
        latency.step("predict")
        try:
            found.validate_oip()
            answer = _response(found)
            if answer.model_name == self._name:  # which may be served under another one
                answer.model_name = ""
        except (BadTensor, TypeError, ValueError, OverflowError) as error:
            return PredictionException(f"The handler's answer is not valid: {error}", 500)
        latency.step("postprocess")
        if self._logs:
            print(latency.line(), flush=True)
        return answer

    def _checked(self, request: types.InferenceRequest) -> Any:
        payload = self._types.InferenceRequest(
            id=request.id or None,
            parameters=self._parameters(request.parameters),
            inputs=[self._input(tensor) for tensor in request.inputs],
            outputs=[
                self._types.RequestOutput(name=one.name, parameters=self._parameters(one.parameters))
                for one in request.outputs
            ],
        )
        payload.validate_oip()
        return payload

    def _parameters(self, parameters: dict[str, Any]) -> Any:
        return self._types.Parameters(**parameters) if parameters else None

    def _input(self, tensor: types.Tensor) -> Any:
        if DATATYPES[tensor.datatype].extension:
            raise BadTensor(f"input ('{tensor.name}'): aiSSEMBLE's handlers know no {tensor.datatype}")
        return self._types.RequestInput(
            name=tensor.name,
            shape=list(tensor.shape),
            datatype=tensor.datatype,
            parameters=self._parameters(tensor.parameters),
            data=_elements(tensor),
        )


def _elements(tensor: types.Tensor) -> list[Any]:
    flat: list[Any] = tensor.array.ravel().tolist()
    return [_text(one) for one in flat] if tensor.datatype == "BYTES" else flat


def _text(value: bytes) -> str | bytes:
    """The bytes as text if they are UTF-8: handlers of a REST API expect text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _response(response: Any) -> types.InferenceResponse:
    return types.InferenceResponse(
        [_output(one) for one in response.outputs],
        response.id or "",
        response.model_name or "",
        response.model_version or "",
        _given(response.parameters),
    )


def _given(parameters: Any) -> dict[str, Any]:
    if parameters is None:
        return {}
    return {name: value for name, value in parameters.model_dump().items() if value is not None}


def _output(output: Any) -> types.Tensor:
    name, kind = output.name, datatype(str(plain(output.datatype)), f"output {output.name!r}")
    elements = np.array(output.data.root, dtype=object)
    shape = tuple(output.shape) if -1 not in output.shape else elements.shape
    flat = list(elements.ravel())
    if kind.name == "BYTES":
        array = bytes_array([one.encode() if isinstance(one, str) else one for one in flat], list(shape))
    else:
        array = np.array(flat, kind.dtype).reshape(shape)
    return types.Tensor(name, kind.name, array, _given(output.parameters))
