"""Start and stop a server from Python, and register models with it, as TorchServe's `ts.launcher` does.

The server is the `torchserve` command's: it outlives this process until `stop`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from queue import Full, Queue
from typing import IO, Any, TypeAlias

MANAGEMENT_URL = "http://localhost:8081"
LINES_MAX = 1000
Params: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"
#: Blanks and "" leave sys.path, so that a directory named `ts` where this is called isn't taken for ours.
COMMAND = (
    sys.executable,
    "-c",
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ts_frontend.cli.main import main; sys.exit(main()) # torchserve",
)


class Response:
    """An HTTP answer with the most used members of `requests.Response`."""

    def __init__(self, status_code: int, reason: str, headers: Mapping[str, str], content: bytes, url: str) -> None:
        self.status_code, self.reason, self.headers = status_code, reason, headers
        self.content, self.url = content, url

    @property
    def ok(self) -> bool:
        return self.status_code < 400

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        """Raises RuntimeError for a status of 400 or more."""
        if not self.ok:
            raise RuntimeError(f"{self.status_code} {self.reason} for {self.url}: {self.text}")


def stop(wait: bool = True) -> None:
    """`torchserve --stop`: returns when the server has ended. `wait` is TorchServe's; this command always waits."""
    subprocess.run([*COMMAND, "--stop", *(["--foreground"] if wait else [])], check=False)


def start(
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | None = None,
    enable_model_api: bool = False,
    exit_on_error: bool = False,
    options: Sequence[str] = (),
) -> Queue[str | None]:
    """Stops a running server, starts one, and prints its output until it is ready. The queue gets the lines after that,
    LINES_MAX at most while nobody takes them, and None at the server's end; they are printed too.

    Of a server that doesn't start all lines are printed, then its exit code, and the queue has None alone. With
    `exit_on_error`, no server starts whose `models` can't be loaded. `options`: further words of the command.
    """
    stop()
    named = {
        "--model-store": model_store,
        "--plugins-path": plugin_folder,
        "--ts-config": snapshot_file,
        "--models": models,
    }
    words = [word for flag, value in named.items() if value for word in (flag, str(value))]
    switches = {
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
        "--exit-on-error": exit_on_error,
    }
    words += [flag for flag, given in switches.items() if given]
    words += options
    process = subprocess.Popen(
        # A pipe gets the server's log only on request.
        [*COMMAND, "--start", *words, "--set", "console_log=true"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    lines: Queue[str | None] = Queue(LINES_MAX)
    if not _print_until_started(process, process.stdout):
        lines.put_nowait(None)
        return lines
    threading.Thread(target=_follow, args=(process, process.stdout, lines), name="torchserve", daemon=True).start()
    return lines


def _print_until_started(process: subprocess.Popen[bytes], output: IO[bytes]) -> bool:
    """Returns True when the server has started, False if it has ended."""
    for line in output:
        text = line.decode(errors="replace").rstrip()
        print(text, flush=True)
        if "Model server started" in text:
            return True
    output.close()
    print(f"torchserve ended with exit code {process.wait()}", flush=True)
    return False


def _follow(process: subprocess.Popen[bytes], output: IO[bytes], lines: Queue[str | None]) -> None:
    for line in output:
        text = line.decode(errors="replace")
        print(text.rstrip(), flush=True)
        try:
            lines.put_nowait(text)
        except Full:
            pass  # unread lines are dropped, as in TorchServe
    output.close()
    process.wait()
    while True:
        try:
            return lines.put_nowait(None)
        except Full:
            lines.get_nowait()


def register_model_with_params(params: Params, management_url: str = MANAGEMENT_URL) -> Response:
    """POST /models with these query parameters; an answer of any status is returned."""
    pairs = list(params.items()) if isinstance(params, Mapping) else list(params)
    url = f"{management_url}/models?{urllib.parse.urlencode(pairs)}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST")) as answer:
            return Response(answer.status, answer.reason, dict(answer.headers), answer.read(), url)
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, str(error.reason), dict(error.headers), error.read(), url)


def register_model(model_name: str, url: str, management_url: str = MANAGEMENT_URL) -> Response:
    """Registers an archive with one worker, and waits for that."""
    asked = {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    return register_model_with_params(asked, management_url)
