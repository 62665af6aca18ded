"""Adapters (LoRA) of language models: loaded and unloaded in a model's workers while these run
(docs/language-models.md)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ts.protocol.frames import Buffer, Input
from ts.protocol.tasks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ts_frontend.errors import (
    AdapterExists,
    AdapterNotFound,
    ArchiveNotFound,
    HandlerFailed,
    InvalidArgument,
    NoWorker,
    Unimplemented,
    WorkerDied,
)
from ts_frontend.job import Job
from ts_frontend.models.manager import ModelManager, Outcome
from ts_frontend.models.model import ROUTE_MARK, Model
from ts_frontend.models.store.store import SCHEME, check_text
from ts_frontend.tasks import undone_on_failure
from ts_frontend.workers.worker import Worker, WorkerState

log = logging.getLogger(__name__)

_NAME = re.compile(r"\w[\w.-]{0,255}")


class Adapters:
    """The calls for adapters. A model's calls come one after another."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager, self._registry = manager, manager.registry
        self._store = manager.loader.store.of_adapters()

    def listed(self, name: str, version: str | None = None) -> dict[str, str]:
        """The sources of a model's adapters by name. Raises ModelNotFound, NoWorker."""
        return dict(_adapters(self._registry.find(name, version)))

    async def load(self, name: str, version: str | None, adapter: str, src: str) -> Outcome:
        """Loads an adapter from a folder in each worker, and in each later one. Raises ServeError; no worker then has
        it."""
        self._manager.check_alone("Changes of adapters")
        model = self._registry.find(name, version)
        _check_changeable(model)
        if not _NAME.fullmatch(adapter):
            raise InvalidArgument("name has 1 to 256 letters, digits, dots, underscores and hyphens")
        if self._registry.get(adapter) is not None:
            raise AdapterExists(f"{adapter} is the name of a model")
        folder = await self._folder(src)
        return await self._manager.tasks.load(self._load(model, adapter, folder))

    async def unload(self, name: str, version: str | None, adapter: str) -> Outcome:
        """Unloads an adapter. Requests that have begun keep it. Raises ServeError."""
        self._manager.check_alone("Changes of adapters")
        model = self._registry.find(name, version)
        return await self._manager.tasks.load(self._unload(model, adapter))

    async def _load(self, model: Model, adapter: str, folder: str) -> Outcome:
        async with model.adapters_turn:
            known = _adapters(model)
            if adapter in known and known[adapter] != folder:
                raise AdapterExists(
                    f"Adapter {adapter} of model {model.name} is loaded from {known[adapter]}: unload it first"
                )
            if adapter not in known:
                model.load_with({**known, adapter: folder})
                async with undone_on_failure() as undo:
                    undo.push_async_callback(_in_workers, model, "DELETE", {"name": adapter})
                    undo.callback(model.load_with, known)
                    answers = await _in_workers(model, "POST", {"name": adapter, "src": folder})
                    if not answers:
                        raise NoWorker(f"Model {model.name} has no worker that is ready")
                    for answer in answers:
                        _check(answer)
                model.answer_to({**known, adapter: folder})
                log.info("Adapter %s of model %s loaded from %s.", adapter, model, folder)
        return Outcome(200, f'Adapter "{adapter}" of model "{model.name}" loaded')

    async def _unload(self, model: Model, adapter: str) -> Outcome:
        async with model.adapters_turn:
            known = _adapters(model)
            if adapter not in known:
                raise AdapterNotFound(f"Model {model.name} has no adapter {adapter}")
            _check_changeable(model)
            rest = {name: source for name, source in known.items() if name != adapter}
            model.load_with(rest)
            model.answer_to(rest)
            for answer in await _in_workers(model, "DELETE", {"name": adapter}):
                if not isinstance(answer, WorkerDied):  # the next one loads without it
                    _check(answer)
            log.info("Adapter %s of model %s unloaded.", adapter, model)
        return Outcome(200, f'Adapter "{adapter}" of model "{model.name}" unloaded')

    async def _folder(self, src: str) -> str:
        """The folder that a client names: in the model store, or opened by `allowed_urls`. Raises ServeError."""
        check_text(src, src)
        scheme = SCHEME.match(src)
        if scheme is not None and scheme[1].lower() != "file":
            raise InvalidArgument(f"src {src[:200]!a}: an adapter is a folder on the server's machine")
        path = url2pathname(urlsplit(src).path) if scheme else src
        return await asyncio.to_thread(_checked, (await self._store.fetch(path)).path, src)


def _checked(folder: Path, src: str) -> str:
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ArchiveNotFound(f"Adapter not found at: {src} (there is no {name}, which peft writes)")
    return str(folder)


def _adapters(model: Model) -> Mapping[str, str]:
    """Raises NoWorker before the first worker of a model is ready, Unimplemented for one that can't have any."""
    if model.openai is None:
        raise NoWorker(f"Model {model.name} has no worker yet that has loaded it")
    if model.openai.adapters is None:
        raise Unimplemented(
            f"Model {model.name} has no adapters: language models of the engines vllm, transformers and llama.cpp have"
        )
    return model.openai.adapters


def _check_changeable(model: Model) -> None:
    _adapters(model)
    if model.openai is not None and model.openai.fixed:
        raise Unimplemented(model.openai.fixed)


async def _in_workers(model: Model, method: str, fields: dict[str, str]) -> list[Buffer | BaseException]:
    """Has each worker change its adapters, those that load the model after they have loaded. Returns their answers."""
    states = (WorkerState.STARTING, WorkerState.LOADING)
    slots = model.pool.slots
    if loading := [slot.attempt for slot in slots if slot.worker is not None and slot.worker.state in states]:
        await asyncio.wait(loading)
    jobs = [
        _job(model, slot.worker, method, fields) for slot in model.pool.slots if slot.ready and slot.worker is not None
    ]
    return await asyncio.gather(*(job.result() for job in jobs), return_exceptions=True)


def _job(model: Model, worker: Worker, method: str, fields: dict[str, str]) -> Job:
    """A request to one worker, which no queue holds up."""
    job = Job(
        model.ledger,
        [Input("", ROUTE_MARK, json.dumps(fields).encode())],
        str(uuid.uuid4()),
        headers=[(":method", method), (":path", "/adapters")],
        alone=True,
    )
    job.enqueue(worker)
    worker.dispatch([job], time.monotonic())
    worker.flush()
    return job


def _check(answer: Buffer | BaseException) -> None:
    """Raises the failure of a worker's call."""
    if isinstance(answer, HandlerFailed) and answer.http_status == InvalidArgument.http_status:
        raise InvalidArgument(answer.message)
    if isinstance(answer, BaseException):
        raise answer
