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
#: A handler of TorchServe's, and a runtime of MLServer's that makes the text of single answers upper case.
MODELS, TIMEOUT_S = ("text-model", "runtime"), 60
REQUEST = types.InferenceRequest.model_validate(
    {"inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["one two three"]}]}
)
REQUEST.inputs[0].parameters = types.Parameters(content_type="str")


def texts(response):
    return [text.strip().lower() for text in StringCodec.decode_output(response.outputs[0])]


def rest(model):
    for method in ("infer", "generate"):
        url = f"{HTTP}/v2/models/{model}/{method}"
        answer = requests.post(url, json=REQUEST.model_dump(exclude_none=True), timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        response = types.InferenceResponse.model_validate_json(answer.text)
        assert texts(response) == ["one two three"], response


def events(model):
    for method in ("infer_stream", "generate_stream"):
        url, found = f"{HTTP}/v2/models/{model}/{method}", []
        body = REQUEST.model_dump(exclude_none=True)
        with httpx.Client(timeout=TIMEOUT_S) as client, connect_sse(client, "POST", url, json=body) as source:
            for event in source.iter_sse():
                found += texts(types.InferenceResponse.model_validate_json(event.data))
        assert found == ["one", "two", "three"], found


def message(text, model):
    request = REQUEST.model_copy(deep=True)
    request.inputs[0] = StringCodec.encode_input("prompt", [text])
    return converters.ModelInferRequestConverter.from_types(request, model_name=model, model_version=None)


def unary(model):
    with grpc.insecure_channel(GRPC) as channel:
        stub = dataplane.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(message("one two three", model), timeout=TIMEOUT_S)
        assert texts(converters.ModelInferResponseConverter.to_types(answer)) == ["one two three"]


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


async def stream(model):
    async def sent():
        yield message("one two three", model)
        yield message("four", model)

    async with grpc.aio.insecure_channel(GRPC) as channel:
        stub, found = dataplane.GRPCInferenceServiceStub(channel), []
        async for answer in stub.ModelStreamInfer(sent(), timeout=TIMEOUT_S):
            found += texts(converters.ModelInferResponseConverter.to_types(answer))
    assert found == ["one", "two", "three", "four"], found


for name in MODELS:
    rest(name)
    events(name)
    unary(name)
    asyncio.run(stream(name))
arrays()
print("mlserver ok")
