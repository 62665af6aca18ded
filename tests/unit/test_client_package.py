"""The client package: its retries, its arrays, and its stub modules next to other packages."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from torchrelay_client import BadTensor, Request, Retry, Typed
from torchrelay_client import grpc_predict_v2_pb2 as pb
from torchrelay_client.answers import answer_of, encoded


def test_pauses_double_up_to_the_most_and_at_least_half_of_each_is_waited() -> None:
    retry = Retry(attempts_max=10, first_s=0.1, most_s=0.5)
    assert [retry.pause_s(StatusCode.UNAVAILABLE, made, None, 1.0) for made in (1, 2, 3, 4, 9)] == [
        0.1,
        0.2,
        0.4,
        0.5,
        0.5,
    ]
    assert retry.pause_s(StatusCode.UNAVAILABLE, 1, None, 0.0) == 0.05


def test_when_it_gives_up() -> None:
    retry = Retry(attempts_max=3, first_s=1.0)
    assert retry.pause_s(StatusCode.UNAVAILABLE, 2, 10.0, 0.0) is not None
    assert retry.pause_s(StatusCode.UNAVAILABLE, 3, 10.0, 0.0) is None
    assert retry.pause_s(StatusCode.UNAVAILABLE, 1, 0.5, 0.0) is None
    assert retry.pause_s(StatusCode.INTERNAL, 1, None, 0.0) is None
    assert Retry().pause_s(StatusCode.UNAVAILABLE, 4, None, 1.0) == 0.8
    with pytest.raises(ValueError, match="attempts_max is at least 1"):
        Retry(attempts_max=0)


def back(value: object) -> tuple[str, np.ndarray]:
    """A value as a tensor, and the array of an answer with the same bytes."""
    datatype, shape, raw = encoded("x", value)
    output = pb.ModelInferResponse.InferOutputTensor(name="y", datatype=datatype, shape=shape)
    return datatype, answer_of(pb.ModelInferResponse(outputs=[output], raw_output_contents=[raw]))["y"]


def test_bf16_is_rounded_to_the_nearest() -> None:
    datatype, array = back(Typed("BF16", [1.0, -2.5, 1.00390625, 1.01171875, float("inf"), float("nan")]))
    assert (datatype, array.dtype) == ("BF16", np.dtype(np.float32))
    assert array[:5].tolist() == [1.0, -2.5, 1.0, 1.015625, float("inf")]
    assert np.isnan(array[5])


@pytest.mark.parametrize(
    ("value", "wanted", "shape"),
    [
        ("grün", ["grün".encode()], (1,)),
        (b"\x00\xff", [b"\x00\xff"], (1,)),
        (["a", "bc"], [b"a", b"bc"], (2,)),
        (np.array([[b"a"], [b""]], object), [b"a", b""], (2, 1)),
        (Typed("BYTES", [1, 2]), [b"1", b"2"], (2,)),
    ],
)
def test_text_and_bytes(value: object, wanted: list[bytes], shape: tuple[int, ...]) -> None:
    datatype, array = back(value)
    assert (datatype, list(array.ravel()), array.shape) == ("BYTES", wanted, shape)


def test_what_is_no_tensor_is_named() -> None:
    for value, reason in [
        (Typed("INT9", [1]), "unknown datatype 'INT9'"),
        (Typed("INT8", ["x"]), "invalid literal"),
        (Typed("INT8", [300]), "out of bounds"),
        (np.zeros(2, "c8"), "complex64"),
        ([[1], [2, 3]], "inhomogeneous"),
        (None, "None is not a number"),
        ({"a": 1}, "is not a number"),
        (["a", None], "None is not a number"),
    ]:
        with pytest.raises(BadTensor, match=f"input 'x': .*{reason}"):
            encoded("x", value)
    with pytest.raises(ValueError, match="parameter 'p': None is not"):
        Request("m", {}, parameters={"p": None}).message()


def test_a_request_has_what_was_given() -> None:
    parameters = {"b": True, "i": 1, "f": 0.5, "s": "text"}
    made = Request("m", {"x": [1.5]}, "2", "id-1", parameters, ["y"]).message()
    assert (made.model_name, made.model_version, made.id, made.outputs[0].name) == ("m", "2", "id-1", "y")
    assert {name: one.WhichOneof("parameter_choice") for name, one in made.parameters.items()} == {
        "b": "bool_param",
        "i": "int64_param",
        "f": "double_param",
        "s": "string_param",
    }
    assert Request("m", {}).message().id != Request("m", {}).message().id


def test_answers_of_other_forms() -> None:
    typed = pb.InferTensorContents(int_contents=[72, 105])
    code_points = pb.ModelInferResponse.InferOutputTensor(name="response", contents=typed)
    assert answer_of(pb.ModelInferResponse(outputs=[code_points]))["response"].tolist() == [72, 105]
    bare = pb.ModelInferResponse.InferOutputTensor(name="text", datatype="BYTES", shape=[1])
    answer = answer_of(pb.ModelInferResponse(outputs=[bare], raw_output_contents=[b"no length"]))
    assert answer.text() == answer.text("text") == "no length"
    with pytest.raises(KeyError, match="the outputs are text"):
        answer["txt"]
    wrong = pb.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[2])
    with pytest.raises(BadTensor, match="output 'y': 4 bytes of data"):
        answer_of(pb.ModelInferResponse(outputs=[wrong], raw_output_contents=[b"\0\0\0\0"]))


OURS = "import torchrelay_client.grpc_predict_v2_pb2 as ours, torchrelay_client.grpc_predict_v2_pb2_grpc as stubs\n"
THEIRS = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
file = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
message = file.message_type.add(name="ModelInferRequest")
message.field.add(name="model_name", number=1, label=1, type=9)
theirs = message_factory.GetMessageClass(descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    .message_types_by_name["ModelInferRequest"])
"""
BOTH = "assert ours.ModelInferRequest.FromString(theirs(model_name='m').SerializeToString()).model_name == 'm'\n"


def run(code: str, **more: Any) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("code", [OURS + THEIRS, THEIRS + OURS], ids=["ours first", "theirs first"])
def test_stubs_beside_another_package_inference(code: str) -> None:
    """Promises 000-02, 001-28. (With tritonclient itself: tests/e2e/clients.)"""
    run(code + BOTH)


def test_importing_the_client_imports_no_server() -> None:
    code = "import sys, torchrelay_client; print(sorted({'torch', 'h2corn', 'ts_frontend.server'} & {*sys.modules}))"
    assert run(code) == "[]\n"


IMPORTS = """
import grpc_kserve.grpc_predict_v2_pb2 as infer_pb2, grpc_kserve.grpc_predict_v2_pb2_grpc as infer_grpc
from dynamo_grpc import inference_pb2_grpc, inference_pb2
import grpc_predict_v2_pb2, sys
print(infer_pb2.ModelInferRequest is inference_pb2.ModelInferRequest, infer_grpc.GRPCInferenceServiceStub.__name__)
print(sys.argv[1:], __name__)
"""


def test_the_names_that_pages_import(tmp_path: Path) -> None:
    """Promises 000-02, 001-28."""
    (tmp_path / "program.py").write_text(IMPORTS)
    words = [sys.executable, "-m", "torchrelay_client.names", "program.py", "a"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True GRPCInferenceServiceStub\n['a'] __main__\n"


def test_a_real_module_of_such_a_name_wins(tmp_path: Path) -> None:
    (tmp_path / "dynamo_grpc").mkdir()
    (tmp_path / "dynamo_grpc" / "__init__.py").write_text("")
    (tmp_path / "dynamo_grpc" / "inference_pb2.py").write_text("WHOSE = 'real'\n")
    code = (
        "from torchrelay_client.names import offer; offer(); offer()\n"
        "from dynamo_grpc import inference_pb2; print(inference_pb2.WHOSE)"
    )
    assert run(code, cwd=tmp_path) == "real\n"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torchrelay_client.names", "nothing.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "there is no program nothing.py\n")


def test_the_blocking_clients_calls_are_those_of_the_other(root: Path) -> None:
    source = root / "frontend/torchrelay_client/client.py"
    made = runpy.run_path(str(root / "ts_scripts/make_blocking_calls.py"))["made"]
    assert source.read_text() == made(), "run python ts_scripts/make_blocking_calls.py"
