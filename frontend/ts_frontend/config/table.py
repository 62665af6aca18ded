"""The table of the server's settings: key, type, default, environment variable, documentation. Pure.

Each row is a field of ServerConfig; SETTINGS lists them. Parsing, defaults, `torchserve config` and the table in
docs/configuration.md are made from them. Keys are those of TorchServe's config.properties; this server's own keys are
in the group "torchrelay" and end with their unit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from tempfile import gettempdir
from types import MappingProxyType
from typing import Any

from ts_frontend.config.foreign.aliases import PROFILES
from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.config.foreign.platforms import AUTO, NONE, PLATFORMS
from ts_frontend.config.kinds import (
    BOOLEAN,
    EXTRA_PORTS,
    FRONTENDS,
    HOST,
    HOSTS,
    KEYS,
    MEMORY,
    MODE,
    MODELS,
    OBJECT,
    OPEN_INFERENCE,
    PATH,
    PATHS,
    PATTERN,
    PATTERNS,
    PORT,
    PORTS,
    PROGRAMS,
    RESOURCES,
    SIZE,
    SWITCH,
    TEXT,
    WORDS,
    Address,
    ConfigError,
    ExtraPort,
    LimitedResource,
    ModelEntries,
    ProgramLines,
    SettingKind,
    address,
    choice,
    is_loopback,
    number,
    unix_path,
    whole,
)
from ts_frontend.config.snapshot import Snapshot

#: The texts of `Setting.effect`, for the documentation and the log.
EFFECTS = {"none": "accepted; has no effect here"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `env`: the environment variable, or ""; `env_always`: it counts also without enable_envvars_config.
    `effect`: "" for a setting that is read, else a key of EFFECTS. `restored`: False for settings (security, paths,
    addresses) that only a snapshot given by name can set. `secret`: never shown or written."""

    key: str
    kind: SettingKind
    default: object
    doc: str
    env: str
    group: str
    env_always: bool
    effect: str
    restored: bool
    secret: bool


@dataclass(frozen=True, slots=True)
class Note:
    """A message about the settings for the log."""

    level: int
    text: str


def _row(kind: SettingKind, default: object, doc: str, **more: Any) -> Any:
    """A dataclass field with its row; a callable `default` makes the default. `more`: further columns of Setting."""
    metadata = {"kind": kind, "doc": doc, **more}
    shown = not more.get("secret", False)
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata, repr=shown)
    )


def _own(kind: SettingKind, default: object, doc: str, **more: Any) -> Any:
    return _row(kind, default, doc, group="torchrelay", env_always=True, **more)


def _start(kind: SettingKind, default: object, doc: str, **more: Any) -> Any:
    """A setting of this server that belongs to one start: only a snapshot given by name can set it."""
    return _own(kind, default, doc, restored=False, **more)


def _system_temp_dir() -> Path:
    try:
        return Path(gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}. Set TMPDIR to a directory that can be written.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The checked settings of one server. None: not set. `sources`: the source of each value that isn't the default;
    `notes`: messages for the log; `snapshot`: the models to restore; `environment`: that of the process; `mlserver`:
    defaults for MLServer's models."""

    # Addresses
    inference_address: Address = _row(
        address("inference"),
        Address("http", "127.0.0.1", 8080),
        "REST inference API: `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`, like the next two addresses",
    )
    management_address: Address = _row(
        address("management"),
        Address("http", "127.0.0.1", 8081),
        "REST management API. If it equals `inference_address`, one listener serves both",
    )
    metrics_address: Address = _row(address("metrics"), Address("http", "127.0.0.1", 8082), "REST metrics API")
    enable_metrics_api: bool = _row(BOOLEAN, True, "false: no listener for metrics")
    grpc_inference_address: str = _row(HOST, "127.0.0.1", "address of gRPC inference")
    grpc_management_address: str = _row(HOST, "127.0.0.1", "address of gRPC management")
    grpc_inference_port: int = _row(PORT, 7070, "port of gRPC inference; 0: a free port")
    grpc_management_port: int = _row(PORT, 7071, "port of gRPC management; 0: a free port")
    grpc_inference_max_connection_age_ms: int | None = _row(
        whole(1), None, "age in ms at which a gRPC connection is asked to close; not set: no limit"
    )
    grpc_inference_max_connection_age_grace_ms: int | None = _row(
        whole(0), None, "ms for which its calls may still run; not set: no limit"
    )
    grpc_management_max_connection_age_ms: int | None = _row(whole(1), None, "the same age for gRPC management")
    grpc_management_max_connection_age_grace_ms: int | None = _row(whole(0), None, "the same time for gRPC management")
    ts_open_inference_protocol: bool = _row(
        OPEN_INFERENCE,
        False,
        "`oip` or `true`: POST /v2/models/MODEL/infer reads tensors for every model; otherwise only for models "
        "that declare their tensors",
        env="TS_OPEN_INFERENCE_PROTOCOL",
        env_always=True,
    )
    cors_allowed_origin: str | None = _row(TEXT, None, "Access-Control-Allow-Origin of REST answers")
    cors_allowed_methods: str | None = _row(TEXT, None, "Access-Control-Allow-Methods")
    cors_allowed_headers: str | None = _row(TEXT, None, "Access-Control-Allow-Headers")

    # Models
    model_store: Path | None = _row(PATH, None, "directory of the archives; required")
    workflow_store: Path | None = _row(
        PATH, None, "directory of workflow archives; not set: `model_store`", restored=False
    )
    load_models: tuple[str, ...] = _row(
        WORDS,
        (),
        "models to load at the start: `NAME=URL`, `URL`, or `ALL` for every archive of the store",
        restored=False,
    )
    models: ModelEntries = _row(
        MODELS,
        dict,
        'settings by model and version, JSON: `{"name": {"1.0": {"minWorkers": 1, "maxWorkers": 2, '
        '"batchSize": 4}}}`; numbers <= 0 count as not set',
        env="",
    )
    allowed_urls: tuple[str, ...] | None = _row(
        PATTERNS,
        None,
        "URLs that archives may come from. Each expression must match the whole URL, in any case. Not set: "
        "the model store and [TorchServe's model zoo](archives.md#where-archives-may-come-from). The variable"
        " counts only with `use_env_allowed_urls=true`",
        restored=False,
    )
    use_env_allowed_urls: bool = _row(
        BOOLEAN,
        False,
        "true: `TS_ALLOWED_URLS` counts; only read from the config file or the command line",
        env="",
        restored=False,
    )
    default_workers_per_model: int = _row(
        whole(), 0, "workers of a model that sets no number; 0: the number of GPUs, or of CPUs without GPUs"
    )
    job_queue_size: int = _row(whole(1), 100, "requests that may wait, for each model version")
    default_response_timeout: int = _row(
        whole(1), 120, "seconds in which a handler must answer, or send the next part of its answer"
    )
    default_startup_timeout: int = _row(whole(1), 120, "seconds in which a worker must load its model")
    unregister_model_timeout: int = _row(whole(1), 120, "seconds in which a model must be removed")
    default_service_handler: str | None = _row(TEXT, None, "handler of archives that name none")
    service_envelope: str | None = _row(
        choice("body", "json", "kserve", "kservev2"), None, "request envelope of all models"
    )
    install_py_dep_per_model: bool = _row(
        BOOLEAN, False, "true: an archive's requirements file is installed for its own workers before they start"
    )
    decode_input_request: bool = _row(BOOLEAN, True, "false: handlers get text and JSON as bytes")
    max_request_size: int = _row(whole(1), 6_553_500, "largest request, in bytes")
    max_response_size: int = _row(whole(1), 6_553_500, "largest answer, or part of an answer, in bytes")
    limit_max_image_pixels: bool = _row(BOOLEAN, True, "false: handlers may open images of any size")
    number_of_gpu: int | None = _row(whole(), None, "number of GPUs to use, at most those of the machine; not set: all")
    initial_worker_port: int = _row(whole(1), 9000, "number of the first worker, shown in logs and DescribeModel")
    initial_distribution_port: int = _row(PORT, 29500, "number of the first worker of models with a `parallelType`")
    blacklist_env_vars: str | None = _row(
        PATTERN, None, "variables that are not passed to workers; the expression must match the whole name"
    )
    ts_header_key_sequence_id: str = _row(
        TEXT, "ts_request_sequence_id", "header that names a sequence", env="TS_HEADER_KEY_SEQUENCE_ID"
    )
    ts_header_key_sequence_start: str = _row(
        TEXT, "ts_request_sequence_start", "header of a sequence's first request", env="TS_HEADER_KEY_SEQUENCE_START"
    )
    ts_header_key_sequence_end: str = _row(
        TEXT, "ts_request_sequence_end", "header of a sequence's last request", env="TS_HEADER_KEY_SEQUENCE_END"
    )

    # Security
    disable_token_authorization: bool | None = _row(
        BOOLEAN,
        None,
        "true: no tokens; false: tokens; not set: no tokens if all inference and management addresses are "
        "loopback and no key is given",
        restored=False,
    )
    token_expiration_min: float = _row(
        number(0),
        60.0,
        "minutes until a key that the server made expires",
        env="TS_TOKEN_EXPIRATION_TIME_MIN",
        restored=False,
    )
    enable_model_api: bool | None = _row(
        BOOLEAN,
        None,
        "true: models can be registered and unregistered while the server runs; not set: true if every address is "
        "loopback",
        restored=False,
    )
    enable_grpc_ssl: bool = _row(
        BOOLEAN, False, "TLS on the gRPC ports; needs `certificate_file` and `private_key_file`"
    )
    certificate_file: Path | None = _row(
        PATH, None, "PEM: the server's certificate, followed by the intermediate certificates"
    )
    private_key_file: Path | None = _row(PATH, None, "PEM: the certificate's key, PKCS8 or PKCS1, without a passphrase")
    keystore: Path | None = _row(
        PATH, None, "Java key store; not read. If TLS needs it, the error says how to convert it"
    )
    keystore_pass: str | None = _row(TEXT, None, "password of the Java key store", effect="none", secret=True)
    keystore_type: str | None = _row(TEXT, None, "type of the Java key store", effect="none")

    # Metrics and logs
    metrics_mode: str = _row(
        choice("log", "prometheus", "legacy"), "log", "destination of metrics: log files or the metrics API"
    )
    metrics_config: Path | None = _row(PATH, None, "metrics.yaml; not set: the server's own file")
    model_metrics_auto_detect: bool = _row(
        BOOLEAN, False, "true: handlers may record metrics that metrics.yaml does not list"
    )
    disable_system_metrics: bool = _row(BOOLEAN, False, "true: no CPU, memory, disk and GPU metrics")
    metric_time_interval: int = _row(whole(1), 60, "seconds between two samples of system metrics", env="")
    system_metrics_cmd: str | None = _row(
        TEXT, None, "command that prints system metrics; not set: the server measures them itself", env=""
    )

    # The settings themselves
    enable_envvars_config: bool = _row(
        BOOLEAN, False, "true: `TS_` variables of TorchServe's settings count", env_always=True, restored=False
    )
    debug: bool = _row(
        BOOLEAN, False, "true: one worker per model and no timeouts of workers, for stepping through a handler"
    )

    # Our own
    dev_model: Path | None = _start(
        PATH, None, "handler, model folder or archive that `torchserve dev` serves in place and reloads after each save"
    )
    debugpy_port: int = _start(whole(), 0, "port of this machine for debuggers of the worker of `dev_model`; 0: none")
    debug_errors: bool | None = _own(
        SWITCH,
        None,
        "true: the answer of a handler that raised has the exception, its file and line; false: the request "
        "ID; not set: true if every address is loopback",
    )
    profile: str | None = _start(
        choice(*PROFILES), None, "the server whose ports and behaviour become the defaults ([profiles.md](profiles.md))"
    )
    platform: str = _start(
        choice(AUTO, *PLATFORMS, NONE),
        AUTO,
        "the platform whose variables, paths and headers count ([platforms.md](platforms.md)); `auto`: the "
        "one whose variables are there",
    )
    health_route: str | None = _start(TEXT, None, "one more path of HTTP inference that answers like /ping")
    predict_route: str | None = _start(
        TEXT, None, "one more path of HTTP inference: predictions of the only model, in Vertex AI's form"
    )
    session_expires_s: float = _own(
        number(),
        0.0,
        "seconds after its begin at which a session of SageMaker's ends; 0: no sessions. "
        "`ts_header_key_sequence_id` names its header",
    )
    host: str | None = _start(
        HOST,
        None,
        "address of HTTP inference, gRPC inference and metrics; `0.0.0.0`: all interfaces. The management "
        "addresses stay",
    )
    http_host: str | None = _start(HOST, None, "host of `inference_address`")
    http_port: int | None = _start(PORT, None, "port of `inference_address`")
    metrics_host: str | None = _start(HOST, None, "host of `metrics_address`")
    metrics_port: int | None = _start(PORT, None, "port of `metrics_address`")
    http_extra_ports: tuple[int, ...] = _start(
        PORTS, (), "more ports of HTTP inference, on `host` if it is set, otherwise on the host of `inference_address`"
    )
    grpc_extra_ports: tuple[ExtraPort, ...] = _start(
        EXTRA_PORTS,
        (),
        "more ports of gRPC inference, `PORT` or `PORT:DIALECT` with a `stream_dialect` for this port only",
    )
    use_tls: bool = _start(SWITCH, False, "true: TLS on every HTTP and gRPC address except Unix sockets")
    work_dir: Path | None = _start(
        PATH, None, "directory for everything that the server writes, except what has a place of its own"
    )
    bypass_serve: bool = _start(SWITCH, False, "true: handlers run inside the server's process, for breakpoints")
    grpc_keepalive_time_ms: int | None = _own(
        whole(1), None, "ms of silence after which the server pings a gRPC client"
    )
    grpc_keepalive_timeout_ms: int | None = _own(
        whole(1), None, "ms in which the client must answer this ping, or its connection is closed"
    )
    grpc_keepalive_permit_without_calls: bool = _own(SWITCH, True, "false: clients without a call may not ping")
    grpc_http2_max_pings_without_data: int = _own(
        whole(0), 0, "number of pings to a client without data in between; 0: no limit"
    )
    grpc_http2_min_time_between_pings_ms: int | None = _own(whole(1), None, "ms between two pings to a client")
    grpc_http2_min_ping_interval_without_data_ms: int = _own(
        whole(0), 5000, "least ms between two pings of an idle client; one that pings faster loses its connection"
    )
    http2_resets_max: int = _own(
        whole(1),
        1000,
        "requests that a client may cancel at once on an HTTP/2 connection; above it, the connection takes no"
        " further requests",
    )
    http2_resets_per_second: float = _own(
        number(), 200.0, "requests that a client may go on cancelling each second on an HTTP/2 connection"
    )
    grpc_metrics: bool | None = _own(
        SWITCH,
        None,
        "true: `grpc_server_…` metrics in every metrics_mode, and `GET /metrics` on the gRPC ports too; false: none; "
        "not set: on the metrics API in `prometheus` mode",
    )
    otlp_endpoint: str | None = _start(
        TEXT,
        None,
        "URL of an OpenTelemetry collector for traces of requests (OTLP); not set: `OTEL_EXPORTER_OTLP_ENDPOINT`; "
        "neither of them: no traces",
    )
    trace_level: str | None = _own(
        choice("off", "timestamps", "tensors"),
        None,
        "Triton's: `off` traces no requests to models until TraceSetting changes it; not set: `timestamps` if "
        "there is a collector",
    )
    trace_rate: int | None = _own(whole(1), None, "Triton's: every N-th request to a model is traced; not set: 1")
    trace_count: int | None = _own(whole(-1), None, "Triton's: number of requests to trace; not set: -1, no limit")
    frontends: int = _start(
        FRONTENDS,
        1,
        "whole frontends behind one address, for machines of many cores; auto: 1 on up to 4 cores, else one for each "
        "4, at most 8 ([performance.md](performance.md#several-frontends))",
    )
    worker_start: str = _own(
        choice("fork", "exec"),
        "fork",
        "fork: workers start in milliseconds from a process that has imported torch; exec: each worker is a new "
        "Python process",
    )
    ray_address: str | None = _own(
        TEXT,
        None,
        "Ray's cluster, which places the workers: `auto`, or HOST:PORT of its head ([ray.md](ray.md)); not set: "
        "workers run on this machine",
    )
    ray_worker_host: str | None = _own(
        TEXT,
        None,
        "the host that workers on other nodes reach this server by; not set: this machine's address in the cluster",
    )
    ray_worker_port: int = _own(
        whole(0), 0, "the port that workers on other nodes connect to, with TLS; 0: any free one"
    )
    ray_spares: bool = _own(
        SWITCH,
        True,
        "true: Ray's nodes keep [started processes](ray.md#spare-processes), so that a lost worker is replaced sooner",
    )
    preload_torch: bool = _own(
        SWITCH,
        True,
        "false: the process that workers are forked from does not import torch, which takes seconds and 200 MB",
    )
    max_concurrency: int = _own(
        whole(1), 64, "requests at the same time on one worker whose handler is a generator or async"
    )
    job_queue_bytes_max: int = _own(whole(1), 1 << 30, "bytes of all requests that may wait, for each model version")
    lone_requests_wait: bool = _own(
        SWITCH,
        False,
        "true: every batch that isn't full waits for `maxBatchDelay`, as in TorchServe; false: only while "
        "further requests are likely",
    )
    stream_credit_bytes: int = _own(
        whole(65_536), 262_144, "bytes that a stream may be ahead of its reader before its handler waits"
    )
    program: ProgramLines = _start(
        PROGRAMS,
        ProgramLines(),
        "programs that start an aiSSEMBLE or KServe server, each with its arguments; their models are served "
        "too ([aissemble.md](aissemble.md))",
    )
    model_repository: tuple[Path, ...] = _start(
        PATHS,
        (),
        "directories of models in Triton's layout, in addition to the model store; also `s3://BUCKET/PREFIX` and `gs://BUCKET/PREFIX`",
    )
    model_control_mode: str = _own(
        choice("none", "poll", "explicit"),
        "none",
        "none: all models of the repositories are loaded at the start; poll: also changes of the files are "
        "followed; explicit: the models of load_model, and those that clients load",
    )
    load_model: tuple[str, ...] = _start(WORDS, (), "models to load at the start in explicit mode; `*`: all")
    repository_poll_secs: float = _own(number(0), 15.0, "seconds between two checks of the files in poll mode")
    kserve_mode: bool = _own(
        SWITCH,
        False,
        "true: the inference address also has KServe's `GET /` (alive), `/v1/models` and a model's readiness",
    )
    enable_grpc: bool = _own(SWITCH, True, "false: no gRPC listeners")
    enable_http: bool = _own(SWITCH, True, "false: no HTTP inference; management and metrics stay")
    server_id: str = _own(TEXT, "torchrelay", "name of the server in the metadata of the Open Inference Protocol")
    strict_readiness: bool = _own(
        SWITCH, True, "false: the server stays ready and healthy while a model has lost its workers"
    )
    loads_at_once_max: int = _own(
        whole(1), 4, "models that are loaded at the same time, at the start or after a check of the repositories"
    )
    load_on_demand: bool = _own(
        SWITCH,
        False,
        "true: a model gets its workers with its first request, and loses them after `model_keep_alive_s` "
        "([scaling.md](scaling.md#models-on-demand))",
    )
    model_keep_alive_s: float = _own(
        number(), 300.0, "seconds without requests after which a model on demand is unloaded; 0: never"
    )
    model_memory_max: int = _own(whole(), 0, "bytes of memory that all models on demand may use together; 0: no limit")
    model_gpu_memory_max: int = _own(
        whole(), 0, "bytes of memory on GPUs that all models on demand may use together; 0: no limit"
    )
    registered_memory_max: int = _own(
        MEMORY,
        0,
        "bytes of measured memory that all models may use together: a register call that exceeds it is "
        "answered with 507; 0: no limit; `auto`: 85 % of the machine's or the container's",
    )
    response_cache_size: int = _own(
        SIZE,
        64 << 20,
        "bytes, or a size such as 512MiB, of the answers that models with `cache` keep together "
        "([caching.md](caching.md)); 0: none",
    )
    response_cache_redis: str | None = _start(
        TEXT,
        None,
        "URL of a Redis that keeps these answers too, for several servers: `redis://:PASSWORD@HOST:PORT`, "
        "`rediss://…`. It needs `torchrelay[redis]`",
        secret=True,
    )
    limits_file: Path | None = _start(
        PATH,
        None,
        "file with the limits of clients, and their shares of models ([limits.md](limits.md)): `limits.yaml`; read "
        "again when it changes",
    )
    limits_redis: str | None = _start(
        TEXT,
        None,
        "URL of a Redis in which servers count each other, to divide these limits; not set: the limits are "
        "each server's. It needs `torchrelay[redis]`",
        secret=True,
    )
    rate_limit: str = _own(
        choice("off", "execution_count"),
        "off",
        "execution_count: a worker runs a batch when the resources in its config.pbtxt are free "
        "([triton.md](triton.md#rate-limiter))",
    )
    rate_limit_resources: tuple[LimitedResource, ...] = _own(
        RESOURCES,
        (),
        "how many of these resources a device, or each, has; of others there are as many as one worker needs at most",
    )
    exit_on_error: bool = _own(
        SWITCH, False, "true: the server does not start unless all models of the start can be loaded"
    )
    model_dir: Path | None = _start(
        PATH,
        None,
        "folder of the only model, or the folder that contains it, as KServe mounts it; `load_models` names the "
        "model. It is the `model_store` if that is not set",
    )
    language_models: Mapping[str, Any] = _start(
        OBJECT,
        dict,
        "settings for the handlers of [all language "
        "models](language-models.md#settings-for-all-language-models), stronger than `handler` in their "
        "`model-config.yaml`",
    )
    enable_docs_url: bool | None = _own(
        SWITCH,
        None,
        "true: a page to try the HTTP APIs at `/docs` and `/v2/docs`, and OpenAPI at `/openapi.json`; not "
        "set: true if every address is loopback",
    )
    enable_console: bool = _own(
        SWITCH, True, "false: no console at `/` of the management address, and nothing at `/` of the others"
    )
    stream_dialect: str = _own(
        choice("auto", "triton", "mlserver"),
        "auto",
        "message type of ModelStreamInfer's answers; auto: the first request of each stream decides",
    )
    shared_memory_keys: str = _start(
        PATTERN,
        "",
        "keys of system shared memory that Triton's clients may register. The expression must match the whole key:"
        " `/client_.*`. Default: no keys",
    )
    request_head_timeout_s: float = _own(
        number(0), 10.0, "seconds in which an HTTP/1.1 client must send a request's line and headers"
    )
    allowed_hosts: tuple[str, ...] = _start(
        HOSTS,
        (),
        "more names of this server as clients and proxies call it (the header `Host`). `.example.org`: every "
        "name below it; `*`: any name. Not set: loopback addresses answer to [their own "
        "names](security.md#names-of-the-server), other addresses to any",
    )
    client_ca_file: Path | None = _start(
        PATH,
        None,
        "PEM certificates of authorities: TLS addresses refuse clients without a certificate that one of them"
        " signed (mTLS)",
    )
    certificate_check_s: float = _own(
        number(0), 30.0, "seconds between two checks for new certificate files; 0: no checks"
    )
    unix_socket_mode: str = _own(
        MODE, "600", "permissions of `unix:` addresses: 600 lets the server's user connect, 660 also its group"
    )
    request_body_timeout_s: float = _own(
        number(0), 120.0, "seconds in which an HTTP client must send a request's body, and a gRPC client a message"
    )
    arriving_bytes_max: int = _own(
        whole(1),
        1 << 30,
        "bytes of all requests together that are still arriving, with their headers; above it, those that "
        "began first are refused. Also of all open gRPC streams together, each with 16 KiB and its metadata; "
        "above it, further ones are refused",
    )
    unread_bytes_max: int = _own(
        whole(1),
        1 << 28,
        "bytes of all answers together that wait because their clients don't read; above it, the connection that holds "
        "most of them loses its oldest answer",
    )
    write_timeout_s: float = _own(
        number(),
        120.0,
        "seconds for which a client may read nothing of its answer before it is disconnected; 0: no limit",
    )
    token_path: Path | None = _start(
        PATH,
        None,
        "keys from outside: a JSON file in the form of key_file.json, or a directory with files `inference`, "
        "`management`, `API`; read again when it changes",
    )
    inference_token: tuple[str, ...] = _start(
        KEYS, (), "keys of the inference API, best set in the environment", secret=True
    )
    management_token: tuple[str, ...] = _start(
        KEYS, (), "keys of the management API, best set in the environment", secret=True
    )
    api_token: tuple[str, ...] = _start(KEYS, (), "keys of the call that makes new keys (`/token`)", secret=True)
    token_reload_interval_s: float = _own(number(0.1), 5.0, "seconds between two checks of `token_path`")
    token_overlap_s: float = _own(
        number(), 0.0, "seconds for which an old key stays valid after `/token` has made a new one"
    )
    drain_grace_s: float = _own(
        number(), 0.0, "seconds for which a stopping server still serves, though no longer ready, before it drains"
    )
    drain_timeout_s: float = _own(number(), 30.0, "seconds in which accepted requests must end when the server stops")
    worker_kill_grace_s: float = _own(
        number(),
        5.0,
        "seconds in which a worker's other requests may end before it is killed because one request hangs",
    )
    restart_delay_s_max: float = _own(
        number(), 30.0, "longest pause in seconds before a failing worker is started again"
    )
    download_bytes_max: int = _own(whole(1), 100 << 30, "largest archive or folder from a URL, in bytes")
    download_timeout_s: float = _own(number(0), 60.0, "seconds without a byte after which a download fails")
    download_total_timeout_s: float = _own(
        number(0), 21_600.0, "seconds after which a download fails, even if data still arrives"
    )
    extract_bytes_max: int = _own(whole(1), 200 << 30, "largest size of an archive's unpacked files together, in bytes")
    extract_files_max: int = _own(whole(1), 100_000, "number of files in an archive or in a folder from S3")
    extract_ratio_max: float = _own(number(1), 200.0, "largest ratio of an archive's unpacked size to its own size")
    temp_dir: Path = _start(
        PATH, _system_temp_dir, "directory for sockets and unpacked archives; not set: the system's", env="TEMP"
    )
    environments_dir: Path | None = _start(
        PATH,
        None,
        "directory of the models' virtual environments, which are used again; not set: "
        "`torchrelay-environments-UID` in temp_dir",
    )
    environments_kept_max: int = _own(whole(), 10, "number of virtual environments to keep while no model uses them")
    install_timeout_s: float = _own(number(0), 1800.0, "seconds in which a model's requirements must be installed")
    log_location: Path = _start(PATH, Path("logs"), "directory of log files and snapshots", env="LOG_LOCATION")
    metrics_location: Path | None = _start(
        PATH, None, "directory of the metrics logs; not set: `log_location`", env="METRICS_LOCATION"
    )
    log_config: Path | None = _own(PATH, None, "logging configuration: YAML or JSON for dictConfig, or log4j2 XML")
    log_level: str = _own(choice("debug", "info", "warning", "error"), "info", "level of the server's own messages")
    log_format: str = _own(choice("text", "json"), "text", "text: TorchServe's patterns; json: one object per line")
    access_log: bool = _own(SWITCH, True, "one line per request")
    access_log_polls: bool = _own(
        SWITCH, False, "true: also lines for health probes, `/metrics` and the console's events that succeeded"
    )
    access_log_timing: bool = _own(
        SWITCH, False, "true: the line of a request shows where its time went, like `x-torchrelay-timing`"
    )
    access_log_format: str | None = _own(
        TEXT,
        None,
        "line of a request in asgi-logger's notation: `%(h)s \"%(r)s\" %(s)s %(D)s`; not set: TorchServe's line",
    )
    console_log: bool = _start(SWITCH, True, "true: the log is also written to standard output")
    ncs: bool = _start(SWITCH, False, "true: snapshots are neither read nor written (`--ncs`)")
    restore_snapshot: str = _start(
        choice("models", "all", "none"),
        "models",
        "part of the last snapshot that is restored. `models`: models and what belongs to them; `all`: also "
        "the other settings, as in TorchServe; `none`: nothing",
    )
    shared_snapshot: Path | None = _start(
        PATH,
        None,
        "directory, or `s3://BUCKET/PREFIX`, through which several servers serve the same models "
        "([several-servers.md](several-servers.md))",
    )
    shared_snapshot_poll_secs: float = _start(
        number(), 2.0, "seconds between two checks of `shared_snapshot` for changes by other servers"
    )
    snapshots_kept_max: int = _own(whole(1), 10, "number of snapshot files to keep; older ones are deleted")

    # Not settings
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    snapshot: Snapshot | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    mlserver: MLServerDefaults = MLServerDefaults()
    #: The number of this process among the `frontends`: 0 for the one that was started, the lead.
    frontend: int = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that the server listens on, without ports; Unix sockets are left out."""
        urls = (self.inference_address, self.management_address, self.metrics_address)
        names = (*(url.host for url in urls), self.grpc_inference_address, self.grpc_management_address)
        return tuple(dict.fromkeys(name for name in names if name and not unix_path(name)))

    @property
    def loopback_only(self) -> bool:
        """True if other machines can reach neither inference nor management addresses."""
        return not self.outside_addresses()

    @property
    def http_extra_addresses(self) -> tuple[Address, ...]:
        """The addresses of `http_extra_ports`; none if HTTP inference is off or a Unix socket."""
        first = self.inference_address
        if first.path or not self.enable_http:
            return ()
        return tuple(replace(first, host=self.host or first.host, port=port) for port in self.http_extra_ports)

    def outside_addresses(self) -> tuple[str, ...]:
        """Keys of the inference and management addresses that other machines can reach."""
        urls = {"inference_address": self.inference_address, "management_address": self.management_address}
        hosts = {key: getattr(self, key) for key in ("grpc_inference_address", "grpc_management_address")}
        outside = [key for key, url in urls.items() if not url.loopback]
        if not all(url.loopback for url in self.http_extra_addresses):
            outside.append("http_extra_ports")
        return (*outside, *(key for key, host in hosts.items() if not is_loopback(host)))

    @property
    def errors_explained(self) -> bool:
        """Whether clients see the exceptions of handlers."""
        return self.loopback_only if self.debug_errors is None else self.debug_errors

    @property
    def model_api_enabled(self) -> bool:
        """Whether models can be registered and unregistered while the server runs."""
        return self.loopback_only if self.enable_model_api is None else self.enable_model_api

    @property
    def docs_enabled(self) -> bool:
        """Whether the page about the HTTP APIs is served."""
        return self.loopback_only if self.enable_docs_url is None else self.enable_docs_url

    @property
    def times_requests(self) -> bool:
        return self.access_log and self.access_log_timing

    @property
    def counts_grpc_calls(self) -> bool:
        return self.metrics_mode == "prometheus" if self.grpc_metrics is None else self.grpc_metrics

    @property
    def environments_path(self) -> Path:
        return self.environments_dir or self.temp_dir / f"torchrelay-environments-{os.geteuid()}"

    @property
    def token_authorization(self) -> bool:
        """Whether calls need a key. If not set: when other machines can reach the server, or keys were given."""
        if self.disable_token_authorization is not None:
            return not self.disable_token_authorization
        return not self.loopback_only or bool(self.given_keys())

    def given_keys(self) -> tuple[str, ...]:
        keys = ("token_path", "inference_token", "management_token", "api_token")
        return tuple(key for key in keys if getattr(self, key))

    @property
    def key_dir(self) -> Path:
        return Path.cwd() if self.work_dir is None else self.work_dir

    @property
    def debugging(self) -> bool:
        """Whether a developer debugs handlers: each model has one worker, without time limits."""
        return self.debug or self.bypass_serve or self.dev_model is not None

    @property
    def snapshot_dir(self) -> Path:
        return self.log_location / "config"


def _setting(column: Field[Any]) -> Setting:
    more = {"group": "", "env_always": False, "effect": "", "restored": True, "secret": False, **column.metadata}
    more.setdefault("env", f"TS_{column.name.upper()}")
    return Setting(key=column.name, default=None if column.default is MISSING else column.default, **more)


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {column.name: _setting(column) for column in fields(ServerConfig) if "kind" in column.metadata}
)

#: Keys of TorchServe that are accepted without effect, with the reasons.
NO_EFFECT: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("number_of_netty_threads", "netty_client_threads", "prefer_direct_buffer", "use_native_io", "io_ratio"),
        "tunes Netty, which this server doesn't use",
    )
    | {
        "vmargs": "is for the Java virtual machine, which this server doesn't have",
        "plugins_path": "names Java plugins, which this server can't load",
        "metrics_format": "isn't needed: the metrics API always answers in Prometheus' format",
        "async_logging": "isn't needed: a separate thread always writes the logs",
        "grpc_engine": "isn't needed: the server has one transport of its own",
    }
    | dict.fromkeys(
        ("ipex_enable", "ipex_gpu_enable", "cpu_launcher_enable", "cpu_launcher_args"),
        "starts workers through Intel's extension, which this server doesn't do",
    )
    | {"cpp_log_config": "is for TorchServe's C++ workers, which this server doesn't have"}
)

#: Internal keys in TorchServe's snapshots.
INTERNAL = frozenset({"model_server_home", "version", "python", "tsConfigFile", "model_snapshot"})
