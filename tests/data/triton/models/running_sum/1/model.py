import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum of a sequence's numbers so far."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        number = int(given["CORRID"].ravel()[0])
        before = 0 if given["START"].ravel()[0] else self.sums[number]
        self.sums[number] = before + given["INPUT"]
        total = self.sums.pop(number) if given["END"].ravel()[0] else self.sums[number]
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("SUM", total), pb_utils.Tensor("ID", given["CORRID"].reshape(1, 1))]
        )
