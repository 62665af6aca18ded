"""Keeps several servers on the same models: one server's register, scale, default and unregister calls apply to all.

They share a document, a file in a directory or an object in S3: every version of their models, the defaults, and the
unregistered versions. Each server reads it every few seconds, and after each change of its own. It merges its changes
since the last read into the document (`Edits`, `merged`; for each version and each default the last writer wins), and
then applies the changes of the others. Reads are atomic; a write succeeds only if the content is still the one that the
writer has read. A change that fails is logged, listed by health and describe, and tried again with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ts_frontend.config.files import read_beginning, replace_file
from ts_frontend.config.kinds import bucket_of
from ts_frontend.config.snapshot import VersionState, version_state, version_tree
from ts_frontend.errors import ArchiveNotFound, InvalidArgument, ServeError
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.startup import kept_in_store, requested_of, state_of
from ts_frontend.models.store.http import DownloadLimits
from ts_frontend.models.store.objects import is_of_s3, parse, s3_client, s3_code, s3_reason
from ts_frontend.models.store.store import SCHEME, Fetched
from ts_frontend.tasks import Stop, Stopped, in_thread, side_by_side
from ts_frontend.workers.pool import Clock

log = logging.getLogger(__name__)


#: A model's name and version.
Key: TypeAlias = tuple[str, str]

FORMAT = 1
#: The most unregistered versions that the document lists; the oldest are dropped first.
REMOVED_MAX = 1000
DOCUMENT_BYTES_MAX = 16 << 20


class BadDocument(ValueError):
    """The bytes are not a shared document; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class SharedVersion:
    """A version of a model. `stamp`: unique for each registration, also of the same files."""

    state: VersionState
    stamp: str

    def same_source(self, state: VersionState) -> bool:
        """Whether `state`, loaded by a server itself, equals this version in all but the number of workers."""
        mine, other = self.state, state
        return (mine.url or mine.archive) == (other.url or other.archive) and _wishes(mine) == _wishes(other)


def _wishes(state: VersionState) -> dict[str, Any]:
    return {name: value for name, value in state.requested.items() if name != "initial_workers" and value is not None}


@dataclass(frozen=True, slots=True)
class SharedModels:
    """The document. `defaults`: default versions by name; `removed`: stamps of unregistered versions, oldest first."""

    versions: Mapping[Key, SharedVersion] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[Key, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes of one server. `scaled`: the new (minimum, maximum) of workers; `gone`: stamps of unregistered
    versions; `defaults`: new default versions, `first_defaults`: those of names that are new in the document."""

    registered: Mapping[Key, SharedVersion] = field(default_factory=dict)
    scaled: Mapping[Key, tuple[int, int]] = field(default_factory=dict)
    gone: Mapping[Key, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    first_defaults: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.registered or self.scaled or self.gone or self.defaults or self.first_defaults)


def merged(document: SharedModels, edits: Edits) -> SharedModels:
    """The document with the edits. A version that another server unregistered is not scaled; one that another server
    registered again is not unregistered."""
    versions = {**document.versions, **edits.registered}
    removed = {key: stamp for key, stamp in document.removed.items() if key not in edits.registered}
    for key, (least, most) in edits.scaled.items():
        if key in versions and key not in edits.registered:
            state = replace(versions[key].state, min_workers=least, max_workers=most)
            versions[key] = replace(versions[key], state=state)
    for key, stamp in edits.gone.items():
        if key in versions and versions[key].stamp == stamp:
            del versions[key]
            removed[key] = stamp
    wanted = {**edits.first_defaults, **document.defaults, **edits.defaults}
    defaults = {name: version for name, version in wanted.items() if (name, version) in versions}
    for name, version in versions:
        defaults.setdefault(name, version)
    kept = list(removed.items())[-REMOVED_MAX:]
    return SharedModels(versions, defaults, dict(kept))


def encode_models(document: SharedModels, by: str, when: str) -> bytes:
    """The document's bytes. `by`, `when`: the writer and the time, which also make every write's bytes unique."""
    models: dict[str, Any] = {}
    for (name, version), one in document.versions.items():
        model = models.setdefault(name, {"default": document.defaults.get(name, version), "versions": {}})
        model["versions"][version] = {"stamp": one.stamp, **version_tree(one.state)}
    removed = [[name, version, stamp] for (name, version), stamp in document.removed.items()]
    tree = {"torchrelay": FORMAT, "writtenBy": by, "written": when, "models": models, "removed": removed}
    return json.dumps(tree, indent=1).encode()


def decode_shared(data: bytes) -> SharedModels:
    """Raises BadDocument."""
    try:
        tree = json.loads(data)
        if tree["torchrelay"] != FORMAT:
            raise BadDocument(f"it has format {tree['torchrelay']!r}, and this server knows {FORMAT}")
        versions = {
            (str(name), str(version)): SharedVersion(version_state(entry), str(entry["stamp"]))
            for name, model in tree["models"].items()
            for version, entry in model["versions"].items()
        }
        defaults = {str(name): str(model["default"]) for name, model in tree["models"].items()}
        removed = {(str(name), str(version)): str(stamp) for name, version, stamp in tree["removed"]}
    except BadDocument:
        raise
    except KeyError as error:
        raise BadDocument(f"it has no {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadDocument(f"it can't be read: {error}") from None
    return SharedModels(versions, defaults, removed)


NAME = "torchrelay-models.json"
#: The longest wait for a directory's lock, which is held for milliseconds.
LOCK_S_MAX = 10.0
#: The timeout of each read from S3.
S3_S_MAX = 10.0
_ABSENT, _UNCHANGED = ("NoSuchKey", "404"), ("304", "NotModified")
_OVERTAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")


class SharedSnapshotFailed(ServeError):
    """The shared snapshot can't be read or written."""

    remedy = "Fix the directory or bucket that `shared_snapshot` names, or the rights on it; the server tries again."


class Content(NamedTuple):
    """The document's bytes and their tag; both are empty when there is no document."""

    data: bytes
    tag: str


class SharedFile:
    """A file in a directory that all servers mount. A file lock serializes the writers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory / NAME)

    def read(self, tag: str, stop: Stop) -> Content | None:
        """The content; None if its tag is still `tag`. Raises SharedSnapshotFailed."""
        with self._explained():
            found = stop.waited(self._content)
        return None if tag and found.tag == tag else found

    def write(self, data: bytes, tag: str, stop: Stop) -> str | None:
        """Replaces the content with that tag; returns the new tag, None for another's. Raises SharedSnapshotFailed."""
        with self._explained():
            return stop.waited(partial(self._write, data, tag))

    def _content(self) -> Content:
        try:
            data = read_beginning(self.directory / NAME, DOCUMENT_BYTES_MAX + 1)
        except FileNotFoundError:
            self.directory.stat()  # a directory that isn't mounted must not look empty
            return Content(b"", "")
        return Content(data, _tag(data))

    def _write(self, data: bytes, tag: str) -> str | None:
        with self._locked():
            if self._content().tag != tag:
                return None
            replace_file(self.directory / NAME, data, 0o660)
            return _tag(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.directory / f".{NAME}.lock", os.O_RDWR | os.O_CREAT, 0o660)
        try:
            latest_s = time.monotonic() + LOCK_S_MAX
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > latest_s:
                        raise OSError(None, f"another server has held its lock for {LOCK_S_MAX:g} s") from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SharedSnapshotFailed(f"{self}: {error.strerror or error}") from error


class SharedObject:
    """An object in S3, or a compatible store with conditional writes. Methods as of `SharedFile`."""

    def __init__(self, url: str) -> None:
        place = parse(url)
        self.url = f"s3://{place.bucket}/{place.prefix}{NAME}"
        self._where = {"Bucket": place.bucket, "Key": f"{place.prefix}{NAME}"}
        self._client: Any = None

    def __str__(self) -> str:
        return self.url

    def read(self, tag: str, stop: Stop) -> Content | None:
        with self._explained():
            return stop.waited(partial(self._read, tag))

    def _read(self, tag: str) -> Content | None:
        client = self._connected()
        try:
            answer = client.get_object(**self._where, **({"IfNoneMatch": tag} if tag else {}))
            return Content(answer["Body"].read(DOCUMENT_BYTES_MAX + 1), answer["ETag"])
        except client.exceptions.ClientError as error:
            if s3_code(error) in _UNCHANGED:
                return None
            if s3_code(error) in _ABSENT:
                return Content(b"", "")
            raise

    def write(self, data: bytes, tag: str, stop: Stop) -> str | None:
        with self._explained():
            return stop.waited(partial(self._write, data, tag))

    def _write(self, data: bytes, tag: str) -> str | None:
        client = self._connected()
        only_over = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        try:
            answer = client.put_object(**self._where, Body=data, ContentType="application/json", **only_over)
        except client.exceptions.ClientError as error:
            if s3_code(error) in (*_OVERTAKEN, *_ABSENT):
                return None
            raise
        return str(answer["ETag"])

    def _connected(self) -> Any:
        if self._client is None:
            limits = DownloadLimits(timeout_s=S3_S_MAX, connect_timeout_s=S3_S_MAX)
            self._client = s3_client(self.url, limits)
        return self._client

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ServeError as error:  # no boto3
            raise SharedSnapshotFailed(error.message) from error
        except Exception as error:
            if not is_of_s3(error):
                raise
            raise SharedSnapshotFailed(f"{self}: {s3_reason(error)}") from error


#: A storage of the document.
SharedPlace: TypeAlias = SharedFile | SharedObject


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shared_place(setting: Path) -> SharedPlace:
    url = bucket_of(setting)
    if url is not None and not url.startswith("s3:"):
        raise InvalidArgument(f"shared_snapshot = {url}: a directory and s3://BUCKET/PREFIX are possible")
    return SharedFile(setting) if url is None else SharedObject(url)


#: The timeout of one read or write.
PLACE_S_MAX = 30.0
#: The longest pause between two attempts of a failing change.
PAUSE_S_MAX = 60.0
#: Attempts to write after which other servers were faster each time.
OVERTAKEN_MAX = 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _InStep:
    """A version as it was when this server and the document last agreed."""

    model: Model
    stamp: str
    least: int
    most: int


@dataclass(slots=True)
class _Failure:
    """A version that can't be synchronized: the reason, and the time of the next attempt."""

    stamp: str
    text: str
    pause_s: float
    next_s: float


class SharedSnapshot:
    """Keeps the models of `manager` in step with the document at `place`, which is read every `poll_s`."""

    def __init__(
        self, place: SharedPlace, manager: ModelManager, poll_s: float, at_once_max: int = 4, clock: Clock | None = None
    ) -> None:
        self.place = place
        #: Why the last read or write of the document failed, or "".
        self.failure = ""
        self._manager = manager
        self._poll_s = poll_s
        self._at_once_max = at_once_max
        self._clock = clock or Clock()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._seen: dict[Key, _InStep] = {}
        self._defaults: dict[str, str] = {}
        self._stamps: dict[Model, str] = {}
        self._failures: dict[Key, _Failure] = {}
        self._document = SharedModels()
        self._tag = ""

    def changed(self) -> None:
        """To be called after each change that a restart should remember."""
        self._changed.set()

    @property
    def failures(self) -> Sequence[str]:
        """A sentence for each version, default or document that can't be synchronized."""
        return [*([self.failure] if self.failure else []), *(one.text for one in self._failures.values())]

    def standing(self, model: Model) -> str:
        """Why the model differs from the document, "" if it doesn't."""
        failure = self._failures.get((model.name, model.version))
        return failure.text if failure is not None else self.failure

    # --- lifecycle

    async def join(self) -> Sequence[str]:
        """Takes the models of the document when the server starts; returns a sentence for each failure."""
        await self.look(loaded_at_startup=True)
        return self.failures

    async def watch(self) -> None:
        pause_s = self._poll_s
        while True:
            await self._clock.pause(pause_s, self._changed)
            self._changed.clear()
            await self.look()
            pause_s = min(2 * pause_s, PAUSE_S_MAX) if self.failure else self._poll_s

    async def close(self) -> None:
        """Writes this server's last changes. The shutdown unregisters nothing."""
        try:
            async with self._turn:
                await self._push()
        except (SharedSnapshotFailed, BadDocument) as error:
            log.error("The last changes of this server may be missing from the shared snapshot: %s", _text(error))

    async def look(self, *, loaded_at_startup: bool = False) -> None:
        """Writes this server's changes, and follows those of others. Of a series of failures, the first is logged."""
        async with self._turn:
            try:
                await self._push()
            except (SharedSnapshotFailed, BadDocument) as error:
                self._failed(f"The shared snapshot {self.place} can't be used: {_text(error)}")
                return
            if self.failure:
                log.info("The shared snapshot %s can be used again.", self.place)
            self.failure = ""
            await self._follow(self._document, loaded_at_startup)

    def _failed(self, text: str) -> None:
        if text != self.failure:
            log.error("%s. Models stay as they are; it is tried again.", text)
        self.failure = text

    # --- its own changes

    async def _push(self) -> None:
        await self._read()
        for _ in range(OVERTAKEN_MAX):
            edits, local = self._edits(), self._shareable()
            document = merged(self._document, edits)
            if document == self._document or await self._written(document):
                self._agreed(edits, local)
                return
            await self._read()
        raise SharedSnapshotFailed(
            f"{self.place}: other servers were faster to write it {OVERTAKEN_MAX} times in a row"
        )

    async def _read(self) -> None:
        content = await self._at_the_place(partial(self.place.read, self._tag), _none)
        if content is None:
            return
        if len(content.data) > DOCUMENT_BYTES_MAX:
            raise BadDocument(f"it has more than {DOCUMENT_BYTES_MAX} bytes")
        document = await asyncio.to_thread(decode_shared, content.data) if content.data else SharedModels()
        if not self._tag or not content.data:  # the first time, or somebody has removed it
            self._meet(document)
        self._document, self._tag = document, content.tag

    async def _written(self, document: SharedModels) -> bool:
        when = datetime.now(UTC).isoformat()
        data = await asyncio.to_thread(encode_models, document, platform.node(), when)
        tag = await self._at_the_place(partial(self.place.write, data, self._tag), _none)
        if tag is not None:
            self._document, self._tag = document, tag
        return tag is not None

    async def _at_the_place(self, work: Callable[[Stop], T], unwanted: Callable[[T], None]) -> T:
        def limited(stop: Stop) -> T:
            try:
                with stop.after(PLACE_S_MAX, f"it took more than {PLACE_S_MAX:g} s"):
                    return work(stop)
            except Stopped as error:
                raise SharedSnapshotFailed(f"{self.place}: {error}") from error

        return await in_thread(limited, unwanted)

    def _meet(self, document: SharedModels) -> None:
        """Before the first read: models that this server loaded at its start become those of the document if it has
        them; they are unregistered here if they were unregistered there; all others are new."""
        self._seen, self._defaults = {}, {name: self._default(name) for name in document.defaults}
        for key, model in self._shareable().items():
            shared, stamp = document.versions.get(key), document.removed.get(key, "")
            if shared is not None:
                same = self._stamps.get(model) == shared.stamp or shared.same_source(state_of(model, self._manager))
                stamp = shared.stamp if same else ""
            if stamp or (shared is not None and model.loaded_at_startup):
                self._seen[key] = _InStep(model, stamp, model.minimum, model.maximum)

    def _shareable(self) -> dict[Key, Model]:
        """The models that are shared: not those of workflows and repositories, nor those that may still fail."""
        manager = self._manager
        return {
            (model.name, model.version): model
            for model in manager.registry
            if not model.workflow and model.archive.remembered and model not in manager.entering
        }

    def _default(self, name: str) -> str:
        model = self._manager.registry.get(name)
        return "" if model is None else model.version

    def _defaults_now(self) -> dict[str, str]:
        names = {name for name, _ in self._shareable()}
        return {one.name: one.version for one in self._manager.registry.defaults() if one.name in names}

    def _edits(self) -> Edits:
        local, seen = self._shareable(), self._seen
        there = {*local.values()}
        self._stamps = {model: stamp for model, stamp in self._stamps.items() if model in there}
        registered = {
            key: SharedVersion(replace(state_of(model, self._manager), default=False), self._stamp(model))
            for key, model in local.items()
            if key not in seen or seen[key].model is not model
        }
        scaled = {
            key: (model.minimum, model.maximum)
            for key, model in local.items()
            if key not in registered and (seen[key].least, seen[key].most) != (model.minimum, model.maximum)
        }
        gone = {key: one.stamp for key, one in seen.items() if key not in local}
        defaults = self._defaults_now()
        chosen = {
            name: version
            for name, version in defaults.items()
            if name in self._defaults and self._defaults[name] != version and version
        }
        first = {name: version for name, version in defaults.items() if name not in self._defaults}
        return Edits(registered, scaled, gone, chosen, first)

    def _agreed(self, edits: Edits, local: Mapping[Key, Model]) -> None:
        """Remembers that the document now has the edits of `local`."""
        for key in edits.registered:
            model, state = local[key], edits.registered[key].state
            self._seen[key] = _InStep(model, self._stamp(model), state.min_workers, state.max_workers)
        for key, (least, most) in edits.scaled.items():
            self._seen[key] = replace(self._seen[key], least=least, most=most)
        for key in edits.gone:
            del self._seen[key]
        self._defaults.update({**edits.first_defaults, **edits.defaults})
        for name in [name for name in self._defaults if name not in self._document.defaults]:
            del self._defaults[name]

    def _stamp(self, model: Model) -> str:
        return self._stamps.setdefault(model, uuid.uuid4().hex)

    # --- the changes of others

    async def _follow(self, document: SharedModels, loaded_at_startup: bool) -> None:
        for key in [key for key in self._failures if key not in document.versions]:
            del self._failures[key]
        for key in [key for key in self._seen if key not in document.versions]:
            self._retire(key)
        coming = [key for key in document.versions if self._is_new(key, document.versions[key])]
        await side_by_side(
            [self._register(key, document.versions[key], loaded_at_startup) for key in coming], self._at_once_max
        )
        for key, shared in document.versions.items():
            self._scale(key, shared)
        for name, version in document.defaults.items():
            self._set_default(name, version)

    def _retire(self, key: Key) -> None:
        model = self._seen.pop(key).model
        manager = self._manager
        if self._here(key) is not model:
            return
        log.info("Model %s is unregistered, as at another server.", model)
        chosen = self._chosen(key[0])
        manager.registry.discard(model)
        manager.tasks.background(manager.retire(model))
        if not chosen:
            self._defaults[key[0]] = self._default(key[0])

    def _is_new(self, key: Key, shared: SharedVersion) -> bool:
        """Whether to register the version now: it differs from the local one, whose own changes are written."""
        local, seen, failure = self._here(key), self._seen.get(key), self._failures.get(key)
        if seen is None and local is not None:
            return False
        if seen is not None and (seen.stamp == shared.stamp or local is not seen.model):
            return False
        return failure is None or failure.stamp != shared.stamp or self._clock.now_s() >= failure.next_s

    def _chosen(self, name: str) -> bool:
        """Whether this server's default of the name was set by a call that the document doesn't have yet."""
        return self._defaults.get(name, self._default(name)) != self._default(name)

    def _here(self, key: Key) -> Model | None:
        return self._manager.registry.get(*key)

    async def _register(self, key: Key, shared: SharedVersion, loaded_at_startup: bool) -> None:
        chosen = self._chosen(key[0])
        try:
            model = await self._made(key, shared, loaded_at_startup)
        except Exception as error:
            self._not_registered(key, shared, error)
            return
        self._failures.pop(key, None)
        self._stamps[model] = shared.stamp
        self._seen[key] = _InStep(model, shared.stamp, model.minimum, model.maximum)
        if not chosen:
            self._defaults[key[0]] = self._default(key[0])
        log.info("Model %s is registered, as at another server.", model)

    async def _made(self, key: Key, shared: SharedVersion, loaded_at_startup: bool) -> Model:
        """Registers the document's version and returns its model; it replaces the local one once it is ready."""
        manager, state = self._manager, shared.state
        fetched = await self._fetched(state.url or state.archive, state.archive)
        requested, kept = requested_of(key[0], state), kept_in_store(fetched)
        if self._here(key) is None:
            model = await manager.build(kept, requested, loaded_at_startup=loaded_at_startup)
            await manager.add(model)
        else:
            model = await manager.start(kept, await manager.loader.open(kept, requested), requested)
            manager.replace(model)
        manager.loader.set_fetched(model, fetched)
        model.scale_between(state.min_workers, state.max_workers)
        manager.tasks.background(manager.start_workers(model))
        return model

    async def _fetched(self, url: str, name: str) -> Fetched:
        """The archive: from the model store, which the servers may share, else from the other server's URL."""
        store = self._manager.loader.store
        try:
            return await store.recall(url, name)
        except ArchiveNotFound:
            if SCHEME.match(url) is None or name == url:
                raise
        return await store.fetch(url)

    def _not_registered(self, key: Key, shared: SharedVersion, error: Exception) -> None:
        before = self._failures.get(key)
        text = f"Model {key[0]} {key[1]} of the shared snapshot can't be served here: {_text(error)}"
        if before is None or before.text != text:
            log.error("%s. It is tried again.", text, exc_info=None if isinstance(error, ServeError) else error)
        again = before is not None and before.stamp == shared.stamp
        pause_s = min(2 * before.pause_s, PAUSE_S_MAX) if before is not None and again else self._poll_s
        self._failures[key] = _Failure(shared.stamp, text, pause_s, self._clock.now_s() + pause_s)

    def _scale(self, key: Key, shared: SharedVersion) -> None:
        seen, wanted = self._seen.get(key), (shared.state.min_workers, shared.state.max_workers)
        if seen is None or self._here(key) is not seen.model or seen.stamp != shared.stamp:
            return
        if (seen.model.minimum, seen.model.maximum) == (seen.least, seen.most) != wanted:
            log.info("Model %s gets %d to %d workers, as at another server.", seen.model, *wanted)
            self._seen[key] = replace(seen, least=wanted[0], most=wanted[1])
            seen.model.scale_between(*wanted)
            self._manager.tasks.background(self._manager.start_workers(seen.model))

    def _set_default(self, name: str, version: str) -> None:
        if self._default(name) == version or self._here((name, version)) is None or self._chosen(name):
            return
        log.info("Model %s gets version %s as its default, as at another server.", name, version)
        self._manager.registry.set_default(name, version)
        self._defaults[name] = version
        self._manager.changed()


def _text(error: Exception) -> str:
    return error.message if isinstance(error, ServeError) else f"{type(error).__name__}: {error}"


def _none(_: Content | str | None) -> None:
    """Nothing to remove when the caller of a read or write was cancelled."""
