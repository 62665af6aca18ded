"""Follows the request: `{"op": NAME, ...}` as the JSON input `body`. Each `op_` function is one behaviour."""

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

from ts.context import RequestCancelled
from ts.handler_utils.utils import send_intermediate_predict_response

seen = {"loads": 0, "calls": 0, "cancelled": 0, "generator_closed": 0}


def op_echo(ask, row, idx, context):
    return row["payload"]


def op_properties(ask, row, idx, context):
    return {
        "model_name": context.model_name,
        "system_properties": context.system_properties,
        "manifest": context.manifest,
        "model_yaml_config": context.model_yaml_config,
        "cwd": os.getcwd(),
        "path": sys.path[:3],
        "seen": seen,
    }


def op_value(ask, row, idx, context):
    return ask["value"]


def op_status(ask, row, idx, context):
    context.set_response_status(ask["code"], ask["phrase"], idx)
    context.set_response_header(idx, "x-idx", str(idx))
    return "with status"


def op_raise(ask, row, idx, context):
    raise {
        "value": ValueError("boom"),
        "exit": SystemExit(7),
    }[ask["kind"]]


def op_bad_status(ask, row, idx, context):
    context.set_response_status("high", "", idx)
    return "never seen"


def op_huge_phrase(ask, row, idx, context):
    context.set_response_status(200, "x" * 70_000, idx)
    return "never seen"


def op_many_headers(ask, row, idx, context):
    for number in range(70_000):
        context.set_response_header(idx, f"x-{number}", "1")
    return "never seen"


def op_die(ask, row, idx, context):
    os.kill(os.getpid(), signal.SIGKILL)


def op_size(ask, row, idx, context):
    return b"x" * ask["size"]


def op_stream(ask, row, idx, context):
    for number in range(ask["count"]):
        piece = b"." * ask["size"] if "size" in ask else f"{number} "
        send_intermediate_predict_response([piece] * len(context.request_ids), context.request_ids, "ok", 200, context)
    return "end"


def op_stream_from_thread(ask, row, idx, context):
    thread = threading.Thread(target=op_stream, args=(ask, row, idx, context))
    thread.start()
    thread.join()
    return "end"


def op_stream_forever(ask, row, idx, context):
    while True:
        try:
            send_intermediate_predict_response(
                ["."] * len(context.request_ids), context.request_ids, "ok", 200, context
            )
        except Exception:
            return "swallowed"
        except RequestCancelled:
            seen["cancelled"] += 1
            raise


def op_stream_then_fail(ask, row, idx, context):
    ids = context.request_ids
    send_intermediate_predict_response(["first"] * len(ids), ids, "ok", 200, context)
    raise ValueError("after a piece")


def op_socket(ask, row, idx, context):
    from ts.protocol.otf_message_handler import create_predict_response

    context.cl_socket.sendall(create_predict_response(["raw"], context.request_ids, "ok", 200, context, True))
    return "end"


def op_until_cancelled(ask, row, idx, context):
    while not context.is_cancelled(idx):
        time.sleep(0.001)
    return f"cancelled: {context.cancelled}"


def op_time_left(ask, row, idx, context):
    return {"remaining_s": context.remaining_s(idx), "deadline_s": context.deadline_s}


def op_log(ask, row, idx, context):
    print("first")
    logging.getLogger("handler").info("%s", "said")
    logging.getLogger("handler").debug("not said")
    print("last")
    return "logged"


def op_print(ask, row, idx, context):
    print("printed line")
    return "printed"


def op_complain(ask, row, idx, context):
    print("a complaint", file=sys.stderr)
    return "complained"


def op_random(ask, row, idx, context):
    import numpy
    import torch

    return [random.random(), float(numpy.random.rand()), float(torch.rand(1, dtype=torch.float64))]


def op_process(ask, row, idx, context):
    return {
        "pid": os.getpid(),
        "leads_session": os.getsid(0) == os.getpid(),
        "threads": threading.active_count(),
        "env": dict(os.environ),
        "fds": sorted(int(name) for name in os.listdir("/dev/fd")),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "torch": "torch" in sys.modules,
    }


def op_terminate(ask, row, idx, context):
    """The status of a child that gets SIGTERM."""
    if ask["how"] == "spawned":
        child = subprocess.Popen(["sleep", "1000"])
    else:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
    child.terminate()
    return child.wait() if ask["how"] == "spawned" else (child.join(), child.exitcode)[1]


def generator(ask):
    try:
        for number in range(ask["count"]):
            yield [b"." * ask["size"] if "size" in ask else f"{number} "]
        return ["end"] if ask.get("returns") else None
    finally:
        seen["generator_closed"] += 1


def handle(data, context):
    if data is None:
        seen["loads"] += 1
        return None
    seen["calls"] += 1
    asks = [row.get("body") or {"op": "describe"} for row in data]
    first = asks[0]
    if first["op"] == "generate":
        return generator(first)
    if first["op"] == "describe":
        return [json.dumps({"describe": context.get_request_header(0, "describe")})]
    if first["op"].startswith("stream"):
        return [globals()["op_" + first["op"]](first, data[0], 0, context)] * len(data)
    return [globals()["op_" + asks[idx]["op"]](asks[idx], row, idx, context) for idx, row in enumerate(data)]
