"""Triton's HTTP client: health, metadata, infer with binary and JSON tensors, one after the other and at once, aio."""

import asyncio
import sys

import numpy as np
import tritonclient.http as client
import tritonclient.http.aio as aio

GRPC, HTTP = sys.argv[1:3]
URL = HTTP.removeprefix("http://")


def numbers(binary):
    found = []
    for name in ("a", "b"):
        found.append(client.InferInput(name, [2], "FP32"))
        found[-1].set_data_from_numpy(np.array([1, 2], "f4"), binary_data=binary)
    return found


def text_input(text, binary=True):
    tensor = client.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text]], dtype=object), binary_data=binary)
    return tensor


def blocking():
    with client.InferenceServerClient(URL, concurrency=4) as server:
        assert server.is_server_live() and server.is_server_ready() and server.is_model_ready("llm_model")
        assert server.get_model_metadata("llm_model")["inputs"][0]["shape"] == [-1, -1]
        assert server.get_model_config("llm_model")["max_batch_size"] == 8
        assert "llm_model" in {one["name"] for one in server.get_model_repository_index()}
        for binary_in in (True, False):
            for binary_out in (True, False):
                wanted = [client.InferRequestedOutput("sum", binary_data=binary_out)]
                answer = server.infer("sum", numbers(binary_in), outputs=wanted)
                assert answer.as_numpy("sum").tolist() == [2.0, 4.0]
            answer = server.infer("llm_model", [text_input("grün", binary_in)], request_id="r")
            assert answer.as_numpy("text_output")[0, 0].decode() == "GRÜN"
        calls = [server.async_infer("llm_model", [text_input(f"n{at}")]) for at in range(8)]
        found = [call.get_result().as_numpy("text_output")[0, 0].decode() for call in calls]
        assert found == [f"N{at}" for at in range(8)], found


async def awaited():
    async with aio.InferenceServerClient(URL) as server:
        calls = [server.infer("llm_model", [text_input(f"n{at}")]) for at in range(8)]
        found = [answer.as_numpy("text_output")[0, 0].decode() for answer in await asyncio.gather(*calls)]
        assert found == [f"N{at}" for at in range(8)], found


blocking()
asyncio.run(awaited())
print("triton http ok")
