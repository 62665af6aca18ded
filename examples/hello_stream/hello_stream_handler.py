"""The smallest streaming handler: three intermediate messages, then the last one."""

from ts.protocol.otf_message_handler import send_intermediate_predict_response


def handle(data, context):
    if type(data) is list:
        for i in range(3):
            send_intermediate_predict_response(
                ["intermediate_response"], context.request_ids, "Intermediate Prediction success", 200, context
            )
        return ["hello world "]
