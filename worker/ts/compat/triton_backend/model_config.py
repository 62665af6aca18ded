"""A model's configuration: the JSON of config.pbtxt, and what `auto_complete_config` may change of it."""

from __future__ import annotations

import copy
import json
from typing import Any

from ts.compat.triton_backend.datatypes import of_config

Fields = dict[str, Any]


class ModelConfig:
    """The configuration while `auto_complete_config` completes it. What is there already may only be repeated."""

    def __init__(self, config: Fields | str) -> None:
        self._config = json.loads(config) if isinstance(config, str) else copy.deepcopy(config)

    def as_dict(self) -> Fields:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """A size that is set already stays, if it is smaller."""
        known = self._config.get("max_batch_size", 0)
        if known and known < max_batch_size:
            raise ValueError(f"configuration specified max_batch_size {known}, but the model's is {max_batch_size}")
        if not known:
            self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        if "sequence_batching" in self._config:
            raise ValueError("configuration specified sequence_batching, and the model sets dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Fields) -> None:
        decoupled = transaction_policy_dict.get("decoupled")
        known = self._config.get("model_transaction_policy", {}).get("decoupled")
        if known is not None and known != decoupled:
            raise ValueError(f"model_transaction_policy.decoupled is {known} in the configuration and {decoupled} here")
        self._config["model_transaction_policy"] = {"decoupled": bool(decoupled)}

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
        elif (known["data_type"], list(map(int, known["dims"]))) != (tensor["data_type"], list(tensor["dims"])):
            raise ValueError(f"{kind} {tensor['name']!r} is {known} in the configuration and {tensor} here")


def signature_of(config: Fields) -> Fields:
    """What metadata says of the model: a leading -1 for the batch, when it takes batches."""
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
