import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Text in upper case, `count` times, and the request's parameters behind it."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
        count = pb_utils.get_input_tensor_by_name(request, "count")
        parameters = json.loads(request.parameters() or "{}")
        said = [text.upper()] * (int(count.as_numpy()[0]) if count else 1)
        if parameters:
            said.append(json.dumps(parameters, sort_keys=True).encode())
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array(said, dtype=object)),
                pb_utils.Tensor("length", np.array([len(text)], dtype=np.int32)),
            ]
        )
