"""Triton's gRPC client: health, metadata, the repository, infer (all at once, too), a stream with a callback, aio."""

import asyncio
import queue
import sys

import numpy as np
import tritonclient.grpc as client
import tritonclient.grpc.aio as aio

GRPC, HTTP = sys.argv[1:3]
TIMEOUT_S = 60


def text_input(text, module=client):
    tensor = module.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    return tensor


def numbers(module=client):
    found = []
    for name in ("a", "b"):
        found.append(module.InferInput(name, [2], "FP32"))
        found[-1].set_data_from_numpy(np.array([1, 2], "f4"))
    return found


def blocking():
    with client.InferenceServerClient(GRPC) as server:
        assert server.is_server_live() and server.is_server_ready() and server.is_model_ready("llm_model")
        assert server.get_server_metadata().name
        assert server.get_model_metadata("llm_model").inputs[0].shape == [-1, -1]
        assert server.get_model_config("llm_model").config.max_batch_size == 8
        assert "llm_model" in {one.name for one in server.get_model_repository_index().models}
        assert server.infer("sum", numbers(), client_timeout=TIMEOUT_S).as_numpy("sum").tolist() == [2.0, 4.0]
        answer = server.infer("llm_model", [text_input("grün")], request_id="r", client_timeout=TIMEOUT_S)
        assert (answer.as_numpy("text_output")[0, 0].decode(), answer.get_response().id) == ("GRÜN", "r")
        done = queue.Queue()
        for at in range(8):
            server.async_infer("llm_model", [text_input(f"n{at}")], lambda result, error: done.put((result, error)))
        found = [done.get(timeout=TIMEOUT_S) for _ in range(8)]
        texts = {result.as_numpy("text_output")[0, 0].decode() for result, error in found if error is None}
        assert texts == {f"N{at}" for at in range(8)}, found
        try:
            server.infer("nobody", [text_input("x")])
        except client.InferenceServerException as error:
            assert "nobody" in error.message(), error
        else:
            raise AssertionError("a model that isn't there answered")


def streaming():
    answers = queue.Queue()
    with client.InferenceServerClient(GRPC) as server:
        server.start_stream(lambda result, error: answers.put((result, error)))
        tensor = client.InferInput("text", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"one two three"], dtype=object))
        server.async_stream_infer("words", [tensor], request_id="s", enable_empty_final_response=True)
        pieces = []
        while True:
            result, error = answers.get(timeout=TIMEOUT_S)
            assert error is None, error
            response = result.get_response()
            if response.outputs:
                pieces.append(result.as_numpy(response.outputs[0].name).ravel()[0])
            if response.parameters["triton_final_response"].bool_param:
                break
        assert pieces[:3] == [b"one ", b"two ", b"three "], pieces
        server.stop_stream()


async def awaited():
    async with aio.InferenceServerClient(GRPC) as server:
        assert await server.is_server_live()
        calls = [server.infer("llm_model", [text_input(f"n{at}")]) for at in range(8)]
        found = [answer.as_numpy("text_output")[0, 0].decode() for answer in await asyncio.gather(*calls)]
        assert found == [f"N{at}" for at in range(8)], found

        async def requests():
            for text in ("one", "two"):
                yield {"model_name": "llm_model", "inputs": [text_input(text)], "request_id": text}

        found = []
        async for result, error in server.stream_infer(requests()):
            assert error is None, error
            found.append(result.as_numpy("text_output")[0, 0].decode())
        assert found == ["ONE", "TWO"], found


blocking()
streaming()
asyncio.run(awaited())
print("triton grpc ok")
