import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Declares its inputs itself; there is no config.pbtxt."""

    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "INPUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUTPUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", tensor)]))
        return responses
