"""A model's tensor declarations, for metadata, for the checks of its requests, and as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from ts.protocol.datatypes import DATATYPES
from ts_frontend.errors import InvalidArgument
from ts_frontend.models.settings import ModelSettings

KEY = "openInference"
#: The platform of language models.
LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. `shape`: -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signature:
    """`platform` is "" when none is declared; `decoupled`: a request may have any number of answers, at any time;
    `parameters`: datatypes of requests' parameters that are numbers, by name; `metadata`: parameters of the model
    itself, for metadata calls (MLServer's)."""

    platform: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def declared(self) -> bool:
        return bool(self.inputs or self.outputs)

    def for_worker(self) -> dict[str, Any]:
        return {
            "inputs": {spec.name: _for_worker(spec) for spec in self.inputs},
            "outputs": {spec.name: _for_worker(spec) for spec in self.outputs},
            "parameters": dict(self.parameters),
        }


def _for_worker(spec: TensorSpec) -> dict[str, Any]:
    return {"datatype": spec.datatype, "shape": list(spec.shape), "optional": spec.optional}


def signature_of(config: Mapping[str, Any]) -> Signature:
    """The signature under `openInference` in a model-config.yaml. Raises InvalidArgument, naming the invalid key."""
    found = config.get(KEY)
    if found is None:
        return Signature()
    if not isinstance(found, dict):
        raise InvalidArgument(f"{KEY} in the model's configuration is a mapping, not {found!r}")
    unknown = set(found) - {"platform", "inputs", "outputs", "decoupled", "parameters"}
    if unknown:
        raise InvalidArgument(
            f"{KEY} in the model's configuration has unknown keys: {', '.join(sorted(map(str, unknown)))}"
        )
    return signature_from(found)


def signature_from(found: Mapping[str, Any]) -> Signature:
    """A signature from its parts. Raises InvalidArgument."""
    return Signature(
        str(found.get("platform") or ""),
        specs_of(found.get("inputs"), f"{KEY}.inputs"),
        specs_of(found.get("outputs"), f"{KEY}.outputs"),
        bool(found.get("decoupled", False)),
        _parameters(found.get("parameters"), f"{KEY}.parameters"),
        dict(found.get("metadata") or {}),
    )


def _parameters(value: Any, label: str) -> dict[str, str]:
    """A mapping of names to datatypes. Raises InvalidArgument, naming `label`."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"{label} is a mapping of names to datatypes, not {value!r}")
    for name, datatype in value.items():
        if not isinstance(datatype, str) or datatype not in DATATYPES:
            raise InvalidArgument(
                f"{label}.{name}: unknown datatype {datatype!r}; one of {', '.join(sorted(DATATYPES))}"
            )
    return {str(name): datatype for name, datatype in value.items()}


def specs_of(value: Any, label: str) -> tuple[TensorSpec, ...]:
    """A list of `{name, datatype, shape, optional?, parameters?}`. Raises InvalidArgument, naming `label`."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidArgument(f"{label} is a list, not {value!r}")
    found = tuple(_spec(one, f"{label}[{index}]") for index, one in enumerate(value))
    names = [spec.name for spec in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"{label} has the name {name!r} twice")
    return found


def _spec(value: Any, label: str) -> TensorSpec:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise InvalidArgument(f"{label} is a mapping with a name, a datatype and a shape, not {value!r}")
    datatype, shape = value.get("datatype"), value.get("shape", [-1])
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise InvalidArgument(f"{label}: unknown datatype {datatype!r}; one of {', '.join(sorted(DATATYPES))}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= -1 for size in shape):
        raise InvalidArgument(f"{label}: shape is a list of sizes, -1 for any, not {shape!r}")
    parameters = value.get("parameters") or {}
    return TensorSpec(value["name"], datatype, tuple(shape), bool(value.get("optional", False)), parameters)


def made_config(name: str, signature: Signature, settings: ModelSettings, workers: int) -> dict[str, Any]:
    """A config.pbtxt as JSON for a model without one. max_batch_size is 0, so that shapes are complete."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [
            {"name": spec.name, "data_type": DATATYPES[spec.datatype].config_type, "dims": list(spec.shape)}
            for spec in specs
        ]

    return {
        "name": name,
        "platform": signature.platform,
        "backend": "python",
        "max_batch_size": 0,
        "input": tensors(signature.inputs),
        "output": tensors(signature.outputs),
        "instance_group": [
            {"name": name, "kind": "KIND_GPU" if settings.device_type == "gpu" else "KIND_CPU", "count": workers}
        ],
        "parameters": {"batch_size": {"string_value": str(settings.batch_size)}},
        "model_transaction_policy": {"decoupled": signature.decoupled},
    }


def as_json(message: Message) -> dict[str, Any]:
    """A message as JSON with its proto's names: enums by name (or number), numbers as numbers, unset scalars too."""
    found: dict[str, Any] = {}
    for member in message.DESCRIPTOR.fields:
        value = getattr(message, member.name)
        entry = member.message_type
        if entry is not None and entry.GetOptions().map_entry:
            found[member.name] = {str(key): _json(entry.fields_by_name["value"], one) for key, one in value.items()}
        elif hasattr(value, "__len__") and not isinstance(value, str):
            found[member.name] = [_json(member, one) for one in value]
        elif not member.has_presence or message.HasField(member.name):
            found[member.name] = _json(member, value)
    return found


def _json(member: Any, value: Any) -> Any:
    if member.message_type is not None:
        return as_json(value)
    if member.enum_type is not None:
        known = member.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value
