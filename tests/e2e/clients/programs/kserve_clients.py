"""KServe's clients: gRPC, and REST with v1 and v2."""

import asyncio
import sys

GRPC, HTTP = sys.argv[1:3]
sys.argv[1:] = []  # kserve reads them when it is imported

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig  # noqa: E402


def sums(model="sum", grpc=False):
    inputs = [InferInput(name, [2], "FP32", data=[1.0, 2.0]) for name in ("a", "b")]
    return InferRequest(infer_inputs=inputs, model_name=model, request_id="r")


async def grpc():
    client = InferenceGRPCClient(GRPC)
    assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("sum")
    answer = await client.infer(sums())
    assert (answer.id, answer.outputs[0].name, list(answer.outputs[0].data)) == ("r", "sum", [2.0, 4.0]), answer
    found = await asyncio.gather(*(client.infer(sums()) for _ in range(8)))
    assert all(list(one.outputs[0].data) == [2.0, 4.0] for one in found)
    await client.close()


async def rest():
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    assert await client.is_server_live(HTTP) and await client.is_server_ready(HTTP)
    assert await client.is_model_ready(HTTP, "sum")
    answer = await client.infer(HTTP, sums(), model_name="sum")
    assert (answer.model_name, list(answer.outputs[0].data)) == ("sum", [2.0, 4.0]), answer
    await client.close()


asyncio.run(grpc())
asyncio.run(rest())
print("kserve ok")
