"""GRPCInferenceService with TorchServe handlers behind it: health, metadata, every datatype, both stream dialects, bad
tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from support import GUARD_S, TIMEOUTS_US
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

Stub = GRPCInferenceServiceStub
Input = pb.ModelInferRequest.InferInputTensor


def prefixed(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def raw(model: str, datatype: str, shape: list[int], data: bytes, name: str = "x", **more: Any) -> pb.ModelInferRequest:
    tensor = Input(name=name, datatype=datatype, shape=shape)
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[data], **more)


def typed(model: str, datatype: str, shape: list[int], name: str = "x", **contents: Any) -> pb.ModelInferRequest:
    tensor = Input(name=name, datatype=datatype, shape=shape, contents=pb.InferTensorContents(**contents))
    return pb.ModelInferRequest(model_name=model, inputs=[tensor])


def text(model: str, value: str, **more: Any) -> pb.ModelInferRequest:
    return raw(model, "BYTES", [1], prefixed(value.encode()), **more)


def refusal(stub: Stub, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=GUARD_S)
    return caught.value.code(), caught.value.details()


# --- health and metadata


def test_health(stub: Stub) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=GUARD_S).live
    assert stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="sum"), timeout=GUARD_S).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="sum", version="1.0"), timeout=GUARD_S).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="sum", version="9"), timeout=GUARD_S).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="nobody"), timeout=GUARD_S).ready


def test_metadata(stub: Stub) -> None:
    assert stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=GUARD_S).name == "torchrelay"
    found = stub.ModelMetadata(pb.ModelMetadataRequest(name="sum", version="0"), timeout=GUARD_S)
    assert (found.name, list(found.versions), found.platform) == ("sum", ["1.0"], "python")
    assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [
        ("a", "FP32", [-1]),
        ("b", "FP32", [-1]),
    ]
    assert found.inputs[1].parameters["content_type"].string_param == "np"
    assert [one.name for one in found.outputs] == ["sum"]


@pytest.mark.parametrize(
    "service", ["inference.GrpcInferenceService", "org.pytorch.serve.grpc.openinference.GRPCInferenceService"]
)
def test_other_names_of_the_service(served: Any, service: str) -> None:
    with grpc.insecure_channel(served.inference) as channel:
        call = channel.unary_unary(
            f"/{service}/ModelReady", pb.ModelReadyRequest.SerializeToString, pb.ModelReadyResponse.FromString
        )
        assert call(pb.ModelReadyRequest(name="sum"), timeout=GUARD_S).ready


# --- tensors


NUMBERS = {
    "BOOL": ("?", [True, False], "bool_contents"),
    "UINT8": ("u1", [0, 255], "uint_contents"),
    "UINT16": ("<u2", [0, 65535], "uint_contents"),
    "UINT32": ("<u4", [0, 2**32 - 1], "uint_contents"),
    "UINT64": ("<u8", [0, 2**64 - 1], "uint64_contents"),
    "INT8": ("i1", [-128, 127], "int_contents"),
    "INT16": ("<i2", [-(2**15), 2**15 - 1], "int_contents"),
    "INT32": ("<i4", [-(2**31), 2**31 - 1], "int_contents"),
    "INT64": ("<i8", [-(2**63), 2**63 - 1], "int64_contents"),
    "FP32": ("<f4", [0.5, -1.25], "fp32_contents"),
    "FP64": ("<f8", [0.1, -1e300], "fp64_contents"),
}


@pytest.mark.parametrize("datatype", [*NUMBERS, "FP16", "BF16"])
def test_raw_tensors_come_back_as_they_were(stub: Stub, datatype: str) -> None:
    dtype, values, _ = NUMBERS.get(datatype, ("<u2", [0x3C00, 0x4000], ""))
    data = np.array(values, dtype).tobytes()
    answer = stub.ModelInfer(raw("same", datatype, [2, 1], data, id="7"), timeout=GUARD_S)
    assert (answer.model_name, answer.model_version, answer.id) == ("same", "1.0", "7")
    assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [("x", datatype, [2, 1])]
    assert list(answer.raw_output_contents) == [data]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_typed_tensors_come_back_typed(stub: Stub, datatype: str) -> None:
    _, values, field = NUMBERS[datatype]
    contents: dict[str, Any] = {field: values}
    answer = stub.ModelInfer(typed("same", datatype, [2], **contents), timeout=GUARD_S)
    assert not answer.raw_output_contents
    assert list(getattr(answer.outputs[0].contents, field)) == values


def test_bytes_both_ways(stub: Stub) -> None:
    values = [b"", b"\xff\x00", "ä".encode()]
    answer = stub.ModelInfer(raw("same", "BYTES", [3], prefixed(*values)), timeout=GUARD_S)
    assert answer.raw_output_contents[0] == prefixed(*values)
    answer = stub.ModelInfer(typed("same", "BYTES", [3], bytes_contents=values), timeout=GUARD_S)
    assert list(answer.outputs[0].contents.bytes_contents) == values


def test_parameters_of_the_request_are_kept_by_type(stub: Stub) -> None:
    request = text("upper", "x")
    request.parameters["n"].int64_param = 1
    request.parameters["d"].double_param = 0.5
    request.parameters["u"].uint64_param = 2**64 - 1
    assert stub.ModelInfer(request, timeout=GUARD_S).raw_output_contents[0] == prefixed(b"X")


def test_several_inputs_of_a_declared_model(stub: Stub) -> None:
    request = pb.ModelInferRequest(
        model_name="sum",
        inputs=[Input(name="a", datatype="FP32", shape=[2]), Input(name="b", datatype="FP32", shape=[2])],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="sum")],
        raw_input_contents=[np.array([1, 2], "f4").tobytes(), np.array([3, 4], "f4").tobytes()],
    )
    answer = stub.ModelInfer(request, timeout=GUARD_S)
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [4.0, 6.0]


def test_numbers_reach_torchserve_handlers_as_lists(stub: Stub) -> None:
    answer = stub.ModelInfer(raw("echo", "FP32", [2, 2], np.ones(4, "f4").tobytes()), timeout=GUARD_S)
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("FP64", [2, 2])


def test_text_in_all_four_forms(stub: Stub) -> None:
    """Prefixed and bare raw bytes, typed bytes, and code points without datatype and shape: answered as asked."""
    assert stub.ModelInfer(text("upper", "ab"), timeout=GUARD_S).raw_output_contents[0] == prefixed(b"AB")
    assert stub.ModelInfer(raw("upper", "BYTES", [1], b"hello"), timeout=GUARD_S).raw_output_contents[0] == b"HELLO"
    answer = stub.ModelInfer(typed("upper", "BYTES", [1], bytes_contents=[b"ab"]), timeout=GUARD_S)
    assert list(answer.outputs[0].contents.bytes_contents) == [b"AB"]
    points = Input(name="prompt", contents=pb.InferTensorContents(int_contents=map(ord, "äb")))
    answer = stub.ModelInfer(
        pb.ModelInferRequest(model_name="upper", model_version="0", inputs=[points]), timeout=GUARD_S
    )
    assert "".join(map(chr, answer.outputs[0].contents.int_contents)) == "ÄB"
    assert not answer.outputs[0].datatype and not answer.outputs[0].shape


# --- streams


def test_one_request_many_answers(stub: Stub) -> None:
    answers = list(stub.ModelInferStream(text("words", "a b c", id="q"), timeout=GUARD_S))
    assert [one.raw_output_contents[0] for one in answers] == [prefixed(b"a "), prefixed(b"b "), prefixed(b"c ")]
    assert {one.id for one in answers} == {"q"}


def test_a_unary_call_to_a_streaming_handler_gets_the_joined_text(stub: Stub) -> None:
    assert stub.ModelInfer(text("words", "a b c"), timeout=GUARD_S).raw_output_contents[0] == prefixed(b"a b c ")
    bare = raw("words", "BYTES", [1], b"hello world")
    assert stub.ModelInfer(bare, timeout=GUARD_S).raw_output_contents[0] == b"hello world "


def test_triton_stream(stub: Stub) -> None:
    """Answers in order, the last of each flagged; a failure in band, and the stream goes on."""
    requests = [text("upper", "one", id="1"), text("nobody", "two", id="2"), text("upper", "three", id="3")]
    answers = list(stub.ModelStreamInfer(iter(requests), timeout=GUARD_S))
    assert [one.infer_response.id for one in answers] == ["1", "2", "3"]
    assert "nobody" in answers[1].error_message and not answers[0].error_message
    assert answers[2].infer_response.raw_output_contents[0] == prefixed(b"THREE")
    assert answers[0].infer_response.parameters["triton_final_response"].bool_param


def test_triton_stream_of_a_streaming_handler(stub: Stub) -> None:
    request = text("words", "a b", id="1")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    answers = list(stub.ModelStreamInfer(iter([request]), timeout=GUARD_S))
    found = [one.infer_response for one in answers]
    assert [one.parameters["triton_final_response"].bool_param for one in found] == [False, False, True]
    assert not found[2].outputs and found[2].id == "1"


def mlserver(served: Any, requests: list[pb.ModelInferRequest], **more: Any) -> Iterator[pb.ModelInferResponse]:
    with grpc.insecure_channel(served.inference) as channel:
        call = channel.stream_stream(
            Stub.ModelStreamInfer_PATH, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        yield from call(iter(requests), timeout=GUARD_S, **more)


def test_mlserver_stream_is_told_by_typed_contents(served: Any) -> None:
    request = typed("words", "BYTES", [1], bytes_contents=[b"a b"])
    answers = list(mlserver(served, [request]))
    assert [one.outputs[0].contents.bytes_contents[0] for one in answers] == [b"a ", b"b "]


def test_answers_of_streaming_handlers_overtake_each_other_in_tritons_dialect_only(stub: Stub, served: Any) -> None:
    """MLServer's clients can't tell whose answer one is: there all requests go into one call."""
    requests = [typed("overtaken", "BYTES", [1], bytes_contents=[word]) for word in (b"late", b"early")]
    answers = list(mlserver(served, requests))
    assert [one.outputs[0].contents.bytes_contents[0] for one in answers] == [b"late", b"early"]
    found = stub.ModelStreamInfer(iter([text("overtaken", "late"), text("overtaken", "early")]), timeout=GUARD_S)
    pieces = [piece for one in found for piece in one.infer_response.raw_output_contents]
    assert pieces == [prefixed(b"early"), prefixed(b"late")]


def test_metadata_names_the_dialect(served: Any) -> None:
    answers = list(mlserver(served, [text("upper", "x")], metadata=[("oip-stream-dialect", "mlserver")]))
    assert answers[0].raw_output_contents[0] == prefixed(b"X")
    with pytest.raises(grpc.RpcError) as caught:
        list(mlserver(served, [text("upper", "x")], metadata=[("oip-stream-dialect", "klingon")]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "klingon" in caught.value.details()


def test_mlserver_stream_ends_with_the_status_of_a_failure(served: Any) -> None:
    requests = [
        typed("upper", "BYTES", [1], bytes_contents=[b"a"]),
        typed("nobody", "BYTES", [1], bytes_contents=[b"a"]),
    ]
    answers = mlserver(served, requests)
    assert next(answers).outputs[0].contents.bytes_contents[0] == b"A"
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# --- what can't be


BAD = {
    "wrong byte count": (raw("same", "FP32", [2], b"123"), ["'x'", "3 bytes", "8"]),
    "negative dimension": (raw("same", "FP32", [-1], b""), ["'x'", "negative"]),
    "overflowing shape": (raw("same", "FP32", [2**62, 2**62], b""), ["'x'", "more elements"]),
    "huge shape without data": (raw("same", "FP32", [2**40], b""), ["'x'", "0 bytes"]),
    "huge shape of BYTES": (raw("same", "BYTES", [2**40], b"1234"), ["'x'"]),
    "unknown datatype": (raw("same", "FP33", [1], b"1234"), ["'x'", "FP33"]),
    "bytes that end early": (raw("same", "BYTES", [2], prefixed(b"a") + b"\x05\0\0\0b"), ["'x'", "element 1"]),
    "elements left over": (raw("same", "BYTES", [2], prefixed(b"a", b"b", b"c")), ["'x'", "left over"]),
    "typed FP16": (typed("same", "FP16", [1], fp32_contents=[1.0]), ["'x'", "FP16", "raw_input_contents"]),
    "wrong field": (typed("same", "FP32", [1], int_contents=[1]), ["'x'", "fp32_contents", "int_contents"]),
    "wrong number of elements": (typed("same", "FP32", [2], fp32_contents=[1.0]), ["'x'", "1 elements"]),
    "element too large": (typed("same", "INT8", [1], int_contents=[300]), ["'x'", "INT8"]),
    "no datatype, no contents": (pb.ModelInferRequest(model_name="same", inputs=[Input(name="x")]), ["'x'"]),
    "missing input": (raw("sum", "FP32", [1], b"1234", name="a"), ["'b'", "missing"]),
    "wrong datatype": (raw("sum", "FP64", [1], b"12345678", name="a"), ["b"]),
    "both raw and typed": (
        pb.ModelInferRequest(
            model_name="same",
            inputs=[Input(name="x", datatype="FP32", shape=[1], contents=pb.InferTensorContents(fp32_contents=[1]))],
            raw_input_contents=[b"1234"],
        ),
        ["both"],
    ),
    "too few raw contents": (
        pb.ModelInferRequest(
            model_name="same",
            inputs=[Input(name="x", datatype="FP32", shape=[1]), Input(name="y", datatype="FP32", shape=[1])],
            raw_input_contents=[b"1234"],
        ),
        ["1", "2 inputs"],
    ),
    "doubled input": (
        pb.ModelInferRequest(model_name="same", inputs=[Input(name="x", datatype="FP32", shape=[0])] * 2),
        ["'x'", "more than once"],
    ),
    "unknown output": (
        raw("same", "FP32", [1], b"1234", outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="z")]),
        ["'z'"],
    ),
    "no model": (pb.ModelInferRequest(), ["model_name"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_name_tensor_and_reason(stub: Stub, case: str) -> None:
    request, words = BAD[case]
    code, details = refusal(stub, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert all(word in details for word in words), details


def test_bytes_that_are_no_request(served: Any) -> None:
    with grpc.insecure_channel(served.inference) as channel:
        call = channel.unary_unary(Stub.ModelInfer_PATH)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff", timeout=GUARD_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "ModelInferRequest" in caught.value.details()


def test_unknown_model_and_version(stub: Stub) -> None:
    assert refusal(stub, text("nobody", "x"))[0] is grpc.StatusCode.NOT_FOUND
    assert refusal(stub, text("upper", "x", model_version="9"))[0] is grpc.StatusCode.NOT_FOUND


def test_a_handler_that_raises_is_an_internal_error(stub: Stub) -> None:
    """Not UNAVAILABLE, which clients answer by asking again."""
    assert refusal(stub, text("raises", "x"))[0] is grpc.StatusCode.INTERNAL


def test_a_result_that_is_no_tensor_is_not_the_clients_fault(stub: Stub) -> None:
    code, details = refusal(stub, text("unsendable", "x"))
    assert code is grpc.StatusCode.INTERNAL and "type set can't be sent" in details


def test_torchserves_own_api_serves_the_same_models(served: Any) -> None:
    assert served.predict("upper", b"abc") == b"ABC"


def test_the_parameter_timeout_ends_what_runs_and_its_handler_knows(stub: Stub) -> None:
    def runs(timeout_us: int) -> bool:
        request = text("waits", "x")
        request.parameters["timeout"].int64_param = timeout_us
        code, details = refusal(stub, request)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        return "given to a worker" in details

    for _ in range(2):  # the second one needs the worker that the first one had
        assert any(map(runs, TIMEOUTS_US))
