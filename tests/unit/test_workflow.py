"""Workflows: their specification and their archives."""

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
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.errors import InvalidGraph, InvalidWorkflow
from ts_frontend.graphs.graph import NODES_MAX, make_graph
from ts_frontend.models.archive import ExtractLimits
from ts_frontend.workflows.specification import WorkflowSpec, open_workflow, parse_spec
from workflow_archiver.workflow_packaging import WorkflowArchiverError, make_archive, package_workflow
from workflow_archiver.workflow_packaging_utils import WorkflowExportUtils


def parse(text: str, *, has_handler: bool = True) -> WorkflowSpec:
    return parse_spec(yaml.safe_load(text), has_handler=has_handler)


# --- graphs


@st.composite
def layered(draw: st.DrawFn) -> dict[str, list[str]]:
    """Graphs with one start: every node but the first has at least one parent among those before it."""
    count = draw(st.integers(1, 12))
    edges: dict[str, list[str]] = {f"n{number}": [] for number in range(count)}
    for number in range(1, count):
        for parent in draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=3)):
            edges[f"n{parent}"].append(f"n{number}")
    names = draw(st.permutations(list(edges)))
    coin: st.SearchStrategy[Any] = st.booleans()
    return {name: edges[name] for name in names if edges[name] or draw(coin) or count == 1}


@given(layered())
def test_parents_and_children_say_the_same(edges: dict[str, list[str]]) -> None:
    graph = make_graph(edges)
    assert graph.starts == ("n0",)
    pairs = {(parent, child) for parent, children in edges.items() for child in children}
    assert pairs == {(parent, child) for parent, children in graph.children.items() for child in children}
    assert pairs == {(parent, child) for child, parents in graph.parents.items() for parent in parents}
    assert set(graph.leaves) == {name for name, children in graph.children.items() if not children}


@given(layered(), st.data())
def test_any_edge_back_is_a_cycle_that_is_named(edges: dict[str, list[str]], data: st.DataObject) -> None:
    graph = make_graph(edges)
    last = data.draw(st.sampled_from(sorted(graph.children)))
    ancestors, found = {last}, [last]
    while found:
        new = set(graph.parents[found.pop()]) - ancestors
        ancestors |= new
        found += new
    first = data.draw(st.sampled_from(sorted(ancestors)))
    broken = {**edges, last: [*edges.get(last, []), first]}
    with pytest.raises(InvalidGraph, match="cycle: ") as error:
        make_graph(broken)
    cycle = error.value.message.partition("cycle: ")[2].split(" -> ")
    assert cycle[0] == cycle[-1] and len(cycle) > 1
    assert all(child in broken.get(parent, []) for parent, child in zip(cycle, cycle[1:], strict=False))


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({}, "no nodes"),
        ({"a": ["a"]}, "cycle: a -> a"),
        ({"a": ["c"], "b": ["c"]}, "any of: a, b"),
        ({"a": ["b"], "c": ["d"], "d": ["c"]}, "cycle: "),
        ({"a": [f"n{number}" for number in range(NODES_MAX)]}, f"at most {NODES_MAX}"),
    ],
)
def test_graphs_that_are_refused(edges: dict[str, list[str]], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        parse_spec({"dag": edges}, has_handler=True)


# --- settings


def test_without_max_workers_there_are_min_workers() -> None:
    assert parse("models: {min-workers: 3, m: {url: m}}\ndag: {m: }").nodes["m"].max_workers == 3


def test_warnings_name_what_is_left_out() -> None:
    spec = parse("models: {m: {url: m, batch_size: 2}, unused: {url: u}}\ndag: {m: []}")
    assert spec.warnings == (
        "model unused is not in dag: it is left out",
        "model m: there is no setting batch_size; batch-size is one",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "dag is missing"),
        ("models: [m]\ndag: {m: []}", "models must be"),
        ("dag: [a]", "dag is missing"),
        ("dag: {a: b}", "node a: its children must be a list, not 'b'"),
        ("dag: {a: [[b]]}", "node .*'b'.*must be a text"),
        ("dag: {1: []}", "node 1: .*must be a text"),
        ("dag: {a/b: []}", "node 'a/b'"),
        ("dag: {not-a-name: []}", "node not-a-name is not in models, and can't be a function"),
        ("models: {m: {}}\ndag: {m: []}", "model m has no url"),
        ("models: {m: {url: 3}}\ndag: {m: []}", "model m has no url"),
        ("models: {batchsize: 3}\ndag: {m: []}", "batchsize must have a url .*did you mean batch-size"),
        ("models: {m: {url: m, batch-size: 0}}\ndag: {m: []}", "batch-size must be a whole number, at least 1"),
        ("models: {m: {url: m, timeout-ms: true}}\ndag: {m: []}", "model m: timeout-ms"),
        ("models: {timeout-ms: 1.5}\ndag: {m: []}", "models: timeout-ms"),
        ("models: {m: {url: m, min-workers: 3, max-workers: 2}}\ndag: {m: []}", "min-workers 3 is more than"),
    ],
)
def test_what_is_refused_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message):
        parse(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["models", "dag", "a", "b", "url", "batch-size"]), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_nothing_but_a_spec_or_its_refusal_comes_out(tree: Any) -> None:
    if isinstance(tree, dict):
        try:
            parse_spec(tree, has_handler=True)
        except InvalidWorkflow as error:
            assert error.message


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
