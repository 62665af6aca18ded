"""A runtime of MLServer's: says the words of every prompt again, one at a time."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, ResponseOutput


class TextModel(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        (text,) = StringCodec.decode_input(payload.inputs[0])
        return self.answer(text.upper(), payload.parameters.headers.get("user"), payload.inputs[0].shape)

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        try:
            async for payload in payloads:
                (text,) = StringCodec.decode_input(payload.inputs[0])
                if text == "stop":
                    return
                if text == "break":
                    raise RuntimeError("broken")
                while text == "endless":
                    yield self.answer("more")
                    await asyncio.sleep(0)
                for word in text.split():
                    yield self.answer(word)
        except asyncio.CancelledError:
            print("cancelled", flush=True)
            raise

    def answer(self, text: str, user: str | None = None, shape: Sequence[int] = (1,)) -> InferenceResponse:
        parameters = Parameters(content_type="str", user=user) if user else Parameters(content_type="str")
        output = ResponseOutput(
            name="output", datatype="BYTES", shape=list(shape), data=[text.encode()], parameters=parameters
        )
        return InferenceResponse(model_name=self.name, outputs=[output])
