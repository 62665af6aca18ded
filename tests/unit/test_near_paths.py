"""What the error about an unknown path adds: the path that was meant, and the listener that serves it."""

from __future__ import annotations

import pytest

from ts_frontend.http.openapi import PATH_CHARACTERS_MAX, Near
from ts_frontend.http.routes import ROUTES
from ts_frontend.http.routing import HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS, Switch, served_rows

APIS = (HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS)
PORTS = dict(zip(APIS, ("port 8080", "port 8081", "port 8082"), strict=True))


def near(*here: str, apis: tuple[str, ...] = APIS) -> Near:
    return Near({api: served_rows(ROUTES, [api], [Switch.DOCS]) for api in apis}, here, PORTS.__getitem__)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/prediction/x", " Did you mean /predictions/{model_name}?"),
        ("/prediction/x/1.0", " Did you mean /predictions/{model_name}/{model_version}?"),
        ("/predictions", " Did you mean /predictions/{model_name}?"),
        ("/PING", " Did you mean /ping?"),
        ("//ping", " Did you mean /ping?"),
        ("/completions", " Did you mean /v1/completions?"),
        ("/v2/model/x/infer", " Did you mean /v2/models/{model_name}/infer?"),
        ("/models", " The management API serves this path: port 8081."),
        ("/models/x/1.0", " The management API serves this path: port 8081."),
        ("/model", " Did you mean /models? The management API serves it: port 8081."),
        ("/metric", " Did you mean /metrics? The metrics API serves it: port 8082."),
        *(
            (path, "")
            for path in ("/nosuch", "/", "", "x", "/../ping", "/\udcff/x", "/%ff", f"/foo/{'predictions' * 9}")
        ),
        ("/predictions/x" * 20, ""),
        (f"/prediction/{'x' * PATH_CHARACTERS_MAX}", ""),
    ],
)
def test_on_the_inference_listener(path: str, told: str) -> None:
    assert near(HTTP_INFERENCE)(path) == told


def test_a_listener_of_all_apis_names_no_port() -> None:
    assert near(*APIS)("/model") == " Did you mean /models?"
