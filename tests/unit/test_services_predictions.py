"""The hand-written reader and writer of predictions against protobuf's."""

from __future__ import annotations

import time

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc import predictions
from ts_frontend.grpc.inference import sequence_response
from ts_frontend.grpc.predictions import parse, response
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

names = st.text(max_size=20)
sizes = st.sampled_from([0, 1, 126, 127, 128, 129, 4095, 4096, 16383, 16384, 70000])


def as_protobuf_reads(data: bytes) -> tuple[str, str, dict[str, bytes], str | None] | None:
    try:
        message = PredictionsRequest.FromString(data)
    except DecodeError:
        return None
    sequence_id = message.sequence_id if message.HasField("sequence_id") else None
    return message.model_name, message.model_version, dict(message.input), sequence_id


def as_we_read(data: bytes) -> tuple[str, str, dict[str, bytes], str | None] | None:
    try:
        request = parse("/service/method", data)
    except InvalidArgument:
        return None
    inputs = {part.name: bytes(part.data) for part in request.inputs}
    assert len(inputs) == len(request.inputs)
    return request.name, request.version, inputs, request.sequence_id


@settings(max_examples=60, deadline=None)
@given(name=names, version=names, inputs=st.dictionaries(names, sizes, max_size=4), sequence=st.none() | names)
def test_valid_requests(name: str, version: str, inputs: dict[str, int], sequence: str | None) -> None:
    values = {key: bytes(size) for key, size in inputs.items()}
    message = PredictionsRequest(model_name=name, model_version=version, input=values, sequence_id=sequence)
    assert as_we_read(message.SerializeToString()) == (name, version, values, sequence)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40))
@example(b"\x1a\x06\x12\x01v\x0a\x01k")  # value before key
@example(b"\x1a\x00")  # neither
@example(b"\x1a\x03\x0a\x01k")  # no value
@example(b"\x1a\x06\x0a\x01k\x12\x01a\x1a\x06\x0a\x01k\x12\x01b")  # the last one counts
@example(b"\x0a\x81\x00x")  # a length that is written longer than needed
@example(b"\x0a\x81\x80\x80\x80\x80\x80\x80\x80\x80\x00x")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x")
@example(b"\x0a\x01\xff")  # not UTF-8
@example(b"\x0a\x03\xed\xa0\x80")  # a surrogate
@example(b"\x2a\x01x\x0a\x01m")  # a field of a later definition
@example(b"\x08\x01\x0a\x01m")  # another wire type
@example(b"\x0a\x05m")  # cut short
@example(b"\x1a\x05\x0a\x01k\x12\x05abcde")  # the entry ends before its value
@example(b"\x1a\x09\x0a\x01k\x12\x01a\x1a\x01x")  # an entry with more in it
@example(b"\x1a\x06\x0a\x01\xff\x12\x01a")
@example(b"\x0a")
def test_any_bytes_read_as_protobuf_reads_them(data: bytes) -> None:
    assert as_we_read(data) == as_protobuf_reads(data)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.sampled_from([3, 200, 5000]))
def test_damaged_requests(data: st.DataObject, size: int) -> None:
    message = PredictionsRequest(model_name="m", model_version="1", input={"data": bytes(size), "b": b"x"})
    raw = bytearray(message.SerializeToString(deterministic=True))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for damaged in (bytes(raw), cut):
        assert as_we_read(damaged) == as_protobuf_reads(damaged)


def test_large_inputs_are_not_copied() -> None:
    data = PredictionsRequest(model_name="m", input={"data": bytes(100_000)}).SerializeToString()
    value = parse("/m", data).inputs[0].data
    assert isinstance(value, memoryview)
    assert value.obj is data


def test_inputs_keep_the_order_they_were_sent_in() -> None:
    entries = b"".join(b"\x1a\x06\x0a\x01" + key + b"\x12\x01v" for key in (b"z", b"a", b"m"))
    assert [part.name for part in parse("/m", b"\x0a\x01m" + entries).inputs] == ["z", "a", "m"]


def test_too_many_inputs() -> None:
    inputs = {str(index): b"" for index in range(predictions.INPUTS_MAX + 1)}
    with pytest.raises(InvalidArgument, match="4097 inputs are more than 4096"):
        parse("/m", PredictionsRequest(model_name="m", input=inputs).SerializeToString())


@pytest.mark.parametrize("field", [b"\x1a\x08\x0a\x03key\x12\x01v", b"\x1a\x00", b"\x0a\x01m", b"\x78\x00"], ids=repr)
def test_the_loop_goes_on_while_millions_of_fields_are_refused(field: bytes) -> None:
    """Neither protobuf's parser nor this one begins with them: each would take up to a second."""
    data = field * (6_000_000 // len(field))
    began_s = time.thread_time()
    with pytest.raises(InvalidArgument, match="not a PredictionsRequest: it has more than 4112 fields"):
        parse("/m", data)
    assert time.thread_time() - began_s < 0.1


def test_too_long_input_name() -> None:
    data = PredictionsRequest(model_name="m", input={"é" * 513: b""}).SerializeToString()
    with pytest.raises(InvalidArgument, match="longer than 1024 bytes"):
        parse("/m", data)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2_097_151, 2_097_152])
def test_responses(size: int) -> None:
    value = bytes(size)
    assert PredictionResponse.FromString(response(value)).prediction == value
    assert PredictionResponse.FromString(response(memoryview(value))).prediction == value
    answer = PredictionResponse.FromString(sequence_response(value, "s1"))
    assert (answer.prediction, answer.sequence_id) == (value, "s1")
    assert not PredictionResponse.FromString(sequence_response(value, None)).HasField("sequence_id")
