"""Triton's models: a directory with a config.pbtxt and a folder for each version. Blocking."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from ts.protocol.datatypes import OF_NUMBER
from ts.protocol.model_config_pb2 import ModelConfig
from ts.protocol.pool import POOL
from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import grouped, no_effect
from ts_frontend.config.parameters import WORKERS_MAX
from ts_frontend.errors import InvalidArgument
from ts_frontend.graphs.graph import Ensemble, Step, make_ensemble
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.format import ModelFiles, ModelFormat
from ts_frontend.models.inspection import may_need_torch
from ts_frontend.models.settings import Signature, TensorSpec, as_json
from ts_frontend.scheduling.batcher import Priorities, WaitPolicy
from ts_frontend.workers.resources import Need, Needs

log = logging.getLogger(__name__)

ADAPTER = "triton"
#: The platform of models without a backend, whose requests go to other models.
ENSEMBLE = "ensemble"
#: The backends that are served, and the file that each looks for in a version's directory.
MODEL_FILES = {"python": "model.py", "pytorch": "model.pt", "onnxruntime": "model.onnx"}
#: Also a file of backend `pytorch`: a program of torch.export.
PROGRAM_FILE = "model.pt2"
_BACKENDS_OF_PLATFORMS = {"pytorch_libtorch": "pytorch", "onnxruntime_onnx": "onnxruntime"}
_PLATFORMS = {backend: platform for platform, backend in _BACKENDS_OF_PLATFORMS.items()}
#: Triton's default idle time, the most waiting requests of one sequence, and the most sequences that wait for workers.
_SEQUENCE_IDLE_US, _SEQUENCE_REQUESTS_MAX, _SEQUENCES_WAITING_MAX = 1_000_000, 100, 1000
_GROUP_KIND_AUTO, _GROUP_KIND_GPU, _GROUP_KIND_CPU = 0, 1, 2

_OTHERS = "it is for backends that this server doesn't have"
_ORDER = "a batch takes the waiting requests, and answers are sent as soon as they are ready"
_GPUS = "the model places its tensors itself"

#: Fields of a config.pbtxt that are read, shown to the model and to clients, and have no effect: their paths, and why.
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "runtime": _OTHERS,
        "cc_model_filenames": _OTHERS,
        "batch_input": _OTHERS,
        "batch_output": _OTHERS,
        "optimization": _OTHERS,
        "model_operations": _OTHERS,
        "model_repository_agents": "there are no agents here: the files are used as they are",
        "metric_tags": "metrics have the labels that docs/metrics.md lists",
        "model_metrics": "metrics have the buckets that docs/metrics.md lists",
        "input.format": "only an input's dims count",
        "input.is_shape_tensor": _OTHERS,
        "input.is_non_linear_format_io": _OTHERS,
        "input.allow_ragged_batch": "requests share a run only if their shapes agree",
        "output.is_shape_tensor": _OTHERS,
        "output.is_non_linear_format_io": _OTHERS,
        "ensemble_scheduling.max_inflight_requests": "answers of a decoupled step go through the next ones one by one",
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


class TritonFormat(ModelFormat):
    """`gpus`: the number of GPUs to place workers on; `workers`: the number for a model without instance groups, 0 for
    Triton's own, one for each GPU."""

    adapter = ADAPTER
    versioned = True

    def __init__(self, gpus: int, workers: int = 0) -> None:
        self._gpus, self._workers = gpus, workers

    def matches(self, path: Path) -> bool:
        """The sign is a config.pbtxt or a version's directory. Raises OSError."""
        return path.is_dir() and (self.claims(path) or bool(_versions(path)))

    def claims(self, path: Path) -> bool:
        return (path / CONFIG_FILE).is_file()

    def open(self, files: ModelFiles) -> list[Archive]:
        directory = read(files.directory, files.config_text, files.name)
        for note in notes_without_effect(directory.config, f"{CONFIG_FILE} of model {directory.name}"):
            log.warning("%s", note)
        if self._workers:
            directory = directory.with_workers(self._workers, self._gpus)
        return [directory.archive(version, self._gpus) for version in directory.versions]

    def default_version(self, archives: Sequence[Archive]) -> str | None:
        """The highest number, None unless all versions are numbers."""
        numbers = [int(one.version) for one in archives if _VERSION.fullmatch(one.version)]
        return str(max(numbers)) if len(numbers) == len(archives) else None


def parse(text: str, source: str) -> ModelConfig:
    """The configuration in the text of a config.pbtxt. Raises InvalidArgument, naming `source`, line and column."""
    if "\\" * (BACKSLASHES_MAX + 1) in text:
        raise InvalidArgument(f"{source}: more than {BACKSLASHES_MAX} backslashes in a row")
    try:
        config: ModelConfig = text_format.Parse(text, ModelConfig(), descriptor_pool=POOL)
    except (text_format.ParseError, ValueError) as error:  # a ValueError: a number too large for its field
        said = str(error)  # it has the whole line
        raise InvalidArgument(f"{source}: {said if len(said) <= SAID_MAX else said[:SAID_MAX] + ' …'}") from None
    return config


def from_json(found: dict[str, Any], source: str) -> ModelConfig:
    """The configuration from the JSON of `as_json`. Raises InvalidArgument, naming `source`."""
    try:
        config: ModelConfig = json_format.ParseDict(found, ModelConfig(), descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise InvalidArgument(f"{source}: {error}") from None
    return config


def checked(config: ModelConfig, name: str, source: str) -> ModelConfig:
    """The configuration of the model in the directory `name`, checked. Raises InvalidArgument if it can't be served."""
    if config.name and config.name != name:
        raise InvalidArgument(f"{source}: name is {config.name!r}, but the model's directory is {name!r}")
    if config.max_batch_size < 0:
        raise InvalidArgument(f"{source}: max_batch_size is {config.max_batch_size}, it can't be negative")
    completes_itself = not _is_ensemble(config, source) and backend_of(config, source) in ("", "python")
    for kind, tensors in (("input", config.input), ("output", config.output)):
        _check_tensors(kind, tensors, source, whole=not completes_itself)
    for sample in config.model_warmup:
        for key, given in sample.inputs.items():
            _check_type(given.data_type, f"{source}: input {key!r} of model_warmup {sample.name!r}")
    _check_sequences(config, source)
    _check_priorities(config, source)
    return config


def _is_ensemble(config: ModelConfig, source: str) -> bool:
    """Raises InvalidArgument if it is half an ensemble."""
    given = config.HasField("ensemble_scheduling")
    if given != (config.platform == ENSEMBLE) and (config.platform or config.backend):
        raise InvalidArgument(
            f"{source}: platform is {config.platform or config.backend!r}, and ensemble_scheduling is "
            f"{'' if given else 'not '}given: an ensemble has platform {ENSEMBLE!r} and ensemble_scheduling"
        )
    return given


def ensemble_of(config: ModelConfig, source: str) -> Ensemble | None:
    """The ensemble's steps, None for another model. Raises InvalidArgument, naming the step and the tensor."""
    if not _is_ensemble(config, source):
        return None
    steps = []
    for number, step in enumerate(config.ensemble_scheduling.step, 1):
        name, version = f"step {number} ({step.model_name})", step.model_version
        if step.model_namespace:
            raise InvalidArgument(f"{source}: {name}: model_namespace is not supported: model names are unique here")
        if version < -1 or version == 0:
            raise InvalidArgument(f"{source}: {name}: model_version is a version or -1, not {version}")
        steps.append(
            Step(
                name,
                step.model_name,
                str(version) if version > 0 else "",
                dict(sorted(step.input_map.items())),
                dict(sorted(step.output_map.items())),
            )
        )
    inputs, outputs = [one.name for one in config.input], [one.name for one in config.output]
    return make_ensemble(steps, inputs, outputs, source, config.max_batch_size)


def _check_tensors(kind: str, tensors: Iterable[Any], source: str, *, whole: bool) -> None:
    """Checks the names, data types and dims of tensors. `whole`: data_type and dims are required."""
    seen: set[str] = set()
    for tensor in tensors:
        if not tensor.name or tensor.name in seen:
            raise InvalidArgument(f"{source}: {kind} {tensor.name!r} is given twice or has no name")
        seen.add(tensor.name)
        if whole and not tensor.data_type:
            raise InvalidArgument(f"{source}: {kind} {tensor.name!r} has no data_type")
        _check_type(tensor.data_type, f"{source}: {kind} {tensor.name!r}")
        if whole and not tensor.dims:
            raise InvalidArgument(f"{source}: {kind} {tensor.name!r} has no dims")
        for size in tensor.dims:
            if size < -1 or size == 0:
                raise InvalidArgument(f"{source}: {kind} {tensor.name!r}: a dimension is -1 or at least 1, not {size}")


def _check_type(number: int, what: str) -> None:
    """Raises InvalidArgument for an unknown number, which protobuf's text format accepts; `what` begins it."""
    if number and number not in OF_NUMBER:
        first, last = min(OF_NUMBER), max(OF_NUMBER)
        names = f"{OF_NUMBER[first].config_type} to {OF_NUMBER[last].config_type}"
        raise InvalidArgument(f"{what}: there is no data_type {number}: {names} are {first} to {last}")


def _check_sequences(config: ModelConfig, source: str) -> None:
    sequences = config.sequence_batching
    if len(sequences.state):
        raise InvalidArgument(f"{source}: sequence_batching.state is not supported: the model keeps its state itself")
    if sequences.iterative_sequence:
        raise InvalidArgument(f"{source}: sequence_batching.iterative_sequence is not supported")
    for one in sequences.control_input:
        for control in one.control:
            _check_type(control.data_type, f"{source}: control input {one.name!r}")
            if control.data_type == 0 and control.kind == type(control).CONTROL_SEQUENCE_CORRID:
                raise InvalidArgument(f"{source}: control input {one.name!r} needs a data_type")


def backend_of(config: ModelConfig, source: str) -> str:
    """The model's backend, "" when the configuration names none. Raises InvalidArgument for an unsupported one."""
    found = config.backend or _BACKENDS_OF_PLATFORMS.get(config.platform, config.platform)
    if found and found not in MODEL_FILES:
        raise InvalidArgument(f"{source}: backend {found!r} is not served; one of {', '.join(MODEL_FILES)}")
    return found


def completed(config: ModelConfig, name: str, backend: str) -> ModelConfig:
    """The configuration completed with its name, its backend and Triton's defaults."""
    full = ModelConfig()
    full.CopyFrom(config)
    full.name, full.backend = name, backend
    full.platform = full.platform or _PLATFORMS.get(backend, "" if backend else ENSEMBLE)
    full.default_model_filename = full.default_model_filename or MODEL_FILES.get(backend, "")
    if not full.version_policy.WhichOneof("policy_choice"):
        full.version_policy.latest.num_versions = 1
    if not full.instance_group and backend:
        full.instance_group.add(name=name, count=1)
    return full


def placed(config: ModelConfig, gpus: int) -> ModelConfig:
    full = ModelConfig()
    full.CopyFrom(config)
    for index, group in enumerate(full.instance_group):
        group.name = group.name or f"{full.name}_{index}"
        if group.kind == _GROUP_KIND_AUTO:
            group.kind = _GROUP_KIND_GPU if gpus else _GROUP_KIND_CPU
        if group.kind == _GROUP_KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))
    return full


def chosen(config: ModelConfig, versions: list[int]) -> list[int]:
    """The versions that the policy selects among `versions`, in ascending order."""
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return sorted(versions)
    if choice == "specific":
        return sorted(set(policy.specific.versions) & set(versions))
    return sorted(versions)[-(policy.latest.num_versions or 1) :]


def signature(config: ModelConfig) -> Signature:
    """The model's signature for metadata, with a leading -1 for the batch when the model takes batches."""
    batch = (-1,) if config.max_batch_size else ()
    return Signature(
        config.platform or config.backend,
        tuple(_spec(one, batch, one.optional) for one in config.input if one.data_type),
        tuple(_spec(one, batch, False) for one in config.output if one.data_type),
        config.model_transaction_policy.decoupled,
    )


def _spec(tensor: Any, batch: tuple[int, ...], optional: bool) -> TensorSpec:
    return TensorSpec(tensor.name, OF_NUMBER[tensor.data_type].name, (*batch, *tensor.dims), optional)


def worker_settings(config: ModelConfig, gpus: int) -> dict[str, Any]:
    """The scheduling of a config.pbtxt in the keys of a model-config.yaml; `gpus`: the number of GPUs.

    A batch is a number of requests here, independent of their own batch dimensions.
    """
    found: dict[str, Any] = {"batchSize": 1}
    if config.platform == ENSEMBLE:
        return found | ({"cache": True} if config.response_cache.enable else {})
    if config.HasField("dynamic_batching"):
        dynamic = config.dynamic_batching
        found["batchSize"] = max(config.max_batch_size, 1)
        if dynamic.max_queue_delay_microseconds:
            found["maxBatchDelay"] = max(round(dynamic.max_queue_delay_microseconds / 1000), 1)
        jobs_max = (priorities(config) or Priorities(policy=_wait_policy(dynamic.default_queue_policy))).jobs_max
        if jobs_max:
            found["jobQueueSize"] = jobs_max
    if config.response_cache.enable:
        found["cache"] = True
    placement = _placement(config, gpus)
    if config.HasField("sequence_batching"):
        found |= _sequences(config, placement["minWorkers"])
    return found | placement


def priorities(config: ModelConfig) -> Priorities | None:
    """The priority levels and queue timeouts of requests, None when they wait in order and without a timeout."""
    dynamic = config.dynamic_batching
    policy = _wait_policy(dynamic.default_queue_policy)
    if not dynamic.priority_levels and policy.timeout_s == math.inf:
        return None
    policies = {int(level): _wait_policy(one) for level, one in dynamic.priority_queue_policy.items()}
    return Priorities(dynamic.priority_levels, dynamic.default_priority_level, policy, policies)


def needs(config: ModelConfig) -> tuple[Needs, ...]:
    """What a worker takes of the rate limiter's resources, by its group; empty if none takes any."""
    found: dict[Needs, None] = {}
    for group in config.instance_group:
        limiter = group.rate_limiter
        if not group.passive:
            taken = (Need(one.name, one.count, getattr(one, "global")) for one in limiter.resources)
            found[Needs(tuple(taken), max(1, limiter.priority))] = None
    return tuple(found) if any(one.resources for one in found) else ()


def _wait_policy(policy: Any) -> WaitPolicy:
    timeout_us = policy.default_timeout_microseconds
    return WaitPolicy(
        timeout_us / 1e6 if timeout_us else math.inf,
        policy.timeout_action == policy.DELAY,
        policy.allow_timeout_override,
        policy.max_queue_size,
    )


def _check_priorities(config: ModelConfig, source: str) -> None:
    dynamic = config.dynamic_batching
    levels, default = dynamic.priority_levels, dynamic.default_priority_level
    if levels and not 1 <= default <= levels:
        raise InvalidArgument(f"{source}: default_priority_level is one of the {levels} priority_levels, not {default}")
    for level in dynamic.priority_queue_policy:
        if not 1 <= level <= levels:
            raise InvalidArgument(f"{source}: priority_queue_policy is for level {level}; priority_levels is {levels}")


def _sequences(config: ModelConfig, workers: int) -> dict[str, Any]:
    """A batch has at most one request of each sequence. A worker holds as many as there are slots or candidates."""
    sequences, size = config.sequence_batching, max(config.max_batch_size, 1)
    idle_us = sequences.max_sequence_idle_microseconds or _SEQUENCE_IDLE_US
    most = max(sequences.oldest.max_candidate_sequences, 1) if sequences.HasField("oldest") else size
    return {
        "batchSize": size,
        "sequenceBatching": True,
        "sequenceMaxIdleMSec": max(round(idle_us / 1000), 1),
        "sequenceStartRequired": True,
        "maxSequencesPerWorker": most,
        "maxNumSequence": most * workers + _SEQUENCES_WAITING_MAX,
        "maxSequenceJobQueueSize": _SEQUENCE_REQUESTS_MAX,
    }


def _placement(config: ModelConfig, gpus: int) -> dict[str, Any]:
    """Instances as workers: those of a GPU group count for each of its GPUs. Raises InvalidArgument for too many."""
    count, on_gpu = 0, False
    ids: list[int] = []
    for group in config.instance_group:
        if group.passive:
            continue
        wants_gpu = group.kind == _GROUP_KIND_GPU or (group.kind != _GROUP_KIND_CPU and gpus > 0)
        each = list(group.gpus) or list(range(gpus)) if wants_gpu else []
        count += max(group.count, 1) * max(len(each), 1)
        ids += [one for one in each if one not in ids]
        on_gpu |= bool(each)
    if count > WORKERS_MAX:
        raise InvalidArgument(
            f"model {config.name!r}: instance_group has {count} instances, "
            f"and a model has at most {WORKERS_MAX} workers"
        )
    found: dict[str, Any] = {"minWorkers": max(count, 1), "maxWorkers": max(count, 1)}
    found["deviceType"] = "gpu" if on_gpu else "cpu"
    return found | ({"deviceIds": ids} if on_gpu and ids else {})


CONFIG_FILE = "config.pbtxt"
CONFIG_BYTES_MAX = 4 << 20
#: In a row in a config.pbtxt: protobuf takes the square of their number, in which it holds up the whole process.
BACKSLASHES_MAX = 100
#: Characters of an error of protobuf that are shown.
SAID_MAX = 1000
_VERSION = re.compile(r"[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model's directory. `versions` are those that its policy selects, in ascending order; `grouped`: its
    configuration sets the number of instances."""

    name: str
    path: Path
    config: ModelConfig
    backend: str
    versions: tuple[int, ...]
    grouped: bool = True
    ensemble: Ensemble | None = None

    def with_workers(self, workers: int, gpus: int) -> ModelDirectory:
        """The same with `workers` instances, unless its configuration sets their number."""
        if self.grouped:
            return self
        config = ModelConfig()
        config.CopyFrom(self.config)
        del config.instance_group[:]
        each, rest = divmod(workers, gpus) if gpus else (workers, 0)
        if each:
            config.instance_group.add(name=self.name, count=each)
        if rest:
            config.instance_group.add(count=1, kind=_GROUP_KIND_GPU, gpus=range(rest))
        return replace(self, config=config)

    def archive(self, version: int, gpus: int) -> Archive:
        """One version, ready to be registered. `gpus`: the number of GPUs to place workers on."""
        config, directory = self.config, self.path / str(version)
        return Archive(
            dir=directory,
            name=self.name,
            version=str(version),
            manifest={"model": {"modelName": self.name, "modelVersion": str(version)}},
            handler=config.default_model_filename or None,
            config=worker_settings(config, gpus),
            adapter=ADAPTER,
            adapter_settings=self._adapter_settings(directory, gpus),
            signature=signature(config),
            priorities=priorities(config),
            needs=needs(config),
            graph=self.ensemble,
            completed=None if self.ensemble is not None else partial(_completed, gpus),
            remembered=False,
        )

    def _adapter_settings(self, directory: Path, gpus: int) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "config": as_json(placed(self.config, gpus)),
            "model_file": str(directory / self.config.default_model_filename),
            "model_repository": str(self.path.parent),
            "labels": self._labels(),
            "torch": self.ensemble is None and self._may_need_torch(directory),
        }

    def _may_need_torch(self, directory: Path) -> bool:
        if self.backend == "python":
            return may_need_torch(self.path, f"{directory.name}/{self.config.default_model_filename}")
        return self.backend != "onnxruntime"

    def _labels(self) -> dict[str, list[str]]:
        """The class labels by output, one for each line of its file. Raises InvalidArgument for a missing file."""
        files = {one.name: self.path / one.label_filename for one in self.config.output if one.label_filename}
        for file in files.values():
            if not file.resolve().is_relative_to(self.path.resolve()) or not file.is_file():
                raise InvalidArgument(f"label_filename: there is no {file} in the model's directory")
        return {name: _text(file).splitlines() for name, file in files.items()}


def _completed(gpus: int, archive: Archive, found: dict[str, Any]) -> Archive:
    """The archive with the configuration `found` in place of its own. Raises InvalidArgument."""
    config = from_json(found, f"the configuration that model {archive.name!r} has completed")
    return replace(
        archive,
        config=worker_settings(config, gpus),
        adapter_settings={**archive.adapter_settings, "config": as_json(placed(config, gpus))},
        signature=signature(config),
    )


def read(path: Path, config_text: str | None = None, name: str = "") -> ModelDirectory:
    """The model in the directory `path`. `config_text` replaces its config.pbtxt, `name` the directory's name. Raises
    InvalidArgument, naming the file and the error."""
    source = f"{path.name}/{CONFIG_FILE}" if config_text is None else "load parameter 'config'"
    text = _text(path / CONFIG_FILE) if config_text is None else config_text
    config = parse(text, source)
    if name:
        config.name = ""  # the caller's name replaces it
    name = name or path.name
    config = checked(config, name, source)
    versions = _versions(path)
    if not versions:
        raise InvalidArgument(f"model {name!r} has no version: there is no directory with a number in {path}")
    wanted = chosen(config, versions)
    if not wanted:
        have = ", ".join(map(str, versions))
        raise InvalidArgument(f"model {name!r}: its version_policy selects none of its versions: {have}")
    ensemble = ensemble_of(config, source)
    if ensemble is not None:
        return ModelDirectory(name, path, completed(config, name, ""), "", tuple(wanted), ensemble=ensemble)
    backend = backend_of(config, source) or _backend(path / str(wanted[-1]))
    full = completed(config, name, backend)
    if not config.default_model_filename and backend == "pytorch" and _is_program(path / str(wanted[-1])):
        full.default_model_filename = PROGRAM_FILE
    for version in wanted:
        _check_file(path / str(version), full.default_model_filename)
    return ModelDirectory(name, path, full, backend, tuple(wanted), grouped=bool(config.instance_group))


def _text(file: Path) -> str:
    try:
        return read_text(file, CONFIG_BYTES_MAX)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from None


def _versions(path: Path) -> list[int]:
    return sorted(int(one.name) for one in path.iterdir() if one.is_dir() and _VERSION.fullmatch(one.name))


def _backend(directory: Path) -> str:
    """The backend by the model's file, for a configuration that names none."""
    for backend, file in MODEL_FILES.items():
        if (directory / file).is_file():
            return backend
    if _is_program(directory):
        return "pytorch"
    files = ", ".join(MODEL_FILES.values())
    raise InvalidArgument(f"{directory} has none of {files}, and the configuration names no backend")


def _is_program(directory: Path) -> bool:
    """Whether a version's file was made by torch.export, not TorchScript."""
    return (directory / PROGRAM_FILE).is_file() and not (directory / MODEL_FILES["pytorch"]).is_file()


def _check_file(directory: Path, name: str) -> None:
    file = directory / name
    if not file.exists():
        raise InvalidArgument(f"there is no {name} in {directory}")
    if not file.resolve().is_relative_to(directory.parent.resolve()):
        raise InvalidArgument(f"{file} leads out of the model's directory")


def notes_without_effect(config: ModelConfig, source: str) -> Iterator[str]:
    """A sentence for each field without effect that the configuration of `source` sets."""
    for path, why in WITHOUT_EFFECT.items():
        if _is_given(config, path.split(".")):
            yield no_effect(path, source, why)


def _is_given(message: Message, names: Sequence[str]) -> bool:
    """Whether the field at the path has another value than its default, in any of the repeated messages."""
    found: Any = getattr(message, names[0])
    if len(names) == 1:
        return bool(found.ByteSize()) if isinstance(found, Message) else bool(found)
    inner = [found] if isinstance(found, Message) else found
    return any(_is_given(one, names[1:]) for one in inner)


def without_effect_table() -> Iterator[str]:
    """The table of those fields for the documentation, line by line."""
    yield "| field | why |"
    yield "|---|---|"
    for why, paths in grouped(WITHOUT_EFFECT.items()).items():
        yield f"| {paths} | {why} |"
