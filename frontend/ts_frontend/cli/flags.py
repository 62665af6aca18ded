"""The flags of `torchserve` that are settings: their syntax and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ts_frontend.config.foreign.aliases import ALIASES, Alias
from ts_frontend.config.kinds import ConfigError, nearest
from ts_frontend.config.load import Option, load_config
from ts_frontend.config.table import NO_EFFECT, SETTINGS, ServerConfig


def spelled(words: Sequence[str], own: Collection[str], flags: Collection[str]) -> tuple[list[str], str]:
    """The words with their options spelled as in `flags`, and the first unknown option, or "". Flags of `own` may be
    abbreviated if that is unambiguous."""
    found: list[str] = []
    for at, word in enumerate(words):
        if word == "--":
            return [*found, *words[at:]], ""
        if not word.startswith("--"):
            found.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = _flag(name.replace("_", "-"), own, flags)
        if flag is None:
            return found, name
        found.append(flag + equals + value)
    return found, ""


def _flag(name: str, own: Collection[str], flags: Collection[str]) -> str | None:
    if name in flags:
        return name
    fitting = [flag for flag in own if flag.startswith(name)]
    return fitting[0] if len(fitting) == 1 else None


def _set_by(flag: str) -> str:
    """The hint for a setting without a flag, or ""."""
    key = flag[2:].replace("-", "_")
    return (
        f"; {key} is a setting without a flag: --set {key}=VALUE, or a line in config.properties"
        if key in SETTINGS
        else ""
    )


#: The flags with other names than their settings'.
_OTHER_NAMES = {"load_models": "--models", "disable_token_authorization": "--disable-token-auth"}
#: argparse's arguments for a setting that is true or false, and for one that its flag turns on.
_SWITCH: dict[str, Any] = {"nargs": "?", "const": "true", "metavar": "BOOL"}
_ON: dict[str, Any] = {"action": "store_const", "const": "true"}


class SettingsParser(argparse.ArgumentParser):
    """Parses flags as TorchServe does: `-` or `_`, and abbreviated."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses with `-` and `_` alike, and abbreviations of the server's flags."""
        flags = set(self._option_string_actions)
        own = [flag for flag in flags if flag.startswith("--") and flag[2:].replace("-", "_") not in ALIASES]
        words, unknown = spelled(list(sys.argv[1:] if args is None else args), own, flags)
        if unknown:
            self.error(f"unrecognized arguments: {unknown}{_set_by(unknown) or nearest(unknown, flags)}")
        return super().parse_args(words, namespace)


def add_actions(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument("--start", action="store_true", help="start a server in the background (the default)")
    action.add_argument("--stop", action="store_true", help="let the running server finish its requests, and end it")
    action.add_argument(
        "--restart",
        action="store_true",
        help="replace the running server by one that reads its settings anew; new connections wait for it",
    )
    parser.add_argument(
        "--foreground", action="store_true", help="with --start: serve in this process, not the background"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds to wait: with --start and --restart until it is ready (no limit), with --stop until it has ended "
        "(120)",
    )
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def add_setting_groups(parser: argparse.ArgumentParser, title: str) -> None:
    served = parser.add_argument_group(title)
    _add_models(served)
    _add_manner(served)
    _add_places(parser.add_argument_group("where and how"))
    group = parser.add_argument_group("accepted for compatibility with TorchServe")
    group.add_argument(
        "--workflow-store", metavar="DIR", help="directory of workflow archives (default: the model store)"
    )
    group.add_argument("--plugins-path", "--ppath", metavar="DIR", help="Java plugins: no effect")
    group.add_argument("--cpp-log-config", metavar="FILE", help="logging of C++ workers: no effect")
    _add_aliases(parser)


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-store", metavar="DIR", help="directory of the archives; required")
    group.add_argument(
        "--models",
        action="extend",
        nargs="+",
        dest="load_models",
        metavar="MODEL",
        help="models to load: NAME=ARCHIVE, ARCHIVE, or all; ARCHIVE is a file of the store or an allowed URL",
    )
    group.add_argument(
        "--model-repository",
        action="append",
        metavar="DIR",
        help="directory of models in Triton's layout, with or without a model store; can be repeated",
    )
    group.add_argument(
        "--model-control-mode",
        choices=("none", "poll", "explicit"),
        help="model repository: load all at start (none), also when files change (poll), or on demand (explicit)",
    )
    group.add_argument(
        "--load-model", action="append", metavar="NAME", help="load at start in explicit mode; *: all; can be repeated"
    )
    group.add_argument(
        "--program",
        action="append",
        metavar="'FILE [ARGUMENT …]'",
        help="a program that starts aiSSEMBLE's or KServe's server: serve its models too; can be repeated",
    )
    group.add_argument("--repository-poll-secs", metavar="S", help="seconds between two checks of the files (poll)")


def _add_manner(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ts-config", metavar="FILE", help="file with settings: config.properties")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting, named as in config.properties; can be repeated",
    )
    group.add_argument(
        "--ncs",
        "--no-config-snapshots",
        **_ON,
        help="do not restore the models of the last run, and do not remember those of this one",
    )
    group.add_argument(
        "--log-config", metavar="FILE", help="logging: YAML or JSON (dictConfig), or log4j2 XML (levels)"
    )
    group.add_argument(
        "--disable-token-auth",
        "--dt",
        **_ON,
        dest="disable_token_authorization",
        help="no tokens, also when other machines can reach the server",
    )
    group.add_argument(
        "--enable-model-api",
        "--model-api-enabled",
        **_ON,
        help="allow register and unregister while it runs, also when other machines can reach it",
    )


def _add_places(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile", metavar="NAME", help="ports of triton, mlserver, kserve, dynamo, max or torchserve")
    group.add_argument(
        "--platform",
        metavar="NAME",
        help="sagemaker, vertex, azureml, mlflow or none (default: auto, by the environment)",
    )
    group.add_argument("--ray-address", metavar="ADDRESS", help="workers run on a Ray cluster: auto, or HOST:PORT")
    group.add_argument("--host", metavar="ADDRESS", help="where inference and metrics listen; 0.0.0.0: everywhere")
    group.add_argument("--http-port", metavar="PORT", help="port of HTTP inference")
    group.add_argument("--metrics-port", metavar="PORT", help="port of the metrics API")
    group.add_argument("--use-tls", **_SWITCH, help="TLS on every port; needs --cert-file, --key-file")
    group.add_argument("--kserve-mode", **_SWITCH, help="profile kserve: a container behind KServe")
    group.add_argument("--enable-grpc", **_SWITCH, help="false: no gRPC")
    group.add_argument("--enable-docs-url", **_SWITCH, help="a page about the HTTP APIs at /docs")
    group.add_argument("--access-log-format", metavar="FORMAT", help="access log lines, in asgi-logger's notation")
    group.add_argument("--limits-file", metavar="FILE", help="limits of clients, and their shares: limits.yaml")
    group.add_argument("--rate-limit", metavar="MODE", help="execution_count: heed the rate_limiter of config.pbtxt")
    group.add_argument("--model-dir", metavar="DIR", help="folder of the only model, as KServe mounts it")
    for switch, text in (
        ("--strict-readiness", "false: stay ready while a model has lost its workers"),
        ("--exit-on-error", "start only when all models can be loaded"),
    ):
        group.add_argument(switch, **_SWITCH, help=text)
    group.add_argument("--trace-level", metavar="LEVEL", help="OFF or TIMESTAMPS, where traces are sent")
    group.add_argument("--trace-rate", metavar="N", help="trace one request in N")
    group.add_argument("--trace-count", metavar="N", help="stop after N traces; -1: no limit")
    group.add_argument("--work-dir", metavar="DIR", help="the only directory to write to, for read-only containers")
    group.add_argument(
        "--bypass-serve",
        **_SWITCH,
        help="run handlers in the server's own process, in the foreground: for breakpoints, never in production",
    )


def _add_aliases(parser: argparse.ArgumentParser) -> None:
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
    """argparse's arguments for an option that may be repeated or have no value."""
    if alias.repeated:
        return {"action": "append"}
    return {"nargs": "?", "const": "true"} if alias.switch else {}


def options(arguments: argparse.Namespace) -> list[Option]:
    found = []
    for key in (*SETTINGS, *NO_EFFECT):
        value = getattr(arguments, key, None)
        if value is not None:
            flag = _OTHER_NAMES.get(key, f"--{key.replace('_', '-')}")
            separator = ";" if key == "program" else ","
            found.append(Option(key, separator.join(value) if isinstance(value, list) else value, flag))
    for name, alias in ALIASES.items():
        value = getattr(arguments, f"alias_{name}")
        if value is not None:
            found.append(Option(name, ";".join(value) if isinstance(value, list) else value, alias.flag))
    for pair in arguments.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: write KEY=VALUE")
        found.append(Option(key.strip(), value, f"--set {key.strip()}"))
    return found


def settings(arguments: argparse.Namespace, *more: Option) -> ServerConfig:
    """The settings with these flags, and `more` that the command adds. Raises ConfigError."""
    ts_config = Path(arguments.ts_config) if arguments.ts_config else None
    return load_config([*options(arguments), *more], ts_config)
