"""A runtime of MLServer's: adds up, one request or a whole stream of them."""

from collections.abc import AsyncIterator

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.errors import MLServerError
from mlserver.types import InferenceRequest, InferenceResponse


class SumModel(MLModel):
    async def load(self) -> bool:
        self.start = self.settings.parameters.extra["start"]
        return True

    def total(self, value: int) -> InferenceResponse:
        output = NumpyCodec.encode_output("total", np.array([value], dtype="int64"))
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        if payload.id == "teapot":
            raise MLServerError("no coffee", 418)
        return self.total(self.start + int(self.decode(payload.inputs[0]).sum()))

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        total = 0
        async for payload in payloads:
            total += int(self.decode(payload.inputs[0]).sum())
        yield self.total(total)
