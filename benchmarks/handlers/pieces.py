"""Streams 200 small pieces; a blocking handler, as TorchServe's users write it."""

from ts.handler_utils.utils import send_intermediate_predict_response

PIECES = 200


def handle(data, context):
    if data is None:
        return None
    for _ in range(PIECES - 1):
        send_intermediate_predict_response(["ok"], context.request_ids, "ok", 200, context)
    return ["ok"]
