"""Words: a stream of them, or all in capitals. The word `break` raises."""

from collections.abc import AsyncIterator

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.errors import MLServerError
from mlserver.types import InferenceRequest, InferenceResponse


class Text(MLModel):
    def _said(self, payload: InferenceRequest) -> str:
        return self.decode(payload.inputs[0], default_codec=StringCodec)[0]

    def _answer(self, text: str) -> InferenceResponse:
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("output", [text])])

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        return self._answer(self._said(payload).upper())

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        async for payload in payloads:
            for word in self._said(payload).split():
                if word == "break":
                    raise MLServerError("broken", 422)
                yield self._answer(word)
