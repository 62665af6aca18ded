"""Answers a request with 200 small pieces."""

import numpy
import triton_python_backend_utils as pb_utils

PIECES = 200
PIECE = numpy.frombuffer(b"ok", dtype=numpy.uint8)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(PIECES):
                response = pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", PIECE)])
                last = number == PIECES - 1
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
        return
