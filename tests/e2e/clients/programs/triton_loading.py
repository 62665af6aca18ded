"""Triton's clients bring a model with their request, replace it, and take it away."""

import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http

GRPC, HTTP = sys.argv[1], sys.argv[2].removeprefix("http://")
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", x * FACTOR)])
"""
CONFIG = """{"backend": "python",
 "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
 "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}]}"""


def model(factor):
    return {"file:1/model.py": MODEL.replace("FACTOR", str(factor)).encode()}


def refused(client, word, **given):
    try:
        client.load_model("brought", **given)
    except client_of.InferenceServerException as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{given} was taken")


for client_of, address in ((tritonclient.grpc, GRPC), (tritonclient.http, HTTP)):
    name = f"brought-by-{client_of.__name__.rpartition('.')[2]}"
    x = client_of.InferInput("x", [2], "FP32")
    x.set_data_from_numpy(np.array([1, 2], "f4"))
    with client_of.InferenceServerClient(address) as client:
        for factor in (2, 3):
            client.load_model(name, config=CONFIG, files=model(factor))
            assert client.infer(name, [x]).as_numpy("y").tolist() == [factor, 2 * factor]
        refused(client, "'config'", files=model(4))
        refused(client, "max_request_size", config=CONFIG, files={"file:1/model.py": bytes(8_000_000)})
        assert client.infer(name, [x]).as_numpy("y").tolist() == [3, 6]
        client.unload_model(name)
        assert not client.is_model_ready(name)
print("triton loading ok")
