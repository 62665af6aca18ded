"""Models for clients: sums, an echo, words one by one, and one that runs until it is cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SUM = """
import numpy as np

def handle(data, context):
    return None if data is None else [{"sum": np.array(row["a"], "f4") + np.array(row["b"], "f4")} for row in data]
"""
SUM_CONFIG = """
openInference:
  platform: python
  inputs:
    - {name: a, datatype: FP32, shape: [-1]}
    - {name: b, datatype: FP32, shape: [-1]}
  outputs:
    - {name: sum, datatype: FP32, shape: [-1]}
"""
SAME = """
from ts.tensors.types import InferenceResponse

def handle(data, context):
    return None if data is None else [InferenceResponse(row.request.inputs) for row in data]
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
WORDS = """
def text(row):
    (value,) = row.values()
    return value if isinstance(value, str) else bytes(value).decode()

def handle(data, context):
    for word in () if data is None else text(data[0]).split():
        if word == "fail":
            raise ValueError("no such word")
        yield [word + " "]
"""
#: Says a piece, waits a little, and again, until nobody listens; then it says so in its log.
ENDLESS = """
import asyncio

async def handle(data, context):
    if data is None:
        return
    try:
        while True:
            yield ["tick "]
            await asyncio.sleep(0.05)
    finally:
        print("endless was left", flush=True)
"""
MODELS = {
    "sum": (SUM, SUM_CONFIG),
    "same": (SAME, ""),
    "upper": (UPPER, "batchSize: 8\nmaxBatchDelay: 5\n"),
    "words": (WORDS, ""),
    "endless": (ENDLESS, ""),
}


@pytest.fixture(scope="session")
def stocked(write_to: Callable[..., str]) -> Callable[[Path], Path]:
    """`stocked(folder)`: a model store there with all of them."""

    def stock(folder: Path) -> Path:
        store = folder / "store"
        store.mkdir()
        for name, (source, config) in MODELS.items():
            write_to(store, name, source, config=config)
        return store

    return stock


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    """A running server with all of them."""
    with server_of(MODELS) as server:
        yield server
