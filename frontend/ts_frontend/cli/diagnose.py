"""`torchserve check`, `torchserve doctor` and `torchserve migrate`: checks of models, of the machine and the
settings, or of a TorchServe deployment, without serving."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ts.protocol.text import printable_json, printable_lines
from ts_frontend.cli.flags import SettingsParser, add_actions, add_setting_groups, options, settings
from ts_frontend.config.kinds import ConfigError

if TYPE_CHECKING:
    from ts_frontend.diagnosis.migrate import Flags
    from ts_frontend.diagnosis.report import Report

NOT_UNDERSTOOD_STATUS = 2


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = SettingsParser(prog=f"torchserve {name}", allow_abbrev=False, description=description)
    parser.add_argument("--json", action="store_true", help="JSON output, for programs")
    parser.add_argument("--strict", action="store_true", help="exit status 1 for warnings too")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors")
    return parser


def show(report: Report, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(printable_json(report.as_json()))
    else:
        print(printable_lines(report.text(quiet=arguments.quiet)))
    return report.status(strict=arguments.strict)


def check(words: Sequence[str]) -> int:
    """Runs `torchserve check`; returns the exit status. Raises ServeError."""
    parser = _parser(
        "check",
        "Try models as a server with these settings would: read their files, load each with one worker, send it "
        "requests. Exit status: 0 without errors, 1 with some, 2 if it can't be tried.",
    )
    parser.add_argument(
        "path",
        help="an archive, a model's folder or file, a handler's file, a directory of them, or a name of Hugging Face's "
        "hub (hf://ORG/NAME)",
    )
    parser.add_argument(
        "--input", action="append", type=Path, default=[], metavar="FILE", help="a request to send; can be repeated"
    )
    parser.add_argument("--no-load", action="store_true", help="only read the files: no handler runs")
    add_setting_groups(parser, "flags of torchserve --start, applied to the trial")
    arguments = parser.parse_args(words)
    path = Path(arguments.path)
    url = arguments.path if arguments.path.startswith("hf://") else ""
    if not url and not path.exists():
        print(f"torchserve check: {arguments.path} does not exist", file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    from ts_frontend.diagnosis import check as trial  # imports the whole server

    try:
        config = settings(arguments)
        samples = [trial.SampleRequest.of_file(path) for path in arguments.input]
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    except OSError as error:
        print(f"torchserve check: --input {error.filename}: {error.strerror}", file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    report = trial.check(path, config, samples, load=not arguments.no_load, tell=_tell, url=url)
    return show(report, arguments)


def _tell(text: str) -> None:
    print(printable_lines(f"torchserve check: {text}"), file=sys.stderr, flush=True)


def doctor(words: Sequence[str]) -> int:
    parser = _parser(
        "doctor",
        "Check what a server with these settings would run on: Python and its packages, torch, devices, ports, "
        "directories, limits. Exit status: 0 without errors, 1 with some.",
    )
    add_setting_groups(parser, "flags of torchserve --start, whose effect is checked")
    arguments = parser.parse_args(words)
    from ts_frontend.diagnosis.doctor import examine  # imports the whole server

    try:
        report = examine(settings(arguments))
    except ConfigError as error:
        report = examine(None, error.message)
    return show(report, arguments)


def migrate(words: Sequence[str]) -> int:
    """Runs `torchserve migrate`; returns the exit status. Raises ServeError."""
    parser = _parser(
        "migrate",
        "List which parts of a TorchServe deployment stay, which change, and what to do: its config.properties, "
        "archives, metrics.yaml, log4j2.xml, key_file.json, snapshots, Dockerfile and scripts. Nothing is run or "
        "changed. Exit status: 0 without errors, 1 with some, 2 if the directory can't be read.",
    )
    parser.add_argument(
        "--check", action="store_true", required=True, help="report only; required, as no other mode exists"
    )
    parser.add_argument("deployment", type=Path, metavar="DEPLOYMENT_DIR", help="the directory with the deployment")
    arguments = parser.parse_args(words)
    if not arguments.deployment.is_dir():
        print(f"torchserve migrate: {arguments.deployment} is not a directory", file=sys.stderr)
        return NOT_UNDERSTOOD_STATUS
    from ts_frontend.diagnosis import migrate as migration  # imports the whole server

    return show(migration.migrate(arguments.deployment, _flags), arguments)


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
