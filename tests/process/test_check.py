"""`torchserve check`: faults that were planted in archives are found, and none are found in the examples."""

from __future__ import annotations

import json
import logging
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_archiver import ModelArchiver, ModelArchiverConfig
from ts_frontend.cli import main as cli
from ts_frontend.diagnosis import check
from ts_frontend.models.formats import formats

ROOT = Path(__file__).parents[2]
#: No GPU is looked for, and torch is imported by the models that need it.
SETTINGS = ("--set", "number_of_gpu=0", "--set", "preload_torch=false")
HANDLER = "def handle(data, context):\n    return [b'ok'] * len(data or ())\n"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The command's exit status and output."""
    try:
        status = cli.main(["check", *map(str, words)])
    except SystemExit as end:
        status = int(str(end.code))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def packed(folder: Path, name: str, handler: str = HANDLER, **more: Any) -> None:
    """An archive `NAME.mar` in the folder; `more` are files by their options."""
    parts = folder.parent / f"{name}_parts"
    parts.mkdir()
    (parts / "handler.py").write_text(handler)
    options: dict[str, Any] = {}
    for option, (file, text) in more.items():
        (parts / file).write_text(text)
        options[option] = str(parts / file)
    config = ModelArchiverConfig(name, str(parts / "handler.py"), "1.0", export_path=str(folder), **options)
    ModelArchiver.generate_model_archive(config)


def tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plant_broken(store: Path) -> None:
    (store / "broken.mar").write_bytes((ROOT / "model_store/digits.mar").read_bytes()[:-300])


def plant_manifest(store: Path) -> None:
    tree(store / "manifest", {"MAR-INF/MANIFEST.json": '{"model": {"handler": "handler.py",}}', "handler.py": HANDLER})


def plant_absent(store: Path) -> None:
    manifest = {"model": {"modelName": "absent", "handler": "handlr.py"}}
    tree(store / "absent", {"MAR-INF/MANIFEST.json": json.dumps(manifest), "handler.py": HANDLER})


def plant_unnamed_config(store: Path) -> None:
    manifest = {"model": {"modelName": "unnamed", "handler": "handler.py"}}
    files = {"handler.py": HANDLER, "model-config.yaml": "batchSize: 4\n"}
    tree(store / "unnamed", {"MAR-INF/MANIFEST.json": json.dumps(manifest), **files})


def plant_settings(store: Path) -> None:
    packed(store, "settings", config_file=("model-config.yaml", "batchSize: 0\nmin_workers: 2\ndeviceType: gpu\n"))


def plant_syntax(store: Path) -> None:
    manifest = {"runtime": "python", "model": {"modelName": "syntax", "handler": "handler.py", "modelVersion": "1.0"}}
    with zipfile.ZipFile(store / "syntax.mar", "w") as archive:  # torch-model-archiver would refuse it
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("handler.py", "def handle(data, context)\n    return data\n")


def plant_import(store: Path) -> None:
    packed(store, "needs", "import no_such_library\n" + HANDLER)


def plant_requirements(store: Path) -> None:
    packed(store, "requires", requirements_file=("requirements.txt", "no-such-library==1\n"))


def plant_answers(store: Path) -> None:
    packed(
        store,
        "answers",
        "def handle(data, context):\n    return [b'ok']\n",
        config_file=("model-config.yaml", "batchSize: 4\nmaxBatchDelay: 50\n"),
    )


def plant_pbtxt(store: Path) -> None:
    model = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    tree(
        store / "pbtxt",
        {"config.pbtxt": 'backend: "python"\noptimization { priority: PRIORITY_MAX }\n', "1/model.py": model},
    )


def plant_mlserver(store: Path) -> None:
    tree(store / "mls", {"model-settings.json": json.dumps({"name": "mls", "implementaton": "runtime.Runtime"})})


#: What was planted, the name of the model, and the severity and words of the finding.
FAULTS: tuple[tuple[Callable[[Path], None], str, str, str], ...] = (
    (plant_broken, "broken.mar", "error", "broken or incomplete"),
    (plant_manifest, "manifest", "error", "not JSON"),
    (
        plant_absent,
        "absent",
        "error",
        "handlr.py is not in the archive, and there is no built-in handler of that name; ",
    ),
    (plant_unnamed_config, "unnamed", "warning", "its manifest doesn't name it: it has no effect"),
    (plant_settings, "settings.mar", "warning", "batchSize is 0: ignored, it must be a whole number, at least 1"),
    (plant_settings, "settings.mar", "warning", "min_workers is not a setting; did you mean minWorkers?"),
    (
        plant_settings,
        "settings.mar",
        "warning",
        "deviceType is 'gpu', and the server has no GPU: its workers run on the",
    ),
    (plant_syntax, "syntax.mar", "error", "handler.py, line 1: SyntaxError: "),
    (plant_import, "needs.mar", "error", "-m pip install no_such_library"),
    (plant_requirements, "requires.mar", "warning", "install_py_dep_per_model isn't true"),
    (plant_answers, "answers.mar", "error", "the handler's result has 1 element for "),
    (plant_pbtxt, "pbtxt", "warning", "optimization (config.pbtxt of model pbtxt) has no effect"),
    (plant_mlserver, "mls", "warning", "there is no implementaton; did you mean implementation?"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sections of a report about a store with all the faults, by the model's name."""
    folder = tmp_path_factory.mktemp("planted")
    store, request = folder / "store", folder / "request.json"
    store.mkdir()
    request.write_text("{}")
    for plant in dict.fromkeys(fault[0] for fault in FAULTS):
        plant(store)
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *texts, **_: lines.extend(map(str, texts)))
        assert cli.main(["check", str(store), "--json", "--input", str(request), *SETTINGS]) == 1
    report = json.loads("".join(lines))
    return {Path(section["title"]).name: section for section in report["sections"]}


@pytest.mark.parametrize(
    ("plant", "name", "severity", "words"), FAULTS, ids=[f"{one[1]}-{one[3][:20]}" for one in FAULTS]
)
def test_a_planted_fault_is_found(
    found: dict[str, Any], plant: Callable[[Path], None], name: str, severity: str, words: str
) -> None:
    findings = found[name]["findings"]
    assert [one for one in findings if one["severity"] == severity and words in one["text"]], findings


def test_ten_archives_have_planted_faults_and_nothing_else_is_found_in_them(found: dict[str, Any]) -> None:
    planted = {name for _, name, _, _ in FAULTS}
    assert len(planted) >= 10
    assert found.keys() == planted
    words = [fault[3] for fault in FAULTS]
    more = [
        (name, one)
        for name, section in found.items()
        for one in section["findings"]
        if one["severity"] != "ok" and not any(word in one["text"] for word in words)
    ]
    # The MLServer model that doesn't name its class can't be opened, and what Triton's model answers is no answer.
    assert [name for name, _ in more] in (["mls"], ["mls", "pbtxt"], ["pbtxt", "mls"]), more
    assert "Traceback" not in json.dumps([section for name, section in found.items() if name != "needs.mar"])


@pytest.mark.long
def test_the_examples_have_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    sample = ROOT / "examples/digits/samples/3.png"
    for name in ("digits.mar", "hello_stream.mar"):
        status, out, _ = run(capsys, ROOT / "model_store" / name, "--strict", "--input", sample, *SETTINGS)
        assert (status, out.splitlines()[-1]) == (0, "1 model: no faults"), out
        assert "loaded in " in out and "3.png: answered in " in out
    status, out, _ = run(capsys, ROOT / "model_store", "--strict", "--no-load", "--quiet")
    assert (status, out) == (0, "4 models: no faults\n")


def test_a_handlers_file_is_tried_where_it_lies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def handle(data, context):\n    if data:\n        raise ValueError('too dark')\n"
    )
    (tmp_path / "x.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.properties").write_text("job_queue_sise=3\n")
    status, out, _ = run(capsys, tmp_path / "mine.py", "--input", tmp_path / "x.txt", *SETTINGS)
    assert status == 1
    assert "x.txt: HTTP 503, gRPC INTERNAL: Prediction failed: ValueError: too dark (mine.py, line 3, in handle)" in out
    assert out.endswith("1 model: 1 error, 1 warning\n")
    assert "job_queue_sise (config.properties:1): there is no such setting; did you mean job_queue_size?" in out
    assert {one.name for one in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py", "x.txt", "config.properties"}


def test_a_handler_that_never_ends_its_import_is_given_up_at_a_limit_that_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SLOW_S", 0.0)
    (tmp_path / "loop.py").write_text("while True:\n    pass\n")
    status, out, err = run(capsys, tmp_path / "loop.py", *SETTINGS, "--set", "default_startup_timeout=1")
    assert f"torchserve check: {tmp_path / 'loop.py'} is still loading: 1 s at most (startupTimeout)\n" in err
    assert status == 1 and "error    handler: Worker didn't load its model within 1 s (startupTimeout)" in out


def test_a_directory_of_all_and_sundry_is_searched_up_to_a_limit_that_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the root of a file system is."""
    formats_max = formats.FOLDERS_MAX
    monkeypatch.setattr(formats, "FOLDERS_MAX", 3)
    monkeypatch.setattr(check, "MODELS_MAX", 2)
    monkeypatch.setattr(check, "SLOW_S", 0.0)
    for number in range(4):
        packed(tmp_path, f"m{number}")
    for number in range(4):
        (tmp_path / "deep" / f"d{number}").mkdir(parents=True)
    _, out, err = run(capsys, tmp_path, "--no-load")
    assert f"still looking for models in {tmp_path}: {formats_max} folders at most" in err
    assert f"server: {tmp_path} has more than 3 folders: no models are looked for in the others" in out
    assert "models: the first 2 are tried. Name fewer" in out and out.count("  ok       files: ") == 2


def test_a_report_has_nothing_that_moves_a_terminals_cursor_or_ends_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The handler's exception has half of a surrogate pair, an escape sequence and a mark of direction; the model's
    manifest has the latter two."""
    odd = "label \\ud800\\u001b[2J\\u202e"
    handler = f"def handle(data, context):\n    if data:\n        raise ValueError('{odd}')\n"
    manifest = '{"model": {"handler": "handler.py", "modelName": "m", "modelVersion": "1\\u001b[2J\\u202e"}}'
    tree(tmp_path / "m", {"MAR-INF/MANIFEST.json": manifest, "handler.py": handler})
    (tmp_path / "x.txt").write_text("text")
    for words in ((tmp_path / "m" / "handler.py",), (tmp_path / "m",), (tmp_path / "m", "--json")):
        status, out, err = run(capsys, *words, "--input", tmp_path / "x.txt", *SETTINGS)
        assert status == 1 and not err, err
        assert out.replace("\n", "").isprintable(), out
        assert "ud800" in out or "1\\u001b[2J\\u202e" in out or "1\\x1b[2J\\u202e" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing.mar",), "nothing.mar does not exist"),
        ((".", "--input", "absent.bin"), "--input absent.bin: No such file or directory"),
        ((".", "--set", "job_queue_sise=1"), "there is no setting job_queue_sise; did you mean job_queue_size?"),
    ],
)
def test_what_cannot_be_tried_has_another_status(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *words)
    assert (status, says in err) == (2, True), err


def test_a_directory_without_models_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, tmp_path, "--no-load")
    assert (status, "there is no model: neither an archive" in out) == (1, True), out


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A check opens logs of its own, and closes them."""
    before = logging.getLogger("ts_frontend").handlers[:], sys.path[:]
    yield
    assert (logging.getLogger("ts_frontend").handlers, sys.path) == before
