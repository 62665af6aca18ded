"""`torchserve top`, `logs` and `completion`: the commands to watch a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from click.shell_completion import get_completion_class

from ts.protocol.text import printable, printable_lines
from ts_frontend.cli import text
from ts_frontend.cli.client import CallFailed, NoKeys, find_keys
from ts_frontend.cli.commands import INTERRUPTED_STATUS, coloured, commands
from ts_frontend.cli.watching import ManagementUrl, new_lines
from ts_frontend.config.kinds import nearest

#: The variable by which a shell's completion asks for words (`ts_frontend.cli.main` reads it without importing this
#: module).
COMPLETE_VARIABLE = "_TORCHSERVE_COMPLETE"
#: The pause between two reads of workers' lines, and before a broken stream of events is requested again.
POLL_S, AGAIN_S = 1.0, 1.0
#: The width of `top` without a terminal.
PIPE_COLUMNS = 160
#: The sort keys of `top`.
SORTS = ("name", "rate", "p95", "queue")

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option(
        *("--url", "url"),
        envvar="TORCHSERVE_MANAGEMENT_URL",
        default="http://127.0.0.1:8081",
        show_default=True,
        show_envvar=True,
        help="The server's management address.",
    ),
    click.option("--ca-file", envvar="TORCHSERVE_CA_FILE", type=_FILE, help="PEM file of the authority, for https."),
    click.option("--token", envvar="TORCHSERVE_TOKEN", show_envvar=True, help="The management key."),
    click.option(
        *("--key-file", "key_file"),
        envvar="TORCHSERVE_KEY_FILE",
        type=click.Path(exists=True, path_type=Path),
        help="The server's keys.  [default: key_file.json here, for a server on this machine]",
    ),
)


def watching(body: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the console's options; its body gets a ManagementUrl. Failures become text and an exit status."""

    def run(url: str, ca_file: Path | None, token: str | None, key_file: Path | None, **kwargs: Any) -> None:
        try:
            keys = find_keys(token, key_file, urlsplit(url).hostname or "")
        except (NoKeys, ValueError) as error:
            raise click.UsageError(str(error)) from None
        try:
            body(ManagementUrl(url.rstrip("/"), keys, ca_file), **kwargs)
        except CallFailed as error:
            click.echo(printable_lines(f"Error: {error.message}"), err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED_STATUS)

    wrapped: Callable[..., None] = update_wrapper(run, body)
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


# --- top


@commands.command()
@click.option("--once", is_flag=True, help="Print one table and end, as always when the output isn't a terminal.")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True)
@click.option("--filter", "only", metavar="TEXT", default="", help="Only models, or clients, with TEXT in the name.")
@click.option("--clients", is_flag=True, help="Show clients and their worker time in place of models (limits_file).")
@watching
def top(server: ManagementUrl, once: bool, sort: str, only: str, clients: bool) -> None:
    """Show models, workers, rates and latencies, live. Ctrl-C ends it."""
    from rich.console import Console  # imported here: commands that draw nothing don't need it
    from rich.live import Live

    from ts_frontend.cli.top import Board

    live = not once and sys.stdout.isatty()
    console = Console(no_color=not coloured(), width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    board = Board()
    if not live:
        for name, value in server.events():
            board.take(name, value)
            if board.complete:
                break
        console.print(board.clients_shown(only) if clients else board.shown(sort, only, columns=console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        for name, value in _going_on(server):
            board.take(name, value)
            if board.complete:
                rows_max = board.models_max(console.width, console.height)
                shown = (
                    board.clients_shown(only, rows_max) if clients else board.shown(sort, only, rows_max, console.width)
                )
                screen.update(shown, refresh=True)


def _going_on(server: ManagementUrl) -> Iterator[tuple[str, Any]]:
    """The events, over as many connections as needed: the server ends a stream now and then. Raises CallFailed."""
    while True:
        yield from server.events()
        time.sleep(AGAIN_S)


# --- logs


class WorkerLines:
    """The last lines of a server's workers, and the ones that were already shown."""

    def __init__(self, server: ManagementUrl, name: str | None) -> None:
        self._server, self._name = server, name
        self._shown: dict[tuple[str, str, str, int], Sequence[str]] = {}
        self._told: set[tuple[str, float]] = set()

    def models(self) -> Sequence[Mapping[str, Any]]:
        """The models to show; raises CallFailed for a name that doesn't exist."""
        state: Any = next((value for name, value in self._server.events() if name == "state"), {"models": []})
        found = [model for model in state["models"] if self._name in (None, model["name"])]
        if not found and self._name is not None:
            names = sorted({model["name"] for model in state["models"]}, key=text.natural)
            there = f"{nearest(self._name, names) or '.'} The server has {', '.join(names) or 'no models'}"
            raise CallFailed("NOT_FOUND", f"Model not found: {self._name}{there}")
        return found

    def news(self) -> Iterator[str]:
        """Yields the lines that haven't been shown yet, grouped by worker: `MODEL VERSION WORKER | LINE`."""
        for model in self.models():
            where = f"{model['name']} {model['version']}"
            failure = model.get("lastFailure")
            if failure is not None and (model["key"], failure["at"]) not in self._told:
                self._told.add((model["key"], failure["at"]))
                before = next(
                    (lines for key, lines in self._shown.items() if key[:3] == (*_key(model), failure["workerId"])), ()
                )
                head = f"{where} {failure['workerId']} | "
                yield from (head + line for line in new_lines(before, failure["lastLines"]))
                yield f"{head}-- the worker ended: {' '.join(failure['reason'].split())}"
            for worker in model["workers"]:
                if "pid" in worker:
                    key = (*_key(model), worker["id"], worker["pid"])
                    now = self._server.worker_lines(model["name"], model["version"], worker["id"])
                    fresh = new_lines(self._shown.get(key, ()), now)
                    self._shown[key] = now
                    yield from (f"{where} {worker['id']} | {line}" for line in fresh)


def _key(model: Mapping[str, Any]) -> tuple[str, str]:
    return model["name"], model["version"]


@commands.command()
@click.argument("model", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@watching
def logs(server: ManagementUrl, model: str | None, follow: bool) -> None:
    """Print the last output of workers, of MODEL or of all.

    Up to a hundred lines of each worker, and why the last one ended. The server's log files have all of it.
    """
    lines = WorkerLines(server, model)
    while True:
        for line in lines.news():
            line = printable(line)
            head, bar, rest = line.partition(" | ")
            click.echo(f"{click.style(head, fg='cyan')}{bar}{rest}" if coloured() else line)
        if not follow:
            return
        sys.stdout.flush()
        time.sleep(POLL_S)


# --- completion


@commands.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands.

    bash, in ~/.bashrc: eval "$(torchserve completion bash)"; zsh, in ~/.zshrc: eval "$(torchserve completion zsh)";
    fish: torchserve completion fish > ~/.config/fish/completions/torchserve.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(commands, {}, "torchserve", COMPLETE_VARIABLE).source())


def complete(instruction: str, own: Mapping[str, str], flags: Sequence[tuple[str, str]]) -> int:
    """Answers a shell's completion request, `instruction`. `own`: the commands that aren't clients, with their
    help; `flags`: those of `torchserve --start`, with theirs."""
    everything = click.Group("torchserve", commands=dict(commands.commands))
    start: list[click.Parameter] = [click.Option([flag], help=said) for flag, said in flags]
    everything.params += start
    for name, said in own.items():
        everything.add_command(click.Command(name, short_help=said, params=start))
    shell, _, what = instruction.partition("_")
    found = get_completion_class(shell)
    if found is None or what != "complete":
        return 1
    click.echo(found(everything, {}, "torchserve", COMPLETE_VARIABLE).complete())
    return 0
