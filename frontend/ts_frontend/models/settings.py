"""A model's settings, resolved from four sources: the register call, the archive's model-config.yaml, the server
configuration's `models` entry, and the server's defaults; and its tensor declarations, for metadata, for the checks of
its requests, and as a ModelConfig. Pure: nothing is read, nothing is logged.

Which source wins is TorchServe's rule, a different one for each group of settings (docs/model-config.md has the table).
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from ts.protocol.datatypes import DATATYPES
from ts_frontend.caching.cache import CacheRule
from ts_frontend.config.kinds import bytes_of
from ts_frontend.config.parameters import SETTINGS, WORKERS_MAX
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument
from ts_frontend.workers.cluster.resources import ClusterRequest, read_request
from ts_frontend.workers.memory import DemandRule, Memory
from ts_frontend.workers.supervisor import ScalingRule

INT_MAX = 2**31 - 1
#: The least similarity (difflib's ratio) at which an unknown key counts as a misspelt setting.
LIKENESS_MIN = 0.88
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Source:
    """One source of settings, by TorchServe's keys. A value of the wrong type is ignored, with a line in `warnings`.
    `asked`: the keys that were looked up."""

    values: Mapping[str, Any]
    name: str
    warnings: list[str]
    asked: set[str] = field(default_factory=set)

    def whole(self, key: str, least: int = 1) -> int | None:
        what = "a whole number" if least <= -INT_MAX else f"a whole number, at least {least}"
        return self._checked(int, key, lambda value: _is_whole(value, least), what)

    def decimal(self, key: str, least: float) -> float | None:
        return self._checked(float, key, lambda value: _is_number(value, least), f"a number, at least {least:g}")

    def flag(self, key: str) -> bool | None:
        return self._checked(bool, key, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str) -> str | None:
        return self._checked(str, key, lambda value: isinstance(value, str) and value != "", "text")

    def choice(self, key: str, allowed: Iterable[str]) -> str | None:
        words = ", ".join(f'"{word}"' for word in allowed)
        return self._checked(str, key, lambda value: isinstance(value, str) and value in allowed, f"one of {words}")

    def indices(self, key: str) -> tuple[int, ...] | None:
        found = self._checked(list[int], key, _is_indices, "a list of whole numbers, at least 0 each")
        return None if found is None else tuple(found)

    def size_bytes(self, key: str) -> int | None:
        """A number of bytes, or a number with a unit: 512MiB, 1.5 GB."""
        found = self._checked(object, key, lambda value: bytes_of(value) is not None, "bytes, or a size such as 512MiB")
        return None if found is None else bytes_of(found)

    def section(self, key: str) -> Source:
        found = self._checked(dict[str, Any], key, lambda value: isinstance(value, dict), "keys with values")
        return Source(found or {}, f"{self.name} {key}", self.warnings)

    def warn(self, key: str, problem: str) -> None:
        self.warnings.append(f"{self.name}: {key} is {reprlib.repr(self.values.get(key))}: {problem}")

    def warn_misspelt(self) -> None:
        """Warns of unread keys that are almost a setting's: `batch_size`. Others may be the handler's own."""
        plain = {_plainly(key): key for key in sorted(self.asked)}
        for key in self.values:
            if isinstance(key, str) and key not in self.asked:
                close = difflib.get_close_matches(_plainly(key), plain, n=1, cutoff=LIKENESS_MIN)
                if close:
                    self.warnings.append(f"{self.name}: {key} is not a setting; did you mean {plain[close[0]]}?")

    def _checked(self, kind: type[_Value], key: str, good: Callable[[Any], bool], expected: str) -> _Value | None:
        """The value, of the type `kind` if it is `good`."""
        self.asked.add(key)
        value: _Value | None = self.values.get(key)
        if value is None or good(value):
            return value
        self.warn(key, f"ignored, it must be {expected}")
        return None


def _plainly(key: str) -> str:
    """A key without underscores, dashes and case: equal for batch_size, batchsize, batchSize."""
    return re.sub(r"[^a-z0-9]", "", key.lower())


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= INT_MAX


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= INT_MAX


def _is_indices(value: object) -> bool:
    return isinstance(value, list) and all(_is_whole(item, 0) for item in value)


def first(*candidates: _Value | None | Callable[[], _Value | None]) -> _Value | None:
    """The first value that isn't None; later sources are functions, so that unused values cause no warnings."""
    for candidate in candidates:
        value = candidate() if callable(candidate) else candidate
        if value is not None:
            return value
    return None


_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Torchrun:
    """Named as in the section; `monitor_interval_s` 0 and "" leave torchrun its own default."""

    processes: int = 1
    nodes: int = 1
    node_rank: int = 0
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = ""
    rdzv_conf: str = ""
    master_addr: str = ""
    master_port: int = 0
    monitor_interval_s: int = 0
    omp_threads: int = 1

    @staticmethod
    def read(section: Source, level: int) -> Torchrun:
        """The settings of a torchrun section. `level`: the number of processes, where the section sets none."""
        return Torchrun(
            processes=section.whole("nproc-per-node") or level,
            nodes=section.whole("nnodes") or 1,
            node_rank=section.whole("node-rank", 0) or 0,
            rdzv_backend=section.text("rdzv-backend") or "c10d",
            rdzv_endpoint=section.text("rdzv-endpoint") or "",
            rdzv_conf=section.text("rdzv-conf") or "",
            master_addr=section.text("master-addr") or "",
            master_port=section.whole("master-port") or 0,
            monitor_interval_s=section.whole("monitor-interval") or 0,
            omp_threads=section.whole("OMP_NUMBER_THREADS") or 1,
        )

    @property
    def env(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.omp_threads), "LOGLEVEL": "INFO"}

    def words(self, log_dir: Path) -> tuple[str, ...]:
        """torchrun's command line, without the program. torchrun restarts nothing: the server restarts the worker."""
        return tuple(self._words(log_dir))

    def _words(self, log_dir: Path) -> Iterator[str]:
        yield from ("--nnodes", str(self.nodes), "--nproc-per-node", str(self.processes), "--max-restarts", "0")
        yield from ("--log-dir", str(log_dir), "--rdzv-backend", self.rdzv_backend)
        if self.rdzv_endpoint:
            yield from ("--rdzv-endpoint", self.rdzv_endpoint)
        elif self.nodes == 1 and self.rdzv_backend == "c10d":
            # A free port of its own: at torchrun's default one, a second worker would meet with the first.
            yield from ("--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
        more = {
            "--node-rank": self.node_rank if self.nodes > 1 else 0,
            "--rdzv-conf": self.rdzv_conf,
            "--master-addr": self.master_addr,
            "--master-port": min(self.master_port, _PORT_MAX),
            "--monitor-interval": self.monitor_interval_s,
        }
        for flag, value in more.items():
            if value:
                yield from (flag, str(value))


_NAME_CHARS_MAX = 255
_SUFFIXES = (".tar.gz", ".tgz", ".mar", ".model", ".zip", ".tar")
_RUNTIMES = ("python", "python3")
_DEVICE_TYPES = ("cpu", "gpu")
_PARALLEL_TYPES = ("", "pp", "tp", "pptp", "custom")


@dataclass(frozen=True, slots=True)
class Requested:
    """A register call's settings, named as in `config/parameters.py`; None is unset. Raises InvalidArgument."""

    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    initial_workers: int | None = None
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None

    def __post_init__(self) -> None:
        for row in SETTINGS:
            if row.kind is int:
                check_range(row.name, getattr(self, row.setting), row.least, row.most)
        if self.runtime and self.runtime not in _RUNTIMES:
            why = " (the C++ backend is not part of this server)" if self.runtime == "LSP" else ""
            raise InvalidArgument(f"Invalid RuntimeType value: {self.runtime}{why}")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Requested:
        """From the parameters of a register call by their names; None is unset."""
        return Requested(**{row.setting: given.get(row.name) for row in SETTINGS})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Resolved settings. `max_batch_delay_set` is False when no source sets the delay and it is only the default.

    `torchrun`: the start settings of a worker of several processes, None for one started without torchrun.
    `device_type` "" is a GPU where there is one; `device_ids` () is all; `cpu_threads` 0 is a share of the cores.
    `max_concurrency`: requests at a time on one worker whose handler is a generator or async. `warnings`: values of the
    configuration that were ignored, and why.
    """

    min_workers: int = 0
    max_workers: int = 0
    batch_size: int = 1
    max_batch_delay_ms: int = 100
    max_batch_delay_set: bool = False
    response_timeout_s: int = 120
    startup_timeout_s: int = 120
    max_retry_timeout_s: int = 300
    client_timeout_ms: int = 0
    job_queue_size: int = 100
    max_concurrency: int = 64
    device_type: str = ""
    device_ids: tuple[int, ...] = ()
    cpu_threads: int = 0
    parallel_type: str = ""
    parallel_level: int = 0
    torchrun: Torchrun | None = None
    continuous_batching: bool = False
    use_job_ticket: bool = False
    use_venv: bool = False
    async_communication: bool = False
    stateful: bool = False
    idempotent: bool = False
    share_weights: bool = False
    autoscale: ScalingRule | None = None
    demand: DemandRule | None = None
    cluster: ClusterRequest | None = None
    cache: CacheRule | None = None
    rollout: Mapping[str, Any] | None = None
    recycle_after_requests: int = 0
    recycle_above_bytes: int = 0
    worker_memory_bytes_max: int = 0
    sequence_max_idle_ms: int = 0
    sequence_timeout_ms: int = 0
    max_num_sequence: int = 1
    max_sequences_per_worker: int = 0
    sequence_start_required: bool = False
    max_sequence_job_queue_size: int = 1
    runtime: str = "python"
    handler: str | None = None
    envelope: str | None = None
    warnings: tuple[str, ...] = ()


def resolve(
    requested: Requested,
    model_config: Mapping[str, Any],
    entry: Mapping[str, Any],
    defaults: ServerConfig,
    *,
    handler: str | None = None,
    runtime: str = "python",
) -> ModelSettings:
    """`model_config`: the parsed model-config.yaml. `entry`: the `models` entry of this name and version, {} without.
    `handler`, `runtime`: the manifest's."""
    warnings: list[str] = []
    yaml = Source(model_config, "model-config.yaml", warnings)
    server = Source({key: value for key, value in entry.items() if not _is_unset(value)}, "models", warnings)
    delay_ms = first(
        requested.max_batch_delay_ms, yaml.whole("maxBatchDelay", 0), lambda: server.whole("maxBatchDelay", 0)
    )
    min_workers, max_workers = _workers(requested, yaml, server, defaults)
    plain = _plain(yaml, server, defaults)
    settings = ModelSettings(
        min_workers=min_workers,
        max_workers=max_workers,
        batch_size=first(requested.batch_size, yaml.whole("batchSize"), lambda: server.whole("batchSize")) or 1,
        max_batch_delay_ms=100 if delay_ms is None else delay_ms,
        max_batch_delay_set=delay_ms is not None,
        response_timeout_s=_timeout("responseTimeout", yaml, server, requested.response_timeout_s)
        or defaults.default_response_timeout,
        startup_timeout_s=_timeout("startupTimeout", yaml, server, requested.startup_timeout_s)
        or defaults.default_startup_timeout,
        runtime=requested.runtime or server.choice("runtimeType", _RUNTIMES) or runtime,
        handler=requested.handler or handler,
        envelope=defaults.service_envelope,
        **plain,
    )
    yaml.warn_misspelt()
    return replace(settings, warnings=tuple(warnings))


def model_name_for(requested: Requested, name: str | None, version: str, path: Path) -> str:
    """The given name, else the archive's, else the file's name with `_` for all but word characters.

    Raises InvalidArgument: a name or version that is not allowed (`check_name`).
    """
    found = requested.model_name or name or _name_of_file(path)
    check_name("model_name" if requested.model_name else "modelName of the archive", found)
    check_name("modelVersion of the archive", version)
    return found


def _name_of_file(path: Path) -> str:
    name = path.name
    for suffix in _SUFFIXES:
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            name = name[: -len(suffix)]
            break
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def check_name(what: str, name: str) -> None:
    """Raises InvalidArgument for a name that can't stand in a URL and a log line; `what` begins the message."""
    if not name or len(name) > _NAME_CHARS_MAX:
        raise InvalidArgument(f"{what} must have 1 to {_NAME_CHARS_MAX} characters, not {len(name)}")
    if name in (".", "..") or not name.isprintable() or set("/\\") & set(name):
        raise InvalidArgument(
            f"{what} {name!a} is not allowed: no '/', no '\\', no control characters, not '.' or '..'"
        )


def check_range(name: str, value: int | None, least: int, most: int = INT_MAX) -> None:
    """Raises InvalidArgument unless `value` is a whole number from `least` to `most`; None is unset."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} must be a whole number, not {value!r}")
    if not least <= value <= most:
        raise InvalidArgument(f"{name} must be from {least} to {most}, not {value}")


def _is_unset(value: object) -> bool:
    """Numbers of the server's `models` entry up to 0 don't count, as in TorchServe."""
    return isinstance(value, int) and not isinstance(value, bool) and value <= 0


def _timeout(key: str, yaml: Source, server: Source, requested_s: int | None) -> int | None:
    return first(yaml.whole(key), lambda: server.whole(key), requested_s)


def _workers(requested: Requested, yaml: Source, server: Source, defaults: ServerConfig) -> tuple[int, int]:
    """(least, most) workers: model-config.yaml, else the `models` entry, else the register call, else the default."""
    asked = defaults.default_workers_per_model if requested.initial_workers is None else requested.initial_workers
    return _worker_range(yaml) or _worker_range(server) or (asked, asked)


def _worker_range(source: Source) -> tuple[int, int] | None:
    """The source's (least, most) workers, None without. Without maxWorkers, minWorkers is both; below 1 it is 1."""
    least = source.whole("minWorkers", -INT_MAX)
    most = source.whole("maxWorkers")
    if least is None:
        if most is not None:
            source.warn("maxWorkers", "ignored, it counts only together with minWorkers")
        return None
    if least < 1:
        source.warn("minWorkers", "counts as 1")
        least = 1
    if least > WORKERS_MAX:
        source.warn("minWorkers", f"ignored, a model has at most {WORKERS_MAX} workers")
        return None
    if most is None:
        return least, least
    if most < least:
        source.warn("maxWorkers", f"less than minWorkers ({least}), both are ignored")
        return None
    return least, most


def _plain(yaml: Source, server: Source, defaults: ServerConfig) -> dict[str, Any]:
    """The settings without a register parameter: model-config.yaml, else the `models` entry, else the default."""

    def whole(key: str, default: int, least: int = 1) -> int:
        found: int | None = first(yaml.whole(key, least), lambda: server.whole(key, least))
        return default if found is None else found

    def flag(key: str) -> bool:
        return bool(first(yaml.flag(key), lambda: server.flag(key)))

    def choice(key: str, allowed: tuple[str, ...]) -> str:
        return first(yaml.choice(key, allowed), lambda: server.choice(key, allowed)) or ""

    def size(key: str) -> int:
        return first(yaml.size_bytes(key), lambda: server.size_bytes(key)) or 0

    stateful = flag("sequenceBatching")
    kind = choice("parallelType", _PARALLEL_TYPES)
    level = _parallel_level(kind, yaml, server) if kind else 0
    device_type = choice("deviceType", _DEVICE_TYPES)
    device_ids = first(yaml.indices("deviceIds"), lambda: server.indices("deviceIds")) or ()
    return {
        "cluster": _cluster(yaml, server, defaults, (device_type, device_ids), level, kind),
        "max_retry_timeout_s": whole("maxRetryTimeoutInSec", 300, 0),
        "client_timeout_ms": whole("clientTimeoutInMills", 0, 0),
        "job_queue_size": whole("jobQueueSize", defaults.job_queue_size),
        "max_concurrency": whole("maxConcurrency", defaults.max_concurrency),
        "device_type": device_type,
        "device_ids": device_ids,
        "cpu_threads": whole("cpuThreads", 0),
        "parallel_type": kind,
        "parallel_level": level,
        "torchrun": Torchrun.read(yaml.section("torchrun"), level) if kind not in ("", "custom") else None,
        "continuous_batching": flag("continuousBatching"),
        "use_job_ticket": flag("useJobTicket"),
        "use_venv": flag("useVenv"),
        "share_weights": flag("shareWeights"),
        "async_communication": flag("asyncCommunication"),
        "stateful": stateful,
        "recycle_after_requests": _stateless(
            yaml, "recycleAfterRequests", whole("recycleAfterRequests", 0, 0), stateful
        ),
        "recycle_above_bytes": _stateless(yaml, "recycleAboveMemory", size("recycleAboveMemory"), stateful),
        "worker_memory_bytes_max": size("workerMemoryMax"),
        "idempotent": bool(_stateless(yaml, "idempotent", flag("idempotent"), stateful)),
        "sequence_max_idle_ms": whole("sequenceMaxIdleMSec", 0, 0),
        "sequence_timeout_ms": whole("sequenceTimeoutMSec", 0, 0),
        "demand": _demand(yaml, server, defaults, stateful),
        "autoscale": None if stateful else _autoscale(yaml) or _autoscale(server),
        "cache": _cache(yaml, server, stateful),
        "rollout": yaml.section("rollout").values or server.section("rollout").values or None,
        "max_num_sequence": whole("maxNumSequence", 1),
        "max_sequences_per_worker": whole("maxSequencesPerWorker", 0, 0),
        "sequence_start_required": flag("sequenceStartRequired"),
        "max_sequence_job_queue_size": whole("maxSequenceJobQueueSize", 1),
    }


def _stateless(yaml: Source, key: str, value: int, stateful: bool) -> int:
    """The value, or 0 with a warning for a model with sequences: its workers keep the state of earlier requests."""
    if value and stateful:
        yaml.warn(key, "ignored with sequenceBatching")
    return 0 if stateful else value


def _autoscale(source: Source) -> ScalingRule | None:
    """The source's scaling rule; the default rule for `autoscale: true`, None without `autoscale`."""
    usual = ScalingRule()
    given = source.values.get("autoscale")
    if isinstance(given, bool):
        source.flag("autoscale")
        return usual if given else None
    section = source.section("autoscale")
    if not isinstance(given, dict):
        return None

    def seconds(key: str, default_s: float, least: float) -> float:
        found = section.decimal(key, least)
        return default_s if found is None else float(found)

    rule = ScalingRule(
        target_queue=seconds("targetQueue", usual.target_queue, 0),
        target_wait_s=(section.whole("targetWait") or 0) / 1000,
        up_after_s=seconds("upAfter", usual.up_after_s, 0),
        down_after_s=seconds("downAfter", usual.down_after_s, 0.1),
    )
    section.warn_misspelt()
    return rule


def _cache(yaml: Source, server: Source, stateful: bool) -> CacheRule | None:
    """The rule for kept answers; the default rule for `cache: true`, None without `cache` and for sequences."""
    source = yaml if yaml.values.get("cache") is not None else server
    given = source.values.get("cache")
    if given is None or isinstance(given, bool):
        source.asked.add("cache")
        rule = CacheRule() if given else None
    else:
        section = source.section("cache")
        key = section.values.get("key")
        names = [key] if isinstance(key, str) else key or []
        section.asked.add("key")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            section.warn("key", "ignored, it must be a list of names of headers")
            names = []
        rule = CacheRule(
            section.size_bytes("size") or 0,
            float(section.decimal("ttl", 0) or 0),
            frozenset(name.lower() for name in names),
        )
        section.warn_misspelt()
        if not isinstance(given, dict):
            return None
    if rule is not None and stateful:
        source.warn("cache", "ignored with sequenceBatching: an answer depends on the requests before it")
        return None
    return rule


def _demand(yaml: Source, server: Source, defaults: ServerConfig, stateful: bool) -> DemandRule | None:
    """The rule for a model that is loaded on demand; None when workers start at registration."""
    keep_s = first(yaml.whole("keepAlive", 0), lambda: server.whole("keepAlive", 0))
    rule = DemandRule(
        keep_alive_s=defaults.model_keep_alive_s if keep_s is None else keep_s,
        pinned=bool(first(yaml.flag("pinned"), lambda: server.flag("pinned"))),
        memory=Memory(
            first(yaml.size_bytes("modelMemory"), lambda: server.size_bytes("modelMemory")) or 0,
            first(yaml.size_bytes("modelGpuMemory"), lambda: server.size_bytes("modelGpuMemory")) or 0,
        ),
    )
    own = first(yaml.flag("loadOnDemand"), lambda: server.flag("loadOnDemand"))
    ticket = bool(first(yaml.flag("useJobTicket"), lambda: server.flag("useJobTicket")))
    if own and (stateful or ticket):
        yaml.warn("loadOnDemand", "ignored with " + ("sequenceBatching" if stateful else "useJobTicket"))
    wanted = defaults.load_on_demand if own is None else own
    return rule if wanted and not stateful and not ticket else None


def _cluster(
    yaml: Source, server: Source, defaults: ServerConfig, devices: tuple[str, tuple[int, ...]], level: int, kind: str
) -> ClusterRequest | None:
    """The resources that the model's workers request from Ray. None when they run on this machine: without a cluster,
    with `ray: false`, or with torchrun, which starts its processes on one machine. `devices`: the model's device type
    and ids."""
    given = first(yaml.values.get("ray"), server.values.get("ray"))
    yaml.asked.add("ray")
    server.asked.add("ray")
    if given is not None and not isinstance(given, (dict, bool)):
        yaml.warn("ray", "ignored, it must be keys with values, or false for workers on this machine")
    section = given if isinstance(given, dict) else {}
    device_type, ids = devices
    if not defaults.ray_address or given is False:
        if section:  # warns of mistakes also without a cluster
            read_request(section, device_type, 0, yaml.warnings.append)
        return None
    if kind not in ("", "custom"):
        yaml.warnings.append("torchrun's workers run on this machine: Ray doesn't place them (ray: false says so)")
        return None
    if ids:
        yaml.warn("deviceIds", "each worker gets GPUs that Ray chooses; ray: num_gpus says how many")
    each = level or (1 if ids and device_type != "cpu" else 0)
    return read_request(section, device_type, each, yaml.warnings.append)


def _parallel_level(kind: str, yaml: Source, server: Source) -> int:
    """GPUs of one worker; with torchrun, one for each of its processes (nproc-per-node)."""
    level = first(yaml.whole("parallelLevel"), lambda: server.whole("parallelLevel"))
    processes = yaml.section("torchrun").whole("nproc-per-node") if kind != "custom" or level is None else None
    if level is not None and processes is not None and level != processes:
        yaml.warn("parallelLevel", f"ignored, torchrun nproc-per-node is {processes}")
    return processes or level or 1


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
    found = config.get("openInference")
    if found is None:
        return Signature()
    if not isinstance(found, dict):
        raise InvalidArgument(f"openInference in the model's configuration is a mapping, not {found!r}")
    unknown = set(found) - {"platform", "inputs", "outputs", "decoupled", "parameters"}
    if unknown:
        raise InvalidArgument(
            f"openInference in the model's configuration has unknown keys: {', '.join(sorted(map(str, unknown)))}"
        )
    return signature_from(found)


def signature_from(found: Mapping[str, Any]) -> Signature:
    """A signature from its parts. Raises InvalidArgument."""
    return Signature(
        str(found.get("platform") or ""),
        specs_of(found.get("inputs"), "openInference.inputs"),
        specs_of(found.get("outputs"), "openInference.outputs"),
        bool(found.get("decoupled", False)),
        _parameters(found.get("parameters"), "openInference.parameters"),
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
