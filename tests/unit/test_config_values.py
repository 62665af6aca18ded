"""Every setting: its values, and the errors; addresses; settings that need each other."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.config.checks import who_may
from ts_frontend.config.display import explain, settings_table, snapshot_settings
from ts_frontend.config.kinds import ConfigError, is_loopback, parse_address, parse_host
from ts_frontend.config.load import Option, forget_secrets, load_config, worker_environment
from ts_frontend.config.table import INTERNAL, NO_EFFECT, SETTINGS, ServerConfig

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"

#: Keys of TorchServe 0.12's config.properties.
TORCHSERVE_KEYS = """
inference_address management_address metrics_address enable_metrics_api grpc_inference_address grpc_management_address
grpc_inference_port grpc_management_port grpc_inference_max_connection_age_ms grpc_management_max_connection_age_ms
grpc_inference_max_connection_age_grace_ms grpc_management_max_connection_age_grace_ms enable_grpc_ssl
ts_open_inference_protocol load_models model_store workflow_store models allowed_urls default_workers_per_model
job_queue_size default_response_timeout default_startup_timeout unregister_model_timeout decode_input_request
max_request_size max_response_size limit_max_image_pixels default_service_handler service_envelope
install_py_dep_per_model number_of_gpu initial_worker_port initial_distribution_port disable_token_authorization
token_expiration_min enable_model_api metrics_config metrics_mode model_metrics_auto_detect disable_system_metrics
metric_time_interval system_metrics_cmd cors_allowed_origin cors_allowed_methods cors_allowed_headers keystore
keystore_pass keystore_type certificate_file private_key_file blacklist_env_vars ts_header_key_sequence_id
ts_header_key_sequence_start ts_header_key_sequence_end async_logging enable_envvars_config use_env_allowed_urls debug
number_of_netty_threads netty_client_threads prefer_direct_buffer use_native_io io_ratio vmargs plugins_path
model_server_home version python tsConfigFile model_snapshot ipex_enable ipex_gpu_enable cpu_launcher_enable
cpu_launcher_args cpp_log_config
"""


def loaded(**settings: str) -> ServerConfig:
    return load_config([Option(key, text, "--set") for key, text in settings.items()], environ={})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", TORCHSERVE_KEYS.split())
def test_every_key_of_torchserve_is_known(key: str) -> None:
    assert key in SETTINGS or key in NO_EFFECT or key in INTERNAL


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("job_queue_size", "7", 7),
        ("enable_metrics_api", "FALSE", False),
        ("metrics_mode", "Prometheus", "prometheus"),
        ("token_expiration_min", "0.25", 0.25),
        ("model_store", "a b", Path("a b")),
        ("load_models", "a=a.mar, b.mar,", ("a=a.mar", "b.mar")),
        ("allowed_urls", "file://.*,http(s)?://.*", ("file://.*", "http(s)?://.*")),
        ("models", '{"m": {"1.0": {"minWorkers": 2}}}', {"m": {"1.0": {"minWorkers": 2}}}),
        ("ts_open_inference_protocol", "oip", True),
        ("ts_open_inference_protocol", "other", False),
        ("ts_open_inference_protocol", "1", False),
        ("use_tls", "no", False),
        ("ncs", "1", True),
        ("grpc_inference_address", "[::1]", "::1"),
        ("number_of_gpu", "0", 0),
        ("service_envelope", "  ", None),
    ],
)
def test_values(key: str, text: str, value: object) -> None:
    assert getattr(loaded(**{key: text}), key) == value


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("job_queue_size", "0", "the least is 1"),
        ("job_queue_size", "1.5", "whole numbers"),
        ("grpc_inference_port", "70000", "the most is 65535"),
        ("use_tls", "maybe", "true and false"),
        ("metrics_mode", "loud", "log, prometheus, legacy"),
        ("inference_address", "tcp://x", "http://HOST"),
        ("management_address", "http://127.0.0.1:99999", "larger than 65535"),
        ("grpc_inference_address", "example.org", "IP address"),
        ("allowed_urls", "(", "regular expression"),
        ("models", "{", "not JSON"),
        ("models", '{"m": 1}', "m is not a JSON object"),
        ("models", '{"m": {"1.0": {"minWorkers": "2"}}}', "minWorkers of m/1.0"),
        ("drain_timeout_s", "nan", "allowed are numbers"),
        ("drain_timeout_s", "-1", "the least is 0"),
    ],
)
def test_errors_name_key_value_source_and_what_is_allowed(key: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(**{key: text})
    for part in (key, text, "--set", says):
        assert part in error.value.message


def test_grpc_hosts() -> None:
    assert parse_host("localhost") == "127.0.0.1"
    assert parse_host(" ::1 ") == "::1"
    assert parse_host("[::]") == "::"
    assert parse_host("unix:/run/grpc.sock") == "unix:/run/grpc.sock"
    assert is_loopback(parse_host("unix:/run/grpc.sock"))


@pytest.mark.parametrize(
    "text", ["unix:relative.sock", "unix:/", "unix:/tmp/", "unix:", "unix:/a\0b", "unix:/" + "x" * 107]
)
def test_paths_that_no_unix_socket_has(text: str) -> None:
    with pytest.raises(ValueError, match="absolute path|has 108 bytes"):
        parse_address(text, "inference")
    with pytest.raises(ValueError, match="absolute path|has 108 bytes"):
        parse_host(text)


OUTSIDE = [
    {"grpc_management_address": "0.0.0.0"},
    {"management_address": "http://0.0.0.0:8081"},
    {"grpc_inference_address": "::"},
    {"inference_address": "http://10.0.0.1:8080"},
    {
        "http_extra_ports": "9000",
        "host": "0.0.0.0",
        "inference_address": "http://[::1]",
        "grpc_inference_address": "::1",
    },
]


@pytest.mark.parametrize("settings", OUTSIDE)
def test_an_outside_address_turns_tokens_on(settings: dict[str, str]) -> None:
    config = loaded(**settings)
    assert config.token_authorization
    assert not config.model_api_enabled
    tokens, models = who_may(config)
    assert tokens.startswith("Token authorization is on: other machines can reach ")
    assert next(iter(settings)) in tokens
    assert models.endswith(" is off (--enable-model-api turns it on) for the same reason.")


def test_tokens_are_off_on_loopback_unless_told_or_given() -> None:
    assert not loaded().token_authorization
    tokens, models = who_may(loaded())
    assert "is off: every inference and management address is a loopback" in tokens
    assert models.endswith(" is on for the same reason.")
    assert loaded(disable_token_authorization="false").token_authorization
    given = loaded(inference_token="eight-or-more")
    assert given.token_authorization
    assert who_may(given)[0].endswith("on: keys are given by inference_token.")


@pytest.mark.parametrize("settings", OUTSIDE)
def test_tokens_are_off_by_name_only(settings: dict[str, str]) -> None:
    config = loaded(**settings, disable_token_authorization="true", token_path="x")
    assert not config.token_authorization
    assert "is off: disable_token_authorization=true (" in who_may(config)[0]


def test_keys_are_never_shown() -> None:
    config = loaded(management_token="secret-one,secret-two", inference_token="secret-three")
    assert config.management_token == ("secret-one", "secret-two")
    assert "secret-" not in repr(config) + str(explain(config)) + str(snapshot_settings(config))
    with pytest.raises(ConfigError) as caught:
        loaded(management_token="secret-one,secret two", api_token="short")
    assert "secret" not in str(caught.value) and "short" not in str(caught.value).replace("shorter", "")
    assert "management_token = *** " in str(caught.value)


def test_workers_do_not_get_the_keys() -> None:
    secret = {"TS_INFERENCE_TOKEN": "secret-one", "TS_KEYSTORE_PASS": "secret-two", "TORCHSERVE_TOKEN": "secret-three"}
    config = load_config([], None, {**secret, "OTHER": "1"})
    passed = worker_environment(config)
    assert config.inference_token == ("secret-one",)
    assert "OTHER" in passed and not secret.keys() & passed.keys()


def test_nor_does_anything_else_that_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TS_API_TOKEN", "secret-one")
    config = load_config()
    forget_secrets()
    assert config.api_token == ("secret-one",)
    assert "TS_API_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keystore": "k.p12", "enable_grpc_ssl": "true"}, "openssl pkcs12 -in k.p12 -nokeys"),
        ({"keystore": "k p", "metrics_address": "https://[::1]"}, "openssl pkcs12 -in 'k p' -nokeys"),
        (
            {"keystore": "k.jks", "keystore_type": "JKS", "management_address": "https://localhost"},
            "keytool -importkeystore -srckeystore k.jks -srcstoretype JKS",
        ),
        ({"inference_address": "https://localhost"}, "inference_address.*openssl req -x509"),
        ({"metrics_address": "https://localhost"}, "metrics_address.*TLS needs certificate_file"),
        ({"client_ca_file": "ca.pem"}, "no address asks clients"),
        ({"client_ca_file": "ca.pem", "certificate_file": "c", "private_key_file": "k"}, "no address asks clients"),
        ({"inference_address": "unix:/a", "grpc_inference_address": "unix:/a"}, "unix:/a is already that of"),
        ({"grpc_management_address": "unix:/a", "grpc_inference_address": "unix:/a"}, "unix:/a is already that of"),
        ({"metrics_address": "http://127.0.0.1:7070"}, "already that of grpc_inference_port"),
        ({"metrics_address": "https://127.0.0.1:8080", "certificate_file": "c", "private_key_file": "k"}, "port 8080"),
        ({"unix_socket_mode": "888"}, "three octal digits"),
        ({"certificate_file": "c.pem"}, "without the other"),
        ({"enable_grpc_ssl": "true"}, "TLS needs certificate_file"),
        ({"grpc_management_port": "7070"}, "already that of grpc_inference_port"),
        ({"management_address": "http://127.0.0.1:7071"}, "already that of grpc_management_port"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"keystore": "k.p12"},
        {"keystore": "k.p12", "enable_grpc_ssl": "true", "certificate_file": "c", "private_key_file": "k"},
        {"metrics_address": "https://localhost", "enable_metrics_api": "false"},
        {"metrics_address": "http://127.0.0.1:8081"},
        {"inference_address": "unix:/a", "management_address": "unix:/a", "metrics_address": "unix:/a"},
        {"grpc_inference_address": "unix:/a", "grpc_management_address": "unix:/b", "grpc_management_port": "7070"},
        {"unix_socket_mode": "0660"},
    ],
)
def test_settings_that_go_together(settings: dict[str, str]) -> None:
    assert loaded(**settings).loopback_only


def test_the_manual_has_the_table() -> None:
    assert settings_table() in DOC.read_text(), (
        "run: torchserve config --markdown, and put it into docs/configuration.md"
    )


def test_programs_and_their_arguments() -> None:
    config = loaded(program="main.py --times=3 --name 'a; b'; /models/other.py")
    assert [line.words for line in config.program.lines] == [
        ("main.py", "--times=3", "--name", "a; b"),
        ("/models/other.py",),
    ]
    (row,) = [row for row in explain(config) if row.key == "program"]
    assert loaded(program=row.value).program == config.program, "what is shown can be given"
    with pytest.raises(ConfigError, match="not words as a shell has them"):
        loaded(program="main.py 'open")


def test_every_address_is_local_by_default() -> None:
    """TorchServe's were 0.0.0.0 (CVE-2023-43654), those of gRPC for longer (CVE-2024-35199)."""
    defaults: dict[str, Any] = {one.name: one.default for one in fields(ServerConfig) if one.name.endswith("_address")}
    assert defaults.pop("ray_address") is None, "an address that is called, not one that listens"
    local = {name: is_loopback(getattr(value, "host", value)) for name, value in defaults.items()}
    names = [*(f"{api}_address" for api in ("inference", "management", "metrics")), "grpc_inference_address"]
    assert local == dict.fromkeys([*names, "grpc_management_address"], True)
