"""`torchserve ping`, `register`, `predict` and the other subcommands: clients of a running server, over gRPC."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn, TypeAlias

import click

from ts.protocol.text import printable, printable_json, printable_lines
from ts_frontend.cli import text
from ts_frontend.cli.client import CallFailed, Client, NoKeys, Target, WorkersFailed, find_keys, wait_for_workers
from ts_frontend.config.load import of_terminal
from ts_frontend.config.parameters import REGISTER, CallParameter

_REGISTERED = re.compile(r'Model "(?P<name>.+)" Version: (?P<version>.+) registered with')


def versions(client: Client) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields the description of each version of each model, and whether it is the default."""
    for model in client.models():
        name = model["modelName"]
        try:
            (default,) = client.describe(name)
            found = client.describe(name, "all")
        except CallFailed as error:
            if error.code != "NOT_FOUND":  # unregistered in between
                raise
            continue
        for description in found:
            yield description, description["modelVersion"] == default["modelVersion"]


def register_model(client: Client, url: str, settings: dict[str, Any]) -> tuple[str, str, bool]:
    """Registers without waiting for workers; returns name, version, and whether the archive sets their number."""
    before = {(found["modelName"], found["modelVersion"]) for found, _ in versions(client)}
    sentence = client.register(url, **settings)
    match = _REGISTERED.match(sentence)
    if match is not None:
        return match["name"], match["version"], False
    for description, _ in versions(client):
        name, version = description["modelName"], description["modelVersion"]
        if description["modelUrl"] == url and (name, version) not in before:
            return name, version, True
    raise CallFailed("UNKNOWN", f"The server answered {sentence!r}, but lists no new model from {url}.")


Option: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
DEFAULT_INPUT = "data"
INTERRUPTED_STATUS = 130

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: Options for the keys of a server, and for its certificate.
KEY_OPTIONS = (
    click.option("--token", envvar="TORCHSERVE_TOKEN", show_envvar=True, help="Key, where the server asks for one."),
    click.option(
        "--key-file",
        envvar="TORCHSERVE_KEY_FILE",
        type=click.Path(exists=True, path_type=Path),
        show_envvar=True,
        help="The server's keys.  [default: key_file.json here, for a server on this machine]",
    ),
    click.option(
        "--ca-file",
        envvar="TORCHSERVE_CA_FILE",
        type=_FILE,
        show_envvar=True,
        help="PEM file of the authority that signed the server's certificate; speaks TLS.",
    ),
)
_SERVER_OPTIONS = (
    click.option("--host", envvar="TORCHSERVE_HOST", default="127.0.0.1", show_default=True, show_envvar=True),
    click.option(
        "--inference-port", envvar="TORCHSERVE_INFERENCE_PORT", default=7070, show_default=True, show_envvar=True
    ),
    click.option(
        "--management-port", envvar="TORCHSERVE_MANAGEMENT_PORT", default=7071, show_default=True, show_envvar=True
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="How long one call may take.  [default: no limit]",
    ),
    click.option(
        "--cert",
        "certificate_file",
        envvar="TORCHSERVE_CERT",
        type=_FILE,
        show_envvar=True,
        help="PEM file of your own certificate, where the server asks for one; with --ca-file and --cert-key.",
    ),
    click.option(
        "--cert-key",
        "certificate_key_file",
        envvar="TORCHSERVE_CERT_KEY",
        type=_FILE,
        show_envvar=True,
        help="PEM file of its key.",
    ),
    *KEY_OPTIONS,
    click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs."),
)


def _fail(message: str, status: int = 1) -> NoReturn:
    click.echo(printable_lines(f"Error: {message}"), err=True)
    sys.exit(status)


def _run(body: Callable[..., None], target: Target, **kwargs: Any) -> None:
    try:
        with Client(target) as client:
            body(client, **kwargs)
    except CallFailed as error:
        _fail(error.message)
    except WorkersFailed as error:
        _fail(
            f"{error.model}: a worker failed.\n{text.failure(error.last)}\n"
            f"The server keeps trying for a while. See: torchserve describe {error.name}; or remove the model: "
            f"torchserve unregister {error.name}"
        )
    except KeyboardInterrupt:
        _fail("Interrupted.", INTERRUPTED_STATUS)


def command(body: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options for the server's address; its body gets a Client and `as_json`."""

    def run(
        host: str,
        inference_port: int,
        management_port: int,
        timeout_s: float | None,
        ca_file: Path | None,
        certificate_file: Path | None,
        certificate_key_file: Path | None,
        token: str | None,
        key_file: Path | None,
        **kwargs: Any,
    ) -> None:
        if (certificate_file is None) != (certificate_key_file is None):
            raise click.UsageError("--cert and --cert-key go together")
        if certificate_file is not None and ca_file is None:
            raise click.UsageError("--cert and --cert-key need --ca-file: without it there is no TLS")
        try:
            keys = find_keys(token, key_file, host)
        except NoKeys as error:
            raise click.UsageError(str(error)) from None
        ports = inference_port, management_port
        certificate = certificate_file, certificate_key_file
        _run(body, Target(host, *ports, timeout_s, ca_file, keys, *certificate), **kwargs)

    return with_options(_SERVER_OPTIONS, update_wrapper(run, body))


def with_options(options: Sequence[Option], body: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(options):
        body = option(body)
    return body


def _print(value: object, readable: str, as_json: bool, *, styled: bool = False) -> None:
    """`styled`: the text has colours, and was made printable before."""
    click.echo(printable_json(value) if as_json else readable if styled else printable_lines(readable))


def coloured() -> bool:
    """Whether standard output shows colours: a terminal, without NO_COLOR and not a dumb one."""
    return sys.stdout.isatty() and not of_terminal("NO_COLOR") and of_terminal("TERM") != "dumb"


def _progress(message: str) -> None:
    click.echo(printable_lines(message), err=True)


@click.group(
    context_settings={
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    }
)
def commands() -> None:
    """Commands for a running server."""


@commands.command()
@command
def ping(client: Client, as_json: bool) -> None:
    """Check whether the server is healthy. The exit status is 0 only then."""
    health = client.ping()
    status = printable(str(health.get("status")))
    if coloured():
        status = click.style(status, fg="green" if status == "Healthy" else "red")
    _print(health, status, as_json, styled=True)
    if health.get("status") != "Healthy":
        sys.exit(1)


@commands.command("list")
@click.option(
    "--filter", "only", metavar="TEXT", default="", help="Only names that contain TEXT, or match its `*` and `?`."
)
@command
def list_command(client: Client, only: str, as_json: bool) -> None:
    """List the registered models, all versions, by name."""
    found = [row for row in versions(client) if text.fits(row[0]["modelName"], only)]
    found.sort(key=lambda row: (text.natural(row[0]["modelName"]), text.natural(row[0]["modelVersion"])))
    listed = [
        {**description, "defaultVersion": default, "state": text.state(description)} for description, default in found
    ]
    columns = get_terminal_size().columns if sys.stdout.isatty() else None
    _print({"models": listed}, text.overview(found, coloured=coloured(), columns=columns), as_json, styled=True)


@commands.command()
@click.argument("name")
@click.option("--version", default="", help='One version, or "all".  [default: the default version]')
@click.option("--customized", is_flag=True, help="Ask the model's handler for a description too.")
@command
def describe(client: Client, name: str, version: str, customized: bool, as_json: bool) -> None:
    """Show a model's settings, workers, queue, last failure."""
    found = client.describe(name, version, customized)
    _print(found, "\n\n".join(map(text.details, found)), as_json)


def _wait(client: Client, name: str, version: str, count: int, known_failure: object) -> dict[str, Any]:
    return wait_for_workers(lambda: client.describe(name, version)[0], count, known_failure, _progress, time.sleep)


def _option_of(row: CallParameter) -> Option:
    kind = click.IntRange(min=row.least) if row.kind is int else str
    return click.option(row.flag, row.name, type=kind, metavar=row.metavar, help=row.help)


_register_options = partial(with_options, [_option_of(row) for row in REGISTER if row.flag])


@commands.command()
@click.argument("url")
@_register_options
@click.option("--wait/--no-wait", default=True, help="Wait until the workers are ready, or return at once.")
@command
def register(client: Client, url: str, initial_workers: int | None, wait: bool, as_json: bool, **settings: Any) -> None:
    """Register an archive.

    URL is a name in the server's model store, or a file://, http:// or https:// URL that the server may use.
    """
    name, version, started = register_model(client, url, settings)
    _progress(f"{name} {version}: registered")
    count = initial_workers
    if initial_workers is None:
        count = client.describe(name, version)[0]["minWorkers"] if started else 1
    if count and (initial_workers is not None or not started):
        client.scale(name, version, count, None, None)
    description = _wait(client, name, version, count, None) if wait and count else client.describe(name, version)[0]
    for warning in description.get("warnings", ()):
        _progress(f"{name} {version}: warning: {warning}")
    _print(description, f"{name} {version}: {text.workers(description)}", as_json)


@commands.command()
@click.argument("name")
@click.argument("workers", type=click.IntRange(min=0))
@click.option("--version", default="", help="[default: the default version]")
@click.option("--max", "most", type=click.IntRange(min=1), help="The most workers.  [default: WORKERS]")
@click.option(
    "--grace",
    type=click.IntRange(min=0),
    metavar="SECONDS",
    help="How long a removed worker may finish its requests; the rest run elsewhere.  [default: no limit]",
)
@click.option("--wait/--no-wait", default=True, help="Wait until it is done, or return at once.")
@command
def scale(
    client: Client,
    name: str,
    workers: int,
    version: str,
    most: int | None,
    grace: int | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Set the number of a model's WORKERS."""
    before = client.describe(name, version)[0].get("lastWorkerFailure")
    sentence = client.scale(name, version, workers, most, grace)
    if not wait:
        _print({"status": sentence}, sentence, as_json)
        return
    description = _wait(client, name, version, workers, before)
    _print(description, f"{name} {description['modelVersion']}: {text.workers(description)}", as_json)


@commands.command("set-default")
@click.argument("name")
@click.argument("version")
@command
def set_default(client: Client, name: str, version: str, as_json: bool) -> None:
    """Make VERSION the one for calls without a version."""
    sentence = client.set_default(name, version)
    _print({"status": sentence}, sentence, as_json)


#: The words that change a rollout, in place of a version.
ROLLOUT_ACTIONS = ("status", "promote", "rollback", "pause", "resume")


@commands.command()
@click.argument("name")
@click.argument("what", metavar="VERSION|" + "|".join(ROLLOUT_ACTIONS), default="status")
@click.option("--steps", metavar="PERCENTAGES", help="The shares of the calls.  [default: 1,10,50,100]")
@click.option("--every", metavar="TIME", help="The least time of a step: 30s, 5m, 1h.  [default: 5m]")
@click.option("--sticky", metavar="HEADER", help="Callers with the same value of this header stay with a version.")
@click.option("--shadow", is_flag=True, default=None, help="First compare the answers to copies of calls.")
@click.option("--judge/--no-judge", default=None, help="Let the comparison of the versions end a step, or the time.")
@command
def rollout(client: Client, name: str, what: str, as_json: bool, **given: Any) -> None:
    """Give VERSION a growing share of the calls.

    They are the calls that name no version. The other words show and change the rollout (docs/rollouts.md).
    """
    settings = {key: value for key, value in given.items() if value is not None}
    acts = what in ROLLOUT_ACTIONS
    if acts and settings:
        raise click.UsageError(f"{what} takes no settings: they belong to the begin of a rollout, with a version")
    found = client.rollout(name, what if acts else "start", {} if acts else {"version": what, **settings})
    _print(found, text.rollout(found), as_json)


@commands.command()
@click.argument("name")
@click.option("--version", default="", help="[default: the default version, which can only be unregistered last]")
@command
def unregister(client: Client, name: str, version: str, as_json: bool) -> None:
    """Take a version out of service. Its accepted requests are answered first."""
    sentence = client.unregister(name, version)
    _print({"status": sentence}, sentence, as_json)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise click.UsageError(f"{path} can't be read: {error.strerror}") from None


def _inputs(file: str | None, named: tuple[str, ...]) -> dict[str, bytes]:
    """The request's inputs: FILE as "data", and each `name=text` or `name=@file`."""
    inputs = {} if file is None else {DEFAULT_INPUT: _read(file)}
    for pair in named:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise click.UsageError(f"--input {pair!r} isn't NAME=TEXT or NAME=@FILE")
        if name in inputs:
            raise click.UsageError(f"input {name!r} is given twice")
        inputs[name] = _read(value[1:]) if value.startswith("@") else value.encode()
    if not inputs:
        raise click.UsageError("Nothing to send: give a FILE, - for standard input, or --input NAME=TEXT")
    return inputs


def _json_of(prediction: bytes, kinds: type | tuple[type, ...] = object) -> dict[str, object]:
    """{"prediction": its JSON value, if of one of `kinds`, or its text}, or {"prediction_base64"} for other bytes."""
    try:
        decoded = prediction.decode()
    except UnicodeDecodeError:
        return {"prediction_base64": base64.b64encode(prediction).decode()}
    value = _value_of(decoded)
    return {"prediction": value if isinstance(value, kinds) else decoded}


def _value_of(decoded: str) -> object:
    try:
        return json.loads(decoded, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return decoded


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")


_request_options = partial(
    with_options,
    (
        click.argument("name"),
        click.argument("file", required=False),
        click.option("--version", default="", help="[default: the default version]"),
        click.option(
            "--input", "named", multiple=True, metavar="NAME=TEXT|NAME=@FILE", help="A named input; repeatable."
        ),
    ),
)


def _shown(answer: bytes) -> bytes:
    """A model's answer: unchanged for a file or a pipe, printable on a terminal."""
    if not sys.stdout.isatty():
        return answer
    return printable_lines(answer.decode("utf-8", "backslashreplace")).encode()


@commands.command()
@_request_options
@command
def predict(client: Client, name: str, file: str | None, version: str, named: tuple[str, ...], as_json: bool) -> None:
    """Send FILE (- for standard input) and print the answer.

    FILE is the input "data"; --input sends inputs of other names.
    """
    prediction = client.predict(name, version, _inputs(file, named))
    if as_json:
        _print(_json_of(prediction), "", True)
        return
    click.echo(_shown(prediction), nl=sys.stdout.isatty() and not prediction.endswith(b"\n"))


@commands.command()
@_request_options
@command
def stream(client: Client, name: str, file: str | None, version: str, named: tuple[str, ...], as_json: bool) -> None:
    """Send FILE (- for standard input) and print each piece.

    With --json every piece is one line. Ctrl-C cancels the request; the model's handler notices.
    """
    for piece in client.stream(name, version, _inputs(file, named)):
        if as_json:
            click.echo(printable_json(_json_of(piece, (dict, list)), None))
        else:
            click.echo(_shown(piece), nl=False)
    if not as_json and sys.stdout.isatty():
        click.echo()
