"""What the services of the Open Inference Protocol say and keep of the served models, over every transport: their
configuration, their statistics, the parameters of repository calls; and the settings of logs and traces that Triton's
clients read and change on a running server.

The log level takes effect at once; the log's location and format are fixed at the start. Trace settings, of the server
and of each model, select the traced requests if there is a collector; without one they are only stored.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf import json_format, text_format

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.model_config_pb2 import ModelConfig
from ts.protocol.pool import POOL
from ts_frontend.caching.cache import ModelCache
from ts_frontend.errors import Code, HandlerFailed, InvalidArgument, MessageTooLarge
from ts_frontend.models.model import Kinds, Model, Registry, Statistics
from ts_frontend.models.settings import as_json
from ts_frontend.open_inference.requests import Regions, find, texts_of_member
from ts_frontend.telemetry.logging.writer import Logs
from ts_frontend.telemetry.tracing.tracing import Sampling

EXTENSIONS = (
    *("classification", "sequence", "sequence(string_id)", "model_repository", "model_repository(unload_dependents)"),
    *("model_configuration", "binary_tensor_data", "parameters", "statistics", "trace", "logging", "generate"),
)
#: gRPC codes by a handler's HTTP status in this protocol; TorchServe's are ABORTED and INTERNAL.
_CODES = {409: Code.ALREADY_EXISTS, 520: Code.UNKNOWN}


def coded(error: HandlerFailed) -> HandlerFailed:
    error.code = _CODES.get(error.http_status, error.code)
    return error


class About(NamedTuple):
    name: str
    version: str


def extensions(regions: Regions) -> list[str]:
    return [*EXTENSIONS, *(("system_shared_memory",) if regions.allowed else ())]


CONFIG, MODEL_PATH, UNLOAD_DEPENDENTS = "config", "model_path", "unload_dependents"
#: The prefix of a parameter with a file; the rest of its name is the path in the model's directory.
FILE = "file:"
CONFIG_CHARACTERS_MAX = 256 * 1024
_STEP_CHARACTERS = 64 * 1024


class LoadParameters(NamedTuple):
    """The parameters of a load call; None if not given. `config_text`: in the format of config.pbtxt; `url`: the source
    of the model; `files`: the content of its directory, by relative path."""

    config_text: str | None
    url: str | None
    files: dict[str, bytes] | None


def load_parameters_of_json(body: bytes) -> LoadParameters:
    """Returns the load parameters of a JSON body, which may be empty. Raises InvalidArgument for malformed or unknown
    ones, MessageTooLarge. To be called in a thread, since files may be large."""
    try:
        given = texts_of_member(body, "parameters") if body.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not valid JSON: {error}") from None
    return load_parameters(given)


def load_parameters(given: Mapping[str, Any]) -> LoadParameters:
    """Returns the load parameters from the parameters of a request. Raises InvalidArgument for malformed or unknown
    ones, MessageTooLarge. To be called in a thread, since files may be large."""
    files = {name.removeprefix(FILE): _content(name, given[name]) for name in given if name.startswith(FILE)}
    for name, value in given.items():
        if name not in (CONFIG, MODEL_PATH) and not name.startswith(FILE):
            known = f"there are {CONFIG}, {MODEL_PATH} and {FILE}VERSION/NAME"
            raise InvalidArgument(f"unrecognized load parameter {name!r}; {known}")
        if name in (CONFIG, MODEL_PATH) and not isinstance(value, str):
            raise InvalidArgument(f"load parameter {name!r} is a text, not {reprlib.repr(value)}")
        if name == CONFIG and len(value) > CONFIG_CHARACTERS_MAX:
            raise MessageTooLarge(
                f"load parameter {name!r} has {len(value)} characters; it may have {CONFIG_CHARACTERS_MAX} characters"
            )
    config, url = given.get(CONFIG), given.get(MODEL_PATH)
    if files and url is not None:
        raise InvalidArgument(f"load parameters {MODEL_PATH!r} and {FILE!r} exclude each other: give one of them")
    if files and config is None:
        raise InvalidArgument(f"load parameter {FILE!r} needs {CONFIG!r} too: the files replace the model's directory")
    return LoadParameters(None if config is None else _as_text(config), url, files or None)


def _content(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidArgument(f"load parameter {name!r} is a text, a file's content: bytes_param, or base64 in JSON")
    try:
        return b"".join(_decoded(value))
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"load parameter {name!r} is not base64: {error}") from None


def _decoded(text: str) -> Iterator[bytes]:
    """Decodes base64 in steps, which lets other threads run. Raises ValueError."""
    for at in range(0, len(text), _STEP_CHARACTERS):
        step = text[at : at + _STEP_CHARACTERS]
        if step.endswith("=") and at + len(step) < len(text):
            raise ValueError("padding inside")
        yield base64.b64decode(step, validate=True)


def unloads_dependents(given: Mapping[str, Any]) -> bool:
    """Whether an unload call's parameters want the models of an ensemble's steps unloaded, too. Raises InvalidArgument
    for unknown parameters."""
    unknown = set(given) - {UNLOAD_DEPENDENTS}
    if unknown:
        raise InvalidArgument(f"unrecognized unload parameter {min(unknown)!r}; there is {UNLOAD_DEPENDENTS}")
    return given.get(UNLOAD_DEPENDENTS) is True


def _as_text(config: str) -> str:
    try:
        found = json_format.Parse(config, ModelConfig(), descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise InvalidArgument(f"load parameter {CONFIG!r} is not a ModelConfig in JSON: {error}") from None
    return str(text_format.MessageToString(found))


def config_of(models: Registry, name: str, version: str) -> ModelConfig:
    """Returns a model's configuration as a Triton ModelConfig, made from the settings of a TorchServe archive."""
    model = find(models, name, version)
    config = ModelConfig()
    text = json.dumps(model.config_message())
    json_format.Parse(text, config, descriptor_pool=POOL)
    return config


def statistics_of(models: Registry, name: str = "", version: str = "") -> pb.ModelStatisticsResponse:
    """The statistics of one version, of a model's, or of all models. Raises ModelNotFound, ModelVersionNotFound."""
    return pb.ModelStatisticsResponse(model_stats=map(_of_model, _meant(models, name, version)))


def statistics_json(models: Registry, name: str = "", version: str = "") -> dict[str, Any]:
    return as_json(statistics_of(models, name, version))


def _meant(models: Registry, name: str, version: str) -> Sequence[Model]:
    if not name:
        return list(models)
    return [find(models, name, version)] if version else models.versions(name)


def _of_model(model: Model) -> pb.ModelStatistics:
    """As in Triton, requests that the cache has answered count as successes, not as inferences."""
    found, hits = model.statistics, 0 if model.cache is None else model.cache.hits
    return pb.ModelStatistics(
        name=model.name,
        version=model.version,
        last_inference=int(found.last_at_s * 1e3),
        inference_count=found.answered - hits,
        execution_count=found.calls,
        inference_stats=_inferences(found, model.cache),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_sum(of.calls, of.read_s),
                compute_infer=_sum(of.calls, of.seconds - of.read_s - of.written_s),
                compute_output=_sum(of.calls, of.written_s),
            )
            for size, of in found.batches.items()
        ],
        memory_usage=_memory(model),
        response_stats={str(index): _responses(kinds) for index, kinds in found.responses.items()},
    )


def _inferences(found: Statistics, cache: ModelCache | None) -> pb.InferStatistics:
    """compute_infer is the worker's time except for reading and writing tensors."""
    count, hits, misses = found.answered, _sum(0, 0.0), _sum(0, 0.0)
    if cache is not None:
        hits, misses = _sum(cache.hits, cache.hit_s), _sum(cache.misses, cache.miss_s)
    ran = count - hits.count
    return pb.InferStatistics(
        success=_sum(count, found.answered_s),
        fail=_sum(found.failed, found.failed_s),
        queue=_sum(count, found.queue_s),
        compute_input=_sum(ran, found.read_s),
        compute_infer=_sum(ran, found.handler_s),
        compute_output=_sum(ran, found.written_s),
        cache_hit=hits,
        cache_miss=misses,
    )


def _memory(model: Model) -> list[pb.MemoryUsage]:
    """The resident memory of the model's workers; none without workers."""
    used = sum(slot.memory_bytes for slot in model.pool.slots)
    return [pb.MemoryUsage(type="CPU", id=0, byte_size=used)] if used and not model.pool.plan.in_process else []


def _responses(kinds: Kinds) -> pb.InferResponseStatistics:
    count, seconds = kinds.success[0] + kinds.fail[0], kinds.success[1] + kinds.fail[1]
    return pb.InferResponseStatistics(
        compute_infer=_sum(count, seconds),
        compute_output=_sum(count, 0.0),
        success=_sum(*kinds.success),
        fail=_sum(*kinds.fail),
        empty_response=_sum(*kinds.empty),
        cancel=_sum(*kinds.cancel),
    )


def _sum(count: int, seconds: float) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=int(seconds * 1e9))


_LEVELS = (("log_info", logging.INFO), ("log_warning", logging.WARNING), ("log_error", logging.ERROR))
_VERBOSE, _FILE, _FORMAT = "log_verbose_level", "log_file", "log_format"
_TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_NUMBERS = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
#: Raises if the caller may not change settings.
Check = Callable[[], None]


class LogSettings:
    """`check`: called before a change; may raise."""

    def __init__(self, log: Logs, check: Check) -> None:
        self._log, self._check = log, check

    def read(self) -> dict[str, Any]:
        level = self._log.level
        shown = {name: level <= least for name, least in _LEVELS}
        return {_FILE: "", **shown, _VERBOSE: int(level <= logging.DEBUG), _FORMAT: self._log.format}

    def change(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Changes settings and returns all of them. Raises InvalidArgument, naming the setting, for an invalid one;
        nothing changes then. Messages of one severity are shown only with all more severe ones."""
        if not given:
            return self.read()
        self._check()
        wanted = self.read()
        for name, value in given.items():
            if name not in wanted:
                raise InvalidArgument(f"unknown log setting {name!r}; one of {', '.join(wanted)}")
            if name in (_FILE, _FORMAT) and value != wanted[name]:
                raise InvalidArgument(
                    f"{name} can't be changed while the server runs; log_location and log_format set it at start"
                )
            wanted[name] = value if name in (_FILE, _FORMAT) else _whole(name, value)
        self._log.set_level(_level(wanted))
        return self.read()


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) if name != _VERBOSE else isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    raise InvalidArgument(f"{name} is {'a number' if name == _VERBOSE else 'true or false'}, not {value!r}")


def _level(wanted: Mapping[str, Any]) -> int:
    if wanted[_VERBOSE] > 0:
        return logging.DEBUG
    shown = [bool(wanted[name]) for name, _ in _LEVELS]
    if shown != sorted(shown):
        raise InvalidArgument(
            "more severe messages are always shown too: turn off log_info before log_warning before log_error"
        )
    return next((least for name, least in _LEVELS if wanted[name]), logging.CRITICAL)


class TraceSettings:
    """The trace settings of the server and of each model."""

    def __init__(self, models: Registry, sampling: Sampling, check: Check) -> None:
        self._models, self._sampling, self._check = models, sampling, check

    def read(self, model: str = "") -> dict[str, list[str]]:
        """Returns the trace settings of a model, or ("") of the server. Raises ModelNotFound."""
        if model:
            self._models.versions(model)
        return self._sampling.read(model)

    def change(self, given: Mapping[str, Sequence[str]], model: str = "") -> dict[str, list[str]]:
        """Changes trace settings and returns all; an empty list resets one to the server's, or to the default."""
        found = self.read(model)
        if not given:
            return found
        self._check()
        for name, values in given.items():
            _check_trace(name, values, self._sampling.names)
        self._sampling.change(given, model)
        return self.read(model)


def _check_trace(name: str, values: Sequence[str], names: Sequence[str]) -> None:
    if name not in names:
        raise InvalidArgument(f"unknown trace setting {name!r}; one of {', '.join(names)}")
    if not values:
        return
    if name in ("trace_file", "trace_mode"):
        raise InvalidArgument(f"{name} can't be changed while the server runs")
    if name == "trace_level":
        for value in values:
            if value not in _TRACE_LEVELS:
                raise InvalidArgument(f"trace_level is a list of {', '.join(_TRACE_LEVELS)}, not {value!r}")
    elif len(values) != 1 or not _is_whole(values[0], _NUMBERS[name]):
        raise InvalidArgument(f"{name} is one number, at least {_NUMBERS[name]}, not {', '.join(map(repr, values))}")


def _is_whole(text: str, least: int) -> bool:
    return text.removeprefix("-").isdecimal() and int(text) >= least


def trace_given(body: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns trace settings from JSON: each a text, a list of texts, or null. Raises InvalidArgument."""
    found = {}
    for name, value in body.items():
        values = [] if value is None else [value] if isinstance(value, (str, int)) else value
        if not isinstance(values, list) or not all(isinstance(one, (str, int)) for one in values):
            raise InvalidArgument(f"{name} is a text or a list of texts, not {value!r}")
        found[name] = [str(one) for one in values]
    return found
