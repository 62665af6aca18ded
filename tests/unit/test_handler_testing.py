"""`ts.testing`: a test of a handler sees the same as clients of a server."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ts.testing import Answer, NotLoaded, Request, RequestFailed, ServedModel
from ts.testing.fixtures import load_model as load_model

HANDLER = """
import time
from ts.utils.util import PredictionException

class Handler:
    def initialize(self, context):
        self.word = context.model_yaml_config.get("word", "none")
        self.batches = []

    def handle(self, data, context):
        self.batches.append(len(data))
        rows = [row.get("body", row.get("data")) for row in data]
        if context.get_request_header(0, "describe"):
            return [{"word": self.word, "batches": self.batches}]
        if rows[0] == "short":
            return []
        if rows[0] == "refused":
            raise PredictionException("no such class", 404)
        if rows[0] == "broken":
            raise ValueError("too dark")
        if rows[0] == "exit":
            raise SystemExit(3)
        if rows[0] == "teapot":
            context.set_response_status(418, "short and stout", 0)
            context.set_response_header(0, "x-kind", "pot")
        return [ValueError("this one") if row == "one" else row for row in rows]
"""
GENERATOR = """
ENDED = []

def handle(data, context):
    try:
        for number in range(int(data[0]["body"])):
            yield [f"{number} " * (1000 if number > 99 else 1)]
    finally:
        ENDED.append(context.cancelled)
"""
SENDS = """
from ts.handler_utils.utils import send_intermediate_predict_response as send
def handle(data, context):
    for piece in "ab":
        if data is not None:
            send([piece], context.request_ids, "", 200, context)
    return ["c"]
"""
ASYNC = """
import asyncio

async def handle(data, context):
    try:
        await asyncio.sleep(float(data[0]["body"]))
    except asyncio.CancelledError:
        print("handler cancelled")
        raise
    return [context.get_request_id(idx) for idx in range(len(data))]
"""
Load = Callable[..., ServedModel]


@pytest.fixture
def handler(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(HANDLER)
    return tmp_path / "mine.py"


def written(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "streaming.py"
    path.write_text(source)
    return path


def test_requests_reach_the_handler_as_over_http_and_grpc(load_model: Load, handler: Path) -> None:
    model = load_model(handler)
    assert (model.name, model.kind) == ("mine", "blocking")
    assert model.predict({"a": [1]}).json() == {"a": [1]}
    assert model.predict("text").text == "text"
    assert model.predict(b"\xff").data == b"\xff"
    assert model.predict(b'{"b": 1}', content_type="application/json").json() == {"b": 1}
    assert model.predict(inputs={"data": b"named"}).text == "named"
    assert (model.predict("x").status, model.predict("x").grpc_code) == (200, "OK")


def test_statuses_and_headers_of_the_handler_are_in_the_answer(load_model: Load, handler: Path) -> None:
    answer = load_model(handler).predict("teapot")
    assert (answer.status, answer.phrase, answer.headers) == (418, "short and stout", {"x-kind": "pot"})
    assert answer.grpc_code == "FAILED_PRECONDITION"


def test_a_worker_that_has_ended_answers_no_more(load_model: Load, handler: Path) -> None:
    model = load_model(handler)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="The worker ended before"):
            model.predict("exit")


def test_a_batch_comes_to_the_handler_as_one_call(load_model: Load, handler: Path) -> None:
    model = load_model(handler, config={"word": "w", "batchSize": 4})
    first, second, third = model.batch(["a", Request("one", headers={"x": "y"}), {"c": 3}])
    assert isinstance(first, Answer) and isinstance(third, Answer)
    assert (first.text, third.json()) == ("a", {"c": 3})
    assert isinstance(second, RequestFailed) and "ValueError: this one" in second.message
    assert model.describe().json() == {"word": "w", "batches": [3, 1]}


def test_streams_are_read_piece_by_piece_and_cancelled(load_model: Load, tmp_path: Path) -> None:
    model = load_model(written(tmp_path, GENERATOR))
    assert model.kind == "generator"
    assert list(model.stream("3")) == [b"0 ", b"1 ", b"2 "]
    assert model.predict("2").pieces == (b"0 ", b"1 ")
    ended = model.module.ENDED
    with model.stream("1000000") as stream:
        assert [next(stream) for _ in range(2)] == [b"0 ", b"1 "]
        stream.cancel()
    assert stream.cancelled
    assert ended == [False, False, True]
    with pytest.raises(RequestFailed, match="HTTP 499, gRPC CANCELLED"):
        next(stream)


def test_pieces_that_come_together_are_read_one_by_one(load_model: Load, tmp_path: Path) -> None:
    model = load_model(written(tmp_path, SENDS))
    for _ in range(50):
        assert model.predict("x").pieces == (b"a", b"b", b"c")


def test_a_stream_that_is_left_open_ends_with_the_model(load_model: Load, tmp_path: Path) -> None:
    with ServedModel(written(tmp_path, GENERATOR)) as model:
        next(model.stream("1000000"))
        ended = model.module.ENDED
    assert ended == [True]


def test_async_handlers_serve_requests_side_by_side_and_learn_of_cancels(
    load_model: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(written(tmp_path, ASYNC))
    slow, quick = model.stream("60"), model.stream(Request("0", request_id="q"))
    assert quick.answer().text == "q"
    slow.cancel()
    assert slow.cancelled and "handler cancelled" in capsys.readouterr().out


def test_a_request_whose_time_is_up_does_not_reach_the_handler(load_model: Load, handler: Path) -> None:
    with pytest.raises(RequestFailed, match="HTTP 504, gRPC DEADLINE_EXCEEDED: Deadline exceeded before the request"):
        load_model(handler).predict("late", timeout_s=0.0)


def test_a_handler_that_takes_too_long_ends_the_wait_of_the_test(load_model: Load, tmp_path: Path) -> None:
    with load_model(written(tmp_path, ASYNC)).stream("3600") as stream:
        usual_s, stream.limit_s = stream.limit_s, 0.05
        with pytest.raises(TimeoutError, match=r"the handler gave nothing for 0\.05 s"):
            next(stream)
        stream.limit_s = usual_s


@pytest.mark.parametrize("packed", [False, True])
def test_archives_and_folders_have_their_manifest_and_configuration(
    load_model: Load, tmp_path: Path, handler: Path, packed: bool
) -> None:
    folder = tmp_path / "model"
    (folder / "MAR-INF").mkdir(parents=True)
    handler.rename(folder / "mine.py")
    (folder / "model-config.yaml").write_text("word: packed\nbatchSize: 2\n")
    model = {"modelName": "named", "handler": "mine.py", "configFile": "model-config.yaml", "modelVersion": "2.0"}
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    source = folder
    if packed:
        source = tmp_path / "named.mar"
        with zipfile.ZipFile(source, "w") as archive:
            for file in (one for one in folder.rglob("*") if one.is_file()):
                archive.write(file, file.relative_to(folder))
    served = load_model(source)
    assert (served.name, served.describe().json()["word"]) == ("named", "packed")
    assert load_model(source, config={"word": "mine"}).describe().json()["word"] == "mine"


def test_a_source_of_another_kind_is_refused(load_model: Load, tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    with pytest.raises(NotLoaded, match="neither a handler's file"):
        load_model(tmp_path / "x.txt")
