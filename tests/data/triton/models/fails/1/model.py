import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fails as it is told to."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        how = pb_utils.get_input_tensor_by_name(request, "how").as_numpy()[0].decode()
        if how == "raise":
            raise ValueError("raised")
        if how == "model exception":
            raise pb_utils.TritonModelException("raised by the model")
        if how == "no outputs":
            return pb_utils.InferenceResponse([])
        if how == "other name":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", np.zeros(2, np.int32))])
        if how == "other datatype":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros(2, np.float32))])
        if how == "other shape":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros(3, np.int32))])
        if how == "fine":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros(2, np.int32))])
        if how == "default":
            return pb_utils.InferenceResponse([], pb_utils.TritonError("failed"))
        code = getattr(pb_utils.TritonError, how)
        return pb_utils.InferenceResponse([], pb_utils.TritonError("failed: " + how, code))
