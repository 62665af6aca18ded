"""MLServer's clients against its runtimes: events for a request read from a file, streams of texts, and five requests
that become one sum."""

import asyncio
import sys
import tempfile
from pathlib import Path

import grpc
import httpx
import mlserver.grpc.converters as converters
import mlserver.grpc.dataplane_pb2_grpc as dataplane
import numpy as np
from httpx_sse import connect_sse
from mlserver import types
from mlserver.codecs import NumpyCodec, StringCodec

GRPC, HTTP = sys.argv[1:3]
TIMEOUT_S = 60
FILE = Path(tempfile.mkdtemp()) / "generate-request.json"
FILE.write_text('{"id": "g", "inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["a b"]}]}')


def texts(response):
    return StringCodec.decode_output(response.outputs[0])


def generate_stream():
    request = types.InferenceRequest.model_validate_json(FILE.read_text())
    url, found = f"{HTTP}/v2/models/text-model/generate_stream", []
    with (
        httpx.Client(timeout=TIMEOUT_S) as client,
        connect_sse(client, "POST", url, json=request.model_dump()) as source,
    ):
        for event in source.iter_sse():
            response = types.InferenceResponse.model_validate_json(event.data)
            assert response.id == "g", response
            found += texts(response)
    assert found == ["a", "b"], found


async def talk(requests):
    async def sent():
        for request in requests:
            yield request

    async with grpc.aio.insecure_channel(GRPC) as channel:
        stub = dataplane.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(sent(), timeout=TIMEOUT_S)
        return [converters.ModelInferResponseConverter.to_types(one) async for one in answers]


def number(value, **options):
    tensor = NumpyCodec.encode_input("x", np.array([value], "int32"))
    request = types.InferenceRequest(inputs=[tensor])
    return converters.ModelInferRequestConverter.from_types(request, "sum", None, **options)


def prompt(text):
    request = types.InferenceRequest(inputs=[StringCodec.encode_input("prompt", [text])])
    return converters.ModelInferRequestConverter.from_types(request, "text-model", None)


generate_stream()
assert [texts(one) for one in asyncio.run(talk([prompt("a b"), prompt("c")]))] == [["a"], ["b"], ["c"]]
for options in ({}, {"use_raw": True}):
    (answer,) = asyncio.run(talk([number(value, **options) for value in range(1, 6)]))
    assert NumpyCodec.decode_output(answer.outputs[0]).tolist() == [[15]], answer
print("mlserver streams ok")
