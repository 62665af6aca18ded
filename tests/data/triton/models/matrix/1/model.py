import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The matrix that came."""

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", tensor)]))
        return responses
