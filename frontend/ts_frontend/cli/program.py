"""The server that `ts.compat.start` runs in place of a program that starts its own.

Arguments: JSON that describes the program (`kind`, `models`, `options`, `program`, `module`, `argv`, `path`,
`directory`, `stand_in`, `torch`, `co_served`), then the program's own arguments.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ts_frontend.cli import launch
from ts_frontend.config.foreign import kserve
from ts_frontend.config.foreign.kserve import FoundOptions, RaisingParser, alike
from ts_frontend.config.kinds import ConfigError, ProgramLine, ProgramLines, bucket_of
from ts_frontend.config.load import Option, environment, load_config, located
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError

#: Flags, and their settings.
FLAGS = {
    "model_store": "model_store",
    "models": "load_models",
    "model_repository": "model_repository",
    "model_control_mode": "model_control_mode",
    "load_model": "load_model",
}


def co_served_settings(argv: Sequence[str]) -> list[Option]:
    """The settings on a program's command line; `-` and `_` are alike in names. ConfigError for one without a value."""
    parser = RaisingParser(add_help=False, allow_abbrev=False)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="extend", nargs="+")
    found, _ = parser.parse_known_args([alike(word) for word in argv])
    return [
        Option(key, ",".join(getattr(found, name)), f"--{name}")
        for name, key in FLAGS.items()
        if getattr(found, name) is not None
    ]


def co_served_notes(more: Sequence[Option]) -> list[str]:
    """A sentence for each option that has no effect."""
    keys = {option.key for option in more}
    if "model_store" in keys and "load_models" not in keys:
        return ["--model_store: nothing of it is served without --models=NAME or --models=all"]
    return []


def check_co_served(config: ServerConfig) -> None:
    """Raises ConfigError when a directory doesn't exist."""
    for key in ("model_store", "model_repository"):
        found = getattr(config, key)
        for directory in found if isinstance(found, tuple) else [found] if found else []:
            if bucket_of(directory) is None and not directory.is_dir():
                source = config.sources.get(key, "default")
                raise ConfigError(f"{key} ({source}) directory not found: {located(Path(directory))}")


def main(words: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    told, *argv = sys.argv[1:] if words is None else words
    program: dict[str, Any] = json.loads(told)
    try:
        environ = environment()
        properties = kserve.read(environ)
        found = kserve.resolve(argv, environ, properties, program["options"])
        more = co_served_settings([*argv, *program.get("co_served", ())])
        for line in (*kserve.notes(found, environ, properties), *co_served_notes(more)):
            print(line, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="oip-", ignore_cleanup_errors=True) as directory:
            store = Path(directory)
            own = write_models(store / "models", program, found)
            config = load_config([*settings(found, own, store, environ), *more])
            config = for_program(config, imports_torch=bool(program.get("torch", True)))
            check_co_served(config)
            return launch.serve(config, _run, None)
    except (ServeError, OSError) as error:
        print(f"The server did not start: {error}", file=sys.stderr)
        return 1


def _run(config: ServerConfig, ready_fd: int | None) -> int:
    return int(import_module("ts_frontend.process").main(config, ready_fd))


def for_program(config: ServerConfig, *, imports_torch: bool) -> ServerConfig:
    """The configuration. torch isn't imported before the workers' start if only the program is served, if it has
    reached its server's start without torch, and unless a setting says otherwise."""
    alone = not (config.load_models or config.model_repository)
    if imports_torch or not alone or "preload_torch" in config.sources:
        return config
    return replace(config, preload_torch=False, sources={**config.sources, "preload_torch": "the program's imports"})


def write_models(store: Path, program: Mapping[str, Any], found: Mapping[str, FoundOptions]) -> ProgramLines:
    """Writes a directory with a manifest for each of the program's models; returns them as settings of the server."""
    adapted = {key: program[key] for key in ("program", "module", "argv", "path", "directory")}
    folders = []
    adapted["latency_logging"] = found["enable_latency_logging"].value
    adapted["stand_in"], adapted["torch"] = bool(program.get("stand_in")), bool(program.get("torch", True))
    for number, name in enumerate(program["models"]):
        files = store / f"model{number}" / "MAR-INF"
        files.mkdir(parents=True)
        model = {"modelName": name, "modelVersion": "1.0", "handler": Path(program["program"]).name}
        manifest = {"model": model | {"adapter": "program", "adapterSettings": adapted}}
        (files / "MANIFEST.json").write_text(json.dumps(manifest))
        folders.append(ProgramLine((str(files.parent),)))
    return ProgramLines(tuple(folders))


def settings(
    found: Mapping[str, FoundOptions], program: ProgramLines, directory: Path, environ: Mapping[str, str]
) -> list[Option]:
    """The settings for KServe's options: reachable from the network, with management only on this machine."""
    own = "KServe's defaults"
    scheme = "https" if found["ssl_certfile"].value else "http"
    http = f"{scheme}://0.0.0.0:{found['http_port'].value}"
    pairs = {
        "inference_address": (http, found["http_port"].source),
        "metrics_address": (http, found["http_port"].source),
        "metrics_mode": ("prometheus", own),
        "grpc_inference_address": ("0.0.0.0", own),
        "grpc_inference_port": (found["grpc_port"].value, found["grpc_port"].source),
        "program": (program, own),
        "default_workers_per_model": (found["workers"].value, found["workers"].source),
        "ts_open_inference_protocol": ("true", own),
        "kserve_mode": ("true", own),
        "ncs": ("true", own),
        "enable_model_api": ("false", own),
    }
    pairs |= {key: (value, own) for key, value in _management(directory).items()}
    if not _has_keys(environ):
        pairs["disable_token_authorization"] = ("true", own)
    if "LOG_LOCATION" not in environ:
        pairs["log_location"] = (directory / "logs", own)
    pairs |= {
        key: (found[name].value, found[name].source) for key, name in _SAME.items() if found[name].value is not None
    }
    if scheme == "https":
        pairs["enable_grpc_ssl"] = ("true", found["ssl_certfile"].source)
    sizes = [found[f"grpc_max_{way}_message_length"].value for way in ("receive", "send")]
    for key, size in zip(("max_request_size", "max_response_size"), sizes, strict=True):
        pairs[key] = (size or KSERVE_MESSAGE_BYTES_MAX, own)
    return [Option(key, _text(value), source) for key, (value, source) in pairs.items()]


#: KServe's default limit of a gRPC message, in bytes.
KSERVE_MESSAGE_BYTES_MAX = 8_388_608
_SOCKET_PATH_BYTES_MAX = 107
_SAME = {
    "enable_grpc": "enable_grpc",
    "enable_docs_url": "enable_docs_url",
    "access_log_format": "access_log_format",
    "certificate_file": "ssl_certfile",
    "private_key_file": "ssl_keyfile",
    "log_config": "log_config_file",
}


def _management(directory: Path) -> dict[str, str]:
    """Addresses for the management API, which KServe's servers don't have: Unix sockets for this user only, or loopback
    addresses if the directory's path is too long for a socket."""
    sockets = {"management_address": directory / "http.sock", "grpc_management_address": directory / "grpc.sock"}
    if max(len(os.fsencode(path)) for path in sockets.values()) <= _SOCKET_PATH_BYTES_MAX:
        return {key: f"unix:{path}" for key, path in sockets.items()}
    return {
        "management_address": "http://127.0.0.1:0",
        "grpc_management_address": "127.0.0.1",
        "grpc_management_port": "0",
    }


def _has_keys(environ: Mapping[str, str]) -> bool:
    names = ("TS_TOKEN_PATH", "TS_INFERENCE_TOKEN", "TS_DISABLE_TOKEN_AUTHORIZATION")
    return any(environ.get(name) for name in names)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
