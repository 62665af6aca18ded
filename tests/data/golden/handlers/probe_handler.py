"""Probe handler: one function handler whose behaviour is picked by the request.

A JSON body {"op": NAME, ...} picks an operation; anything else is inspected and described back.
"""

import json
import os
import time

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException

_state = {"init": 0}


def _describe(v):
    if isinstance(v, (bytes, bytearray)):
        return {"type": type(v).__name__, "len": len(v), "head": bytes(v[:40]).decode("latin-1")}
    return {"type": type(v).__name__, "value": v}


def _one(row, idx, context):
    data = row.get("body", row.get("data"))
    if isinstance(data, (bytes, bytearray)):
        try:
            data = json.loads(bytes(data).decode())
        except Exception:
            pass
    op = data.get("op") if isinstance(data, dict) else None
    if op is None or op == "inspect":
        return {"keys": list(row.keys()), "fields": {k: _describe(v) for k, v in row.items()}}
    if op == "headers":
        return dict(context.get_all_request_header(idx))
    if op == "header":
        return {"value": context.get_request_header(idx, data["name"])}
    if op == "props":
        p = dict(context.system_properties)
        p["model_dir_has_marinf"] = os.path.isdir(os.path.join(p.pop("model_dir"), "MAR-INF"))
        return {
            "system_properties": p,
            "model_name": context.model_name,
            "manifest": context.manifest,
            "model_yaml_config": context.model_yaml_config,
            "n_request_ids": len(context.request_ids),
            "cwd_is_model_dir": os.path.realpath(os.getcwd())
            == os.path.realpath(context.system_properties["model_dir"]),
            "init_calls": _state["init"],
        }
    if op == "env":
        return {k: os.environ.get(k) for k in data["names"]}
    if op == "ret_str":
        return "plain é text"
    if op == "ret_bytes":
        return b"\x00\x01bytes"
    if op == "ret_int":
        return 7
    if op == "ret_float":
        return 1.5
    if op == "ret_none":
        return None
    if op == "ret_bool":
        return True
    if op == "ret_list":
        return [1, "a", {"k": 2}]
    if op == "ret_dict":
        return {"b": 1, "a": [1, 2], "u": "é"}
    if op == "ret_nan":
        return {"x": float("nan")}
    if op == "ret_set":
        return {1, 2}
    if op == "ret_tensor":
        import torch

        return torch.arange(3)
    if op == "status":
        context.set_response_status(code=data["code"], phrase=data.get("phrase", ""), idx=idx)
        return data.get("body", "custom status body")
    if op == "ctype":
        context.set_response_content_type(idx, data["value"])
        return data.get("body", "typed")
    if op == "rheader":
        context.set_response_header(idx, data["name"], data["value"])
        return "header set"
    if op == "pred_exc":
        raise PredictionException(data.get("message", "my message"), data.get("code", 513))
    if op == "value_error":
        raise ValueError("boom")
    if op == "memory_error":
        raise MemoryError()
    if op == "cuda_error":
        raise RuntimeError("CUDA out of memory (pretend)")
    if op == "sleep":
        time.sleep(data["seconds"])
        return "slept"
    if op == "exit":
        os._exit(data.get("code", 1))
    if op == "stream":
        for i in range(data.get("n", 3)):
            send_intermediate_predict_response([f"chunk{i} "], context.request_ids, "Intermediate", 200, context)
        return "last"
    if op == "print":
        print("probe print line")
        return "printed"
    if op == "metric":
        m = context.metrics
        m.add_counter("ProbeCounter", 2, None)
        m.add_time("ProbeTime", 12.5, None, "ms")
        m.add_size("ProbeSize", 3, None, "MB")
        m.add_percent("ProbePercent", 50, None)
        m.add_metric("ProbeGeneric", 4, unit="widgets")
        return "metrics sent"
    return {"unknown op": op}


def handle(data, context):
    if data is None:
        _state["init"] += 1
        return None
    first = data[0].get("body", data[0].get("data"))
    if isinstance(first, dict) and first.get("op") == "not_list":
        return "not a list"
    if isinstance(first, dict) and first.get("op") == "wrong_len":
        return ["a"] * (len(data) + 1)
    if isinstance(first, dict) and first.get("op") == "batch_size":
        return [str(len(data))] * len(data)
    return [_one(row, i, context) for i, row in enumerate(data)]
