"""One server for the clients of the Open Inference Protocol, with models that take every kind of tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

ECHO = """
import numpy as np

def handle(data, context):
    return None if data is None else [{name: np.array(value) for name, value in row.items()} for row in data]
"""
SUM = """
import numpy as np

class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [{"sum": np.array(row["a"], "f4") + np.array(row["b"], "f4")} for row in data]
"""
SUM_CONFIG = """
openInference:
  platform: python
  inputs:
    - {name: a, datatype: FP32, shape: [-1]}
    - {name: b, datatype: FP32, shape: [-1], parameters: {content_type: np}}
  outputs:
    - {name: sum, datatype: FP32, shape: [-1]}
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
WORDS = """
def handle(data, context):
    for word in () if data is None else bytes(data[0]["data"]).decode().split():
        yield [word + " "]
"""
#: Answers a request "late" after another one has been answered.
OVERTAKEN = """
import asyncio

OTHERS = asyncio.Event()

async def handle(data, context):
    word = "" if data is None else bytes(data[0]["data"]).decode()
    if word == "late":
        OTHERS.clear()
        await OTHERS.wait()
    yield [word]
    if word != "late":
        OTHERS.set()
"""
RAISES = """
def handle(data, context):
    if data is not None:
        raise ValueError("no")
"""
#: Runs until nobody waits for it any more.
WAITS = """
import time

def handle(data, context):
    while data is not None and not context.is_cancelled(0):
        time.sleep(0.001)
    return data
"""
UNSENDABLE = """
def handle(data, context):
    return None if data is None else [{1, 2} for row in data]
"""
#: Answers with the tensor it got, through the runtime's own types: every datatype comes back as it was.
SAME = """
from ts.tensors.types import InferenceResponse

def handle(data, context):
    return None if data is None else [InferenceResponse(row.request.inputs) for row in data]
"""
#: Counts until nobody listens any more.
ENDLESS = """
import itertools

def handle(data, context):
    for number in () if data is None else itertools.count(1):
        yield [f"{number} "]
"""
#: Says that it honours a parameter that asks for another text.
BIASED = """
openai_honours = ("response_format",)

def handle(data, context):
    return None if data is None else [str(row.request.parameters) for row in data]
"""
#: Says how many tokens it read and wrote, and why it stopped.
COUNTED = """
from ts.tensors.types import InferenceResponse, Tensor

def answer(row):
    words, wanted = bytes(row["data"]).decode().split(), row.request.parameters["max_tokens"]
    said = {"prompt_tokens": len(words), "completion_tokens": wanted, "finish_reason": "length"}
    return InferenceResponse([Tensor.of("text", " ".join(words[:wanted]))], parameters=said)

def handle(data, context):
    return None if data is None else [answer(row) for row in data]
"""
MODELS = {
    "biased": (BIASED, ""),
    "counted": (COUNTED, ""),
    "echo": (ECHO, ""),
    "endless": (ENDLESS, ""),
    "sum": (SUM, SUM_CONFIG),
    "upper": (UPPER, ""),
    "overtaken": (OVERTAKEN, ""),
    "words": (WORDS, ""),
    "raises": (RAISES, ""),
    "same": (SAME, ""),
    "unsendable": (UNSENDABLE, ""),
    "waits": (WAITS, ""),
}


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    """A running server with all of them."""
    with server_of(MODELS) as server:
        yield server


@pytest.fixture
def stub(served: Any) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(served.inference) as channel:
        yield GRPCInferenceServiceStub(channel)
