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
    "wrong field": (typed("same", "FP32", [1], int_contents=[1]), ["'x'", "fp32_contents", "int_contents"]),
    "missing input": (raw("sum", "FP32", [1], b"1234", name="a"), ["'b'", "missing"]),
    "both raw and typed": (
        pb.ModelInferRequest(
            model_name="same",
            inputs=[Input(name="x", datatype="FP32", shape=[1], contents=pb.InferTensorContents(fp32_contents=[1]))],
            raw_input_contents=[b"1234"],
        ),
        ["both"],
    ),
    "unknown output": (
        raw("same", "FP32", [1], b"1234", outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="z")]),
        ["'z'"],
    ),
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


def test_a_handler_that_raises_is_an_internal_error(stub: Stub) -> None:
    """Not UNAVAILABLE, which clients answer by asking again."""
    assert refusal(stub, text("raises", "x"))[0] is grpc.StatusCode.INTERNAL


def test_a_result_that_is_no_tensor_is_not_the_clients_fault(stub: Stub) -> None:
    code, details = refusal(stub, text("unsendable", "x"))
    assert code is grpc.StatusCode.INTERNAL and "type set can't be sent" in details


def test_the_parameter_timeout_ends_what_runs_and_its_handler_knows(stub: Stub) -> None:
    def runs(timeout_us: int) -> bool:
        request = text("waits", "x")
        request.parameters["timeout"].int64_param = timeout_us
        code, details = refusal(stub, request)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        return "given to a worker" in details

    for _ in range(2):  # the second one needs the worker that the first one had
        assert any(map(runs, TIMEOUTS_US))
