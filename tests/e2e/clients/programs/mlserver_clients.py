"""MLServer's types, codecs and converters: REST, server-sent events, gRPC, and gRPC streams in its dialect."""

import asyncio
import sys

import grpc
import httpx
import mlserver.grpc.converters as converters
import mlserver.grpc.dataplane_pb2_grpc as dataplane
import requests
from httpx_sse import connect_sse
from mlserver import types
from mlserver.codecs import NumpyCodec, StringCodec

GRPC, HTTP = sys.argv[1:3]
MODEL, TIMEOUT_S = "text-model", 60
REQUEST = types.InferenceRequest.model_validate(
    {"inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["one two three"]}]}
)
REQUEST.inputs[0].parameters = types.Parameters(content_type="str")


def texts(response):
    return StringCodec.decode_output(response.outputs[0])


def rest():
    for method in ("infer", "generate"):
        url = f"{HTTP}/v2/models/{MODEL}/{method}"
        answer = requests.post(url, json=REQUEST.model_dump(exclude_none=True), timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        response = types.InferenceResponse.model_validate_json(answer.text)
        assert texts(response) == ["one two three "], response


def events():
    for method in ("infer_stream", "generate_stream"):
        url, found = f"{HTTP}/v2/models/{MODEL}/{method}", []
        body = REQUEST.model_dump(exclude_none=True)
        with httpx.Client(timeout=TIMEOUT_S) as client, connect_sse(client, "POST", url, json=body) as source:
            for event in source.iter_sse():
                found += texts(types.InferenceResponse.model_validate_json(event.data))
        assert found == ["one ", "two ", "three "], found


def message(text):
    request = REQUEST.model_copy(deep=True)
    request.inputs[0] = StringCodec.encode_input("prompt", [text])
    return converters.ModelInferRequestConverter.from_types(request, model_name=MODEL, model_version=None)


def unary():
    with grpc.insecure_channel(GRPC) as channel:
        stub = dataplane.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(message("one two three"), timeout=TIMEOUT_S)
        assert texts(converters.ModelInferResponseConverter.to_types(answer)) == ["one two three "]


def arrays():
    import numpy as np

    inputs = [NumpyCodec.encode_input(name, np.array([1, 2], "f4")) for name in ("a", "b")]
    for one in inputs:
        one.shape = [2]  # the codec makes a row of each element
    request = converters.ModelInferRequestConverter.from_types(types.InferenceRequest(inputs=inputs), "sum", None)
    with grpc.insecure_channel(GRPC) as channel:
        answer = dataplane.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=TIMEOUT_S)
    output = converters.ModelInferResponseConverter.to_types(answer).outputs[0]
    assert NumpyCodec.decode_output(output).ravel().tolist() == [2.0, 4.0], output


async def stream():
    async def sent():
        yield message("one two three")
        yield message("four")

    async with grpc.aio.insecure_channel(GRPC) as channel:
        stub, found = dataplane.GRPCInferenceServiceStub(channel), []
        async for answer in stub.ModelStreamInfer(sent(), timeout=TIMEOUT_S):
            found += texts(converters.ModelInferResponseConverter.to_types(answer))
    assert found == ["one ", "two ", "three ", "four "], found


rest()
events()
unary()
arrays()
asyncio.run(stream())
print("mlserver ok")
