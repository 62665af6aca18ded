"""Archives that change between two looks at them: the registered one, or that of the pinned digest, is unpacked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_frontend.errors import DownloadFailed, InvalidArchive, InvalidWorkflow
from ts_frontend.models.extraction import ExtractLimits, extract
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.store.http import Stop
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.workflows.specification import open_workflow

NAME = "m.mar"
GOOD, EVIL = b"good = 1\n", b"evil = 1\n"
LIMITS = ExtractLimits()
CHANGED = "it was changed"


def zipped(path: Path, code: bytes) -> Path:
    """Both archives have the same size."""
    with zipfile.ZipFile(path, "w") as package:
        manifest = {"model": {"modelName": "m", "handler": "handler.py"}}
        package.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        package.writestr("handler.py", code)
        package.writestr("weights.pt", bytes(2 << 20))  # not in the outline
    return path


def tarred(path: Path, code: bytes) -> Path:
    code_file = path.with_suffix(".py")
    code_file.write_bytes(code)
    with tarfile.open(path, "w:gz") as package:
        package.add(code_file, "handler.py")
    return path


def swap(path: Path, *, in_place: bool) -> None:
    """Puts the other archive there: of the same size and with the same time of change."""
    before = path.stat()
    other = zipped(path.with_name("other"), EVIL)
    if in_place:
        path.write_bytes(other.read_bytes())
        other.unlink()
    else:
        other.replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetched(root: Path, url: str) -> Fetched:
    return asyncio.run(ModelStore(root, ["file://.*"]).fetch(url))


class Meanwhile(Stop):
    """Does something when the archive's first entry is unpacked."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work: Callable[[], object] | None = work

    def check(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


@pytest.mark.parametrize("make", [zipped, tarred])
def test_a_file_that_is_written_while_it_is_unpacked_is_refused(
    tmp_path: Path, make: Callable[[Path, bytes], Path]
) -> None:
    path = make(tmp_path / NAME, GOOD)
    stop = Meanwhile(lambda: os.utime(path, ns=(0, 0)))
    with pytest.raises(InvalidArchive, match=f"{NAME}: {CHANGED} while it was unpacked"):
        Formats().open(path, tmp_path / "work", LIMITS, stop)
    assert not any((tmp_path / "work" / "models").iterdir())


def test_a_file_that_is_replaced_while_it_is_unpacked_is_unpacked_to_its_end(tmp_path: Path) -> None:
    path = zipped(tmp_path / NAME, GOOD)
    (tmp_path / "target").mkdir()
    extract(path, tmp_path / "target", LIMITS, Meanwhile(lambda: os.replace(zipped(tmp_path / "x", EVIL), path)))
    assert (tmp_path / "target" / "handler.py").read_bytes() == GOOD


def test_a_pinned_file_that_is_written_while_it_is_unpacked_is_refused(tmp_path: Path) -> None:
    """Whatever its times say, and whatever its content is at the end."""
    path = zipped(tmp_path / NAME, GOOD)
    found = fetched(tmp_path, f"{NAME}#sha256={digest(path)}")
    content = path.read_bytes()

    def write() -> None:
        swap(path, in_place=True)
        before = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(InvalidArchive, match=f"{CHANGED} while it was unpacked"):
        Formats().open(found.path, tmp_path / "work", LIMITS, Meanwhile(write), pin=found.pin)


def test_another_file_of_that_name_is_not_the_registered_one(tmp_path: Path) -> None:
    path = zipped(tmp_path / NAME, GOOD)
    archive = Formats().open(path, tmp_path / "work", outline=True)
    assert archive.packed is not None and not archive.packed.whole
    swap(path, in_place=False)
    with pytest.raises(InvalidArchive, match=f"{CHANGED} since the model was registered"):
        archive.packed.unpack()


@pytest.mark.parametrize("in_place", [True, False], ids=["written", "replaced"])
@pytest.mark.parametrize("when", ["before it is opened", "before it is unpacked"])
def test_a_pinned_archive_has_its_digest_when_it_is_unpacked(tmp_path: Path, when: str, in_place: bool) -> None:
    path = zipped(tmp_path / NAME, GOOD)
    found = fetched(tmp_path, f"{NAME}#sha256={digest(path).upper()}")
    formats = Formats()
    refused = pytest.raises(InvalidArchive, match=f"SHA-256 is .*, not |{CHANGED}")
    if when == "before it is opened":
        swap(path, in_place=in_place)
        with refused:
            formats.open(found.path, tmp_path / "work", outline=True, pin=found.pin)
        return
    archive = formats.open(found.path, tmp_path / "work", outline=True, pin=found.pin)
    swap(path, in_place=in_place)
    assert archive.packed is not None
    with refused:
        archive.packed.unpack()


def test_a_pinned_archive_with_other_permissions_is_still_it(tmp_path: Path) -> None:
    path = zipped(tmp_path / NAME, GOOD)
    found = fetched(tmp_path, f"{NAME}#sha256={digest(path)}")
    archive = Formats().open(found.path, tmp_path / "work", outline=True, pin=found.pin)
    path.chmod(0o600)
    assert archive.packed is not None
    archive.packed.unpack()
    assert (archive.dir / "handler.py").read_bytes() == GOOD


def test_a_pinned_copy_has_its_digest_too(tmp_path: Path) -> None:
    """Also at the next start, which finds the copy in the store."""
    root = tmp_path / "store"
    root.mkdir()
    source = zipped(tmp_path / NAME, GOOD)
    url = f"{source.as_uri()}#sha256={digest(source)}"
    found = fetched(root, url)
    assert found.downloaded
    swap(found.path, in_place=True)
    with pytest.raises(InvalidArchive, match="SHA-256 is"):
        Formats().open(found.path, tmp_path / "work", outline=True, pin=found.pin)
    with pytest.raises(DownloadFailed, match="SHA-256 is"):
        asyncio.run(ModelStore(root, ["file://.*"]).recall(url, NAME))


def test_a_pinned_workflow_has_its_digest(tmp_path: Path) -> None:
    path = zipped(tmp_path / NAME, GOOD)
    found = fetched(tmp_path, f"{NAME}#sha256={digest(path)}")
    swap(path, in_place=True)
    with pytest.raises(InvalidWorkflow, match="SHA-256 is"):
        open_workflow(found.path, tmp_path / "work", LIMITS, pin=found.pin)
