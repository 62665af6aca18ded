"""Every setting of the server, once: key, kind, default, environment name, documentation. Pure.

A field of ServerConfig is one row of the table; SETTINGS lists the rows. From them come parsing, defaults,
`torchserve config` and the table in docs/configuration.md. Keys are those of TorchServe's config.properties;
our own ones are in the group "torchrelay" and carry their unit at the end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from tempfile import gettempdir
from types import MappingProxyType
from typing import Any

from ts_frontend.config.addresses import Address, is_loopback, unix_path
from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.config.foreign.profiles import PROFILES
from ts_frontend.config.kinds import (
    BOOLEAN,
    EXTRA_PORTS,
    HOST,
    HOSTS,
    KEYS,
    MODE,
    MODELS,
    OPEN_INFERENCE,
    PATH,
    PATHS,
    PATTERN,
    PATTERNS,
    PORT,
    PROGRAMS,
    TEXT,
    WORDS,
    ConfigError,
    ExtraPort,
    ModelEntries,
    ProgramLines,
    SettingKind,
    address,
    choice,
    number,
    whole,
)
from ts_frontend.config.snapshot import Snapshot

#: How `Setting.effect` reads in the documentation and in the note that a start with such a setting logs.
EFFECTS = {"none": "accepted; has no effect here"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `env` is the environment variable, "" for none; `env_always`: it counts without enable_envvars_config.
    `effect` is "" for a setting that is read, or a key of EFFECTS. `restored` is False for what a snapshot that wasn't
    asked for by name can't set: security, and where things lie. `secret`: never shown or written."""

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
    """Something about the settings that the log should say."""

    level: int
    text: str


def _row(kind: SettingKind, default: object, doc: str, **more: Any) -> Any:
    """A dataclass field that carries its row; a callable makes the default. `more` are further columns of Setting."""
    metadata = {"kind": kind, "doc": doc, **more}
    shown = not more.get("secret", False)
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata, repr=shown)
    )


def _own(kind: SettingKind, default: object, doc: str, **more: Any) -> Any:
    return _row(kind, default, doc, group="torchrelay", env_always=True, **more)


def _system_temp_dir() -> Path:
    try:
        return Path(gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}. Set TMPDIR to a directory that can be written.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of one server, checked. None: not set. `sources` says where each value that isn't the default
    came from; `notes` is for the log; `snapshot` holds the models to restore; `environment` is the process's;
    `mlserver`: of MLServer's models."""

    # Addresses
    inference_address: Address = _row(
        address("inference"),
        Address("http", "127.0.0.1", 8080),
        "REST inference API: `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`, as the two below",
    )
    management_address: Address = _row(
        address("management"),
        Address("http", "127.0.0.1", 8081),
        "REST management API; equal to `inference_address`: one listener serves both",
    )
    metrics_address: Address = _row(address("metrics"), Address("http", "127.0.0.1", 8082), "REST metrics API")
    enable_metrics_api: bool = _row(BOOLEAN, True, "false: no metrics listener")
    grpc_inference_address: str = _row(HOST, "127.0.0.1", "where gRPC inference listens")
    grpc_management_address: str = _row(HOST, "127.0.0.1", "where gRPC management listens")
    grpc_inference_port: int = _row(PORT, 7070, "0 takes a free port")
    grpc_management_port: int = _row(PORT, 7071, "0 takes a free port")
    grpc_inference_max_connection_age_ms: int | None = _row(
        whole(1), None, "ms after which a gRPC connection is asked to close; not set: never"
    )
    grpc_inference_max_connection_age_grace_ms: int | None = _row(
        whole(0), None, "ms that its calls then have to end; not set: any time"
    )
    grpc_management_max_connection_age_ms: int | None = _row(whole(1), None, "the same for gRPC management")
    grpc_management_max_connection_age_grace_ms: int | None = _row(whole(0), None, "the same for gRPC management")
    ts_open_inference_protocol: bool = _row(
        OPEN_INFERENCE,
        False,
        "`oip` or `true`: POST /v2/models/MODEL/infer reads tensors for every model; else for those that declare them",
        env="TS_OPEN_INFERENCE_PROTOCOL",
        env_always=True,
    )
    cors_allowed_origin: str | None = _row(TEXT, None, "Access-Control-Allow-Origin of REST answers")
    cors_allowed_methods: str | None = _row(TEXT, None, "Access-Control-Allow-Methods")
    cors_allowed_headers: str | None = _row(TEXT, None, "Access-Control-Allow-Headers")

    # Models
    model_store: Path | None = _row(PATH, None, "directory of the archives; needed to start")
    workflow_store: Path | None = _row(
        PATH, None, "directory of workflow archives; not set: `model_store`", restored=False
    )
    load_models: tuple[str, ...] = _row(
        WORDS,
        (),
        "what to load at start: `NAME=URL`, `URL`, or `ALL` for every archive of the store",
        restored=False,
    )
    models: ModelEntries = _row(
        MODELS,
        dict,
        'settings by model and version, JSON: `{"name": {"1.0": {"minWorkers": 1, "maxWorkers": 2, '
        '"batchSize": 4, "maxBatchDelay": 50, "responseTimeout": 120, "startupTimeout": 120}}}`; '
        "numbers <= 0 don't count",
        env="",
    )
    allowed_urls: tuple[str, ...] | None = _row(
        PATTERNS,
        None,
        "URLs that archives may come from, each matched whole and in any case; not set: files in the model store and "
        "`https://torchserve.pytorch.org/mar_files/` (and the same at `torchserve.s3.amazonaws.com`). "
        "The variable counts only with `use_env_allowed_urls=true`",
        restored=False,
    )
    use_env_allowed_urls: bool = _row(
        BOOLEAN, False, "true: `TS_ALLOWED_URLS` counts; config file or command line only", env="", restored=False
    )
    default_workers_per_model: int = _row(whole(), 0, "0: as many as there are GPUs, or else CPUs")
    job_queue_size: int = _row(whole(1), 100, "requests that may wait, per model version")
    default_response_timeout: int = _row(whole(1), 120, "s that a handler may take for an answer, or a part of one")
    default_startup_timeout: int = _row(whole(1), 120, "s that a worker may take to load its model")
    unregister_model_timeout: int = _row(whole(1), 120, "s that removing a model may take")
    default_service_handler: str | None = _row(TEXT, None, "handler of archives that name none")
    service_envelope: str | None = _row(
        choice("body", "json", "kserve", "kservev2"), None, "request envelope of all models"
    )
    install_py_dep_per_model: bool = _row(
        BOOLEAN, False, "install an archive's requirements file, for its own workers, before they start"
    )
    decode_input_request: bool = _row(BOOLEAN, True, "false: handlers get text and JSON as bytes")
    max_request_size: int = _row(whole(1), 6_553_500, "bytes of a request")
    max_response_size: int = _row(whole(1), 6_553_500, "bytes of an answer, or a part of one")
    limit_max_image_pixels: bool = _row(BOOLEAN, True, "false: handlers may open images of any size")
    number_of_gpu: int | None = _row(whole(), None, "GPUs to use; not set: all; never more than there are")
    initial_worker_port: int = _row(whole(1), 9000, "number of the first worker (in logs and DescribeModel)")
    initial_distribution_port: int = _row(PORT, 29500, "number of the first worker of models with a `parallelType`")
    blacklist_env_vars: str | None = _row(PATTERN, None, "variables whose whole name matches aren't passed to workers")
    ts_header_key_sequence_id: str = _row(
        TEXT, "ts_request_sequence_id", "header that names a sequence", env="TS_HEADER_KEY_SEQUENCE_ID"
    )
    ts_header_key_sequence_start: str = _row(
        TEXT,
        "ts_request_sequence_start",
        "header of a sequence's first request",
        env="TS_HEADER_KEY_SEQUENCE_START",
    )
    ts_header_key_sequence_end: str = _row(
        TEXT,
        "ts_request_sequence_end",
        "header of a sequence's last request",
        env="TS_HEADER_KEY_SEQUENCE_END",
    )

    # Security
    disable_token_authorization: bool | None = _row(
        BOOLEAN,
        None,
        "true: no tokens, also when an address can be reached from other machines; false: tokens in any case; "
        "not set: none while every inference and management address is loopback and no key is given",
        restored=False,
    )
    token_expiration_min: float = _row(
        number(0),
        60.0,
        "minutes that a key made by the server counts",
        env="TS_TOKEN_EXPIRATION_TIME_MIN",
        restored=False,
    )
    enable_model_api: bool | None = _row(
        BOOLEAN,
        None,
        "register and unregister while the server runs; not set: allowed while every address is loopback",
        restored=False,
    )
    enable_grpc_ssl: bool = _row(
        BOOLEAN, False, "TLS on the gRPC ports; needs `certificate_file` and `private_key_file`"
    )
    certificate_file: Path | None = _row(
        PATH, None, "PEM: the server's certificate, then those between it and its authority"
    )
    private_key_file: Path | None = _row(PATH, None, "PEM: its key, PKCS8 or PKCS1, without a passphrase")
    keystore: Path | None = _row(
        PATH, None, "Java key store: not read; where TLS needs it, the refusal says how to convert it"
    )
    keystore_pass: str | None = _row(TEXT, None, "of the Java key store", effect="none", secret=True)
    keystore_type: str | None = _row(TEXT, None, "of the Java key store", effect="none")

    # Metrics and logs
    metrics_mode: str = _row(
        choice("log", "prometheus", "legacy"), "log", "where metrics go: log files or the metrics API"
    )
    metrics_config: Path | None = _row(PATH, None, "metrics.yaml; not set: the one that comes with the server")
    model_metrics_auto_detect: bool = _row(
        BOOLEAN, False, "true: metrics of handlers that metrics.yaml doesn't name count too"
    )
    disable_system_metrics: bool = _row(BOOLEAN, False, "true: no CPU, memory, disk and GPU metrics")
    metric_time_interval: int = _row(whole(1), 60, "s between two samples of system metrics", env="")
    system_metrics_cmd: str | None = _row(
        TEXT, None, "command that prints system metrics; not set: the server's own", env=""
    )

    # The settings themselves
    enable_envvars_config: bool = _row(
        BOOLEAN, False, "true: `TS_` variables of TorchServe's settings count", env_always=True, restored=False
    )
    debug: bool = _row(
        BOOLEAN, False, "true: one worker per model, no timeouts of workers; for stepping through a handler"
    )

    # Our own
    profile: str | None = _own(
        choice(*PROFILES), None, "whose ports and habits are the defaults (docs/profiles.md)", restored=False
    )
    host: str | None = _own(
        HOST,
        None,
        "where HTTP inference, gRPC inference and metrics listen; `0.0.0.0`: everywhere. Management isn't moved",
        restored=False,
    )
    http_host: str | None = _own(HOST, None, "host of `inference_address`", restored=False)
    http_port: int | None = _own(PORT, None, "port of `inference_address`", restored=False)
    metrics_host: str | None = _own(HOST, None, "host of `metrics_address`", restored=False)
    metrics_port: int | None = _own(PORT, None, "port of `metrics_address`", restored=False)
    grpc_extra_ports: tuple[ExtraPort, ...] = _own(
        EXTRA_PORTS,
        (),
        "further ports of gRPC inference, `PORT` or `PORT:DIALECT` with a `stream_dialect` for this port alone",
        restored=False,
    )
    use_tls: bool = _own(
        BOOLEAN, False, "true: TLS on every address that isn't a Unix socket, gRPC and HTTP", restored=False
    )
    work_dir: Path | None = _own(
        PATH,
        None,
        "the one directory that is written to: temporary files, logs and snapshots, environments, the pid file and "
        "key_file.json, unless one of them has a place of its own",
        restored=False,
    )
    bypass_serve: bool = _own(
        BOOLEAN,
        False,
        "true: handlers run inside the server's process, one request at a time; for breakpoints, never in production",
        restored=False,
    )
    grpc_keepalive_time_ms: int | None = _own(
        whole(1), None, "ms of silence after which a gRPC client is pinged (grpcio engine)"
    )
    grpc_keepalive_timeout_ms: int | None = _own(
        whole(1), None, "ms that it then has to answer before its connection is closed (grpcio engine)"
    )
    grpc_keepalive_permit_without_calls: bool = _own(
        BOOLEAN, True, "false: clients without a call may not ping (grpcio engine)"
    )
    grpc_http2_max_pings_without_data: int = _own(
        whole(0), 0, "pings sent to a client while nothing else is sent; 0: any number (grpcio engine)"
    )
    grpc_http2_min_time_between_pings_ms: int | None = _own(
        whole(1), None, "ms between two pings to a client (grpcio engine)"
    )
    grpc_http2_min_ping_interval_without_data_ms: int = _own(
        whole(0),
        5000,
        "ms between two pings of an idle client; one that pings faster loses its connection (grpcio engine)",
    )
    grpc_engine: str = _own(
        choice("auto", "h2corn", "grpcio"), "auto", "what serves gRPC; auto: h2corn where it is installed, else grpcio"
    )
    grpc_metrics: bool | None = _own(
        BOOLEAN,
        None,
        "true: `grpc_server_…` metrics in every metrics_mode, and `GET /metrics` on the gRPC ports too; false: none; "
        "not set: on the metrics API in `prometheus` mode",
    )
    otlp_endpoint: str | None = _own(
        TEXT,
        None,
        "URL of an OpenTelemetry collector that gets a trace of each request (OTLP); not set: "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`, and without that no traces",
        restored=False,
    )
    trace_level: str | None = _own(
        choice("off", "timestamps", "tensors"),
        None,
        "Triton's: `off` traces no request to a model, until TraceSetting says otherwise; not set: `timestamps` where "
        "there is a collector",
    )
    trace_rate: int | None = _own(whole(1), None, "Triton's: one request to a model of so many is traced; not set: 1")
    trace_count: int | None = _own(
        whole(-1), None, "Triton's: so many requests are traced, and no more; not set: -1, any number"
    )
    worker_start: str = _own(
        choice("fork", "exec"),
        "fork",
        "fork: workers start in milliseconds from a process that has imported torch; exec: each as a fresh Python",
    )
    max_concurrency: int = _own(whole(1), 64, "requests at a time on one worker whose handler is a generator or async")
    job_queue_bytes_max: int = _own(whole(1), 1 << 30, "bytes of requests that may wait, per model version")
    stream_credit_bytes: int = _own(
        whole(65_536), 262_144, "bytes that a stream may be ahead of its reader; then its handler waits"
    )
    program: ProgramLines = _own(
        PROGRAMS,
        ProgramLines(),
        "programs that start a server of aiSSEMBLE's or KServe's, each with its arguments: their models are served "
        "beside the others (docs/aissemble.md)",
        restored=False,
    )
    model_repository: tuple[Path, ...] = _own(
        PATHS,
        (),
        "directories of models in Triton's layout, beside the model store; also `s3://BUCKET/PREFIX`",
        restored=False,
    )
    model_control_mode: str = _own(
        choice("none", "poll", "explicit"),
        "none",
        "of model_repository; none: all, at start; poll: and as the files change; explicit: load_model, and by calls",
    )
    load_model: tuple[str, ...] = _own(WORDS, (), "models to load at start in explicit mode; `*`: all", restored=False)
    repository_poll_secs: float = _own(number(0), 15.0, "s between two looks at the files in poll mode")
    kserve_mode: bool = _own(
        BOOLEAN,
        False,
        "the inference address also has what KServe's own servers have there: `GET /` (alive), `/v1/models` and a "
        "model's readiness",
    )
    enable_grpc: bool = _own(BOOLEAN, True, "false: no gRPC listeners")
    enable_http: bool = _own(BOOLEAN, True, "false: no HTTP inference; management and metrics stay")
    server_id: str = _own(TEXT, "torchrelay", "what the Open Inference Protocol's metadata calls the server")
    strict_readiness: bool = _own(
        BOOLEAN, True, "false: the server counts as ready, and healthy, also while a model has lost its workers"
    )
    loads_at_once_max: int = _own(
        whole(1),
        4,
        "models that a start, or a look at the repositories, makes ready at the same time; Triton's default",
    )
    exit_on_error: bool = _own(
        BOOLEAN, False, "true: no server starts unless all models to load at start can be, with their workers"
    )
    model_dir: Path | None = _own(
        PATH,
        None,
        "the folder of the one model that is served, or in which it is, as KServe mounts it; `load_models` names the "
        "model. Not set `model_store`: this",
        restored=False,
    )
    enable_docs_url: bool = _own(
        BOOLEAN, False, "true: a page about the HTTP APIs at `/docs` and `/v2/docs`, and OpenAPI at `/openapi.json`"
    )
    stream_dialect: str = _own(
        choice("auto", "triton", "mlserver"),
        "auto",
        "whose answers ModelStreamInfer gives; auto: the first request of each stream tells",
    )
    shared_memory_keys: str = _own(
        PATTERN,
        "",
        "keys of system shared memory that Triton's clients may have tensors in, matched whole: `/client_.*`; none",
        restored=False,
    )
    request_head_timeout_s: float = _own(
        number(0), 10.0, "s that an HTTP client may pause while it sends a request's line and headers"
    )
    allowed_hosts: tuple[str, ...] = _own(
        HOSTS,
        (),
        "further names of this server, as clients and proxies call it (the header `Host`); `.example.org`: every name "
        "below; `*`: any. Not set: addresses of this machine alone answer to `localhost`, loopback addresses and the "
        "addresses of this table, the others to any",
        restored=False,
    )
    client_ca_file: Path | None = _own(
        PATH,
        None,
        "PEM certificates of authorities: TLS addresses then refuse clients without a certificate of theirs (mTLS)",
        restored=False,
    )
    certificate_check_s: float = _own(
        number(0), 30.0, "s between two looks for new certificate files, which new connections then get; 0: never"
    )
    unix_socket_mode: str = _own(
        MODE, "600", "permissions of `unix:` addresses: 600 lets the server's user connect, 660 its group, too"
    )
    request_body_timeout_s: float = _own(
        number(0), 120.0, "s that an HTTP client may take to send a request's body; it may pause for at most 60 of them"
    )
    token_path: Path | None = _own(
        PATH,
        None,
        "keys from outside: a JSON file in the form of key_file.json, or a directory with files `inference`, "
        "`management`, `API` (a mounted secret); read again as it changes",
        restored=False,
    )
    inference_token: tuple[str, ...] = _own(
        KEYS, (), "keys of the inference API; best set in the environment", secret=True, restored=False
    )
    management_token: tuple[str, ...] = _own(
        KEYS, (), "keys of the management API; best set in the environment", secret=True, restored=False
    )
    api_token: tuple[str, ...] = _own(
        KEYS, (), "keys of the call that makes new keys (`/token`)", secret=True, restored=False
    )
    token_reload_interval_s: float = _own(number(0.1), 5.0, "s between two looks at `token_path`")
    token_overlap_s: float = _own(
        number(), 0.0, "s that a key still counts after `/token` has made a new one; 0: none, as TorchServe"
    )
    drain_grace_s: float = _own(
        number(), 0.0, "s that a server which is to stop goes on serving, not ready any more, before it drains"
    )
    drain_timeout_s: float = _own(number(), 30.0, "s that accepted requests have to end when the server stops")
    worker_kill_grace_s: float = _own(
        number(), 5.0, "s that the other requests of a worker have to end before it is killed for one that hangs"
    )
    restart_delay_s_max: float = _own(number(), 30.0, "s, the longest pause before a failing worker is started again")
    download_bytes_max: int = _own(whole(1), 100 << 30, "bytes of one archive or folder from a URL")
    download_timeout_s: float = _own(number(0), 60.0, "s without any byte after which a download fails")
    download_total_timeout_s: float = _own(number(0), 21_600.0, "s after which a download fails, however it goes on")
    extract_bytes_max: int = _own(whole(1), 200 << 30, "bytes of one archive's files, unpacked")
    extract_files_max: int = _own(whole(1), 100_000, "files of one archive, or of a folder from S3")
    extract_ratio_max: float = _own(number(1), 200.0, "times that unpacking may enlarge an archive")
    temp_dir: Path = _own(
        PATH,
        _system_temp_dir,
        "working directory: sockets, unpacked archives; not set: the system's",
        env="TEMP",
        restored=False,
    )
    environments_dir: Path | None = _own(
        PATH,
        None,
        "directory of the models' virtual environments, which are kept for the next start; "
        "not set: `torchrelay-environments-UID` in temp_dir",
        restored=False,
    )
    environments_kept_max: int = _own(whole(), 10, "virtual environments kept while no model uses them")
    install_timeout_s: float = _own(number(0), 1800.0, "s that installing a model's requirements may take")
    log_location: Path = _own(
        PATH, Path("logs"), "directory of log files and snapshots", env="LOG_LOCATION", restored=False
    )
    metrics_location: Path | None = _own(
        PATH, None, "directory of the metrics logs; not set: `log_location`", env="METRICS_LOCATION", restored=False
    )
    log_config: Path | None = _own(PATH, None, "logging configuration: YAML or JSON for dictConfig, or log4j2 XML")
    log_level: str = _own(choice("debug", "info", "warning", "error"), "info", "of the server's own messages")
    log_format: str = _own(choice("text", "json"), "text", "text: TorchServe's patterns; json: one object per line")
    access_log: bool = _own(BOOLEAN, True, "one line per request")
    access_log_format: str | None = _own(
        TEXT,
        None,
        'the line of a request in words of asgi-logger: `%(h)s "%(r)s" %(s)s %(D)s`; not set: TorchServe\'s',
    )
    console_log: bool = _own(BOOLEAN, True, "the log on standard output too", restored=False)
    ncs: bool = _own(BOOLEAN, False, "true: snapshots are neither read nor written (`--ncs`)", restored=False)
    restore_snapshot: str = _own(
        choice("models", "all", "none"),
        "models",
        "of the last snapshot: models and what belongs to them; `all`: addresses, TLS and the other settings, too, as "
        "TorchServe does; `none`: nothing",
        restored=False,
    )
    snapshots_kept_max: int = _own(whole(1), 10, "snapshot files kept; older ones are deleted")

    # Not settings
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    snapshot: Snapshot | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    mlserver: MLServerDefaults = MLServerDefaults()

    @property
    def hosts(self) -> tuple[str, ...]:
        """What the server listens on, without ports and Unix sockets."""
        urls = (self.inference_address, self.management_address, self.metrics_address)
        names = (*(url.host for url in urls), self.grpc_inference_address, self.grpc_management_address)
        return tuple(dict.fromkeys(name for name in names if name and not unix_path(name)))

    @property
    def loopback_only(self) -> bool:
        """True while no API that can predict or manage is reachable from other machines."""
        return not self.outside_addresses()

    def outside_addresses(self) -> tuple[str, ...]:
        """Keys of the inference and management addresses that other machines can reach."""
        urls = {"inference_address": self.inference_address, "management_address": self.management_address}
        hosts = {key: getattr(self, key) for key in ("grpc_inference_address", "grpc_management_address")}
        outside = [key for key, url in urls.items() if not url.loopback]
        return (*outside, *(key for key, host in hosts.items() if not is_loopback(host)))

    @property
    def model_api_enabled(self) -> bool:
        """May models be registered and unregistered while the server runs?"""
        return self.loopback_only if self.enable_model_api is None else self.enable_model_api

    @property
    def counts_grpc_calls(self) -> bool:
        return self.metrics_mode == "prometheus" if self.grpc_metrics is None else self.grpc_metrics

    @property
    def environments_path(self) -> Path:
        return self.environments_dir or self.temp_dir / f"torchrelay-environments-{os.geteuid()}"

    @property
    def token_authorization(self) -> bool:
        """Does a call need a key? When nobody said: where others can reach the server, or keys were given."""
        if self.disable_token_authorization is not None:
            return not self.disable_token_authorization
        return not self.loopback_only or bool(self.given_keys())

    def given_keys(self) -> tuple[str, ...]:
        """The settings that bring keys from outside."""
        keys = ("token_path", "inference_token", "management_token", "api_token")
        return tuple(key for key in keys if getattr(self, key))

    @property
    def key_dir(self) -> Path:
        """Where key_file.json is."""
        return Path.cwd() if self.work_dir is None else self.work_dir

    @property
    def debugging(self) -> bool:
        """A developer steps through handlers: each model has one worker, and no time limit ends it."""
        return self.debug or self.bypass_serve

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

#: Keys of TorchServe that are accepted and do nothing: why.
NO_EFFECT: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("number_of_netty_threads", "netty_client_threads", "prefer_direct_buffer", "use_native_io", "io_ratio"),
        "tunes Netty, which this server doesn't have",
    )
    | {
        "vmargs": "is for the Java virtual machine, which this server doesn't have",
        "plugins_path": "names Java plugins, which this server can't load",
        "async_logging": "isn't needed: a thread of their own always writes the logs",
    }
    | dict.fromkeys(
        ("ipex_enable", "ipex_gpu_enable", "cpu_launcher_enable", "cpu_launcher_args"),
        "starts workers through Intel's extension, which this server doesn't do",
    )
    | {"cpp_log_config": "is for TorchServe's C++ workers, which this server doesn't have"}
)

#: Keys that TorchServe writes into its snapshots for itself.
INTERNAL = frozenset({"model_server_home", "version", "python", "tsConfigFile", "model_snapshot"})
