"""The runtimes, each in a folder of its own with this file."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Echo(MLModel):
    """Answers with the tensor it got."""

    async def predict(self, payload):
        return self.answered(NumpyCodec.decode_input(payload.inputs[0]))

    def answered(self, values):
        output = NumpyCodec.encode_output("y", values)
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


class Mlp(Echo):
    async def load(self):
        import nets

        self.net = nets.Mlp()
        return True

    async def predict(self, payload):
        import numpy

        values = NumpyCodec.decode_input(payload.inputs[0])
        return self.answered(numpy.array(self.net.classes([values.tobytes()]))[:, None])


class Image(Mlp):
    async def load(self):
        import nets

        self.net = nets.Classifier()
        return True
