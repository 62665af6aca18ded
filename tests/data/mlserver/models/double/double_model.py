"""Twice a number, by codecs: whatever the client's datatype."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Double(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        outputs = [
            NumpyCodec.encode_output(one.name, self.decode(one, default_codec=NumpyCodec) * 2) for one in payload.inputs
        ]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)
