"""Follows the request's JSON: `{"op": NAME, ...}`. Files under `dir` report the events to the test."""

import json
import os
import random
import time
from pathlib import Path

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


def _wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)


def _stream(request, context):
    for number in range(request["count"]):
        send_intermediate_predict_response([f"{number} "], context.request_ids, "more", 200, context)
    return "end"


def _stream_until_left(request, context):
    try:
        while True:
            send_intermediate_predict_response(["x" * 1000], context.request_ids, "more", 200, context)
    finally:
        Path(request["left"]).touch()


def _work_until_cancelled(request, context):
    Path(request["begun"]).touch()
    while not context.cancelled:
        time.sleep(0.005)
    Path(request["left"]).touch()
    return "cancelled"


def _one(request, context):
    op = request.get("op", "echo")
    if op == "echo":
        return request.get("value", "ok")
    if op == "pid":
        return str(os.getpid())
    if op == "random":
        import numpy
        import torch

        return [random.random(), float(numpy.random.random()), float(torch.rand(1, dtype=torch.float64))]
    if op == "work":
        time.sleep(request.get("seconds", 0.002))
        with open(request["ran"], "ab") as file:
            file.write(b".")
        return "worked"
    if op == "hold":
        Path(request["begun"]).touch()
        _wait_for(request["release"])
        return "held"
    if op == "until_cancelled":
        return _work_until_cancelled(request, context)
    if op == "stream":
        return _stream(request, context)
    if op == "stream_until_left":
        return _stream_until_left(request, context)
    if op == "raise":
        raise ValueError("a bug in the handler")
    if op == "refuse":
        raise PredictionException("not today", 404)
    if op == "item_fails":
        return PredictionException("this one only", 400)
    if op == "exit":
        os._exit(request.get("code", 3))
    if op == "set":
        return {1, 2}
    if op == "headers":
        return dict(context.get_all_request_header(0))
    raise KeyError(op)


def handle(data, context):
    if data is None:
        return None
    if context.get_request_header(0, "describe") == "True":
        return [{"about": "a handler for tests"}]
    requests = [json.loads(bytes(row.get("data", b"{}"))) for row in data]
    if requests[0].get("op") == "too_few":
        return []
    if requests[0].get("op") == "batch":
        return [len(data)] * len(data)
    return [_one(request, context) for request in requests]
