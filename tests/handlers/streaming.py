"""A handler as TorchServe documents it: pieces while it works, and its return value as the last piece."""

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if isinstance(data, list):
        for _ in range(3):
            send_intermediate_predict_response(
                ["intermediate_response"] * len(data),
                context.request_ids,
                "Intermediate Prediction success",
                200,
                context,
            )
        return ["hello world "] * len(data)
    return None
