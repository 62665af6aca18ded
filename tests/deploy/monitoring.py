"""The queries of deploy/monitoring, and a server that has every metric they ask for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import yaml

from deploy.manifests import DEPLOY
from e2e.servers import Serving, write_model
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as oip
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

MONITORING = DEPLOY / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
ALERTS = MONITORING / "alerts.yml"
#: A metric in an expression, with its labels.
SELECTOR = re.compile(r"\b(up|(?:ts|nv|grpc_server|process)_\w+|vllm:\w+|[A-Z]\w+(?:Utilization|XX|Time))(\{[^}]*\})?")
#: What Grafana fills in.
FILLED = {"$__rate_interval": "5s", "$instance": ".*", "$model": ".*"}
#: `break` lets no worker load the model any more, and ends this one.
HANDLER = """
import os

def handle(data, context):
    if data is None:
        if os.path.exists({mark!r}):
            raise RuntimeError("the weights are gone")
        return None
    asked = [bytes(row["body"]) for row in data]
    if b"break" in asked:
        open({mark!r}, "w").close()
        os._exit(1)
    if b"fail" in asked:
        raise ValueError("as asked")
    return ["ok"] * len(data)
"""
#: A language model, whose engine has one answer.
TALK = """
from ts.language.handler import Head, LanguageModelHandler

USAGE = b'{"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 6}}'

class Talk(LanguageModelHandler):
    def initialize(self, context):
        pass

    async def ask(self, path, body):
        yield Head(200, "text/event-stream")
        for text in (b"Hello", b" world"):
            yield b'data: {"choices": [{"delta": {"content": "%s"}}]}\\n\\n' % text
        yield b'data: {"choices": [], "usage": %s}\\n\\ndata: [DONE]\\n\\n' % USAGE
"""
LIMITS = "recycleAfterRequests: 20\nrecycleAboveMemory: 100g\n"
CONFIG = "minWorkers: 1\nmaxWorkers: 2\nautoscale: true\nidempotent: true\n"


class Query(NamedTuple):
    """`place`: the dashboard and panel, or the alert."""

    place: str
    expression: str


def panels() -> list[Query]:
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found.append(Query(f"{path.stem}: {panel['title']}", filled(target["expr"])))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in rules()]


def filled(expression: str) -> str:
    for name, value in FILLED.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def metrics_of(expression: str) -> set[str]:
    return {name for name, _ in SELECTOR.findall(expression)}


class Busy:
    """A server with keys, TLS for gRPC, a GPU that nvidia-smi tells of, and models that are called again and again:
    `quick`, whose workers are replaced after some requests, `frail`, which `break_down` breaks, and `talk`, a language
    model."""

    def __init__(self, place: Path) -> None:
        store, tools = place / "store", place / "bin"
        for folder in (store, tools):
            folder.mkdir()
        mark = str(place / "broken")
        write_model(
            store,
            "quick",
            HANDLER.format(mark=mark + "-never"),
            config="recycleAfterRequests: 20\nrecycleAboveMemory: 100g\n" + CONFIG,
        )
        write_model(store, "frail", HANDLER.format(mark=mark), config="maxRetryTimeoutInSec: 1\n" + CONFIG)
        write_model(store, "talk", TALK, config="minWorkers: 1\nmaxWorkers: 1\nmaxConcurrency: 4\n")
        tool = tools / "nvidia-smi"
        tool.write_text('#!/bin/sh\ncase "$1" in *utilization*) echo "0, 42, 20480, 81920";; *) echo 0;; esac\n')
        tool.chmod(0o755)
        self.certificate = place / "cert.pem"
        words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
        more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(place / "key.pem")]
        subprocess.run([*words.split(), *more, "-out", str(self.certificate)], check=True, capture_output=True)
        settings: dict[str, object] = {
            "metrics_mode": "prometheus",
            "disable_token_authorization": "false",
            "number_of_gpu": 1,
            "enable_grpc_ssl": "true",
            "certificate_file": self.certificate,
            "private_key_file": place / "key.pem",
            "env": {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        }
        self.server = Serving(place, store, settings, ["--ncs", "--models", "quick", "frail", "talk"])
        self.server.wait_started()
        keys = json.loads((place / "key_file.json").read_text())
        self.headers = {"authorization": f"Bearer {keys['inference']['key']}"}
        self._client = httpx.Client(timeout=GUARD_S, headers=self.headers)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        while not self._over.wait(0.02):
            for model in ("quick", "frail"):
                self.predict(model, b"go on")
            self.chat()

    def predict(self, model: str, data: bytes, **headers: str) -> int:
        url = f"{self.server.http}/predictions/{model}"
        return self._client.post(url, content=data, headers=self.headers | headers).status_code

    def chat(self) -> str:
        asked = {"model": "talk", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        return self._client.post(f"{self.server.http}/v1/chat/completions", json=asked).text

    def call_in_every_way(self) -> None:
        """By gRPC, without a valid key, and so that the handler fails."""
        credentials = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        with grpc.secure_channel(self.server.inference, credentials) as channel:
            assert GRPCInferenceServiceStub(channel).ServerLive(oip.ServerLiveRequest(), timeout=GUARD_S).live
        assert self.predict("quick", b"", authorization="Bearer nothing") == 400
        assert self.predict("quick", b"fail") >= 500
        assert self.chat().rstrip().endswith("data: [DONE]")

    def break_down(self) -> None:
        self.predict("frail", b"break")
        until(lambda: self.predict("frail", b"") == 503, lambda: self.server.log)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port('http_metrics')}"

    def metrics(self) -> str:
        return httpx.get(f"http://{self.target}/metrics", timeout=GUARD_S).text

    def close(self) -> None:
        self._over.set()
        self._thread.join(GUARD_S)
        self._client.close()
        assert self.server.terminate() == 0, self.server.log
