"""KServe's inference graphs, which the server runs itself: each kind of node, over three APIs, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import httpx
import pytest
import yaml

from support import until

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
INSTANCES = b'{"instances": ["cat"]}'


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
