import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sleeps as long as it is told to."""

    def execute(self, requests):
        responses = []
        for request in requests:
            seconds = pb_utils.get_input_tensor_by_name(request, "seconds").as_numpy()
            time.sleep(float(seconds.sum()))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("slept", seconds)]))
        return responses
