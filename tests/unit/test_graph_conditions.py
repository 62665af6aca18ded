"""Conditions of inference graphs, in GJSON's notation, and the manifests that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ts_frontend.errors import InvalidArgument
from ts_frontend.graphs.inference_graph import Condition, inference_graph

BODY = {
    "instances": [{"id": 1, "kind": "cat", "tags": ["a", "b"]}, {"id": 2.5, "kind": "dog", "ok": False}],
    "predictions": ["dog", "cat"],
    "a.b": {"c": None},
    "source": "client",
    "deep": {"list": [[1, 2], [3]], "yes": True},
}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("instances", True),
        ("absent", False),
        ("instances.0.kind", True),
        ("instances.2", False),
        (r"a\.b.c", True),
        ("a.b", False),
        ("sour?e", True),
        ("x*", False),
        ("instances.#", True),
        ("source.#", False),
        ('instances.#(kind=="dog")', True),
        ('instances.#(kind=="cow")', False),
        ('instances.#(kind=="dog").ok', True),
        ('instances.#(kind=="cat").ok', False),
        ("instances.#(id>2)", True),
        ("instances.#(id>3)", False),
        ("instances.#(id==1)", True),
        ('instances.#(id!="1")', True),
        ("instances.#(ok==false)", True),
        ("instances.#(ok)", True),
        ('instances.#(kind%"c*")', True),
        ('instances.#(kind!%"*")', False),
        ('instances.#(tags.#(=="b"))', True),
        ('instances.#(tags.#(=="c"))', False),
        ('instances.#(kind=="cow")#', True),
        ('predictions.#(=="cat")', True),
        ('[@this].#(source=="client")', True),
        ('[@this].#(source=="server")', False),
        ('[@this].#(predictions.0=="dog")', True),
        ("[@this].#(deep.list.1.0==3)", True),
        ("[@this].#(deep.yes==true)", True),
        ("@this|source", True),
        ("instances.#.kind", True),
    ],
)
def test_what_holds(condition: str, holds: bool) -> None:
    assert Condition(condition).holds(BODY) is holds


@pytest.mark.parametrize("condition", ["@reverse", "{a,b}", "a..b", "!true", "a.#(b==~true)", "[@this].#(" * 40 + "a"])
def test_what_isnt_supported_is_refused(condition: str) -> None:
    with pytest.raises(InvalidArgument, match="condition|supported"):
        Condition(condition)


ONE = {"name": "s", "serviceName": "m"}


def graph(**nodes: Any) -> dict[str, Any]:
    return {"kind": "InferenceGraph", "metadata": {"name": "g"}, "spec": {"nodes": nodes}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "spec is a mapping"),
        (graph(a={"routerType": "Sequence", "steps": [ONE]}), "no node 'root'"),
        (graph(root={"routerType": "Star", "steps": [ONE]}), "node root: routerType is Sequence, Switch"),
        (graph(root={"routerType": "Sequence", "steps": []}), "node root has no steps"),
        (graph(root={"routerType": "Sequence", "steps": [{"name": "s"}]}), "step s has one of nodeName"),
        (graph(root={"routerType": "Sequence", "steps": [ONE | {"datas": 1}]}), "step s has unknown keys: datas"),
        (graph(root={"routerType": "Sequence", "steps": [ONE | {"data": "$x"}]}), "data is \\$request or"),
        (graph(root={"routerType": "Switch", "steps": [ONE]}), "needs a condition"),
        (graph(root={"routerType": "Splitter", "steps": [ONE | {"weight": 30}]}), "don't add up to 100"),
        (graph(root={"routerType": "Sequence", "steps": [{"nodeName": "a"}]}), "no node 'a'"),
        (graph(root={"routerType": "Sequence", "steps": [{"nodeName": "root"}]}), "cycle: root -> root"),
    ],
)
def test_manifests_that_are_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        inference_graph(tree, "g.yaml")


@pytest.mark.parametrize(
    ("step", "model", "protocol"),
    [
        ("serviceName: m", "m", ""),
        ("serviceUrl: http://m.default.svc.cluster.local/v1/models/n:predict", "n", "v1"),
        ("serviceUrl: http://m.default.svc.cluster.local/v2/models/n/infer", "n", "v2"),
        ("serviceUrl: http://m.default.svc.cluster.local", "m", ""),
        ("serviceUrl: /predictions/n", "n", ""),
    ],
)
def test_the_model_of_a_step(step: str, model: str, protocol: str) -> None:
    tree = graph(root={"routerType": "Sequence", "steps": [yaml.safe_load(step)]})
    (found,) = inference_graph(tree, "g.yaml").nodes["root"].steps
    assert (found.model, found.protocol) == (model, protocol)
