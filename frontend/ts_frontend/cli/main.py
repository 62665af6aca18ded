"""The `torchserve` command: TorchServe's flags start and stop a server; a first word names a subcommand."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ts.protocol.text import printable, printable_lines
from ts.version import __version__, is_compiled
from ts_frontend.authorization.authorization import NAME as KEY_FILE
from ts_frontend.cli import launch
from ts_frontend.cli.flags import SettingsParser, add_actions, add_setting_groups, settings
from ts_frontend.config.checks import who_may
from ts_frontend.config.display import Explained, explain, settings_table
from ts_frontend.config.kinds import ConfigError, nearest
from ts_frontend.config.load import Option, of_terminal, temp_dir_warnings, told_platform
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.process import STARTED, AlreadyRunning, claimed, pid_path, prepare, remove_orphan, running_server

#: The variable by which a shell's completion asks for words.
COMPLETE_VARIABLE = "_TORCHSERVE_COMPLETE"
#: The version of TorchServe with the same commands, APIs and archives.
COMPATIBLE_VERSION = "0.12.0"

_OWN_COMMANDS = {
    "start": "the same as torchserve --start",
    "stop": "the same as torchserve --stop",
    "restart": "the same as torchserve --restart",
    "serve": "serve on a hosting platform, in the foreground",
    "dev": "serve a model under development, reload each save",
    "config": "show every setting with its value and source",
    "doctor": "check Python, torch, ports and limits before a start",
    "migrate": "list the parts of a TorchServe deployment that change",
    "check": "try a model's files, settings, handler and requests",
}


def _run_server(config: ServerConfig, ready_fd: int | None, check: Callable[[], object] | None = None) -> int:
    return int(import_module("ts_frontend.process").main(config, ready_fd, check))


@dataclass(frozen=True, slots=True)
class Program:
    """The program behind a command line: the command that starts a server process, and the function it runs there, as
    `ts_frontend.process.main`."""

    command: Sequence[str] = launch.COMMAND
    run: Callable[..., int] = _run_server


def main(argv: Sequence[str] | None = None, program: Program = Program()) -> int:
    """Runs a command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None and (asked := of_terminal(COMPLETE_VARIABLE)):
            return _complete(asked)
        if words and not words[0].startswith("-"):
            return _subcommand(words, program)
        return _launcher(_parser().parse_args(words), words, program)
    except ServeError as error:
        print(printable_lines(error.message), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        return 128 + signal.SIGPIPE
    finally:
        _flush()


def _complete(instruction: str) -> int:
    actions = _parser()._actions
    flags = [(word, action.help or "") for action in actions for word in action.option_strings if word[:2] == "--"]
    shown = [(word, "" if said == argparse.SUPPRESS else said) for word, said in flags]
    return int(import_module("ts_frontend.cli.operating").complete(instruction, _OWN_COMMANDS, shown))


def _flush() -> None:
    """Flush the output; a closed pipe isn't an error."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- the command line


class _Parser(SettingsParser):
    def format_help(self) -> str:
        self.epilog = _EPILOG
        usage, _, rest = super().format_help().partition("\n\n")
        said, _, options = rest.partition("\n\n")
        return f"{usage}\n\n{said}\n\n{_commands_help()}\n\n{options}"


class _ShortHelp(argparse.Action):
    """`-h`: the commands and the usual flags. `--help` has all."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{parser.format_usage()}\n{parser.description}\n\n{_commands_help()}\n\n{_SHORT}", end="")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchserve",
        usage="torchserve [--start | --stop | --restart | --version] [OPTION …]\n       torchserve COMMAND …",
        description="Serve PyTorch models over gRPC and HTTP. Without --stop,\n"
        "--restart or --version, this starts a server.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", nargs=0, action=_ShortHelp, help="show the commands and the usual options")
    parser.add_argument("--help", action="help", help="show all options")
    add_actions(parser)
    add_setting_groups(parser, "what is served")
    return parser


_EPILOG = (
    "example:\n  torchserve --start --model-store model_store --models digits=digits.mar\n\n"
    "Settings come from the command line, the environment, the config file, the\n"
    "profile, the last snapshot and the defaults; an earlier one of these wins.\n"
    "`torchserve config` shows each value and its source."
)
_SHORT = (
    "usual options (torchserve --help: all of them):\n"
    "  --model-store DIR       the directory of the archives\n"
    "  --models M …            models to load: NAME=ARCHIVE, ARCHIVE, or all\n"
    "  --ts-config FILE        settings; --set KEY=VALUE: one of them\n"
    "  --foreground            serve in this process, not in the background\n\n"
    "example:\n  torchserve --start --model-store model_store --models digits=digits.mar\n"
)


def _commands_help() -> str:
    commands = dict(_OWN_COMMANDS)
    with contextlib.suppress(ImportError):
        commands |= {name: _summary(one.get_short_help_str(100)) for name, one in _client().commands.items()}
    rows = "\n".join(f"  torchserve {name:<12} {text}" for name, text in commands.items())
    return f"commands (torchserve COMMAND -h):\n{rows}"


def _summary(sentence: str) -> str:
    """A client command's help in the style of the other commands' lines: "List the models." as "list the models"."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


# --- actions of the command line


def _launcher(arguments: argparse.Namespace, words: Sequence[str], program: Program) -> int:
    if arguments.version:
        print(f"TorchServe Version is {COMPATIBLE_VERSION}", flush=True)
        form = "compiled" if is_compiled() else "pure Python"
        print(f"torchrelay {__version__} ({form}), with TorchServe's interfaces of that version", file=sys.stderr)
        return 0
    if arguments.stop:
        work_dir = _work_dir(arguments)
        if work_dir is None:  # the pid file is in the temporary directory
            launch.warn(temp_dir_warnings())
        print(launch.stop(120 if arguments.timeout is None else arguments.timeout, work_dir))
        return 0
    if arguments.restart:
        started = launch.restart(arguments.timeout, _work_dir(arguments))
        print("\n".join(("TorchServe has restarted.", *launch.listening_lines(started.listening))), flush=True)
        launch.warn(started.warnings)
        return 0
    if arguments.ready_fd is None and (told := launch.rivals_told(launch.rivals())):
        print(told, file=sys.stderr, flush=True)
    if not arguments.foreground and os.getpid() == 1:
        print("This process is PID 1 of its container: serving in the foreground.", file=sys.stderr)
        arguments.foreground = True
    if not arguments.foreground and settings(arguments).bypass_serve:
        print("bypass_serve is on: serving in the foreground.", file=sys.stderr)
        arguments.foreground = True
    if arguments.foreground:
        return _foreground(arguments, program)
    return _background(arguments, words, program)


def _work_dir(arguments: argparse.Namespace) -> Path | None:
    """The directory of the pid file of the server to stop; invalid settings don't prevent stopping."""
    try:
        return settings(arguments).work_dir
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
        return launch.serve(config, partial(program.run, check=partial(_startable, arguments)), ready_fd)


def _background(arguments: argparse.Namespace, words: Sequence[str], program: Program) -> int:
    config = _startable(arguments)
    if running_server(pid_path(config.work_dir)):
        raise AlreadyRunning(pid_path(config.work_dir))
    if remove_orphan(pid_path(config.work_dir)):
        print("Removing orphan pid file.", flush=True)
    more = ["--foreground"]
    if "console_log" not in config.sources and (where := _passing()):
        more += ["--set", "console_log=false"]
        config = settings(arguments, Option("console_log", "false", where))
    if not config.console_log or sys.stderr.isatty():  # else the log has them here
        launch.warn(note.text for note in config.notes if note.level >= logging.WARNING)
    started = launch.start(config, [*words, *more], arguments.timeout, program.command)
    if not config.console_log:  # else the server has printed it there itself
        print(STARTED)
    print("\n".join(launch.listening_lines(started.listening)))
    print("\n".join(f"  {sentence}" for sentence in who_may(config)))
    key_file = config.key_dir / KEY_FILE
    if config.token_authorization and key_file.is_file():
        print(f"  The server's keys are in {key_file.absolute()}")
    print(f"  logs in {config.log_location.absolute()}; stop it with: {_stop_command(config)}", flush=True)
    launch.warn(started.warnings)  # last: a model that isn't there must not be overlooked
    return 0


def _passing() -> str:
    """The kind of standard output, "a terminal" or "a pipe", if the log shouldn't be written there after the command's
    end (a pipe's reader would wait for the server's end); "" for a file."""
    if sys.stdout.isatty():
        return "terminal"
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a file
        return ""
    return "pipe" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else ""


#: The variables by which Python chooses the directory of temporary files.
_TEMP = ("TMPDIR", "TEMP", "TMP")


def _stop_command(config: ServerConfig) -> str:
    """The command that stops this server and no other: its pid file is in its directory, else where TMPDIR says."""
    if config.work_dir is not None:
        return f"torchserve --stop --work-dir {shlex.quote(str(config.work_dir))}"
    place = next((f"{name}={shlex.quote(text)} " for name in _TEMP if (text := config.environment.get(name))), "")
    return f"{place}torchserve --stop"


def _startable(arguments: argparse.Namespace) -> ServerConfig:
    config = settings(arguments)
    prepare(config)
    if arguments.cpp_log_config and not Path(arguments.cpp_log_config).is_file():
        raise ConfigError(f"--cpp-log-config file not found: {Path(arguments.cpp_log_config).absolute()}")
    return config


def _subcommand(words: Sequence[str], program: Program) -> int:
    name, rest = words[0].replace("_", "-"), list(words[1:])
    if name == "config":
        return _show_config(rest)
    if name == "dev":
        return int(import_module("ts_frontend.cli.dev").main(rest, program.run))
    if name in ("check", "doctor", "migrate"):
        look: Callable[[Sequence[str]], int] = getattr(import_module("ts_frontend.cli.diagnose"), name)
        return look(rest)
    if name == "serve":  # the argument of SageMaker's containers
        assumed = [] if told_platform() else ["--platform", "sagemaker"]
        rest = ["--foreground", *assumed, *rest]  # a platform that is named later counts
        return _launcher(_parser().parse_args(rest), rest, program)
    if name in ("start", "stop", "restart"):
        rest.append(f"--{name}")
        return _launcher(_parser().parse_args(rest), rest, program)
    group = _client()
    if name not in group.commands:
        known = [*_OWN_COMMANDS, *group.commands]
        there = f"there are {', '.join(known)}. Flags: torchserve --help"
        print(f"torchserve: there is no command {name}{nearest(name, known)}; {there}", file=sys.stderr)
        return 2
    return int(group.main(args=[name, *rest], prog_name="torchserve", standalone_mode=True) or 0)


def _client() -> Any:
    """The commands for a running server; imported only when needed, with the gRPC client."""
    import_module("ts_frontend.cli.tune")  # adds its command to the others
    return import_module("ts_frontend.cli.operating").commands


def _show_config(words: Sequence[str]) -> int:
    parser = SettingsParser(
        prog="torchserve config",
        allow_abbrev=False,
        description="Show every setting as a server started with these flags would have it, and where each value comes "
        "from. Nothing is started.",
    )
    parser.add_argument("--json", action="store_true", help="JSON output, with the documentation of each setting")
    parser.add_argument("--changed", action="store_true", help="only settings that differ from their defaults")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/configuration.md")
    parser.add_argument("--start", "--foreground", action="store_true", help=argparse.SUPPRESS)
    add_setting_groups(parser, "flags of torchserve --start, applied to the values shown")
    arguments = parser.parse_args(words)
    if arguments.markdown:
        print(settings_table())
        return 0
    config = settings(arguments)
    rows = [row for row in explain(config) if not arguments.changed or row.source != "default"]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    _print_rows(rows)
    for note in config.notes:
        print(printable_lines(f"note: {note.text}"), file=sys.stderr)
    return 0


def _print_rows(rows: Sequence[Explained]) -> None:
    key_width = max((len(row.key) for row in rows), default=0)
    value_width = max((len(row.value) for row in rows), default=0)
    for row in rows:
        print(printable(f"{row.key:<{key_width}}  {row.value or '-':<{min(value_width, 40)}}  {row.source}"))
