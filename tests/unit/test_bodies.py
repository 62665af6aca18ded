"""Bodies that the server itself reads and writes: how large they may be, and that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.errors import InvalidArgument, MessageTooLarge
from ts_frontend.grpc.open_inference import SMALL_BYTES_MAX, load_asked, message
from ts_frontend.http.request import JSON_BYTES_MAX, error_body, json_head, json_object
from ts_frontend.open_inference import requests
from ts_frontend.open_inference.models import CONFIG_CHARACTERS_MAX, load_parameters, load_parameters_of_json

LARGE_BYTES = 6_000_000
#: What Python's parser takes longest for.
SLOW = b"[" + b"[]," * (LARGE_BYTES // 3 - 1) + b"1]"
FILE = bytes(range(256)) * (LARGE_BYTES // 256)


def beats_while(work: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """How often the loop came round meanwhile, and the result."""

    async def run() -> tuple[int, Any]:
        reading = asyncio.ensure_future(work())
        beats = 0
        while not reading.done():
            beats += 1
            await asyncio.sleep(0.001)
        return beats, await reading

    return asyncio.run(run())


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text('a"\\[]{}:, é\n')),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text('a"\\]', max_size=3), inner)),
    max_leaves=6,
)


@given(st.dictionaries(st.text('a"\\é', max_size=3), values, max_size=4))
def test_small_members_of_a_large_object_are_as_in_a_small_one(asked: dict[str, Any]) -> None:
    body = json.dumps({**asked, "prompt": "x" * requests.WHOLE_BYTES_MAX}).encode()
    assert asyncio.run(json_head(body)) == {name: value for name, value in asked.items() if name != "prompt"}
    assert asyncio.run(json_head(json.dumps(asked).encode())) == asked


@pytest.mark.parametrize("body", [b"[" + b"1," * 20_000 + b"1]", b'{"model": ' + b" " * 20_000, b"{" * 20_000])
def test_a_large_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="The body is not valid JSON"):
        asyncio.run(json_head(body))


def test_bodies_of_other_calls_have_a_limit() -> None:
    assert json_object(b'{"a": "%s"}' % (b"x" * (JSON_BYTES_MAX - 9))) != {}
    with pytest.raises(MessageTooLarge, match=f"{JSON_BYTES_MAX} bytes") as refused:
        json_object(b"{" + b" " * JSON_BYTES_MAX + b"}")
    assert refused.value.http_status == 413
    with pytest.raises(MessageTooLarge, match=f"LogSettingsRequest.* {SMALL_BYTES_MAX} bytes"):
        message(pb.LogSettingsRequest, b"\x0a\x00" * SMALL_BYTES_MAX)


# --- loading a model


def test_the_loop_goes_on_while_a_models_files_are_read() -> None:
    parameters = {"config": '{"backend": "python"}', "file:1/model.py": base64.b64encode(FILE).decode()}
    body = json.dumps({"parameters": parameters}).encode()
    beats, found = beats_while(lambda: asyncio.to_thread(load_parameters_of_json, body))
    assert beats >= 3 and found.files == {"1/model.py": FILE} and "python" in found.config_text
    escaped = body.replace(b"/", b"\\/")  # as PHP writes it
    assert load_parameters_of_json(escaped) == found == load_parameters_of_json(b" " + body + b"\n")
    assert load_parameters_of_json(b"") == load_parameters_of_json(b'{"parameters": null}') == load_parameters({})
    assert load_parameters_of_json(b'{"parameters": {"model_path": "a"}}').url == "a"


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (b"[1]", "parameters is an object"),
        (b'{"file:1/model.py": "a=bc", "config": "{}"}', "is not base64"),
        (b'{"config": {"a": 1}}', "'config' is a text"),
        (b'{"file:1/model.py": %s, "config": "{}"}', "'file:1/model.py' is a text"),
        (b'{"model_path": "%s"}', "'model_path'"),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_what_a_model_cannot_be_loaded_with(parameters: bytes, says: str, large: bool) -> None:
    if b"%s" in parameters:
        parameters = parameters % (SLOW if b'"%s"' not in parameters else b"\\n" * LARGE_BYTES)
        large = True
    body = b'{"parameters": ' + parameters + (b', "x": "%s"}' % (b"y" * 20_000) if large else b"}")
    with pytest.raises((InvalidArgument, MessageTooLarge), match=says):
        load_parameters_of_json(body)


def test_a_configuration_has_a_limit() -> None:
    with pytest.raises(MessageTooLarge, match=f"'config' has .* {CONFIG_CHARACTERS_MAX} characters"):
        load_parameters({"config": " " * (CONFIG_CHARACTERS_MAX + 1)})


def test_a_load_request_over_grpc() -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.py"].bytes_param = FILE
    name, found = load_asked(request.SerializeToString())
    assert (name, found.files) == ("m", {"1/model.py": FILE})
    with pytest.raises(InvalidArgument, match="more than 16384 fields"):
        load_asked(b"\x1a\x00" * 20_000)
    with pytest.raises(InvalidArgument, match="are not a RepositoryModelLoadRequest"):
        load_asked(b"\xff" * 20_000)
    with pytest.raises(InvalidArgument, match="model_name is empty"):
        load_asked(b"")


@given(st.integers(400, 599), st.text(), st.text(st.characters()))
def test_an_error_is_written_as_json_writes_it(status: int, kind: str, message: str) -> None:
    error = {"code": status, "type": kind, "message": message}
    assert (
        error_body(status, kind, message)
        == json.dumps(error, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    )
