"""`mlserver.codecs.pandas`: tables, one tensor for each column."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from ..types import InferenceRequest, InferenceResponse, Parameters, ResponseOutput, TensorData
from .base import RequestCodec, register_request_codec
from .numpy import is_numeric, to_datatype, to_dtype
from .utils import InputOrOutput, as_input, get_decoded_or_raw, inject_batch_dimension, texts_and_bytes


def _series(found: InputOrOutput) -> Any:
    """A column of a tensor; of several dimensions the first counts."""
    if found.parameters is not None and found.parameters.content_type == PandasCodec.JsonContentType:
        return pd.Series([json.loads(one) for one in texts_and_bytes(found)])
    values = get_decoded_or_raw(found)
    values = getattr(values, "root", values)
    if not is_numeric(found):
        return pd.Series(values.ravel().tolist() if isinstance(values, np.ndarray) else values)
    if isinstance(values, np.ndarray):
        values = values.reshape(found.shape[0], 1).squeeze(axis=1)
    return pd.Series(values, dtype=to_dtype(found))


def _output(series: Any, use_bytes: bool) -> ResponseOutput:
    datatype, values = to_datatype(series.dtype), series.tolist()
    content_type = None
    if datatype == "BYTES" and all(isinstance(one, (str, bytes)) for one in values):
        content_type = "str"
        values = [one.encode() if use_bytes and isinstance(one, str) else one for one in values]
    elif datatype == "BYTES":
        content_type = PandasCodec.JsonContentType
        texts = [json.dumps(one, default=lambda value: value.tolist()) for one in values]
        values = [one.encode() for one in texts] if use_bytes else texts
    elif series.isnull().any():
        values = [None if one != one else one for one in values]
    parameters = Parameters(content_type=content_type) if content_type else None
    shape = inject_batch_dimension(list(series.shape))
    data = TensorData(values)
    return ResponseOutput(name=str(series.name), shape=shape, data=data, datatype=datatype, parameters=parameters)


@register_request_codec
class PandasCodec(RequestCodec):
    ContentType = "pd"
    JsonContentType = "pd_json"
    TypeHint = pd.DataFrame

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, pd.DataFrame)

    @classmethod
    def encode_outputs(cls, payload: Any, use_bytes: bool = True) -> list[ResponseOutput]:
        return [_output(payload[column], use_bytes) for column in payload]

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, use_bytes: bool = True, **kwargs: Any
    ) -> InferenceResponse:
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            parameters=Parameters(content_type=cls.ContentType),
            outputs=cls.encode_outputs(payload, use_bytes),
        )

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return pd.DataFrame({one.name: _series(one) for one in response.outputs})

    @classmethod
    def encode_request(cls, payload: Any, use_bytes: bool = True, **kwargs: Any) -> InferenceRequest:
        inputs = [as_input(one) for one in cls.encode_outputs(payload, use_bytes)]
        return InferenceRequest(parameters=Parameters(content_type=cls.ContentType), inputs=inputs)

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        return pd.DataFrame({one.name: _series(one) for one in request.inputs})
