"""From a register call's url to a file: the allowed sources, the copies, and the files left by a failure."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import QuietHandler, http_server
from ts_frontend.errors import ArchiveExists, ArchiveNotFound, DownloadFailed, InvalidArgument, ServeError
from ts_frontend.models.store.http import DownloadLimits, DownloadProgress, is_public, new_file, new_folder, open_remote
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.tasks import Stop

DIGEST = hashlib.sha256(b"archive").hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    (store / "dirmodel").mkdir(parents=True)
    (store / "m.mar").write_bytes(b"archive")
    (tmp_path / "outside.mar").write_bytes(b"outside")
    (tmp_path / "outdir").mkdir()
    return store


def fetch(store: ModelStore, url: str) -> Fetched:
    return asyncio.run(store.fetch(url))


def test_paths_and_file_urls_inside_the_store_are_used_in_place(root: Path) -> None:
    store = ModelStore(root)
    for url in (str(root / "m.mar"), (root / "m.mar").as_uri()):
        assert fetch(store, url) == Fetched(root / "m.mar", url, downloaded=False)


def test_of_a_path_elsewhere_the_last_part_counts_as_in_torchserve(root: Path) -> None:
    """The store's own archive is used, whether or not there is one at the path; nothing outside is read."""
    for url in ("/other/m.mar", str(root.parent / "m.mar"), "/m.mar"):
        (root.parent / "m.mar").write_bytes(b"elsewhere")
        assert fetch(ModelStore(root), url).path == root / "m.mar"
    (root / ".hidden.mar").write_bytes(b"")
    for url in ("/other/outside.mar", "/other/.hidden.mar", "/other/dirmodel", "/other/..", "/"):
        with pytest.raises(ServeError):
            fetch(ModelStore(root), url)
    allowed = ModelStore(root, [(root.parent / "m.mar").as_uri()])
    assert fetch(allowed, str(root.parent / "m.mar")).path == root.parent / "m.mar"


@pytest.mark.parametrize("url", ["../outside.mar", "a/../../b", "%2e%2e/outside.mar", "https://x/%252e%252e/y.mar"])
def test_climbing_paths_are_refused_cve_2024_35198(root: Path, url: str) -> None:
    with pytest.raises(ArchiveNotFound) as caught:
        fetch(ModelStore(root, [".*"]), url)
    assert caught.value.message == f"Relative path is not allowed in url: {url}"


@pytest.mark.parametrize(
    ("url", "message"),
    [("", "empty url"), ("none.mar", "Model not found at: none.mar"), (".hidden", "hidden"), (".", "Model not found")],
)
def test_what_is_not_there(root: Path, url: str, message: str) -> None:
    (root / ".hidden").write_bytes(b"")
    with pytest.raises(ArchiveNotFound, match=message):
        fetch(ModelStore(root), url)


def test_links_of_the_store_allow_no_path_beside_it(root: Path) -> None:
    (root / "link.mar").symlink_to(root.parent / "outside.mar")
    for url in (str(root.parent / "outside.mar"), (root.parent / "outside.mar").as_uri(), str(root / "link.mar")):
        with pytest.raises(ArchiveNotFound, match="does not match any allowed"):
            fetch(ModelStore(root), url)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/x.mar",
        "http://example.org/m.mar",  # a file of that name, which an earlier call may have brought, is there
        "https://torchserve.pytorch.org/other/x.mar",
        "https://torchserve.pytorch.org.evil.example/mar_files/x.mar",
        "https://torchserve.pytorch.org/mar_files/a/x.mar",
        "https://torchserve.pytorch.org/jar_files/x.mar",
        "file:///etc/passwd",
        "/etc/passwd",
        "/etc",
    ],
)
def test_urls_nobody_allowed_are_refused_cve_2023_43654(root: Path, url: str) -> None:
    with pytest.raises(ArchiveNotFound) as caught:
        fetch(ModelStore(root), url)
    assert caught.value.message.startswith(f"Given URL {url} does not match any allowed URL(s)")
    assert "allowed_urls" in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "https://good.example@evil.example/x.mar",
        "https://good.example\\@evil.example/x.mar",
        "https://good.example/x .mar",
        "https://good.example/x\n.mar",
        "https://good.example:99999/x.mar",
        "ftp://good.example/x.mar",
        "file://host/x.mar",
        "m.mar#sha256=12",
        "x" * 5000,
    ],
)
def test_urls_that_are_no_urls(root: Path, url: str) -> None:
    with pytest.raises(InvalidArgument, match="url"):
        fetch(ModelStore(root, [".*"]), url)


def test_an_allowed_pattern_must_match_the_whole_url(root: Path) -> None:
    outside = (root.parent / "outside.mar").as_uri()
    with pytest.raises(ArchiveNotFound):
        fetch(ModelStore(root, [outside[:-1]]), outside)
    assert fetch(ModelStore(root, [outside.upper()]), outside).downloaded


def test_a_broken_pattern_is_told(root: Path) -> None:
    with pytest.raises(InvalidArgument, match="allowed_urls"):
        ModelStore(root, ["("])


def test_without_a_store_an_allowed_path_is_used_in_place(root: Path) -> None:
    store = ModelStore(None, [f"{(root / 'dirmodel').as_uri()}.*"])
    assert fetch(store, str(root / "dirmodel")) == Fetched(root / "dirmodel", str(root / "dirmodel"), downloaded=False)
    for url in (str(root / "m.mar"), "dirmodel", str(root / "dirmodel" / "nothing")):
        with pytest.raises(ArchiveNotFound, match=f"Model not found at: {url}"):
            fetch(store, url)


def test_an_allowed_file_is_copied_and_discarded_again(root: Path) -> None:
    store = ModelStore(root, [r"file://.*"])
    fetched = fetch(store, (root.parent / "outside.mar").as_uri())
    assert fetched.path == root / "outside.mar"
    assert fetched.path.read_bytes() == b"outside"
    assert [path.name for path in sorted(root.iterdir())] == ["dirmodel", "m.mar", "outside.mar"]
    with pytest.raises(ArchiveExists, match="^Model file already exists outside.mar$"):
        fetch(store, (root.parent / "outside.mar").as_uri())
    store.discard(fetched)
    store.discard(fetched)
    assert not fetched.path.exists()
    assert (root.parent / "outside.mar").exists()


def test_a_directory_that_the_operator_names_needs_no_permission(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    store, outside = ModelStore(root), root.parent / "outdir"
    for url in (str(outside), outside.as_uri(), "./outdir"):
        fetched = asyncio.run(store.fetch(url, named=True))
        assert (fetched.path, fetched.downloaded, fetched.named) == (outside, False, True)
        again = asyncio.run(store.recall(fetched.url, fetched.recorded, named=True))
        assert again == fetched
        with pytest.raises(ArchiveNotFound):
            fetch(store, url)
    (root / "sub" / "outdir").mkdir(parents=True)
    (root.parent / "sub" / "outdir").mkdir(parents=True)
    assert asyncio.run(store.fetch("sub/outdir", named=True)).path == root / "sub" / "outdir", "the store has it"
    with pytest.raises(ArchiveNotFound, match="does not match any allowed"):
        asyncio.run(store.fetch(str(root.parent / "outside.mar"), named=True))


def test_a_pin_that_does_not_match(root: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(DownloadFailed, match=f"its SHA-256 is {DIGEST}, not {wrong}"):
        fetch(ModelStore(root), f"m.mar#sha256={wrong}")
    with pytest.raises(InvalidArgument, match="directory"):
        fetch(ModelStore(root), f"dirmodel#sha256={wrong}")
    with pytest.raises(DownloadFailed, match="SHA-256"):
        fetch(ModelStore(root, ["file://.*"]), f"{(root.parent / 'outside.mar').as_uri()}#sha256={wrong}")
    assert not (root / "outside.mar").exists()


def test_names_for_all(root: Path) -> None:
    for name in ("b.model", "c.tar.gz", "d.tgz", "e.war", "f.txt", ".download-1.mar", "index.html"):
        (root / name).write_bytes(b"")
    (root / ".git").mkdir()
    assert ModelStore(root).names() == ["b.model", "c.tar.gz", "d.tgz", "dirmodel", "m.mar"]
    assert ModelStore(None).names() == []


def test_broken_entries_count_and_their_loads_name_the_error(root: Path) -> None:
    (root / "loop.mar").symlink_to("loop.mar")
    (root / "gone.mar").symlink_to(root.parent / "gone.mar")
    (root / "folder").symlink_to("folder")
    (root / "text.txt").symlink_to("gone.txt")
    os.mkfifo(root / "pipe.mar")
    store = ModelStore(root)
    assert store.names() == ["dirmodel", "folder", "gone.mar", "loop.mar", "m.mar", "pipe.mar"]
    assert [one.name for one in store.models()] == []
    for name, why in (
        ("loop.mar", r"Too many levels of symbolic links"),
        ("folder", r"Too many levels of symbolic links"),
        ("gone.mar", rf"a link to {root.parent}/gone.mar, which is missing"),
        ("pipe.mar", r"it is neither a file nor a directory"),
    ):
        with pytest.raises(ArchiveNotFound, match=f"{name} \\({why}"):
            fetch(store, name)


def test_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(ArchiveNotFound, match="no model store"):
        fetch(ModelStore(None), "m.mar")
    (tmp_path / "x.mar").write_bytes(b"")
    with pytest.raises(DownloadFailed, match="no model store"):
        fetch(ModelStore(None, ["file://.*"]), (tmp_path / "x.mar").as_uri())


# --- over HTTP


@dataclass
class Site:
    """A web server on a free port: paths lead to (status, headers, body)."""

    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    held: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            status, headers, body = site.answers.get(self.path, (404, {}, b""))
            self.answer(status, body, headers)
            if self.path == "/held.mar":
                site.asked.set()
                site.held.wait(30)

    with http_server(Handler) as url:
        site.port = int(url.rpartition(":")[2])
        yield site
        site.held.set()


def everything(root: Path, **limits: float) -> ModelStore:
    return ModelStore(root, [r"https?://.*"], limits=DownloadLimits(**limits))  # type: ignore[arg-type]


def partials(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".")]


def test_a_download(root: Path, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.answers["/dir/new.mar?token=secret"] = (200, {}, b"archive")
    url = site.url("/dir/new.mar?token=secret")
    with caplog.at_level(logging.INFO, "ts_frontend.models"):
        fetched = fetch(everything(root), f"{url}#sha256={DIGEST.upper()}")
    assert fetched.path == root / "new.mar"
    assert fetched.path.read_bytes() == b"archive"
    assert fetched.downloaded
    assert partials(root) == []
    assert "Downloaded new.mar: 0.0 MB" in caplog.text
    assert "secret" not in caplog.text


def test_redirects_elsewhere_are_refused(root: Path, site: Site) -> None:
    site.answers["/a.mar"] = (302, {"Location": "/secret"}, b"")
    site.answers["/secret"] = (200, {}, b"metadata")
    site.answers["/f.mar"] = (302, {"Location": "file:///etc/passwd"}, b"")
    site.answers["/u.mar"] = (302, {"Location": f"http://127.0.0.1:{site.port}@evil.example/"}, b"")
    site.answers["/loop.mar"] = (302, {"Location": "/loop.mar"}, b"")
    only = ModelStore(root, [r"http://127\.0\.0\.1:\d+/\w+\.mar"])
    with pytest.raises(ArchiveNotFound, match="secret does not match any allowed URL"):
        fetch(only, site.url("/a.mar"))
    with pytest.raises(DownloadFailed, match="file:///etc/passwd"):
        fetch(everything(root), site.url("/f.mar"))
    with pytest.raises(InvalidArgument, match="without user"):
        fetch(everything(root), site.url("/u.mar"))
    with pytest.raises(DownloadFailed, match="redirects"):
        fetch(everything(root), site.url("/loop.mar"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, {}, b"gone"), "404"),
        ((200, {"Content-Length": "99"}, b"short"), "ended after 5 of 99 bytes|more expected"),
        ((200, {"Content-Length": "2000"}, b""), "download_bytes_max"),
        ((200, {}, b"x" * 1001), "download_bytes_max"),
        ((302, {}, b""), "302"),
    ],
)
def test_downloads_that_fail_leave_nothing(root: Path, site: Site, answer: object, reason: str) -> None:
    site.answers["/x.mar"] = answer  # type: ignore[assignment]
    with pytest.raises(DownloadFailed, match=reason) as caught:
        fetch(everything(root, bytes_max=1000), site.url("/x.mar"))
    assert caught.value.message.startswith(f"Failed to download archive from: {site.url('/x.mar')}")
    assert partials(root) == []
    assert not (root / "x.mar").exists()


def test_a_body_of_unknown_length_is_bounded_too(root: Path, site: Site) -> None:
    site.answers["/x.mar"] = (200, {"Content-Length": ""}, b"x" * 5000)
    with pytest.raises(DownloadFailed, match="download_bytes_max"):
        fetch(everything(root, bytes_max=1000), site.url("/x.mar"))


def test_nobody_listens(root: Path, site: Site) -> None:
    with pytest.raises(DownloadFailed, match="^Failed to download archive from: http://127.0.0.1:1/x.mar: "):
        fetch(everything(root), "http://127.0.0.1:1/x.mar")


def test_a_server_that_falls_silent(root: Path, site: Site) -> None:
    site.answers["/held.mar"] = (200, {"Content-Length": "99"}, b"some")
    with pytest.raises(DownloadFailed, match="timed out"):
        fetch(everything(root, timeout_s=0.1), site.url("/held.mar"))
    assert partials(root) == []


def test_a_caller_who_leaves_ends_the_download(root: Path, site: Site) -> None:
    site.answers["/held.mar"] = (200, {"Content-Length": "99"}, b"some")

    async def leave() -> None:
        task = asyncio.create_task(everything(root).fetch(site.url("/held.mar")))
        await asyncio.to_thread(site.asked.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())  # waits for the thread, which must not wait for the server
    assert sorted(os.listdir(root)) == ["dirmodel", "m.mar"]


@pytest.mark.parametrize("new", [new_file, new_folder])
def test_a_full_disk_is_told_with_its_directory(tmp_path: Path, new: Callable[[Path], Any]) -> None:
    told = rf"No space left on device; make room in {tmp_path}"
    with pytest.raises(OSError, match=told), new(tmp_path / "m.mar"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_two_downloads_of_one_name(root: Path, site: Site) -> None:
    site.answers["/x.mar"] = (200, {}, b"archive")

    async def both() -> list[Fetched | BaseException]:
        store = everything(root)
        calls = (store.fetch(site.url("/x.mar")) for _ in range(4))
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(both())
    assert sum(isinstance(outcome, Fetched) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, ArchiveExists) for outcome in outcomes) == 3
    assert partials(root) == []


@pytest.mark.parametrize("path", ["/", "/a/", "/.mar", "/a%2fb.mar", "/%0a.mar", "/" + "x" * 300])
def test_the_last_segment_must_be_a_file_name(root: Path, site: Site, path: str) -> None:
    with pytest.raises(DownloadFailed, match="last part of its path"):
        fetch(everything(root), site.url(path))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::a00:1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_an_address_that_is_not_public_needs_the_operators_word(root: Path, site: Site) -> None:
    answer = open_remote(site.url("/x.mar"), lambda url: False, DownloadLimits(), Stop())
    with pytest.raises(OSError, match="not a public address; allowed_urls"), answer:
        pass


def test_progress_tells_share_or_size_every_few_seconds() -> None:
    known, unknown = DownloadProgress("m.mar", 200_000_000, 10.0), DownloadProgress("m.mar", None, 10.0)
    assert known.line(1, 11.9) is None
    assert known.line(50_000_000, 12.0) == "Downloading m.mar: 25 % of 200.0 MB, 25.0 MB/s"
    assert known.line(60_000_000, 13.0) is None
    assert unknown.line(3_000_000, 12.0) == "Downloading m.mar: 3.0 MB, 1.5 MB/s"
    assert known.summary(200_000_000, 20.0) == "Downloaded m.mar: 200.0 MB, 20.0 MB/s"


def test_kinds_of_errors_have_their_statuses() -> None:
    kinds: list[type[ServeError]] = [ArchiveNotFound, ArchiveExists, DownloadFailed]
    assert [kind.http_status for kind in kinds] == [404, 500, 400]
