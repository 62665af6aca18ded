"""The files behind TLS: which are refused and with which words, and when they are read again."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from support import GUARD_S, openssl
from ts_frontend.listeners.certificates import CertificateFiles, CertificateRefused, Pem, read, validities
from ts_frontend.listeners.sockets import Tls


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs, `a` and `b`, with keys of 2048 bits, an EC pair `e`, and the forms that a.key can have."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("a", "b"):
        openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-days", "100",
                "-keyout", f"{name}.key", "-out", f"{name}.crt")  # fmt: skip
    openssl(folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=e", "-days", "100", "-keyout", "e.key", "-out", "e.crt")  # fmt: skip
    openssl(folder, "rsa", "-in", "a.key", "-traditional", "-out", "a.pkcs1")
    openssl(folder, "ec", "-in", "e.key", "-out", "e.sec1")
    openssl(folder, "rsa", "-in", "a.key", "-aes128", "-passout", "pass:pass", "-out", "encrypted8")
    openssl(folder, "rsa", "-in", "a.key", "-aes128", "-traditional", "-passout", "pass:pass", "-out", "encrypted1")
    openssl(folder, "rsa", "-in", "a.key", "-outform", "DER", "-out", "a.der")
    text = (folder / "a.crt").read_text()
    (folder / "damaged").write_text(text[:200] + "AAAA" + text[204:])
    (folder / "cut").write_text(text[:300] + "\n-----END CERTIFICATE-----\n")
    (folder / "text").write_text("hello\n")
    (folder / "empty").touch()
    (folder / "chain").write_text((folder / "a.crt").read_text() + (folder / "b.crt").read_text())
    return folder


def pair(folder: Path, certificate: str, key: str, client_ca: str | None = None) -> Tls:
    return Tls(str(folder / certificate), str(folder / key), str(folder / client_ca) if client_ca else None)


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        ("a.crt", "b.key", r"private_key_file \S+/b.key: isn't the key of certificate_file \S+/a.crt"),
        ("a.crt", "e.key", r"private_key_file \S+/e.key: isn't the key of"),
        ("missing", "a.key", r"certificate_file \S+/missing: No such file or directory"),
        ("a.crt", "missing", r"private_key_file \S+/missing: No such file or directory"),
        ("a.crt", ".", r"private_key_file \S+: Is a directory"),
        (
            "a.crt",
            "encrypted8",
            r"/encrypted8: is encrypted with a passphrase.* openssl pkey -in \S+/encrypted8 -out key.pem",
        ),
        ("a.crt", "encrypted1", r"/encrypted1: is encrypted with a passphrase"),
        ("a.key", "a.crt", r"certificate_file \S+/a.key: holds a private key, no certificate"),
        ("a.crt", "b.crt", r"private_key_file \S+/b.crt: holds a certificate, no private key"),
        ("text", "a.key", r"certificate_file \S+/text: is no PEM certificate"),
        ("empty", "a.key", r"certificate_file \S+/empty: is no PEM certificate"),
        ("a.crt", "a.der", r"private_key_file \S+/a.der: is no PEM private key.*-inform DER"),
        ("damaged", "a.key", r"certificate_file \S+/damaged: "),
        ("cut", "a.key", r"certificate_file \S+/cut: a certificate isn't"),
    ],
)
def test_pairs_that_do_not(made: Path, certificate: str, key: str, says: str) -> None:
    with pytest.raises(CertificateRefused, match=says) as caught:
        read(pair(made, certificate, key))
    assert "\n" not in caught.value.message


def test_certificates_that_do_not_count_now_are_a_warning(made: Path) -> None:
    files, now = pair(made, "a.crt", "a.key", "b.crt"), datetime.now(UTC)
    assert read(files, now).warnings == ()
    for later, says in ((90, "expires on"), (101, "expired on"), (-1, "counts only from")):
        warnings = read(files, now + timedelta(days=later)).warnings
        assert [setting.split()[0] for setting in warnings] == ["certificate_file", "client_ca_file"]
        assert all(says in warning for warning in warnings)


def test_a_small_key_is_refused_with_the_size_to_take(tmp_path: Path) -> None:
    openssl(
        tmp_path, "req", "-x509", "-newkey", "rsa:1024", "-nodes", "-subj", "/CN=s", "-keyout", "s.key", "-out", "s.crt"
    )
    with pytest.raises(
        CertificateRefused,
        match=r"/s.key: the key is too small; take RSA of 2048 bits or more, an elliptic curve P-256",
    ):
        read(pair(tmp_path, "s.crt", "s.key"))


def test_a_certificate_beyond_2049(tmp_path: Path) -> None:
    openssl(tmp_path, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=old", "-days", "20000",
            "-keyout", "key", "-out", "crt")  # fmt: skip
    assert validities((tmp_path / "crt").read_bytes())[0].ends.year > 2070


# --- files that change


@pytest.fixture
def files(made: Path, tmp_path: Path) -> CertificateFiles:
    """Copies of pair `a` in tmp_path, read."""
    put(made, tmp_path, "a", "a")
    files = CertificateFiles("test", Tls(str(tmp_path / "crt"), str(tmp_path / "key"), check_s=0.01))
    files.read()
    return files


def put(made: Path, folder: Path, certificate: str, key: str) -> None:
    """Replaces each file as a whole, as tools that renew certificates do."""
    for name, source in (("crt", f"{certificate}.crt"), ("key", f"{key}.key")):
        (folder / "new").write_bytes((made / source).read_bytes())
        (folder / "new").rename(folder / name)


def test_files_are_read_again_when_they_changed(made: Path, files: CertificateFiles, tmp_path: Path) -> None:
    assert files.read_if_changed() is None
    put(made, tmp_path, "b", "b")
    pem = files.read_if_changed()
    assert pem is not None and pem.certificate == (made / "b.crt").read_bytes()
    assert files.read_if_changed() is None


def test_bad_files_are_named_once_and_good_ones_taken_later(
    made: Path, files: CertificateFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(made, tmp_path, "b", "a")
    assert files.read_if_changed() is None
    assert files.read_if_changed() is None
    (tmp_path / "key").unlink()
    assert files.read_if_changed() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "the certificate in use stays" in caplog.text and "isn't the key of" in caplog.text
    put(made, tmp_path, "b", "b")
    assert files.read_if_changed() is not None


def test_following_goes_on_after_a_renewal_that_failed(
    made: Path, files: CertificateFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def follow() -> list[bytes]:
        renewed, enough = [], asyncio.Event()

        async def renew(pem: Pem) -> None:
            renewed.append(pem.certificate)
            if len(renewed) == 1:
                put(made, tmp_path, "e", "e")
                raise RuntimeError("no room")
            enough.set()

        put(made, tmp_path, "b", "b")
        following = asyncio.create_task(files.follow(renew))
        await asyncio.wait_for(enough.wait(), GUARD_S)
        following.cancel()
        return renewed

    assert asyncio.run(follow()) == [(made / "b.crt").read_bytes(), (made / "e.crt").read_bytes()]
    assert "no room" in caplog.text
