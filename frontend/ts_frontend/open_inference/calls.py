"""Calls that handlers make to models of their own server, in the terms of the Open Inference Protocol. They use the
registry, queues, limits and ledgers of client requests, but need no key."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.errors import Cancelled, DeadlineExceeded, InvalidArgument
from ts_frontend.job import Job
from ts_frontend.models.model import Model, Registry
from ts_frontend.models.repository import Repository
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.models import load_parameters
from ts_frontend.open_inference.requests import joined_messages
from ts_frontend.scheduling.queues import SequenceHeaders
from ts_frontend.scheduling.stream import chunks
from ts_frontend.workers.calls import Caller

INFER, LOAD, UNLOAD, READY = "infer", "load", "unload", "ready"
#: The headers that a nested request inherits from the handler's request.
TRACE_HEADERS = frozenset({"traceparent", "tracestate"})


class ModelCalls:
    """`keys`: the headers that name a request's sequence. Models can be loaded and unloaded after `attach` with a
    repository. Workers enforce the limit of a message's size."""

    def __init__(self, models: Registry, keys: SequenceHeaders) -> None:
        self._models = models
        self._keys = keys
        self._repository: Repository | None = None

    def attach(self, repository: Repository) -> None:
        self._repository = repository

    async def answer(
        self, what: Mapping[str, Any], data: Buffer, caller: Caller
    ) -> AsyncGenerator[tuple[Buffer, bool], None]:
        """Yields the pieces of the answer, with True for the last. `what`: `operation`, `model`, and the operation's
        arguments. Raises ServeError."""
        if what.get("operation") != INFER:
            yield json.dumps(await self._administer(what)).encode(), True
            return
        model = tensor_requests.find(self._models, str(what["model"]), str(what["version"]))
        deadline_s = tensor_requests.deadline_s(what["parameters"], caller.deadline_s)
        answer = self._submit(model, what, data, caller, deadline_s)
        patience = _Patience(answer, caller, deadline_s, model.name)
        try:
            if what["stream"]:
                async for pieces in chunks(answer):
                    patience.renew()
                    for piece in pieces:
                        if len(piece):
                            yield piece, False
            else:
                yield await _joined(answer), True
        except (Cancelled, DeadlineExceeded) as error:
            raise patience.verdict(error) from None
        finally:
            patience.end()
            answer.cancel()

    def _submit(self, model: Model, what: Mapping[str, Any], data: Buffer, caller: Caller, deadline_s: float) -> Job:
        stream = bool(what["stream"])
        if model.signature.decoupled and not stream:
            raise InvalidArgument(f"Model {model.name!r} is decoupled: call it with decoupled=True")
        headers: Pairs = [pair for pair in caller.headers if pair[0] in TRACE_HEADERS]
        headers, _ = tensor_requests.scheduled(model, what["parameters"], headers, deadline_s, self._keys)
        return model.submit(
            [Input("", "\0grpc;stream" if stream else "\0grpc", data)],
            headers=headers,
            deadline_s=deadline_s,
            request_id=str(what["request_id"]) or caller.request_id or None,
            stream=stream,
            version_named=bool(what["version"]),
        )

    # --- the served models

    async def _administer(self, what: Mapping[str, Any]) -> dict[str, Any]:
        operation, model = what.get("operation"), str(what["model"])
        if operation == READY:
            return {"ready": tensor_requests.is_ready(self._models, model, str(what["version"]))}
        if self._repository is None:
            raise InvalidArgument("Models can't be loaded and unloaded before the server has read its repositories")
        if operation == LOAD:
            await self._repository.load(model, *load_parameters({"config": what["config"]} if "config" in what else {}))
        elif operation == UNLOAD:
            await self._repository.unload(model)
        else:
            raise InvalidArgument(f"A model asked for {operation!r}, which this server doesn't know")
        return {}


async def _joined(answer: Job) -> bytes:
    found: list[bytes] = []
    async for pieces in chunks(answer):
        found.extend(bytes(piece) for piece in pieces if len(piece))
    return found[0] if len(found) == 1 else joined_messages(found)


class _Patience:
    """Ends an answer that takes too long: `deadline_s` for all of it, and a limit for the next piece."""

    def __init__(self, answer: Job, caller: Caller, deadline_s: float, model: str) -> None:
        self._answer, self._caller, self._deadline_s, self._model = answer, caller, deadline_s, model
        self._late = ""
        self._timer: asyncio.TimerHandle | None = None
        self.renew()

    def renew(self) -> None:
        self.end()
        left_s = min(self._caller.limit_s, self._deadline_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._late = (
            f"Model {self._model} gave no answer to a call from model {self._caller.model} in time: "
            "all its workers may be busy, perhaps with requests that wait for this one"
        )
        self._answer.cancel()

    def verdict(self, error: Cancelled | DeadlineExceeded) -> Cancelled | DeadlineExceeded:
        """Returns the error for the handler: a timeout, or `error` itself."""
        return DeadlineExceeded(self._late) if self._late else error
