"""Tries models as a server with given settings would: opens them, loads each with one worker, sends it requests, and
reports what the server would log. It uses the server's own parts, none of which listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mimetypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ts.protocol.frames import Input
from ts_frontend.config.kinds import ProgramLines
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis.lint import lint
from ts_frontend.diagnosis.report import Report, Section, Severity, size
from ts_frontend.errors import ServeError
from ts_frontend.job import Job
from ts_frontend.models.archive import Archive, is_gguf, real, work_dir
from ts_frontend.models.formats.format import ModelFiles
from ts_frontend.models.formats.formats import FOLDERS_MAX
from ts_frontend.models.loader import settings_of
from ts_frontend.models.model import Model
from ts_frontend.models.repository import names_in
from ts_frontend.models.settings import Requested
from ts_frontend.models.store.store import Fetched
from ts_frontend.process import prepare
from ts_frontend.server import Parts, Server, missing_torch
from ts_frontend.tasks import owned
from ts_frontend.telemetry.logging.logs import setup_logs
from ts_frontend.workers.process import StartFailed
from ts_frontend.workers.resources import available_bytes

#: The number of requests in the batch for a model with batches.
BATCH_MAX = 4
ANSWER_CHARS_MAX = 80
#: The part of the startup timeout beyond which a load is reported.
SLOW_LOAD_PART = 0.5
#: The most files of a model that are counted for the report.
FILES_MAX = 10_000
#: The most models that are tried.
MODELS_MAX = 500
#: The seconds of a step after which its limit is told.
SLOW_S = 5.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to send: its `name` in the report, its body, and the content type ("" for none)."""

    name: str
    data: bytes
    content_type: str = ""

    @staticmethod
    def of_file(path: Path) -> SampleRequest:
        """The content of a file, with the type that its name suggests. Raises OSError."""
        return SampleRequest(path.name, path.read_bytes(), mimetypes.guess_type(path.name)[0] or "")

    def inputs(self, model: Model) -> list[Input]:
        """The inputs as an HTTP client would send them: tensors to a model of another server, else the body."""
        if model.takes_tensors and self.content_type == "application/json":
            return [Input("", "\0json", self.data)]
        return [Input("body", self.content_type, self.data)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to try, by its `title`: an archive, a model's folder, or a `handler`'s file. `versioned`: a folder with
    versions; `hub`: the name of its repository of Hugging Face's hub."""

    title: str
    path: Path
    versioned: bool = False
    handler: bool = False
    hub: str = ""


#: Tells how long a step may still take, while it runs.
Tell = Callable[[str], object]


def check(
    path: Path,
    config: ServerConfig,
    samples: Sequence[SampleRequest] = (),
    *,
    load: bool = True,
    tell: Tell = lambda text: None,
    url: str = "",
) -> Report:
    """Reports a server's findings, with these settings, about the models at `path`: an archive, a model's folder, a
    handler's file, or a directory of them. Without `load` their handlers don't run. `url`: a model of Hugging Face's
    hub instead. Raises ServeError, OSError."""
    with work_dir(config.temp_dir) as directory:  # the next server removes it if this process is killed
        config = _apart(directory if url else path, config, directory)
        if not load:
            config = replace(config, worker_start="exec")  # nothing is imported in advance
        logs = setup_logs(config)
        try:
            return asyncio.run(_check(path, url, Server(config, logs), samples, load, tell))
        finally:
            logs.close()


def _apart(path: Path, config: ServerConfig, directory: Path) -> ServerConfig:
    """The settings for a trial, which writes only to `directory` and serves no other models."""
    store = path if path.is_dir() else config.model_store or path.absolute().parent
    return replace(
        config,
        model_store=store,
        workflow_store=None,
        model_repository=(),
        load_models=(),
        program=ProgramLines(()),
        snapshot=None,
        ncs=True,
        console_log=False,
        log_config=None,
        log_location=directory / "logs",
        metrics_location=directory / "logs",
        debug_errors=True,
        temp_dir=directory,
        work_dir=None,
    )


def _settings(report: Report, config: ServerConfig) -> None:
    found = Section("settings", counted=False)
    for note in config.notes:
        if note.level >= logging.WARNING:
            found.warn("settings", note.text)
    try:
        prepare(config)
    except ServeError as error:
        found.error("settings", error.message)
    if found.findings:
        report.sections.append(found)


@contextlib.contextmanager
def _told_if_slow(tell: Tell, text: str) -> Iterator[None]:
    later = asyncio.get_running_loop().call_later(SLOW_S, tell, text)
    try:
        yield
    finally:
        later.cancel()


async def _check(
    path: Path, url: str, server: Server, samples: Sequence[SampleRequest], load: bool, tell: Tell
) -> Report:
    report = Report("model")
    _settings(report, server.config)
    async with server.parts(serving=False) as parts:
        searched = Section(str(path), counted=False)
        with (
            listened(searched),
            _told_if_slow(tell, f"still looking for models in {path}: {FOLDERS_MAX} folders at most"),
        ):
            found = await _of_hub(url, parts, report) if url else await asyncio.to_thread(candidates, path, parts)
        if len(found) > MODELS_MAX:
            searched.warn("files", f"there are {len(found)} models: the first {MODELS_MAX} are tried. Name fewer")
        if searched.findings:
            report.sections.append(searched)
        trial = _Trial(server.config, parts, samples, load, tell)
        for candidate in found[:MODELS_MAX]:
            await trial.run(report, candidate)
    if not found and not url:
        report.section(str(path)).error("files", NO_MODEL)
    elif load and any(section.failed for section in report.sections):
        for warning in missing_torch(server.config):
            report.sections[0].warn("torch", warning)
    return report


NO_MODEL = (
    "there is no model: neither an archive (.mar, .tar.gz), nor a folder with MAR-INF/MANIFEST.json, config.pbtxt, "
    "versions or model-settings.json. A handler's file can be named itself"
)


async def _of_hub(url: str, parts: Parts, report: Report) -> list[Candidate]:
    """The candidate that a URL of the hub names; [] and an error in the report if it can't be fetched."""
    try:
        fetched = await parts.store.fetch(url, named=True)
    except ServeError as error:
        report.section(url).error("files", error.message)
        return []
    return [Candidate(url, fetched.path, hub=fetched.hub)]


def candidates(path: Path, parts: Parts) -> list[Candidate]:
    """The candidates at `path`. Blocking."""
    formats = parts.manager.loader.formats
    if path.is_file():
        return [Candidate(str(path), path, handler=formats.is_handler(path))]
    if not path.is_dir():
        return [Candidate(str(path), path)]
    if formats.versioned(path) is not None:
        return [Candidate(str(path), path, versioned=True)]
    if formats.is_model(path):
        return [Candidate(str(path), path)]
    versioned = [name for name in names_in(path) if formats.versioned(path / name) is not None]
    others = [name for name in parts.store.names() if name.partition("/")[0] not in versioned]
    shown = [name for name in others if (path / name).is_file() or formats.shown(path / name) is not None]
    found = [Candidate(str(path / name), path / name, versioned=name in versioned) for name in (*versioned, *shown)]
    return sorted(found, key=lambda candidate: candidate.title)


class _Said(logging.Handler):
    """Keeps the server's log records, from warnings on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def listened(section: Section) -> Iterator[None]:
    """Puts the server's warnings into the report while the block runs."""
    said, logger = _Said(), logging.getLogger("ts_frontend")
    logger.addHandler(said)
    try:
        yield
    finally:
        logger.removeHandler(said)
        errors = [one.text for one in section.findings if one.severity is Severity.ERROR]
        for text in said.texts:
            if not any(error in text for error in errors):
                section.warn("server", text)


class _Trial:
    def __init__(
        self, config: ServerConfig, parts: Parts, samples: Sequence[SampleRequest], load: bool, tell: Tell
    ) -> None:
        self._config, self._parts, self._samples, self._loads = config, parts, samples, load
        self._tell = tell
        self._loader = parts.manager.loader
        self._workers = config.default_workers_per_model or parts.gpus or os.cpu_count() or 1

    async def run(self, report: Report, candidate: Candidate) -> None:
        section = report.section(candidate.title)
        with listened(section):
            try:
                archives = await self._opened(candidate)
            except (ServeError, OSError) as error:
                section.error("files", _message(error))
                return
        for archive in archives:
            if len(archives) > 1:
                section = section if archive is archives[0] else report.section(candidate.title)
                section.title = f"{candidate.title}, version {archive.version}"
            try:
                await self._try(section, candidate, archive)
            finally:
                await asyncio.to_thread(archive.remove)

    async def _opened(self, candidate: Candidate) -> list[Archive]:
        path, formats = candidate.path, self._loader.formats
        if candidate.handler:
            whole = path.resolve()
            return [Archive(whole.parent, name=path.stem, handler=path.name)]
        if candidate.versioned:
            return await asyncio.to_thread(formats.open_versions, ModelFiles(path, path))
        archive = await self._loader.open(self._fetched(candidate), Requested())
        await self._loader.unpack(archive)
        return [archive]

    def _fetched(self, candidate: Candidate) -> Fetched:
        return Fetched(real(candidate.path), str(candidate.path), downloaded=False, hub=candidate.hub)

    async def _try(self, section: Section, candidate: Candidate, archive: Archive) -> None:
        single = candidate.path if archive.packed is None and is_gguf(candidate.path.name) else None
        files, unpacked_bytes = await asyncio.to_thread(_measured, single or archive.dir)
        section.facts |= {"files": files, "size_bytes": unpacked_bytes}
        if not candidate.handler:
            what = f"{archive.name or candidate.path.stem} {archive.version}"
            section.ok("files", f"{what}, {files} files, {size(unpacked_bytes)}")
            await asyncio.to_thread(lint, section, archive, self._config, loads=self._loads)
        if section.failed:
            return
        if not self._loads:
            with listened(section):
                settings_of(self._config, Requested(), archive, archive.name or candidate.path.stem, archive.version)
            return
        with listened(section):
            try:
                model = await self._loader.build(
                    self._fetched(candidate),
                    Requested(model_name=archive.name or None, initial_workers=self._workers),
                    replace(archive, packed=None),
                    loaded_at_startup=True,
                )
            except ServeError as error:
                section.error("server", error.message)
                return
            try:
                await self._served(section, model)
            finally:
                await self._loader.remove(model)

    # --- with a worker

    async def _served(self, section: Section, model: Model) -> None:
        if model.graph is not None:
            names = ", ".join(name for name, _ in model.steps)
            section.ok("steps", f"its requests go to {names}, which a server checks it with when it loads it")
            return
        starting = owned(model.pool.scale(1))
        batch = await self._batch(model)
        limit_s = model.settings.startup_timeout_s
        try:
            with _told_if_slow(self._tell, f"{section.title} is still loading: {limit_s:g} s at most (startupTimeout)"):
                await starting
        except StartFailed as error:
            section.error("handler", error.message, (error.traceback or "\n".join(error.tail)).splitlines())
            for job in batch:
                job.cancel()
            return
        self._loaded(section, model)
        await self._answered_together(section, batch)
        for sample in self._samples:
            await self._asked(section, model, sample)

    async def _batch(self, model: Model) -> list[Job]:
        """Requests that wait for the worker and so come to the handler together; [] for a model without batches."""
        settings = model.settings
        if not self._samples or settings.batch_size < 2 or _refuses_samples(model) or settings.continuous_batching:
            return []
        await asyncio.sleep(0)
        if model.pool.unavailable or settings.use_job_ticket:
            return []
        return [model.submit(self._samples[0].inputs(model)) for _ in range(min(settings.batch_size, BATCH_MAX))]

    def _loaded(self, section: Section, model: Model) -> None:
        worker = model.pool.slots[0].worker
        assert worker is not None
        load_s = float(worker.info.get("load_s", 0.0))
        resident_bytes, own_bytes = _memory(worker.pids)
        section.facts |= {"load_s": round(load_s, 3), "memory_bytes": resident_bytes, "own_memory_bytes": own_bytes}
        own = f", {size(own_bytes)} of them its own" if own_bytes else ""
        section.ok("handler", f"loaded in {load_s:.2f} s; the worker has {size(resident_bytes)} of memory{own}")
        limit_s = model.settings.startup_timeout_s
        if load_s > limit_s * SLOW_LOAD_PART:
            section.warn("handler", f"it took {load_s:.0f} s to load, and startupTimeout is {limit_s} s: raise it")
        needed, free = (own_bytes or resident_bytes) * (model.minimum - 1), available_bytes()
        if needed > free:
            text = f"{model.minimum} workers need about {size(needed)} more, and {size(free)} are free"
            section.warn("memory", f"{text}: set minWorkers in model-config.yaml, or default_workers_per_model")

    async def _answered_together(self, section: Section, batch: Sequence[Job]) -> None:
        failures = [one for one in [await _failure(job) for job in batch] if one is not None]
        if failures:
            section.error("batch", f"{len(batch)} requests in one batch: {failures[0]}")
        elif batch:
            section.ok("batch", f"{len(batch)} requests in one batch were answered")

    async def _asked(self, section: Section, model: Model, sample: SampleRequest) -> None:
        if _refuses_samples(model):
            section.warn("request", f"{sample.name} wasn't sent: the model takes sequences of requests")
            return
        begun_s = time.monotonic()
        try:
            job = model.submit(sample.inputs(model))
        except ServeError as error:
            section.error("request", f"{sample.name}: {_told(error)}")
            return
        limit_s = model.settings.response_timeout_s
        with _told_if_slow(self._tell, f"{sample.name} has no answer yet: {limit_s:g} s at most (responseTimeout)"):
            failure = await _failure(job)
        took_s = time.monotonic() - begun_s
        if failure is not None:
            section.error("request", f"{sample.name}: {failure}")
            return
        answer = bytes(await job.result())
        section.facts["answer_s"] = round(took_s, 4)
        section.ok(
            "request", f"{sample.name}: answered in {took_s * 1000:.0f} ms, {size(len(answer))}: {_short(answer)}"
        )


def _refuses_samples(model: Model) -> bool:
    return model.stateful


async def _failure(job: Job) -> str | None:
    try:
        await job.result()
    except ServeError as error:
        return _told(error)
    if not 200 <= job.status < 300:
        return f"the handler set status {job.status} {job.phrase}".rstrip()
    return None


def _told(error: ServeError) -> str:
    return f"HTTP {error.http_status}, gRPC {error.code.name}: {error.message}"


def _message(error: ServeError | OSError) -> str:
    return error.message if isinstance(error, ServeError) else str(error)


def _short(answer: bytes) -> str:
    text = " ".join(answer[: 4 * ANSWER_CHARS_MAX].decode("utf-8", "backslashreplace").split())
    return text if len(text) <= ANSWER_CHARS_MAX else f"{text[:ANSWER_CHARS_MAX]} …"


def _measured(directory: Path) -> tuple[int, int]:
    if directory.is_file():
        return 1, directory.stat().st_size
    count = total_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += Path(folder, name).stat().st_size
            count += 1
            if count >= FILES_MAX:
                return count, total_bytes
    return count, total_bytes


def _memory(pids: Sequence[int]) -> tuple[int, int]:
    """Resident memory of processes, and the part of it that they share with no others (0 where that isn't known)."""
    resident_bytes = own_bytes = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process: Any = psutil.Process(pid)
            resident_bytes += process.memory_info().rss
            own_bytes += getattr(process.memory_full_info(), "uss", 0)
    return resident_bytes, own_bytes
