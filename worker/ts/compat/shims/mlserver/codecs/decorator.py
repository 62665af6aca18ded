"""`mlserver.codecs.decorator`: a predict whose parameters are the inputs, by their annotations."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from ..types import InferenceRequest, InferenceResponse, ResponseOutput
from .base import InputCodec, find_input_codec, find_request_codec
from .errors import CodecNotFound, InputsNotFound, OutputNotFound


def decode_args(predict: Callable[..., Any]) -> Callable[..., Any]:
    """`predict(self, name: hint, …) -> hint` as `predict(self, request)`. CodecNotFound for a hint without a codec."""
    hints = typing.get_type_hints(predict)
    returned = _returned(hints.pop("return", None))
    inputs = {name: _codec(name, hint, is_input=True) for name, hint in hints.items()}
    outputs = [_codec(None, hint, is_input=False) for hint in returned]

    @functools.wraps(predict)
    async def run(self: Any, request: InferenceRequest) -> InferenceResponse:
        found = await predict(self, **_arguments(request, inputs))
        values = found if isinstance(found, tuple) else () if found is None else (found,)
        encoded = [tensor for index, value in enumerate(values) for tensor in _encoded(index, value, outputs, returned)]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=encoded)

    return run


def _returned(hint: Any) -> list[Any]:
    if hint is None or hint is type(None):
        return []
    return list(typing.get_args(hint)) if typing.get_origin(hint) is tuple else [hint]


def _codec(name: str | None, hint: Any, is_input: bool) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    codec = find_input_codec(type_hint=hint) or find_request_codec(type_hint=hint)
    if codec is None:
        raise CodecNotFound(name=name, payload_type=str(hint), is_input=is_input)
    return codec


def _is_of_tensor(codec: Any) -> bool:
    return issubclass(codec if isinstance(codec, type) else type(codec), InputCodec)


def _arguments(request: InferenceRequest, codecs: dict[str, Any]) -> dict[str, Any]:
    """The inputs by name; those that no parameter is named after go into the one that takes a whole request."""
    found, rest = {}, []
    for tensor in request.inputs:
        codec = codecs.get(tensor.name)
        if codec is not None and _is_of_tensor(codec):
            found[tensor.name] = codec.decode_input(tensor)
        else:
            rest.append(tensor)
    if rest:
        whole = next(((name, codec) for name, codec in codecs.items() if not _is_of_tensor(codec)), None)
        if whole is None:
            raise InputsNotFound(rest, codecs)
        found[whole[0]] = whole[1].decode_request(InferenceRequest(inputs=rest))
    return found


def _encoded(index: int, value: Any, codecs: list[Any], hints: list[Any]) -> list[ResponseOutput]:
    if index >= len(codecs) or not codecs[index].can_encode(value):
        raise OutputNotFound(index, type(value), hints)
    if _is_of_tensor(codecs[index]):
        return [codecs[index].encode_output(name=f"output-{index}", payload=value)]
    response: InferenceResponse = codecs[index].encode_response(model_name="", payload=value)
    return response.outputs
