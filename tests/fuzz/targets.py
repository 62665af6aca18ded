"""The targets of the fuzzer: for each format from outside, a function of bytes and the errors that it may raise.

A target raises only its documented errors. If there is an inverse or a second reader, it compares
the two, and an AssertionError is a finding like any other exception.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import yaml
from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.decoder import Decoder, decode_bytes
from ts.protocol.forms import MalformedForm, check, is_form, parts
from ts.protocol.frames import FrameError, Input, Item, encode_bytes
from ts.protocol.path_template import BadTemplate, PathTemplate
from ts.tensors import v1_form
from ts.tensors.forms import ModelSpec, opened, request_of, row_of
from ts.tensors.types import BadTensor, InferenceResponse
from ts.tensors.v1_form import V1Response
from ts_frontend.config import keys as key_texts
from ts_frontend.config import properties, snapshot
from ts_frontend.config.foreign import mlserver as mlserver_settings
from ts_frontend.config.kinds import ConfigError, is_loopback, parse_address, parse_host, parse_name
from ts_frontend.config.parameters import REGISTER
from ts_frontend.config.table import SETTINGS, ServerConfig
from ts_frontend.errors import InvalidArchive, InvalidArgument, ServeError
from ts_frontend.graphs import tensors as graph_tensors
from ts_frontend.graphs.inference_graph import Condition
from ts_frontend.grpc import protocol as grpc_protocol
from ts_frontend.grpc.call import answering_s, timeout_s
from ts_frontend.http import management
from ts_frontend.http.management import _json_parameters, page_asked
from ts_frontend.http.request import BodyLimits, HttpRequest, Parameters, json_object, query_pairs
from ts_frontend.http.routes import ROUTES
from ts_frontend.http.routing import HTTP_INFERENCE, HTTP_MANAGEMENT, Guard, Hosts, RouteTable, Switch
from ts_frontend.models import settings as model_settings
from ts_frontend.models.archive import ExtractLimits, extract, parse_config
from ts_frontend.models.formats import triton
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.settings import as_json, signature_of
from ts_frontend.models.store import store
from ts_frontend.open_inference import requests
from ts_frontend.open_inference.models import load_parameters, load_parameters_of_json
from ts_frontend.telemetry.logging import formats
from ts_frontend.telemetry.logging.log_config import read_plan, rotation
from ts_frontend.transport.stream import Head, Peer, Stream
from ts_frontend.workflows.specification import parse_spec

#: What frames, messages and archives may come to; inputs of the fuzzer are far smaller.
BYTES_MAX = 1 << 20
NOW = datetime(2024, 2, 29, 23, 59, 59, 999_999)


class Target(NamedTuple):
    """A target. `run` may raise the `allowed` exceptions. `words`: building blocks of inputs besides the corpus."""

    run: Callable[[bytes], None]
    allowed: tuple[type[BaseException], ...]
    words: tuple[bytes, ...] = ()


TARGETS: dict[str, Target] = {}
_JSON_WORDS = (
    *(b"{}", b"[]", b"null", b"true", b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"Infinity", b"9" * 20, b"9" * 5000),
    *(b'""', b'"\\ud800"', b'"\\u0000"', b'"\xff"', b"[" * 2000, b'{"a":' * 2000, b'"a":', b",", b'"parameters":'),
)
_YAML_WORDS = (b"&a", b"*a", b"- ", b": ", b"<<: *a", b"!!binary ", b"2001-01-01", b"? ", b"~", b"[", b"{", b"0x1f")


def target(*allowed: type[BaseException], words: tuple[bytes, ...] = ()) -> Callable[[Callable[[bytes], None]], None]:
    def add(run: Callable[[bytes], None]) -> None:
        TARGETS[run.__name__] = Target(run, allowed, words)

    return add


def _halves(data: bytes) -> tuple[bytes, bytes]:
    """The first line and the rest."""
    line, _, rest = data.partition(b"\n")
    return line, rest


@cache
def _directory() -> Path:
    """A folder of this process, in memory where there is such a place."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=place))


def remove_files() -> None:
    if _directory.cache_info().currsize:
        shutil.rmtree(_directory(), ignore_errors=True)


def _file(name: str, data: bytes) -> Path:
    path = _directory() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# --- between the server and its workers


@target(FrameError, words=(b"[" * 2000, b"\0\0\4\0", b"\1\0", b"\2"))
def frames(data: bytes) -> None:
    """The messages are the same however the bytes are cut, and are encoded and decoded to the same bytes."""
    whole, error = _fed([data])
    cut = len(data) // 3
    assert _fed([data[:cut], data[cut : 2 * cut], data[2 * cut :]])[1] == error
    if error:
        raise FrameError(error)
    for message in whole:
        written = encode_bytes(message)
        assert encode_bytes(decode_bytes(written)[0]) == written


def _fed(pieces: list[bytes]) -> tuple[list[Any], str]:
    decoder, messages = Decoder(BYTES_MAX), []
    try:
        for piece in pieces:
            messages += decoder.feed(piece)
    except FrameError as error:
        return messages, str(error)
    return messages, ""


# --- gRPC


@target(ServeError)
def grpc_messages(data: bytes) -> None:
    """The same messages however the bytes are cut; content that is compressed stays within its limit."""
    decoder, again = grpc_protocol.Decoder(BYTES_MAX), grpc_protocol.Decoder(BYTES_MAX)
    messages = decoder.feed(data)
    pieces = [data[at : at + 3] for at in range(0, len(data), 3)]
    assert [message for piece in pieces for message in again.feed(piece)] == messages
    for message in messages:
        if message.compressed:
            for encoding in ("gzip", "deflate"):
                assert len(grpc_protocol.decompress(encoding, message.data, BYTES_MAX)) <= BYTES_MAX
    decoder.finish()


@target(grpc_protocol.MalformedHeader, words=(b"-bin: ", b"grpc-timeout: ", b"99999999H", b"====", b"\xff", b","))
def grpc_headers(data: bytes) -> None:
    """Lines `NAME: VALUE`."""
    headers = []
    for line in data.split(b"\n"):
        name, _, value = line.partition(b": ")
        headers.append((name, value))
    for _, value in headers:
        sent = grpc_protocol.encode_message(value.decode("latin-1"))
        assert len(sent) <= grpc_protocol.STATUS_MESSAGE_BYTES_MAX
        assert sent.isascii() and b"\n" not in sent
        assert value.decode("latin-1").startswith(unquote(sent.decode()).removesuffix(" ..."))
        grpc_protocol.is_grpc(value)
        grpc_protocol.answer_encoding("gzip", value.decode("latin-1"))
    entries = list(grpc_protocol.ReceivedMetadata(headers))
    for key, given in entries:
        assert isinstance(given, bytes if key.endswith("-bin") else str)
    for _, value in headers:
        seconds = timeout_s(value)
        assert 0 <= answering_s(seconds) <= seconds < math.inf


@target(InvalidArgument)
def heads_of_messages(data: bytes) -> None:
    """The fields read from a large message equal the parser's, if the parser accepts it."""
    size, requests.WHOLE_BYTES_MAX = requests.WHOLE_BYTES_MAX, -1
    try:
        found = requests.head_of_message(data)
        forms = requests.head_of_message(data, forms=True)
    finally:
        requests.WHOLE_BYTES_MAX = size
    try:
        whole = pb.ModelInferRequest.FromString(data)
    except Exception:  # what is wrong inside of a tensor is for the worker to say
        return
    assert (found.model_name, found.id) == (whole.model_name, whole.id) == (forms.model_name, forms.id)
    assert set(found.parameters) == set(whole.parameters)
    assert [one.name for one in forms.inputs] == [one.name for one in whole.inputs]
    assert list(forms.raw_input_contents) == list(whole.raw_input_contents)


# --- HTTP


@target(MalformedForm, words=(b"\r\n\r\n", b"--b", b"--b--", b"\r\n", b'filename*="', b"name=", b"&", b"%", b"\\" * 40))
def html_forms(data: bytes) -> None:
    """The content type, and the body. A body that passes `check` can be read."""
    line, body = _halves(data)
    content_type = line.decode("latin-1")
    if not is_form(content_type):
        return
    check(content_type, body)
    try:
        parts(content_type, body)
    except MalformedForm as error:
        raise AssertionError(f"it was let through, but can't be read: {error}") from error


_PEER = Peer(("127.0.0.1", 1), ("127.0.0.1", 8080), "1.1")


def _request(
    query: bytes = b"", path: str = "/models", headers: list[tuple[bytes, bytes]] | None = None
) -> HttpRequest:
    target = quote(path, safe="/", encoding="latin-1").encode() + b"?" + query
    return HttpRequest(Stream(Head("POST", target, headers or []), _PEER), "id", BodyLimits(BYTES_MAX, 1.0))


@target(ServeError, words=(b"initial_workers=", b"batch_size=", b"%ff", b"&", b"url=", b"\xd9\xa1", b"-", b"9" * 5000))
def register_parameters(data: bytes) -> None:
    """The query of a registration, or its body in JSON."""
    given = _json_parameters(data) if data[:1] in (b"{", b"[") else Parameters(query_pairs(_request(data)))
    page_asked(given)
    asked = management.given(REGISTER, given)
    assert asked.keys() == {row.name for row in REGISTER if row.http}
    store.check_text(asked["url"], asked["url"])


@target(ServeError, words=(b"Host: ", b"Origin: http://", b"content-length: ", b"[::1]", b"9" * 5000, b"%25", b"["))
def http_heads(data: bytes) -> None:
    """The path, and lines `NAME: VALUE`: the guard's verdict, and the body's size."""
    line, rest = _halves(data)
    headers = []
    for one in rest.split(b"\n"):
        name, _, value = one.partition(b": ")
        headers.append((name.lower(), value))
    request = _request(path="/" + line.decode("latin-1"), headers=headers)
    for hosts in (Hosts("127.0.0.1"), Hosts("0.0.0.0", allowed=("example.org", ".example.com"))):
        match = _ROUTES.find("POST", request.path)
        with contextlib.suppress(ServeError):
            Guard(hosts).check(request, match)
    request._announced()
    values = [value for name, value in headers if name == b"authorization"]
    key_texts.bearer(values)


@target(InvalidArgument, words=_JSON_WORDS)
def json_bodies(data: bytes) -> None:
    """A body as the frontend reads it, whole and by its heads, which find the same parameters."""
    names, words = ("timeout", "priority"), (b'"timeout"', b'"priority"')
    found = requests.parameters_of_json(data, names, words)
    given = json_object(data)
    expected = given.get("parameters")
    if isinstance(expected, dict) and requests.mention(data, words) and _is_plain(data):
        for name in names:
            value = expected.get(name)
            if name in found or len(given) < requests.FIELDS_MAX:
                assert repr(found.get(name)) == repr(type(value)() if isinstance(value, (dict, list)) else value)
    load_parameters(given)
    load_parameters_of_json(data)


def _is_plain(data: bytes) -> bool:
    """Both readers take it for UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


@target(BadTemplate, words=(b"{a}", b"{b:path}", b"{c:int}", b"{d:float}", b"{e:uuid}", b"/", b"{", b"}", b"1.5"))
def path_templates(data: bytes) -> None:
    """A template, and a path."""
    line, path = _halves(data)
    PathTemplate(line.decode("utf-8", "replace")).fits(path.decode("utf-8", "replace"))


# --- tensors

_FORMATS = known_formats(ServerConfig(), env={}, work_dir=Path(), gpus=0)
_ROUTES = RouteTable(ROUTES, (HTTP_INFERENCE, HTTP_MANAGEMENT), Switch)
_FREE = ModelSpec("m", "1", {}, {})
_DECLARED = ModelSpec(
    "m",
    "1",
    {
        "x": {"datatype": "FP32", "shape": [-1, 2], "batch_max": 4},
        "text_input": {"datatype": "BYTES", "optional": True},
    },
    {"y": {"datatype": "FP32", "shape": [-1]}},
    {"depth": "INT32", "flag": "BOOL"},
)


def _tensors(form: str, body: bytes, headers: list[tuple[str, str]]) -> None:
    """Reads a request, passes it to a handler, and answers with its content."""
    failed = 0
    for model in (_FREE, _DECLARED):
        try:
            reader = opened(Item(1, "id", math.inf, headers, [Input("", f"\0{form}", body)]), model)
            row_of(reader.request)
            response = InferenceResponse(reader.request.inputs)
            if form.startswith("v1"):
                response = V1Response([], payload={"predictions": []})
            for last in (False, True):
                assert isinstance(reader.answer(response, last), bytes)
            assert isinstance(reader.end(), bytes)
        except BadTensor:
            failed += 1
    if failed == 2:
        raise BadTensor("neither model takes it")


_TENSOR_WORDS = (
    *_JSON_WORDS,
    *(b'"BYTES"', b'"FP32"', b'"INT64"', b'"BF16"', b'"BOOL"', b'"shape":[0]', b'"shape":[-1]', b'"shape":[1,1]'),
    *(b'"content_type":"base64"', b'"binary_data_size":4', b'"classification":1', b'"outputs":[{"name":"x"}]'),
    *(b'"datatype":', b'"data":[1.5]', b'"data":["a"]', b'"content_type":"str"', b'"depth":"x"', b'"name":"x"'),
)


@target(BadTensor, words=_TENSOR_WORDS)
def tensors_json(data: bytes) -> None:
    """The value of the header for the JSON's length, and the body."""
    line, body = _halves(data)
    length = line.decode("latin-1")
    _tensors("json", body, [("inference-header-content-length", length)] if length else [])


@target(BadTensor)
def tensors_grpc(data: bytes) -> None:
    _tensors("grpc;triton;stream" if data[:1] == b"\1" else "grpc", data[1:], [])


@target(InvalidArgument, words=_TENSOR_WORDS)
def tensors_of_steps(data: bytes) -> None:
    """The request to an ensemble's step has the tensors of the ensemble's request, if the parser accepts it."""
    form = "grpc" if data[:1] != b"{" else "v1" if b"instances" in data else "json"
    try:
        graph_tensors.read_answer(data)
    except InvalidArgument:
        pass
    request = graph_tensors.read_request([Input("", f"\0{form}", data)], (), {"X": ("FP32", True)})
    for tensor in request.tensors.values():
        graph_tensors.declared(tensor.head)
    (asked,) = graph_tensors.step_inputs("m", request, request.tensors.items(), request.asked.items())
    try:
        found = pb.ModelInferRequest.FromString(bytes(asked.data))
    except DecodeError:  # what is wrong inside of its parameters is for the worker to say
        return
    assert {one.name for one in found.inputs} == set(request.tensors) and found.model_name == "m"
    raw = [bytes(tensor.raw) for tensor in request.tensors.values() if tensor.raw is not None]
    assert list(found.raw_input_contents) == raw


@target(
    InvalidArgument, words=(b"#(", b")", b"#", b"==", b'"', b"\\", b"@this", b"[", b"]", b".", b"|", b"%", b"*", b"{")
)
def graph_conditions(data: bytes) -> None:
    """The first line is a condition, the rest the JSON that it is for."""
    line, rest = _halves(data)
    condition = Condition(line.decode("utf-8", "replace"))
    try:
        value = json.loads(rest)
    except (ValueError, RecursionError):
        value = {"a": [1, "b", {"c": None}], "d": True}
    assert condition.holds(value) in (True, False)


@target(BadTensor, words=_TENSOR_WORDS)
def tensors_generate(data: bytes) -> None:
    _tensors("generate;stream", data, [])


@target(BadTensor, words=(*_TENSOR_WORDS, b'"messages":[]', b'"prompt":""', b'"role":"user"', b'"content":"a"'))
def tensors_openai(data: bytes) -> None:
    _tensors("openai;chat" if b'"messages"' in data else "openai", data, [])


@target(BadTensor, words=(*_TENSOR_WORDS, b'"instances":', b'"data_base64":"e30="', b"1" + b"0" * 400))
def tensors_v1(data: bytes) -> None:
    """The content type, and the body."""
    line, body = _halves(data)
    _tensors("v1", body, [("content-type", line.decode("latin-1"))])


@target(BadTensor)
def tensors_of_rows(data: bytes) -> None:
    name, body = _halves(data)
    request_of([Input(name.decode("latin-1"), "", body)], {}, _FREE)
    request_of([Input(name.decode("latin-1"), "", body)], {}, _DECLARED)


@target(BadTensor, words=(*_TENSOR_WORDS, b"\x93NUMPY", b"text/csv", b"1,2", b"application/json"))
def tensors_of_values(data: bytes) -> None:
    """The content type, and the body."""
    kind, body = _halves(data)
    v1_form.request_of([Input("body", kind.decode("latin-1"), body)], {}, _FREE)
    v1_form.request_of([Input("body", kind.decode("latin-1"), body)], {}, _DECLARED)


# --- files of an operator

_PBTXT_WORDS = (
    *(
        b"max_batch_size: 4",
        b"dynamic_batching {}",
        b"sequence_batching { oldest {} }",
        b"instance_group [ { gpus: 1 } ]",
    ),
    *(b"data_type: 99", b"TYPE_STRING", b"dims: [ -1, 2 ]", b"version_policy { latest { num_versions: 4294967295 } }"),
    *(
        b"kind: 9",
        b"{ ",
        b"<" * 300,
        b"18446744073709551615",
        b"inf",
        b"[type.googleapis.com/x] {}",
        b"count: 2147483647",
    ),
)


@target(InvalidArgument, words=_PBTXT_WORDS)
def config_pbtxt(data: bytes) -> None:
    """A servable configuration, written as JSON and read again, is the same."""
    text = data.decode("utf-8", "replace")
    config = triton.checked(triton.parse(text, "config.pbtxt"), "m", "config.pbtxt")
    if triton.ensemble_of(config, "config.pbtxt") is not None:
        return
    config = triton.placed(triton.completed(config, "m", triton.backend_of(config, "config.pbtxt") or "python"), 2)
    triton.chosen(config, [1, 2, 3])
    triton.worker_settings(config, 2)
    triton.priorities(config)
    triton.signature(config)
    assert as_json(triton.from_json(as_json(config), "json")) == as_json(config)


@target(properties.PropertiesError, words=(b"\\u0041", b"\\u", b"\\ud83d\\ude00", b"\\\n", b"\r", b"!", b":", b"\\"))
def properties_texts(data: bytes) -> None:
    """A value that was read is written to the same bytes."""
    entries = [(one.key, one.value) for one in properties.parse(properties.decode(data))]
    assert [(one.key, one.value) for one in properties.parse(properties.render(entries))] == entries


@target(ValueError, words=(b"{}", b"http://", b"unix:/", b"[::1]", b"1e400", b"9" * 5000, b"-", b'"', b"|", b":", b"="))
def setting_values(data: bytes) -> None:
    """The number of a setting, and its value."""
    line, rest = _halves(data)
    names = sorted(SETTINGS)
    name = names[int.from_bytes(line[:2], "big") % len(names)] if line not in map(str.encode, names) else line.decode()
    SETTINGS[name].kind.parse(rest.decode("utf-8", "replace").strip() or "0")


@target(snapshot.SnapshotError, words=(*_JSON_WORDS, b"model_snapshot=", b'"models":', b'"1.0":', b'"workflows":'))
def snapshots(data: bytes) -> None:
    snapshot.decode(properties.decode(data))


@target(key_texts.BadKeys, words=(*_JSON_WORDS, b'"key":', b'"inference"', b'"expiration time":'))
def key_files(data: bytes) -> None:
    key_texts.parse_key_file(data.decode("utf-8", "replace"))


@target(InvalidArgument, words=_JSON_WORDS)
def mlserver_settings_texts(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    mlserver_settings.dotenv(text)
    mlserver_settings.read(text, {"MLSERVER_MODEL_EXTRA": text[:50]} if "extra" in text else {})


_LOG4J2_WORDS = (
    *(b"${a}", b"${env:A:-${b}}", b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"&#0;", b"<?xml version='1.0'", b"%i"),
    *(b" encoding='x'?>", b"encoding='utf-7'?>", b"size='1.2.3'", b"size='9e9 TB'", b"max='\xd9\xa1'", b"%d{yyyy"),
    *(b"%-999999999p", b"%d{HH}{Mars/X}", b"%9999999999999999999i", b"<PatternLayout pattern='", b"\xc2\xb2"),
)


@target(ConfigError, words=_LOG4J2_WORDS)
def log4j2_files(data: bytes) -> None:
    plan = read_plan(_file("log4j2.xml", data), {"env": {"A": "x"}, "sys": {}})
    for appender in plan.appenders.values():
        try:
            rotation(appender).name(NOW, 1)
            formats.compile_pattern(appender.pattern or "")
        except ValueError:
            continue


_RECORD = logging.LogRecord("org.pytorch.serve", logging.INFO, "a.py", 1, "hello", None, None)
_RECORD.exc_text = "Traceback\n  x"


@target(
    ValueError, words=(*_LOG4J2_WORDS, b"%highlight{%p}", b"%style{", b"%d{ISO8601}{UTC}", b"'", b"%X{", b"%.-5c{2}")
)
def log_patterns(data: bytes) -> None:
    line = formats.PatternFormatter(data.decode("utf-8", "replace")).format(_RECORD)
    assert len(line) <= 100_000 + 2000 * len(data)  # `%9999p`


@target(yaml.YAMLError, ValueError, RecursionError, words=(*_YAML_WORDS, b"minWorkers: ", b"torchrun:\n  ", b"[0, 1]"))
def model_config_yaml(data: bytes) -> None:
    """A readable value can be settled, whatever its content, and never raises then."""
    found = parse_config(data.decode("utf-8", "replace"))
    try:
        model_settings.resolve(model_settings.Requested(), found, {}, ServerConfig())
        signature_of(found)
    except InvalidArgument:
        return
    except (ValueError, RecursionError) as error:
        raise AssertionError(f"it can be read, but not settled: {error!r}") from error


@target(
    yaml.YAMLError, ValueError, RecursionError, ServeError, words=(*_YAML_WORDS, b"dag:\n", b"models:\n", b"url: a")
)
def workflow_specifications(data: bytes) -> None:
    tree = parse_config(data.decode("utf-8", "replace"))
    try:
        parse_spec(tree, has_handler=True)
    except (ValueError, RecursionError) as error:
        raise AssertionError(f"{error!r}") from error


# --- archives


@target(
    InvalidArchive,
    InvalidArgument,
    words=(*_JSON_WORDS, b'"model":', b'"configFile":', b'"../x"', b'"modelVersion":', b'"handler":'),
)
def manifests(data: bytes) -> None:
    _file("manifest/MAR-INF/MANIFEST.json", data)
    found = _FORMATS.open(_directory() / "manifest", _directory() / "work")
    model_settings.model_name_for(model_settings.Requested(), found.name, found.version, found.dir)


@target(
    InvalidArchive, words=(*_JSON_WORDS, b'"implementation":', b'"parameters":', b'"inputs":', b'"max_batch_size":')
)
def mlserver_models(data: bytes) -> None:
    _file("mlserver/model-settings.json", data)
    _FORMATS.open(_directory() / "mlserver", _directory() / "work")


@target(
    InvalidArchive,
    words=(b"../", b"/", b"\\", b"\0", b"PK\1\2", b"PK\3\4", b"PK\5\6", b"ustar\x0000", b"\xff\xff\xff\xff"),
)
def archives(data: bytes) -> None:
    """Nothing is written outside of the target, and no more than the limits."""
    outside = _directory() / "archives"
    target_directory = outside / "target"
    shutil.rmtree(outside, ignore_errors=True)
    target_directory.mkdir(parents=True)
    archive = _file("archive.mar", data)
    limits = ExtractLimits(bytes_max=BYTES_MAX, files_max=50, ratio_max=100, ratio_floor_bytes=1 << 16)
    try:
        extract(archive, target_directory, limits)
    finally:
        assert os.listdir(outside) == ["target"]
        files = [path for path in target_directory.rglob("*") if not path.is_dir()]
        assert all(path.is_file() and not path.is_symlink() for path in files)
        assert sum(path.stat().st_size for path in files) <= BYTES_MAX + (1 << 20)


# --- words of a call

_URL_WORDS = (
    b"http://",
    b"s3://",
    b"file:///",
    b"%2e%2e",
    b"%00",
    b"#sha256=",
    b"[::",
    b"@",
    b":99999",
    b"\xe2\x84\x80",
)


@target(ServeError, words=_URL_WORDS)
def urls(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    pin = store.PIN.search(text)
    plain = text[: pin.start()] if pin else text
    store.check_text(text, plain)
    if not store.SCHEME.match(plain):
        return
    name = store.file_name(plain)
    assert name and "/" not in name and not name.startswith(".")


@target(
    ValueError, words=(b"http://", b"unix:", b"[::1%x]", b":", b"\xd9\xa1", b"9" * 5000, b"*.", b".", b"0x7f.1", b"%")
)
def addresses(data: bytes) -> None:
    """An address is written as one that is read the same."""
    text = data.decode("utf-8", "replace")
    is_loopback(text)
    failed = 0
    for read in (parse_name, parse_host, lambda one: parse_address(one, "inference")):
        try:
            found = read(text)
            assert read(str(found)) == found, (found, read(str(found)))
        except ValueError:
            failed += 1
    if failed == 3:
        raise ValueError("it is nothing of these")
