"""`model_warmup` of config.pbtxt: requests that a model answers before it is ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ts.compat.triton_backend.messages import of_config
from ts.protocol.datatypes import DATATYPES, Datatype
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.types import Array, BadTensor, InferenceRequest, Tensor, bytes_array, decode_raw, elements, narrowed

#: The folder, in a model's directory, of the files that samples name.
DIRECTORY = "warmup"
BYTES_MAX = 1 << 30


class WarmupSample(NamedTuple):
    name: str
    request: InferenceRequest


class NobodyWaits:
    """The context of a warm-up request, which has no client."""

    cancelled = False

    def is_cancelled(self, index: int | None = None) -> bool:
        return False


def samples(config: dict[str, Any], model_dir: Path) -> Iterator[WarmupSample]:
    """Yields each sample `count` times. Raises HandlerNotUsable, naming the sample, for one that can't be made."""
    batched = int(config.get("max_batch_size") or 0) > 0
    for one in config.get("model_warmup") or ():
        name = str(one.get("name") or "")
        size = int(one.get("batch_size") or 0)
        batch = [max(size, 1)] if batched else []
        try:
            tensors = [_tensor(key, given, batch, model_dir) for key, given in (one.get("inputs") or {}).items()]
        except (BadTensor, OSError, KeyError) as error:
            raise HandlerNotUsable(f"model_warmup {name!r}: {error}") from error
        for _ in range(max(int(one.get("count") or 0), 1)):
            yield WarmupSample(name, InferenceRequest(list(tensors)))


def check(sample: WarmupSample, answers: list[Any]) -> None:
    """Raises HandlerNotUsable if the model failed the sample."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise HandlerNotUsable(f"model_warmup {sample.name!r} failed: {getattr(answer, 'message', answer)}")


def _tensor(name: str, given: dict[str, Any], batch: list[int], model_dir: Path) -> Tensor:
    datatype, label = of_config(given["data_type"]), f"input {name!r}"
    shape = batch + [int(size) for size in given.get("dims") or ()]
    kind = DATATYPES.get(datatype)
    if kind is None:
        raise BadTensor(f"{label}: unknown datatype {datatype!r}")
    count = elements(shape, label)
    if count * max(kind.size_bytes, 1) > BYTES_MAX:
        raise BadTensor(f"{label}: shape {shape} takes over {BYTES_MAX} bytes")
    if given.get("input_data_file"):
        return Tensor(name, datatype, decode_raw(kind, shape, _file(model_dir, given["input_data_file"]), label))
    return Tensor(name, datatype, _made(kind, shape, count, random=bool(given.get("random_data"))))


def _made(kind: Datatype, shape: list[int], count: int, *, random: bool) -> Array:
    if kind.element is bytes:
        return bytes_array([b"warm-up" if random else b""] * count, shape)
    if not random:
        return np.zeros(shape, kind.dtype)
    generator = np.random.default_rng(0)
    if kind.element is float:
        numbers = generator.random(shape)
        return narrowed(kind, numbers) if kind.as_bits else numbers.astype(kind.dtype)
    return generator.integers(0, 2 if kind.element is bool else 100, shape).astype(kind.dtype)


def _file(model_dir: Path, name: str) -> bytes:
    place = (model_dir / DIRECTORY).resolve()
    file = (place / name).resolve()
    if not file.is_relative_to(place):
        raise BadTensor(f"input_data_file {name!r} leads out of the directory {DIRECTORY}")
    if file.stat().st_size > BYTES_MAX:
        raise BadTensor(f"input_data_file {name!r} is larger than {BYTES_MAX} bytes")
    return file.read_bytes()
