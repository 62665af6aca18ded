"""Models from S3, without a server: the meaning of URLs, and servers that send nothing. With a server that speaks S3:
tests/e2e/clients/test_s3_models.py."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import GUARD_S
from ts_frontend.errors import ArchiveNotFound, DownloadFailed
from ts_frontend.models.store import objects
from ts_frontend.models.store.http import DownloadLimits
from ts_frontend.models.store.store import ModelStore
from ts_frontend.tasks import Stop

URL = "s3://models/a/m.mar"
SETTINGS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No account of this machine is used."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """An endpoint that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(GUARD_S)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener


def store(root: Path, **limits: float) -> ModelStore:
    downloads = DownloadLimits(**limits)  # type: ignore[arg-type]
    return ModelStore(root, ["s3://models/.*"], limits=downloads, copies=root.parent / "copies")


def test_a_path_that_climbs_is_refused(root: Path) -> None:
    with pytest.raises(ArchiveNotFound, match="Relative path"):
        asyncio.run(store(root).fetch("s3://models/a/../b"))


def test_the_missing_package_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(DownloadFailed, match=r'boto3, which is not installed: pip install "torchrelay\[s3\]"'):
        asyncio.run(store(root).fetch(URL))


def test_missing_credentials_are_named(root: Path, silent: socket.socket) -> None:
    for fetch in (store(root).fetch, store(root).fetch_apart):
        with pytest.raises(DownloadFailed, match="no AWS credentials were found: set AWS_ACCESS_KEY_ID"):
            asyncio.run(fetch(URL))
    assert not list(root.iterdir()) and not list((root.parent / "copies").iterdir())


@pytest.mark.usefixtures("account", "silent")
def test_a_download_may_not_take_for_ever(root: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"it took more than 0\.2 s; download_total_timeout_s"):
        asyncio.run(store(root, total_s=0.2).fetch(URL))


@pytest.mark.usefixtures("account")
def test_a_signed_url() -> None:
    headers = objects.signed("https://models.s3.eu-west-1.amazonaws.com/m.mar", Stop())
    assert headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=who/")
    assert "/eu-west-1/s3/aws4_request, SignedHeaders=host;x-amz-content-sha256;x-amz-date" in headers["Authorization"]
    assert "secret" not in str(headers)


def test_signing_needs_an_account_and_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadFailed, match="AWS_ACCESS_KEY_ID"):
        objects.signed("https://models.s3.amazonaws.com/m.mar", Stop())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(DownloadFailed, match="AWS_DEFAULT_REGION"):
        objects.signed("https://models.s3.amazonaws.com/m.mar", Stop())
