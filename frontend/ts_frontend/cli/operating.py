"""`torchserve top`, `logs` and `completion`: the commands to watch a server, by the data of its console for programs:
its events, its workers' last lines (docs/console.md)."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import click
from click.shell_completion import get_completion_class

from ts.protocol.text import printable, printable_lines
from ts_frontend.cli import text
from ts_frontend.cli.client import CallFailed, ClientKeys, NoKeys, find_keys, server_here
from ts_frontend.cli.commands import INTERRUPTED_STATUS, KEY_OPTIONS, coloured, commands, with_options
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import nearest

EVENTS = "/console/events"
#: The seconds without an event after which the server counts as gone; events come at least every half second.
SILENCE_S_MAX = 30.0
#: The longest line of an event: the state of a thousand models.
LINE_BYTES_MAX = 64 << 20
#: How a TLS server's answer to a request without TLS begins: an alert.
_TLS_ALERT = "\x15\x03"
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


@dataclass(frozen=True, slots=True)
class ManagementUrl:
    """The management address of a server. `ca_file`: PEM file of the authority that signed its certificate."""

    url: str
    keys: ClientKeys = ClientKeys()
    ca_file: Path | None = None

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallFailed("INVALID_ARGUMENT", f"--url {self.url!r} is not an http:// or https:// address")
        try:
            port = parts.port
        except ValueError:
            raise CallFailed("INVALID_ARGUMENT", f"--url {self.url!r} has no valid port") from None
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            return http.client.HTTPSConnection(parts.hostname, port, timeout=SILENCE_S_MAX, context=context)
        return http.client.HTTPConnection(parts.hostname, port, timeout=SILENCE_S_MAX)

    @contextmanager
    def get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET, as long as the block runs. Raises CallFailed for anything but 200."""
        headers = {name.title(): value for name, value in self.keys.metadata(KeyKind.MANAGEMENT)}
        connection = self._connection()
        try:
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise CallFailed("UNAVAILABLE", _unreached(self.url, error)) from None
            if answer.status != 200:
                raise self._refused(path, answer.status, answer.read(4096))
            try:
                yield answer
            except (OSError, http.client.HTTPException) as error:
                raise CallFailed("UNAVAILABLE", f"The server at {self.url} went away: {error}") from None
        finally:
            connection.close()

    def _refused(self, path: str, status: int, body: bytes) -> CallFailed:
        try:
            message = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            message = f"status {status}"
        if status in (401, 403):
            return CallFailed("PERMISSION_DENIED", f"{message}\n{self.keys.advice(KeyKind.MANAGEMENT)}")
        if status in (404, 405) and path == EVENTS:
            message = f"{self.url} has no console: it isn't torchrelay's management address, or enable_console is off"
        return CallFailed("NOT_FOUND" if status == 404 else "UNKNOWN", message)

    def events(self) -> Iterator[tuple[str, Any]]:
        """The console's events by name, until the server ends the stream. Raises CallFailed."""
        with self.get(EVENTS) as answer:
            name = ""
            while line := answer.readline(LINE_BYTES_MAX):
                word, _, rest = line.decode().rstrip("\n").partition(": ")
                if word == "event":
                    name = rest
                elif word == "data":
                    yield name, json.loads(rest)

    def worker_lines(self, model: str, version: str, worker_id: str) -> list[str]:
        """The last lines that a worker printed, up to a hundred; none if the worker is gone. Raises CallFailed."""
        words = (quote(word, safe="") for word in (model, version, "workers", worker_id))
        try:
            with self.get("/models/" + "/".join(words) + "/log") as answer:
                return [str(line) for line in json.loads(answer.read())["lines"]]
        except CallFailed as error:
            if error.code == "NOT_FOUND":
                return []
            raise


def _unreached(url: str, error: OSError | http.client.HTTPException) -> str:
    return (
        f"No server answers at {url} ({why_unanswered(error)}).\n"
        "Is it running? Start one with: torchserve --start --model-store DIRECTORY --models all\n"
        f"{server_here(urlsplit(url).netloc)}"
        "Is it elsewhere? Give its management address with --url or TORCHSERVE_MANAGEMENT_URL."
    )


def new_lines(before: Sequence[str], now: Sequence[str]) -> Sequence[str]:
    """The lines of `now`, a worker's last ones, that came after `before`, the last ones of an earlier read."""
    for start in range(len(before)):
        tail = before[start:]
        if list(now[: len(tail)]) == list(tail):
            return now[len(tail) :]
    return now


def why_unanswered(error: OSError | http.client.HTTPException) -> str:
    """The reason why an HTTP request got no answer, for people."""
    if isinstance(error, http.client.BadStatusLine) and str(error).startswith(_TLS_ALERT):
        return "it speaks TLS: write https:// instead of http://"
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection without an answer; if it speaks TLS, write https:// instead of http://"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't trusted: {error.verify_message}; name its authority's with --ca-file"
    if isinstance(error, ssl.SSLError) and error.reason and any(word in error.reason for word in _NO_TLS):
        return f"it doesn't seem to speak TLS: write http:// instead of https://; {error}"
    return str(error) or type(error).__name__


#: The variable by which a shell's completion asks for words (`ts_frontend.cli.main` reads it without importing this
#: module).
COMPLETE_VARIABLE = "_TORCHSERVE_COMPLETE"
#: The pause between two reads of workers' lines, and before a broken stream of events is requested again.
POLL_S, AGAIN_S = 1.0, 1.0
#: The width of `top` without a terminal.
PIPE_COLUMNS = 160
#: The sort keys of `top`.
SORTS = ("name", "rate", "p95", "queue")

_OPTIONS = (
    click.option(
        *("--url", "url"),
        envvar="TORCHSERVE_MANAGEMENT_URL",
        default="http://127.0.0.1:8081",
        show_default=True,
        show_envvar=True,
        help="The server's management address.",
    ),
    *KEY_OPTIONS,
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

    return with_options(_OPTIONS, update_wrapper(run, body))


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
