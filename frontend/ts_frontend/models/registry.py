"""The served models by name and version, and the default version of each name."""

from __future__ import annotations

from collections.abc import Iterator

from ts_frontend.config.kinds import names_there
from ts_frontend.errors import DefaultVersionInUse, ModelExists, ModelNotFound, ModelVersionNotFound
from ts_frontend.models.model import Model
from ts_frontend.tasks import Notifier


class _Versions:
    """The versions of one name, in the order they were added; the first is the default until another is set."""

    def __init__(self, first: Model) -> None:
        self.all = {first.version: first}
        self.default = first


class Registry:
    """All models. `changes` is notified when one is added or removed, or its readiness may have changed."""

    def __init__(self) -> None:
        self.changes = Notifier()
        self._names: dict[str, _Versions] = {}

    def __iter__(self) -> Iterator[Model]:
        for versions in self._names.values():
            yield from versions.all.values()

    def find(self, name: str, version: str | None = None) -> Model:
        """The model; its default version if `version` is None or "". Raises ModelNotFound, ModelVersionNotFound."""
        versions = self._names.get(name)
        if versions is None:
            raise self._unknown(name)
        if not version:
            return versions.default
        model = versions.all.get(version)
        if model is None:
            raise _unknown_version(versions, version)
        return model

    def get(self, name: str, version: str = "") -> Model | None:
        """The same as `find`, but None when there is no such model."""
        versions = self._names.get(name)
        if versions is None:
            return None
        return versions.all.get(version) if version else versions.default

    def versions(self, name: str) -> list[Model]:
        """All versions of a name. Raises ModelNotFound."""
        versions = self._names.get(name)
        if versions is None:
            raise self._unknown(name)
        return list(versions.all.values())

    def defaults(self) -> list[Model]:
        return [self._names[name].default for name in sorted(self._names)]

    def is_default(self, model: Model) -> bool:
        versions = self._names.get(model.name)
        return versions is not None and versions.default is model

    def check_free(self, name: str, version: str) -> None:
        """Raises ModelExists when that version is registered."""
        if name in self._names and version in self._names[name].all:
            raise ModelExists(name, version)

    def add(self, model: Model) -> None:
        self.check_free(model.name, model.version)
        if model.name in self._names:
            self._names[model.name].all[model.version] = model
        else:
            self._names[model.name] = _Versions(model)
        self.changes.notify()

    def put(self, model: Model) -> Model | None:
        versions = self._names.get(model.name)
        old = None if versions is None else versions.all.get(model.version)
        if versions is None or old is None:
            self.add(model)
            return None
        versions.all[model.version] = model
        if versions.default is old:
            versions.default = model
        self.changes.notify()
        return old

    def set_default(self, name: str, version: str) -> Model:
        versions = self._names.get(name)
        if versions is None:
            raise self._unknown(name)
        model = versions.all.get(version)
        if model is None:
            raise _unknown_version(versions, version, f"Model version {version} does not exist for model {name}")
        versions.default = model
        self.changes.notify()
        return model

    def remove(self, name: str, version: str | None = None) -> Model:
        model = self.find(name, version)
        versions = self._names[name]
        if len(versions.all) == 1:
            del self._names[name]
        elif versions.default is model:
            raise DefaultVersionInUse(name)
        else:
            del versions.all[model.version]
        self.changes.notify()
        return model

    def discard(self, model: Model) -> None:
        versions = self._names.get(model.name)
        if versions is None or versions.all.get(model.version) is not model:
            return
        del versions.all[model.version]
        if not versions.all:
            del self._names[model.name]
        elif versions.default is model:
            versions.default = next(iter(versions.all.values()))
        self.changes.notify()

    def _unknown(self, name: str) -> ModelNotFound:
        return ModelNotFound(name, lambda: names_there("Models here", sorted(self._names), name))


def _unknown_version(versions: _Versions, version: str, message: str = "") -> ModelVersionNotFound:
    name = versions.default.name
    return ModelVersionNotFound(name, version, message, lambda: names_there(f"Versions of {name}", list(versions.all)))
