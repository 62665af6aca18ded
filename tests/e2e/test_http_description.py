"""The API description: it is OpenAPI, names all that is served, and nothing that isn't."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support import GUARD_S

METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
KINDS = {"string", "integer", "boolean", "array", "object", "number"}
APIS = ["http_inference", "http_management", "http_metrics"]


def ask(server: Any, api: str, method: str, target: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port(api), timeout=GUARD_S)
    connection.request(method, target)
    response = connection.getresponse()
    endless = (response.headers["content-type"] or "").startswith("text/event-stream")
    raw = response.readline() if endless else response.read()
    response.close()
    connection.close()
    return response.status, json.loads(raw) if raw.startswith((b"{", b"[")) else raw


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def check_schema(schema: dict[str, Any], whole: dict[str, Any]) -> None:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        check_schema(whole["components"]["schemas"][name], whole)
        return
    assert schema["type"] in KINDS
    if schema["type"] == "array":
        check_schema(schema["items"], whole)
    properties = schema.get("properties", {})
    assert set(schema.get("required", ())) <= properties.keys()
    for one in properties.values():
        check_schema(one, whole)


def check_document(found: dict[str, Any]) -> None:
    """The demands of the OpenAPI specification 3.0 on the parts that are used here."""
    assert re.fullmatch(r"3\.0\.\d", found["openapi"])
    assert found["info"]["title"]
    assert found["info"]["version"]
    ids = [operation["operationId"] for _, _, operation in operations(found)]
    assert len(ids) == len(set(ids))
    for path, method, operation in operations(found):
        assert path.startswith("/")
        assert method in METHODS
        parameters = [(one["in"], one["name"]) for one in operation["parameters"]]
        assert len(parameters) == len(set(parameters))
        assert {name for place, name in parameters if place == "path"} == set(re.findall(r"\{([^}]+)\}", path))
        for one in operation["parameters"]:
            assert one["in"] in ("path", "query")
            assert one["required"] is True or one["in"] != "path"
            check_schema(one["schema"], found)
        assert operation["responses"]
        for code, response in operation["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d|default", code)
            assert response["description"]
            for content in response.get("content", {}).values():
                check_schema(content["schema"], found)
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("method", "target"), [("OPTIONS", "/"), ("GET", "/api-description"), ("POST", "/api-description/")]
)
def test_the_description_is_openapi(shared: Any, api: str, method: str, target: str) -> None:
    status, found = ask(shared, api, method, target)
    assert status == 200
    check_document(found)
    assert found == ask(shared, api, "OPTIONS", "/")[1]


@pytest.mark.parametrize("api", APIS)
def test_all_that_is_described_is_there(shared: Any, api: str) -> None:
    for path, method, _ in operations(ask(shared, api, "OPTIONS", "/")[1]):
        target = path.replace("{model_name}", "nope").replace("{model_version}", "1.0").replace("{model_store}", "x")
        status, answer = ask(shared, api, method.upper(), re.sub(r"\{[^}]+\}", "x", target))
        kind = answer.get("type") if isinstance(answer, dict) else ""
        assert kind not in ("ResourceNotFoundException", "MethodNotAllowedException"), (method, path, status)
        said = answer.get("error", "") if isinstance(answer, dict) else ""
        assert "nothing answers" not in said and status != 405, (method, path, said)


@pytest.mark.parametrize(
    ("api", "target", "title"),
    [
        ("http_inference", "/predictions/probe", "RESTful API for: probe"),
        ("http_inference", "/explanations/probe/1.0", "RESTful API for: probe"),
        ("http_inference", "/v1/models/probe:predict", "RESTful API for: probe"),
        ("http_inference", "/v2/models/probe/infer", "RESTful API for: probe"),
        ("http_management", "/models/probe", "RESTful Management API for: probe"),
    ],
)
def test_a_model_is_described(shared: Any, api: str, target: str, title: str) -> None:
    status, found = ask(shared, api, "OPTIONS", target)
    assert (status, found["info"]["title"]) == (200, title)
    check_document(found)
    assert all("{model_name}" in path for path in found["paths"])
    assert len(found["paths"]) > 2


def test_every_parameter_of_a_register_call_is_described(shared: Any) -> None:
    parameters = ask(shared, "http_management", "OPTIONS", "/")[1]["paths"]["/models"]["post"]["parameters"]
    kinds = {one["name"]: one["schema"]["type"] for one in parameters}
    assert kinds == {
        **dict.fromkeys(("url", "model_name", "handler", "runtime"), "string"),
        **dict.fromkeys(("batch_size", "max_batch_delay", "initial_workers"), "integer"),
        **dict.fromkeys(("response_timeout", "startup_timeout"), "integer"),
        **dict.fromkeys(("synchronous", "s3_sse_kms"), "boolean"),
    }
