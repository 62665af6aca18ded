"""`mlserver.codecs.utils`: the codec that a content type, the model's metadata or a value asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from ..types import InferenceRequest, InferenceResponse, Parameters, RequestInput, ResponseOutput, TensorData
from . import base as codecs
from .base import (
    InputCodec,
    RequestCodec,
    find_input_codec,
    find_input_codec_by_payload,
    find_request_codec,
    find_request_codec_by_payload,
)
from .errors import CodecError

DefaultOutputPrefix, DefaultInputPrefix = "output-", "input-"
DecodedParameterName = "_decoded_payload"
InputOrOutput: TypeAlias = "RequestInput | ResponseOutput"


def inject_batch_dimension(shape: list[int]) -> list[int]:
    """[N] is [N, 1]."""
    return shape if len(shape) > 1 else [*shape, 1]


def texts_and_bytes(found: InputOrOutput) -> list[Any]:
    """The elements of BYTES; a single one may stand without a list."""
    root = found.data.root
    return root if isinstance(root, list) else [root]


def as_input(output: ResponseOutput) -> RequestInput:
    return RequestInput(
        name=output.name, datatype=output.datatype, shape=output.shape, data=output.data, parameters=output.parameters
    )


class ListCodec(InputCodec):
    """Of lists of one type, whose elements are texts on their way."""

    ElementType: ClassVar[type]

    @classmethod
    def encoded(cls, value: Any) -> str:
        return str(value)

    @classmethod
    def decoded(cls, value: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__}.decoded")

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, list) and all(isinstance(one, cls.ElementType) for one in payload)

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        texts = [cls.encoded(one) for one in payload]
        return ResponseOutput(
            name=name,
            datatype="BYTES",
            shape=[len(payload), 1],
            data=TensorData([one.encode() for one in texts] if use_bytes else texts),
            parameters=Parameters(content_type=cls.ContentType),
        )

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return as_input(cls.encode_output(name, payload, use_bytes))

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> list[Any]:
        return [cls.decoded(one) for one in texts_and_bytes(response_output)]

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> list[Any]:
        return [cls.decoded(one) for one in texts_and_bytes(request_input)]


def _content_type(found: Any, metadata: Any = None) -> str | None:
    for one in (found, metadata):
        parameters = getattr(one, "parameters", None)
        if parameters is not None and parameters.content_type:
            return str(parameters.content_type)
    return None


def _keep(found: Any, decoded: Any) -> None:
    if found.parameters is None:
        found.parameters = Parameters()
    setattr(found.parameters, DecodedParameterName, decoded)


def has_decoded(parametrised_obj: Any) -> bool:
    return parametrised_obj.parameters is not None and hasattr(parametrised_obj.parameters, DecodedParameterName)


def get_decoded(parametrised_obj: Any) -> Any:
    return getattr(parametrised_obj.parameters, DecodedParameterName, None)


def get_decoded_or_raw(parametrised_obj: Any) -> Any:
    if has_decoded(parametrised_obj):
        return get_decoded(parametrised_obj)
    return getattr(parametrised_obj, "data", parametrised_obj)


def decode_request_input(request_input: RequestInput, metadata_inputs: Mapping[str, Any] | None = None) -> Any:
    """Decodes an input with the codec of its content type, and keeps the result with it; None without a codec."""
    content_type = _content_type(request_input, (metadata_inputs or {}).get(request_input.name))
    codec = find_input_codec(content_type) if content_type is not None else None
    if codec is None:
        return None
    decoded = codec.decode_input(request_input)
    _keep(request_input, decoded)
    return decoded


def decode_inference_request(
    inference_request: InferenceRequest, model_settings: Any = None, metadata_inputs: Mapping[str, Any] | None = None
) -> Any:
    """Decodes a request, its inputs first, with the codec of its content type; the request itself without one."""
    for request_input in inference_request.inputs:
        decode_request_input(request_input, metadata_inputs)
    content_type = _content_type(inference_request, model_settings)
    codec = find_request_codec(content_type) if content_type is not None else None
    if codec is None:
        return inference_request
    decoded = codec.decode_request(inference_request)
    _keep(inference_request, decoded)
    return decoded


def encode_response_output(
    payload: Any, request_output: Any, metadata_outputs: Mapping[str, Any] | None = None
) -> ResponseOutput | None:
    content_type = _content_type(request_output, (metadata_outputs or {}).get(request_output.name))
    codec = find_input_codec(content_type) if content_type is not None else find_input_codec_by_payload(payload)
    found: ResponseOutput | None = codec and codec.encode_output(name=request_output.name, payload=payload)
    return found


def encode_inference_response(payload: Any, model_settings: Any) -> InferenceResponse | None:
    codec = find_request_codec_by_payload(payload)
    if codec is None:
        return None
    found: InferenceResponse = codec.encode_response(model_settings.name, payload, model_settings.version)
    return found


class SingleInputRequestCodec(RequestCodec):
    """A request of one tensor, whose codec is `InputCodec`."""

    InputCodec: ClassVar[type[codecs.InputCodec] | None] = None

    @classmethod
    def _codec(cls) -> type[codecs.InputCodec]:
        if cls.InputCodec is None:
            raise NotImplementedError(f"{cls.__name__} has no InputCodec")
        return cls.InputCodec

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return cls.InputCodec is not None and cls.InputCodec.can_encode(payload)

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **kwargs: Any
    ) -> InferenceResponse:
        output = cls._codec().encode_output(f"{DefaultOutputPrefix}1", payload, **kwargs)
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            parameters=Parameters(content_type=cls.ContentType),
            outputs=[output],
        )

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        only = _only(cls.ContentType, response.outputs, "output")
        return get_decoded(only) if has_decoded(only) else cls._codec().decode_output(only)

    @classmethod
    def encode_request(cls, payload: Any, **kwargs: Any) -> InferenceRequest:
        tensor = cls._codec().encode_input(f"{DefaultInputPrefix}1", payload, **kwargs)
        return InferenceRequest(inputs=[tensor], parameters=Parameters(content_type=cls.ContentType))

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        only = _only(cls.ContentType, request.inputs, "input")
        return get_decoded(only) if has_decoded(only) else cls._codec().decode_input(only)


def _only(content_type: str, tensors: list[Any], what: str) -> Any:
    if len(tensors) != 1:
        raise CodecError(f"content type {content_type!r} takes a single {what} tensor ({len(tensors)} were received)")
    return tensors[0]
