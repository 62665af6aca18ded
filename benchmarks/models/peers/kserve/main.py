"""KServe's models; the same program runs on both servers. Usage: python main.py [KServe's options] --serve NAMES"""

from __future__ import annotations

import argparse
import uuid

import numpy
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server


class Answering(Model):
    """Answers with the tensor it got."""

    def load(self):
        self.ready = True
        return self.ready

    def predict(self, payload: InferRequest, headers=None):
        values = self.answer(payload.inputs[0].as_numpy())
        output = InferOutput(name="y", shape=list(values.shape), datatype=self.datatype(payload))
        output.set_data_from_numpy(values, binary_data=payload.from_grpc)
        return InferResponse(response_id=payload.id or uuid.uuid4().hex, model_name=self.name, infer_outputs=[output])

    def answer(self, values: numpy.ndarray) -> numpy.ndarray:
        return values

    def datatype(self, payload: InferRequest) -> str:
        return payload.inputs[0].datatype


class Mlp(Answering):
    def load(self):
        import nets

        self.net = nets.Mlp()
        return super().load()

    def answer(self, values: numpy.ndarray) -> numpy.ndarray:
        return numpy.array([self.net.classes([values.tobytes()])], dtype=numpy.int64)

    def datatype(self, payload: InferRequest) -> str:
        return "INT64"


class Image(Mlp):
    def load(self):
        import nets

        self.net = nets.Classifier()
        return Answering.load(self)


KIND = {"identity": Answering, "echo": Answering, "mlp": Mlp, "image": Image}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--serve", required=True)
    options, _ = parser.parse_known_args()
    models = [KIND[name](name) for name in options.serve.split(",")]
    for model in models:
        model.load()
    ModelServer().start(models)
