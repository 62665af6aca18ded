"""An HTTP request for a path of the model's own, as it came, and its answer, as the model made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ts.protocol.frames import Buffer
from ts.tensors.forms import Form, ModelSpec, payload
from ts.tensors.types import Headers, InferenceRequest, InferenceResponse

#: Headers with the request's first line, which no client can send.
METHOD, PATH, QUERY = ":method", ":path", ":query"


@dataclass(slots=True)
class RouteRequest(InferenceRequest):
    """`path` is percent-decoded, `query` as it came."""

    method: str = ""
    path: str = ""
    query: str = ""
    body: bytes = b""


@dataclass(slots=True)
class RouteResponse(InferenceResponse):
    """A piece of the answer; the first has its head."""

    pairs: Sequence[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class RouteForm(Form):
    checked = True  # it has no inputs

    def __init__(self, data: Buffer, pairs: Headers, options: frozenset[str], model: ModelSpec) -> None:
        headers = dict(pairs)
        method, path, query = (headers.pop(name, "") for name in (METHOD, PATH, QUERY))
        self.request = RouteRequest(
            [],
            model_name=model.name,
            model_version=model.version,
            pairs=headers,
            method=method,
            path=path,
            query=query,
            body=payload(data),
        )

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        assert isinstance(response, RouteResponse)
        self.headers = response.pairs
        return response.body


opened = RouteForm
