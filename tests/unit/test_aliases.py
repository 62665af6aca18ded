"""Options of other servers become our settings: a row each; which source wins; how they may be spelt."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts_frontend.cli import flags as command_line
from ts_frontend.cli import main as cli
from ts_frontend.config.foreign.aliases import ALIASES, PROFILES
from ts_frontend.config.kinds import Address, ConfigError, ExtraPort, LimitedResource
from ts_frontend.config.load import load_config
from ts_frontend.config.table import SETTINGS, ServerConfig


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(*words: str, environ: dict[str, str] | None = None) -> ServerConfig:
    """The settings of a server with this command line."""
    return load_config(command_line.options(cli._parser().parse_args(words)), environ=environ or {})


HTTP = Address("http", "127.0.0.1", 8080)

#: (words, setting, value), at least one for each row of the table that sets something.
ROWS = [
    ("--grpc-port 8001", "grpc_inference_port", 8001),
    ("--grpc_port=8001", "grpc_inference_port", 8001),
    ("--http_port 9000", "inference_address", Address("http", "127.0.0.1", 9000)),
    ("--port 9000", "inference_address", Address("http", "127.0.0.1", 9000)),
    ("--metrics-port 9001", "metrics_address", Address("http", "127.0.0.1", 9001)),
    ("--grpc-metrics-port 9001", "metrics_address", Address("http", "127.0.0.1", 9001)),
    ("--grpc-address 0.0.0.0", "grpc_inference_address", "0.0.0.0"),
    ("--http-address 0.0.0.0", "inference_address", Address("http", "0.0.0.0", 8080)),
    ("--host 0.0.0.0", "inference_address", Address("http", "0.0.0.0", 8080)),
    ("--host 0.0.0.0", "metrics_address", Address("http", "0.0.0.0", 8082)),
    ("--host 0.0.0.0", "management_address", Address("http", "127.0.0.1", 8081)),
    ("--host 0.0.0.0", "grpc_inference_address", "0.0.0.0"),
    ("--host 0.0.0.0", "grpc_management_address", "127.0.0.1"),
    ("--extra-http-port 9000,9001", "http_extra_ports", (9000, 9001)),
    ("--extra-grpc-port 9090,8001:triton", "grpc_extra_ports", (ExtraPort(9090), ExtraPort(8001, "triton"))),
    ("--reuse-grpc-port=false", "inference_address", HTTP),
    ("--reuse-http-port=0", "inference_address", HTTP),
    ("--allow-grpc=true", "grpc_inference_port", 8001),
    ("--allow-grpc=false", "enable_grpc", False),
    ("--allow-http true", "inference_address", Address("http", "127.0.0.1", 8000)),
    ("--allow-http=false", "enable_http", False),
    ("--allow-http=1 --profile kserve", "grpc_inference_port", 8081),
    ("--metrics-address 0.0.0.0", "metrics_address", Address("http", "0.0.0.0", 8082)),
    ("--metrics-address http://[::1]:5", "metrics_address", Address("http", "::1", 5)),
    ("--id mine", "server_id", "mine"),
    ("--allow-metrics false", "enable_metrics_api", False),
    ("--allow-sagemaker=true --model-store s", "platform", "sagemaker"),
    ("--allow-vertex-ai --model-store s", "platform", "vertex"),
    ("--allow-sagemaker=false", "platform", "auto"),
    ("--sagemaker-port 8090", "inference_address", Address("http", "127.0.0.1", 8090)),
    ("--vertex-ai-port 8091", "inference_address", Address("http", "127.0.0.1", 8091)),
    ("--sagemaker-safe-port-range 9000-9010", "grpc_inference_port", 9001),
    ("--vertex-ai-default-model m", "load_model", ("m",)),
    ("--allow-cpu-metrics false", "inference_address", HTTP),
    ("--allow-gpu-metrics=false", "inference_address", HTTP),
    ("--kserve-mode", "grpc_inference_port", 8081),
    ("--kserve_mode=false", "grpc_inference_port", 7070),
    ("--profile kserve", "kserve_mode", True),
    ("--workers 3", "default_workers_per_model", 3),
    ("--max_threads 3", "inference_address", HTTP),
    ("--max_asyncio_workers 3", "inference_address", HTTP),
    ("--enable_grpc false", "enable_grpc", False),
    ("--enable_docs_url true", "enable_docs_url", True),
    ("--enable_latency_logging true", "inference_address", HTTP),
    ("--access_log_format x", "access_log_format", "x"),
    ("--model_name a --model_dir /m", "load_models", ("a",)),
    ("--model_name a --model_dir /m", "model_store", Path("/m")),
    ("--grpc_max_send_message_length 5", "max_response_size", 5),
    ("--grpc_max_receive_message_length 5", "max_request_size", 5),
    ("--ssl_certfile c --ssl_keyfile k", "private_key_file", Path("k")),
    ("--ssl_certfile c --ssl_keyfile k", "enable_grpc_ssl", True),
    ("--log_config_file l", "log_config", Path("l")),
    ("--kserve-grpc-server", "inference_address", HTTP),
    ("--grpc-workers 4", "default_workers_per_model", 4),
    ("--cert-file c --key-file k", "certificate_file", Path("c")),
    ("--cert-file c --key-file k", "private_key_file", Path("k")),
    ("--use-tls --cert-file c --key-file k", "enable_grpc_ssl", True),
    ("--use-tls --cert-file c --key-file k", "inference_address", Address("https", "127.0.0.1", 8080)),
    ("--use-tls --cert-file c --key-file k", "management_address", Address("https", "127.0.0.1", 8081)),
    ("--use-tls=false", "enable_grpc_ssl", False),
    ("--dynamo-tls-cert c --dynamo-tls-key k", "use_tls", True),
    ("--tls-cert-path c --tls-key-path k --tls-client-ca-cert-path a", "client_ca_file", Path("a")),
    ("--tls-cert-path c --tls-key-path k", "enable_grpc_ssl", True),
    ("--grpc-use-ssl=true --grpc-server-cert c --grpc-server-key k", "enable_grpc_ssl", True),
    ("--grpc-use-ssl=1 --grpc-server-cert c --grpc-server-key k", "private_key_file", Path("k")),
    (
        "--grpc-use-ssl-mutual=1 --grpc-root-cert r --grpc-server-cert c --grpc-server-key k",
        "client_ca_file",
        Path("r"),
    ),
    ("--max-message-size 4194304", "max_request_size", 4194304),
    ("--max-message-size 4194304", "max_response_size", 4194304),
    ("--http-max-input-size 7", "max_request_size", 7),
    ("--grpc-keepalive-time 30000", "grpc_keepalive_time_ms", 30000),
    ("--grpc-keepalive-timeout 5000", "grpc_keepalive_timeout_ms", 5000),
    ("--set grpc.keepalive_time_ms=30000", "grpc_keepalive_time_ms", 30000),
    ("--set grpc.keepalive_timeout_ms=5000", "grpc_keepalive_timeout_ms", 5000),
    ("--set grpc.keepalive_permit_without_calls=True", "grpc_keepalive_permit_without_calls", True),
    ("--set grpc.http2.max_pings_without_data=0", "grpc_http2_max_pings_without_data", 0),
    ("--set grpc.http2.min_time_between_pings_ms=10000", "grpc_http2_min_time_between_pings_ms", 10000),
    (
        "--set grpc.http2.min_ping_interval_without_data_ms=300000",
        "grpc_http2_min_ping_interval_without_data_ms",
        300000,
    ),
    (
        "--set grpc.http2.min_recv_ping_interval_without_data_ms=9",
        "grpc_http2_min_ping_interval_without_data_ms",
        9,
    ),
    ("--grpc-http2-min-recv-ping-interval-without-data 9", "grpc_http2_min_ping_interval_without_data_ms", 9),
    ("--grpc-max-connection-age 9", "grpc_inference_max_connection_age_ms", 9),
    ("--grpc-max-connection-age-grace 9", "grpc_inference_max_connection_age_grace_ms", 9),
    ("--grpc-infer-response-compression-level high", "inference_address", HTTP),
    ("--model=llama31", "load_models", ("llama31=llama31",)),
    ("--model=llama31", "grpc_inference_port", 9090),
    ("--model=llama31", "model_store", Path("model_store")),
    ("--model-path /m/llama31.mar", "load_models", ("llama31=llama31.mar",)),
    ("--model /m/llama31.mar", "model_store", Path("/m")),
    ("--model=llama31 --profile triton", "grpc_inference_port", 8001),
    ("--model=org/llama31", "load_models", ("llama31=org/llama31",)),
    ("--model-path org/llama31@v2", "load_models", ("llama31=org/llama31@v2",)),
    ("--model /m/llama31.gguf", "load_models", ("llama31=llama31.gguf",)),
    ("--model_id=org/chat", "load_models", ("model=org/chat",)),
    ("--model_name mine --model_id=/mnt/models/chat", "load_models", ("mine=/mnt/models/chat",)),
    ("--model_revision=v2 --model_id=org/chat --model_name=mine", "load_models", ("mine=org/chat@v2",)),
    ("--served-model-name mine --model org/chat", "load_models", ("mine=org/chat",)),
    ("--model_dir=hf://org/chat --model_name mine", "load_models", ("mine=hf://org/chat",)),
    ("--backend=huggingface", "language_models", {"engine": "transformers"}),
    ("--backend=auto", "language_models", {}),
    ("--task=text2text_generation", "language_models", {"task": "text-generation"}),
    ("--task text_embedding", "language_models", {"task": "embeddings"}),
    ("--task=sequence_classification", "language_models", {"task": "text-classification"}),
    ("--task token-classification", "language_models", {"task": "token-classification"}),
    (
        "--task=fill_mask --return_probabilities",
        "language_models",
        {"task": "fill-mask", "predictions": "probabilities"},
    ),
    ("--return_raw_logits --tensor_input_names=a,b", "language_models", {"predictions": "raw_logits"}),
    ("--return_probabilities=false", "language_models", {}),
    ("--dtype=bfloat16 --max-model-len 9", "language_models", {"dtype": "bfloat16", "maxModelLength": 9}),
    ("--max_length 9", "language_models", {"maxModelLength": 9}),
    ("--tokenizer_id=org/t", "language_models", {"tokenizer": "org/t"}),
    ("--tokenizer org/t", "language_models", {"tokenizer": "org/t"}),
    ("--trust_remote_code", "language_models", {"trustRemoteCode": True}),
    ("--trust-remote-code=false", "language_models", {"trustRemoteCode": False}),
    (
        "--tensor-parallel-size 2 --backend vllm --pipeline-parallel-size 1 --enable-lora --enforce-eager",
        "language_models",
        {
            "engine": "vllm",
            "vllm_engine_config": {
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1,
                "enable_lora": True,
                "enforce_eager": True,
            },
        },
    ),
    (
        "--gpu-memory-utilization 0.8 --max-num-seqs 8 --max-num-batched-tokens 9 --quantization awq",
        "language_models",
        {
            "vllm_engine_config": {
                "gpu_memory_utilization": 0.8,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 9,
                "quantization": "awq",
            }
        },
    ),
    (
        "--kv-cache-dtype fp8 --enable-prefix-caching=false --tokenizer_revision v1",
        "language_models",
        {
            "vllm_engine_config": {
                "kv_cache_dtype": "fp8",
                "enable_prefix_caching": False,
                "tokenizer_revision": "v1",
            }
        },
    ),
    ("--disable_log_requests --dtype auto", "language_models", {"dtype": "auto"}),
    ("--strict-readiness=true", "strict_readiness", True),
    ("--strict-readiness=0", "strict_readiness", False),
    ("--exit-timeout-secs 5", "drain_timeout_s", 5.0),
    ("--model-load-thread-count=2", "loads_at_once_max", 2),
    ("--exit-on-error", "exit_on_error", True),
    ("--exit-on-error=false", "exit_on_error", False),
    ("--strict-model-config=false", "inference_address", HTTP),
    ("--disable-auto-complete-config", "inference_address", HTTP),
    ("--log-verbose=1", "log_level", "debug"),
    ("--log-verbose 0", "log_level", "info"),
    ("--log-info true", "log_level", "info"),
    ("--log-warning true", "log_level", "info"),
    ("--log-error true", "log_level", "info"),
    ("--log-info=false", "log_level", "warning"),
    ("--log-info=0 --log-warning=0", "log_level", "error"),
    ("--log-format=ISO8601", "log_format", "text"),
    ("--metrics-config=summary_latencies=true", "metrics_config", None),
    ("--grpc-header-forward-pattern=x.*", "inference_address", HTTP),
    ("--http-header-forward-pattern=x.*", "inference_address", HTTP),
    ("--trace-config level=TIMESTAMPS --trace-config rate=10", "trace_rate", 10),
    ("--trace-config level=TIMESTAMPS --trace-config rate=10", "trace_level", "timestamps"),
    ("--trace-config opentelemetry,url=http://c:4318/v1/traces", "otlp_endpoint", "http://c:4318/v1/traces"),
    ("--trace-config triton,file=/f --trace-config count=3", "trace_count", 3),
    ("--trace-level TENSORS", "trace_level", "tensors"),
    ("--metrics-interval-ms 2000", "metric_time_interval", 2),
    ("--cache-config local,size=1048576", "response_cache_size", 1 << 20),
    ("--cache-config=local,size=1048576", "response_cache_redis", None),
    ("--cache-config redis,host=r,port=7,password=a@b", "response_cache_redis", "redis://:a%40b@r:7/0"),
    ("--cache-config redis,host=r --cache-config redis,user=u", "response_cache_redis", "redis://u:@r:6379/0"),
    ("--cache-config redis,host=r", "response_cache_size", 0),
    ("--cache-config redis,host=r --cache-config local,size=9", "response_cache_size", 9),
    ("--rate-limit execution_count", "rate_limit", "execution_count"),
    ("--rate-limit-resource=R1:10", "rate_limit_resources", (LimitedResource("R1", 10),)),
    (
        "--rate-limit-resource R1:10 --rate-limit-resource=R2:5:1",
        "rate_limit_resources",
        (LimitedResource("R1", 10), LimitedResource("R2", 5, 1)),
    ),
    ("--response-cache-byte-size 9", "response_cache_size", 9),
    ("--set response_cache_size=64MiB", "response_cache_size", 64 << 20),
    ("--set response_cache_size=0", "response_cache_size", 0),
    ("--bypass-serve", "bypass_serve", True),
    ("--profile triton --model-store /mnt/models", "model_repository", (Path("/mnt/models"),)),
    ("--profile triton --model-store /mnt/models", "model_store", None),
    ("--backend-config python,x=1", "inference_address", HTTP),
]


@pytest.mark.parametrize(("words", "key", "value"), ROWS)
def test_an_option_becomes_a_setting(words: str, key: str, value: object) -> None:
    """Promises 000-03, 000-04, 001-16, 001-21, 001-36 to 001-39."""
    assert getattr(started(*words.split()), key) == value


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_every_option_is_also_a_key(name: str) -> None:
    """Its text reaches the same place from a file, in both spellings; no row hides a setting of ours."""
    assert name not in SETTINGS
    assert name == name.lower() and "-" not in name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--kserve-grpc-server=false", "gRPC is always served here"),
        ("--trace-config=level", "write KEY=VALUE"),
        ("--trace-config=level=LOUD", "off, timestamps, tensors"),
        ("--reuse-grpc-port=true", "a port has one owner"),
        ("--log-file=/l", "LOG_LOCATION"),
        ("--grpc-restricted-protocol=health:k=v", "token authorization"),
        ("--http-restricted-api=health:k=v", "token authorization"),
        ("--metrics-interval-ms=x", "milliseconds"),
        ("--return_offsets_mapping", "answers of token classification have start and end"),
        ("--task=summarization", "allowed are text_generation, text2text_generation, text_embedding, rerank"),
        ("--backend=onnx", "allowed are auto, vllm, huggingface"),
        ("--max-model-len=long", "whole numbers"),
        ("--gpu-memory-utilization=most", "allowed are numbers"),
        ("--model_revision=v2", "needs --model_id"),
        ("--set language_models=[1]", "a JSON object"),
        ("--grpc-port=http", "whole numbers"),
        ("--profile=other", "torchserve, triton"),
        ("--extra-grpc-port=1:other", "other is not a dialect"),
        ("--extra-grpc-port=7070", "already that of grpc_inference_port"),
        ("--extra-http-port=8080", "already that of inference_address"),
        ("--use-tls", "TLS needs certificate_file and private_key_file"),
        ("--use-tls --cert-file c", "one is set without the other"),
        ("--bypass-serve --host 0.0.0.0", "every address has to be a loopback address"),
    ],
)
def test_what_would_be_a_lie_is_refused(words: str, says: str) -> None:
    """Promises 001-38, 001-45."""
    with pytest.raises(ConfigError) as error:
        started(*words.split())
    assert says in error.value.message


@pytest.mark.parametrize(
    ("variable", "text", "key", "value", "flag", "stronger"),
    [
        ("DYNAMO_GRPC_PORT", "8001", "grpc_inference_port", 8001, "--grpc-port 8002", 8002),
        ("DYNAMO_GRPC_WORKERS", "3", "default_workers_per_model", 3, "--grpc-workers 4", 4),
        ("DYNAMO_MAX_MESSAGE_SIZE", "99", "max_request_size", 99, "--max-message-size 100", 100),
        ("DYNAMO_TLS_CERT", "c", "certificate_file", Path("c"), "--cert-file d", Path("d")),
        ("DYNAMO_TLS_KEY", "k", "private_key_file", Path("k"), "--key-file l", Path("l")),
    ],
)
def test_variables_of_other_servers(
    variable: str, text: str, key: str, value: object, flag: str, stronger: object
) -> None:
    """Promises 001-40 to 001-43: the variable alone, then a flag that beats it."""
    environ = {"DYNAMO_TLS_CERT": "c", "DYNAMO_TLS_KEY": "k"} if "TLS" in variable else {}
    environ |= {variable: text}
    config = started(environ=environ)
    assert (getattr(config, key), config.sources[key]) == (value, f"environment {variable}")
    assert getattr(started(*flag.split(), environ=environ), key) == stronger
    assert config.enable_grpc_ssl == ("TLS" in variable), "a certificate in the environment turns TLS on"


def test_what_has_no_effect_says_so() -> None:
    """In one form, and once, wherever it was given."""
    words = ["--host-policy=x", "--strict-model-config", "--predictor-host=h", "--set", "ipex_enable=true"]
    words += ("--set", "keystore_type=PKCS12", "--set", "trace_config=triton,file=/tmp/x")
    notes = [note.text for note in started(*words).notes]
    tunes = "has no effect: it tunes a part that this server doesn't have"
    assert [one for one in notes if " has no effect: " in one] == notes and len(notes) == 6, notes
    assert {f"host_policy (--host-policy) {tunes}", f"predictor_host (--predictor-host) {tunes}"} < set(notes)
    assert any(one.startswith("strict_model_config (--strict-model-config) has no effect: ") for one in notes)
    assert any(one.startswith("triton,file=/tmp/x of trace_config (--set trace_config) has") for one in notes)


# --- profiles


@pytest.mark.parametrize(
    ("profile", "http", "grpc", "management", "metrics"),
    [
        ("torchserve", 8080, 7070, 8081, 8082),
        ("triton", 8000, 8001, 8081, 8002),
        ("mlserver", 8080, 8081, 8083, 8082),
        ("kserve", 8080, 8081, 8083, 8082),
        ("dynamo", 8000, 8001, 8081, 8082),
        ("max", 8000, 9090, 8081, 8082),
    ],
)
def test_the_ports_of_a_profile(profile: str, http: int, grpc: int, management: int, metrics: int) -> None:
    """Promises 000-04, 001-36: nothing collides; loading them would say so."""
    config = started("--profile", profile)
    ports: tuple[int, ...] = (config.inference_address.port, config.grpc_inference_port)
    ports += (config.management_address.port, config.metrics_address.port)
    assert ports == (http, grpc, management, metrics)
    assert config.loopback_only == (profile != "kserve")


def test_profiles_set_what_there_is() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/profiles.md").read_text()
    assert not [name for name in PROFILES if f"\n| `{name}` | " not in page]
    assert {key for profile in PROFILES.values() for key in profile} <= SETTINGS.keys()


def test_kserve_mode_is_open_for_predictions_and_for_nothing_else() -> None:
    """Promise 001-16."""
    config = started("--grpc-port", "8001", "--kserve-mode")
    assert config.outside_addresses() == ("inference_address", "grpc_inference_address")
    assert (config.token_authorization, config.model_api_enabled) == (False, False)
    assert started("--kserve-mode", "--set", "disable_token_authorization=false").token_authorization
    assert started("--kserve-mode", environ={"TS_INFERENCE_TOKEN": "secretsecret"}).token_authorization
    assert started("--kserve-mode", "--host", "127.0.0.1").loopback_only


# --- one directory to write to


def test_handlers_inside_the_server_may_change_its_directory(tmp_path: Path) -> None:
    config = started("--bypass-serve", "--model-store", "s")
    assert (config.model_store, config.log_location) == (tmp_path / "s", tmp_path / "logs")


# --- how they are spelt


@pytest.mark.parametrize("command", [[], ["config"]])
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--grpc-prt=1", "unrecognized arguments: --grpc-prt; did you mean --grpc-port?"),
        (
            "--inference-address=http://0.0.0.0:8080",
            "--inference-address; inference_address is a setting without a flag: --set inference_address=VALUE",
        ),
        ("--grpc-w=1", "unrecognized arguments: --grpc-w"),
        ("--model-=1", "unrecognized arguments: --model-"),
    ],
)
def test_an_unknown_option_names_the_nearest(
    command: list[str], word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beginnings count for TorchServe's flags and ours alone: another server's option may appear any day."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, word])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_mlservers_settings_count_with_its_profile(tmp_path: Path) -> None:
    """Its variables win over its file, ours over both, and all of them over the profile."""
    store = tmp_path / "models"
    store.mkdir()
    (store / "settings.json").write_text('{"http_port": 9001, "grpc_port": 9002, "debug": true}')
    words, environ = ("--profile", "mlserver", "--model-store", str(store)), {"MLSERVER_GRPC_PORT": "9003"}
    config = started(*words, environ=environ)
    assert (config.inference_address.port, config.grpc_inference_port) == (9001, 9003)
    assert any("debug has no effect" in note.text for note in config.notes)
    assert started(*words, "--grpc-port", "9004", environ=environ).grpc_inference_port == 9004
    assert started("--model-store", str(store), environ=environ).grpc_inference_port == 7070


def test_a_settings_file_of_mlserver_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="settings.json is not valid JSON"):
        started("--profile", "mlserver")


@pytest.mark.parametrize(
    "words", ["--model-name mine --model-path /models/x.mar", "--model /models/x.mar --model_name=mine"]
)
def test_a_name_beside_a_place_names_its_model(words: str) -> None:
    config = started(*words.split())
    assert config.load_models == ("mine=x.mar",) and config.model_store == Path("/models")
