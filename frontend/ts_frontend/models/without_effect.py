"""Fields of a config.pbtxt that are read, shown to the model and to clients, and have no effect: one table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from ts.protocol.model_config_pb2 import ModelConfig
from ts_frontend.config.kinds import no_effect

_OTHERS = "it is for backends that this server doesn't have"
_ORDER = "a batch takes what waits, and answers go out as they come"
_GPUS = "the model places its tensors itself"

#: Paths of fields, and why each does nothing here.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "runtime": _OTHERS,
        "cc_model_filenames": _OTHERS,
        "batch_input": _OTHERS,
        "batch_output": _OTHERS,
        "optimization": _OTHERS,
        "model_operations": _OTHERS,
        "model_repository_agents": "there are no agents here: the files are used as they lie there",
        "response_cache": "every request runs: there is no cache of answers",
        "metric_tags": "metrics have the labels that docs/metrics.md lists",
        "model_metrics": "metrics have the buckets that docs/metrics.md lists",
        "input.format": "an input is what its dims say",
        "input.is_shape_tensor": _OTHERS,
        "input.is_non_linear_format_io": _OTHERS,
        "input.allow_ragged_batch": "requests share a run only if their shapes agree",
        "output.is_shape_tensor": _OTHERS,
        "output.is_non_linear_format_io": _OTHERS,
        "instance_group.rate_limiter": "a worker takes requests whenever it is free",
        "instance_group.profile": _OTHERS,
        "instance_group.secondary_devices": _GPUS,
        "instance_group.host_policy": _GPUS,
        "dynamic_batching.preferred_batch_size": _ORDER,
        "dynamic_batching.preserve_ordering": _ORDER,
        "sequence_batching.direct.max_queue_delay_microseconds": _ORDER,
        "sequence_batching.direct.minimum_slot_utilization": _ORDER,
        "sequence_batching.oldest.preferred_batch_size": _ORDER,
        "sequence_batching.oldest.max_queue_delay_microseconds": _ORDER,
        "sequence_batching.oldest.preserve_ordering": _ORDER,
    }
)


def notes(config: ModelConfig, source: str) -> Iterator[str]:
    """A sentence for each such field that the configuration of `source` sets."""
    for path, why in FIELDS.items():
        if _given(config, path.split(".")):
            yield no_effect(path, source, why)


def _given(message: Message, names: Sequence[str]) -> bool:
    """Whether the field at the path is set, in any of the messages on its way, to something else than its default."""
    found: Any = getattr(message, names[0])
    if len(names) == 1:
        return bool(found.ByteSize()) if isinstance(found, Message) else bool(found)
    inner = [found] if isinstance(found, Message) else found
    return any(_given(one, names[1:]) for one in inner)


def fields_table() -> Iterator[str]:
    """The table of the documentation, line by line."""
    yield "| field | why |"
    yield "|---|---|"
    for path, why in FIELDS.items():
        yield f"| `{path}` | {why} |"
