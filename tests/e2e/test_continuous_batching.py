"""Continuous batching with real workers: who is in which step, who gets which tokens, and how requests leave."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

HANDLERS = Path(__file__).parent.parent / "handlers"
FOREVER = 1_000_000

#: The criterion is a header of each answer: `ts_stream_next`. A body is the number of tokens.
BY_HEADER = """
def handle(data, context):
    if data is None:
        context.cache = {}
        return None
    answers = []
    for idx, row in enumerate(data):
        request = context.get_request_id(idx)
        if "body" in row:
            context.cache[request] = int(bytes(row["body"]))
        context.cache[request] -= 1
        context.set_response_header(idx, "ts_stream_next", "true" if context.cache[request] > 0 else "false")
        context.set_response_header(idx, "x-kind", "counted")
        answers.append(f"{context.cache[request]} ")
    return answers
"""

#: Sequences whose requests join the running batch: "-" stops the sequence's streams, "0" ends the sequence.
SEQUENCES = """
def handle(data, context):
    if data is None:
        context.cache, context.stopped = {}, set()
        return None
    answers, context.stopping_criteria = [], []
    for idx, row in enumerate(data):
        request, sequence = context.get_request_id(idx), context.get_sequence_id(idx)
        if context.get_request_header(idx, context.header_key_sequence_start):
            context.stopped.discard(sequence)
        text = bytes(row["body"]).decode() if "body" in row else None
        if text == "-":
            context.stopped.add(sequence)
        if text == "0":
            context.set_response_header(idx, context.header_key_sequence_end, sequence)
        if text == "stream":
            context.cache[request] = sequence
        streams = request in context.cache
        context.stopping_criteria.append(lambda _, streams=streams, sequence=sequence: (
            sequence in context.stopped if streams else None
        ))
        answers.append(f"{sequence} ")
    return answers
"""

DOCUMENTED = re.findall(
    r"```python\n(class Handler:.*?)```",
    (Path(__file__).parents[2] / "docs" / "batching.md").read_text(),
    re.DOTALL,
)[0]

MODELS: dict[str, tuple[Path | str, str]] = {
    "tokens": (HANDLERS / "token_steps.py", "continuousBatching: true\nbatchSize: 8\nminWorkers: 1\n"),
    "pair": (HANDLERS / "token_steps.py", "continuousBatching: true\nbatchSize: 2\nminWorkers: 1\n"),
    "spread": (HANDLERS / "token_steps.py", "continuousBatching: true\nbatchSize: 8\nminWorkers: 2\n"),
    "documented": (DOCUMENTED, "continuousBatching: true\nbatchSize: 4\n"),
    "header": (BY_HEADER, "continuousBatching: true\nbatchSize: 4\n"),
    "talks": (
        SEQUENCES,
        "continuousBatching: true\nsequenceBatching: true\nbatchSize: 4\nmaxNumSequence: 2\n"
        "sequenceMaxIdleMSec: 60000\nmaxSequenceJobQueueSize: 8\n",
    ),
}


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    with server_of(MODELS) as server:
        yield server


@pytest.fixture
def stub(served: Any) -> Iterator[InferenceAPIsServiceStub]:
    with grpc.insecure_channel(served.inference) as channel:
        yield InferenceAPIsServiceStub(channel)


def ask(model: str, text: str) -> PredictionsRequest:
    return PredictionsRequest(model_name=model, input={"data": text.encode()})


class Stream:
    """A running StreamPredictions call, read token by token."""

    def __init__(self, stub: InferenceAPIsServiceStub, model: str, name: str, count: int, **more: Any) -> None:
        self.call = stub.StreamPredictions(ask(model, f"{name} {count}"), timeout=GUARD_S, **more)

    def next(self) -> tuple[str, int, int]:
        """Name, number and size of the step of the next token."""
        return parsed(next(self.call).prediction)[0]

    def rest(self) -> list[tuple[str, int, int]]:
        return [token for answer in self.call for token in parsed(answer.prediction)]

    def until_size(self, size: int) -> None:
        while self.next()[2] != size:
            pass


def parsed(text: bytes) -> list[tuple[str, int, int]]:
    return [(name, int(number), int(size)) for name, number, size in re.findall(r"(\S+):(\d+)/(\d+) ", text.decode())]


def test_a_latecomer_joins_the_running_batch_and_leaves_before_it(stub: InferenceAPIsServiceStub) -> None:
    long = Stream(stub, "tokens", "long", FOREVER)
    assert long.next() == ("long", 1, 1)
    late = Stream(stub, "tokens", "late", 5).rest()
    assert [number for _, number, _ in late] == [1, 2, 3, 4, 5]
    assert {size for _, _, size in late} == {2}
    long.until_size(2)
    long.until_size(1)  # the latecomer has gone, the long one goes on
    long.call.cancel()


def test_a_criterion_that_raises_ends_its_own_stream_alone(stub: InferenceAPIsServiceStub) -> None:
    first = stub.StreamPredictions(ask("tokens", "first 400 interrupt"), timeout=GUARD_S)
    next(first)
    behind = Stream(stub, "tokens", "behind", FOREVER)
    assert behind.next()[2] == 2
    with pytest.raises(grpc.RpcError) as failed:
        list(first)
    assert "KeyboardInterrupt" in failed.value.details()
    behind.until_size(1)
    behind.call.cancel()


def test_64_clients_get_their_own_tokens_only_and_batches_are_never_too_large(stub: InferenceAPIsServiceStub) -> None:
    def run(number: int) -> list[tuple[str, int, int]]:
        return Stream(stub, "tokens", f"c{number}", 10 + number % 7).rest()

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(run, range(64)))
    for number, tokens in enumerate(answers):
        assert [(name, step) for name, step, _ in tokens] == [(f"c{number}", n + 1) for n in range(10 + number % 7)]
    sizes = {size for tokens in answers for _, _, size in tokens}
    assert max(sizes) == 8


def test_a_full_batch_makes_others_wait_for_a_place(stub: InferenceAPIsServiceStub) -> None:
    first, second = Stream(stub, "pair", "first", FOREVER), Stream(stub, "pair", "second", FOREVER)
    first.next(), second.next()
    waiting = Stream(stub, "pair", "waiting", 3)
    for _ in range(50):
        assert first.next()[2] <= 2
    second.call.cancel()
    assert [(name, number) for name, number, _ in waiting.rest()] == [("waiting", 1), ("waiting", 2), ("waiting", 3)]
    first.call.cancel()


def test_a_client_that_leaves_leaves_the_batch_over_grpc_and_http(served: Any, stub: InferenceAPIsServiceStub) -> None:
    stays = Stream(stub, "tokens", "stays", FOREVER)
    goes = Stream(stub, "tokens", "goes", FOREVER)
    goes.next()
    stays.until_size(2)
    goes.call.cancel()
    stays.until_size(1)
    with (
        httpx.Client(base_url=served.http, timeout=GUARD_S) as client,
        client.stream("POST", "/predictions/tokens", content=f"web {FOREVER}") as response,
    ):
        assert response.headers["ts_stream_next"] == "true"
        next(response.iter_raw())
        stays.until_size(2)
    stays.until_size(1)
    stays.call.cancel()


def test_over_http_the_tokens_are_chunks(served: Any) -> None:
    with httpx.stream("POST", f"{served.http}/predictions/tokens", content="web 6", timeout=GUARD_S) as response:
        assert response.status_code == 200
        assert response.headers["transfer-encoding"] == "chunked"
        text = b"".join(response.iter_raw())
    assert [number for _, number, _ in parsed(text)] == [1, 2, 3, 4, 5, 6]


def test_unary_calls_get_all_tokens_joined(stub: InferenceAPIsServiceStub) -> None:
    answer = stub.Predictions(ask("tokens", "one 4"), timeout=GUARD_S).prediction
    assert [number for _, number, _ in parsed(answer)] == [1, 2, 3, 4]
    once = stub.Predictions(ask("tokens", "o 9 once"), timeout=GUARD_S).prediction
    assert [number for _, number, _ in parsed(once)] == [1]


def test_two_clients_with_one_request_id_do_not_mix(stub: InferenceAPIsServiceStub) -> None:
    same = [("x-request-id", "the-same")]
    first = Stream(stub, "tokens", "first", FOREVER, metadata=same)
    first.next()
    second = Stream(stub, "tokens", "second", 4, metadata=same).rest()
    assert [(name, number) for name, number, _ in second] == [("second", n) for n in (1, 2, 3, 4)]
    number = first.next()[1]
    assert first.next()[:2] == ("first", number + 1)
    first.call.cancel()


def test_an_answers_header_says_whether_it_goes_on(served: Any) -> None:
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        answer = client.post("/predictions/header", content="5")
    assert (answer.text, answer.headers["x-kind"]) == ("4 3 2 1 0 ", "counted")
    assert answer.headers.get_list("ts_stream_next") in ([], ["true"])


def test_the_handler_of_the_manual(served: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        url = f"{served.http}/predictions/documented"
        answers = list(pool.map(lambda n: httpx.post(url, content=str(n), timeout=GUARD_S).text, range(1, 9)))
    assert answers == ["".join(f"{left} left " for left in reversed(range(count))) for count in range(1, 9)]


@pytest.mark.parametrize(
    ("model", "end", "code", "said"),
    [
        ("tokens", "raise", grpc.StatusCode.INTERNAL, "Prediction failed: "),
        ("pair", "exit", grpc.StatusCode.UNAVAILABLE, "Worker died."),
    ],
)
def test_what_ends_a_step_fails_its_requests_and_the_next_are_served(
    stub: InferenceAPIsServiceStub, model: str, end: str, code: grpc.StatusCode, said: str
) -> None:
    """After an exception by the same worker, after a worker's death by another one."""
    neighbour = Stream(stub, model, "neighbour", FOREVER)
    neighbour.next()
    with pytest.raises(grpc.RpcError) as failed:
        stub.Predictions(ask(model, f"bad 9 {end}"), timeout=GUARD_S)
    with pytest.raises(grpc.RpcError) as also:
        neighbour.rest()
    for error in (failed, also):
        assert error.value.code() is code
        assert error.value.details().startswith(said)
    assert len(parsed(stub.Predictions(ask(model, "next 3"), timeout=GUARD_S).prediction)) == 3


def test_several_workers_fill_their_batches_evenly(stub: InferenceAPIsServiceStub) -> None:
    streams = [Stream(stub, "spread", f"s{number}", FOREVER) for number in range(8)]
    for stream in streams:
        stream.until_size(4)
    for stream in streams:
        stream.call.cancel()


def test_describing_asks_the_handler_apart(served: Any, stub: InferenceAPIsServiceStub) -> None:
    running = Stream(stub, "tokens", "running", FOREVER)
    running.next()
    described = httpx.get(f"{served.http_management}/models/tokens?customized=true", timeout=GUARD_S).json()
    assert described[0]["customizedMetadata"]["kept"] >= 1
    running.next()
    running.call.cancel()


def test_a_handler_that_yields_cannot_have_it(served: Any, write_to: Callable[..., str]) -> None:
    source = "def handle(data, context):\n    yield ['x']\n"
    write_to(served.store, "yields", source, config="continuousBatching: true\n")
    with pytest.raises(grpc.RpcError, match="continuousBatching calls handle for every step"):
        served.register("yields")


def test_requests_of_a_sequence_join_its_running_stream_and_the_handler_ends_it(served: Any) -> None:
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        for _ in range(3):  # more than maxNumSequence in all: ending them makes room
            begun = client.post("/predictions/talks", content="hello")
            headers = {"ts_request_sequence_id": begun.headers["ts_request_sequence_id"]}
            with client.stream("POST", "/predictions/talks", content="stream", headers=headers) as stream:
                pieces = stream.iter_raw()
                assert next(pieces).startswith(headers["ts_request_sequence_id"].encode())
                stopped = client.post("/predictions/talks", content="-", headers=headers)
                assert stopped.status_code == 200
                for _ in pieces:
                    pass
            assert client.post("/predictions/talks", content="0", headers=headers).status_code == 200
