"""Formats of models: two samples, weights alone, and models that are still being written."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ts.runtime.handlers import HandlerNotUsable, entry_point_of
from ts_frontend.cli import dev
from ts_frontend.config.foreign.mlserver import MLServerDefaults
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ArchiveNotFound, InvalidArchive, InvalidArgument
from ts_frontend.models.archive import Archive, ExtractLimits
from ts_frontend.models.environments import Environments, EnvironmentStore
from ts_frontend.models.formats.format import ModelFiles, ModelFormat, StoredModel
from ts_frontend.models.formats.formats import Formats, known_formats
from ts_frontend.models.formats.mlserver import MLServerFormat
from ts_frontend.models.formats.program import ProgramFormat, ScriptFormat
from ts_frontend.models.formats.triton import TritonFormat
from ts_frontend.models.formats.weights import WeightsFormat
from ts_frontend.models.loader import ModelFactory, ModelLoader
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.models.startup import _StartupLoader, changes, look
from ts_frontend.models.store.store import ModelStore
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.telemetry.metrics.registry import DEFAULT_FILE, MetricsRegistry
from ts_frontend.workers.resources import Inventory
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


NAMED = json.dumps({"architectures": ["BertModel"]})


def folder(place: Path, *names: str, **texts: str) -> Path:
    """A folder with empty files of these names, and files with these texts."""
    place.mkdir()
    for name in names:
        (place / name).write_text(NAMED if name == "config.json" else "")
    for name, text in texts.items():
        (place / f"{name}.py").write_text(text)
    return place


def opened(path: Path, work_dir: Path) -> Archive:
    return Formats((WeightsFormat(),)).open(path, work_dir)


@pytest.mark.parametrize(
    ("names", "kind", "files"),
    [
        (["model.pt"], "torchscript", ["model.pt"]),
        (["model.pt", "README.md", ".cache"], "torchscript", ["model.pt"]),
        (["any.pth"], "torchscript", ["any.pth"]),
        (["model.pt2"], "exported", ["model.pt2"]),
        (["model.onnx", "requirements.txt"], "onnx", ["model.onnx"]),
        (["model.pt", "model.py"], "class", ["model.pt"]),
        (["a.safetensors", "b.safetensors", "model.py"], "class", ["a.safetensors", "b.safetensors"]),
        (["model.safetensors", "config.json", "tokenizer.json"], "transformers", ["model.safetensors"]),
        (["model.safetensors", "config.json", "pytorch_model.bin", "own.py"], "transformers", ["model.safetensors"]),
        (["pytorch_model.bin", "config.json"], "transformers", ["pytorch_model.bin"]),
    ],
)
def test_what_runs_a_folder(names: list[str], kind: str, files: list[str], tmp_path: Path) -> None:
    found = opened(folder(tmp_path / "net", *names), tmp_path)
    assert (found.name, found.adapter, found.adapter_settings["kind"]) == ("net", "weights", kind)
    assert [Path(one).name for one in found.adapter_settings["files"]] == files
    assert found.adapter_settings["torch"] is (kind != "onnx")
    assert found.requirements_file == ("requirements.txt" if "requirements.txt" in names else None)


def test_a_configured_handler_gets_the_folder(tmp_path: Path) -> None:
    place = folder(tmp_path / "net", "model.pth")
    config = ServerConfig(default_service_handler="/handlers/mine.py")
    formats = known_formats(config, env={}, work_dir=tmp_path, gpus=0)
    assert (formats.open(place, tmp_path).adapter, formats.is_alone(place)) == ("", False)
    assert formats.open(place / "model.pth", tmp_path).adapter == "weights", "a file is no archive without a handler"


def test_a_state_without_its_class_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=r"model\.safetensors has weights but no model: put a model\.py"):
        opened(folder(tmp_path / "net", "model.safetensors"), tmp_path)
    bare = folder(tmp_path / "bare", "model.safetensors")
    (bare / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InvalidArchive, match="it names no architectures"):
        opened(bare, tmp_path)


def test_a_download_that_did_not_end_is_refused(tmp_path: Path) -> None:
    parts = [f"model-0000{one}-of-00003.safetensors" for one in (1, 2, 3)]
    whole = folder(tmp_path / "whole", "config.json", "model.safetensors.index.json", *parts)
    assert [Path(one).name for one in opened(whole, tmp_path).adapter_settings["files"]] == parts
    with pytest.raises(
        InvalidArchive, match=r"entry '\S+03-of\S+': one of 3 parts of the weights, of which 1 are there"
    ):
        opened(folder(tmp_path / "net", "config.json", parts[2]), tmp_path)


def test_weights_that_change_other_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=r"adapter_model\.safetensors is an adapter for another model.*merge_and_"):
        opened(folder(tmp_path / "net", "adapter_model.safetensors", "adapter_config.json"), tmp_path)


def test_a_configuration_beside_it_counts(tmp_path: Path) -> None:
    place = folder(tmp_path / "net", "model.onnx")
    (place / "model-config.yaml").write_text("minWorkers: 2\n")
    assert opened(place, tmp_path).config == {"minWorkers": 2}


def test_a_store_may_be_the_model(tmp_path: Path) -> None:
    store = ModelStore(folder(tmp_path / "models", "model.onnx"), formats=Formats((WeightsFormat(),)))
    assert store.alone and store.names() == ["."] == [store.only()]
    other = ModelStore(folder(tmp_path / "several", "a.onnx", "b.onnx"), formats=Formats((WeightsFormat(),)))
    assert not other.alone and other.names() == []


def test_a_version_of_a_triton_repository_may_be_a_program(tmp_path: Path) -> None:
    folder(tmp_path / "net")
    folder(tmp_path / "net" / "1", "model.pt2")
    (archive,) = TritonFormat(0).open(ModelFiles(tmp_path / "net", tmp_path / "net"))
    assert archive.adapter_settings["backend"] == "pytorch"
    assert archive.adapter_settings["model_file"].endswith("net/1/model.pt2")
    (tmp_path / "net" / "1" / "model.pt").touch()
    (archive,) = TritonFormat(0).open(ModelFiles(tmp_path / "net", tmp_path / "net"))
    assert archive.adapter_settings["model_file"].endswith("net/1/model.pt"), "TorchScript's name is Triton's default"


HANDLE = "def handle(data, context):\n    return data\n"


def folder_of(place: Path, **files: str) -> Path:
    """A folder with these files; `_` in a name stands for the dot of its suffix."""
    place.mkdir()
    for name, text in files.items():
        (place / ".".join(name.rsplit("_", 1))).write_text(text)
    return place


def test_a_file_is_the_handler_of_its_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "my-model", echo_py=HANDLE, model_py="", weights_pt="")
    (folder / "model-config.yaml").write_text("batchSize: 3\n")
    archive = Formats().open_unpacked(folder / "echo.py")
    assert (archive.dir, archive.packed, archive.remembered) == (folder, None, False)
    assert (archive.name, archive.handler, archive.config) == ("echo", "echo.py", {"batchSize": 3})
    assert archive.manifest["model"]["serializedFile"] == archive.serialized_file == "weights.pt"
    assert archive.manifest["model"]["modelFile"] == archive.model_file == "model.py"


@pytest.mark.parametrize(
    ("files", "handler"),
    [
        ({"handler_py": "", "other_py": HANDLE}, "handler.py"),
        ({"mine_py": HANDLE, "parts_py": "x = 1"}, "mine.py"),
        ({"only_py": "def predict(x): ..."}, "only.py"),
    ],
)
def test_a_folder_has_its_handler_in_the_file_that_shows_one(
    tmp_path: Path, files: dict[str, str], handler: str
) -> None:
    archive = Formats().open_unpacked(folder_of(tmp_path / "digits-2", **files))
    assert archive.handler == handler
    assert archive.name == ("digits_2" if handler == "handler.py" else handler.removesuffix(".py"))
    assert archive.serialized_file is None


def test_a_folder_with_several_or_no_handlers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=r"2 are candidates \(a\.py, b\.py\): name one"):
        Formats().open_unpacked(folder_of(tmp_path / "two", a_py=HANDLE, b_py=HANDLE))
    with pytest.raises(InvalidArchive, match="there is no Python file"):
        Formats().open_unpacked(folder_of(tmp_path / "none"))
    with pytest.raises(ArchiveNotFound, match="nowhere"):
        Formats().open_unpacked(tmp_path / "nowhere")


def test_a_folder_with_a_manifest_is_what_that_says(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", other_py=HANDLE)
    (folder / "MAR-INF").mkdir()
    (folder / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "named", "handler": "other.py"}}')
    archive = Formats().open_unpacked(folder)
    assert (archive.name, archive.handler, archive.packed) == ("named", "other.py", None)


def test_code_configuration_and_weights_are_watched(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", a_py="", notes_txt="", weights_pt="", written_json="")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.py").touch()
    (folder / "parts").mkdir()
    (folder / "parts" / "b.py").touch()
    before = look(folder)
    assert [os.path.relpath(path, folder) for path in sorted(before)] == ["a.py", "parts/b.py", "weights.pt"]
    (folder / "a.py").write_text("changed = 1")
    (folder / "parts" / "b.py").unlink()
    (folder / "new.yaml").touch()
    (folder / "written.json").write_text("{}")
    found = [os.path.relpath(path, folder) for path in changes(before, look(folder))]
    assert found == ["a.py", "new.yaml", "parts/b.py"]
    assert list(look(folder / "weights.pt")) == [str(folder / "weights.pt")]


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_network_is_told_what_to_write(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch")
    module.nn = SimpleNamespace(Module=type("Module", (), {}))
    monkeypatch.setitem(sys.modules, "torch", module)
    (importable / "only_network.py").write_text("import torch\n\nclass Net(torch.nn.Module):\n    pass\n")
    with pytest.raises(HandlerNotUsable, match=r"only_network\.py has a torch\.nn\.Module, Net") as told:
        entry_point_of("only_network.py", str(importable))
    monkeypatch.delitem(sys.modules, "only_network")
    with (importable / "only_network.py").open("a") as file:
        file.write(written(told.value))
    handle, _ = entry_point_of("only_network.py", str(importable))
    assert callable(handle)
    monkeypatch.delitem(sys.modules, "only_network")


def written(hint: HandlerNotUsable) -> str:
    """The code in a hint."""
    return "\n" + "\n".join(line.removeprefix("    ") for line in str(hint).partition("Add:\n")[2].splitlines()) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], r"nowhere\.py: there is no such file or folder"),
        ([__file__, "--host", "0.0.0.0"], "serves only this machine: "),
    ],
)
def test_what_the_command_refuses(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dev.main(words, lambda config, fd: 0)


def test_a_debugger_that_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="-m pip install debugpy"):
        dev.main([__file__, "--debugpy", "5678"], lambda config, fd: 0)
