"""The body of `generate`: a flat JSON object, text in and text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ts.protocol.datatypes import OF_PYTHON
from ts.protocol.frames import Buffer
from ts.tensors.forms import OUTPUT, Form, ModelSpec, completed, payload
from ts.tensors.json_form import JsonForm, dumped, from_json, json_object, to_json
from ts.tensors.types import (
    BadTensor,
    Headers,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    as_bytes,
    bytes_array,
    datatype,
)

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
PARAMETERS, ID = "parameters", "id"


def opened(data: Buffer, pairs: Headers, options: frozenset[str], model: ModelSpec) -> Form:
    """A body with a list `inputs` is a V2 inference request (MLServer's `generate`)."""
    message = json_object(payload(data))
    if isinstance(message.get("inputs"), list):
        return JsonForm(data, pairs, options, model)
    return GenerateForm(message, pairs, model)


class GenerateForm(Form):
    """Keys that name an input of the model are tensors (without a declaration: `text_input` and lists), others are
    parameters. The answer has each output under its name, as a plain value when it has one element."""

    def __init__(self, message: dict[str, Any], pairs: Headers, model: ModelSpec) -> None:
        self._model = model
        self._held: dict[str, bytes] = {}
        nested = message.pop(PARAMETERS, None) or {}
        if not isinstance(nested, dict):
            raise BadTensor(f"{PARAMETERS} is an object, not {nested!r}")
        request_id = message.pop(ID, "")
        message |= nested
        inputs = {name: message.pop(name) for name in list(message) if self._is_input(name, message[name])}
        if not inputs:
            names = ", ".join(model.inputs) or TEXT_INPUT
            raise BadTensor(f"the body names no input of the model; it takes: {names}")
        tensors = [self._tensor(name, value) for name, value in inputs.items()]
        self.request = InferenceRequest(tensors, str(request_id or ""), model.name, model.version, message, [], pairs)

    def _is_input(self, name: str, value: Any) -> bool:
        return name in self._model.inputs if self._model.inputs else name == TEXT_INPUT or isinstance(value, list)

    def _tensor(self, name: str, value: Any) -> Tensor:
        label = f"input {name!r}"
        flat = value if isinstance(value, list) else [value]
        declared = self._model.inputs.get(name, {})
        known = declared.get("datatype") or OF_PYTHON.get(type(flat[0]) if flat else str)
        if known is None:
            raise BadTensor(f"{label}: {flat[0]!r} is not a string, number or boolean")
        kind = datatype(known, label)
        return Tensor(name, kind.name, from_json(kind, _fitted(declared.get("shape"), len(flat)), flat, {}, label))

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        response = completed(response, self.request, self._model)
        message: dict[str, Any] = {ID: response.id} if response.id else {}
        message |= {"model_name": response.model_name, "model_version": response.model_version}
        for tensor in response.outputs:
            message[self._name(tensor.name)] = self._value(tensor, last)
        return dumped(message | response.parameters)

    def _value(self, tensor: Tensor, last: bool) -> Any:
        if tensor.datatype == "BYTES" and tensor.array.size == 1:
            data = self._held.pop(tensor.name, b"") + as_bytes(tensor.array.ravel()[0])
            text, self._held[tensor.name] = (data, b"") if last else _cut(data)
            tensor = Tensor(tensor.name, "BYTES", bytes_array([text], [1]), tensor.parameters)
        values = to_json(tensor, dict(tensor.parameters))
        return values[0] if len(values) == 1 else values

    def _name(self, name: str) -> str:
        """The key of an output in the answer; an output without a name is the text."""
        return TEXT_OUTPUT if name == OUTPUT and OUTPUT not in self._model.outputs else name

    def failed(self, text: str) -> bytes:
        return dumped({"error": text}) if self.request.stream else b""

    def end(self) -> bytes:
        """The rest of a text that ended in the middle of a character."""
        rest = {self._name(name): data.decode("utf-8", "replace") for name, data in self._held.items() if data}
        if not rest:
            return b""
        return dumped({"model_name": self._model.name, "model_version": self._model.version} | rest)


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Splits text into the bytes that can be shown already, and the beginning of an incomplete character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return data[: error.start], data[error.start :]
    return data, b""


def _fitted(shape: Sequence[int] | None, count: int) -> list[int]:
    """The declared shape with its last variable dimension taking the elements, and the others 1."""
    if not shape:
        return [count]
    found = list(shape)
    for index in range(len(found) - 1, -1, -1):
        if found[index] == -1:
            found[index], count = count, 1
    return found
