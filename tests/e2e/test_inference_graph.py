"""The requests of KServe's InferenceGraph: the router's requests to each step, and its use of the answers.

`Router` stands in for it: it handles nodes of the four kinds like the router, over one connection that it keeps, like
Go's client.
"""

from __future__ import annotations

import http.client
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import httpx
import pytest
import yaml

from support import GUARD_S, until

#: Takes a request, or the answer of the step before; `fail` makes it fail.
STEP = """
import json

def handle(data, context):
    answers = []
    for index, row in enumerate(data or ()):
        body = row.get("body") or row.get("data")
        body = json.loads(bytes(body)) if isinstance(body, (bytes, bytearray)) else body
        items = body.get("instances") or body.get("predictions")
        if "fail" in items:
            raise ValueError("as asked")
        tenant = context.get_request_header(index, "x-tenant")
        answers.append({"predictions": ["NAME(%s)" % item for item in items], "tenant": tenant})
    return answers
"""
WORDS = """
def handle(data, context):
    return [bytes(row["data"]).decode().upper() for row in data or ()]
"""
HOST = "step.default.svc.cluster.local"


class Router:
    """`nodes`: as in an InferenceGraph's spec. `propagated`: patterns of the headers that go on to the steps."""

    def __init__(self, port: int, nodes: dict[str, Any], propagated: tuple[str, ...] = ()) -> None:
        self.nodes, self._propagated = nodes, propagated
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
        self.connections = 0

    def asked(self, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, answer = self._node("root", body, headers or {})
        return status, json.loads(answer)

    def _node(self, name: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        node = self.nodes[name]
        steps, kind = node["steps"], node["routerType"]
        if kind == "Splitter":
            return self._step(random.choices(steps, [step["weight"] for step in steps])[0], body, headers)
        if kind == "Switch":
            return self._step(next(step for step in steps if step["condition"] in json.loads(body)), body, headers)
        if kind == "Ensemble":
            merged = {}
            for step in steps:
                status, answer = self._step(step, body, headers)
                found = json.loads(answer)
                assert isinstance(found, dict), "the router takes nothing but objects"
                if status >= 300 and step.get("dependency") == "Hard":
                    return status, answer
                merged[step["name"]] = found
            return 200, json.dumps(merged).encode()
        status, answer = 0, b""
        for index, step in enumerate(steps):
            if "condition" in step and step["condition"] not in json.loads(answer):
                return 500, answer
            status, answer = self._step(step, answer if step.get("data") == "$response" and index else body, headers)
            if status >= 300 and step.get("dependency") == "Hard":
                break
        return status, answer

    def _step(self, step: dict[str, Any], body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if "nodeName" in step:
            return self._node(step["nodeName"], body, headers)
        sent = {"Host": HOST, "User-Agent": "Go-http-client/1.1", "Accept-Encoding": "gzip"}
        sent |= {name: one for name, one in headers.items() if any(re.search(it, name) for it in self._propagated)}
        sent.setdefault("Content-Type", "application/json")
        self.connections += self.connection.sock is None
        self.connection.request("POST", step["serviceUrl"], body, sent)
        answer = self.connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture(scope="module")
def port(server_of: Callable[..., AbstractContextManager[Any]]) -> Iterator[int]:
    models = {name: (STEP.replace("NAME", name), "") for name in ("one", "two")} | {"words": (WORDS, "")}
    address = {
        "inference_address": "http://0.0.0.0:0",
        "disable_token_authorization": "true",
        "ts_open_inference_protocol": "oip",
    }
    with server_of(models, **address, enable_model_api="true") as server:
        yield server.port("http_inference")


def step(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "serviceUrl": f"/v1/models/{name}:predict", **more}


@pytest.fixture
def router(port: int) -> Iterator[Callable[..., Router]]:
    """`router(nodes, patterns of headers)` makes one."""
    made: list[Router] = []

    def make(nodes: dict[str, Any], propagated: tuple[str, ...] = ()) -> Router:
        made.append(Router(port, nodes, propagated))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


INSTANCES = b'{"instances": ["cat"]}'
CASES = {
    "sequence": ({"routerType": "Sequence", "steps": [step("one"), step("two", data="$response")]}, "two(one(cat))"),
    "sequence of requests": (
        {"routerType": "Sequence", "steps": [step("one"), step("two", data="$request", condition="predictions")]},
        "two(cat)",
    ),
    "splitter": ({"routerType": "Splitter", "steps": [step("one", weight=0), step("two", weight=100)]}, "two(cat)"),
    "switch": (
        {"routerType": "Switch", "steps": [step("one", condition="absent"), step("two", condition="instances")]},
        "two(cat)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nodes_of_each_kind(router: Callable[..., Router], name: str) -> None:
    node, expected = CASES[name]
    status, answer = router({"root": node}).asked(INSTANCES)
    assert (status, answer["predictions"]) == (200, [expected])


def test_ensembles_merge_objects_also_those_of_errors(router: Callable[..., Router]) -> None:
    inner = {"routerType": "Sequence", "steps": [step("two")]}
    steps = [step("one"), {"name": "inner", "nodeName": "inner"}, step("absent")]
    graph = router({"root": {"routerType": "Ensemble", "steps": steps}, "inner": inner})
    status, answer = graph.asked(INSTANCES)
    assert status == 200 and set(answer) == {"one", "inner", "absent"}
    assert [answer[one]["predictions"] for one in ("one", "inner")] == [["one(cat)"], ["two(cat)"]]
    assert answer["absent"]["code"] == 404
    steps[2]["dependency"] = "Hard"
    status, answer = graph.asked(INSTANCES)
    assert status == 404 and "absent" in answer["message"]


def test_headers_that_are_propagated_reach_the_handlers(router: Callable[..., Router]) -> None:
    nodes = {"root": {"routerType": "Sequence", "steps": [step("one")]}}
    headers = {"X-Tenant": "t1", "X-Request-Id": "mine", "Cookie": "no"}
    assert router(nodes, ("^X-.*", "Authorization")).asked(INSTANCES, headers)[1]["tenant"] == "t1"
    assert not router(nodes).asked(INSTANCES, headers)[1]["tenant"]


def test_steps_of_the_second_protocol(router: Callable[..., Router]) -> None:
    nodes = {"root": {"routerType": "Splitter", "steps": [{"serviceUrl": "/v2/models/words/infer", "weight": 1}]}}
    tensor = {"name": "data", "shape": [1], "datatype": "BYTES", "data": ["cat"]}
    status, answer = router(nodes).asked(json.dumps({"id": "7", "inputs": [tensor]}).encode())
    assert status == 200 and answer["id"] == "7" and answer["outputs"][0]["data"] == ["CAT"], answer


def test_the_connection_stays_open_after_an_error(router: Callable[..., Router]) -> None:
    """A handler that fails costs the router no new connection."""
    graph = router({"root": {"routerType": "Sequence", "steps": [step("one")]}})
    for _ in range(3):
        status, answer = graph.asked(b'{"instances": ["fail"]}')
        assert status >= 500 and answer["message"], answer
        assert graph.asked(INSTANCES)[0] == 200
    assert graph.connections == 1
    graph.connection.request("GET", "/absent")
    absent = graph.connection.getresponse()
    assert absent.status == 404 and absent.read() and absent.getheader("connection") != "close"


# --- graphs that this server runs itself


def manifest(name: str, **nodes: Any) -> str:
    return yaml.safe_dump(
        {"kind": "InferenceGraph", "metadata": {"name": name}, "spec": {"nodes": nodes}}, sort_keys=False
    )


def node(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"routerType": kind, "steps": list(steps)}


def of(model: str, **more: Any) -> dict[str, Any]:
    return {"name": model, "serviceName": model, **more}


IS_CAT, IS_DOG = (f'[@this].#(instances.0=="{kind}")' for kind in ("cat", "dog"))
GRAPHS = {
    "chain": {"root": node("Sequence", of("one"), of("two", data="$response"))},
    "requests": {"root": node("Sequence", of("one"), of("two", condition="predictions"))},
    "stops": {"root": node("Sequence", of("one"), of("two", condition="absent"))},
    "choice": {"root": node("Switch", of("one", condition=IS_CAT), of("two", condition=IS_DOG))},
    "all": {"root": node("Splitter", of("one", weight=0), of("two", weight=100))},
    "soft": {"root": node("Sequence", of("fails"), of("one"))},
    "hard": {"root": node("Sequence", of("fails", dependency="Hard"), of("one"))},
    "both": {
        "root": node("Ensemble", of("one"), of("fails"), {"name": "inner", "nodeName": "inner"}),
        "inner": node("Sequence", of("two", serviceName="two")),
    },
    "both_hard": {"root": node("Ensemble", of("one"), of("fails", dependency="Hard"))},
}
FAILS = """
def handle(data, context):
    if data is not None:
        raise ValueError("as asked")
"""


@pytest.fixture(scope="module")
def graphs(server_of: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    models = {name: (STEP.replace("NAME", name), "") for name in ("one", "two")} | {"fails": (FAILS, "")}
    with server_of(models, enable_model_api="true") as server:
        for name, nodes in GRAPHS.items():
            (server.store / f"{name}.yaml").write_text(manifest(name, **nodes))
            server.register(f"{name}.yaml")
        yield server


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("chain", "two(one(cat))"),
        ("requests", "two(cat)"),
        ("stops", "one(cat)"),
        ("choice", "one(cat)"),
        ("all", "two(cat)"),
        ("soft", "one(cat)"),
    ],
)
@pytest.mark.parametrize("path", ["/predictions/{}", "/v1/models/{}:predict", "/v2/models/{}/infer"])
def test_a_graph_of_this_server(graphs: Any, graph: str, expected: str, path: str) -> None:
    headers = {"Content-Type": "application/json", "X-Tenant": "t1"}
    answer = httpx.post(graphs.http + path.format(graph), content=INSTANCES, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [expected], "tenant": "t1"})


def test_failures_in_a_graph(graphs: Any) -> None:
    def ask(graph: str, body: bytes = INSTANCES) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{graphs.http}/predictions/{graph}", content=body, headers=headers)
        return answer.status_code, answer.json()

    status, answer = ask("hard")
    assert status >= 500 and "in inference graph 'hard', node root, step fails: " in answer["message"]
    status, answer = ask("both")
    assert status == 200 and set(answer) == {"one", "fails", "inner"}
    assert (answer["one"]["predictions"], answer["inner"]["predictions"]) == (["one(cat)"], ["two(cat)"])
    assert "step fails" in answer["fails"]["error"]
    assert ask("both_hard")[0] >= 500
    status, answer = ask("choice", b'{"instances": ["cow"]}')
    assert status == 404 and "no condition holds" in answer["message"]
    assert ask("choice", b"no JSON")[0] == 400


def test_a_graph_is_described_listed_and_refused_like_a_model(graphs: Any) -> None:
    assert [one["modelName"] for one in graphs.describe("both")["steps"]] == ["one", "fails", "two"]
    (graphs.store / "bad.yaml").write_text(manifest("bad", root=node("Sequence", of("nobody"))))
    with pytest.raises(grpc.RpcError) as refused:
        graphs.register("bad.yaml")
    assert "inference graph 'bad': node root, step nobody: model 'nobody' is not served" in refused.value.details()
    assert httpx.get(f"{graphs.http}/v2/models/chain/ready").status_code == 200


def test_a_graph_of_the_start_waits_for_its_models(start: Any, store: Any, write: Callable[..., str]) -> None:
    for name in ("one", "two"):
        write(name, STEP.replace("NAME", name))
    (store / "chain.yaml").write_text(manifest("chain", **GRAPHS["chain"]))
    server = start("--models", "chain.yaml,one,two", "--ncs")
    until(lambda: httpx.get(f"{server.http}/v2/models/chain/ready").status_code == 200)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.http}/predictions/chain", content=INSTANCES, headers=headers)
    assert answer.json()["predictions"] == ["two(one(cat))"]
