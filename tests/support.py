"""Helpers for tests of several folders. pytest puts this folder on the path: `from support import until`."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

if TYPE_CHECKING:
    from ts.protocol.frames import Feed
    from ts_frontend.job import Job, Whereabouts

#: A guard against a wait for ever, far above what a busy machine takes: no test's result depends on it.
GUARD_S = 120
#: The pause between two looks: a tenth of the time that was waited so far, so that a long wait leaves the processor to
#: what it waits for. The least and the longest one, with a thread and in a loop.
PAUSES_S = (0.01, 0.05)
SHORT_PAUSES_S = (0.001, 0.01)
LOOKS_AT_ONCE = 20
#: For requests that must run out of time while they run: the first that leaves a busy machine the time to begin them.
TIMEOUTS_US = (1_000_000, 8_000_000, 60_000_000)

Found = TypeVar("Found")


def with_packages(*pythons: Path) -> dict[str, str]:
    """The variables of a process that has the packages of these interpreters' environments, and asks no hub."""
    paths = [next(one.parent.parent.glob("lib/python*/site-packages")) for one in pythons]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}


def ran(program: Path, env: dict[str, str], *words: str) -> Any:
    """What a program prints as JSON."""
    command = [sys.executable, str(program), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _own_ports() -> Iterator[int]:
    """A thousand ports for each of pytest's processes, again and again. They are below those that systems give to
    connections and to listeners on port 0: one of these could take a port before the server that it is for."""
    number = int(os.environ.get("TORCHRELAY_TEST_PROCESS", "0")) % 12
    first, begin = 20_000 + 1000 * number, random.SystemRandom().randrange(1000)
    yield from (first + (begin + count) % 1000 for count in itertools.count())


_PORTS = _own_ports()


def until(look: Callable[[], Found], message: object = "", *, timeout_s: float = GUARD_S) -> Found:
    """Calls `look()` repeatedly and returns its first true value. Raises AssertionError without one within
    `timeout_s` seconds; the message may be a function, which is called then."""
    began_s = time.monotonic()
    while not (found := look()):
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, _said(look, message, timeout_s)
        time.sleep(_pause_s(waited_s, PAUSES_S))
    return found


async def until_async(look: Callable[[], Found], message: object = "", *, timeout_s: float = GUARD_S) -> Found:
    """`until` for a coroutine: the loop's other tasks go on between two looks. Only the first looks take no pause: what
    needs more of them waits for a thread, a process or the clock, whose processor they would take."""
    began_s = time.monotonic()
    looks = 0
    while not (found := look()):
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, _said(look, message, timeout_s)
        looks += 1
        await asyncio.sleep(0 if looks < LOOKS_AT_ONCE else _pause_s(waited_s, SHORT_PAUSES_S))
    return found


async def turns(count: int = 3) -> None:
    """The loop's other tasks have so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def _pause_s(waited_s: float, limits_s: tuple[float, float]) -> float:
    return min(max(waited_s / 10, limits_s[0]), limits_s[1])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """In a loop of its own, where no task of it may be left when it ends. Tests that are coroutines run so."""

    async def whole() -> None:
        await asyncio.wait_for(scenario, GUARD_S)
        # Those of a call that was just cancelled (grpcio's, for one) have their end in a turn of the loop or two.
        await until_async(lambda: len(asyncio.all_tasks()) == 1, asyncio.all_tasks)

    asyncio.run(whole())


def write_wheel(path: Path, needs: str = "", word: str = "hello") -> None:
    """The smallest package that pip installs without building anything."""
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"WORD = {word!r}\n")
        more = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=GUARD_S)


def self_signed(folder: Path, certificate: str = "server.crt", key: str = "server.key") -> None:
    """Makes a certificate of localhost that signed itself, and its key."""
    words = ("-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    openssl(folder, "req", "-x509", *words, "-days", "2", "-keyout", key, "-out", certificate)


class Reply(NamedTuple):
    """An answer over HTTP. The names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def value(self) -> Any:
        """The body as JSON, or as text if it is none."""
        return self.json() if self.body[:1] in b"{[" else self.body.decode()


def http_call(
    port: int,
    method: str,
    target: str,
    body: bytes | str | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    host: str = "127.0.0.1",
) -> Reply:
    """A call over HTTP/1.1, on a connection of its own. A `_` in the name of a header stands for a dash."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(host, port, timeout=GUARD_S)) as connection:
        connection.request(method, target, body, names)
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


class QuietHandler(BaseHTTPRequestHandler):
    """Prints no line for a request."""

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server whose requests this class handles. It ends with the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(GUARD_S)


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nothing listens just now, another one for each call of this process."""
    while True:
        port = next(_PORTS)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def module_of(path: Path) -> ModuleType:
    """The module of a file, run anew, which `sys.modules` doesn't get."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_server(pid_file: Path, mark: str) -> None:
    """Kills the server that a pid file names and waits for its processes' end. Nothing happens without such a server:
    the file may be old or name a process whose command lacks the mark."""
    try:
        server = psutil.Process(int(pid_file.read_text()))
        if mark not in " ".join(server.cmdline()):
            return
        processes = [server, *server.children(recursive=True)]
        server.kill()
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return
    _, alive = psutil.wait_procs(processes, timeout=GUARD_S)
    assert not alive, f"left behind: {alive}"


def _said(look: Callable[[], object], message: object, timeout_s: float) -> str:
    text = message() if callable(message) else message
    return f"not within {timeout_s} s: {text or getattr(look, '__self__', look)}"


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class JobOwner:
    """An owner of jobs that notes what it is told. It feeds and times none."""

    def __init__(self) -> None:
        self.released: list[Job] = []
        self.granted_bytes = 0

    def release(self, job: Job) -> None:
        self.released.append(job)

    def grant(self, job: Job, size_bytes: int) -> None:
        self.granted_bytes += size_bytes

    def feed(self, job: Job, feed: Feed) -> None:
        raise AssertionError("no job is fed here")

    def measure(self, job: Job) -> Whereabouts:
        raise AssertionError("no job is timed here")


class OneBatchWorker:
    """What a worker of a queue does that keeps the batch that it runs in `running`, which its `dispatch` sets. It runs
    nothing again."""

    running: list[Job]

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        raise NotImplementedError

    def dispatch_alone(self, job: Job, now_s: float) -> None:
        self.dispatch([job], now_s)

    def reserve(self) -> None:
        raise AssertionError("nothing runs again here")

    def look(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def holds(self, job: Job) -> bool:
        return job in self.running
