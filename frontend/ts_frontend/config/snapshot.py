"""Snapshots of the served models and workflows, in TorchServe's format, so that they survive a restart.

A file is Java properties: the settings that aren't defaults, then `model_snapshot`, JSON that TorchServe can read.
Values without a member in TorchServe are in each version's member `torchrelay`. `encode` and `decode` are pure;
SnapshotFiles is the directory: atomic writes, the newest readable file, a bounded number of files. All of it blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from ts_frontend.config import properties
from ts_frontend.config.files import read_file, replace_file, sync_directory

_NAME = re.compile(r"\d{17}-(startup|snapshot|shutdown)\.cfg")
_MODELS_KEY = "model_snapshot"
_DEFAULT_DELAY_MS = 100


class SnapshotKind(Enum):
    """The occasion of a snapshot: after the start, after a change, at the shutdown."""

    STARTUP = "startup"
    SNAPSHOT = "snapshot"
    SHUTDOWN = "shutdown"


class SnapshotError(ValueError):
    """The text isn't a snapshot; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version of a model: its file name in the store (`archive`), its source (`url`, "" if unknown), and its
    settings. `max_batch_delay_set`: False for the default delay. `requested`: the register call's parameters, as JSON,
    so that a restart doesn't take defaults for requested values. `named`: the operator named the directory at a
    start."""

    archive: str
    default: bool
    min_workers: int
    max_workers: int
    batch_size: int = 1
    max_batch_delay_ms: int = _DEFAULT_DELAY_MS
    max_batch_delay_set: bool = False
    response_timeout_s: int = 120
    startup_timeout_s: int = 120
    runtime: str = "python"
    parallel_level: int = 0
    url: str = ""
    requested: Mapping[str, Any] = field(default_factory=dict)
    named: bool = False


@dataclass(frozen=True, slots=True)
class NodeState:
    """The model of a workflow's node: its file name in the model store, and its worker counts."""

    archive: str
    min_workers: int
    max_workers: int


@dataclass(frozen=True, slots=True)
class WorkflowState:
    """A workflow: its file name in the workflow store (`archive`), its source (`url`), the register call's parameters
    (None: unset), and its nodes by the names of their models."""

    archive: str
    url: str
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    nodes: Mapping[str, NodeState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All models by name and version, all workflows, and the rollouts by model. `created_ms`: milliseconds since
    1970."""

    name: str = ""
    created_ms: int = 0
    models: Mapping[str, Mapping[str, VersionState]] = field(default_factory=dict)
    workflows: Mapping[str, WorkflowState] = field(default_factory=dict)
    rollouts: Mapping[str, Any] = field(default_factory=dict)


def encode(snapshot: Snapshot, settings: Mapping[str, str], when: datetime) -> str:
    """The text of a snapshot file. `model_snapshot` comes last, so that it is unreadable in a truncated file."""
    tree: dict[str, Any] = {
        "name": snapshot.name,
        "modelCount": len(snapshot.models),
        "created": snapshot.created_ms,
        "models": {
            name: {version: version_tree(state) for version, state in versions.items()}
            for name, versions in snapshot.models.items()
        },
    }
    ours: dict[str, Any] = {}
    if snapshot.workflows:
        ours["workflows"] = {name: asdict(state) for name, state in snapshot.workflows.items()}
    if snapshot.rollouts:
        ours["rollouts"] = dict(snapshot.rollouts)
    if ours:
        tree["torchrelay"] = ours
    pairs = [pair for pair in settings.items() if pair[0] != _MODELS_KEY]
    pairs.append((_MODELS_KEY, json.dumps(tree, indent=2)))
    return properties.render(pairs, ("Saving snapshot", when.strftime("%a %b %d %H:%M:%S %Y")))


def decode(text: str) -> tuple[dict[str, str], Snapshot]:
    """The settings and the models of a snapshot file of this server or TorchServe.

    :raises SnapshotError: no properties, no `model_snapshot`, or an invalid one.
    """
    try:
        settings = {entry.key: entry.value for entry in properties.parse(text)}
    except properties.PropertiesError as error:
        raise SnapshotError(str(error)) from None
    if _MODELS_KEY not in settings:
        raise SnapshotError(f"it has no {_MODELS_KEY}")
    return settings, decode_models(settings.pop(_MODELS_KEY))


def decode_models(text: str) -> Snapshot:
    """The models in the value of `model_snapshot`.

    :raises SnapshotError: it isn't JSON, or has other members.
    """
    try:
        tree = json.loads(text)
        models = {
            str(name): {str(version): version_state(entry) for version, entry in versions.items()}
            for name, versions in tree["models"].items()
        }
        found = tree.get("torchrelay", {}).get("workflows", {})
        workflows = {str(name): _workflow_state(entry) for name, entry in found.items()}
        rollouts = dict(tree.get("torchrelay", {}).get("rollouts", {}))
        return Snapshot(str(tree.get("name", "")), int(tree.get("created", 0)), models, workflows, rollouts)
    except KeyError as error:
        raise SnapshotError(f"{_MODELS_KEY} has no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{_MODELS_KEY} can't be read: {error}") from None


def version_tree(state: VersionState) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "defaultVersion": state.default,
        "marName": state.archive,
        "minWorkers": state.min_workers,
        "maxWorkers": state.max_workers,
        "batchSize": state.batch_size,
        "maxBatchDelay": state.max_batch_delay_ms,
        "responseTimeout": state.response_timeout_s,
        "startupTimeout": state.startup_timeout_s,
        "runtimeType": state.runtime,
    }
    if state.parallel_level:
        tree["parallelLevel"] = state.parallel_level
    ours: dict[str, Any] = {
        "url": state.url,
        "maxBatchDelaySet": state.max_batch_delay_set,
        "requested": dict(state.requested),
    }
    return tree | {"torchrelay": ours | ({"named": True} if state.named else {})}


def version_state(tree: Mapping[str, Any]) -> VersionState:
    """A version from its JSON. TorchServe's old snapshots lack some members; a changed delay counts as requested."""
    ours = tree.get("torchrelay", {})
    delay_ms = int(tree.get("maxBatchDelay", _DEFAULT_DELAY_MS))
    return VersionState(
        archive=str(tree["marName"]),
        default=tree.get("defaultVersion") is True,
        min_workers=int(tree["minWorkers"]),
        max_workers=int(tree["maxWorkers"]),
        batch_size=int(tree.get("batchSize", 1)),
        max_batch_delay_ms=delay_ms,
        max_batch_delay_set=ours.get("maxBatchDelaySet", delay_ms != _DEFAULT_DELAY_MS) is True,
        response_timeout_s=int(tree.get("responseTimeout", 120)),
        startup_timeout_s=int(tree.get("startupTimeout", 120)),
        runtime=str(tree.get("runtimeType", "python")),
        parallel_level=int(tree.get("parallelLevel", 0)),
        url=str(ours.get("url", "")),
        requested=dict(ours.get("requested", {})),
        named=ours.get("named") is True,
    )


def _workflow_state(tree: Mapping[str, Any]) -> WorkflowState:
    nodes = {name: NodeState(**entry) for name, entry in tree["nodes"].items()}
    return WorkflowState(**{**tree, "nodes": nodes})


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot file that could be read."""

    path: Path
    settings: Mapping[str, str]
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The directory of snapshots; `kept_max` files stay in it. One writer at a time."""

    directory: Path
    kept_max: int = 10

    def names(self) -> list[str]:
        """Names of all snapshot files, the oldest first (their names sort by time).

        :raises OSError: the directory is there and can't be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(name for name in os.listdir(self.directory) if _NAME.fullmatch(name))
        return []

    def newest(self) -> tuple[FoundSnapshot | None, tuple[str, ...]]:
        """The newest readable file (None without any), and a sentence for each newer one that can't be read."""
        skipped: list[str] = []
        try:
            names = self.names()
        except OSError as error:
            return None, (f"the models of the last run aren't restored, the snapshots can't be read: {error}",)
        for name in reversed(names):
            path = self.directory / name
            try:
                settings, snapshot = decode(properties.decode(read_file(path)))
            except (OSError, SnapshotError) as error:
                skipped.append(f"snapshot {path} is skipped: {error}")
                continue
            return FoundSnapshot(path, settings, snapshot), tuple(skipped)
        return None, tuple(skipped)

    def write(
        self,
        kind: SnapshotKind,
        models: Mapping[str, Mapping[str, VersionState]],
        settings: Mapping[str, str],
        now: datetime | None = None,
        workflows: Mapping[str, WorkflowState] | None = None,
        rollouts: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write one file whole or not at all, then delete the oldest ones over `kept_max`.

        :raises OSError: it couldn't be written; the older files are as they were.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        now = now or datetime.now()
        names = self.names()
        name = f"{_stamp_after(names, now)}-{kind.value}.cfg"
        snapshot = Snapshot(name, round(now.timestamp() * 1000), models, workflows or {}, rollouts or {})
        replace_file(self.directory / name, encode(snapshot, settings, now).encode(), 0o600)
        sync_directory(self.directory)
        self._delete(names[: max(0, len(names) + 1 - self.kept_max)])
        return self.directory / name

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.directory / name).unlink()


def _stamp_after(names: list[str], now: datetime) -> str:
    """`yyyyMMddHHmmssSSS` of now, or just after the newest name: it must stay the newest when the clock is set back."""
    stamp = _stamp(now)
    newest = names[-1][:17] if names else ""
    if stamp > newest:
        return stamp
    with contextlib.suppress(ValueError):
        newest_time = datetime.strptime(newest + "000", "%Y%m%d%H%M%S%f")
        return _stamp(newest_time + timedelta(milliseconds=1))
    return stamp


def _stamp(when: datetime) -> str:
    return when.strftime("%Y%m%d%H%M%S") + f"{when.microsecond // 1000:03d}"
