"""A runtime of MLServer's that answers nothing until it is told to, and one large answer after another where a flood is
asked for."""

import asyncio
from collections.abc import AsyncIterator

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Hold(MLModel):
    async def load(self) -> bool:
        self.released = asyncio.Event()
        self.made = 0
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        if payload.id == "release":
            self.released.set()
        elif payload.id != "made":
            await self.released.wait()
        return self.answer(str(self.made))

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        async for payload in payloads:
            if payload.id != "flood":
                yield await self.predict(payload)
                continue
            while True:
                self.made += 1
                yield self.answer("x" * 1_000_000)

    def answer(self, text: str) -> InferenceResponse:
        output = ResponseOutput(name="output", datatype="BYTES", shape=[1], data=[text.encode()])
        return InferenceResponse(model_name=self.name, outputs=[output])
