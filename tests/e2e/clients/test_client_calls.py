"""The blocking client against a running server: every call, every datatype, streams, cancelling, many at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from grpc import StatusCode

from support import GUARD_S
from torchrelay_client import Cancelled, Client, DeadlineExceeded, InvalidArgument, NotFound, Request, Typed

NUMBERS = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]


@pytest.fixture
def client(served: Any) -> Iterator[Client]:
    with Client(served.inference, timeout_s=GUARD_S) as opened:
        yield opened


def test_health_and_metadata(client: Client) -> None:
    assert client.live() and client.ready() and client.model_ready("sum") and not client.model_ready("nobody")
    assert client.server_metadata().name == "torchrelay"
    found = client.model_metadata("sum")
    assert (found.versions, [one.name for one in found.inputs]) == (("1.0",), ["a", "b"])
    assert (found.outputs[0].datatype, found.outputs[0].shape) == ("FP32", (-1,))
    with pytest.raises(NotFound, match="nobody"):
        client.model_metadata("nobody")


def test_infer(client: Client) -> None:
    answer = client.infer("sum", {"a": np.array([1, 2], "f4"), "b": Typed("FP32", [3, 4])}, id="id-1")
    assert (answer["sum"].tolist(), answer.id, answer.model_name, answer.model_version) == (
        [4.0, 6.0],
        "id-1",
        "sum",
        "1.0",
    )
    assert client.infer("upper", {"text": "grün"}).text() == "GRÜN"


@pytest.mark.parametrize("datatype", [*NUMBERS, "BF16", "BYTES"])
def test_every_datatype(client: Client, datatype: str) -> None:
    value: list[list[Any]] = [["a", "grün"], ["", "d"]] if datatype == "BYTES" else [[0, 1], [1, 0]]
    array = client.infer("same", {"x": Typed(datatype, value)})["x"]
    wanted = [[text.encode() for text in row] for row in value] if datatype == "BYTES" else value
    assert (array.shape, array.tolist()) == ((2, 2), wanted)


def test_refusals(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="'b'") as caught:
        client.infer("sum", {"a": np.zeros(1, "f4")})
    assert (caught.value.code, caught.value.attempts) == (StatusCode.INVALID_ARGUMENT, 1)
    with pytest.raises(NotFound, match="nobody"):
        client.infer("nobody", {"x": "text"})
    with pytest.raises(NotFound):
        client.predict("upper", "text", version="9")


def test_predictions(client: Client) -> None:
    assert client.predict("upper", "text") == b"TEXT"
    assert client.predict("upper", {"data": b"bytes"}, version="1.0") == b"BYTES"
    assert list(client.predict_stream("words", "one two"))[:2] == [b"one ", b"two "]


def test_stream(client: Client) -> None:
    with client.stream("words", {"text": "one two three"}, id="s") as answers:
        found = [(answer.text(), answer.id) for answer in answers if answer.outputs]
    assert found == [("one ", "s"), ("two ", "s"), ("three ", "s")]
    with pytest.raises(NotFound, match="nobody"):
        next(client.stream("nobody", {"text": "one"}))


def test_conversation_goes_on_after_an_error(client: Client) -> None:
    requests = (
        Request(model, {"text": f"text {model}"}, id=str(at)) for at, model in enumerate(["upper", "x", "upper"])
    )
    answers = list(client.converse(requests, timeout_s=GUARD_S))
    texts = {answer.id: answer.text() for answer in answers if answer.outputs}
    assert texts == {"0": "TEXT UPPER", "2": "TEXT UPPER"}
    assert ["x" in answer.error for answer in answers if answer.error] == [True]


def test_a_slow_stream_is_read_as_it_is_made_and_can_be_left(served: Any, client: Client) -> None:
    with client.stream("endless", {"text": "go"}) as answers:
        assert [next(answers).text() for _ in range(3)] == ["tick "] * 3
    assert list(answers) == []
    served.wait_for_log("endless was left")


def test_cancel_from_another_thread(client: Client) -> None:
    answers = client.stream("endless", {"text": "go"})
    next(answers)
    with ThreadPoolExecutor(1) as other:
        reading = other.submit(list, answers)
        answers.cancel()
        try:
            reading.result(GUARD_S)
        except Cancelled:
            pass


def test_deadlines(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        list(client.stream("endless", {"text": "go"}, timeout_s=0.3))


def test_closing_ends_what_is_under_way(served: Any) -> None:
    client = Client(served.inference)
    answers = client.stream("endless", {"text": "go"})
    next(answers)
    client.close()
    with pytest.raises(Cancelled):
        list(answers)
    with pytest.raises(Cancelled, match="the client is closed"):
        client.live()


def test_ten_channels_have_ten_connections_and_take_turns(served: Any) -> None:
    """Promises 001-23."""
    port = served.port("grpc_inference")
    with Client(served.inference, channels=10, timeout_s=GUARD_S) as client:
        assert all(client.predict("upper", f"n{at}") == f"N{at}".encode() for at in range(1000))
        found = [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
        assert len([one for one in found if one.status == psutil.CONN_ESTABLISHED]) >= 10


def test_thirty_two_threads(served: Any, client: Client) -> None:
    together = threading.Barrier(32)

    def call(at: int) -> bool:
        together.wait(GUARD_S)
        text = client.infer("upper", {"text": f"n{at}"}).text()
        pieces = [answer.text() for answer in client.stream("words", {"text": f"a{at} b{at}"}) if answer.outputs]
        return (text, pieces) == (f"N{at}", [f"a{at} ", f"b{at} "])

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(call, range(32)))


def test_the_repository(client: Client) -> None:
    assert {"sum", "same"} <= {one.name for one in client.models() if one.state == "READY"}
