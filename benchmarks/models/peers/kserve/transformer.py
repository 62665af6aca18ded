"""A transformer that halves the predictor's input and doubles its output; the same program runs on both servers.

Usage: python transformer.py [KServe's options] --model_name=NAME --predictor_host=HOST --predictor_protocol=PROTOCOL"""

from __future__ import annotations

import argparse

import numpy
from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server


class Halving(Model):
    def __init__(self, name: str):
        super().__init__(name)
        self.ready = True

    def preprocess(self, payload, headers=None):
        if isinstance(payload, dict):
            return {"instances": (numpy.asarray(payload["instances"]) / 2).tolist()}
        values = payload.inputs[0].as_numpy() / 2
        tensor = InferInput(name="x", shape=list(values.shape), datatype="FP32")
        tensor.set_data_from_numpy(values, binary_data=payload.from_grpc)
        return InferRequest(model_name=self.name, infer_inputs=[tensor], request_id=payload.id)

    def postprocess(self, result, headers=None, response_headers=None):
        if isinstance(result, dict):
            return {"predictions": (numpy.asarray(result["predictions"]) * 2).tolist()}
        values = result.outputs[0].as_numpy() * 2
        tensor = InferOutput(name="y", shape=list(values.shape), datatype="FP32")
        tensor.set_data_from_numpy(values, binary_data=result.from_grpc)
        return InferResponse(response_id=result.id, model_name=self.name, infer_outputs=[tensor])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    options, _ = parser.parse_known_args()
    ModelServer().start([Halving(options.model_name)])
