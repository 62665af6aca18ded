import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum and the difference of two tensors."""

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            tensors = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
