"""torch-workflow-archiver: every option, refusals, and the real command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ts_frontend.models.extraction import ExtractLimits
from ts_frontend.workflows.specification import open_workflow
from workflow_archiver.workflow_packaging import WorkflowArchiverError, make_archive, package_workflow
from workflow_archiver.workflow_packaging_utils import WorkflowExportUtils

SPEC = "models: {m: {url: m.mar}}\ndag: {pre: [m]}\n"


@pytest.fixture
def src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a workflow's files."""
    files = {
        "flow/spec.yaml": SPEC,
        "flow/models.yaml": "models: {m: {url: m.mar}}\ndag: {m: []}\n",
        "flow/functions.py": "def pre(data, context): return data",
        "extra/one.txt": "1",
        "extra/deep/two.txt": "2",
        "other/one.txt": "another",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    return tmp_path


def names(path: Path) -> list[str]:
    return sorted(zipfile.ZipFile(path).namelist())


def manifest(path: Path) -> dict[str, object]:
    return dict(json.loads(zipfile.ZipFile(path).read("WAR-INF/MANIFEST.json")))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    code = "from workflow_archiver.workflow_packaging import generate_workflow_archive as main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)


def test_what_is_packed_can_be_served(src: Path) -> None:
    path = make_archive("w", "flow/spec.yaml", handler="flow/functions.py", extra_files="extra")
    assert path == src / "w.war"
    assert names(path) == ["WAR-INF/MANIFEST.json", "deep/two.txt", "functions.py", "one.txt", "spec.yaml"]
    said = manifest(path)
    assert said["workflow"] == {"workflowName": "w", "specFile": "spec.yaml", "handler": "functions.py"}
    assert set(said) == {"createdOn", "workflow", "archiverVersion"}
    opened = open_workflow(path, src / "work", ExtractLimits())
    assert (opened.name, opened.handler, list(opened.spec.nodes)) == ("w", "functions.py", ["pre", "m"])
    assert (opened.dir / "deep/two.txt").read_text() == "2"
    opened.remove()
    assert not opened.dir.exists()


def test_without_a_handler(src: Path) -> None:
    path = make_archive("w", "flow/models.yaml")
    assert manifest(path)["workflow"] == {"workflowName": "w", "specFile": "models.yaml"}
    assert list(open_workflow(path, src / "work", ExtractLimits()).spec.nodes) == ["m"]


def test_the_same_files_give_the_same_bytes(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    (src / "out").mkdir()
    first, second = (make_archive("w", "flow/models.yaml", extra_files="extra", export_path=to) for to in (".", "out"))
    assert first.read_bytes() == second.read_bytes()
    assert manifest(first)["createdOn"] == "14/11/2023 22:13:20"


def test_an_archive_that_is_there_is_replaced_only_when_forced(src: Path) -> None:
    make_archive("w", "flow/models.yaml")
    with pytest.raises(WorkflowArchiverError, match="--force"):
        make_archive("w", "flow/spec.yaml", handler="flow/functions.py")
    make_archive("w", "flow/spec.yaml", handler="flow/functions.py", force=True)
    assert "functions.py" in names(src / "w.war")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workflow_name": "../w"}, "--workflow-name '../w' is not allowed"),
        ({"workflow_name": ""}, "--workflow-name '' is not allowed"),
        ({"spec_file": "none.yaml"}, "--spec-file: none.yaml is not there"),
        ({"spec_file": "flow"}, "--spec-file: flow is a directory"),
        ({"handler": "none.py"}, "--handler: none.py is not there"),
        ({"extra_files": "extra/none.txt"}, "--extra-files: extra/none.txt is not there"),
        ({"extra_files": "extra,other"}, "would both be one.txt"),
        ({"export_path": "nowhere"}, "--export-path: nowhere is not a directory"),
    ],
)
def test_what_is_refused(src: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkflowArchiverError, match=message):
        make_archive(**{"workflow_name": "w", "spec_file": "flow/models.yaml", **options})
    assert not list(src.glob("*.war")) and not list(src.glob(".archiving*"))


def test_the_command(src: Path) -> None:
    done = run("--workflow-name", "w", "--spec-file", "flow/spec.yaml", "--handler", "flow/functions.py")
    assert (done.returncode, done.stdout) == (0, f"Wrote {src / 'w.war'}\n"), done.stderr
    again = run("--workflow-name", "w", "--spec-file", "flow/models.yaml")
    assert again.returncode == 1
    assert (
        again.stderr == f"torch-workflow-archiver: {src / 'w.war'} is already there. Use --force (-f) to replace it.\n"
    )
    assert run("-f", "--workflow-name", "w", "--spec-file", "flow/models.yaml").returncode == 0
    unknown = run("--workflow-name", "w")
    assert unknown.returncode == 2 and "--spec-file" in unknown.stderr


def test_torchserves_function_takes_arguments_and_a_manifest(src: Path) -> None:
    arguments = SimpleNamespace(workflow_name="w", spec_file="flow/models.yaml", handler=None, export_path=str(src))
    package_workflow(arguments, manifest='{"workflow": {"workflowName": "mine"}}')
    assert manifest(src / "w.war") == {"workflow": {"workflowName": "mine"}}
    with pytest.raises(SystemExit):
        package_workflow(arguments)


def test_the_steps_can_be_called_one_by_one(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by TorchServe's names, as scripts and tests do; the result is an archive."""
    monkeypatch.setattr(tempfile, "tempdir", str(src))
    utils, where = WorkflowExportUtils, str(src)
    utils.validate_inputs("steps", where)
    assert utils.check_war_already_exists("steps", None, False) == where
    args = SimpleNamespace(workflow_name="steps", spec_file="flow/spec.yaml", handler="flow/functions.py")
    manifest = utils.generate_manifest_json(args)
    folder = utils.copy_artifacts("packed", ["flow/spec.yaml", "flow/functions.py", "extra/one.txt,extra/deep/two.txt"])
    (Path(folder) / ".hidden").mkdir()
    (Path(folder) / ".hidden" / "x").write_text("x")
    utils.archive(where, "steps", folder, manifest)
    war = Path(utils.get_archive_export_path(where, "steps"))
    found = zipfile.ZipFile(war).namelist()
    assert sorted(found) == ["WAR-INF/MANIFEST.json", "functions.py", "one.txt", "spec.yaml", "two.txt"]
    workflow = open_workflow(war, src / "work", ExtractLimits())
    assert workflow is not None
    with pytest.raises(WorkflowArchiverError, match="already exists"):
        utils.check_war_already_exists("steps", where, False)
    assert utils.check_war_already_exists("steps", where, True) == where
    for name, place in (("bad name", where), ("good", str(src / "nowhere"))):
        with pytest.raises(WorkflowArchiverError):
            utils.validate_inputs(name, place)
    utils.clean_temp_files([str(war)])
    assert not war.exists()
    assert not utils.file_filter("x.war", set()) and utils.file_filter("x.py", set())


def test_a_specification_that_the_server_would_refuse_is_not_packed(src: Path) -> None:
    for text, said in (
        ("dag: {a: [b], b: [a]}", "--spec-file: bad.yaml: dag has a cycle: a -> b -> a"),
        ("models: {m: {url: m.mar}", "--spec-file: bad.yaml is not usable as YAML: "),
        ("- m", "--spec-file: bad.yaml is not usable as YAML: must be keys with values, not list"),
        (SPEC, "pre"),  # a function, and no handler
    ):
        Path("bad.yaml").write_text(text)
        with pytest.raises(WorkflowArchiverError, match=re.escape(said)):
            make_archive("w", "bad.yaml")
        assert not (src / "w.war").exists()


def test_a_handler_that_cannot_be_compiled_is_not_packed(src: Path) -> None:
    Path("bad.py").write_text("def pre(data, context) return data")
    with pytest.raises(WorkflowArchiverError, match="^--handler: bad.py, line 1: SyntaxError: "):
        make_archive("w", "flow/spec.yaml", handler="bad.py")
    assert not (src / "w.war").exists()
