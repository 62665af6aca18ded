"""Answers with the sum of the tensors of a sequence."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        start, ready, end, number = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0])
            for name in ("START", "READY", "END", "SEQUENCE")
        )
        total = values
        if ready:  # else it fills a place of the batch
            total = self.sums[number] = values if start else self.sums[number] + values
            if end:
                del self.sums[number]
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", total)])
