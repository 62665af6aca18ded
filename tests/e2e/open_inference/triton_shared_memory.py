"""Run with Triton's client library: infers with tensors in shared memory, over gRPC and HTTP; then classes, statistics,
settings. Arguments: the gRPC address, the HTTP address. Prints JSON."""

import json
import sys

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm


def infer(module, client, name):
    x = np.array([[1.5, 2.5]], np.float32)
    handle = shm.create_shared_memory_region(name, f"/tested_{name}", 64)
    try:
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory(name, f"/tested_{name}", 64)
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_shared_memory(name, 8)
        wanted = module.InferRequestedOutput("y")
        wanted.set_shared_memory(name, 8, offset=32)
        client.infer("scores", [given], outputs=[wanted])
        found = shm.get_contents_as_numpy(handle, np.float32, [1, 2], offset=32).tolist()
        client.unregister_system_shared_memory(name)
        return found
    finally:
        shm.destroy_shared_memory_region(handle)


def classes(module, client, **more):
    given = module.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.array([[1, 2]], np.float32))
    found = client.infer("scores", [given], outputs=[module.InferRequestedOutput("y", class_count=1)], **more)
    return [value.decode() for value in found.as_numpy("y").ravel()]


grpc, http = grpcclient.InferenceServerClient(sys.argv[1]), httpclient.InferenceServerClient(sys.argv[2])
print(
    json.dumps(
        {
            "grpc": infer(grpcclient, grpc, "grpc"),
            "http": infer(httpclient, http, "http"),
            "classes": [
                classes(grpcclient, grpc),
                classes(httpclient, http),
                classes(httpclient, http, request_compression_algorithm="gzip", response_compression_algorithm="gzip"),
                classes(httpclient, http, request_compression_algorithm="deflate"),
            ],
            "counts": [
                int(grpc.get_inference_statistics("scores", as_json=True)["model_stats"][0]["inference_count"]),
                http.get_inference_statistics("scores")["model_stats"][0]["inference_count"],
            ],
            "log": http.get_log_settings()["log_info"],
            "trace": [
                http.get_trace_settings()["trace_level"],
                grpc.get_trace_settings(as_json=True)["settings"]["trace_level"]["value"],
            ],
        }
    )
)
