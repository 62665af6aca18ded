"""Run with Triton's client library: asks ensembles, with tensors in requests and in shared memory, and classes. Prints
JSON. Arguments: the gRPC address, the HTTP address."""

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm


def classified(module, client, **more):
    image = module.InferInput("IMAGE", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[b"1 5 2"]], object))
    scale = module.InferInput("SCALE", [1, 1], "FP32")
    scale.set_data_from_numpy(np.array([[2]], np.float32))
    found = client.infer("classify", [image, scale], request_id="r1", **more)
    return [found.as_numpy("ANSWER")[0, 0].decode(), found.as_numpy("sum").tolist()]


def shared(module, client, name):
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    handle = shm.create_shared_memory_region(name, f"/tested_{name}", 64)
    try:
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory(name, f"/tested_{name}", 64)
        given = module.InferInput("X", [1, 4], "FP32")
        given.set_shared_memory(name, 16)
        wanted = module.InferRequestedOutput("OUT")
        wanted.set_shared_memory(name, 16, offset=32)
        client.infer("chain", [given], outputs=[wanted])
        found = shm.get_contents_as_numpy(handle, np.float32, [1, 4], offset=32).tolist()
        client.unregister_system_shared_memory(name)
        return found
    finally:
        shm.destroy_shared_memory_region(handle)


def classes(module, client):
    given = module.InferInput("X", [1, 3], "FP32")
    given.set_data_from_numpy(np.array([[1, 4, 2]], np.float32))
    found = client.infer("chain", [given], outputs=[module.InferRequestedOutput("OUT", class_count=2)])
    return [value.decode() for value in found.as_numpy("OUT").ravel()]


def streamed(client):
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    given = grpcclient.InferInput("X", [1, 1], "FP32")
    given.set_data_from_numpy(np.array([[3]], np.float32))
    client.async_stream_infer("stream", [given], enable_empty_final_response=True)
    found = []
    while True:
        result, error = answers.get(timeout=60)
        assert error is None, error
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
        found.append(result.as_numpy("OUT").tolist())
    client.stop_stream()
    return found


grpc, http = grpcclient.InferenceServerClient(sys.argv[1]), httpclient.InferenceServerClient(sys.argv[2])
assert grpc.is_model_ready("classify") and http.is_model_ready("classify")
print(
    json.dumps(
        {
            "classified": [
                classified(grpcclient, grpc),
                classified(httpclient, http),
                classified(httpclient, http, response_compression_algorithm="gzip"),
            ],
            "shared": [shared(grpcclient, grpc, "grpc_ensemble"), shared(httpclient, http, "http_ensemble")],
            "classes": [classes(grpcclient, grpc), classes(httpclient, http)],
            "streamed": streamed(grpc),
            "platforms": [
                grpc.get_model_config("classify", as_json=True)["config"]["platform"],
                http.get_model_metadata("classify")["platform"],
            ],
        }
    )
)
