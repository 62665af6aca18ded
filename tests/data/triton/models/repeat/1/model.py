import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """An answer for each word; "!" is an error, "." the flag with the last word."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            words = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].split()
            for word in words:
                sender.send(self.answer(word), FINAL if word == b"." else 0)
            if b"." not in words:
                sender.send(flags=FINAL)

    def answer(self, word):
        if word == b"!":
            return pb_utils.InferenceResponse([], pb_utils.TritonError("no more words"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([word], dtype=object))])
