"""`torchserve dev`: a server in a terminal, whose model's file is saved, raises, and stops at breakpoints."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import GUARD_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights are kept by forks, on Linux")

COMMAND = (sys.executable, "-c", "import sys; from ts_frontend.cli.main import main; sys.exit(main())", "dev")
FREE = {
    "grpc_inference_port": "0",
    "grpc_management_port": "0",
    "inference_address": "http://127.0.0.1:0",
    "management_address": "http://127.0.0.1:0",
    "metrics_address": "http://127.0.0.1:0",
    "number_of_gpu": "0",
    "preload_torch": "false",
}
HANDLER = """
class Model:
    def initialize(self, context):
        with open({trace!r}, "a") as trace:
            trace.write("loaded ")
        self.weights = {weights}

    def handle(self, data, context):
        {handle}
"""
SUM = "return [sum(self.weights)] * len(data)"


class Dev:
    """A server of `torchserve dev` in a terminal of its own."""

    def __init__(self, path: Path, *words: str) -> None:
        self.path = path
        self.master, terminal = pty.openpty()

        def lead() -> None:
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        command = [*COMMAND, str(path), *words, *(word for pair in FREE.items() for word in ("--set", "=".join(pair)))]
        self.process = subprocess.Popen(
            command, cwd=path.parent, stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=lead
        )
        os.close(terminal)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the last process has left the terminal
                return
            self.shown += data.decode(errors="replace")

    def shows(self, text: str, after: int = 0) -> None:
        """Returns when the terminal shows the text."""
        until(lambda: text in self.shown[after:], lambda: f"{text!r} in {self.shown[after:]}")

    def types(self, text: str) -> None:
        os.write(self.master, text.encode())

    def url(self) -> str:
        self.shows("Ctrl-C ends it")
        found = re.search(r"http_inference +(\S+)", self.shown)
        assert found is not None, self.shown
        return found[1]

    def ask(self) -> Any:
        """The answer to a request, or the message of its failure."""
        try:
            with urllib.request.urlopen(f"{self.url()}/predictions/written", b"{}", timeout=GUARD_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())["message"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(GUARD_S)
        os.close(self.master)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dev")


@pytest.fixture(scope="module")
def save(folder: Path) -> Callable[..., None]:
    """Saves the handler with this `handle`, always in the same second as far as the file tells: bytecode of an earlier
    load would be taken for that of a file of the same size."""
    saved_ns = itertools.count(1_700_000_000 * 10**9)

    def save(handle: str = SUM, more: str = "", weights: str = "[1, 2, 3]") -> None:
        text = HANDLER.format(trace=str(folder / "trace"), handle=handle, weights=weights) + more
        scratch = folder / "written.py~"
        scratch.write_text(text)
        now_ns = next(saved_ns)
        os.utime(scratch, ns=(now_ns, now_ns))
        scratch.rename(folder / "written.py")  # in one step, as editors do

    return save


@pytest.fixture(scope="module")
def dev(folder: Path, save: Callable[..., None]) -> Iterator[Dev]:
    save()
    server = Dev(folder / "written.py")
    try:
        until(lambda: server.ask() == 6)
        yield server
    finally:
        server.end()


def loads(folder: Path) -> int:
    return len((folder / "trace").read_text().split())


def saved(dev: Dev, save: Callable[..., None], *parts: str) -> str:
    """Saves the handler; returns the terminal's output from then until the new code is served, or fails."""
    begin = len(dev.shown)
    save(*parts)
    line = re.compile(r"written\.py saved: .*\n")
    until(lambda: line.search(dev.shown, begin), lambda: dev.shown[begin:])
    return dev.shown[begin:]


def test_a_saved_file_is_served_with_the_weights_that_are_loaded(dev: Dev, folder: Path, save: Any) -> None:
    assert dev.ask() == 6
    dev.shows("console and playground: http://127.0.0.1:")
    dev.shows(f"try it: curl -T FILE {dev.url()}/predictions/written")
    dev.shows("POST /predictions/written  200  ")
    before = loads(folder)
    assert "with the weights that were loaded" in saved(dev, save, "return [max(self.weights)] * len(data)")
    assert dev.ask() == 3
    assert loads(folder) == before


def test_a_change_of_the_load_loads_again(dev: Dev, folder: Path, save: Any) -> None:
    saved(dev, save, SUM)
    before = loads(folder)
    shown = saved(dev, lambda: save(weights="[1, 2, 4]"))
    assert "loaded again: Model.initialize in written.py, which loads the model, has changed" in shown
    assert dev.ask() == 7
    assert loads(folder) == before + 1


def test_an_exception_is_in_the_terminal_and_in_the_answer(dev: Dev, save: Any) -> None:
    saved(dev, save, "raise KeyError('missing') if data else None")
    assert "KeyError: 'missing' (written.py, line 9, in handle)" in dev.ask()
    dev.shows("raise KeyError('missing') if data else None")
    begin = len(dev.shown)
    save("return (")
    dev.shows("the model can't be loaded: SyntaxError", begin)
    assert "could not be loaded: SyntaxError" in dev.ask()
    assert "with the weights" in saved(dev, save, SUM) and dev.ask() == 6


def test_a_load_that_fails_is_told_once(dev: Dev, folder: Path, save: Any) -> None:
    """The server tries again after a pause, so that there may be further failed loads before the next save."""
    begin, before = len(dev.shown), loads(folder)
    save(SUM, "", "[][0]")
    dev.shows("saved: the model can't be loaded: IndexError: list index out of range", begin)
    saved(dev, save, SUM)
    assert dev.ask() == 6
    shown = dev.shown[begin:]
    told, failed = shown.count("Traceback"), loads(folder) - before - 1
    assert 1 <= told <= failed and shown.count("error:") == 1 and shown.count("warning:") == told - 1, shown
    assert "Backend worker process died" not in shown


@pytest.mark.parametrize("stop", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_breakpoint_stops_in_the_terminal(dev: Dev, save: Any, stop: str) -> None:
    saved(dev, save, f"{stop}\n        return [len(self.weights)] * len(data)")
    begin, answers = len(dev.shown), []
    asking = threading.Thread(target=lambda: answers.append(dev.ask()))
    asking.start()
    dev.shows("(Pdb) ", begin)
    dev.types("p 6 * 7, self.weights\r")
    dev.shows("(42, [1, 2, 3])", begin)
    assert not answers
    dev.types("self.weights.append(9)\rc\r")
    asking.join(GUARD_S)
    assert answers == [4]


def test_ctrl_c_ends_it_and_all_its_processes(dev: Dev, save: Any) -> None:
    saved(dev, save, SUM)
    everyone = psutil.Process(dev.process.pid).children(True)
    assert len(everyone) >= 3
    dev.types("\x03")
    assert dev.process.wait(GUARD_S) == 0
    _, left = psutil.wait_procs(everyone, GUARD_S)
    assert not left


@pytest.mark.long
def test_a_folder_without_a_handler_is_served_once_it_has_one(tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    server = Dev(folder)
    try:
        server.shows("is not served yet: it is loaded when its files are saved")
        assert server.shown.count("no handler is found") == 1, server.shown
        assert server.ask() == "Model not found: written. Models here: none."
        (folder / "handler.py").write_text("def handle(data, context):\n    return len(data)")
        server.shows("saved: the model can't be served: Failed to start workers for model written")
        assert "could not be loaded: handle(None, context) raised TypeError" in server.ask()
        begin = len(server.shown)
        (folder / "handler.py").write_text("def handle(data, context):\n    return [len(data or ())]")
        server.shows("written/handler.py saved: reloaded after ", begin)
        assert server.ask() == 1
    finally:
        server.end()
