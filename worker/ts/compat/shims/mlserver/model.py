"""`mlserver.model`: the class that runtimes are made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from .codecs.errors import CodecNotFound
from .codecs.utils import (
    decode_inference_request,
    decode_request_input,
    encode_inference_response,
    encode_response_output,
    get_decoded,
    has_decoded,
)
from .settings import ModelSettings
from .types import (
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataTensor,
    Parameters,
    RequestInput,
    RequestOutput,
    ResponseOutput,
)


class MLModel:
    """A model. Subclasses have `load` and `predict` or `predict_stream`."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self.ready = False

    async def load(self) -> bool:
        """Called once; False: the model isn't ready."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        raise NotImplementedError("predict() method not implemented")

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        """One answer to the first request of a stream."""
        async for payload in payloads:
            yield await self.predict(payload)
            return

    async def unload(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def version(self) -> str | None:
        return self._settings.version

    @property
    def settings(self) -> ModelSettings:
        return self._settings

    @property
    def inputs(self) -> list[MetadataTensor]:
        return self._settings.inputs

    @inputs.setter
    def inputs(self, value: list[MetadataTensor]) -> None:
        self._settings.inputs = value

    @property
    def outputs(self) -> list[MetadataTensor]:
        return self._settings.outputs

    @outputs.setter
    def outputs(self, value: list[MetadataTensor]) -> None:
        self._settings.outputs = value

    # --- codecs: by content type, else by the value, else the default

    def decode(self, request_input: RequestInput, default_codec: Any = None) -> Any:
        decode_request_input(request_input, _by_name(self.inputs))
        if has_decoded(request_input):
            return get_decoded(request_input)
        return request_input.data if default_codec is None else default_codec.decode_input(request_input)

    def decode_request(self, inference_request: InferenceRequest, default_codec: Any = None) -> Any:
        decode_inference_request(inference_request, self._settings, _by_name(self.inputs))
        if has_decoded(inference_request):
            return get_decoded(inference_request)
        return inference_request if default_codec is None else default_codec.decode_request(inference_request)

    def encode_response(self, payload: Any, default_codec: Any = None) -> InferenceResponse:
        found = encode_inference_response(payload, self._settings)
        if found is None and default_codec is not None:
            found = default_codec.encode_response(self.name, payload, self.version)
        if found is None:
            raise CodecNotFound(payload_type=str(type(payload)), is_request=True)
        return found

    def encode(self, payload: Any, request_output: RequestOutput, default_codec: Any = None) -> ResponseOutput:
        found = encode_response_output(payload, request_output, _by_name(self.outputs))
        if found is None and default_codec is not None:
            found = default_codec.encode_output(request_output.name, payload)
        if found is None:
            raise CodecNotFound(name=request_output.name)
        return found

    async def metadata(self) -> MetadataModelResponse:
        found = MetadataModelResponse(
            name=self.name, platform=self._settings.platform, versions=self._settings.versions
        )
        found.inputs, found.outputs = self.inputs or [], self.outputs or []
        parameters = self._settings.parameters
        if parameters is not None and parameters.content_type:
            found.parameters = Parameters(content_type=parameters.content_type)
        return found


def _by_name(tensors: Sequence[MetadataTensor] | None) -> dict[str, MetadataTensor]:
    return {tensor.name: tensor for tensor in tensors or ()}
