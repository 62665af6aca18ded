import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The name of the sequence."""

    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy().reshape(1, 1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ID", name)]))
        return responses
