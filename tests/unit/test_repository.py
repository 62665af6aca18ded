"""Triton's model repositories: config.pbtxt, versions, and the resulting models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ts.protocol.model_config_pb2 import ModelConfig
from ts_frontend.caching.cache import CacheRule
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument, ModelNotFound
from ts_frontend.models import repository as directories
from ts_frontend.models.formats import triton as configs
from ts_frontend.models.formats import triton as layout
from ts_frontend.models.formats.format import ModelFiles
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.settings import Requested, TensorSpec, resolve

CONFIG = """
# a comment
name: "llm_model"
backend: 'python'
max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output: { name: "text_output", data_type: TYPE_STRING, dims: -1 }
dynamic_batching { max_queue_delay_microseconds: 5000 default_queue_policy { max_queue_size: 7 } }
instance_group [ { kind: KIND_CPU count: 2 } ]
parameters { key: "k" value { string_value: "v" } }
"""


def model(
    tmp_path: Path, config: str | None = CONFIG, versions: tuple[str, ...] = ("1",), name: str = "llm_model"
) -> Path:
    path = tmp_path / name
    for version in versions:
        (path / version).mkdir(parents=True)
        (path / version / "model.py").write_text("")
    if config is not None:
        (path / "config.pbtxt").write_text(config)
    return path


def test_a_configuration_becomes_an_archive(tmp_path: Path) -> None:
    found = layout.read(model(tmp_path))
    assert (found.name, found.backend, found.versions) == ("llm_model", "python", (1,))
    archive = found.archive(1, gpus=0)
    assert (archive.name, archive.version, archive.adapter) == ("llm_model", "1", "triton")
    assert archive.config == {
        "batchSize": 8,
        "maxBatchDelay": 5,
        "jobQueueSize": 7,
        "minWorkers": 2,
        "maxWorkers": 2,
        "deviceType": "cpu",
    }
    assert archive.signature is not None
    assert archive.signature.inputs == (TensorSpec("text_input", "BYTES", (-1, -1)),)
    config = archive.adapter_settings["config"]
    assert config["parameters"] == {"k": {"string_value": "v"}} and config["input"][0]["dims"] == [-1]
    assert config["version_policy"] == {"latest": {"num_versions": 1}}


def test_a_model_without_a_configuration_is_known_by_its_file(tmp_path: Path) -> None:
    found = layout.read(model(tmp_path, None))
    assert found.backend == "python" and found.archive(1, 0).config["batchSize"] == 1


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("model.py", "import numpy, triton_python_backend_utils as pb_utils, beside", False),
        ("model.py", "import torch", True),
        ("model.onnx", "", False),
        ("model.pt", "", True),
        ("model.pt2", "", True),
    ],
)
def test_torch_is_needed_for_its_files_and_by_python_that_may_import_it(
    tmp_path: Path, file: str, text: str, expected: bool
) -> None:
    path = tmp_path / "net"
    (path / "1").mkdir(parents=True)
    (path / "1" / file).write_text(text)
    (path / "beside.py").write_text("import json")
    tensors = 'name: "x" data_type: TYPE_FP32 dims: [ 1 ]'
    (path / "config.pbtxt").write_text(f"input {{ {tensors} }} output {{ {tensors} }}")
    assert layout.read(path).archive(1, 0).adapter_settings["torch"] is expected


@pytest.mark.parametrize(
    ("groups", "gpus", "expected"),
    [
        ("", 0, (1, "cpu", None)),
        ("", 2, (2, "gpu", [0, 1])),
        ("instance_group { kind: KIND_GPU count: 2 gpus: [1] }", 2, (2, "gpu", [1])),
        ("instance_group { kind: KIND_CPU count: 3 }", 2, (3, "cpu", None)),
        ("instance_group { kind: KIND_GPU gpus: 0 } instance_group { kind: KIND_GPU gpus: 1 }", 2, (2, "gpu", [0, 1])),
    ],
)
def test_instances_are_workers(groups: str, gpus: int, expected: tuple[int, str, list[int] | None]) -> None:
    config = configs.completed(configs.parse(groups, "x"), "m", "python")
    found = configs.worker_settings(config, gpus)
    assert (found["minWorkers"], found["deviceType"], found.get("deviceIds")) == expected


@pytest.mark.parametrize(
    ("groups", "gpus", "count"),
    [
        ("instance_group { kind: KIND_CPU count: 1000000 }", 0, 1_000_000),
        ("instance_group { kind: KIND_GPU count: 513 }", 2, 1026),
        ("instance_group { kind: KIND_CPU }" * 1025, 0, 1025),
    ],
)
def test_more_instances_than_a_model_may_have_workers_are_refused(groups: str, gpus: int, count: int) -> None:
    config = configs.completed(configs.parse(groups, "x"), "m", "python")
    with pytest.raises(InvalidArgument, match=f"'m': instance_group has {count} instances, and .* at most 1024"):
        configs.worker_settings(config, gpus)


@pytest.mark.parametrize(
    ("groups", "gpus", "expected"),
    [
        ("", 0, (4, "cpu", None, [("KIND_CPU", 4, [])])),
        ("", 2, (4, "gpu", [0, 1], [("KIND_GPU", 2, [0, 1])])),
        ("", 3, (4, "gpu", [0, 1, 2], [("KIND_GPU", 1, [0, 1, 2]), ("KIND_GPU", 1, [0])])),
        ("", 8, (4, "gpu", [0, 1, 2, 3], [("KIND_GPU", 1, [0, 1, 2, 3])])),
        ("instance_group { kind: KIND_CPU count: 1 }", 0, (1, "cpu", None, [("KIND_CPU", 1, [])])),
        ("instance_group { kind: KIND_CPU count: 2 }", 2, (2, "cpu", None, [("KIND_CPU", 2, [])])),
    ],
)
def test_a_number_of_workers_by_name_is_that_of_models_without_instance_groups(
    tmp_path: Path, groups: str, gpus: int, expected: tuple[object, ...]
) -> None:
    """`--grpc-workers 4`. ModelConfig shows the same number, also after `auto_complete_config`."""
    path = model(tmp_path, groups, name="m")
    formats = known_formats(ServerConfig(default_workers_per_model=4), env={}, work_dir=tmp_path, gpus=gpus)
    (archive,) = formats.open_versions(ModelFiles(path, path))
    assert archive.completed is not None
    for one in (archive, archive.completed(archive, archive.adapter_settings["config"])):
        assert one.config is not None
        shown = one.adapter_settings["config"]["instance_group"]
        kinds = [(group["kind"], int(group["count"]), group.get("gpus", [])) for group in shown]
        found = (one.config["minWorkers"], one.config["deviceType"], one.config.get("deviceIds"), kinds)
        assert found == expected and one.config["maxWorkers"] == expected[0]


UNUSED = """
metric_tags { key: "a" value: "b" }
instance_group { count: 1 rate_limiter { resources { name: "r" count: 1 } } }
input { name: "x" data_type: TYPE_FP32 dims: 1 allow_ragged_batch: true }
dynamic_batching { preferred_batch_size: [4, 8] }
optimization { cuda { graphs: false } }
"""


def test_fields_without_effect_are_named_when_a_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each field is named once, also for several versions; a field with its default value is not."""
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    path = model(tmp_path, "version_policy { all {} }" + UNUSED, ("1", "2"), "m")
    formats.open_versions(ModelFiles(path, path))
    said = [record.getMessage() for record in caplog.records]
    tags = "metric_tags (config.pbtxt of model m) has no effect: metrics have the labels that docs/metrics.md lists"
    assert tags in said
    names = ("metric_tags", "input.allow_ragged_batch", "optimization")
    assert sorted(one.split()[0] for one in said) == sorted([*names, "dynamic_batching.preferred_batch_size"])
    caplog.clear()
    quiet = model(tmp_path, "response_cache { enable: true } max_batch_size: 2 dynamic_batching {}", ("1",), "quiet")
    formats.open_versions(ModelFiles(quiet, quiet))
    assert not caplog.records


#: Fields of a configuration that do something, or are refused: docs/triton.md describes them.
USED = {
    *("name", "platform", "backend", "version_policy", "max_batch_size", "default_model_filename", "parameters"),
    *("model_transaction_policy", "model_warmup", "ensemble_scheduling.step", "input.name", "input.data_type"),
    *("input.dims", "input.reshape", "input.optional", "output.name", "output.data_type", "output.dims"),
    *("output.label_filename", "output.reshape", "instance_group.name", "instance_group.count"),
    *("instance_group.gpus", "instance_group.kind", "instance_group.passive", "dynamic_batching.priority_levels"),
    *("dynamic_batching.max_queue_delay_microseconds", "dynamic_batching.default_priority_level"),
    *("dynamic_batching.default_queue_policy", "dynamic_batching.priority_queue_policy"),
    *("sequence_batching.max_sequence_idle_microseconds", "sequence_batching.control_input"),
    *("instance_group.rate_limiter", "sequence_batching.state", "sequence_batching.iterative_sequence"),
    *("sequence_batching.oldest.max_candidate_sequences", "response_cache"),
}


@pytest.mark.parametrize(("enable", "cache"), [("true", CacheRule()), ("false", None)])
def test_the_response_cache_is_the_setting_cache(tmp_path: Path, enable: str, cache: CacheRule | None) -> None:
    path = model(tmp_path, f"response_cache {{ enable: {enable} }}", ("1",), "m")
    (archive,) = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0).open_versions(ModelFiles(path, path))
    assert resolve(Requested(), archive.config, {}, ServerConfig()).cache == cache


def test_every_field_of_a_configuration_does_something_or_is_in_the_table() -> None:
    known = USED | configs.WITHOUT_EFFECT.keys()
    inner = {path.rpartition(".")[0] for path in known} - {""}

    def paths(descriptor: Any, before: str = "") -> Iterator[str]:
        for field in descriptor.fields:
            path = f"{before}{field.name}"
            if any(one == path or one.startswith(f"{path}.") for one in inner):
                yield from paths(field.message_type, f"{path}.")
            else:
                yield path

    assert set(paths(ModelConfig.DESCRIPTOR)) == known and not USED & configs.WITHOUT_EFFECT.keys()
    page = (Path(__file__).resolve().parents[2] / "docs" / "triton.md").read_text()
    assert "\n".join(configs.without_effect_table()) in page


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("max_batch: 3", ["config.pbtxt", "1:1", "max_batch"]),
        ('name: "other"', ["other", "llm_model"]),
        ("max_batch_size: -1", ["max_batch_size", "-1"]),
        ('backend: "tensorrt"', ["tensorrt", "python, pytorch"]),
        ('backend: "pytorch" input { name: "x" dims: 1 }', ["'x'", "data_type"]),
        ('backend: "pytorch" input { name: "x" data_type: TYPE_FP32 }', ["'x'", "dims"]),
        ('input { name: "x" data_type: TYPE_FP32 dims: 0 }', ["'x'", "0"]),
        (
            'input [{name: "x" data_type: TYPE_FP32 dims: 1}, {name: "x" data_type: TYPE_FP32 dims: 1}]',
            ["'x'", "twice"],
        ),
        ("ensemble_scheduling {}", ["ensemble_scheduling", "no step"]),
        ('platform: "ensemble"', ["platform", "not given"]),
        ('backend: "python" ensemble_scheduling {}', ["'python'", "ensemble_scheduling"]),
        ('default_model_filename: "other.py"', ["other.py"]),
        ('default_model_filename: "../../../x.py"', ["x.py"]),
        ("version_policy { specific { versions: 9 } }", ["version_policy", "1"]),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, config: str, words: list[str]) -> None:
    (tmp_path.parent / "x.py").write_text("")
    with pytest.raises(InvalidArgument) as caught:
        layout.read(model(tmp_path, config))
    assert all(word in caught.value.message for word in words), caught.value.message


def test_names_and_places(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    model(first), model(second), model(second, name="other")
    (first / ".git").mkdir()
    assert directories.names_in(first) == ["llm_model"]
    assert directories.find([first, second], "other") == second / "other"
    with pytest.raises(InvalidArgument, match="several repositories"):
        directories.find([first, second], "llm_model")
    with pytest.raises(ModelNotFound):
        directories.find([first], "nobody")
    for name in ("..", "a/b", ""):
        with pytest.raises(InvalidArgument):
            directories.find([first], name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../x", "leads out"),
        ("/x", "absolute path"),
        ("C:x", "absolute path"),
        ("1/\n", "control characters"),
        ("", "no name"),
        ("1/model.py/", "twice"),
        ("1/model.py/x", "a directory's and a file's"),
        ("1\\model.py", "twice"),
        ("1/" + "x" * 256, "too long"),
    ],
)
def test_files_of_a_request_lie_in_their_directory(tmp_path: Path, name: str, words: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    with pytest.raises(InvalidArgument, match=f"^load parameter 'file:.*{words}"):
        directories.write_files({"1/model.py": b"", name: b""}, directory)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_of_a_request_are_written(tmp_path: Path) -> None:
    directories.write_files({"1/model.py": b"a", "1/more/b": b"b", "labels.txt": b"c"}, tmp_path)
    assert (tmp_path / "1" / "more" / "b").read_bytes() == b"b" and (tmp_path / "labels.txt").read_bytes() == b"c"
    with pytest.raises(InvalidArgument, match=f"may have {directories.FILES_MAX} files"):
        directories.write_files({str(number): b"" for number in range(directories.FILES_MAX + 1)}, tmp_path)


def test_a_register_call_opens_the_last_version_of_a_folder_or_of_its_only_folder(tmp_path: Path) -> None:
    formats = known_formats(ServerConfig(), env={}, work_dir=tmp_path, gpus=0)
    config = f"{CONFIG}\nversion_policy: {{ all {{ }} }}"
    path = model(tmp_path / "repository", config, versions=("1", "10", "9"))
    for given in (path, path.parent):
        archive = formats.open(given, tmp_path, name="asked")
        assert (archive.name, archive.version, archive.dir, archive.remembered) == ("asked", "10", path / "10", True)
        assert formats.folder_of_versions(given) == path
    path.rename(path.parent / "other")
    assert formats.open(path.parent, tmp_path).name == "other"
    (path.parent / "another").mkdir()  # a repository of several, which is no model
    assert formats.open(path.parent, tmp_path).adapter == "" and formats.folder_of_versions(path.parent) is None
    assert formats.folder_of_versions(tmp_path / "nothing") is None


def test_a_directory_from_elsewhere_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    path = model(tmp_path)
    path.rename(tmp_path / "copy")
    assert layout.read(tmp_path / "copy", name="asked").config.name == "asked"
    with pytest.raises(InvalidArgument, match="^load parameter 'config': backend 'x' is not served"):
        layout.read(tmp_path / "copy", 'backend: "x"', "asked")


def test_a_configuration_that_protobuf_takes_hours_for_is_refused() -> None:
    """It unescapes a run of backslashes in the square of its length, without letting another thread run: 4 MB of them
    stopped the whole server."""
    begun_s = time.process_time()
    for run in ("\\" * 4_000_000, "\\" * 4_000_001):
        with pytest.raises(InvalidArgument, match=r"m/config\.pbtxt: more than 100 backslashes in a row"):
            configs.parse(f"name: '{run}'", "m/config.pbtxt")
    assert time.process_time() - begun_s < 1
    assert configs.parse(r"name: 'a\\b'", "m/config.pbtxt").name == r"a\b"


def test_what_protobuf_says_is_cut() -> None:
    """It shows the whole line."""
    with pytest.raises(InvalidArgument, match=r"m/config\.pbtxt: 1:17 .* …$") as caught:
        configs.parse("max_batch_size: " + "9" * 100_000, "m/config.pbtxt")
    assert len(caught.value.message) < 1100
