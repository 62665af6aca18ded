"""The document that several servers share: every version of their models, the defaults, and the unregistered versions.

No I/O. `Edits` are a server's changes since it was last in step. `merged` applies them to the current document, so that
changes of other servers stay; for each version and each default the last writer wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ts_frontend.config.snapshot import VersionState, version_state, version_tree

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
