"""Servers behind nginx, which sends all requests of a sequence to one of them by its header, as docs/several-servers.md
says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from e2e.servers import Serving, write_model
from support import GUARD_S, free_port, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
pytestmark = [pytest.mark.external, pytest.mark.skipif(NGINX is None, reason="needs nginx, Debian's package")]
ROOT = Path(__file__).resolve().parents[2]
HANDLER = ROOT / "tests" / "handlers" / "sequence_sums.py"
CONFIG = "sequenceBatching: true\nsequenceMaxIdleMSec: 600000\nmaxNumSequence: 40\nsequenceStartRequired: true\n"
AROUND = """
daemon off;
pid {place}/nginx.pid;
error_log {place}/error.log warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    keepalive_timeout 0;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    {inside}
}}
"""
HEADER = "ts_request_sequence_id"


def documented(http: list[int], grpc_ports: list[int], listen: tuple[int, int]) -> str:
    """The page's own block, with the ports of these servers."""
    page = (ROOT / "docs" / "several-servers.md").read_text()
    text: str
    (text,) = re.findall(r"```nginx\n(.*?)```", page, re.DOTALL)
    assert text.count("server relay-0:8080; server relay-1:8080;") == 1, "the servers over HTTP"
    assert text.count("server relay-0:7070; server relay-1:7070;") == 1, "the servers over gRPC"
    text = text.replace(
        "server relay-0:8080; server relay-1:8080;", " ".join(f"server 127.0.0.1:{port};" for port in http)
    )
    text = text.replace(
        "server relay-0:7070; server relay-1:7070;", " ".join(f"server 127.0.0.1:{port};" for port in grpc_ports)
    )
    for port, ours in zip(("listen 80;", "listen 7070 http2;"), listen, strict=True):
        assert text.count(port) == 1
        text = text.replace(port, port.replace(port.split()[1].rstrip(";"), f"127.0.0.1:{ours}"))
    return text


class Nginx:
    def __init__(self, place: Path, servers: list[Serving]) -> None:
        place.mkdir()
        self.place, self.http, self.grpc = place, free_port(), free_port()
        self.write(servers)
        self.process = subprocess.Popen([str(NGINX), "-c", str(place / "nginx.conf")], stderr=subprocess.DEVNULL)
        until(self.answers, lambda: (place / "error.log").read_text())

    def write(self, servers: list[Serving]) -> None:
        http = [one.port("http_inference") for one in servers]
        inside = documented(http, [one.port("grpc_inference") for one in servers], (self.http, self.grpc))
        (self.place / "nginx.conf").write_text(AROUND.format(place=self.place, inside=inside))

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.http}/ping").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(GUARD_S)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Serving]]:
    write_model(tmp_path / "store", "sums", HANDLER, config=CONFIG)
    made = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        settings: dict[str, object] = {"default_workers_per_model": 2}
        made.append(Serving(tmp_path / name, tmp_path / "store", settings, ["--ncs", "--models", "sums"]))
    yield [server.wait_started() for server in made]
    for server in made:
        server.terminate()


def test_a_sequence_stays_with_its_server(servers: list[Serving], tmp_path: Path) -> None:
    """Also when another server leaves, over HTTP and gRPC alike."""
    for server in servers:
        until(lambda server=server: len(server.worker_pids("sums")) == 2)  # type: ignore[misc]
    pids = [set(server.worker_pids("sums")) for server in servers]
    nginx = Nginx(tmp_path / "nginx", servers)
    names = [f"sequence {number}" for number in range(32)]
    over_grpc = set(names[16:])
    url = f"http://127.0.0.1:{nginx.http}/predictions/sums"
    try:
        with grpc.insecure_channel(f"127.0.0.1:{nginx.grpc}") as channel, httpx.Client(timeout=GUARD_S) as client:
            stub = InferenceAPIsServiceStub(channel)

            def ask(name: str, number: int) -> Any:
                """The worker's answer; number 0 begins the sequence."""
                begins = {"ts_request_sequence_start": "true"} if number == 0 else {}
                if name not in over_grpc:
                    answer = client.post(url, content=str(number), headers={HEADER: name, **begins})
                    assert answer.status_code == 200, answer.text
                    return answer.json()
                request = PredictionsRequest(model_name="sums", input={"data": str(number).encode()})
                metadata = tuple({HEADER: name, **begins}.items())
                return json.loads(stub.Predictions(request, metadata=metadata, timeout=GUARD_S).prediction)

            homes: dict[str, int] = {}
            for number in range(3):
                for name in names:
                    found = ask(name, number)
                    assert found["numbers"] == list(range(number + 1)), (name, found)
                    homes.setdefault(name, found["pid"])
                    assert found["pid"] == homes[name]
            assert all(any(pid in group for pid in homes.values()) for group in pids), "both have some"
            nginx.write(servers[:1])
            subprocess.run([str(NGINX), "-c", str(nginx.place / "nginx.conf"), "-s", "reload"], check=True)
            for name in [name for name, pid in homes.items() if pid in pids[0]]:
                assert ask(name, 3)["numbers"] == [0, 1, 2, 3]
    finally:
        nginx.close()
