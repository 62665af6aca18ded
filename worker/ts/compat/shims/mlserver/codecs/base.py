"""`mlserver.codecs.base`: the base classes of codecs, and their registry."""

from __future__ import annotations

import typing
from typing import Any, ClassVar, TypeVar

from ..types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


class _Codec:
    ContentType: ClassVar[str] = ""
    TypeHint: ClassVar[Any] = type(None)

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return False


class InputCodec(_Codec):
    """Codec of one tensor, found by its `ContentType` or `TypeHint`."""

    @classmethod
    def encode_output(cls, name: str, payload: Any, **kwargs: Any) -> ResponseOutput:
        raise NotImplementedError(f"{cls.__name__}.encode_output")

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        raise NotImplementedError(f"{cls.__name__}.decode_output")

    @classmethod
    def encode_input(cls, name: str, payload: Any, **kwargs: Any) -> RequestInput:
        raise NotImplementedError(f"{cls.__name__}.encode_input")

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        raise NotImplementedError(f"{cls.__name__}.decode_input")

    @classmethod
    def encode(cls, name: str, payload: Any) -> ResponseOutput:
        return cls.encode_output(name, payload)

    @classmethod
    def decode(cls, request_input: RequestInput) -> Any:
        return cls.decode_input(request_input)


class RequestCodec(_Codec):
    """Of a whole request or answer."""

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **kwargs: Any
    ) -> InferenceResponse:
        raise NotImplementedError(f"{cls.__name__}.encode_response")

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        raise NotImplementedError(f"{cls.__name__}.decode_response")

    @classmethod
    def encode_request(cls, payload: Any, **kwargs: Any) -> InferenceRequest:
        raise NotImplementedError(f"{cls.__name__}.encode_request")

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        raise NotImplementedError(f"{cls.__name__}.decode_request")

    @classmethod
    def encode(cls, model_name: str, payload: Any, model_version: str | None = None) -> InferenceResponse:
        return cls.encode_response(model_name, payload, model_version)

    @classmethod
    def decode(cls, request: InferenceRequest) -> Any:
        return cls.decode_request(request)


_I = TypeVar("_I", bound="type[InputCodec]")
_R = TypeVar("_R", bound="type[RequestCodec]")
_input_codecs: dict[str, Any] = {}
_request_codecs: dict[str, Any] = {}


def register_input_codec(codec: _I) -> _I:
    _input_codecs[codec.ContentType] = codec
    return codec


def register_request_codec(codec: _R) -> _R:
    _request_codecs[codec.ContentType] = codec
    return codec


def _found(codecs: dict[str, Any], content_type: str | None, payload: Any, type_hint: Any) -> Any:
    """The codec for the content type, else for the payload, else for the type hint; None without one."""
    if content_type is not None:
        return codecs.get(content_type)
    if payload is not None:
        return next((one for one in codecs.values() if one.can_encode(payload)), None)
    wanted = _plain(type_hint)
    return next((one for one in codecs.values() if _plain(one.TypeHint) == wanted), None)


def _plain(hint: Any) -> Any:
    """`typing.List[…]` as `list[…]`: the two aren't equal."""
    return list[typing.get_args(hint)] if typing.get_origin(hint) is list else hint  # type: ignore[misc]


def find_input_codec(content_type: str | None = None, payload: Any = None, type_hint: Any = None) -> Any:
    return _found(_input_codecs, content_type, payload, type_hint)


def find_request_codec(content_type: str | None = None, payload: Any = None, type_hint: Any = None) -> Any:
    return _found(_request_codecs, content_type, payload, type_hint)


def find_input_codec_by_payload(payload: Any) -> Any:
    return find_input_codec(payload=payload)


def find_request_codec_by_payload(payload: Any) -> Any:
    return find_request_codec(payload=payload)
