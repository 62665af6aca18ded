"""Files of the server: regular ones alone, its own directory, open descriptors, systems without /proc."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import GUARD_S
from ts.runtime import forkable
from ts.runtime.forkable import Footprint, owned_files
from ts_frontend.config.files import read_file
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.snapshot import SnapshotFiles
from ts_frontend.errors import ServeError
from ts_frontend.listeners.certificates import CertificateEnds, CertificateFiles, read
from ts_frontend.listeners.descriptors import few_open_files, open_files_max, report_full
from ts_frontend.listeners.sockets import Tls
from ts_frontend.models.archive import NEW, NEW_S_MAX, PREFIX, read_config, read_manifest, remove_abandoned, work_dir
from ts_frontend.models.loader import requirements_in
from ts_frontend.telemetry.logging.log_config import apply_dict_config, read_plan
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.workers import ranks


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (1024, 524_288, 65_536),
        (1024, 4096, 4096),
        (100_000, 524_288, 100_000),
        (1024, resource.RLIM_INFINITY, 65_536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, sys.maxsize),
    ],
)
def test_the_soft_limit_is_raised(soft: int, hard: int, most: int) -> None:
    assert open_files_max(soft, hard) == most


def test_waiting_clients_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    looks: Iterator[int] = iter((0, 3, 0, 5, 6, 7, 0, 0, 8, 9, 10))

    async def report() -> None:
        await report_full("http_inference", 48, lambda: next(looks), 0.0)

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError):  # a coroutine's StopIteration
        asyncio.run(report())
    assert [record.args for record in caplog.records] == [("http_inference", 48, 6), ("http_inference", 48, 9)]


def test_a_limit_that_leaves_no_connections_is_told() -> None:
    assert few_open_files(64).startswith("64 open files are allowed: the server itself needs 64, and more for each ")
    assert "ulimit -n 65536" in few_open_files(255)
    assert few_open_files(256) == few_open_files(resource.RLIM_INFINITY) == ""


def told(work: Callable[[], object]) -> str:
    """The message of the error that `work` raises, or the text of its result. A reader that waits for the pipe fails
    the test."""
    found: list[str] = []

    def run() -> None:
        try:
            found.append(str(work()))
        except (OSError, ServeError, ConfigError) as error:
            found.append(str(getattr(error, "message", error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GUARD_S)
    assert not thread.is_alive()
    return found[0]


READERS: dict[str, Callable[[Path], object]] = {
    "file": read_file,
    "certificate_file": lambda path: read(Tls(str(path), str(path))),
    "metrics.yaml": read_definitions,
    "log.yaml": apply_dict_config,
    "log4j2.xml": lambda path: read_plan(path, {}),
    "model-config.yaml": lambda path: read_config(path.parent, path),
    "MANIFEST.json": lambda path: read_manifest(path.parent, path),
    "requirements.txt": requirements_in,
    "20260101000000000-shutdown.cfg": lambda path: SnapshotFiles(path.parent).newest(),
}


@pytest.mark.parametrize("link", [False, True], ids=["itself", "a link to it"])
@pytest.mark.parametrize("name", READERS)
def test_a_named_pipe_is_refused_by_its_name(tmp_path: Path, name: str, link: bool) -> None:
    path = tmp_path / "there" / name
    path.parent.mkdir()
    pipe = tmp_path / "pipe" if link else path
    os.mkfifo(pipe)
    if link:
        path.symlink_to(pipe)
    message = told(lambda: READERS[name](path))
    assert "a named pipe, not a regular file" in message and path.name in message


def test_certificates_that_become_pipes_leave_those_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cert.pem"
    os.mkfifo(path)
    tls = Tls(str(path), str(path))
    with caplog.at_level(logging.WARNING):
        assert told(CertificateFiles("grpc_inference", tls).read_if_changed) == "None"
    assert f"certificate_file {path}: a named pipe, not a regular file" in caplog.text
    assert told(CertificateEnds(tls).read) == "{}"


def test_it_is_there_as_long_as_the_server(tmp_path):
    with work_dir(tmp_path) as path:
        (path / "models").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_deleted_at_once_and_nothing_else(tmp_path, caplog):
    """One that was killed a moment ago, too; a name that only says that a server is about to lock it counts a while."""
    left, new, old_new, other, linked = (
        tmp_path / name for name in (f"{PREFIX}left", f"{NEW}young", f"{NEW}old", "other", "linked")
    )
    for path in (left, new, old_new, other, linked):
        path.mkdir()
        (path / "model").write_text("weights")
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(linked)
    os.utime(old_new, (0, os.stat(old_new).st_mtime - 2 * NEW_S_MAX))
    with work_dir(tmp_path) as held:
        (held / "model").write_text("weights")
        with work_dir(tmp_path) as second:
            with caplog.at_level("INFO"):
                remove_abandoned(tmp_path)
                remove_abandoned(tmp_path)  # there is nothing more to say
            (said,) = caplog.messages
            assert said == f"Removed from {tmp_path} what killed servers left: {left.name}, {old_new.name}"
            assert sorted(tmp_path.iterdir()) == sorted([new, other, linked, link, held, second])
        assert (held / "model").exists()
    assert (linked / "model").exists()


def test_a_process_is_looked_at_without_what_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkable, "PROC", str(tmp_path / "none"))
    now = Footprint.now()
    assert now.tasks == {} and now.files == {} and now.children == frozenset()
    assert now.refusal(now) == ""
    owned_files(())


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match=r"longer than 100 bytes.*temp_dir"), ranks._short(tmp_path / ("x" * 100), "s"):
        pass
