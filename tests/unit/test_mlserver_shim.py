"""The small package mlserver: types and codecs, as runtimes use them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import typing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ts.compat import SHIMS
from ts.compat.mlserver_runtime import Routes
from ts.compat.shims import mlserver
from ts.compat.shims.mlserver import types as own_types
from ts.compat.shims.mlserver.codecs import (
    Base64Codec,
    CodecError,
    CodecNotFound,
    DatetimeCodec,
    NumpyCodec,
    NumpyRequestCodec,
    StringCodec,
    StringRequestCodec,
    decode_args,
)
from ts.compat.shims.mlserver.handlers import custom_handler
from ts.compat.shims.mlserver.utils import get_model_uri
from ts.runtime.handlers import HandlerNotUsable

types: Any = own_types
REQUEST = {
    "id": "a",
    "parameters": {"content_type": "str", "temperature": 0.5},
    "inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["hello"]}],
}


#: As most runtimes write it.
Hints = typing.List[str]  # noqa: UP006


def test_what_its_types_need_is_named() -> None:
    program = "import sys; sys.modules['pydantic'] = None; import mlserver"
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": SHIMS}, capture_output=True, text=True)
    assert "pip install 'torchrelay[mlserver]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("hint", "hidden", "reason"),
    [
        (str, "fastapi", r"pip install 'torchrelay\[mlserver\]'"),
        (Base64Codec, "", "FastAPI can't read the custom handler own"),
    ],
)
def test_custom_handlers_that_cannot_be_called(
    hint: Any, hidden: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(mlserver.MLModel):
        @custom_handler("/own")
        def own(self, text: Any) -> str:
            return str(text)

    Own.own.__annotations__["text"] = hint
    monkeypatch.setattr(sys, "path", [*sys.path, SHIMS])
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(HandlerNotUsable, match=reason):
        Routes(Own(settings()))


def settings(**more: Any) -> Any:
    return mlserver.ModelSettings(name="m", implementation=mlserver.MLModel, **more)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")
def test_a_request_as_json_and_back() -> None:
    request: Any = types.InferenceRequest.model_validate_json(json.dumps(REQUEST))
    assert request.model_dump() == REQUEST == request.dict() == json.loads(request.model_dump_json())
    assert types.InferenceRequest.parse_obj(REQUEST) == request == types.InferenceRequest.parse_raw(request.json())
    assert request.parameters.temperature == 0.5 and request.inputs[0].parameters is None
    assert request.inputs[0].data.root == ["hello"] and list(request.inputs[0].data) == ["hello"]
    assert (request.inputs[0].data[0], len(request.inputs[0].data)) == ("hello", 1)
    assert request.inputs[0].data.__root__ == ["hello"]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint64", "int32", "int64", "float16", "float32", "float64"])
def test_arrays_come_back(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    encoded = NumpyCodec.encode_input("x", array)
    for one in (encoded, types.RequestInput.model_validate_json(encoded.model_dump_json())):
        found = NumpyCodec.decode_input(one)
        assert found.dtype == array.dtype and found.tolist() == array.tolist()


def test_arrays_of_one_dimension_get_a_second() -> None:
    encoded: Any = NumpyCodec.encode_output("x", np.array([1.0, np.nan]))
    assert encoded.shape == [2, 1] and encoded.parameters.content_type == "np"
    assert encoded.data.root == [1.0, None]
    assert np.isnan(NumpyCodec.decode_output(encoded)[1, 0])


def test_arrays_of_texts() -> None:
    encoded: Any = NumpyCodec.encode_input("x", np.array(["a", "bé"]))
    assert encoded.datatype == "BYTES" and encoded.data.root == [b"a", "bé".encode()]
    assert NumpyCodec.decode_input(encoded).ravel().tolist() == [b"a", "bé".encode()]
    joined = types.RequestInput(name="x", shape=[2, 1], datatype="BYTES", data=[b"aabb"])
    assert NumpyCodec.decode_input(joined).ravel().tolist() == [b"aa", b"bb"]


def test_what_numpy_has_and_the_protocol_has_not() -> None:
    with pytest.raises(CodecError, match="complex"):
        NumpyCodec.encode_output("x", np.array([1j]))


@pytest.mark.parametrize(
    ("codec", "values", "sent"),
    [
        (StringCodec, ["a", "é"], ["a", "é"]),
        (Base64Codec, [b"\xff\x00"], ["/wA="]),
        (DatetimeCodec, [datetime(2024, 5, 6, 7)], ["2024-05-06T07:00:00"]),
    ],
)
@pytest.mark.parametrize("use_bytes", [True, False])
def test_lists_come_back(codec: Any, values: list[Any], sent: list[str], use_bytes: bool) -> None:
    encoded = codec.encode_input("x", values, use_bytes=use_bytes)
    assert encoded.data.root == [text.encode() if use_bytes else text for text in sent]
    assert (encoded.shape, encoded.datatype) == ([len(values), 1], "BYTES")
    assert codec.decode_input(encoded) == values and codec.can_encode(values)
    assert codec.decode_output(codec.encode_output("x", values)) == values
    alone = types.RequestInput(name="x", shape=[1], datatype="BYTES", data=sent[0])
    assert codec.decode_input(alone) == values[:1]


def test_requests_of_one_tensor() -> None:
    request: Any = StringRequestCodec.encode_request(["a"])
    assert request.parameters.content_type == "str" and StringRequestCodec.decode_request(request) == ["a"]
    response = NumpyRequestCodec.encode_response("m", np.array([[1]]), "2")
    assert (response.outputs[0].name, response.model_version) == ("output-1", "2")
    assert NumpyRequestCodec.decode_response(response).tolist() == [[1]]
    with pytest.raises(CodecError, match="single input"):
        StringRequestCodec.decode_request(types.InferenceRequest(inputs=[]))


def test_the_content_type_decides_then_the_metadata_then_the_default() -> None:
    text = types.MetadataTensor(name="x", datatype="BYTES", shape=[-1], parameters={"content_type": "str"})
    model = mlserver.MLModel(settings(inputs=[text], outputs=[text]))

    def tensor(content_type: str | None) -> Any:
        parameters = {"content_type": content_type} if content_type else None
        return types.RequestInput(name="x", shape=[1], datatype="BYTES", data=["YQ=="], parameters=parameters)

    assert model.decode(tensor("base64")) == [b"a"]
    assert model.decode(tensor(None)) == ["YQ=="]
    other = tensor(None)
    other.name = "y"
    assert model.decode(other, default_codec=Base64Codec) == [b"a"]
    assert model.decode(other).root == ["YQ=="]
    request = types.InferenceRequest(inputs=[tensor(None)], parameters={"content_type": "str"})
    assert model.decode_request(request) == ["YQ=="]
    assert model.encode(["a"], types.RequestOutput(name="x")).data.root == [b"a"]
    response: Any = model.encode_response(np.array([[2]]))
    assert response.outputs[0].datatype == "INT64"
    with pytest.raises(CodecNotFound, match="object"):
        model.encode_response(object())


def test_arguments_by_their_annotations() -> None:
    class Model(mlserver.MLModel):
        @decode_args
        async def predict(self, x: np.ndarray, names: Hints | None = None) -> tuple[np.ndarray, Hints]:
            return x + 1, names or []

    inputs = [NumpyCodec.encode_input("x", np.array([[1]])), StringCodec.encode_input("names", ["a"])]
    found = asyncio.run(Model(settings()).predict(types.InferenceRequest(inputs=inputs)))
    assert found.outputs[0].data.root == [2] and found.outputs[1].data.root == [b"a"]
    assert [one.name for one in found.outputs] == ["output-0", "output-1"]
    with pytest.raises(mlserver.errors.MLServerError, match="'y'"):
        unknown = NumpyCodec.encode_input("y", np.array([[1]]))
        asyncio.run(Model(settings()).predict(types.InferenceRequest(inputs=[unknown])))
    with pytest.raises(CodecNotFound, match="complex"):
        decode_args(lambda_with(complex))


def lambda_with(hint: type) -> Any:
    async def predict(self: Any, x: Any) -> None: ...

    predict.__annotations__ = {"x": hint}
    return predict


def test_settings_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    (tmp_path / "weights.bin").write_bytes(b"")
    file = tmp_path / "model-settings.json"
    parameters = {"uri": ".", "version": "3", "extra": {"a": 1}, "own": True}
    file.write_text(json.dumps({"name": "m", "implementation": "mine.Mine", "parameters": parameters, "other": 1}))
    found: Any = mlserver.ModelSettings.parse_file(str(file))
    assert found.implementation.__name__ == "Mine" and found.version == "3"
    assert (found.parameters.extra, found.parameters.own) == ({"a": 1}, True)
    assert asyncio.run(get_model_uri(found, ["model.pt", "weights.bin"])) == f"{tmp_path}/./weights.bin"
    found.parameters.uri = "nowhere"
    with pytest.raises(mlserver.errors.MLServerError, match="nowhere") as caught:
        asyncio.run(get_model_uri(found))
    assert caught.value.status_code == 422
