"""Only regular files are read: a named pipe at a path, which would hold its reader for ever, is refused by name."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from support import GUARD_S
from ts_frontend.config.files import read_file
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.snapshot import SnapshotFiles
from ts_frontend.errors import ServeError
from ts_frontend.listeners.certificates import CertificateEnds, CertificateFiles, read
from ts_frontend.listeners.listener import Tls
from ts_frontend.models.archive import read_config, read_manifest
from ts_frontend.models.factory import requirements_in
from ts_frontend.models.sharing.document import DOCUMENT_BYTES_MAX
from ts_frontend.models.sharing.places import NAME, SharedFile
from ts_frontend.models.store.http import Stop
from ts_frontend.telemetry.logging.log_config import apply_dict_config, read_plan
from ts_frontend.telemetry.metrics.families import read_definitions


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


def test_devices_and_large_files_are_refused(tmp_path: Path) -> None:
    assert "/dev/zero" in told(lambda: read_file(Path("/dev/zero")))
    assert "Is a directory" in told(lambda: read_file(tmp_path))
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert "larger than 10 bytes" in told(lambda: read_file(tmp_path / "large", 10))
    assert read_file(tmp_path / "large", 11) == b"x" * 11


def test_certificates_that_become_pipes_leave_those_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cert.pem"
    os.mkfifo(path)
    tls = Tls(str(path), str(path))
    with caplog.at_level(logging.WARNING):
        assert told(CertificateFiles("grpc_inference", tls).read_if_changed) == "None"
    assert f"certificate_file {path}: a named pipe, not a regular file" in caplog.text
    assert told(CertificateEnds(tls).read) == "{}"


def test_the_null_device_is_an_empty_file(tmp_path: Path) -> None:
    """`--ts-config /dev/null` asks for a start without settings; other devices are refused."""
    link = tmp_path / "config.properties"
    link.symlink_to(os.devnull)
    assert read_file(link) == b""
    assert "a device, not a regular file" in told(lambda: read_file(Path("/dev/zero")))


def test_too_large_a_shared_document_is_read_so_far_that_its_size_can_be_refused(tmp_path: Path) -> None:
    """It is a bad document, not a directory that can't be reached."""
    (tmp_path / NAME).touch()
    os.truncate(tmp_path / NAME, 2 * DOCUMENT_BYTES_MAX)
    found = SharedFile(tmp_path).read("", Stop())
    assert found is not None and len(found.data) == DOCUMENT_BYTES_MAX + 1
