"""`ts.testing`: a test of a handler sees the same as clients of a server."""

from __future__ import annotations

import gc
import json
import os
import py_compile
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ts.runtime.process import modules_in
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


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ("refused", 404, "NOT_FOUND", "no such class"),
        ("broken", 503, "INTERNAL", "Prediction failed: ValueError: too dark (mine.py, line "),
        ("short", 503, "INTERNAL", "the handler's result has 0 elements for 1 request"),
        ("exit", 500, "INTERNAL", "The worker ended before it had answered"),
    ],
)
def test_failures_have_the_statuses_that_clients_see(
    load_model: Load, handler: Path, body: str, status: int, code: str, words: str
) -> None:
    model = load_model(handler)
    with pytest.raises(RequestFailed) as failure:
        model.predict(body)
    assert (failure.value.status, failure.value.grpc_code) == (status, code)
    assert words in failure.value.message
    assert ("too dark" in failure.value.traceback) == (body == "broken")


def test_a_worker_that_has_ended_answers_no_more(load_model: Load, handler: Path) -> None:
    model = load_model(handler)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="The worker ended before"):
            model.predict("exit")


def test_callers_see_no_exception_where_the_server_explains_none(load_model: Load, handler: Path) -> None:
    with pytest.raises(RequestFailed) as failure:
        load_model(handler, explain=False).predict(Request("broken", request_id="r7"))
    assert failure.value.message == "Prediction failed (request ID r7: the model's log says why)"


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


def test_the_process_is_as_before_when_the_model_has_gone(tmp_path: Path, handler: Path) -> None:
    before = os.getcwd(), list(sys.path), os.environ.get("PYTHONPATH")
    with ServedModel(handler) as model:
        assert os.getcwd() == str(tmp_path)
        assert model.module.__name__ == "mine"
    assert "mine" not in sys.modules
    model.close()
    assert (os.getcwd(), sys.path, os.environ.get("PYTHONPATH")) == before


def test_a_handler_that_was_edited_is_imported_anew(load_model: Load, tmp_path: Path) -> None:
    for text in ("one", "three"):  # of another length: Python takes a file of the same second and size for unchanged
        source = f"def handle(data, context):\n    return None if data is None else ['{text}']\n"
        assert load_model(written(tmp_path, source)).predict("x").text == text


def test_a_function_of_a_handlers_module_can_be_replaced(
    load_model: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def label():\n    return 'real'\n\ndef handle(data, context):\n    return data and [label()]\n"
    model = load_model(written(tmp_path, source))
    monkeypatch.setattr(model.module, "label", lambda: "stand-in")
    assert model.predict("x").text == "stand-in"


def test_a_file_saved_again_in_the_same_second_is_the_one_that_is_asked(tmp_path: Path) -> None:
    """Bytecode of the file before it would be taken for its own, which has the same size."""
    (tmp_path / "mine.py").write_text("from parts import ANSWER\n\ndef handle(data, context):\n    return [ANSWER]\n")
    parts, hooks = tmp_path / "parts.py", list(sys.path_hooks)
    for answer in (1, 2):
        parts.write_text(f"ANSWER = {answer}\n")
        os.utime(parts, (1_700_000_000, 1_700_000_000))
        with ServedModel(tmp_path / "mine.py") as model:
            assert model.predict("").text == str(answer)
        py_compile.compile(str(parts))  # as another program's import
    assert sys.path_hooks == hooks


def test_what_the_process_has_frozen_stays_so_and_nothing_else_is(tmp_path: Path) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with ServedModel(written(tmp_path, "def handle(data, context):\n    return data and ['ok']\n")) as model:
        assert model.predict("x").text == "ok"
        assert gc.get_freeze_count() <= before
    assert before // 2 < gc.get_freeze_count() <= before, "some of it may have ended"


def test_modules_in_a_folder_are_found_wherever_links_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, elsewhere, linked = tmp_path / "model", tmp_path / "elsewhere", tmp_path / "linked"
    for folder in (model, elsewhere):
        folder.mkdir()
        (folder / "file.py").touch()
    linked.symlink_to(model)
    (model / "leads_out.py").symlink_to(elsewhere / "file.py")
    (elsewhere / "leads_in.py").symlink_to(model / "file.py")
    beside = tmp_path / "model_2"
    files = {
        "found_directly": model / "file.py",
        "found_in_linked": linked / "file.py",
        "found_by_link": elsewhere / "leads_in.py",
        "found_deep": model / "deep" / ".." / "file.py",
        "leads_out": model / "leads_out.py",
        "elsewhere": elsewhere / "file.py",
        "beside": beside / "file.py",
    }
    for name, file in files.items():
        module = ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    for folder in (model, linked):
        assert {*modules_in(str(folder))} == {name for name in files if name.startswith("found")}
