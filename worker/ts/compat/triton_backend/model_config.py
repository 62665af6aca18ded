"""A model's configuration: the JSON of config.pbtxt, the changes that `auto_complete_config` may make to it, and
`model_warmup`, requests that a model answers before it is ready."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import json_format

from ts.compat.triton_backend.messages import of_config
from ts.protocol import model_config_pb2 as messages
from ts.protocol.datatypes import DATATYPES, Datatype
from ts.protocol.pool import POOL
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.types import Array, BadTensor, InferenceRequest, Tensor, bytes_array, decode_raw, elements, narrowed

Fields = dict[str, Any]
#: The folder, in a model's directory, of the files that samples name.
DIRECTORY = "warmup"
BYTES_MAX = 1 << 30


class ModelConfig:
    """The configuration while `auto_complete_config` completes it. Properties already set may only be repeated."""

    def __init__(self, config: Fields | str) -> None:
        self._config = json.loads(config) if isinstance(config, str) else copy.deepcopy(config)

    def as_dict(self) -> Fields:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError if the configuration has a larger one, which the model couldn't process."""
        known = self._config.get("max_batch_size") or 0
        if known > max_batch_size:
            raise ValueError(f"configuration specified max_batch_size {known}, but the model's is {max_batch_size}")
        self._config["max_batch_size"] = int(max_batch_size)

    def set_dynamic_batching(self) -> None:
        if "sequence_batching" in self._config:
            raise ValueError("configuration specified sequence_batching, and the model sets dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Fields) -> None:
        """Raises ValueError for other properties than `decoupled`, and for a value other than the configuration's."""
        for name in transaction_policy_dict:
            if name != "decoupled":
                raise ValueError(f"model_transaction_policy has the property decoupled, not {name!r}")
        policy = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            decoupled = bool(transaction_policy_dict["decoupled"])
            known = policy.get("decoupled", decoupled)
            if known != decoupled:
                raise ValueError(
                    f"model_transaction_policy.decoupled is {known} in the configuration, {decoupled} here"
                )
            policy["decoupled"] = decoupled

    def add_input(self, input: Fields) -> None:
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Fields) -> None:
        self._add("output", output, ("name", "data_type", "dims"))

    def _add(self, kind: str, tensor: Fields, properties: tuple[str, ...]) -> None:
        for name in tensor:
            if name not in properties:
                raise ValueError(
                    f"{kind} {tensor.get('name')!r}: unknown property {name!r}; one of {', '.join(properties)}"
                )
        for name in ("name", "data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{kind} {tensor.get('name')!r}: property {name!r} is missing")
        known = next((one for one in self._config.setdefault(kind, []) if one["name"] == tensor["name"]), None)
        if known is None:
            self._config[kind].append(dict(tensor))
        elif any(name in known and not _agree(name, known[name], value) for name, value in tensor.items()):
            raise ValueError(f"{kind} {tensor['name']!r} is {known} in the configuration and {tensor} here")
        else:
            known.update(tensor)


def _agree(name: str, known: Any, given: Any) -> bool:
    """Whether a property may take the given value: the configuration has the same value or none."""
    if name == "dims":
        return not known or list(map(int, known)) == list(map(int, given))
    return known == given or (name == "data_type" and known in ("", "TYPE_INVALID"))


def checked(config: Fields) -> Fields:
    """Checks the completed configuration against Triton's messages, and returns it. Raises HandlerNotUsable if they
    can't express it, or if a tensor lacks its data type or dims."""
    try:
        message = json_format.ParseDict(config, messages.ModelConfig(), descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise HandlerNotUsable(f"auto_complete_config made a configuration that can't be used: {error}") from None
    for kind, tensors in (("input", message.input), ("output", message.output)):
        for tensor in tensors:
            if not tensor.data_type or not tensor.dims:
                missing = "dims" if tensor.data_type else "data_type"
                raise HandlerNotUsable(f"{kind} {tensor.name!r} has no {missing}, also after auto_complete_config")
    return config


def signature_of(config: Fields) -> Fields:
    """The model's signature for its metadata: shapes have a leading -1 for the batch if the model takes batches."""
    batch = [-1] if int(config.get("max_batch_size") or 0) > 0 else []

    def specs(kind: str) -> list[Fields]:
        return [
            {
                "name": one["name"],
                "datatype": of_config(one["data_type"]),
                "shape": batch + [int(size) for size in one["dims"]],
                "optional": bool(one.get("optional")),
            }
            for one in config.get(kind) or ()
        ]

    return {
        "platform": config.get("platform") or config.get("backend") or "python",
        "inputs": specs("input"),
        "outputs": specs("output"),
        "decoupled": is_decoupled(config),
    }


def is_decoupled(config: Fields) -> bool:
    return bool((config.get("model_transaction_policy") or {}).get("decoupled"))


# --- model_warmup


class WarmupSample(NamedTuple):
    name: str
    request: InferenceRequest


class NobodyWaits:
    """The context of a warm-up request, which has no client."""

    cancelled = False

    def is_cancelled(self, index: int | None = None) -> bool:
        return False


def warmup_samples(config: dict[str, Any], model_dir: Path) -> Iterator[WarmupSample]:
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


def check_warmup(sample: WarmupSample, answers: list[Any]) -> None:
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
