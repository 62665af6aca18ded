"""Calls a model as KServe's end-to-end tests call an InferenceService. Prints `{"ready", "data"}`: of v1 its
predictions, of v2 and grpc-v2 the data of the first output.

Usage: python kserve_inference_service.py v1|v2|grpc-v2 ADDRESS MODEL < BODY
"""

import asyncio
import base64
import json
import sys

PROTOCOL, ADDRESS, MODEL = sys.argv[1:]
sys.argv[1:] = []  # kserve reads them when it is imported

from kserve import InferenceGRPCClient, InferenceRESTClient, InferRequest, RESTConfig  # noqa: E402
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb  # noqa: E402


async def rest(body):
    client = InferenceRESTClient(RESTConfig(protocol=PROTOCOL, timeout=60))
    ready = await client.is_model_ready(f"http://{ADDRESS}", MODEL)
    answer = await client.infer(f"http://{ADDRESS}", body, model_name=MODEL)
    await client.close()
    return ready, answer["predictions"] if PROTOCOL == "v1" else answer.outputs[0].data


async def grpc(body):
    """The first instance of a v1 body as BYTES without a shape."""
    image = base64.b64decode(body["instances"][0]["data"])
    tensor = {"name": "input-0", "shape": [], "datatype": "BYTES", "contents": {"bytes_contents": [image]}}
    client = InferenceGRPCClient(ADDRESS, timeout=60)
    ready = await client.is_model_ready(MODEL)
    answer = await client.infer(InferRequest.from_grpc(pb.ModelInferRequest(model_name=MODEL, inputs=[tensor])))
    await client.close()
    return ready, answer.outputs[0].data


is_ready, found = asyncio.run((grpc if PROTOCOL == "grpc-v2" else rest)(json.load(sys.stdin)))
print(json.dumps({"ready": is_ready, "data": list(found)}))
