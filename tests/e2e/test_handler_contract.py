"""The inputs of handlers and the use of their results, over HTTP and gRPC: each kind of body, value and answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch

from e2e.servers import write_model
from support import GUARD_S, Reply, http_call

TELLING = '''
"""Tells what it got."""


def told(value):
    raw = isinstance(value, (bytes, bytearray))
    return [type(value).__name__, value.decode("latin-1") if raw else value]


def handle(data, context):
    if data is None:
        return None
    rows = [{name: told(value) for name, value in row.items()} for row in data]
    return [{"row": row, "headers": dict(context.get_all_request_header(idx))} for idx, row in enumerate(rows)]
'''
READING = """
def handle(data, context):
    return None if data is None else [{"total": sum(row["body"]["numbers"])} for row in data]
"""
PARSING = """
import json

def handle(data, context):
    return None if data is None else [json.loads(bytes(row["body"]).rstrip(b",")) for row in data]
"""
GIVING = '''
"""Gives what the body names."""

import numpy
import torch

from ts.utils.util import PredictionException

VALUES = {
    "str": "h\\u00e9llo", "bytes": b"\\x00\\xff", "bytearray": bytearray(b"ab"), "memoryview": memoryview(b"cd"),
    "tensor": torch.tensor([[1.5, 2.0]]), "int": 3, "float": 0.5, "none": None, "bool": True, "list": [1, "\\u00e9"],
    "dict": {"a": [1]}, "nan": float("nan"), "tuple": (1, 2), "empty": "", "numpy": numpy.zeros(2), "set": {1},
    "error": PredictionException("not this one", 422), "value error": ValueError("inside"), "memory": MemoryError(),
}


def handle(data, context):
    if data is None:
        return None
    names = [bytes(row.get("body") or row.get("data")).decode() for row in data]
    if names == ["no list"]:
        return "text"
    if names == ["wrong length"]:
        return [1, 2]
    if names == ["raise"]:
        raise PredictionException("all of it", 418)
    if names == ["cuda"]:
        raise RuntimeError("CUDA error: out of memory")
    for idx, name in enumerate(names):
        if name.startswith("status"):
            code = int(name.split()[1])
            context.set_response_status(code, "As Asked", idx)
            assert context.get_response_status(idx) == (code, "As Asked")
        if name.startswith("headers"):
            context.set_response_content_type(idx, "text/x-own")
            context.set_response_header(idx, "X-Own", name)
            assert context.get_response_headers(idx)["X-Own"] == name
    return [VALUES.get(name, name) for name in names]
'''
BAG = '''
"""One answer per input, whatever an envelope made of it."""

from ts.torch_handler.base_handler import BaseHandler


class Doubler(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.batches = []

    def preprocess(self, data):
        self.batches.append(len(data))
        return [row["data"] if isinstance(row, dict) else row for row in data]

    def inference(self, data):
        return [one * 2 if isinstance(one, (int, float, str, bytes)) else [2 * part for part in one] for one in data]

    def postprocess(self, data):
        return [one.decode() if isinstance(one, bytes) else one for one in data]

    def get_insights(self, ready, inputs, target):
        return [[one, target] for one in ready]
'''


def call(server: Any, target: str, body: bytes = b"", **headers: str) -> Reply:
    """A POST to the inference API; `content_type="…"` is the header Content-Type."""
    return http_call(server.port("http_inference"), "POST", target, body, headers)


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def opened(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """`opened(envelope="json")`: a server with these settings and the models of this file; one for each setting."""
    servers: dict[str, Any] = {}

    def start(**settings: object) -> Any:
        key = repr(settings)
        if key not in servers:
            store = tmp_path_factory.mktemp("contract") / "store"
            write_model(store, "telling", TELLING)
            write_model(store, "giving", GIVING)
            write_model(store, "giving3", GIVING, config=f"batchSize: 3\nmaxBatchDelay: {GUARD_S * 1000}\n")
            write_model(store, "reading", READING)
            write_model(store, "reading2", READING, config=f"batchSize: 2\nmaxBatchDelay: {GUARD_S * 1000}\n")
            write_model(store, "parsing", PARSING)
            write_model(store, "doubler", BAG)
            write_model(store, "doubler2", BAG, config=f"batchSize: 2\nmaxBatchDelay: {GUARD_S * 1000}\n")
            wanted = ("doubler", "doubler2") if "service_envelope" in settings else ("telling",)
            needs_torch = wanted != ("telling",) or not settings
            servers[key] = serving(
                tmp_path_factory.mktemp("server"),
                store,
                {"preload_torch": str(needs_torch).lower(), "lone_requests_wait": "true"} | settings,
                ["--ncs"],
            )
            servers[key].wait_started()
            for model in wanted if settings else (*wanted, "giving", "giving3", "reading", "reading2", "parsing"):
                servers[key].register(model)
        return servers[key]

    yield start
    for server in servers.values():
        server.terminate()


# --- what a handler gets

ROWS = [
    ("application/json", b'{"a": [1]}', ["dict", {"a": [1]}]),
    ("application/json; charset=utf-8", b"[1, 2]", ["list", [1, 2]]),
    ("application/json", b'"text"', ["str", "text"]),
    ("application/json", b"null", ["NoneType", None]),
    ("application/json", b"{broken", ["bytearray", "{broken"]),
    ("application/json", b"\xff", ["bytearray", "\xff"]),
    ("Application/JSON", b"{}", ["bytearray", "{}"]),
    ("text/plain", "h\u00e9".encode(), ["str", "h\u00e9"]),
    ("text/csv;header=present", b"a,b", ["str", "a,b"]),
    ("text/plain", b"\xff\xfe", ["bytearray", "\xff\xfe"]),
    ("application/octet-stream", b"\x00\xff", ["bytearray", "\x00\xff"]),
    ("image/png", b"png", ["bytearray", "png"]),
    ("", b"bytes", ["bytearray", "bytes"]),
    ("", b"", ["bytearray", ""]),
]


@pytest.mark.parametrize(("content_type", "body", "value"), ROWS)
def test_a_body_by_its_type(opened: Open, content_type: str, body: bytes, value: list[Any]) -> None:
    headers = {"content_type": content_type} if content_type else {}
    told = call(opened(), "/predictions/telling", body, **headers).json()
    assert told["row"] == {"body": value}
    assert told["headers"]["body"] == {"content-type": content_type}


@pytest.mark.parametrize(("content_type", "body", "value"), [row for row in ROWS if row[0]])
def test_nothing_is_decoded_when_it_is_turned_off(
    opened: Open, content_type: str, body: bytes, value: list[Any]
) -> None:
    server = opened(decode_input_request="false")
    told = call(server, "/predictions/telling", body, content_type=content_type).json()
    assert told["row"] == {"body": ["bytearray", body.decode("latin-1")]}


def test_the_fields_of_a_form(opened: Open) -> None:
    """As `curl -d` sends them: also a JSON text becomes a field."""
    form = "application/x-www-form-urlencoded"
    told = call(opened(), "/predictions/telling", b"a=1&b=x%20y+z&a=2", content_type=form).json()
    assert told["row"] == {"a": ["bytearray", "2"], "b": ["bytearray", "x y z"]}
    told = call(opened(), "/predictions/telling", b'{"data": 1}', content_type=form).json()
    assert told["row"] == {'{"data": 1}': ["bytearray", ""]}
    told = call(opened(), "/predictions/telling", "data=é%C3%A9".encode(), content_type=form).json()
    assert told["row"] == {"data": ["bytearray", "éé".encode().decode("latin-1")]}


def test_the_parts_of_a_multipart_form(opened: Open) -> None:
    """Fields are never decoded, files by their own type; of parts with one name the last stays."""
    parts = [
        ('name="field"', "application/json", b"{}"),
        ('name="file"; filename="f"', "application/json", b'{"a": 1}'),
        ('name="text"; filename="t.txt"', "text/plain", b"hello"),
        ('name="raw"; filename="r"', "", b"\x01"),
        ('name="twice"', "", b"first"),
        ('name="twice"', "", b"last"),
    ]
    lines = []
    for disposition, kind, body in parts:
        type_line = f"Content-Type: {kind}\r\n" if kind else ""
        lines.append(
            f"--limit\r\nContent-Disposition: form-data; {disposition}\r\n{type_line}\r\n".encode() + body + b"\r\n"
        )
    body = b"".join([*lines, b"--limit--\r\n"])
    told = call(opened(), "/predictions/telling", body, content_type="multipart/form-data; boundary=limit").json()
    assert told["row"] == {
        "field": ["bytearray", "{}"],
        "file": ["dict", {"a": 1}],
        "text": ["str", "hello"],
        "raw": ["bytearray", "\x01"],
        "twice": ["bytearray", "last"],
    }


def test_a_query_gives_more_inputs_on_the_old_paths(opened: Open) -> None:
    for path in ("/models/telling/invoke?k=v&k2=", "/telling/predict?k=v&k2="):
        told = call(opened(), path, b"[1]", content_type="application/json").json()
        assert told["row"] == {"k": ["bytearray", "v"], "k2": ["bytearray", ""], "body": ["list", [1]]}, path
    assert call(opened(), "/predictions/telling?k=v", b"x").json()["row"] == {"body": ["bytearray", "x"]}


def test_headers_and_the_rest_of_the_path(opened: Open) -> None:
    headers = call(opened(), "/predictions/telling/1.0/some/path", b"x", x_own="Value").json()["headers"]
    assert headers["x-own"] == "Value"
    assert (headers["url_path"], headers["explain"]) == ("some/path", "False")
    assert call(opened(), "/explanations/telling", b"x").json()["headers"]["explain"] == "True"


def test_grpc_inputs_are_never_decoded(opened: Open) -> None:
    told = json.loads(opened().predict("telling", b'{"a": 1}'))
    assert told["row"] == {"data": ["bytearray", '{"a": 1}']}
    assert told["headers"]["data"] == {"content-type": ""}


# --- inputs that aren't what their content type says

BROKEN = b'{"numbers":\n [1, 2}'
WHERE = "isn't JSON: Expecting ',' delimiter: line 2 column 7 (char 18)"


@pytest.mark.parametrize("path", ["/predictions/reading", "/v1/models/reading:predict", "/models/reading/invoke"])
def test_broken_json_is_the_clients_fault(opened: Open, path: str) -> None:
    """A handler that takes the parsed value gets bytes, as from TorchServe, and fails at them."""
    for body in (BROKEN, b"\xff", b"[" * 100_000):
        answer = call(opened(), path, body, content_type="application/json")
        assert answer.status == 400, answer.body
        assert "declared as application/json" in answer.json()["message"]
        assert body != BROKEN or WHERE in answer.json()["message"]
    answer = call(opened(), path, b'{"numbers": [1, 2]}', content_type="application/json")
    assert (answer.status, answer.json()) == (200, {"total": 3})
    missing = call(opened(), path, b"{}", content_type="application/json")
    assert missing.status == 503, "JSON without what the handler needs is for the handler to refuse"


def test_a_handler_that_parses_gets_the_bytes(opened: Open) -> None:
    answer = call(opened(), "/predictions/parsing", b'{"a": 1},', content_type="application/json")
    assert (answer.status, answer.json()) == (200, {"a": 1})
    assert call(opened(), "/predictions/parsing", BROKEN, content_type="application/json").status == 503


def test_broken_json_in_a_batch_is_told_to_its_sender(opened: Open) -> None:
    with ThreadPoolExecutor(2) as pool:
        bodies = (BROKEN, b'{"numbers": [1]}')
        first, second = pool.map(
            lambda body: call(opened(), "/predictions/reading2", body, content_type="application/json"), bodies
        )
    assert (first.status, second.status) == (400, 503)
    assert WHERE in first.json()["message"] and "isn't JSON" not in second.json()["message"]


# --- what becomes of what it gives

#: The content type of answers to which the handler gives none.
BYTES = "application/octet-stream"
BODIES = {
    "str": "h\u00e9llo".encode(),
    "bytes": b"\x00\xff",
    "bytearray": b"ab",
    "memoryview": b"cd",
    "int": b"3",
    "float": b"0.5",
    "none": b"null",
    "bool": b"true",
    "list": b'[\n  1,\n  "\\u00e9"\n]',
    "dict": b'{\n  "a": [\n    1\n  ]\n}',
    "tuple": b"[\n  1,\n  2\n]",
    "nan": b"NaN",
    "empty": b"",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_value_becomes_bytes(opened: Open, name: str) -> None:
    answer = call(opened(), "/predictions/giving", name.encode())
    assert (answer.status, answer.body) == (200, BODIES[name])
    assert answer.headers.get("content-type") == (BYTES if answer.body else None)
    assert opened().predict("giving", name.encode()) == BODIES[name]


def test_a_tensor_is_saved(opened: Open) -> None:
    for body in (call(opened(), "/predictions/giving", b"tensor").body, opened().predict("giving", b"tensor")):
        assert torch.load(io.BytesIO(body), weights_only=True).tolist() == [[1.5, 2.0]]


FAILURES = {
    "numpy": (503, "Unsupported model output data type."),
    "set": (503, "Unsupported model output data type."),
    "error": (422, "not this one"),
    "value error": (503, "Prediction failed"),
    "memory": (507, "Out of resources"),
    "no list": (503, "Invalid model predict output"),
    "wrong length": (503, "number of batch response mismatched"),
    "raise": (418, "all of it"),
    "cuda": (507, "Out of resources"),
}
#: What these handlers say themselves; to the others the cause is added.
MEANT = ("error", "raise")
GRPC = {503: "INTERNAL", 422: "FAILED_PRECONDITION", 507: "INTERNAL", 418: "FAILED_PRECONDITION"}


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_is_said(opened: Open, name: str) -> None:
    code, message = FAILURES[name]
    answer = call(opened(), "/predictions/giving", name.encode())
    told = answer.json()["message"]
    assert (answer.status, answer.json()["code"]) == (code, code)
    assert told == message if name in MEANT else told.startswith(f"{message}: ")
    with pytest.raises(grpc.RpcError) as failed:
        opened().predict("giving", name.encode())
    assert (failed.value.code().name, failed.value.details()) == (GRPC[code], told)


def test_each_item_of_a_batch_has_its_own_status_headers_and_error(opened: Open) -> None:
    """Three requests that are handled together."""
    for names in (["str", "status 201", "headers 1"], ["error", "dict", "status 404"], ["headers 2", "numpy", "int"]):
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda name: call(opened(), "/predictions/giving3", name.encode()), names))
        for name, answer in zip(names, answers, strict=True):
            expected = FAILURES.get(name, (int(name.split()[1]) if name.startswith("status") else 200, ""))
            assert answer.status == expected[0], name
            if name not in FAILURES:
                assert answer.body == BODIES.get(name, name.encode())
            own = ("text/x-own", name) if name.startswith("headers") else (BYTES, None)
            if name not in FAILURES:
                assert (answer.headers.get("content-type"), answer.headers.get("x-own")) == own


def test_a_status_that_is_an_error_keeps_the_body(opened: Open) -> None:
    for code in (201, 404, 503):
        answer = call(opened(), "/predictions/giving", f"status {code}".encode())
        assert (answer.status, answer.body) == (code, f"status {code}".encode())
        assert answer.headers.get("connection", "keep-alive") == "keep-alive"
    assert opened().predict("giving", b"status 404") == b"status 404"


# --- envelopes


def both(server: Any, path: str, bodies: list[object]) -> list[Reply]:
    """Two requests that make one batch."""
    with ThreadPoolExecutor(2) as pool:
        texts = [json.dumps(body).encode() for body in bodies]
        return list(pool.map(lambda text: call(server, path, text, content_type="application/json"), texts))


def test_kserve_envelope(opened: Open) -> None:
    server = opened(service_envelope="kserve")
    answers = both(server, "/v1/models/doubler2:predict", [{"instances": [{"data": 5}]}, {"instances": [[1, 2], 3]}])
    assert [answer.json() for answer in answers] == [{"predictions": [10]}, {"predictions": [[2, 4], 6]}]
    body = json.dumps({"instances": [{"data": 5, "target": 1}]}).encode()
    explained = call(server, "/v1/models/doubler:explain", body, content_type="application/json")
    assert explained.json() == {"explanations": [[5, 1]]}
    for path in ("/explanations/doubler", "/v1/models/doubler:explain", "/v2/models/doubler/explain"):
        for text in (b'{"instances": []}', b'{"instances": 1}', b"[1]", b"x", b""):
            answered = call(server, path, text, content_type="application/json")
            assert answered.status in (200, 400, 503), (path, text, answered)
            assert "No worker" not in answered.body.decode(), "an explanation that can't be given holds nothing up"
    assert call(server, "/v1/models/doubler:explain", body, content_type="application/json").status == 200
    wrong, right = both(server, "/v1/models/doubler2:predict", [{"instance": 1}, {"instances": [1]}])
    assert (wrong.status, right.status, right.json()) == (400, 200, {"predictions": [2]})
    assert 'needs a list under "instances"' in wrong.json()["message"]


def test_kservev2_envelope(opened: Open) -> None:
    server = opened(service_envelope="kservev2")
    numbers = {"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    text = {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["ab"]}
    first, second = both(
        server, "/v2/models/doubler2/infer", [{"id": "7", "inputs": [numbers, text]}, {"inputs": [text]}]
    )
    assert first.json() == {
        "id": "7",
        "model_name": "doubler2",
        "model_version": "1.0",
        "outputs": [
            {"name": "x", "datatype": "INT64", "data": [2, 4], "shape": [2]},
            {"name": "t", "datatype": "BYTES", "data": ["abab"], "shape": [1]},
        ],
    }
    assert second.json()["id"] == second.headers["x-request-id"]
    assert second.json()["outputs"] == [{"name": "t", "datatype": "BYTES", "data": ["abab"], "shape": [1]}]
