"""`torchserve dev PATH`: serves a model under development, in the terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ts_frontend.cli import launch
from ts_frontend.cli.flags import SettingsParser, add_setting_groups, options, settings
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.load import Option
from ts_frontend.config.table import ServerConfig
from ts_frontend.process import claimed, pid_path, prepare

SOURCE = "torchserve dev"
DEBUGPY_MISSING = "--debugpy needs the package debugpy: {python} -m pip install debugpy"
#: Settings of a server for one author, unless the command line has others.
SETTINGS = {
    "ncs": "true",
    "default_workers_per_model": "1",
    "drain_grace_s": "0",
    "drain_timeout_s": "1",
    "system_metrics_cmd": "",
    "disable_system_metrics": "true",
}


def main(words: Sequence[str], run: Callable[[ServerConfig, int | None], int]) -> int:
    """Serves until Ctrl-C; returns the exit code. Raises ServeError."""
    arguments = _parser().parse_args(words)
    if arguments.debugpy and importlib.util.find_spec("debugpy") is None:
        raise ConfigError(DEBUGPY_MISSING.format(python=shlex.quote(sys.executable)))
    path = Path(arguments.path).absolute()
    if not path.exists():
        raise ConfigError(f"{arguments.path}: there is no such file or folder")
    with tempfile.TemporaryDirectory(prefix="torchserve-dev-", ignore_cleanup_errors=True) as directory:
        pairs = {**SETTINGS, "dev_model": str(path), "work_dir": directory, "debugpy_port": str(arguments.debugpy)}
        given = {option.key for option in options(arguments)}
        own = [Option(key, value, SOURCE) for key, value in pairs.items() if value and key not in given]
        config = settings(arguments, *own)
        if not config.loopback_only:
            places = ", ".join(config.outside_addresses())
            raise ConfigError(f"torchserve dev shows errors to every caller, and serves only this machine: {places}")
        prepare(config)
        with claimed(pid_path(config.work_dir)), _terminal_kept():
            return launch.serve(config, run, None)


def _parser() -> SettingsParser:
    parser = SettingsParser(
        prog="torchserve dev",
        allow_abbrev=False,
        description="Serve a handler's file, a model's folder or an archive in place, on this machine, with "
        "all protocols. Saved files are served at once, with the weights that are loaded where they fit the new code. "
        "Tracebacks, and a line per request with its time, are printed; breakpoint() stops in this terminal.",
    )
    parser.add_argument("path", metavar="PATH", help="handler file, model folder or archive")
    parser.add_argument(
        "--debugpy",
        type=int,
        default=0,
        metavar="PORT",
        help="port of 127.0.0.1 for a debugger (VS Code) to connect to",
    )
    add_setting_groups(parser, "the flags of torchserve --start")
    return parser


@contextlib.contextmanager
def _terminal_kept() -> Iterator[None]:
    """Restores the terminal's settings, which a worker killed at a breakpoint leaves changed."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
