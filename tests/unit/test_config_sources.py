"""The precedence of a setting's sources, and the log's messages about it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from tempfile import gettempdir

import pytest

from ts_frontend.config.display import explain, snapshot_settings
from ts_frontend.config.load import WITH_MODELS, Option, load_config
from ts_frontend.config.snapshot import SnapshotFiles, SnapshotKind, VersionState
from ts_frontend.config.table import SETTINGS, ServerConfig

STATE = VersionState(archive="m.mar", default=True, min_workers=1, max_workers=2)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_file(text: str, name: str = "config.properties") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def write_snapshot(models: Mapping[str, Mapping[str, VersionState]] | None = None, **settings: str) -> Path:
    return SnapshotFiles(Path("logs/config")).write(SnapshotKind.SHUTDOWN, models or {}, settings, datetime(2026, 1, 2))


def notes(config: ServerConfig) -> str:
    return "\n".join(note.text for note in config.notes)


def source(config: ServerConfig, key: str) -> str:
    return next(row.source for row in explain(config) if row.key == key)


def test_a_tmpdir_that_is_not_used_is_told() -> None:
    """Python silently takes another directory for one that is full, read-only or misspelt."""
    assert f"TMPDIR = /no/such: no file can be written there; {gettempdir()} is used" in notes(
        load_config(environ={"TMPDIR": "/no/such"})
    )
    for environ in ({}, {"TMPDIR": ""}, {"TMPDIR": gettempdir()}, {"TMPDIR": f"{gettempdir()}/"}):
        assert "TMPDIR" not in notes(load_config(environ=environ))


def test_the_order_of_sources() -> None:
    """Each source is taken away in turn, the strongest first."""
    options = [Option("job_queue_size", "5", "--set job_queue_size")]
    environ = {"TS_JOB_QUEUE_SIZE": "4", "TS_ENABLE_ENVVARS_CONFIG": "true"}
    file = write_file("# mine\njob_queue_size=3\n")
    snapshot = write_snapshot(job_queue_size="2")

    seen = []
    for chosen_options, chosen_environ in ((options, environ), ([], environ), ([], {})):
        config = load_config(chosen_options, environ=chosen_environ)
        seen.append((config.job_queue_size, source(config, "job_queue_size")))
    file.unlink()
    config = load_config(environ={})
    seen.append((config.job_queue_size, source(config, "job_queue_size")))
    snapshot.unlink()
    config = load_config(environ={})
    seen.append((config.job_queue_size, source(config, "job_queue_size")))

    assert seen == [
        (5, "--set job_queue_size"),
        (4, "environment TS_JOB_QUEUE_SIZE"),
        (3, "config.properties:2"),
        (2, f"snapshot {snapshot.name}"),
        (100, "default"),
    ]


def test_a_variable_that_is_nearly_one_of_ours_is_warned_about() -> None:
    environ = {"TS_JOB_QUEU_SIZE": "4", "TS_DRAIN_TIMEOUTS_S": "9"}
    text = notes(load_config(environ=environ))
    assert "TS_JOB_QUEU_SIZE in the environment: there is no such setting; did you mean TS_JOB_QUEUE_SIZE?" in text
    assert "did you mean TS_DRAIN_TIMEOUT_S?" in text


def test_the_environment_may_not_widen_allowed_urls_by_itself() -> None:
    environ = {"TS_ALLOWED_URLS": ".*", "TS_USE_ENV_ALLOWED_URLS": "true"}
    write_file("enable_envvars_config=true")
    config = load_config(environ=environ)
    assert config.allowed_urls is None
    assert "TS_ALLOWED_URLS" in notes(config)
    write_file("enable_envvars_config=true\nuse_env_allowed_urls=true")
    assert load_config(environ=environ).allowed_urls == (".*",)


def test_which_config_file() -> None:
    write_file("job_queue_size=1")
    named, flagged = write_file("job_queue_size=2", "named"), write_file("job_queue_size=3", "flagged")
    assert load_config(environ={}).job_queue_size == 1
    assert load_config(ts_config=flagged, environ={}).job_queue_size == 3
    config = load_config(ts_config=flagged, environ={"TS_CONFIG_FILE": str(named)})
    assert config.job_queue_size == 2
    assert "--ts-config flagged is not read" in notes(config)


def test_a_snapshot_brings_models_and_settings_but_not_security() -> None:
    write_snapshot(
        {"m": {"1.0": STATE}},
        job_queue_size="2",
        disable_token_authorization="true",
        enable_model_api="true",
        allowed_urls=".*",
        load_models="old",
        log_location="/other",
    )
    config = load_config(environ={})
    assert config.snapshot is not None
    assert config.snapshot.models == {"m": {"1.0": STATE}}
    assert config.job_queue_size == 2
    assert (config.disable_token_authorization, config.enable_model_api, config.allowed_urls) == (None, None, None)
    assert (config.load_models, config.log_location) == ((), Path("logs"))
    assert "job_queue_size=2" in notes(config)
    assert "models restored from snapshot" in notes(config)


def test_the_command_line_beats_the_snapshot_and_the_log_says_so() -> None:
    path = write_snapshot({"m": {"1.0": STATE}}, job_queue_size="2")
    options = [Option("job_queue_size", "5", "--set job_queue_size"), Option("load_models", "n.mar", "--models")]
    config = load_config(options, environ={})
    assert config.job_queue_size == 5
    assert f"job_queue_size=5 (--set job_queue_size) beats 2 of snapshot {path.name}" in notes(config)
    assert config.load_models == ("n.mar",)
    assert "after those of load_models (--models), which win: m" in notes(config)


@pytest.mark.parametrize(
    ("key", "flag"),
    [("disable_token_authorization", "--disable-token-auth"), ("enable_model_api", "--enable-model-api")],
)
def test_a_flag_opens_nothing_that_the_environment_keeps_closed(key: str, flag: str) -> None:
    """As in TorchServe, and the only settings of which the environment is stronger."""
    opened, env = [Option(key, "true", flag)], f"TS_{key.upper()}"
    closed = {"TS_ENABLE_ENVVARS_CONFIG": "true"}
    for text in ("False", "1", "yes", "true ", ""):
        config = load_config(opened, environ={**closed, env: text})
        assert getattr(config, key) is False, text
        assert f"{flag} has no effect: environment {env} is false" in notes(config)
    for environ in ({}, {env: "false"}, {**closed, env: "true"}):
        assert getattr(load_config(opened, environ=environ), key) is True, environ
    closing = [Option(key, "false", f"--set {key}")]
    assert getattr(load_config(closing, environ={**closed, env: "true"}), key) is False


def test_a_snapshot_given_as_config_file_counts_as_one() -> None:
    path = write_snapshot({"m": {"1.0": STATE}}, disable_token_authorization="true", load_models="old")
    config = load_config(ts_config=path, environ={})
    assert config.disable_token_authorization is True
    assert config.snapshot is not None
    assert (list(config.snapshot.models), config.load_models) == (["m"], ())


def test_a_broken_newest_snapshot_is_skipped_with_a_warning() -> None:
    good = write_snapshot(job_queue_size="2")
    (good.parent / "20260102000000999-shutdown.cfg").write_text("job_queue_size=9\nmodel_snapshot={")
    config = load_config(environ={})
    assert config.job_queue_size == 2
    assert "20260102000000999-shutdown.cfg is skipped" in notes(config)


def test_a_snapshot_gives_the_settings_back(tmp_path: Path) -> None:
    options = {
        "model_store": "s",
        "allowed_urls": "a,b",
        "models": '{"m": {"1": {"batchSize": 4}}}',
        "enable_metrics_api": "false",
        "inference_address": "http://[::1]:1",
        "keystore_pass": "secret",
        "default_service_handler": "a=b:c\\",
    }
    config = load_config([Option(key, text, "--set") for key, text in options.items()], environ={})
    settings = snapshot_settings(config)
    assert "keystore_pass" not in settings
    assert "allowed_urls" not in settings
    assert "workflow_store" not in settings  # it follows model_store
    assert settings["model_store"] == str(tmp_path / "s")
    SnapshotFiles(Path("logs/config")).write(SnapshotKind.SHUTDOWN, {}, settings)
    every = load_config([Option("restore_snapshot", "all", "--set")], environ={})
    for key in ("models", "enable_metrics_api", "inference_address", "default_service_handler"):
        assert getattr(every, key) == getattr(config, key)
    restored = load_config(environ={})
    for key in ("models", "model_store", "default_service_handler"):
        assert getattr(restored, key) == getattr(every, key)
    assert (restored.enable_metrics_api, str(restored.inference_address)) == (True, "http://127.0.0.1:8080")
    assert "enable_metrics_api, inference_address (restore_snapshot=all restores them too)" in notes(restored)


def _opens_nothing(config: ServerConfig) -> bool:
    """It listens on the loopback address, as a server that nobody told anything does."""
    return config.loopback_only and config.metrics_address.loopback and not config.enable_grpc_ssl


EXPOSED = {
    "inference_address": "https://0.0.0.0:8443",
    "management_address": "http://0.0.0.0:8081",
    "metrics_address": "http://0.0.0.0:8082",
    "grpc_inference_address": "0.0.0.0",
    "grpc_management_address": "0.0.0.0",
    "enable_grpc_ssl": "true",
    "certificate_file": "/c.pem",
    "private_key_file": "/k.pem",
    "cors_allowed_origin": "*",
    "unix_socket_mode": "666",
    "kserve_mode": "true",
    "model_control_mode": "explicit",
    "limit_max_image_pixels": "false",
    "model_store": "/store",
}


def test_addresses_and_what_opens_the_server_do_not_come_back_by_themselves() -> None:
    write_snapshot({"m": {"1.0": STATE}}, **EXPOSED)
    config = load_config(environ={})
    assert config.snapshot is not None and list(config.snapshot.models) == ["m"]
    assert config.model_store == Path("/store")
    default = load_config([Option("ncs", "true", "--ncs")], environ={})
    for key in EXPOSED.keys() - {"model_store"}:
        assert getattr(config, key) == getattr(default, key), key
    assert _opens_nothing(config)
    same = load_config([Option("restore_snapshot", "all", "--set")], environ={})
    assert same.outside_addresses() and same.enable_grpc_ssl and same.cors_allowed_origin == "*"
    nothing = load_config([Option("restore_snapshot", "none", "--set")], environ={})
    assert (nothing.snapshot, nothing.model_store, nothing.ncs) == (None, None, False)


def test_every_setting_that_comes_back_was_looked_at() -> None:
    """A new setting is none of them until somebody has put it there."""
    assert SETTINGS.keys() >= WITH_MODELS
    for key in WITH_MODELS:
        setting = SETTINGS[key]
        assert setting.restored and not setting.secret, key
        assert not any(word in key for word in ("address", "host", "port", "token", "cors", "ssl", "tls", "key", "url"))


def test_secrets_are_not_shown() -> None:
    config = load_config([Option("keystore_pass", "hush", "--set")], environ={})
    assert "hush" not in str(explain(config))
