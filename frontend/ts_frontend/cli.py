"""The `torchserve` command: TorchServe's flags start and stop a server; a first word names a subcommand."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ts.version import __version__
from ts_frontend import launch
from ts_frontend.aliases import ALIASES, Alias
from ts_frontend.authorization.key_file import NAME as KEY_FILE
from ts_frontend.config import ConfigError, Explained, Option, ServerConfig, explain, load_config
from ts_frontend.config_checks import secured, who_may
from ts_frontend.config_docs import settings_table
from ts_frontend.config_kinds import nearest, s3_of
from ts_frontend.errors import ServeError
from ts_frontend.option_words import spelled
from ts_frontend.pid_file import AlreadyRunning, claimed, pid_path, remove_orphan, running_server

#: The TorchServe whose commands, APIs and archives these are.
COMPATIBLE_VERSION = "0.12.0"

_OWN_COMMANDS = {
    "start": "the same as torchserve --start",
    "stop": "the same as torchserve --stop",
    "config": "show every setting, its value and where that comes from, without starting",
}
_SETTING_FLAGS = {
    "model_store": "--model-store",
    "workflow_store": "--workflow-store",
    "model_repository": "--model-repository",
    "model_control_mode": "--model-control-mode",
    "load_model": "--load-model",
    "program": "--program",
    "repository_poll_secs": "--repository-poll-secs",
    "load_models": "--models",
    "log_config": "--log-config",
    "cpp_log_config": "--cpp-log-config",
    "plugins_path": "--plugins-path",
    "ncs": "--ncs",
    "disable_token_authorization": "--disable-token-auth",
    "enable_model_api": "--enable-model-api",
    "profile": "--profile",
    "host": "--host",
    "http_port": "--http-port",
    "metrics_port": "--metrics-port",
    "use_tls": "--use-tls",
    "work_dir": "--work-dir",
    "bypass_serve": "--bypass-serve",
    "kserve_mode": "--kserve-mode",
    "enable_grpc": "--enable-grpc",
    "enable_docs_url": "--enable-docs-url",
    "access_log_format": "--access-log-format",
    "strict_readiness": "--strict-readiness",
    "exit_on_error": "--exit-on-error",
    "model_dir": "--model-dir",
    "trace_level": "--trace-level",
    "trace_rate": "--trace-rate",
    "trace_count": "--trace-count",
}


def _run_server(config: ServerConfig, ready_fd: int | None) -> int:
    return int(import_module("ts_frontend.server").main(config, ready_fd))


@dataclass(frozen=True, slots=True)
class Program:
    """What a command line acts on: the command that starts a server process, and what such a process runs."""

    command: Sequence[str] = launch.COMMAND
    run: Callable[[ServerConfig, int | None], int] = _run_server


def main(argv: Sequence[str] | None = None, program: Program = Program()) -> int:
    """Run one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and not words[0].startswith("-"):
            return _subcommand(words, program)
        return _launcher(_parser().parse_args(words), words, program)
    except ServeError as error:
        print(error.message, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        _flush()


def _flush() -> None:
    """Write what is buffered; a reader that is gone isn't an error."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- the command line


class _ConfigParser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """With `-` and `_` alike, and beginnings of TorchServe's flags and ours."""
        flags = set(self._option_string_actions)
        own = [flag for flag in flags if flag.startswith("--") and flag[2:].replace("-", "_") not in ALIASES]
        words, unknown = spelled(list(sys.argv[1:] if args is None else args), own, flags)
        if unknown:
            self.error(f"unrecognized arguments: {unknown}{nearest(unknown, flags)}")
        return super().parse_args(words, namespace)


class _Parser(_ConfigParser):
    def format_help(self) -> str:
        """With the commands, which are only looked up when somebody reads them."""
        self.epilog = _epilog()
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchserve",
        usage="torchserve [--start | --stop | --version] [OPTION …]\n       torchserve COMMAND …",
        description="Serve PyTorch models over gRPC and HTTP. Without --stop or --version, starts a server.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_actions(parser)
    _add_setting_groups(parser, "what is served")
    return parser


def _add_setting_groups(parser: argparse.ArgumentParser, title: str) -> None:
    _add_settings(parser.add_argument_group(title))
    _add_places(parser.add_argument_group("where and how"))
    _add_accepted(parser.add_argument_group("accepted for TorchServe's sake"))
    _add_aliases(parser)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument("--start", action="store_true", help="start a server in the background (the default)")
    action.add_argument("--stop", action="store_true", help="let the running server finish its requests, and end it")
    parser.add_argument("--foreground", action="store_true", help="with --start: be the server, do not go away")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds to wait: with --start until it is ready (no limit), with --stop until it has ended (120)",
    )
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def _add_settings(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-store", metavar="DIR", help="directory of the archives; needed")
    group.add_argument(
        "--models",
        nargs="+",
        dest="load_models",
        metavar="MODEL",
        help="what to load: NAME=ARCHIVE, ARCHIVE, or all; ARCHIVE is a file of the store or an allowed URL",
    )
    group.add_argument(
        "--model-repository",
        action="append",
        metavar="DIR",
        help="directory of models in Triton's layout, beside or instead of the model store; can be repeated",
    )
    group.add_argument(
        "--model-control-mode",
        choices=("none", "poll", "explicit"),
        help="of the model repository: all at start (none), and as files change (poll), or on demand (explicit)",
    )
    group.add_argument(
        "--load-model", action="append", metavar="NAME", help="load at start in explicit mode; *: all; can be repeated"
    )
    group.add_argument(
        "--program",
        action="append",
        metavar="'FILE [ARGUMENT …]'",
        help="a program made for aiSSEMBLE's or KServe's server: its models are served too; can be repeated",
    )
    group.add_argument("--repository-poll-secs", metavar="S", help="seconds between two looks at the files (poll)")
    group.add_argument("--ts-config", metavar="FILE", help="settings: config.properties")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting by its name in config.properties; can be repeated",
    )
    group.add_argument(
        "--ncs",
        "--no-config-snapshots",
        action="store_const",
        const="true",
        help="do not restore the models of the last run, and do not remember those of this one",
    )
    group.add_argument(
        "--log-config", metavar="FILE", help="logging: YAML or JSON (dictConfig), or log4j2 XML (levels)"
    )
    group.add_argument(
        "--disable-token-auth",
        "--dt",
        action="store_const",
        const="true",
        dest="disable_token_authorization",
        help="no tokens, also when other machines can reach the server",
    )
    group.add_argument(
        "--enable-model-api",
        "--model-api-enabled",
        action="store_const",
        const="true",
        help="allow register and unregister while it runs, also when other machines can reach it",
    )


def _add_places(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile", metavar="NAME", help="ports of triton, mlserver, kserve, dynamo, max or torchserve")
    group.add_argument("--host", metavar="ADDRESS", help="where inference and metrics listen; 0.0.0.0: everywhere")
    group.add_argument("--http-port", metavar="PORT", help="port of HTTP inference")
    group.add_argument("--metrics-port", metavar="PORT", help="port of the metrics API")
    group.add_argument(
        "--use-tls", nargs="?", const="true", metavar="BOOL", help="TLS on every port; needs --cert-file, --key-file"
    )
    group.add_argument(
        "--kserve-mode", nargs="?", const="true", metavar="BOOL", help="profile kserve: a container behind KServe"
    )
    group.add_argument("--enable-grpc", nargs="?", const="true", metavar="BOOL", help="false: no gRPC")
    group.add_argument(
        "--enable-docs-url", nargs="?", const="true", metavar="BOOL", help="a page about the HTTP APIs at /docs"
    )
    group.add_argument("--access-log-format", metavar="FORMAT", help="of a request's line, in asgi-logger's words")
    group.add_argument("--model-dir", metavar="DIR", help="the one model's folder, as KServe mounts it")
    for switch, text in (
        ("--strict-readiness", "false: ready also while a model has lost its workers"),
        ("--exit-on-error", "start only when all models can be loaded"),
    ):
        group.add_argument(switch, nargs="?", const="true", metavar="BOOL", help=text)
    group.add_argument("--trace-level", metavar="LEVEL", help="OFF, or TIMESTAMPS: of traces, where they are on")
    group.add_argument("--trace-rate", metavar="N", help="one request of so many is traced")
    group.add_argument("--trace-count", metavar="N", help="so many traces, and no more; -1: any number")
    group.add_argument("--work-dir", metavar="DIR", help="the one directory to write to: for read-only containers")
    group.add_argument(
        "--bypass-serve",
        nargs="?",
        const="true",
        metavar="BOOL",
        help="run handlers in this very process, in the foreground: for breakpoints, never in production",
    )


def _add_aliases(parser: argparse.ArgumentParser) -> None:
    """Options of other servers. Most are only in the documentation: there are many."""
    group = parser.add_argument_group("as Dynamo and MAX call them (more, and Triton's: docs/profiles.md)")
    for alias in ALIASES.values():
        shown = alias.whose.startswith(("Dynamo", "MAX", "this"))
        group.add_argument(
            alias.flag,
            dest=f"alias_{alias.name}",
            metavar="VALUE",
            help=alias.doc.replace("`", "") if shown else argparse.SUPPRESS,
            **_given(alias),
        )


def _given(alias: Alias) -> dict[str, Any]:
    """How often, and whether with a value."""
    if alias.repeated:
        return {"action": "append"}
    return {"nargs": "?", "const": "true"} if alias.switch else {}


def _add_accepted(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workflow-store", metavar="DIR", help="directory of workflow archives (default: the model store)"
    )
    group.add_argument("--plugins-path", "--ppath", metavar="DIR", help="Java plugins: no effect")
    group.add_argument("--cpp-log-config", metavar="FILE", help="logging of C++ workers: no effect")


def _epilog() -> str:
    commands = dict(_OWN_COMMANDS)
    with contextlib.suppress(ImportError):
        commands |= {name: one.get_short_help_str(70) for name, one in _client().commands.items()}
    rows = "\n".join(f"  torchserve {name:<12} {text}" for name, text in commands.items())
    return (
        f"commands (torchserve COMMAND --help):\n{rows}\n\n"
        "example:\n  torchserve --start --model-store model_store --models digits=digits.mar\n\n"
        "Settings come from the command line, the environment, the config file, the profile, the last snapshot and\n"
        "the defaults; an earlier one of these wins. `torchserve config` shows each value and its source."
    )


def _options(arguments: argparse.Namespace) -> list[Option]:
    """The settings on a command line."""
    options = []
    for key, flag in _SETTING_FLAGS.items():
        value = getattr(arguments, key)
        if value is not None:
            separator = ";" if key == "program" else ","
            options.append(Option(key, separator.join(value) if isinstance(value, list) else value, flag))
    for name, alias in ALIASES.items():
        value = getattr(arguments, f"alias_{name}")
        if value is not None:
            options.append(Option(name, ";".join(value) if isinstance(value, list) else value, alias.flag))
    for pair in arguments.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: write KEY=VALUE")
        options.append(Option(key.strip(), value, f"--set {key.strip()}"))
    return options


# --- what a command line does


def _launcher(arguments: argparse.Namespace, words: Sequence[str], program: Program) -> int:
    if arguments.version:
        print(f"TorchServe Version is {COMPATIBLE_VERSION}", flush=True)
        print(f"torchrelay {__version__}, with TorchServe's interfaces of that version", file=sys.stderr)
        return 0
    if arguments.stop:
        print(launch.stop(120 if arguments.timeout is None else arguments.timeout, _work_dir(arguments)))
        return 0
    if not arguments.foreground and os.getpid() == 1:
        print("This is process 1, with which its container ends: serving in the foreground.", file=sys.stderr)
        arguments.foreground = True
    if not arguments.foreground and load_config(_options(arguments), _ts_config(arguments)).bypass_serve:
        print("bypass_serve is on: serving in the foreground.", file=sys.stderr)
        arguments.foreground = True
    if arguments.foreground:
        return _foreground(arguments, program)
    return _background(arguments, words, program)


def _work_dir(arguments: argparse.Namespace) -> Path | None:
    """Where the server to stop has its pid file; settings that a server couldn't start with don't keep one running."""
    try:
        return load_config(_options(arguments), _ts_config(arguments)).work_dir
    except ConfigError:
        return Path(arguments.work_dir) if arguments.work_dir else None


def _foreground(arguments: argparse.Namespace, program: Program) -> int:
    ready_fd = arguments.ready_fd
    with contextlib.ExitStack() as pid_file:
        try:
            config = _startable(arguments)
            pid_file.enter_context(claimed(pid_path(config.work_dir)))
        except ServeError as error:
            launch.refuse(ready_fd, error.message)
            raise
        return launch.serve(config, program.run, ready_fd)


def _background(arguments: argparse.Namespace, words: Sequence[str], program: Program) -> int:
    config = _startable(arguments)
    if running_server(pid_path(config.work_dir)):
        raise AlreadyRunning
    if remove_orphan(pid_path(config.work_dir)):
        print("Removing orphan pid file.", flush=True)
    more = ["--foreground"]
    if sys.stdout.isatty() and "console_log" not in config.sources:
        more += ["--set", "console_log=false"]
        config = load_config([*_options(arguments), Option("console_log", "false", "terminal")], _ts_config(arguments))
    listening = launch.start(config, [*words, *more], arguments.timeout, program.command)
    if not config.console_log:  # else the server has printed it there itself
        print(launch.STARTED)
    print("\n".join(launch.listening_lines(listening)))
    print("\n".join(f"  {sentence}" for sentence in who_may(config)))
    key_file = config.key_dir / KEY_FILE
    if config.token_authorization and key_file.is_file():
        print(f"  The server's keys are in {key_file.absolute()}")
    print(f"  logs in {config.log_location.absolute()}; stop it with: {_stop_command(config)}", flush=True)
    return 0


def _stop_command(config: ServerConfig) -> str:
    where = f" --work-dir {shlex.quote(str(config.work_dir))}" if config.work_dir is not None else ""
    return f"torchserve --stop{where}"


def _ts_config(arguments: argparse.Namespace) -> Path | None:
    return Path(arguments.ts_config) if arguments.ts_config else None


def _startable(arguments: argparse.Namespace) -> ServerConfig:
    """The settings, with everything they name in its place.

    :raises ConfigError: with TorchServe's words where it has some.
    """
    config = load_config(_options(arguments), _ts_config(arguments))
    if config.work_dir is not None:
        _make_places(config, config.work_dir)
    if config.model_store is None and not config.model_repository and not config.program.lines:
        raise ConfigError("Missing mandatory parameter --model-store")
    for directory in config.model_repository:
        if s3_of(directory) is None:
            _check_place(config, "model_repository", "directory", directory)
        elif config.model_control_mode == "poll":
            raise ConfigError(f"model_control_mode is poll, and {s3_of(directory)} isn't looked at again: use explicit")
    for key in ("model_store", "workflow_store"):
        _check_place(config, key, "directory", getattr(config, key))
    for key in ("log_config", "certificate_file", "private_key_file", "client_ca_file", "metrics_config"):
        _check_place(config, key, "file", getattr(config, key))
    if any(secured(config)):
        import_module("ts_frontend.tls").check_certificates(config)
    if not config.temp_dir.is_dir():
        raise ConfigError(f"Invalid temp directory: {config.temp_dir}, please check TEMP environment variable.")
    if arguments.cpp_log_config and not Path(arguments.cpp_log_config).is_file():
        raise ConfigError(f"--cpp-log-config file not found: {Path(arguments.cpp_log_config).absolute()}")
    return config


def _make_places(config: ServerConfig, work_dir: Path) -> None:
    """The directories of `work_dir`, for this user alone. Temporary files of this process go there, too."""
    for place in (work_dir, config.temp_dir):
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            name = config.sources.get("work_dir", "work_dir")
            raise ConfigError(f"{name} {work_dir}: {place} can't be made: {error.strerror}") from None
    tempfile.tempdir = str(config.temp_dir.absolute())


def _check_place(config: ServerConfig, key: str, what: str, path: Path | None) -> None:
    if path is None or (path.is_dir() if what == "directory" else path.is_file()):
        return
    source = config.sources.get(key, "default")
    name = source if source.startswith("--") else f"{key} ({source})"
    raise ConfigError(f"{name} {what} not found: {path if what == 'directory' else path.absolute()}")


def _subcommand(words: Sequence[str], program: Program) -> int:
    name, rest = words[0].replace("_", "-"), list(words[1:])
    if name == "config":
        return _show_config(rest)
    if name in ("start", "stop"):
        rest.append(f"--{name}")
        return _launcher(_parser().parse_args(rest), rest, program)
    group = _client()
    if name not in group.commands:
        known = ", ".join([*_OWN_COMMANDS, *group.commands])
        print(f"torchserve: there is no command {name}; there are {known}. Flags: torchserve --help", file=sys.stderr)
        return 2
    return int(group.main(args=[name, *rest], prog_name="torchserve", standalone_mode=True) or 0)


def _client() -> Any:
    """The commands that talk to a running server; imported only when needed: they bring a gRPC client."""
    return import_module("ts_frontend.client_cli").commands


def _show_config(words: Sequence[str]) -> int:
    parser = _ConfigParser(
        prog="torchserve config",
        allow_abbrev=False,
        description="Show every setting as a server started with these flags would have it, and where each value comes "
        "from. Nothing is started.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with the documentation of each setting")
    parser.add_argument("--changed", action="store_true", help="only what is not the default")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/configuration.md")
    parser.add_argument("--start", "--foreground", action="store_true", help=argparse.SUPPRESS)
    _add_setting_groups(parser, "flags of torchserve --start, whose effect is shown")
    arguments = parser.parse_args(words)
    if arguments.markdown:
        print(settings_table())
        return 0
    config = load_config(_options(arguments), _ts_config(arguments))
    rows = [row for row in explain(config) if not arguments.changed or row.source != "default"]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    _print_rows(rows)
    for note in config.notes:
        print(f"note: {note.text}", file=sys.stderr)
    return 0


def _print_rows(rows: Sequence[Explained]) -> None:
    key_width = max((len(row.key) for row in rows), default=0)
    value_width = max((len(row.value) for row in rows), default=0)
    for row in rows:
        print(f"{row.key:<{key_width}}  {row.value or '-':<{min(value_width, 40)}}  {row.source}")
