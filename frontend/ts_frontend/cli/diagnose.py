"""`torchserve check` and `torchserve doctor`: a look at models, or at machine and settings, without serving."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ts_frontend.cli.flags import SettingsParser, add_setting_groups, settings
from ts_frontend.config.kinds import ConfigError

if TYPE_CHECKING:
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
