"""Three servers behind nginx are restarted one after another under load, over HTTP and gRPC, and no request fails."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from e2e.servers import Serving, write_model
from support import GUARD_S, free_port, until
from ts.protocol import open_inference_pb2 as oip
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="needs nginx, Debian's package")]
HANDLER = "def handle(data, context):\n    return [b'7' for row in data or ()]\n"
CONFIG = """
daemon off;
pid {place}/nginx.pid;
error_log {place}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    upstream http_servers {{ {http_servers} }}
    upstream grpc_servers {{ {grpc_servers} }}
    server {{
        listen 127.0.0.1:{http};
        # A reload of nginx closes clients' idle connections, while these send: that isn't what is tested.
        keepalive_timeout 0;
        location / {{ proxy_pass http://http_servers; proxy_http_version 1.1; proxy_set_header Host $http_host; }}
    }}
    server {{
        listen 127.0.0.1:{grpc} http2;
        location / {{ grpc_pass grpc://grpc_servers; grpc_set_header Host $http_host; }}
    }}
}}
"""


class Replica:
    """One server, with the same ports each time that it is started."""

    def __init__(self, place: Path, store: Path) -> None:
        self.place, self.store = place, store
        self.http, self.grpc = free_port(), free_port()
        self.starts = 0
        self.server = self.start()

    def start(self) -> Serving:
        self.starts += 1
        directory = self.place / str(self.starts)
        directory.mkdir(parents=True)
        settings: dict[str, object] = {
            "inference_address": f"http://127.0.0.1:{self.http}",
            "grpc_inference_port": self.grpc,
            "default_workers_per_model": 1,
            "drain_grace_s": 1,
        }
        self.server = Serving(directory, self.store, settings, ["--ncs", "--models", "seven"])
        self.server.wait_started()
        until(lambda: self.ready, lambda: self.server.log)
        return self.server

    @property
    def ready(self) -> bool:
        url = f"http://127.0.0.1:{self.http}/v2/health/ready"
        return httpx.get(url, timeout=GUARD_S).status_code == 200


class Router:
    """nginx in front of the replicas that are ready, as a Service has the pods that are."""

    def __init__(self, place: Path, replicas: list[Replica]) -> None:
        place.mkdir()
        self.place, self.http, self.grpc = place, free_port(), free_port()
        self.write(replicas)
        self.process = subprocess.Popen([str(NGINX), "-c", str(place / "nginx.conf")], stderr=subprocess.DEVNULL)
        until(lambda: (place / "nginx.pid").is_file() and (place / "nginx.pid").read_text().strip())

    def write(self, replicas: list[Replica]) -> None:
        servers = {
            name: " ".join(f"server 127.0.0.1:{getattr(one, name)};" for one in replicas) for name in ("http", "grpc")
        }
        ports = {"http": self.http, "grpc": self.grpc}
        text = CONFIG.format(place=self.place, http_servers=servers["http"], grpc_servers=servers["grpc"], **ports)
        (self.place / "nginx.conf").write_text(text)

    def route_to(self, replicas: list[Replica]) -> None:
        self.write(replicas)
        subprocess.run([str(NGINX), "-c", str(self.place / "nginx.conf"), "-s", "reload"], check=True)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(GUARD_S)


class Load:
    """Calls one after another in each of some threads, until it is ended."""

    def __init__(self, call: Callable[[], object], threads: int = 4) -> None:
        self.call, self.answered, self.failed = call, 0, list[str]()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for one in self._threads:
            one.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.call()
            except Exception as error:
                with self._lock:
                    self.failed.append(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self.answered += 1

    def end(self) -> None:
        self._over.set()
        for one in self._threads:
            one.join(GUARD_S)


def posted(client: httpx.Client, url: str) -> None:
    answer = client.post(url, content=b"1")
    assert answer.text == "7", (answer.status_code, answer.text)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    write_model(tmp_path / "store", "seven", HANDLER)
    made = [Replica(tmp_path / f"replica-{index}", tmp_path / "store") for index in range(3)]
    yield made
    for one in made:
        assert one.server.terminate() == 0, one.server.log


def test_no_request_fails(replicas: list[Replica], tmp_path: Path) -> None:
    router = Router(tmp_path / "router", replicas)
    client = httpx.Client(timeout=GUARD_S)
    channel = grpc.insecure_channel(f"127.0.0.1:{router.grpc}")
    stub = GRPCInferenceServiceStub(channel)
    message = oip.ModelInferRequest(model_name="seven")
    message.inputs.add(name="x", datatype="INT64", shape=[1]).contents.int64_contents.append(1)
    url = f"http://127.0.0.1:{router.http}/predictions/seven"
    loads = [
        Load(lambda: posted(client, url)),
        Load(lambda: stub.ModelInfer(message, timeout=GUARD_S)),
    ]
    try:
        until(lambda: all(load.answered for load in loads) or any(load.failed for load in loads))
        assert not any(load.failed[:1] for load in loads), [load.failed[:3] for load in loads]
        for one in replicas:
            before = [load.answered for load in loads]
            one.server.process.send_signal(signal.SIGTERM)
            until(lambda one=one: not one.ready, one.server.log)  # type: ignore[misc]
            router.route_to([other for other in replicas if other is not one])
            assert one.server.wait() == 0, one.server.log
            one.start()
            router.route_to(replicas)
            until(lambda before=before: all(load.answered > was for load, was in zip(loads, before, strict=True)))  # type: ignore[misc]
    finally:
        for load in loads:
            load.end()
        channel.close()
        client.close()
        router.close()
    print("answered over HTTP and gRPC:", *(load.answered for load in loads))
    assert [load.failed for load in loads] == [[], []]
