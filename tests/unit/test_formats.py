"""A format of models that the server doesn't know: one class, given to `Formats`, and all parts serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive, InvalidArgument
from ts_frontend.models.archive import Archive
from ts_frontend.models.environments import Environments, EnvironmentStore
from ts_frontend.models.extraction import ExtractLimits
from ts_frontend.models.factory import ModelFactory
from ts_frontend.models.formats.format import ModelFiles, ModelFormat, StoredModel
from ts_frontend.models.formats.formats import Formats, known_formats
from ts_frontend.models.formats.mlserver import MLServerFormat
from ts_frontend.models.formats.program import ProgramFormat
from ts_frontend.models.formats.script import ScriptFormat
from ts_frontend.models.loader import ModelLoader
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.registry import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.models.startup import _StartupLoader
from ts_frontend.models.store.store import ModelStore
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.telemetry.metrics.registry import DEFAULT_FILE, MetricsRegistry
from ts_frontend.workers.devices import Inventory
from ts_frontend.workers.supervisor import Supervisor


class Toys(ModelFormat):
    """A folder with a toy.txt, whose text is the version."""

    adapter = "toy"
    nested = True

    def matches(self, path: Path) -> bool:
        return (path / "toy.txt").is_file()

    def open(self, files: ModelFiles) -> list[Archive]:
        version = (files.directory / "toy.txt").read_text()
        if not version:
            raise InvalidArchive(f"{files.path.name}: toy.txt is empty")
        archive = Archive(
            files.directory,
            name="toy",
            version=version,
            handler="toy.txt",
            adapter=self.adapter,
            adapter_settings={"colour": "red"},
        )
        return [archive]

    def stored(self, root: Path, path: str) -> StoredModel | None:
        return StoredModel(path, "toy", (root / path / "toy.txt").read_text())

    def default_version(self, archives: Sequence[Archive]) -> str | None:
        return min(archive.version for archive in archives)


class Boxes(ModelFormat):
    """A folder with a file box.txt: a version of the model in each line."""

    adapter = "box"
    versioned = True

    def matches(self, path: Path) -> bool:
        return (path / "box.txt").is_file()

    def open(self, files: ModelFiles) -> list[Archive]:
        text = (files.directory / "box.txt").read_text() if files.config_text is None else files.config_text
        if not text:
            raise InvalidArgument(f"{files.path.name}: the box is empty")
        name = files.name or files.directory.name
        return [
            Archive(files.directory, None, name, version, handler="box.txt", adapter=self.adapter, remembered=False)
            for version in text.split()
        ]

    def default_version(self, archives: Sequence[Archive]) -> str | None:
        return archives[-1].version


def served(tmp_path: Path, scenario: Callable[[ModelManager], Coroutine[Any, Any, None]]) -> None:
    """Runs it with all parts of a server that load models, but no workers."""

    async def run() -> None:
        config, registry = ServerConfig(default_workers_per_model=0), Registry()
        supervisor = Supervisor(
            {},
            work_dir=tmp_path / "work",
            first_worker_id=1,
            first_distribution_id=1,
            fork=False,
            inventory=Inventory(),
            on_line=lambda *_: None,
        )
        formats = Formats([Toys(), Boxes()])
        factory = ModelFactory(
            config, supervisor, {}, registry.changes, MetricsRegistry(read_definitions(DEFAULT_FILE), "log", "h")
        )
        store = ModelStore(tmp_path / "store", formats=formats, copies=tmp_path / "copies")
        environments = Environments(EnvironmentStore(tmp_path / "env", 1), install=False, timeout_s=1)

        def settings(requested: Requested, archive: Archive, name: str, version: str) -> ModelSettings:
            return resolve(requested, archive.config, {}, config, handler=archive.handler)

        loader = ModelLoader(
            store,
            formats,
            factory,
            supervisor,
            settings,
            environments,
            work_dir=tmp_path / "work",
            extract_limits=ExtractLimits(),
        )
        manager = ModelManager(registry, loader, model_api=True, unregister_timeout_s=1, on_change=lambda: None)
        await scenario(manager)
        await manager.close(0)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two toys, one of them deep, and a folder of no format."""
    for folder, version in (("store/a", "2"), ("store/deep/down/b", "1")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "toy.txt").write_text(version)
    (tmp_path / "store/plain").mkdir()
    return tmp_path / "store"


def test_a_store_lists_its_models(store: Path) -> None:
    found = ModelStore(store, formats=Formats([Toys()]))
    assert found.names() == ["a", "deep/down/b", "plain"]
    assert found.models() == [("a", "toy", "2"), ("deep/down/b", "toy", "1")]
    assert ModelStore(store).names() == ["a", "deep", "plain"]


def test_archives_of_a_store_cost_nothing_when_its_folders_are_asked_for_names(store: Path) -> None:
    looked = []

    class Watched(Toys):
        def matches(self, path: Path) -> bool:
            looked.append(path.name)
            return super().matches(path)

    for number in range(20):
        (store / f"m{number}.mar").touch()
    assert ModelStore(store, formats=Formats([Watched()])).models() == [("a", "toy", "2"), ("deep/down/b", "toy", "1")]
    assert set(looked) == {"a", "b", "deep", "down", "plain", "store"}


def test_it_is_registered_with_its_adapter_and_its_own_default(store: Path, tmp_path: Path) -> None:
    async def scenario(manager: ModelManager) -> None:
        outcome = await manager.register("a", initial_workers=0)
        assert outcome.status.startswith('Model "toy" Version: 2 registered with 0 initial workers')
        assert manager.registry.find("toy").version == "2"
        await manager.register("deep/down/b", initial_workers=0)
        model = manager.registry.find("toy")
        assert (model.version, model.adapter) == ("1", "toy")
        assert model.pool.plan.load["adapter_settings"] == {"colour": "red"}
        (store / "a" / "toy.txt").write_text("")
        with pytest.raises(InvalidArchive, match="a: toy.txt is empty"):
            await manager.register("a", initial_workers=0)

    served(tmp_path, scenario)


class Looked(ModelStore):
    looks = 0

    def names(self) -> list[str]:
        self.looks += 1
        return super().names()


def test_a_start_lists_the_store_once_however_many_models_it_has(store: Path, tmp_path: Path) -> None:
    async def scenario(manager: ModelManager) -> None:
        looked = Looked(store, formats=manager.loader.formats)
        config = ServerConfig(model_store=store, load_models=("a", "deep/down/b", "all"))
        loader = _StartupLoader(config, manager, looked, 0, lambda step: None)
        await loader.load()
        assert [model.version for model in manager.registry.versions("toy")] == ["2", "1"]
        assert looked.looks == 1

    served(tmp_path, scenario)


@pytest.mark.parametrize("named", [(), ("m0.mar",), ("x=m0.mar", "m0.mar")])
def test_a_start_that_needs_no_names_does_not_search_the_store(
    named: tuple[str, ...], store: Path, tmp_path: Path
) -> None:
    """The store may be `/`, or a folder of a million files."""
    (store / "m0.mar").touch()

    async def scenario(manager: ModelManager) -> None:
        looked = Looked(store, formats=manager.loader.formats)
        config = ServerConfig(model_store=store, load_models=named)
        failures = await _StartupLoader(config, manager, looked, 0, lambda step: None).load()
        assert bool(failures) is bool(named)  # the archive is empty
        assert looked.looks == 0

    served(tmp_path, scenario)


def test_a_model_repository_serves_its_versions(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "boxes/m").mkdir(parents=True)
    (tmp_path / "boxes/m/box.txt").write_text("x y")

    async def scenario(manager: ModelManager) -> None:
        repository = Repository(manager, [tmp_path / "boxes"], "explicit", 1.0, workers=0)
        load = partial(repository.load, "m")
        await load()
        assert [model.version for model in manager.registry.versions("m")] == ["x", "y"]
        assert manager.registry.find("m").version == "y"
        await load(config_text="z")
        assert manager.registry.find("m").version == "z"
        with pytest.raises(InvalidArgument, match="the box is empty"):
            await load(config_text="")

    served(tmp_path, scenario)


def test_only_the_models_of_a_store_import_from_its_root(tmp_path: Path) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    for folder in (store / "deep" / "m", elsewhere / "m"):
        folder.mkdir(parents=True)
        (folder / "model-settings.json").write_text('{"implementation": "rt.Model"}')
    (store / "linked").symlink_to(elsewhere / "m")
    path_of = lambda formats, path: formats.open(path, tmp_path).adapter_settings["python_path"]  # noqa: E731
    formats = Formats((MLServerFormat(MLServerDefaults(), store),))
    assert path_of(formats, store / "deep" / "m") == path_of(formats, store / "linked") == [str(store)]
    assert path_of(formats, elsewhere / "m") == []
    begun = Formats((MLServerFormat(MLServerDefaults(only=True), store, elsewhere),))
    assert path_of(begun, store / "deep" / "m") == [str(store), str(elsewhere)], "as after `mlserver start`"


@pytest.mark.parametrize(
    ("text", "is_azures"),
    [
        ("def init(): ...\ndef run(data): ...\n", True),
        ("def init(): ...\nclass A:\n    def run(data): ...\n", False),
        ("def init(): ...\ndef run(data): ...\ndef handle(data, context): ...\n", False),
        ("import kserve\ndef init(): ...\ndef run(data): ...\n", False),
    ],
)
def test_a_python_file_is_azures_script_a_program_or_a_handler(tmp_path: Path, text: str, is_azures: bool) -> None:
    file = tmp_path / "score.py"
    file.write_text(text)
    known = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    assert isinstance(known.of(file), ScriptFormat if is_azures else ProgramFormat)
    if is_azures:
        archive = known.open_unpacked(file)
        assert (archive.handler, archive.model_file, archive.dir) == ("score_script", "score.py", tmp_path)
