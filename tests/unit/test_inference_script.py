"""SageMaker's inference.py in the built-in handler: its functions, content types, batches, streams and failures."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse  # type: ignore[import-untyped]

from ts.testing import Request, ServedModel
from ts.testing.fixtures import load_model  # noqa: F401
from ts.testing.served import NotLoaded

HANDLER = "inference_script"
JSON, CSV, NPY, NPZ = "application/json", "text/csv", "application/x-npy", "application/x-npz"
Load = Callable[..., ServedModel]
LOADS = "def model_fn(model_dir):\n    return 10\n"


@pytest.fixture
def served(tmp_path: Path, load_model: Load) -> Callable[..., ServedModel]:  # noqa: F811
    def load(script: str, name: str = "inference.py") -> ServedModel:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / name).write_text(script)
        return load_model(tmp_path, handler=HANDLER)

    return load


def asked(model: ServedModel, body: Any, content_type: str = JSON, accept: str = "") -> Any:
    headers = {"content-type": content_type, **({"accept": accept} if accept else {})}
    return model.predict(Request(body, headers=headers, content_type=content_type))


def linear(folder: Path, name: str = "model.pth") -> None:
    network = torch.nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        network.bias.zero_()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.script(network).save(folder / name)


def _bytes(save: Callable[[Any], None]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


ROWS = np.array([[1, 2], [0, 1]], dtype=np.float32)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"[[1, 2], [0, 1]]", JSON),
        (b"1,2\n0,1\n", CSV),
        (_bytes(lambda file: np.save(file, ROWS)), NPY),
        (_bytes(lambda file: sparse.save_npz(file, sparse.csr_matrix(ROWS))), NPZ),
    ],
)
def test_a_folder_without_a_script_is_torchscript_in_four_forms(
    tmp_path: Path,
    load_model: Load,  # noqa: F811
    body: bytes,
    content_type: str,
) -> None:
    linear(tmp_path)
    model = load_model(tmp_path, handler=HANDLER)
    assert asked(model, body, content_type).json() == [[5, 11], [2, 4]]
    assert asked(model, body, content_type, CSV).text == "5.0,11.0\n2.0,4.0\n"
    answer = asked(model, body, content_type, f"text/html, {NPY}")
    assert answer.headers["content-type"] == NPY
    assert np.load(io.BytesIO(answer.data)).tolist() == [[5, 11], [2, 4]]


@pytest.mark.parametrize(
    ("body", "content_type", "accept", "status", "said"),
    [
        (b"[[1, 2]]", "application/xml", "", 415, "application/xml"),
        (b"[[1, 2]]", JSON, "application/xml", 406, "application/xml"),
        (b"[[1, 2], [1]]", JSON, "", 400, "no array of numbers"),
        (b"{", JSON, "", 400, "no array of numbers"),
        (b"nothing", NPY, "", 400, "is not application/x-npy"),
        (_bytes(lambda file: np.save(file, np.array([{}]))), NPY, "", 400, "is not application/x-npy"),  # a pickle
        (b"nothing", NPZ, "", 400, "is not application/x-npz"),
        (b"\xff", CSV, "", 500, "UnicodeDecodeError"),
        (b"[[1, 2, 3]]", JSON, "", 500, "mat1 and mat2"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    tmp_path: Path,
    load_model: Load,  # noqa: F811
    body: bytes,
    content_type: str,
    accept: str,
    status: int,
    said: str,
) -> None:
    linear(tmp_path, "model.pt")
    (tmp_path / "other.pth").touch()  # model.pt is preferred
    model = load_model(tmp_path, handler=HANDLER)
    answer = asked(model, body, content_type, accept)
    assert (answer.status, answer.headers["content-type"]) == (status, "text/plain; charset=utf-8")
    assert said in answer.text and "Traceback (most" not in answer.text
    assert asked(model, b"[[1, 2]]").json() == [[5, 11]]


WITH_CONTEXT = """
def pre_model_fn(model_dir, context):
    global before
    before = context.model_name
def model_fn(model_dir, context):
    return [before, context.system_properties["model_dir"] == model_dir]
def model_warmup_fn(model_dir, model, context):
    model.append("warm")
def transform_fn(model, data, content_type, accept, context):
    context.set_response_header(0, "X-Amzn-SageMaker-Custom-Attributes", "mine")
    return str(model + [data, context.get_request_header(0, "x-amzn-sagemaker-custom-attributes")])
"""


def test_functions_may_take_the_context_and_headers_go_both_ways(
    served: Callable[..., ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGEMAKER_PROGRAM", "mine.py")
    monkeypatch.setenv("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", CSV)
    model = served(WITH_CONTEXT, "mine.py")
    headers = {"content-type": CSV, "x-amzn-sagemaker-custom-attributes": "theirs"}
    answer = model.predict(Request(b"1,2", headers=headers, content_type=CSV))
    assert answer.text == str([model.name, True, "warm", "1,2", "theirs"])
    assert answer.headers["X-Amzn-SageMaker-Custom-Attributes"] == "mine"
    assert answer.headers["content-type"] == CSV


STREAMS = """
def model_fn(model_dir):
    return 3
def transform_fn(model, data, content_type, accept):
    for at in range(int(data)):
        yield f"piece {at};"
"""


def test_a_generator_streams_its_pieces(served: Callable[..., ServedModel]) -> None:
    model = served(STREAMS)
    assert asked(model, b"3").pieces == (b"piece 0;", b"piece 1;", b"piece 2;")
    assert asked(model, b"0").data == b""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (LOADS + "def transform_fn(a, b, c, d): ...\ndef input_fn(a, b): ...\n", "transform_fn and input_fn"),
        ("def model_fn(): ...\n", "model_fn of inference.py takes 0 arguments; it is called with 1"),
        ("def input_fn(data, content_type): ...\n", "there are: none"),
        ("def model_fn(model_dir):\n    raise OSError('no disk')\n", "no disk"),
        ("import nowhere\n", "nowhere"),
    ],
)
def test_scripts_that_cannot_serve_say_why(served: Callable[..., ServedModel], script: str, said: str) -> None:
    with pytest.raises(NotLoaded) as error:
        served(script)
    assert said in str(error.value)
