"""torch-model-archiver: every option, every format, collisions, refusals, and the real command."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import resource
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model_archiver import ModelArchiver, ModelArchiverConfig, ModelArchiverError
from ts_frontend.models.archive import ExtractLimits
from ts_frontend.models.formats.formats import Formats

FORMATS = {"default": "m.mar", "zip-store": "m.mar", "tgz": "m.tar.gz", "no-archive": "m"}


@pytest.fixture
def src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model's files."""
    files = {
        "handler.py": "def handle(data, context): ...",
        "net.py": "class Net: ...",
        "model.pt": "weights",
        "requirements.txt": "numpy",
        "model-config.yaml": "batchSize: 2",
        "index_to_name.json": "{}",
        "assets/vocab.txt": "a b c",
        "assets/deep/config.json": "{}",
        "assets/__pycache__/x.pyc": "",
        "assets/.hidden": "",
        "conf/a/config.json": '{"a": 1}',
        "conf/b/config.json": '{"b": 1}',
    }
    for name, text in files.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    monkeypatch.chdir(tmp_path / "src")
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    return tmp_path / "src"


def archive(**options: Any) -> Path:
    config = {"model_name": "m", "handler": "handler.py", "version": "1.0", "export_path": "out", **options}
    return ModelArchiver.generate_model_archive(ModelArchiverConfig(**config))


def names(path: Path) -> list[str]:
    """The files of an archive but its manifest."""
    if path.is_dir():
        found = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    elif path.suffix == ".mar":
        found = zipfile.ZipFile(path).namelist()
    else:
        with tarfile.open(path) as package:
            found = [name.removeprefix("m/") for name in package.getnames()]
    return sorted(name for name in found if name != "MAR-INF/MANIFEST.json")


ALL_OPTIONS = {
    "serialized_file": "model.pt",
    "model_file": "net.py",
    "requirements_file": "requirements.txt",
    "config_file": "model-config.yaml",
    "extra_files": "index_to_name.json, assets",
    "runtime": "python3",
}


@pytest.mark.parametrize("archive_format", FORMATS)
def test_every_format_can_be_served(archive_format: str, src: Path, tmp_path: Path) -> None:
    path = archive(archive_format=archive_format, **ALL_OPTIONS)
    assert path == Path("out") / FORMATS[archive_format]
    opened = Formats().open(path.resolve(), tmp_path / "work", ExtractLimits())
    assert (opened.name, opened.version, opened.runtime) == ("m", "1.0", "python3")
    assert (opened.handler, opened.model_file, opened.serialized_file) == ("handler.py", "net.py", "model.pt")
    assert (opened.requirements_file, opened.config) == ("requirements.txt", {"batchSize": 2})
    assert (opened.dir / "deep" / "config.json").read_text() == "{}"
    assert names(path) == [
        ".hidden",
        "deep/config.json",
        "handler.py",
        "index_to_name.json",
        "model-config.yaml",
        "model.pt",
        "net.py",
        "requirements.txt",
        "vocab.txt",
    ]


@pytest.mark.parametrize(("archive_format", "name"), FORMATS.items())
def test_a_disk_without_room_is_told_with_the_archive(archive_format: str, name: str, src: Path) -> None:
    """A limit on the sizes of files fails like a full disk: the system names no file."""
    (src / "model.pt").write_bytes(os.urandom(100_000))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, usual[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large.*{name}"):
            archive(serialized_file="model.pt", archive_format=archive_format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not list(Path("out").iterdir()), "nothing is left of it"


def test_an_odd_source_date_is_told(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ModelArchiverError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        archive()


@pytest.mark.parametrize(
    ("extra", "preserve", "expected"),
    [
        ("assets", False, [".hidden", "deep/config.json", "vocab.txt"]),
        ("assets/", True, ["assets/.hidden", "assets/deep/config.json", "assets/vocab.txt"]),
        ("./assets/deep", True, ["assets/deep/config.json"]),
        ("assets/deep/config.json,index_to_name.json", False, ["config.json", "index_to_name.json"]),
        ("conf/a/config.json,conf/b/config.json", True, ["conf/a/config.json", "conf/b/config.json"]),
        ("conf", False, ["a/config.json", "b/config.json"]),
        ("*.json", False, ["index_to_name.json"]),
        ("assets/*", False, ["config.json", "vocab.txt"]),
        ("conf/**/*.json", True, ["conf/a/config.json", "conf/b/config.json"]),
        ("../src/assets/deep", True, ["deep/config.json"]),
        (["assets/vocab.txt", Path("index_to_name.json")], False, ["index_to_name.json", "vocab.txt"]),
        (" , ", False, []),
        (None, False, []),
    ],
)
def test_extra_files(extra: Any, preserve: bool, expected: list[str], src: Path) -> None:
    path = archive(handler="base_handler", extra_files=extra, preserve_structure=preserve)
    assert names(path) == expected


def test_a_pattern_without_a_match_is_a_warning(src: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive(extra_files="*.bin")
    assert "nothing matches *.bin" in caplog.text


@pytest.mark.parametrize(("link", "target"), [("ring", "."), ("broken", "nowhere")])
def test_links_that_lead_nowhere(link: str, target: str, src: Path) -> None:
    (src / "assets" / link).symlink_to(target)
    with pytest.raises(ModelArchiverError, match="ring|broken"):
        archive(extra_files="assets")


@pytest.mark.parametrize("archive_format", FORMATS)
def test_an_archive_that_is_there_stays_unless_forced(archive_format: str, src: Path) -> None:
    archive(archive_format=archive_format)
    with pytest.raises(ModelArchiverError, match=r"already there. Use --force"):
        archive(archive_format=archive_format, extra_files="index_to_name.json")
    path = archive(archive_format=archive_format, extra_files="index_to_name.json", force=True)
    assert names(path) == ["handler.py", "index_to_name.json"]
    assert os.listdir("out") == [FORMATS[archive_format]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": "-m"}, "--model-name '-m'"),
        ({"model_name": "a/b"}, "--model-name 'a/b'"),
        ({"model_name": "m\n"}, "--model-name"),
        ({"handler": "gone.py"}, "--handler: gone.py is not there"),
        ({"handler": "conf.py:f"}, "--handler: conf.py is not there"),
        ({"serialized_file": "gone.pt"}, "--serialized-file: gone.pt is not there"),
        ({"model_file": "assets"}, "--model-file: assets is a directory"),
        ({"requirements_file": "gone.txt"}, "--requirements-file"),
        ({"config_file": "gone.yaml"}, "--config-file"),
        ({"extra_files": "gone.txt"}, "--extra-files: gone.txt is not there"),
        ({"archive_format": "rar"}, "--archive-format 'rar' is unknown"),
        ({"runtime": "java"}, "--runtime 'java' is unknown"),
        ({"version": ""}, "version"),
    ],
)
def test_what_is_refused(options: dict[str, str], message: str, src: Path) -> None:
    with pytest.raises(ModelArchiverError, match=message):
        archive(**options)
    assert not Path("out").exists() or os.listdir("out") == []


def test_the_manifests_place_is_taken(src: Path) -> None:
    (src / "assets" / "MAR-INF").mkdir()
    (src / "assets" / "MAR-INF" / "MANIFEST.json").write_text("{}")
    with pytest.raises(ModelArchiverError, match="MAR-INF"):
        archive(extra_files="assets")


# --- as TorchServe's users call it


def load_by_path(root: Path) -> Any:
    path = str(root / "frontend" / "model_archiver" / "model_packaging.py")
    loader = importlib.machinery.SourceFileLoader("archiver", path)
    spec = importlib.util.spec_from_loader("archiver", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("as_parser", [False, True])
def test_scripts_may_replace_the_command_line(
    as_parser: bool, src: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver = load_by_path(root)
    options = SimpleNamespace(model_name="m", handler="handler.py", version="1.0", export_path=src / "out", force=False)
    found = SimpleNamespace(parse_args=lambda: options) if as_parser else options
    monkeypatch.setattr(archiver.ArgParser, "export_model_args_parser", lambda: found)
    archiver.generate_model_archive()
    assert names(src / "out" / "m.mar") == ["handler.py"]


def test_a_configuration_can_be_given_to_the_command_function(src: Path, root: Path) -> None:
    archiver = load_by_path(root)
    archiver.generate_model_archive(ModelArchiverConfig("m", "handler.py", "1.0"))
    with pytest.raises(archiver.ModelArchiverError, match="already there"):
        archiver.generate_model_archive(ModelArchiverConfig("m", "handler.py", "1.0"))


def command(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / "torch-model-archiver"
    return subprocess.run([script, *args], env=env, capture_output=True, text=True, timeout=60)


def test_the_command(src: Path, clean_env: dict[str, str]) -> None:
    args = "--model-name m --version 1.0 --handler handler.py --extra-files assets,*.json --export-path made/here"
    done = command(clean_env, *args.split(), "--preserve-structure")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Wrote made/here/m.mar\n", "")
    assert "assets/vocab.txt" in names(Path("made/here/m.mar"))
    again = command(clean_env, *args.split())
    assert again.returncode == 1
    assert again.stderr == "torch-model-archiver: made/here/m.mar is already there. Use --force (-f) to replace it.\n"


def test_the_command_without_what_it_needs(src: Path, clean_env: dict[str, str]) -> None:
    done = command(clean_env, "--model-name", "m")
    assert done.returncode == 2
    assert "--handler" in done.stderr


# --- step by step, as scripts for TorchServe do


def test_the_steps_make_the_same_archive(src: Path) -> None:
    from model_archiver.model_packaging import package_model
    from model_archiver.model_packaging_utils import ModelExportUtils

    config = ModelArchiverConfig(
        "m", "handler.py:entry", "1.0", "model.pt", "net.py", "assets", requirements_file="requirements.txt"
    )
    config.export_path = str(src / "steps")
    package_model(config, manifest=ModelExportUtils.generate_manifest_json(config))
    config.export_path = str(src / "whole")
    ModelArchiver.generate_model_archive(config)
    archives = [Formats().open(src / folder / "m.mar", src / "work") for folder in ("steps", "whole")]
    files = [sorted(str(f.relative_to(one.dir)) for f in one.dir.rglob("*") if f.is_file()) for one in archives]
    assert files[0] == files[1] and "deep/config.json" in files[0]
    manifests = [one.manifest | {"createdOn": ""} for one in archives]
    assert manifests[0] == manifests[1]
    with pytest.raises(ModelArchiverError, match="already there"):
        package_model(config, manifest="{}")


def test_what_the_steps_refuse(src: Path) -> None:
    from model_archiver.manifest_components.manifest import Manifest
    from model_archiver.manifest_components.model import Model
    from model_archiver.model_packaging_utils import ModelExportUtils as Steps

    with pytest.raises(ModelArchiverError, match="is not allowed"):
        Steps.check_model_name_regex_or_exit("a b")
    with pytest.raises(ModelArchiverError, match="not a directory"):
        Steps.validate_inputs("m", str(src / "handler.py"))
    with pytest.raises(ModelArchiverError, match="only one .pt"):
        Steps.find_unique(["a.pt", "b.pt"], ".pt")
    assert (Steps.find_unique(["a.pt"], ".pt"), Steps.find_unique([], ".pt")) == ("a.pt", None)
    with pytest.raises(FileNotFoundError):
        Steps.copy_artifacts("m", "python", handler="nowhere.py")
    with pytest.raises(ValueError, match="perl"):
        Manifest("perl", Model("m", None, "h"))
