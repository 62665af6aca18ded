"""Archives: their content, what is refused, and files that are swapped meanwhile."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ArchiveNotFound, DownloadFailed, InvalidArchive
from ts_frontend.models.archive import (
    OUTLINE_BYTES_MAX,
    Archive,
    ExtractLimits,
    PackedFiles,
    extract,
    not_unpacked,
    parse_config,
    safe_parts,
    unpack_to,
)
from ts_frontend.models.formats.formats import Formats, known_formats
from ts_frontend.models.store.store import Fetched, ModelStore

FORMATS = known_formats(ServerConfig(), env={}, work_dir=Path(), gpus=0)
MANIFEST = {
    "createdOn": "01/02/2026 03:04:05",
    "runtime": "python",
    "model": {
        "modelName": "probe",
        "serializedFile": "model.pt",
        "handler": "handler.py",
        "modelFile": "net.py",
        "modelVersion": "2.1",
        "requirementsFile": "requirements.txt",
        "configFile": "model-config.yaml",
    },
    "archiverVersion": "0.12.0",
}
FILES = {
    "MAR-INF/MANIFEST.json": json.dumps(MANIFEST).encode(),
    "handler.py": b"def handle(data, context): ...",
    "model-config.yaml": b"batchSize: 4\nhandler: {profile: true}\n",
    "assets/deep/labels.json": b"{}",
}


def zipped(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as package:
        for name, data in files.items():
            package.writestr(name, data)
    return path


def tarred(path: Path, files: dict[str, bytes], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as package:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            package.addfile(entry, io.BytesIO(data))
    return path


def folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def below(top: str) -> dict[str, bytes]:
    return {f"{top}/{name}": data for name, data in FILES.items()}


FORMS: dict[str, Callable[[Path], Path]] = {
    "mar": lambda tmp: zipped(tmp / "x.mar", FILES),
    "stored mar": lambda tmp: zipped(tmp / "x.mar", FILES, zipfile.ZIP_STORED),
    "tgz": lambda tmp: tarred(tmp / "x.tgz", below("probe")),
    "tar.gz without a first directory": lambda tmp: tarred(tmp / "x.tar.gz", FILES),
    "tar": lambda tmp: tarred(tmp / "x.model", FILES, "w"),
    "mar that is a tar.gz": lambda tmp: tarred(tmp / "x.mar", FILES),
    "directory": lambda tmp: folder(tmp / "x", FILES),
    "directory in a directory": lambda tmp: folder(tmp / "x", below("inner")),
    "zip with ./ and directory entries": lambda tmp: zipped(
        tmp / "x.mar", {"./": b"", "MAR-INF/": b"", "assets/": b"", **{f"./{k}": v for k, v in FILES.items()}}
    ),
    "zip with backslashes": lambda tmp: zipped(tmp / "x.mar", {k.replace("/", "\\"): v for k, v in FILES.items()}),
}


def opened(path: Path, tmp: Path, **limits: Any) -> Archive:
    return FORMATS.open(path, tmp / "work", ExtractLimits(**limits))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same(form: str, tmp_path: Path) -> None:
    archive = opened(FORMS[form](tmp_path), tmp_path)
    found = {str(path.relative_to(archive.dir)): path.read_bytes() for path in archive.dir.rglob("*") if path.is_file()}
    assert found == FILES
    assert (archive.name, archive.version, archive.runtime) == ("probe", "2.1", "python")
    assert (archive.handler, archive.model_file, archive.serialized_file) == ("handler.py", "net.py", "model.pt")
    assert (archive.requirements_file, archive.config_file) == ("requirements.txt", "model-config.yaml")
    assert archive.config == {"batchSize": 4, "handler": {"profile": True}}
    assert archive.manifest == MANIFEST


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ArchiveNotFound, match="Model not found at"):
        opened(tmp_path / "x.mar", tmp_path)


def test_what_is_optional(tmp_path: Path) -> None:
    archive = opened(zipped(tmp_path / "x.mar", {"a.py": b""}), tmp_path)
    assert (archive.name, archive.version, archive.runtime, archive.handler) == (None, "1.0", "python", None)
    assert (archive.manifest, archive.config) == ({}, {})
    manifest = {"model": {"modelVersion": 2, "configFile": "gone.yaml", "handler": "", "modelFile": None}}
    archive = opened(zipped(tmp_path / "y.mar", {"MAR-INF/MANIFEST.json": json.dumps(manifest).encode()}), tmp_path)
    assert (archive.version, archive.config, archive.handler, archive.model_file) == ("2", {}, None, None)


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "must be a JSON object"),
        (b" " * (1 << 20) + b"{}", "larger than"),
        (b'{"model": 3}', "'model' must be an object"),
        (b'{"model": {"modelName": 3}}', "'modelName' must be a text"),
        (b'{"model": {"serializedFile": "../../etc/passwd"}}', "'..'"),
        (b'{"model": {"configFile": "/etc/passwd"}}', "absolute"),
        (b'{"runtime": "LSP"}', "C\\+\\+ backend"),
        (b'{"runtime": "java"}', "runtime 'java' is unknown"),
        (b'{"runtime": 3}', "'runtime' must be a text"),
    ],
)
def test_manifests_that_can_not_be_meant(manifest: bytes, reason: str, tmp_path: Path) -> None:
    refused(zipped(tmp_path / "x.mar", {"MAR-INF/MANIFEST.json": manifest}), tmp_path, reason)
    with pytest.raises(InvalidArchive, match=reason):
        opened(folder(tmp_path / "dir", {"MAR-INF/MANIFEST.json": manifest}), tmp_path)


def refused(path: Path, tmp: Path, reason: str, **limits: Any) -> str:
    """The archive is refused, its name is told, and nothing of it stays."""
    with pytest.raises(InvalidArchive, match=reason) as caught:
        opened(path, tmp, **limits)
    assert path.name in caught.value.message
    assert os.listdir(tmp / "work" / "models") == []
    return caught.value.message


# --- model-config.yaml


def bomb(levels: int, width: int = 10) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def merge_bomb(levels: int, width: int = 10) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * width)}]}}" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "not usable as YAML"),
        ("- 1", "must be keys with values"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        (bomb(9), "aliases written out"),
        (merge_bomb(9), "aliases written out"),
        ("a: &a " + "x" * 100_000 + "\nb: [" + "*a," * 1000 + "]", "aliases written out"),
        ("a: &a [*a]", "an alias stands inside"),
        ("[" * 600, "not usable as YAML"),
        ("a: " + "9" * 5000, "a number of 5000 characters"),
        ("batchSize: 0b" + "1" * 900_000, "a number of 900002 characters"),
        ("a: 1" + ":1" * 20_000, "a number of 40001 characters"),
        ("x" * (1 << 20) + "y", "larger than"),
    ],
    ids=[
        "syntax",
        "list",
        "object",
        "bomb",
        "merge bomb",
        "text bomb",
        "ring",
        "deep",
        "digits",
        "bits",
        "sixties",
        "large",
    ],
)
def test_configurations_that_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    files = FILES | {"model-config.yaml": text.encode()}
    assert "model-config.yaml" in refused(zipped(tmp_path / "x.mar", files), tmp_path, reason)


def test_configurations_may_use_aliases_and_be_empty() -> None:
    assert parse_config("a: &a [1, 2]\nb: *a\nc: *a") == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    assert parse_config("base: &b {x: 1}\nmore: {<<: *b, y: 2}")["more"] == {"x": 1, "y": 2}
    assert parse_config("") == parse_config("# nothing") == parse_config("---\n") == parse_config("null") == {}


# --- hostile names


HOSTILE_NAMES = [
    ("../evil.py", "'..'"),
    ("a/../../evil.py", "'..'"),
    ("..\\evil.py", "'..'"),
    ("a\\..\\..\\evil.py", "'..'"),
    ("/etc/evil.py", "absolute"),
    ("\\\\host\\evil.py", "absolute"),
    ("C:\\evil.py", "absolute"),
    ("c:evil.py", "absolute"),
    ("a\nb.py", "control characters"),
    ("a\x7fb.py", "control characters"),
    ("x" * 256, "too long"),
    ("/".join(["abcdefgh"] * 200), "too long"),
]


@pytest.mark.parametrize(("name", "reason"), HOSTILE_NAMES)
def test_names_that_lead_out_or_astray(name: str, reason: str, tmp_path: Path) -> None:
    message = refused(zipped(tmp_path / "x.mar", {"ok.py": b"", name: b"evil"}), tmp_path, reason)
    assert "entry '" in message
    refused(tarred(tmp_path / "x.tar.gz", {"ok.py": b"", name: b"evil"}), tmp_path, reason)
    assert not (tmp_path / "evil.py").exists()


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tgz", "w:gz", format=tarfile.GNU_FORMAT) as package:
        package.addfile(tarfile.TarInfo("caf\udce9"), io.BytesIO())
    refused(tmp_path / "x.tgz", tmp_path, "UTF-8")


@given(st.text(max_size=40))
def test_whatever_the_name_the_path_stays_inside(name: str) -> None:
    root = Path("/models/x")
    try:
        parts = safe_parts(Path("x.mar"), name)
    except InvalidArchive:
        return
    assert Path(os.path.normpath(root.joinpath(*parts))).is_relative_to(root)
    assert len(root.joinpath(*parts).parts) == len(root.parts) + len(parts)


# --- hostile kinds


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_zip_entries_that_are_no_files(kind: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.mar", "w") as package:
        info = zipfile.ZipInfo("link")
        info.external_attr = (kind | 0o777) << 16
        package.writestr(info, "/etc/passwd")
    refused(tmp_path / "x.mar", tmp_path, "links aren't allowed|only files and directories")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, b"S"]
)
@pytest.mark.parametrize("target", ["/etc/passwd", "ok.py"])
def test_tar_entries_that_are_no_files(kind: bytes, target: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as package:
        package.addfile(tarfile.TarInfo("ok.py"), io.BytesIO())
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = kind, target
        package.addfile(entry)
    refused(tmp_path / "x.tgz", tmp_path, "links aren't allowed|only files and directories|sparse")


def test_pax_sparse_files_and_huge_headers(tmp_path: Path) -> None:
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a", "GNU.sparse.realsize": "9"}
    for number, headers in enumerate((sparse, {"GNU.sparse.map": "0,1"}, {"comment": "x" * (2 << 20)})):
        path = tmp_path / f"{number}.tgz"
        with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as package:
            entry = tarfile.TarInfo("a")
            entry.pax_headers = headers
            package.addfile(entry, io.BytesIO())
        refused(path, tmp_path, "sparse|a header of")


def test_encrypted_entries(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.mar", {"a": b"secret"})
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    refused(path, tmp_path, "encrypted")


# --- too much


def test_too_many_files(tmp_path: Path) -> None:
    many = {f"f{i}": b"" for i in range(11)}
    refused(zipped(tmp_path / "x.mar", many), tmp_path, "more than 10 entries; extract_files_max", files_max=10)
    with pytest.raises(InvalidArchive, match="more than 10 entries"):  # before any of them is written
        extract(tmp_path / "x.mar", tmp_path / "nowhere", ExtractLimits(files_max=10))
    assert not (tmp_path / "nowhere").exists()
    refused(tarred(tmp_path / "x.tgz", many), tmp_path, "more than 10 entries; extract_files_max", files_max=10)


def test_too_many_bytes(tmp_path: Path) -> None:
    big = {"big": os.urandom(5000)}
    refused(zipped(tmp_path / "x.mar", big), tmp_path, "more than 4000 bytes; extract_bytes_max", bytes_max=4000)
    refused(tarred(tmp_path / "x.tgz", big), tmp_path, "more than 4000 bytes; extract_bytes_max", bytes_max=4000)


def test_bombs_by_ratio_and_a_floor_for_small_ones(tmp_path: Path) -> None:
    zeros = {"zeros": b"\0" * 300_000}
    for path in (zipped(tmp_path / "x.mar", zeros), tarred(tmp_path / "x.tgz", zeros)):
        refused(path, tmp_path, "100 times.*extract_ratio_max", ratio_max=100, ratio_floor_bytes=100_000)
        opened(path, tmp_path, ratio_max=100, ratio_floor_bytes=400_000).remove()


def test_a_zip_that_lies_about_its_sizes(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.mar", {"zeros": b"\0" * 300_000})
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 300_000), struct.pack("<I", 10)))
    refused(path, tmp_path, "damaged|extract_ratio_max", ratio_max=100, ratio_floor_bytes=100_000)


def test_a_zip_directory_that_would_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    with zipfile.ZipFile(path, "w") as package:
        for index in range(40):
            info = zipfile.ZipInfo(f"f{index}")
            info.comment = b"x" * 60_000
            package.writestr(info, b"")
    refused(path, tmp_path, "extract_files_max", files_max=100)


# --- damaged


@pytest.mark.parametrize("content", [b"", b"junk data", b"PK\x03\x04", b"\x1f\x8b", b"\x1f\x8b\x08\0junk"])
def test_files_that_are_no_archives(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(content)
    refused(path, tmp_path, "neither a zip|damaged|can't be read")


def test_archives_cut_short_anywhere(tmp_path: Path) -> None:
    noise = FILES | {"noise": os.urandom(2000)}
    for name, make in (("x.mar", zipped), ("x.tgz", tarred)):
        whole = make(tmp_path / f"whole-{name}", noise).read_bytes()
        for size in range(0, len(whole) - 1200, 97):
            (tmp_path / name).write_bytes(whole[:size])
            refused(tmp_path / name, tmp_path, "damaged|neither|can't be read")


# --- programs

PROGRAM = "import os\nfrom aissemble_open_inference_protocol_kserve.aissemble_oip_kserve import AissembleOIPKServe\n"


def test_a_program_is_used_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(PROGRAM)
    (tmp_path / "requirements.txt").touch()
    for path in (tmp_path, tmp_path / "main.py"):
        archive = FORMATS.open(path, tmp_path / "work")
        assert (archive.adapter, archive.name, archive.dir) == ("program", None, tmp_path)
        assert archive.packed is None and archive.remembered and archive.requirements_file == "requirements.txt"
        assert archive.adapter_settings["directory"] == str(tmp_path)


def test_the_operators_program_runs_where_the_server_does(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "main.py").write_text(PROGRAM)
    for path in (folder, folder / "main.py"):
        archive = FORMATS.open_in_place(path, ["--times=3"], tmp_path)
        adapted = archive.adapter_settings
        assert (adapted["argv"], adapted["directory"], adapted["path"]) == (["--times=3"], str(tmp_path), [str(folder)])
        assert not archive.remembered
    with pytest.raises(ArchiveNotFound, match="Program not found at"):
        FORMATS.open_in_place(folder / "other.py", [], tmp_path)


# --- the outline of an archive, and its files when they are needed

WEIGHTS_BYTES = OUTLINE_BYTES_MAX + 100


def packed(path: Path, work_dir: Path) -> tuple[Archive, PackedFiles]:
    archive = FORMATS.open(path, work_dir, outline=True)
    assert archive.packed is not None
    return archive, archive.packed


def weighty(path: Path, data: bytes | None = None) -> Path:
    return zipped(path, {**FILES, "model.pt": os.urandom(WEIGHTS_BYTES) if data is None else data})


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_an_outline_without_large_files_is_the_whole(tmp_path: Path, pack: Any) -> None:
    """A tar file has no directory: it is unpacked, whatever its files' sizes are."""
    more = {"model.pt": os.urandom(WEIGHTS_BYTES)} if pack is tarred else {}
    archive, files = packed(pack(tmp_path / "probe.mar", {**FILES, **more}), tmp_path / "work")
    assert files.whole
    before = archive.dir.stat().st_ino
    files.unpack()
    assert archive.dir.stat().st_ino == before, "nothing was unpacked again"


@pytest.mark.parametrize("change", ["written anew", "deleted"])
def test_files_that_are_needed_come_from_the_archive_that_was_opened(tmp_path: Path, change: str) -> None:
    path = weighty(tmp_path / "probe.mar")
    archive, files = packed(path, tmp_path / "work")
    files.put_away()
    assert not archive.dir.exists()
    if change == "deleted":
        path.unlink()
        error: Any = pytest.raises(ArchiveNotFound, match="probe.mar")
    else:
        zipped(path, {**FILES, "model.pt": b"other"})
        error = pytest.raises(InvalidArchive, match="it was changed since the model was registered")
    with error:
        files.unpack()
    assert not archive.dir.exists()


async def test_callers_that_need_the_files_share_one_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves doesn't end it for the others; a failure is tried again by the next."""
    path = weighty(tmp_path / "probe.mar")
    content = path.read_bytes()
    archive, files = packed(path, tmp_path / "work")
    files.put_away()
    times = path.stat()
    path.write_bytes(content[:-300] + bytes(300))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    calls = []

    def counted(*words: Any, **more: Any) -> bool:
        calls.append(words)
        return unpack_to(*words, **more)

    monkeypatch.setattr("ts_frontend.models.archive.unpack_to", counted)
    failures = await asyncio.gather(files.needed(), files.needed(), return_exceptions=True)
    assert [type(one) for one in failures] == [InvalidArchive] * 2 and len(calls) == 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    leaving, staying = asyncio.create_task(files.needed()), asyncio.create_task(files.needed())
    await asyncio.sleep(0)
    leaving.cancel()
    await staying
    assert isinstance((await asyncio.gather(leaving, return_exceptions=True))[0], asyncio.CancelledError)
    await files.needed()
    assert len(calls) == 2
    assert (archive.dir / "model.pt").stat().st_size == WEIGHTS_BYTES


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "; make room there, or set another temp_dir"), (errno.EACCES, "")]
)
def test_a_full_disk_is_told_with_the_setting(number: int, remedy: str) -> None:
    error = not_unpacked(Path("store/m.mar"), Path("/scratch"), OSError(number, os.strerror(number)))
    assert error.message == f"Could not unpack store/m.mar to /scratch: {os.strerror(number)}{remedy}"


NAME = "m.mar"
GOOD, EVIL = b"good = 1\n", b"evil = 1\n"


def of_equal_size(path: Path, code: bytes) -> Path:
    """Both archives have the same size."""
    with zipfile.ZipFile(path, "w") as package:
        manifest = {"model": {"modelName": "m", "handler": "handler.py"}}
        package.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        package.writestr("handler.py", code)
        package.writestr("weights.pt", bytes(2 << 20))  # not in the outline
    return path


def swap(path: Path, *, in_place: bool) -> None:
    """Puts the other archive there: of the same size and with the same time of change."""
    before = path.stat()
    other = of_equal_size(path.with_name("other"), EVIL)
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


def test_a_pinned_archive_with_other_permissions_is_still_it(tmp_path: Path) -> None:
    path = of_equal_size(tmp_path / NAME, GOOD)
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
    source = of_equal_size(tmp_path / NAME, GOOD)
    url = f"{source.as_uri()}#sha256={digest(source)}"
    found = fetched(root, url)
    assert found.downloaded
    swap(found.path, in_place=True)
    with pytest.raises(InvalidArchive, match="SHA-256 is"):
        Formats().open(found.path, tmp_path / "work", outline=True, pin=found.pin)
    with pytest.raises(DownloadFailed, match="SHA-256 is"):
        asyncio.run(ModelStore(root, ["file://.*"]).recall(url, NAME))
