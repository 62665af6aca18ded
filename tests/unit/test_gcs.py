"""Models from Google Cloud Storage, by its own library, from a server that speaks its JSON API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from support import QuietHandler, http_server
from ts_frontend.errors import ArchiveNotFound, DownloadFailed, InvalidArchive, InvalidArgument, UrlForbidden
from ts_frontend.models.store.store import ModelStore

PAGE = 2
#: Google's library recommends a package at its import.
pytestmark = pytest.mark.filterwarnings("ignore::ImportWarning", "ignore::FutureWarning")


class Storage:
    """One bucket, `models`. `changed`: the object gets other content after it was listed. `denied`: all is 403."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.generation = 1
        self.denied = False
        self.asked: list[str] = []

    def answer(self, target: str) -> tuple[int, Any]:
        self.asked.append(target)
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/download").removeprefix("/storage/v1/b/")
        bucket, _, rest = path.partition("/o")
        if self.denied:
            return 403, {"error": {"code": 403, "message": "not allowed"}}
        if bucket != "models":
            return 404, {"error": {"code": 404, "message": "no such bucket"}}
        if not rest:
            return 200, self._listed(query)
        key = unquote(rest[1:])
        generation = int(query.get("generation", self.generation))
        if key not in self.objects or generation != self.generation:
            return 404, {"error": {"code": 404, "message": f"No such object: {key}"}}
        return (200, self.objects[key]) if query.get("alt") == "media" else (200, self._described(key))

    def _described(self, key: str) -> dict[str, str]:
        size = str(len(self.objects[key]))
        return {"name": key, "bucket": "models", "size": size, "generation": str(self.generation)}

    def _listed(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        if delimiter:
            below = {key[len(prefix) :].partition(delimiter)[0] for key in keys if delimiter in key[len(prefix) :]}
            return {"prefixes": [f"{prefix}{one}{delimiter}" for one in sorted(below)]}
        begin = int(query.get("pageToken", 0))
        more = {"nextPageToken": str(begin + PAGE)} if begin + PAGE < len(keys) else {}
        return {"items": [self._described(key) for key in keys[begin : begin + PAGE]], **more}


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    found = Storage()

    class Answer(QuietHandler):
        def do_GET(self) -> None:
            status, value = found.answer(self.path)
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            begin, last = 0, len(body) - 1
            asked = self.headers.get("Range")
            if asked and isinstance(value, bytes) and status == 200:
                begin, last = (int(word) for word in asked.removeprefix("bytes=").split("-"))
                last = min(last, len(body) - 1)
                status = 206
            headers = {"content-range": f"bytes {begin}-{last}/{len(body)}", "content-type": "application/json"}
            self.answer(status, body[begin : last + 1], headers)

    with http_server(Answer) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield found


def store(tmp_path: Path) -> ModelStore:
    (tmp_path / "store").mkdir(exist_ok=True)
    return ModelStore(tmp_path / "store", ["gs://models/.*", "gs://none/.*"], copies=tmp_path / "copies")


async def test_an_object_is_an_archive(storage: Storage, tmp_path: Path) -> None:
    storage.objects["a/m.mar"] = bytes(range(256)) * 1000
    fetched = await store(tmp_path).fetch("gs://models/a/m.mar")
    assert fetched.path.read_bytes() == storage.objects["a/m.mar"] and fetched.path.name == "m.mar"


async def test_objects_below_a_prefix_are_a_folder(storage: Storage, tmp_path: Path) -> None:
    storage.objects = {f"net/{name}": name.encode() for name in ("a", "b", "code/c", "d", "e")} | {"net/code/": b""}
    storage.objects["network/x"] = b"another"
    fetched = await store(tmp_path).fetch("gs://models/net")
    files = sorted(str(one.relative_to(fetched.path)) for one in fetched.path.rglob("*") if one.is_file())
    assert files == ["a", "b", "code/c", "d", "e"]
    assert (fetched.path / "code" / "c").read_bytes() == b"code/c"
    assert await store(tmp_path).folders("gs://models/") == ["net", "network"]


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("gs://models/nothing", ArchiveNotFound, "the bucket has nothing there"),
        ("gs://none/nothing", ArchiveNotFound, "no bucket none"),
        ("gs://other/m.mar", UrlForbidden, "does not match any allowed URL"),
        ("gs://a b/m.mar", InvalidArgument, "a blank"),
        ("gs://", InvalidArgument, "gs://BUCKET/PREFIX"),
        ("gs://models/bad", InvalidArchive, "leads out"),
    ],
)
async def test_wrong_urls_leave_nothing(
    storage: Storage, tmp_path: Path, url: str, error: type[Exception], said: str
) -> None:
    storage.objects["bad/../../x"] = b"outside"
    with pytest.raises(error, match=said):
        await store(tmp_path).fetch(url)
    assert list((tmp_path / "store").iterdir()) == []


async def test_denied_access_says_so(storage: Storage, tmp_path: Path) -> None:
    storage.denied = True
    with pytest.raises(DownloadFailed, match="Google credentials don't allow it"):
        await store(tmp_path).fetch("gs://models/a/m.mar")


async def test_without_credentials_the_error_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(DownloadFailed, match="GOOGLE_APPLICATION_CREDENTIALS"):
        await store(tmp_path).fetch("gs://models/a/m.mar")
