"""A model's configuration: the JSON of config.pbtxt, and the changes that `auto_complete_config` may make to it."""

from __future__ import annotations

import copy
import json
from typing import Any

from google.protobuf import json_format

from ts.compat.triton_backend.messages import of_config
from ts.protocol import model_config_pb2 as messages
from ts.protocol.pool import POOL
from ts.runtime.handlers import HandlerNotUsable

Fields = dict[str, Any]


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
