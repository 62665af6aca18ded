"""The image classifier: the bytes of a file in, the number of its class out."""

import nets
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.net = nets.Classifier()

    def execute(self, requests):
        files = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy().tobytes() for request in requests]
        classes = [numpy.array([one], dtype=numpy.int64) for one in self.net.classes(files)]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", one)]) for one in classes]
