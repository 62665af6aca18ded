"""Answers with the tensor of the request, so that only the server is measured."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Identity(MLModel):
    async def predict(self, payload):
        values = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("y", values)
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])
