"""`torchserve check`, `doctor`, `migrate` and `conform`: a look at models, at machine and settings, at a TorchServe
deployment, or at a running server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import SplitResult, urlsplit

from ts_frontend.cli.client import NoKeys, find_keys
from ts_frontend.cli.flags import SettingsParser, add_actions, add_setting_groups, options, settings
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import ConfigError, nearest

if TYPE_CHECKING:
    from ts_frontend.diagnosis.migrate import Flags
    from ts_frontend.diagnosis.report import Report

NOT_UNDERSTOOD_STATUS = 2


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = SettingsParser(prog=f"torchserve {name}", allow_abbrev=False, description=description)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--strict", action="store_true", help="exit status 1 also with warnings")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors")
    return parser


def _show(report: Report, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        print(report.text(quiet=arguments.quiet))
    return report.status(strict=arguments.strict)


def check(words: Sequence[str]) -> int:
    """Runs `torchserve check`; returns the exit status. Raises ServeError."""
    parser = _parser(
        "check",
        "Try models as a server with these settings would: read their files, load each with one worker, send it "
        "requests. Exit status: 0 without errors, 1 with some, 2 if it can't be tried.",
    )
    parser.add_argument(
        "path", type=Path, help="an archive, a model's folder, a handler's file, or a directory of such"
    )
    parser.add_argument(
        "--input", action="append", type=Path, default=[], metavar="FILE", help="a request to send; can be repeated"
    )
    parser.add_argument("--no-load", action="store_true", help="only read the files: no handler runs")
    add_setting_groups(parser, "flags of torchserve --start, whose effect is tried")
    arguments = parser.parse_args(words)
    if not arguments.path.exists():
        print(f"torchserve check: {arguments.path} is not there", file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    from ts_frontend.diagnosis import check as trial  # brings the whole server

    try:
        config = settings(arguments)
        samples = [trial.SampleRequest.of_file(path) for path in arguments.input]
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    except OSError as error:
        print(f"torchserve check: --input {error.filename}: {error.strerror}", file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    report = trial.check(arguments.path, config, samples, load=not arguments.no_load)
    return _show(report, arguments)


def doctor(words: Sequence[str]) -> int:
    """Runs `torchserve doctor`; returns the exit status."""
    parser = _parser(
        "doctor",
        "Look at what a server with these settings would run on: Python and its packages, torch, devices, ports, "
        "directories, limits. Exit status: 0 without errors, 1 with some.",
    )
    add_setting_groups(parser, "flags of torchserve --start, whose effect is looked at")
    arguments = parser.parse_args(words)
    from ts_frontend.diagnosis.doctor import examine  # brings the whole server

    try:
        report = examine(settings(arguments))
    except ConfigError as error:
        report = examine(None, error.message)
    return _show(report, arguments)


def migrate(words: Sequence[str]) -> int:
    """Runs `torchserve migrate`; returns the exit status. Raises ServeError."""
    parser = _parser(
        "migrate",
        "List what of a TorchServe deployment stays as it is, what changes, and what to do: its config.properties, "
        "archives, metrics.yaml, log4j2.xml, key_file.json, snapshots, Dockerfile and scripts. Nothing is run or "
        "changed. Exit status: 0 without errors, 1 with some, 2 if the directory can't be read.",
    )
    parser.add_argument(
        "--check", action="store_true", required=True, help="report only; there is nothing that changes the files"
    )
    parser.add_argument("deployment", type=Path, metavar="DEPLOYMENT_DIR", help="the directory with the deployment")
    arguments = parser.parse_args(words)
    if not arguments.deployment.is_dir():
        print(f"torchserve migrate: {arguments.deployment} is no directory", file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    from ts_frontend.diagnosis import migrate as migration  # brings the whole server

    return _show(migration.migrate(arguments.deployment, _flags), arguments)


class _CommandParser(SettingsParser):
    """Reads the flags of another program's `torchserve` command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _flags(words: Sequence[str]) -> Flags:
    from ts_frontend.diagnosis.migrate import Flags

    parser = _CommandParser(prog="torchserve", allow_abbrev=False, add_help=False)
    add_actions(parser)
    add_setting_groups(parser, "")
    try:
        arguments = parser.parse_args([word for word in words if word != "start"])
        return Flags(options(arguments), arguments.ts_config or "")
    except ConfigError as error:
        return Flags(problem=error.message)


#: The ports that go with the one of the inference API: TorchServe's and ours, Triton's.
_OTHER_PORTS = {
    8080: {"management": 8081, "metrics": 8082, "grpc": 7070, "grpc_management": 7071},
    8443: {"management": 8444, "metrics": 8445, "grpc": 7070, "grpc_management": 7071},
    8000: {"grpc": 8001, "metrics": 8002},
}
_KEY_KINDS = {
    "inference": KeyKind.INFERENCE,
    "metrics": KeyKind.MANAGEMENT,
    "grpc": KeyKind.INFERENCE,
    "management": KeyKind.MANAGEMENT,
    "grpc_management": KeyKind.MANAGEMENT,
}


def addresses(url: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Where a server's APIs are, by place. Those that aren't given are where they are beside the port of the URL, if
    that is a usual one; REST APIs that aren't are looked for at the URL itself.

    :raises ValueError: the URL isn't one.
    """
    found = urlsplit(url if "://" in url else f"http://{url}")
    if found.scheme not in ("http", "https") or not found.hostname:
        raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:8080")
    port = found.port or (443 if found.scheme == "https" else 80)
    inference = f"{found.scheme}://{_host(found)}:{port}"
    others = _OTHER_PORTS.get(port, {})
    places = {"inference": inference + found.path.rstrip("/")}
    for place in ("management", "metrics"):
        places[place] = f"{found.scheme}://{_host(found)}:{others[place]}" if place in others else places["inference"]
    places |= {place: f"{_host(found)}:{others[place]}" for place in ("grpc", "grpc_management") if place in others}
    return places | {place: address for place, address in given.items() if address}


def _host(url: SplitResult) -> str:
    return f"[{url.hostname}]" if ":" in (url.hostname or "") else str(url.hostname)


def _conform_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchserve conform",
        allow_abbrev=False,
        description="Ask a running server, of whatever kind, what each dialect promises, and say which ones it "
        "supports, supports in part, or doesn't have. Exit status: 0 if none is there in part, 1 if one is, 2 if "
        "nobody answers.",
    )
    parser.add_argument("url", metavar="URL", help="the HTTP inference API, such as http://127.0.0.1:8080")
    parser.add_argument("--management", metavar="URL", help="TorchServe's management API  [default: beside URL]")
    parser.add_argument("--metrics", metavar="URL", help="the metrics API  [default: beside URL]")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="gRPC  [default: beside URL]")
    parser.add_argument("--grpc-management", metavar="HOST:PORT", help="TorchServe's management service")
    parser.add_argument("--model", metavar="NAME", help="a served model, for the questions about models")
    parser.add_argument(
        "--input",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="a request for it: its body, or JSON with `inputs` (tensors) or `instances`, or a text; can be repeated",
    )
    parser.add_argument("--change", action="store_true", help="also register and scale, with the values that are there")
    parser.add_argument(
        "--dialect", action="append", default=[], metavar="NAME", help="only this one, and it must be there"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds for one answer  [default: 30]"
    )
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM file of the authority, for TLS")
    parser.add_argument("--token", metavar="KEY", help="the key, where the server asks for one")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="the server's keys  [default: key_file.json here]"
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 also if something wasn't asked")
    parser.add_argument("--quiet", action="store_true", help="only what differs")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def conform(words: Sequence[str]) -> int:
    """Runs `torchserve conform`; returns the exit status."""
    arguments = _conform_parser().parse_args(words)
    from ts_frontend.diagnosis import asking, conformance

    known = [dialect.name for dialect in conformance.dialects()]
    for name in arguments.dialect:
        if name not in known:
            return _not_asked(f"there is no dialect {name}{nearest(name, known)}; there are {', '.join(known)}")
    try:
        where = addresses(arguments.url, {place: getattr(arguments, place, None) for place in conformance.PLACES})
        keys = find_keys(arguments.token, arguments.key_file, urlsplit(where["inference"]).hostname or "")
        variables = conformance.variables_of(arguments.model, arguments.input)
    except (ValueError, NoKeys) as error:
        return _not_asked(str(error))
    except OSError as error:
        return _not_asked(f"--input {error.filename}: {error.strerror}")
    tokens = {place: value.removeprefix("Bearer ") for place in where for _, value in keys.metadata(_KEY_KINDS[place])}
    places = asking.Places(where, tokens, arguments.ca_file, arguments.timeout)
    try:
        report = conformance.conform(places, variables, change=arguments.change, demanded=arguments.dialect)
    except asking.Unreachable as error:
        return _not_asked(f"nobody answers at {error}")
    return _show(report, arguments)


def _not_asked(message: str) -> int:
    print(f"torchserve conform: {message}", file=sys.stderr)
    return NOT_UNDERSTOOD_STATUS
