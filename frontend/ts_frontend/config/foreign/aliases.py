"""The table of other servers' options, each with the settings of this server that it sets. Pure.

A row is a flag (`--grpc-port 8001`), a key (`--set grpc_port=8001`, or a line of the config file) and, for some, an
environment variable. `-`, `_` and `.` are equal in its name. A meaning maps the option's text to settings with their
texts, or to a note why it has no effect; it raises ValueError for a value that this server can't honour.

A profile has the ports and behaviour of another server as defaults of this one. An explicit setting overrides the
profile, and the profile overrides a snapshot. A listener whose port the profile needs gets another port.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import quote

from ts.protocol.tasks import ANSWER, CLASSIFY, EMBED, FILL, GENERATE, SCORE, TAG
from ts_frontend.config.kinds import SWITCH, grouped, is_hub_name

_LOCAL = "http://127.0.0.1"
#: These servers have no limit over HTTP, or 64 MiB; tensors of images are larger than TorchServe's 6.5 MB.
_LARGE = {"max_request_size": "67108864", "max_response_size": "67108864"}

#: These servers keep no state between runs: no snapshot is read or written.
_FORGETFUL = {"ncs": "true"}

#: These servers have Prometheus metrics.
_SCRAPED = {"metrics_mode": "prometheus"}

#: Settings by profile. 8081 is TorchServe's management API and the gRPC port of MLServer and KServe's servers.
PROFILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "torchserve": {},
        "triton": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8000",
            "grpc_inference_port": "8001",
            "metrics_address": f"{_LOCAL}:8002",
            **_SCRAPED,
            **_LARGE,
        },
        "mlserver": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8080",
            "grpc_inference_port": "8081",
            "management_address": f"{_LOCAL}:8083",
            "metrics_address": f"{_LOCAL}:8082",
            **_SCRAPED,
            "enable_docs_url": "true",
            **_LARGE,
        },
        "kserve": {
            **_FORGETFUL,
            "host": "0.0.0.0",
            "inference_address": f"{_LOCAL}:8080",
            "grpc_inference_port": "8081",
            "management_address": f"{_LOCAL}:8083",
            "metrics_address": f"{_LOCAL}:8082",
            "disable_token_authorization": "true",
            "kserve_mode": "true",
            **_SCRAPED,
            **_LARGE,
        },
        "dynamo": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8000",
            "grpc_inference_port": "8001",
            **_SCRAPED,
            "grpc_metrics": "true",
            "model_control_mode": "explicit",
            "load_model": "*",
            "max_request_size": "4194304",
            "max_response_size": "4194304",
        },
        "max": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8000",
            "grpc_inference_port": "9090",
            "model_store": "model_store",
        },
    }
)

#: The settings that `kserve_mode` adds to another profile: behind KServe, the gateway authorizes calls.
KSERVE_MODE: Mapping[str, str] = MappingProxyType({"host": "0.0.0.0", "disable_token_authorization": "true"})

#: Given keys turn token authorization on in any profile.
KEYS = ("token_path", "inference_token", "management_token", "api_token")


@dataclass(frozen=True, slots=True)
class Said:
    """An option's effect: texts by setting, and why the option, or its `unused_part`, has no effect."""

    settings: Mapping[str, str]
    unused: str = ""
    unused_part: str = ""


Meaning: TypeAlias = Callable[[str], Said]


@dataclass(frozen=True, slots=True)
class Alias:
    """An option of other servers. `name`: written with `_`; `whose`: the servers; `switch`: as a flag, it may have no
    value, for true; `doc`: its description in the documentation."""

    name: str
    whose: str
    meaning: Meaning
    doc: str
    switch: bool = False
    env: tuple[str, ...] = ()
    #: Only a flag: the key of this name is a setting of this server with another meaning.
    spelt: str = ""
    #: May be given several times; the texts are joined with `;`.
    repeated: bool = False

    @property
    def flag(self) -> str:
        return self.spelt or "--" + self.name.replace("_", "-")


def canonical(name: str) -> str:
    """A key or option with `_` in place of `-` and `.`."""
    return name.strip().replace("-", "_").replace(".", "_")


# --- meanings


def sets(*keys: str) -> Meaning:
    return lambda text: Said(dict.fromkeys(keys, text))


def _turns(key: str) -> Meaning:
    """A meaning that sets one of TorchServe's booleans, which knows only true and false, by other servers' words."""
    return lambda text: Said({key: str(SWITCH.parse(text)).lower()})


def _sets_and(key: str, **more: str) -> Meaning:
    return lambda text: Said({key: text, **more})


def _only(value: bool, reason: str) -> Meaning:
    """A meaning that accepts only this value, the server's fixed behaviour."""

    def meaning(text: str) -> Said:
        if SWITCH.parse(text) is not value:
            raise ValueError(reason)
        return Said({})

    return meaning


def nothing(why: str) -> Meaning:
    return lambda text: Said({}, why)


def _refused(why: str) -> Meaning:
    def meaning(text: str) -> Said:
        raise ValueError(why)

    return meaning


def seconds(key: str) -> Meaning:
    def meaning(text: str) -> Said:
        if not text.isdecimal():
            raise ValueError("allowed are whole numbers, milliseconds")
        return Said({key: str(max(1, round(int(text) / 1000)))})

    return meaning


def _verbosity(text: str) -> Said:
    """Triton's verbosity: 0 for off, a level above 0, or a truth value."""
    verbose = int(text) > 0 if text.isdecimal() else SWITCH.parse(text)
    return Said({"log_level": "debug"} if verbose else {})


def _one_model(text: str) -> Said:
    path = PurePath(text)
    if is_hub_name(text):
        return Said({"load_models": f"{path.name.partition('@')[0]}={text}", "profile": "max"})  # or a name of the hub
    name = path.name.removesuffix(".mar").removesuffix(".gguf")
    loaded = {"load_models": f"{name}={path.name}", "profile": "max"}
    return Said(loaded if len(path.parts) == 1 else {**loaded, "model_store": str(path.parent)})


def language(key: str, read: Callable[[str], object] = str) -> Meaning:
    """A meaning that sets a setting of all language models."""
    return lambda text: Said({"language_models": json.dumps({key: read(text)})})


def vllm(name: str, read: Callable[[str], object] = str) -> Meaning:
    """A meaning that sets an argument of vLLM's engine."""
    return lambda text: Said({"language_models": json.dumps({"vllm_engine_config": {name: read(text)}})})


def _of_engine(text: str) -> Said:
    """KServe's backend."""
    engines = {"auto": "", "vllm": "vllm", "huggingface": "transformers"}
    if text not in engines:
        raise ValueError(f"allowed are {', '.join(engines)}")
    return Said({"language_models": json.dumps({"engine": engines[text]})} if engines[text] else {})


#: Tasks of KServe, vLLM and Hugging Face, and those of the engine transformers.
TASKS = {
    **dict.fromkeys(("text_generation", "text2text_generation", "generate"), GENERATE),
    **dict.fromkeys(("text_embedding", "feature_extraction", "sentence_similarity", "embed", "embeddings"), EMBED),
    **dict.fromkeys(("text_ranking", "rerank", "score"), SCORE),
    **dict.fromkeys(("text_classification", "sequence_classification", "sentiment_analysis", "classify"), CLASSIFY),
    **dict.fromkeys(("token_classification", "ner"), TAG),
    "fill_mask": FILL,
    "question_answering": ANSWER,
}


def _task(text: str) -> str:
    found = TASKS.get(text.replace("-", "_"))
    if found is None:
        raise ValueError(
            "allowed are text_generation, text2text_generation, text_embedding, rerank, sequence_classification, "
            "token_classification, fill_mask, question_answering"
        )
    return found


def _predictions(kind: str) -> Meaning:
    """A meaning for KServe's flags that say what V1 gets of a model that classifies."""
    return lambda text: Said({"language_models": json.dumps({"predictions": kind})} if SWITCH.parse(text) else {})


def _of_hub(text: str) -> Said:
    """KServe's model_id: a name of the hub, or a path. KServe's own name for its model is `model`."""
    return Said({"load_models": f"model={text}"})


def _revision(text: str) -> Said:
    return Said({"load_models": f"@{text}"})


def _quieter(level: str) -> Meaning:
    """A meaning that, for false, sets the log level `level`, so that only more severe messages are logged."""
    return lambda text: Said({} if SWITCH.parse(text) else {"log_level": level})


def _tritons(key: str) -> Meaning:
    """A meaning for Triton's flags that also selects Triton's profile: its ports and its model repository."""
    return lambda text: Said({key: text, "profile": "triton"})


def _hosted(platform: str) -> Meaning:
    """A meaning for Triton's flags that serve on a platform, whose port has HTTP also with `--allow-http=false`."""
    more = {"platform": platform, "enable_http": "true"}
    return lambda text: Said(more if SWITCH.parse(text) else {})


def port_range(text: str) -> Said:
    """SageMaker's range `FIRST-LAST` for the ports that it doesn't use itself."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    keys = ("metrics_port", "grpc_inference_port", "grpc_management_port")
    if found is None or int(found[2]) - int(found[1]) < len(keys) or int(found[2]) > 65535:
        raise ValueError("allowed is a range of at least four ports, FIRST-LAST")
    return Said({key: str(int(found[1]) + at) for at, key in enumerate(keys)})


def _metrics_host(text: str) -> Said:
    """Triton's option is a host; TorchServe's key of this name is a URL."""
    return Said({"metrics_address" if ":/" in text else "metrics_host": text})


def _trace_config(text: str) -> Said:
    """`level=…`, `rate=…`, `count=…`, `mode=…`, `opentelemetry,url=…`, `triton,file=…`, with `;` between."""
    found: dict[str, str] = {}
    ignored = []
    for word in filter(None, map(str.strip, text.split(";"))):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word}: write KEY=VALUE, as level=TIMESTAMPS")
        if key in ("level", "rate", "count"):
            found[f"trace_{key}"] = value
        elif key == "opentelemetry,url":
            found["otlp_endpoint"] = value
        elif word != "mode=opentelemetry":
            ignored.append(word)
    return Said(found, "traces go out over OTLP" if ignored else "", f"{', '.join(ignored)} of trace_config")


def _cache_config(text: str) -> Said:
    """`local,size=…`, or `redis,host=…`, with `port`, `user`, `password` and `db`, in one option or in several, with
    `;` between."""
    found: dict[str, dict[str, str]] = {}
    for option in filter(None, map(str.strip, text.split(";"))):
        name, *words = option.split(",")
        if name not in _CACHE_KEYS:
            raise ValueError(f"{option}: there are the caches local and redis")
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key not in _CACHE_KEYS[name]:
                raise ValueError(f"{word}: {name} has {', '.join(_CACHE_KEYS[name])}; write KEY=VALUE")
            found.setdefault(name, {})[key] = value
    settings: dict[str, str] = {}
    if redis := found.get("redis"):
        user, password = quote(redis.get("user", ""), safe=""), quote(redis.get("password", ""), safe="")
        keys = f"{user}:{password}@" if user or password else ""
        host, port, number = redis.get("host", "localhost"), redis.get("port", "6379"), redis.get("db", "0")
        settings = {"response_cache_redis": f"redis://{keys}{host}:{port}/{number}", "response_cache_size": "0"}
    if size := found.get("local", {}).get("size"):
        settings["response_cache_size"] = size
    return Said(settings)


#: The caches of Triton with their keys.
_CACHE_KEYS = {"local": ("size",), "redis": ("host", "port", "user", "password", "db")}


def _mutual(text: str) -> Said:
    return Said({"enable_grpc_ssl": "true"} if SWITCH.parse(text) else {})


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("allowed are whole numbers")
    return int(text)


def _decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("allowed are numbers") from None


#: vLLM's arguments that are accepted, and how they are read.
VLLM: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "tensor_parallel_size": _whole,
        "pipeline_parallel_size": _whole,
        "max_num_seqs": _whole,
        "max_num_batched_tokens": _whole,
        "gpu_memory_utilization": _decimal,
        "quantization": str,
        "kv_cache_dtype": str,
        "enable_lora": SWITCH.parse,
        "enforce_eager": SWITCH.parse,
        "enable_prefix_caching": SWITCH.parse,
    }
)


# --- the table

_ALWAYS_SERVED = "is always served here; an address on a loopback interface or a Unix socket hides it"
_ANY = "any number of calls can be open"
_LATENCY = "only programs of aiSSEMBLE and KServe log times; the metrics have them"
_OFFSETS = "isn't there; answers of token classification have start and end, except those of V1"
_UNLOGGED = "texts are never logged"
_TUNES = "it tunes a part that this server doesn't have"

_ROWS = (
    # ports and addresses
    Alias("grpc_port", "Dynamo, Triton, KServe, MLServer", sets("grpc_inference_port"), "`grpc_inference_port`",
          env=("DYNAMO_GRPC_PORT",)),
    Alias("port", "MAX", sets("http_port"), "`http_port`"),
    Alias("grpc_metrics_port", "Dynamo", sets("metrics_port"), "`metrics_port`"),
    Alias("grpc_address", "Triton", sets("grpc_inference_address"), "`grpc_inference_address`"),
    Alias("http_address", "Triton", sets("http_host"), "`http_host`"),
    Alias("extra_http_port", "this server", sets("http_extra_ports"), "`http_extra_ports`"),
    Alias("extra_grpc_port", "this server", sets("grpc_extra_ports"), "`grpc_extra_ports`"),
    Alias("reuse_grpc_port", "Triton", _only(False, "a port has one owner here"), "only `false`", True),
    Alias("reuse_http_port", "Triton", _only(False, "a port has one owner here"), "only `false`", True),
    Alias("triton_metrics_address", "Triton", _metrics_host, "`metrics_host`; a URL: `metrics_address`",
          spelt="--metrics-address"),
    Alias("allow_grpc", "Triton", _tritons("enable_grpc"), "`enable_grpc`, with `profile=triton` unless one is named",
          True),
    Alias("allow_http", "Triton", _tritons("enable_http"), "`enable_http`, with `profile=triton` unless one is named",
          True),
    Alias("allow_sagemaker", "Triton", _hosted("sagemaker"), "`platform=sagemaker`", True),
    Alias("allow_vertex_ai", "Triton", _hosted("vertex"), "`platform=vertex`", True),
    Alias("sagemaker_port", "Triton", sets("http_port"), "`http_port`"),
    Alias("vertex_ai_port", "Triton", sets("http_port"), "`http_port`"),
    Alias("sagemaker_safe_port_range", "Triton", port_range,
          "`metrics_port`, `grpc_inference_port` and `grpc_management_port`, in this order"),
    Alias("vertex_ai_default_model", "Triton", sets("load_model"), "`load_model`"),
    Alias("allow_metrics", "Triton", _turns("enable_metrics_api"), "`enable_metrics_api`", True),
    Alias("model_load_thread_count", "Triton", sets("loads_at_once_max"), "`loads_at_once_max`"),
    Alias("allow_cpu_metrics", "Triton", nothing("disable_system_metrics turns them off"),
          "no effect; `disable_system_metrics` turns system metrics off", True),
    Alias("allow_gpu_metrics", "Triton", nothing("disable_system_metrics turns them off"),
          "no effect; `disable_system_metrics` turns system metrics off", True),
    Alias("kserve_grpc_server", "Dynamo", _only(True, f"gRPC {_ALWAYS_SERVED}"), "only `true`", True),
    # KServe and aiSSEMBLE: as arguments, in the environment, and in oip.properties
    Alias("kserve_http_port", "aiSSEMBLE", sets("http_port"), "`http_port`", env=("KSERVE_HTTP_PORT",)),
    Alias("kserve_grpc_port", "aiSSEMBLE", sets("grpc_inference_port"), "`grpc_inference_port`",
          env=("KSERVE_GRPC_PORT",)),
    Alias("kserve_workers", "aiSSEMBLE", sets("default_workers_per_model"), "`default_workers_per_model`",
          env=("KSERVE_WORKERS",)),
    Alias("kserve_max_threads", "aiSSEMBLE", nothing(_ANY), "no effect: any number of calls can be open",
          env=("KSERVE_MAX_THREADS",)),
    Alias("kserve_max_asyncio_workers", "aiSSEMBLE", nothing(_ANY), "no effect: any number of calls can be open",
          env=("KSERVE_MAX_ASYNCIO_WORKERS",)),
    Alias("kserve_enable_grpc", "aiSSEMBLE", sets("enable_grpc"), "`enable_grpc`", True, env=("KSERVE_ENABLE_GRPC",)),
    Alias("kserve_enable_docs_url", "aiSSEMBLE", sets("enable_docs_url"), "`enable_docs_url`", True,
          env=("KSERVE_ENABLE_DOCS_URL",)),
    Alias("kserve_enable_latency_logging", "aiSSEMBLE", nothing(_LATENCY), "no effect, except in their own programs",
          True, env=("KSERVE_ENABLE_LATENCY_LOGGING",)),
    Alias("kserve_access_log_format", "aiSSEMBLE", sets("access_log_format"), "`access_log_format`",
          env=("KSERVE_ACCESS_LOG_FORMAT",)),
    Alias("workers", "KServe", sets("default_workers_per_model"), "`default_workers_per_model`"),
    Alias("max_threads", "KServe", nothing(_ANY), "no effect: any number of calls can be open"),
    Alias("max_asyncio_workers", "KServe", nothing(_ANY), "no effect: any number of calls can be open"),
    Alias("enable_latency_logging", "KServe", nothing(_LATENCY), "no effect, except in their own programs", True),
    Alias("model_name", "KServe", sets("load_models"),
          "`load_models`: a model of the store, by name; beside `--model` or `--model-path`, that model's name"),
    Alias("model_id", "KServe", _of_hub,
          "`load_models`: a name on Hugging Face's hub, or a path; `--model_name` names the model, else it is `model`"),
    Alias("model_revision", "KServe", _revision, "the revision of `--model_id`"),
    Alias("backend", "KServe", _of_engine, "`language_models`: `engine`"),
    Alias("task", "KServe", language("task", _task), "`language_models`: `task`"),
    Alias("dtype", "KServe, vLLM", language("dtype"), "`language_models`: `dtype`"),
    Alias("max_model_len", "KServe, vLLM", language("maxModelLength", _whole),
          "`language_models`: `maxModelLength`"),
    Alias("max_length", "KServe", language("maxModelLength", _whole), "`language_models`: `maxModelLength`"),
    Alias("tokenizer_id", "KServe", language("tokenizer"), "`language_models`: `tokenizer`"),
    Alias("tokenizer", "vLLM", language("tokenizer"), "`language_models`: `tokenizer`"),
    Alias("tokenizer_revision", "KServe, vLLM", vllm("tokenizer_revision"), "an argument of vLLM's engine"),
    Alias("trust_remote_code", "KServe, vLLM", language("trustRemoteCode", SWITCH.parse),
          "`language_models`: `trustRemoteCode`", True),
    *(
        Alias(name, "vLLM", vllm(name, read), "an argument of vLLM's engine", read is SWITCH.parse)
        for name, read in VLLM.items()
    ),
    Alias("served_model_name", "vLLM", sets("load_models"), "as `--model_name`"),
    *(
        Alias(f"return_{name}", "KServe", _predictions(name), f"`language_models`: `predictions`: `{name}`", True)
        for name in ("probabilities", "raw_logits")
    ),
    Alias("return_offsets_mapping", "KServe", _refused(_OFFSETS), "refused", True),
    *(
        Alias(name, "KServe", nothing("a language model's tokenizer says it"), "no effect", switch)
        for name, switch in (
            ("disable_lower_case", True),
            ("disable_special_tokens", True),
            ("return_token_type_ids", True),
            ("tensor_input_names", False),
        )
    ),
    Alias("disable_log_requests", "KServe", nothing(_UNLOGGED), "no effect: texts are never logged", True),
    Alias("max_log_len", "KServe", nothing(_UNLOGGED), "no effect"),
    Alias("grpc_max_send_message_length", "KServe", sets("max_response_size"), "`max_response_size`, bytes"),
    Alias("grpc_max_receive_message_length", "KServe", sets("max_request_size"), "`max_request_size`, bytes"),
    Alias("ssl_certfile", "KServe", _sets_and("certificate_file", use_tls="true"),
          "`certificate_file`, with `use_tls=true`"),
    Alias("ssl_keyfile", "KServe", sets("private_key_file"), "`private_key_file`"),
    Alias("log_config_file", "KServe", sets("log_config"), "`log_config`"),
    *(
        Alias(name, "KServe", nothing(_TUNES), "no effect")
        for name in (
            "configure_logging",
            "event_loop",
            "timeout_keep_alive",
            "predictor_host",
            "predictor_protocol",
            "protocol",
            "predictor_use_ssl",
            "predictor_request_timeout_seconds",
            "predictor_request_retries",
            "enable_predictor_health_check",
        )
    ),
    # workers
    Alias("grpc_workers", "Dynamo", sets("default_workers_per_model"),
          "`default_workers_per_model`: gRPC itself needs no threads here, so these are the processes that compute",
          env=("DYNAMO_GRPC_WORKERS",)),
    # TLS
    Alias("cert_file", "Dynamo", sets("certificate_file"), "`certificate_file`"),
    Alias("key_file", "Dynamo", sets("private_key_file"), "`private_key_file`"),
    Alias("dynamo_tls_cert", "Dynamo", _sets_and("certificate_file", use_tls="true"),
          "`certificate_file`, with `use_tls=true`", env=("DYNAMO_TLS_CERT",)),
    Alias("dynamo_tls_key", "Dynamo", sets("private_key_file"), "`private_key_file`", env=("DYNAMO_TLS_KEY",)),
    Alias("tls_cert_path", "Dynamo", _sets_and("certificate_file", use_tls="true"),
          "`certificate_file`, with `use_tls=true`"),
    Alias("tls_key_path", "Dynamo", sets("private_key_file"), "`private_key_file`"),
    Alias("tls_client_ca_cert_path", "Dynamo", sets("client_ca_file"), "`client_ca_file`"),
    Alias("grpc_use_ssl", "Triton", _turns("enable_grpc_ssl"), "`enable_grpc_ssl`", True),
    Alias("grpc_use_ssl_mutual", "Triton", _mutual, "`enable_grpc_ssl=true`; `--grpc-root-cert` asks for certificates",
          True),
    Alias("grpc_server_cert", "Triton", sets("certificate_file"), "`certificate_file`"),
    Alias("grpc_server_key", "Triton", sets("private_key_file"), "`private_key_file`"),
    Alias("grpc_root_cert", "Triton", sets("client_ca_file"), "`client_ca_file`: clients then need a certificate"),
    Alias("grpc_header_forward_pattern", "Triton", nothing("models get all metadata as headers"),
          "no effect: models get all headers"),
    Alias("http_header_forward_pattern", "Triton", nothing("models get all headers"),
          "no effect: models get all headers"),
    Alias("grpc_restricted_protocol", "Triton",
          _refused("isn't there; token authorization guards every call: docs/security.md"), "refused"),
    Alias("http_restricted_api", "Triton",
          _refused("isn't there; token authorization guards every call: docs/security.md"), "refused"),
    # sizes
    Alias("max_message_size", "Dynamo", sets("max_request_size", "max_response_size"),
          "`max_request_size` and `max_response_size`, bytes", env=("DYNAMO_MAX_MESSAGE_SIZE",)),
    Alias("http_max_input_size", "Triton", sets("max_request_size"), "`max_request_size`, bytes"),
    # gRPC's connections
    Alias("grpc_keepalive_time", "Triton", sets("grpc_keepalive_time_ms"), "`grpc_keepalive_time_ms`"),
    Alias("grpc_keepalive_timeout", "Triton", sets("grpc_keepalive_timeout_ms"), "`grpc_keepalive_timeout_ms`"),
    Alias("grpc_http2_min_recv_ping_interval_without_data", "Triton",
          sets("grpc_http2_min_ping_interval_without_data_ms"), "`grpc_http2_min_ping_interval_without_data_ms`"),
    Alias("grpc_http2_min_recv_ping_interval_without_data_ms", "gRPC",
          sets("grpc_http2_min_ping_interval_without_data_ms"), "`grpc_http2_min_ping_interval_without_data_ms`"),
    Alias("grpc_max_connection_age", "Triton", sets("grpc_inference_max_connection_age_ms"),
          "`grpc_inference_max_connection_age_ms`"),
    Alias("grpc_max_connection_age_grace", "Triton", sets("grpc_inference_max_connection_age_grace_ms"),
          "`grpc_inference_max_connection_age_grace_ms`"),
    Alias("grpc_infer_response_compression_level", "Triton",
          nothing("an answer is compressed as its client asks"),
          "no effect: an answer is compressed as its client asks"),
    # models, and the shutdown
    Alias("model", "MAX", _one_model,
          "`load_models`: the model NAME of the store, or the one at a path; with `profile=max` unless one is named"),
    Alias("model_path", "MAX", _one_model, "the same"),
    Alias("id", "Triton", sets("server_id"), "`server_id`"),
    Alias("exit_timeout_secs", "Triton", sets("drain_timeout_s"), "`drain_timeout_s`"),
    Alias("strict_model_config", "Triton", nothing("fields that config.pbtxt omits are always filled in"),
          "no effect: fields that config.pbtxt omits are always filled in", True),
    Alias("disable_auto_complete_config", "Triton",
          nothing("fields that config.pbtxt omits are always filled in"), "no effect", True),
    # logs and metrics
    Alias("log_verbose", "Triton", _verbosity, "above 0: `log_level=debug`", True),
    Alias("log_info", "Triton", _quieter("warning"), "`false`: `log_level=warning`", True),
    Alias("log_warning", "Triton", _quieter("error"), "`false`: `log_level=error`", True),
    Alias("log_error", "Triton", nothing("errors are always logged"), "no effect: errors are always logged",
          True),
    Alias("triton_log_format", "Triton", nothing("log_format is this server's"), "no effect; see `log_format`",
          spelt="--log-format"),
    Alias("triton_metrics_config", "Triton", nothing("there is one way to count"), "no effect",
          spelt="--metrics-config"),
    Alias("trace_config", "Triton", _trace_config,
          "`level`, `rate`, `count`: `trace_level`, `trace_rate`, `trace_count`; `opentelemetry,url`: `otlp_endpoint`; "
          "can be repeated", repeated=True),
    Alias("cache_config", "Triton", _cache_config,
          "`local,size=BYTES`: `response_cache_size`; `redis,host=…`, with `port`, `user`, `password`, `db`: "
          "`response_cache_redis`, and `response_cache_size=0`; can be repeated", repeated=True),
    Alias("response_cache_byte_size", "Triton", sets("response_cache_size"), "`response_cache_size`"),
    Alias("log_file", "Triton", _refused("isn't there; LOG_LOCATION names the directory of the log files"), "refused"),
    Alias("metrics_interval_ms", "Triton", seconds("metric_time_interval"), "`metric_time_interval`, whole seconds"),
    Alias("rate_limit_resource", "Triton", lambda text: Said({"rate_limit_resources": text.replace(";", ",")}),
          "`rate_limit_resources`; can be repeated", repeated=True),
    # tuning of Triton's own parts
    *(
        Alias(name, "Triton", nothing(_TUNES), "no effect")
        for name in (
            "sagemaker_thread_count",
            "vertex_ai_thread_count",
            "backend_directory",
            "backend_config",
            "buffer_manager_thread_count",
            "cache_directory",
            "cuda_memory_pool_byte_size",
            "cuda_virtual_address_size",
            "enable_peer_access",
            "grpc_infer_allocation_pool_size",
            "grpc_infer_thread_count",
            "host_policy",
            "http_thread_count",
            "min_supported_compute_capability",
            "model_load_gpu_limit",
            "model_load_retry_count",
            "model_namespacing",
            "pinned_memory_pool_byte_size",
            "repoagent_directory",
            "trace_file",
            "trace_log_frequency",
            "trace_mode",
        )
    ),
)  # fmt: skip

ALIASES: Mapping[str, Alias] = MappingProxyType({row.name: row for row in _ROWS})


def aliases_table() -> Iterator[str]:
    """The tables of the documentation, one for the servers that share options, line by line."""
    yield "Names in capitals are environment variables."
    rows: dict[str, list[tuple[str, tuple[str, tuple[str, ...]]]]] = {}
    for row in ALIASES.values():
        name = row.name if row.name.startswith(("dynamo_", "kserve_")) else row.flag
        rows.setdefault(row.whose, []).append((name, (row.doc, row.env)))
    for whose, options in rows.items():
        yield f"\n#### {whose}\n"
        yield "| option | here |"
        yield "|---|---|"
        for (doc, env), names in grouped(options).items():
            yield f"| {', '.join((names, *(f'`{one}`' for one in env)))} | {doc} |"
