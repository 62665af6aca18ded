"""Calls of a transformer to its predictor, a separate server, by `--predictor_host` and its protocol."""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
import time
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ts.compat.kserve_api.channels import Channel, Connections, Unanswered
from ts.compat.kserve_api.messages import InferOutput, InferResponse, array_of
from ts.protocol.codes import Code
from ts.tensors.grpc_form import request_bytes, response_from
from ts.tensors.types import BadTensor, InferenceRequest, Tensor
from ts.utils.util import PredictionException

V1, V2, GRPC_V2 = "v1", "v2", "grpc-v2"
#: The request's headers that go on to the predictor: the caller, the request and the trace.
FORWARDED = (
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
    "baggage",
    "b3",
    "x-b3-traceid",
    "x-b3-spanid",
    "x-b3-parentspanid",
    "x-b3-sampled",
    "x-b3-flags",
)
#: The time (time.monotonic) at which the client of the request in progress stops waiting.
WAITED_FOR_UNTIL_S: ContextVar[float] = ContextVar("waited_for_until_s", default=math.inf)
#: The pause between two attempts that reached no server.
RETRY_PAUSE_S = 0.1
BAD_REQUEST, BAD_GATEWAY, UNAVAILABLE, TIMED_OUT = 400, 502, 503, 504
#: The HTTP statuses that a client may get for a predictor's failure.
_FAILURES = range(400, 600)
_STATUS = {
    Code.INVALID_ARGUMENT: BAD_REQUEST,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: TIMED_OUT,
}
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class PredictorConfig:
    """KServe's configuration of a predictor, with its older names."""

    predictor_host: str
    predictor_protocol: str = V1
    predictor_use_ssl: bool = False
    predictor_request_timeout_seconds: int = 600
    predictor_request_retries: int = 0
    predictor_health_check: bool = False

    @property
    def predictor_base_url(self) -> str:
        return f"{'https' if self.predictor_use_ssl else 'http'}://{self.predictor_host}"

    @property
    def protocol(self) -> str:
        return self.predictor_protocol

    @property
    def timeout(self) -> int:
        return self.predictor_request_timeout_seconds

    @property
    def retries(self) -> int:
        return self.predictor_request_retries

    @property
    def use_ssl(self) -> bool:
        return self.predictor_use_ssl


def forwarded(headers: Mapping[str, Any] | None) -> dict[str, str]:
    if not headers:
        return {}
    given = {name.lower(): value for name, value in headers.items() if isinstance(value, str)}
    return {name: given[name] for name in FORWARDED if name in given}


class Predictor:
    """One predictor, called from one event loop over persistent connections. A failure is a PredictionException with
    the predictor's status and text; 503 if it can't be reached, 504 after the time limit."""

    def __init__(self, config: PredictorConfig) -> None:
        self._config = config
        self._connections: Connections | None = None
        self._channel: Channel | None = None

    async def predict(self, model: str, payload: Any, headers: Mapping[str, Any] | None) -> Any:
        """The dict of a V1 answer, the InferResponse of a V2 one."""
        if self._config.protocol == GRPC_V2:
            return await self._infer(model, payload, forwarded(headers))
        if self._config.protocol == V1:
            return await self._ask(f"/v1/models/{quote(model)}:predict", payload, headers)
        body = payload.to_rest() if hasattr(payload, "to_rest") else payload
        return _response(await self._ask(f"/v2/models/{quote(model)}/infer", body, headers))

    async def explain(self, model: str, payload: Any, headers: Mapping[str, Any] | None) -> Any:
        """The dict of a V1 answer; other protocols have no explanations."""
        return await self._ask(f"/v1/models/{quote(model)}:explain", payload, headers)

    async def close(self) -> None:
        """Closes the connections, once no call is under way."""
        if self._connections is not None:
            self._connections.close()
        if self._channel is not None:
            await self._channel.close()

    # --- gRPC

    async def _infer(self, model: str, payload: Any, headers: Mapping[str, str]) -> InferResponse:
        if self._channel is None:
            authorities = _authorities() if self._config.use_ssl else None
            self._channel = Channel(self._config.predictor_host, authorities)
        # Without an id that its client hasn't given: the predictor would have to read it, and to send it back.
        request_id = payload.id or headers.get("x-request-id") or ""
        inputs = [Tensor(one.name, *array_of(one)) for one in payload.inputs]
        message = request_bytes(InferenceRequest(inputs, request_id, model, parameters=payload.parameters))
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise PredictionException(f"the header {name} has characters that gRPC can't carry", BAD_REQUEST)
        metadata, end_s, attempts = tuple(headers.items()), time.monotonic() + self._left_s(), 0
        while True:
            try:
                said = await self._channel.call(MODEL_INFER, message, metadata, end_s - time.monotonic())
                break
            except Unanswered as error:
                attempts += 1  # KServe's rule for gRPC
                await self._failed(error, attempts, error.code == Code.UNAVAILABLE, end_s)
        try:
            answer = response_from(said)
        except BadTensor as error:
            raise PredictionException(str(error), BAD_GATEWAY) from None
        outputs = [InferOutput.of(one) for one in answer.outputs]
        return InferResponse(answer.id, answer.model_name, outputs, answer.model_version, parameters=answer.parameters)

    def _failed(self, error: Unanswered, attempts: int, again: bool, end_s: float) -> Awaitable[None]:
        """The pause before the next attempt, if one may be made `again` in time. Raises PredictionException."""
        if not again or attempts > self._config.retries or end_s - time.monotonic() < RETRY_PAUSE_S:
            raise PredictionException(error.message, _STATUS.get(error.code, BAD_GATEWAY)) from error
        return asyncio.sleep(RETRY_PAUSE_S)

    def _left_s(self) -> float:
        """The time limit of a call in seconds: the configured one, or the client's remaining time if it is less."""
        return max(min(float(self._config.timeout), WAITED_FOR_UNTIL_S.get() - time.monotonic()), 0.001)

    # --- HTTP

    async def _ask(self, path: str, payload: Any, headers: Mapping[str, Any] | None) -> Any:
        if self._connections is None:
            self._connections = Connections(self._config.predictor_host, _tls() if self._config.use_ssl else None)
        connections, body = self._connections, json.dumps(payload).encode()
        sent = {"content-type": "application/json", **forwarded(headers)}
        end_s, attempts = time.monotonic() + self._left_s(), 0
        while True:
            try:
                status, said = await connections.post(path, body, sent, end_s - time.monotonic())
                break
            except Unanswered as error:
                attempts += 1  # KServe's rule for HTTP: only connections that couldn't be made are tried again
                await self._failed(error, attempts, error.unseen, end_s)
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            found = said.decode("utf-8", "replace")
        if status != HTTPStatus.OK:
            text = found.get("error") or found.get("message") if isinstance(found, dict) else found
            failed = status if status in _FAILURES else BAD_GATEWAY
            raise PredictionException(str(text or f"the predictor answered with HTTP status {status}"), failed)
        return found


def _tls() -> ssl.SSLContext:
    """A TLS context with the authorities of the file that KServe's controller names, otherwise the system's."""
    named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    return ssl.create_default_context(cafile=named or None)


def _authorities() -> bytes:
    """The same authorities as PEM, for gRPC's library, whose own aren't the system's."""
    context = _tls()
    if not context.get_ca_certs():  # they are in a folder, from which OpenSSL reads each when it needs it
        folder = ssl.get_default_verify_paths().capath
        for file in Path(folder).glob("*.0") if folder else ():  # the names that OpenSSL looks for
            context.load_verify_locations(file)
    return "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode()


def _response(found: Any) -> InferResponse:
    if not isinstance(found, dict) or not isinstance(found.get("outputs"), list):
        raise PredictionException("the predictor's answer has no outputs", BAD_GATEWAY)
    try:
        outputs = [
            InferOutput(one["name"], one["shape"], one["datatype"], one["data"], one.get("parameters"))
            for one in found["outputs"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        text = f"an output of the predictor's answer has no name, shape, datatype or data: {error!r}"
        raise PredictionException(text, BAD_GATEWAY) from None
    return InferResponse(
        found.get("id"),
        found.get("model_name", ""),
        outputs,
        found.get("model_version"),
        parameters=found.get("parameters"),
    )
