"""MLServer's folders in the model store, and streams of requests into one call of a runtime: all four shapes, slow and
vanishing clients, workers that die.

Promises 004-03, 004-04, 004-05, 004-06, 004-07, 004-08, 004-09, 004-10, 004-11.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S, http_call
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

RUNTIMES = Path(__file__).parent.parent.parent / "handlers" / "mlserver"


@pytest.fixture(scope="module")
def mlserver(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[Any]:
    """A server with all models of a store, in which MLServer's lie at different depths."""
    directory = tmp_path_factory.mktemp("mlserver")
    store = directory / "store"
    shutil.copytree(RUNTIMES / "sum", store / "sum")
    shutil.copytree(RUNTIMES / "text", store / "deep" / "er" / "text")
    shutil.copytree(RUNTIMES / "hold", store / "hold")
    with serving(directory, store, {"default_workers_per_model": 1}, ["--ncs", "--models", "all"]) as server:
        with grpc.insecure_channel(server.inference) as channel:
            for name in ("sum", "text-model"):
                request = numbers(1) if name == "sum" else text("x")
                GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S, wait_for_ready=True)
        yield server


def numbers(*values: int, request_id: str = "") -> ModelInferRequest:
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[len(values)])
    tensor.contents.int_contents.extend(values)
    return ModelInferRequest(model_name="sum", id=request_id, inputs=[tensor])


def text(value: str | bytes, request_id: str = "") -> ModelInferRequest:
    tensor = ModelInferRequest.InferInputTensor(name="prompt", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(value.encode() if isinstance(value, str) else value)
    return ModelInferRequest(model_name="text-model", id=request_id, inputs=[tensor])


def word(answer: ModelInferResponse) -> str:
    return answer.outputs[0].contents.bytes_contents[0].decode()


#: Those who share no connection: what one of them doesn't read would be in the others' way.
ALONE = (("grpc.use_local_subchannel_pool", 1),)


#: Whose window stays at HTTP/2's 64 KiB. grpcio's client lets it grow with what it measures of the connection, to many
#: megabytes that have left the server and that the test hasn't read.
NARROW = (("grpc.http2.bdp_probe", 0),)
#: Answers of 1 MB that may be made for such a client, and that it hasn't read. No buffer on their way holds as much as
#: one, and each takes one as long as it isn't full: the engine's, the frontend's of answers that are ready (one waits
#: beside it) and of the worker's pieces (the stream's credit), and the worker's. One more is being made.
ANSWERS_AHEAD_MAX = 6


class Conversation:
    """A stream on which a test sends and reads as it likes. Answers are plain ModelInferResponses."""

    def __init__(self, server: Any, *options: tuple[str, int]) -> None:
        self.channel = grpc.aio.insecure_channel(server.inference, options=[*ALONE, *options])
        method = self.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelInferResponse.FromString,
        )
        self.call = method(timeout=GUARD_S)

    async def say(self, *requests: ModelInferRequest) -> None:
        for request in requests:
            await self.call.write(request)

    async def heard(self, count: int) -> list[ModelInferResponse]:
        return [await self.call.read() for _ in range(count)]

    async def rest(self) -> list[ModelInferResponse]:
        """All answers still to come; the status has to be OK."""
        with contextlib.suppress(asyncio.InvalidStateError):  # the server has ended it already
            await self.call.done_writing()
        found = []
        while (answer := await self.call.read()) is not grpc.aio.EOF:
            found.append(answer)
        return found

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()


def run_test(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, GUARD_S))


# --- the four shapes


def test_unary_in_unary_out(mlserver: Any) -> None:
    with grpc.insecure_channel(mlserver.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(numbers(1, 2, request_id="a"), timeout=GUARD_S)
    assert (answer.model_name, answer.model_version, answer.id) == ("sum", "v1", "a")
    assert list(answer.outputs[0].contents.int64_contents) == [103]


def test_unary_in_stream_out(mlserver: Any) -> None:
    async def talk() -> list[str]:
        async with Conversation(mlserver) as stream:
            await stream.say(text("to be or not"))
            return [word(one) for one in await stream.rest()]

    assert run_test(talk()) == ["to", "be", "or", "not"]


def test_stream_in_unary_out(mlserver: Any) -> None:
    async def talk() -> list[ModelInferResponse]:
        async with Conversation(mlserver) as stream:
            await stream.say(*(numbers(value, request_id=f"r{value}") for value in range(1, 6)))
            return await stream.rest()

    (answer,) = run_test(talk())
    assert list(answer.outputs[0].contents.int64_contents) == [15] and answer.id == "r1"


async def test_stream_in_stream_out(mlserver: Any) -> None:
    async with Conversation(mlserver) as stream:
        for round_number in range(20):
            await stream.say(text(f"a{round_number} b"))
            assert [word(one) for one in await stream.heard(2)] == [f"a{round_number}", "b"]
        assert not await stream.rest()


def test_large_requests_keep_their_order(mlserver: Any) -> None:
    async def talk() -> int:
        async with Conversation(mlserver) as stream:
            for value in range(30):
                await stream.say(numbers(*[value] * (200_000 if value % 3 == 0 else 1)))
            (answer,) = await stream.rest()
            return int(answer.outputs[0].contents.int64_contents[0])

    assert run_test(talk()) == sum(value * (200_000 if value % 3 == 0 else 1) for value in range(30))


# --- clients and workers that go


async def test_the_handlers_end_is_the_streams(mlserver: Any) -> None:
    async with Conversation(mlserver) as stream:
        await stream.say(text("one"))
        await stream.heard(1)
        await stream.say(text("stop"))
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK


def test_a_cancel_in_the_middle_reaches_the_handler(mlserver: Any) -> None:
    before = mlserver.log.count("cancelled")

    async def talk() -> None:
        async with Conversation(mlserver) as stream:
            await stream.say(text("one"))
            await stream.heard(1)
            stream.call.cancel()

    run_test(talk())
    mlserver.wait_for_log("cancelled", before + 1)


async def test_a_handler_that_raises_ends_the_stream_with_a_status(mlserver: Any) -> None:
    async with Conversation(mlserver) as stream:
        await stream.say(text("one"))
        await stream.heard(1)
        await stream.say(text("break"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.rest()
        assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_texts_whose_shape_is_their_length(mlserver: Any) -> None:
    """MLServer's clients send one text with the number of its characters as the shape, and runtimes answer so."""
    tensor: dict[str, Any] = {"name": "prompt", "datatype": "BYTES", "shape": [9], "data": "one two"}
    for data in ("one two", ["one two"]):
        body = json.dumps({"inputs": [tensor | {"data": data}]}).encode()
        request = urllib.request.Request(f"{mlserver.http}/v2/models/text-model/infer", body)
        with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
            (output,) = json.load(answer)["outputs"]
        assert output["data"] == ["ONE TWO"] and output["shape"] == [9]
    long = text("one two")
    long.inputs[0].shape[0] = 9
    with grpc.insecure_channel(mlserver.inference) as channel:
        (answered,) = GRPCInferenceServiceStub(channel).ModelInfer(long, timeout=GUARD_S).outputs
    assert list(answered.contents.bytes_contents) == [b"ONE TWO"] and list(answered.shape) == [9]


async def test_a_bad_request_in_the_middle_ends_the_stream_with_a_status(mlserver: Any) -> None:
    bad = text("x")
    bad.inputs[0].shape[0] = -7
    async with Conversation(mlserver) as stream:
        await stream.say(text("one"))
        await stream.heard(1)
        await stream.say(bad)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.rest()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "input 'prompt'" in str(caught.value.details())


async def test_a_slow_reader_holds_up_its_own_stream_only(mlserver: Any) -> None:
    async with Conversation(mlserver) as slow, Conversation(mlserver) as quick:
        await slow.say(text("endless"))
        for _ in range(50):
            await quick.say(text("a"))
            assert [word(one) for one in await quick.heard(1)] == ["a"]
        assert [word(one) for one in await slow.heard(3)] == ["more"] * 3
        slow.call.cancel()


def test_a_handler_that_reads_nothing_holds_up_its_client(mlserver: Any) -> None:
    """The client's messages wait in bounded buffers, until its writes block."""

    async def talk() -> None:
        async with Conversation(mlserver) as stream:
            await stream.say(text("endless"))

            sent = 0

            async def push() -> None:
                nonlocal sent
                while True:
                    await stream.say(text(b"x" * 1_000_000))
                    sent += 1

            pushing = asyncio.create_task(push())
            await stream.heard(3_000)
            assert sent < 20, "megabytes that the handler has not asked for"
            pushing.cancel()
            stream.call.cancel()

    run_test(talk())
    with grpc.insecure_channel(mlserver.inference) as channel:
        assert word(GRPCInferenceServiceStub(channel).ModelInfer(text("ok"), timeout=GUARD_S)) == "OK"


def held(request_id: str, size: int = 1) -> ModelInferRequest:
    """For the runtime that answers when it is told to."""
    request = text(b"x" * size, request_id)
    request.model_name = "hold"
    return request


async def unary(server: Any, request: ModelInferRequest) -> ModelInferResponse:
    async with grpc.aio.insecure_channel(server.inference, options=ALONE) as channel:
        answer: ModelInferResponse = await GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
        return answer


async def test_a_client_that_does_not_read_is_read_ahead_of_so_far(mlserver: Any) -> None:
    """A runtime's messages for it wait in bounded buffers, counted in bytes; other streams go on."""
    async with Conversation(mlserver, *NARROW) as slow, Conversation(mlserver) as quick:
        await slow.say(held("flood"))
        for read in range(1, 41):
            await slow.heard(1)
            for turn in range(5):
                await quick.say(text(f"t{turn}"))
                assert [word(one) for one in await quick.heard(1)] == [f"t{turn}"]
            made = int(word(await unary(mlserver, held("made"))))
            assert made - read <= ANSWERS_AHEAD_MAX, "megabytes that nobody has read"
        slow.call.cancel()


async def test_requests_are_read_ahead_so_far(mlserver: Any) -> None:
    """Also in Triton's dialect, in which each is a call of its own: then the client's writes wait, and all are answered
    as soon as the runtime answers. The answers of a model that streams may mix."""
    size, count = 4_000_000, 40
    channel = grpc.aio.insecure_channel(mlserver.inference, options=ALONE)
    async with Conversation(mlserver) as quick, channel:
        stub = GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(timeout=GUARD_S, metadata=[("oip-stream-dialect", "triton")])
        written = 0

        async def push() -> None:
            nonlocal written
            for number in range(count):
                await stream.write(held(f"n{number}", size))
                written += 1
            await stream.done_writing()

        pushing = asyncio.create_task(push())
        before, still = -1, 0
        while still < 20:  # as long as it goes on, the others' turns are the clock
            await quick.say(text("tick"))
            assert [word(one) for one in await quick.heard(1)] == ["tick"]
            before, still = written, still + 1 if written == before else 0
        assert 0 < written < 25, f"{written * size} bytes of requests that nobody has answered"
        await unary(mlserver, held("release"))
        ids = {(await stream.read()).infer_response.id for _ in range(count)}
        assert ids == {f"n{number}" for number in range(count)}
        await pushing


async def test_many_conversations_at_once(mlserver: Any) -> None:
    async def one(number: int) -> None:
        async with Conversation(mlserver) as stream:
            for turn in range(10):
                await stream.say(text(f"{number}-{turn}"))
                assert [word(answer) for answer in await stream.heard(1)] == [f"{number}-{turn}"]
            assert not await stream.rest()

    await asyncio.gather(*(one(number) for number in range(32)))


async def test_a_worker_that_is_killed_ends_its_streams_once(mlserver: Any) -> None:
    async with Conversation(mlserver) as stream:
        await stream.say(text("one"))
        await stream.heard(1)
        (pid,) = mlserver.worker_pids("text-model")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.rest()
        assert "Worker died" in str(caught.value.details())
    async with Conversation(mlserver) as stream:
        await stream.say(text("again"))
        assert [word(one) for one in await stream.rest()] == ["again"]


# --- other protocols


def post(server: Any, path: str, value: Any) -> tuple[int, bytes]:
    answer = http_call(server.port("http_inference"), "POST", path, json.dumps(value))
    return answer.status, answer.body


PROMPT = {"id": "p", "inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["a b"]}]}


@pytest.mark.parametrize("verb", ["infer", "generate"])
def test_rest_asks_predict(mlserver: Any, verb: str) -> None:
    status, body = post(mlserver, f"/v2/models/text-model/versions/1.0/{verb}", PROMPT)
    found = json.loads(body)
    assert status == 200 and found["outputs"][0]["data"] == ["A B"] and found["id"] == "p"


@pytest.mark.parametrize("verb", ["infer_stream", "generate_stream"])
def test_rest_asks_predict_stream(mlserver: Any, verb: str) -> None:
    status, body = post(mlserver, f"/v2/models/text-model/{verb}", PROMPT)
    events = [json.loads(one.removeprefix(b"data: ")) for one in body.split(b"\n\n") if one]
    assert status == 200 and [one["outputs"][0]["data"] for one in events] == [["a"], ["b"]]
    assert {one["id"] for one in events} == {"p"}


def test_the_status_a_runtime_raises(mlserver: Any) -> None:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
    status, body = post(mlserver, "/v2/models/sum/infer", {"id": "teapot", "inputs": [tensor]})
    assert (status, json.loads(body)) == (418, {"error": "no coffee"})


@pytest.mark.external
def test_mlservers_own_clients(mlserver: Any, client_python: Any, client_env: dict[str, str]) -> None:
    """Promises 004-13, 004-14, 004-15, 004-16."""
    program = Path(__file__).parent.parent / "clients" / "programs" / "mlserver_streams.py"
    command = [client_python("mlserver"), program, mlserver.inference, mlserver.http]
    done = subprocess.run(command, env=client_env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.stdout == "mlserver streams ok\n", done.stderr


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"implementation": "a.B", "parameters": {"environment_tarball": "x.tgz"}}, "environment_tarball"),
        ({"implementation": "a.B", "parallel_workers": 1025}, "parallel_workers is 1025, and a model has at most 1024"),
        ({"implementation": "a.B", "inputs": [{"name": "x", "datatype": "WORD"}]}, "WORD"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(mlserver: Any, settings: Any, reason: str) -> None:
    folder = mlserver.store / "bad"
    folder.mkdir(exist_ok=True)
    (folder / "model-settings.json").write_text(json.dumps(settings))
    with pytest.raises(grpc.RpcError) as caught:
        mlserver.register("bad")
    assert reason in caught.value.details()
