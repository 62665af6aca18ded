"""A real server with real workers on free ports, and real clients."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx._config
import httpx._transports.default
import psutil
import pytest

from e2e.servers import (
    ARCHIVES,
    KEY,
    NAMES,
    Serving,
    Start,
    close_templates,
    issue,
    server_template,
    write_model,
)
from redis_server import Redis
from support import GUARD_S, openssl
from ts.runtime.forkserver import PRELOADED_WITH_TORCH


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes side by side share the usual templates, which begin to import before the first server is started."""
    if any(ARCHIVES.parent in item.path.parents for item in session.items):
        server_template()
        if session.config.getoption("--processes") > 1:
            server_template((), PRELOADED_WITH_TORCH)


def pytest_sessionfinish() -> None:
    close_templates()


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """httpx reads all certificate authorities for each client, and each call without one makes a client: 40 ms of
    computing for a request that takes two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx._transports.default, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority (`ca`), `server` and `client`, which it has signed, and `own`, which signed itself."""
    folder = tmp_path_factory.mktemp("certificates")
    openssl(
        folder, "req", "-x509", *KEY, "-subj", "/CN=authority", "-days", "60", "-keyout", "ca.key", "-out", "ca.crt"
    )
    own = ("-subj", "/CN=localhost", "-addext", NAMES, "-days", "60", "-keyout", "own.key", "-out", "own.crt")
    openssl(folder, "req", "-x509", *KEY, *own)
    for name in ("server", "client"):
        issue(folder, name)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A model store with the test's models as directories."""
    path = tmp_path / "store"
    path.mkdir()
    for archive in sorted(ARCHIVES.iterdir()):
        write_model(path, archive.name, archive / "handler.py")
    return path


@pytest.fixture
def write(store: Path) -> Callable[..., str]:
    """`write(name, handler's file or text, version=, config=, directory=)` adds a model to the store."""
    return lambda name, source, **more: write_model(store, name, source, **more)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    found = Redis(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="session")
def probe_handler() -> Path:
    return ARCHIVES / "probe" / "handler.py"


@pytest.fixture(scope="session")
def write_to() -> Callable[..., str]:
    """`write_to(store, name, handler's file or text, …)`: `write` for a store of the test's own."""
    return write_model


@pytest.fixture(scope="session")
def serving() -> type[Serving]:
    """For tests that start a server of their own: `serving(directory, store, settings, arguments)`."""
    return Serving


@pytest.fixture(scope="session")
def torchserve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`torchserve(*words)`: the command with these words, which start no server, forked like a server. `env`: its
    environment, this one's by default; `code`: the exit status that it must have, any by default."""
    file = tmp_path_factory.mktemp("torchserve") / "stderr.txt"

    def run(
        *words: str, env: Mapping[str, str] | None = None, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        with file.open("w+") as stderr, server_template().start(words, env=env, stderr=stderr.fileno()) as program:
            done = program.stdout.read(), program.wait(GUARD_S)
            stderr.seek(0)
            found = subprocess.CompletedProcess(words, done[1], done[0], stderr.read())
        assert code is None or found.returncode == code, found
        return found

    return run


@pytest.fixture(scope="session")
def client_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`client_command(directory, *words, **variables)`: `torchserve` with these words, which start no server, forked
    like a server; standard error is in its output."""

    def run(directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "TORCHSERVE_"))}
        asked = server_template().start(words, cwd=directory, env=env | variables, stderr=subprocess.STDOUT)
        with asked as program:
            printed = program.stdout.read()
            return subprocess.CompletedProcess(words, program.wait(), printed)

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One server with the model `probe` for tests that leave it as they found it."""
    directory = tmp_path_factory.mktemp("shared")
    store = directory / "store"
    store.mkdir()
    write_model(store, "probe", ARCHIVES / "probe" / "handler.py")
    write_model(store, "generating", ARCHIVES / "generating" / "handler.py", config="batchSize: 4\n")
    with Serving(directory, store, {}, ["--ncs"]) as server:
        server.register("probe")
        yield server


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Serving]]:
    """`with server_of({name: (handler's file or text, config)}, **settings) as server:` a running server that has
    these models, each with a worker."""

    @contextmanager
    def running(models: Mapping[str, tuple[Path | str, str]], **settings: object) -> Iterator[Serving]:
        directory = tmp_path_factory.mktemp("server")
        store = directory / "store"
        store.mkdir()
        for name, (source, config) in models.items():
            write_model(store, name, source, config=config)
        with Serving(directory, store, settings, ["--ncs"]) as server:
            for name in models:
                server.register(name)
            yield server

    return running


@pytest.fixture
def start(tmp_path: Path, store: Path) -> Iterator[Start]:
    """Starts servers, the `executed` ones in a new interpreter; at the end they are stopped, and nothing of them may be
    left."""
    servers: list[Serving] = []

    def begin(*arguments: str, wait: bool = True, executed: bool = False, **settings: object) -> Serving:
        if "--ncs" not in arguments and "snapshots" not in settings:
            arguments = (*arguments, "--ncs")
        settings.pop("snapshots", None)
        server = Serving(tmp_path, store, settings, list(arguments), executed=executed)
        servers.append(server)
        return server.wait_started() if wait else server

    yield begin
    for server in servers:
        processes = server.processes()
        try:
            assert server.terminate() in (0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL, 1), server.log
        finally:
            server.process.kill()
            _, alive = psutil.wait_procs(processes, timeout=GUARD_S)
        assert not alive, f"left behind: {alive}"
