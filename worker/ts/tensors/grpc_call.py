"""The client's side of the gRPC form: ModelInferRequest out, ModelInferResponse in, with raw contents."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from ts.protocol.frames import Buffer
from ts.protocol.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from ts.tensors.datatypes import BadTensor, datatype, decode_raw, encode_raw
from ts.tensors.forms import payload
from ts.tensors.grpc_form import fill, parameters
from ts.tensors.types import InferenceRequest, InferenceResponse, Tensor


def request_bytes(request: InferenceRequest) -> bytes:
    """A serialised ModelInferRequest."""
    message = ModelInferRequest(model_name=request.model_name, model_version=request.model_version, id=request.id)
    fill(message.parameters, request.parameters)
    for tensor in request.inputs:
        there = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        fill(there.parameters, tensor.parameters)
        message.raw_input_contents.append(encode_raw(tensor.datatype, tensor.array))
    for output in request.outputs:
        fill(message.outputs.add(name=output.name).parameters, output.parameters)
    return message.SerializeToString()


def response_of(data: Buffer) -> InferenceResponse:
    """What a serialised ModelInferResponse says. Raises BadTensor for anything else."""
    try:
        message = ModelInferResponse.FromString(payload(data))
    except DecodeError as error:
        raise BadTensor(f"the {len(data)} bytes of the answer are not a ModelInferResponse: {error}") from None
    outputs = [
        Tensor(
            tensor.name,
            tensor.datatype,
            decode_raw(datatype(tensor.datatype, f"output {tensor.name!r}"), list(tensor.shape), raw, tensor.name),
            parameters(tensor.parameters),
        )
        for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    return InferenceResponse(
        outputs, message.id, message.model_name, message.model_version, parameters(message.parameters)
    )
