"""A whole server's addresses: TLS, client certificates, Unix sockets, IPv6; and the message for bad ones."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from e2e.servers import issue, write_model
from support import GUARD_S, http_call, openssl
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import ListModelsRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

HANDLER = (
    "def handle(data, context):\n    return [bytes(row['body' if 'body' in row else 'data']) for row in data or []]\n"
)
STREAMING = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return []
    for number in range(3):
        send_intermediate_predict_response([f"{number} "], context.request_ids, "more", 200, context)
    return ["end"]
"""


def tls_settings(certificates: Path, **more: object) -> dict[str, object]:
    return {"certificate_file": certificates / "server.crt", "private_key_file": certificates / "server.key", **more}


MODELS = ("--ncs", "--models", "echo", "pieces")


def write_models(store: Path) -> None:
    for name, handler in (("echo", HANDLER), ("pieces", STREAMING)):
        write_model(store, name, handler)


def client_context(certificates: Path, name: str | None = None) -> ssl.SSLContext:
    """Trusts the authority; with a certificate of its own if `name` says which."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    if name:
        context.load_cert_chain(certificates / f"{name}.crt", certificates / f"{name}.key")
    return context


def ask(
    port: int, method: str, path: str, body: bytes | None = None, *, context: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    """Over https with a context, over http without."""
    kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
    more: dict[str, Any] = {} if context is None else {"context": context}
    connection = kind("127.0.0.1", port, timeout=GUARD_S, **more)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def grpc_credentials(certificates: Path, name: str | None = None) -> grpc.ChannelCredentials:
    own = ((certificates / f"{name}.key").read_bytes(), (certificates / f"{name}.crt").read_bytes()) if name else ()
    return grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes(), *own)


def predict(channel: grpc.Channel, data: bytes = b"x", timeout: float = GUARD_S) -> bytes:
    request = PredictionsRequest(model_name="echo", input={"data": data})
    return bytes(InferenceAPIsServiceStub(channel).Predictions(request, timeout=timeout).prediction)


def announced(log: str, name: str) -> str:
    match = re.search(rf"{name} listens on (.+)", log)
    assert match, log
    return match[1]


# --- TLS


@pytest.fixture(scope="module")
def secured(serving: Any, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """TLS everywhere but on the metrics address."""
    directory = tmp_path_factory.mktemp("secured")
    write_models(directory / "store")
    settings = tls_settings(
        certificates,
        inference_address="https://127.0.0.1:0",
        management_address="https://localhost:0",
        enable_grpc_ssl="true",
    )
    with serving(directory, directory / "store", settings, list(MODELS)) as server:
        yield server


def test_predictions_and_management_over_https(secured: Any, certificates: Path) -> None:
    context = client_context(certificates)
    inference, management = secured.port("http_inference"), secured.port("http_management")
    big = bytes(range(256)) * 20_000
    assert ask(inference, "POST", "/predictions/echo", big, context=context) == (200, big)
    assert ask(inference, "POST", "/predictions/pieces", b"x", context=context) == (200, b"0 1 2 end")
    status, models = ask(management, "GET", "/models", context=context)
    assert status == 200 and b'"echo"' in models


def test_predictions_and_management_over_grpc_with_tls(secured: Any, certificates: Path) -> None:
    trusted = grpc_credentials(certificates)
    with grpc.secure_channel(secured.inference, trusted) as channel:
        assert predict(channel, b"secret") == b"secret"
    with grpc.secure_channel(secured.management, trusted) as channel:
        assert "echo" in ManagementAPIsServiceStub(channel).ListModels(ListModelsRequest(), timeout=GUARD_S).msg


def test_what_is_announced(secured: Any) -> None:
    assert announced(secured.log, "http_inference").startswith("https://127.0.0.1:")
    assert announced(secured.log, "http_management").startswith("https://localhost:")
    assert announced(secured.log, "http_metrics").startswith("http://127.0.0.1:")
    assert announced(secured.log, "grpc_inference") == f"{secured.inference} (TLS)"
    assert re.search(rf"  http_inference +https://127.0.0.1:{secured.port('http_inference')}", secured.log)


def test_plain_words_on_a_tls_address(secured: Any) -> None:
    """Neither answered nor the end of the server."""
    with pytest.raises((ConnectionError, http.client.HTTPException, TimeoutError)):
        ask(secured.port("http_inference"), "GET", "/ping")
    with grpc.insecure_channel(secured.inference) as channel, pytest.raises(grpc.RpcError):
        predict(channel, timeout=5)


def test_old_versions_are_refused_and_http_2_is_offered(secured: Any) -> None:
    port = secured.port("http_inference")
    for version, spoken in (("tls1", False), ("tls1_1", False), ("tls1_2", True), ("tls1_3", True)):
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", f"-{version}", "-alpn", "h2,http/1.1"]
        command += ["-cipher", "ALL:@SECLEVEL=0"]
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GUARD_S).stdout
        assert (b"ALPN protocol: h2" in said) is spoken, said


def test_http_2_with_curl(secured: Any, certificates: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    url = f"https://localhost:{secured.port('http_inference')}/predictions/echo"
    command = [
        curl,
        "-sS",
        "--http2",
        "--cacert",
        str(certificates / "ca.crt"),
        "-w",
        " %{http_version}",
        "-d",
        "hello",
    ]
    command += ["-H", "Content-Type: application/octet-stream", url]
    assert subprocess.run(command, capture_output=True, timeout=GUARD_S).stdout == b"hello 2"
    own = f"https://localhost:{secured.port('http_management')}"
    command = [curl, "-sS", "--http2", "--cacert", str(certificates / "ca.crt"), "-o", "-", "-w", " %{http_code}"]
    for origin, status in ((own, b"200"), ("https://example.org", b"403")):
        done = subprocess.run(
            [*command, "-H", f"Origin: {origin}", f"{own}/models"], capture_output=True, timeout=GUARD_S
        )
        assert done.stdout.endswith(status)


def test_the_commands_speak_tls(secured: Any, certificates: Path, torchserve: Any) -> None:
    ports = [*("--inference-port", str(secured.port("grpc_inference")))]
    ports += ["--management-port", str(secured.port("grpc_management"))]
    done = torchserve("list", *ports, "--ca-file", str(certificates / "ca.crt"))
    assert done.returncode == 0 and "echo" in done.stdout, done.stderr
    assert torchserve("ping", *ports, "--ca-file", str(certificates / "ca.crt")).stdout == "Healthy\n"
    done = torchserve("list", *ports)
    assert done.returncode == 1 and "--ca-file" in done.stderr and "Traceback" not in done.stderr


# --- client certificates, renewal


def test_client_certificates(start: Any, store: Path, certificates: Path, torchserve: Any) -> None:
    write_models(store)
    settings = tls_settings(
        certificates,
        inference_address="https://127.0.0.1:0",
        management_address="https://127.0.0.1:0",
        enable_grpc_ssl="true",
        client_ca_file=certificates / "ca.crt",
    )
    limits = store.parent / "limits.yaml"
    limits.write_text("clients: {ours: {who: 'certificate:localhost', requests_per_second: 1000, burst: 77}}")
    server = start(*MODELS, limits_file=limits, **settings)
    for version in ("1.1", "2"):
        words = ["curl", "-sS", "-D-", f"--http{version}", "--cacert", str(certificates / "ca.crt")]
        words += ["-d", "x", "-H", "content-type: application/octet-stream"]
        words += ["--cert", str(certificates / "client.crt"), "--key", str(certificates / "client.key")]
        url = f"https://127.0.0.1:{server.port('http_inference')}/predictions/echo"
        answer = subprocess.run([*words, url], capture_output=True, text=True, timeout=GUARD_S)
        assert "x-ratelimit-limit-requests: 77" in answer.stdout, answer
    for name in ("http_inference", "http_management"):
        assert (
            ask(server.port(name), "GET", "/api-description", context=client_context(certificates, "client"))[0] == 200
        )
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            ask(server.port(name), "GET", "/api-description", context=client_context(certificates))
    with grpc.secure_channel(server.inference, grpc_credentials(certificates, "client")) as channel:
        assert predict(channel) == b"x"
        request = PredictionsRequest(model_name="echo", input={"data": b"x"})
        _, call = InferenceAPIsServiceStub(channel).Predictions.with_call(request, timeout=GUARD_S)
        assert ("x-ratelimit-limit-requests", "77") in call.initial_metadata()
    with grpc.secure_channel(server.inference, grpc_credentials(certificates)) as channel, pytest.raises(grpc.RpcError):
        predict(channel, timeout=5)
    words = [
        "list",
        "--management-port",
        str(server.port("grpc_management")),
        "--ca-file",
        str(certificates / "ca.crt"),
    ]
    done = torchserve(
        *words, "--cert", str(certificates / "client.crt"), "--cert-key", str(certificates / "client.key")
    )
    assert done.returncode == 0 and "echo" in done.stdout, done.stderr
    refused = torchserve(*words)
    assert refused.returncode == 1 and "--cert" in refused.stderr, refused.stderr


def test_a_certificate_is_renewed_while_the_server_runs(
    start: Any, store: Path, certificates: Path, tmp_path: Path
) -> None:
    write_models(store)
    issue(certificates, "expired", days=-1)
    files = {"certificate_file": tmp_path / "crt", "private_key_file": tmp_path / "key"}

    def put(name: str) -> None:
        for ending in ("crt", "key"):
            shutil.copy(certificates / f"{name}.{ending}", tmp_path / "new")
            (tmp_path / "new").rename(tmp_path / ending)

    put("expired")
    server = start(*MODELS, inference_address="https://127.0.0.1:0", certificate_check_s=0.1, **files)
    assert re.search(r"WARN.* certificate_file \S+/crt: a certificate expired on 20", server.log)
    port, context = server.port("http_inference"), client_context(certificates)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        ask(port, "GET", "/ping", context=context)
    put("server")
    end_s = time.monotonic() + GUARD_S
    while True:
        try:
            assert ask(port, "POST", "/predictions/echo", b"new", context=context) == (200, b"new")
            break
        except ssl.SSLCertVerificationError:
            assert time.monotonic() < end_s, server.log
    server.wait_for_log("new connections get the certificate")
    assert server.terminate() == 0


# --- starts that are refused


def refused(serving: Any, folder: Path, **settings: object) -> str:
    """The output of a start that fails."""
    server = serving(folder, folder / "store", settings, ["--ncs"])
    server.wait()
    assert "Model server started." not in server.log
    return str(server.log)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "refused" / "store").mkdir(parents=True)
    return tmp_path / "refused"


def test_files_that_can_not_be_used_are_named(serving: Any, folder: Path, certificates: Path) -> None:
    openssl(certificates, "ec", "-in", "server.key", "-aes128", "-passout", "pass:pass", "-out", "encrypted.key")
    https = tls_settings(certificates, inference_address="https://127.0.0.1:0")
    for change, says in (
        (
            {"private_key_file": certificates / "client.key"},
            f"private_key_file {certificates}/client.key: isn't the key of",
        ),
        (
            {"private_key_file": certificates / "encrypted.key"},
            f"private_key_file {certificates}/encrypted.key: is encrypted",
        ),
        ({"certificate_file": certificates / "no.crt"}, f"file not found: {certificates}/no.crt"),
        (
            {"client_ca_file": certificates / "client.key"},
            f"client_ca_file {certificates}/client.key: holds a private key",
        ),
    ):
        log = refused(serving, folder, **(https | change))
        assert says in log
        assert len(log.splitlines()) == 1, log


def test_https_without_a_certificate_says_how_to_make_one(serving: Any, folder: Path, start: Any) -> None:
    log = refused(serving, folder, inference_address="https://127.0.0.1:0")
    command = re.search(r"openssl req .*", log)
    assert command, log
    subprocess.run(command[0], shell=True, cwd=folder, check=True, capture_output=True)
    files = {"certificate_file": folder / "cert.pem", "private_key_file": folder / "key.pem"}
    server = start(inference_address="https://127.0.0.1:0", **files)
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    assert ask(server.port("http_inference"), "GET", "/ping", context=context)[0] == 200


@pytest.mark.parametrize("kind", ["PKCS12", "JKS"])
@pytest.mark.long
def test_a_key_store_is_converted_by_the_command_of_the_refusal(
    serving: Any, folder: Path, certificates: Path, kind: str
) -> None:
    """keytool and openssl ask for passwords: here they come from standard input."""
    keytool = shutil.which("keytool")
    if keytool is None:
        pytest.skip("keytool is not installed (it comes with Java)")
    password = ["-storepass", "changeit", "-keypass", "changeit"]
    subprocess.run(
        [keytool, "-genkeypair", "-keystore", "my store", "-storetype", kind, *password, "-alias", "a", "-keyalg",
         "RSA", "-keysize", "2048", "-dname", "CN=localhost", "-ext", "SAN=ip:127.0.0.1", "-validity", "60"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    store = {"keystore": "my store", "keystore_pass": "changeit", "keystore_type": kind}
    log = refused(serving, folder, inference_address="https://127.0.0.1:0", **store)
    command = re.search(r"((?:keytool|openssl) .*); then set certificate_file=cert.pem", log)
    assert command, log
    for one in command[1].split(" && "):  # each reads all there is
        done = subprocess.run(one, shell=True, cwd=folder, input=b"changeit\n" * 3, capture_output=True,
                              start_new_session=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
    files = {"certificate_file": folder / "cert.pem", "private_key_file": folder / "key.pem"}
    with serving(
        folder, folder / "store", {"inference_address": "https://127.0.0.1:0", **store, **files}, ["--ncs"]
    ) as server:
        context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        assert ask(server.port("http_inference"), "GET", "/ping", context=context)[0] == 200


# --- Unix sockets, IPv6


class UnixConnection(http.client.HTTPConnection):
    """http.client over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=GUARD_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def test_unix_sockets(start: Any, store: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One for inference and metrics, one for gRPC; both go with the server."""
    write_models(store)
    folder = tmp_path_factory.mktemp("u")
    rest, rpc = folder / "h", folder / "g"
    server = start(
        *MODELS,
        inference_address=f"unix:{rest}",
        metrics_address=f"unix:{rest}",
        grpc_inference_address=f"unix:{rpc}",
        unix_socket_mode="660",
        metrics_mode="prometheus",
    )
    assert announced(server.log, "http_inference") == announced(server.log, "http_metrics") == f"unix:{rest}"
    assert announced(server.log, "grpc_inference") == f"unix:{rpc}"
    assert oct(rest.stat().st_mode)[-3:] == oct(rpc.stat().st_mode)[-3:] == "660"
    connection = UnixConnection(rest)
    for method, path, body, answer in (("POST", "/predictions/echo", b"x", b"x"), ("GET", "/metrics", None, b"# HELP")):
        connection.request(method, path, body)
        response = connection.getresponse()
        assert response.status == 200 and answer in response.read()
    connection.close()
    with grpc.insecure_channel(f"unix:{rpc}") as channel:
        assert predict(channel) == b"x"
    server.wait_for_log('unix "POST /predictions/echo')
    server.wait_for_log('unix "gRPC org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions')
    assert server.manage("ListModels", ListModelsRequest())  # no token: nobody else reaches it
    if shutil.which("curl"):
        command = ["curl", "-sS", "--unix-socket", str(rest), "http://server/ping"]
        assert b"Healthy" in subprocess.run(command, capture_output=True, timeout=GUARD_S).stdout
    assert server.terminate() == 0
    assert not rest.exists() and not rpc.exists()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6(start: Callable[..., Any], store: Path) -> None:
    """Brackets around IPv6 addresses, and no tokens: it is this machine's own address."""
    write_models(store)
    server = start(*MODELS, inference_address="http://[::1]:0", grpc_inference_address="::1", ncs="true")
    port = server.port("http_inference")
    assert announced(server.log, "http_inference") == f"http://[::1]:{port}"
    assert http_call(port, "POST", "/predictions/echo", b"six", host="::1").body == b"six"
    assert announced(server.log, "grpc_inference") == f"[::1]:{server.port('grpc_inference')}"
    with grpc.insecure_channel(announced(server.log, "grpc_inference")) as channel:
        assert predict(channel) == b"x"


# --- web pages, without a browser


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://localhost:{port}", "localhost:{port}", 200),
        ("http://127.0.0.1:{port}", "127.0.0.1:{port}", 200),
        ("http://LOCALHOST:{port}", "localhost:{port}", 200),
        (None, "localhost:{port}", 200),
        (None, "any.name", 403),
        ("http://example.org", "localhost:{port}", 403),
        ("http://localhost:1", "localhost:{port}", 403),
        ("null", "localhost:{port}", 403),
        ("http://[", "localhost:{port}", 403),
        ("http://example.org:{port}", "example.org:{port}", 403),  # a name that was made to mean this machine
    ],
)
def test_which_pages_may_manage(shared: Any, origin: str | None, host: str, status: int) -> None:
    port = shared.port("http_management")
    headers = {"Host": host.format(port=port)} | ({"Origin": origin.format(port=port)} if origin else {})
    answer = http_call(port, "PUT", "/models/probe/1.0/set-default", headers=headers)
    assert answer.status == status, answer.body
