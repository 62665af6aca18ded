"""Tests a running server of any kind against the dialects of model servers: `python tests/conform.py URL`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from conformance import asking, dialects
from ts_frontend.cli.client import NoKeys, find_keys
from ts_frontend.cli.diagnose import NOT_UNDERSTOOD_STATUS, show
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import nearest

#: The ports of the other APIs by the inference API's: those of TorchServe and this server, then Triton's.
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
    """The addresses of a server's APIs, by place. Those that aren't given follow from the URL's port, if it is a usual
    one; otherwise the REST APIs are expected at the URL itself.

    :raises ValueError: the URL isn't one.
    """
    found = urlsplit(url if "://" in url else f"http://{url}")
    if found.scheme not in ("http", "https") or not found.hostname:
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8080")
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
        prog="tests/conform.py",
        allow_abbrev=False,
        description="Test a running server of any kind against each dialect, and report which ones it "
        "supports, supports in part, or doesn't have. Exit status: 0 if none is partial, 1 if one is, 2 if "
        "no server answers.",
    )
    parser.add_argument("url", metavar="URL", help="the HTTP inference API, such as http://127.0.0.1:8080")
    parser.add_argument("--management", metavar="URL", help="TorchServe's management API  [default: by URL's port]")
    parser.add_argument("--metrics", metavar="URL", help="the metrics API  [default: by URL's port]")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="gRPC  [default: by URL's port]")
    parser.add_argument("--grpc-management", metavar="HOST:PORT", help="TorchServe's management service")
    parser.add_argument("--model", metavar="NAME", help="a served model, for the tests with a model")
    parser.add_argument(
        "--input",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="a request for it: its body, or JSON with `inputs` (tensors) or `instances`, or a text; can be repeated",
    )
    parser.add_argument("--change", action="store_true", help="also register and scale, with the present values")
    parser.add_argument(
        "--dialect", action="append", default=[], metavar="NAME", help="only this dialect, which must be supported"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds for one answer  [default: 30]"
    )
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM file of the authority, for TLS")
    parser.add_argument("--token", metavar="KEY", help="the key, where the server asks for one")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="the server's keys  [default: key_file.json here]"
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 also if something couldn't be tested")
    parser.add_argument("--quiet", action="store_true", help="only what differs")
    parser.add_argument("--json", action="store_true", help="JSON output, for programs")
    return parser


def main(words: Sequence[str]) -> int:
    """Tests the server that the words name; returns the exit status."""
    arguments = _conform_parser().parse_args(words)
    known = [dialect.name for dialect in dialects.dialects()]
    for name in arguments.dialect:
        if name not in known:
            return _not_asked(f"there is no dialect {name}{nearest(name, known)}; there are {', '.join(known)}")
    try:
        where = addresses(arguments.url, {place: getattr(arguments, place, None) for place in dialects.PLACES})
        keys = find_keys(arguments.token, arguments.key_file, urlsplit(where["inference"]).hostname or "")
        variables = dialects.variables_of(arguments.model, arguments.input)
    except (ValueError, NoKeys) as error:
        return _not_asked(str(error))
    except OSError as error:
        return _not_asked(f"--input {error.filename}: {error.strerror}")
    tokens = {place: value.removeprefix("Bearer ") for place in where for _, value in keys.metadata(_KEY_KINDS[place])}
    places = asking.Places(where, tokens, arguments.ca_file, arguments.timeout)
    try:
        report = dialects.conform(places, variables, change=arguments.change, demanded=arguments.dialect)
    except asking.Unreachable as error:
        return _not_asked(f"no server answers at {error}")
    return show(report, arguments)


def _not_asked(message: str) -> int:
    print(f"tests/conform.py: {message}", file=sys.stderr)
    return NOT_UNDERSTOOD_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
