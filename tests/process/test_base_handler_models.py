"""BaseHandler with real models: every kind of file, its options, its errors."""

from __future__ import annotations

import shutil
import sys
import traceback
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from ts.context import Context
from ts.handler_utils.micro_batching import MicroBatching
from ts.metrics.metric_cache import MetricCache
from ts.torch_handler.base_handler import BaseHandler, compile_options
from ts.torch_handler.model_files import ModelFileError, is_compiled_package, load_onnx, model_class

MODEL = """
from dataclasses import dataclass

import torch


@dataclass
class Sizes:
    hidden: int = 8


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, Sizes().hidden)
        self.drop = torch.nn.Dropout(0.5)
        self.second = torch.nn.Linear(Sizes().hidden, 3)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.first(x))))
"""
ROWS = [{"body": [1.0, 2.0, 3.0, 4.0]}, {"data": [0.0, -1.0, 0.5, 2.0]}]


@pytest.fixture(autouse=True)
def forget_model_modules() -> Iterator[None]:
    """Each test's model file is imported anew."""
    yield
    for name in ("tiny_net", "_ts_model_file_tiny_net"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One network's weights in every form: net.pt (state), whole.pt (pickled), script.pt, program.pt2."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny_net.py").write_text(MODEL.format(name="TinyNet"))
    torch.manual_seed(7)
    network = model_class(folder / "tiny_net.py")().eval()
    torch.save(network.state_dict(), folder / "net.pt")
    torch.save(network, folder / "whole.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(network).save(str(folder / "script.pt"))
        batch = torch.export.Dim("batch")
        program = torch.export.export(network, (torch.zeros(2, 4),), dynamic_shapes={"x": {0: batch}})
        torch.export.save(program, folder / "program.pt2")
    return folder


def context_of(
    folder: Path, config: dict[str, Any] | None = None, headers: Sequence[dict[str, Any]] = ({}, {}), **model: Any
) -> Context:
    metrics = MetricCache("net")
    manifest = {"model": {"modelName": "net", "modelVersion": "1.0", **model}}
    context = Context("net", str(folder), manifest, 2, None, metrics=metrics, model_yaml_config=config)
    context.request_ids = {idx: f"id-{idx}" for idx in range(len(headers))}
    context.request_processor = headers
    return context


def loaded(folder: Path, config: dict[str, Any] | None = None, **model: Any) -> BaseHandler:
    handler = BaseHandler()
    handler.initialize(context_of(folder, config, **model))
    return handler


def expected(files: Path) -> list[list[float]]:
    """The network computed by hand from its weights, with dropout off."""
    state = torch.load(files / "net.pt", weights_only=True)
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, -1.0, 0.5, 2.0]])
    hidden = (rows @ state["first.weight"].T + state["first.bias"]).clamp(min=0)
    rows_out: list[list[float]] = (hidden @ state["second.weight"].T + state["second.bias"]).tolist()
    return rows_out


FORMS = [
    {"modelFile": "tiny_net.py", "serializedFile": "net.pt"},
    {"serializedFile": "script.pt"},
    {"serializedFile": "program.pt2"},
]


@pytest.mark.parametrize("form", FORMS, ids=["eager", "torchscript", "export"])
def test_every_form_answers_the_same(files: Path, form: dict[str, Any]) -> None:
    handler = loaded(files, **form)
    assert handler.initialized
    answers = handler.handle(ROWS, handler.context)
    torch.testing.assert_close(answers, expected(files), rtol=1e-5, atol=1e-6)


def test_eager_models_are_in_evaluation_mode_and_answers_have_no_gradients(files: Path) -> None:
    handler = loaded(files, modelFile="tiny_net.py", serializedFile="net.pt")
    assert not handler.model.training
    assert handler.inference(torch.zeros(1, 4)).is_inference()


def test_device_is_the_cpu_without_a_gpu_id(files: Path) -> None:
    handler = loaded(files, serializedFile="script.pt")
    assert handler.get_device() == torch.device("cpu")
    assert handler.map_location == "cpu"


def test_pickled_objects_are_refused_with_the_way_out(files: Path) -> None:
    with pytest.raises(ModelFileError, match=r"(?s)whole\.pt holds Python objects.*weights_only: false"):
        loaded(files, modelFile="tiny_net.py", serializedFile="whole.pt")


def test_pickled_objects_load_when_the_archive_is_trusted(files: Path) -> None:
    config = {"handler": {"weights_only": False}}
    handler = loaded(files, config, modelFile="tiny_net.py", serializedFile="whole.pt")
    torch.testing.assert_close(handler.handle(ROWS, handler.context), expected(files), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "names neither a model file nor a serialized file"),
        ({"serializedFile": "net.bin"}, "net.bin isn't .pt"),
        ({"serializedFile": "net.so"}, "aot_compile: true"),
        ({"serializedFile": "gone.pt"}, "gone.pt isn't in the archive's directory"),
        ({"modelFile": "gone.py"}, "gone.py isn't in the archive's directory"),
        ({"serializedFile": "net.pt"}, "net.pt is no TorchScript archive.*--model-file"),
        ({"serializedFile": "program.onnx"}, "needs ONNX Runtime"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    files: Path, tmp_path: Path, model: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for name in ("tiny_net.py", "net.pt"):
        shutil.copy(files / name, tmp_path)
    (tmp_path / "program.onnx").write_bytes(b"")
    with pytest.raises(RuntimeError, match=message):
        loaded(tmp_path, **model)


@pytest.mark.parametrize("model_file", ["tiny_net.py", None], ids=["eager", "TorchScript"])
def test_a_damaged_weights_file_is_named(files: Path, tmp_path: Path, model_file: str | None) -> None:
    """Cut short by a broken copy, or the text that Git LFS leaves in a checkout without its files."""
    shutil.copy(files / "tiny_net.py", tmp_path)
    whole = (files / ("net.pt" if model_file else "script.pt")).read_bytes()
    model: dict[str, Any] = {"modelFile": model_file} if model_file else {}
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=rf"half\.pt \({len(whole) // 2} bytes\) isn't a whole file of weights"):
        loaded(tmp_path, None, **model, serializedFile="half.pt")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "pointer.pt").write_text(pointer)
    with pytest.raises(ModelFileError, match=r"pointer\.pt is a pointer of Git LFS.*git lfs pull"):
        loaded(tmp_path, None, **model, serializedFile="pointer.pt")


def test_weights_of_another_network_name_both_files(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "tiny_net.py", tmp_path)
    torch.save({"other.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ModelFileError) as failed:
        loaded(tmp_path, modelFile="tiny_net.py", serializedFile="other.pt")
    told = "".join(traceback.format_exception(failed.value))
    assert "other.pt doesn't fit TinyNet of tiny_net.py" in told
    assert told.count("other.weight") == 1, "the author reads the mismatch once"


def test_a_model_file_needs_one_network(tmp_path: Path) -> None:
    (tmp_path / "tiny_net.py").write_text(MODEL.format(name="A") + MODEL.format(name="B"))
    with pytest.raises(ModelFileError, match="one torch.nn.Module class, it has: A, B"):
        loaded(tmp_path, modelFile="tiny_net.py")


def test_a_broken_model_file_shows_its_own_error_each_time(tmp_path: Path) -> None:
    (tmp_path / "tiny_net.py").write_text("import no_such_module")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            loaded(tmp_path, modelFile="tiny_net.py")


def test_two_archives_with_equally_named_model_files(files: Path, tmp_path: Path) -> None:
    first = loaded(files, modelFile="tiny_net.py")
    (tmp_path / "tiny_net.py").write_text(MODEL.format(name="OtherNet"))
    second = loaded(tmp_path, modelFile="tiny_net.py")
    assert [type(handler.model).__name__ for handler in (first, second)] == ["TinyNet", "OtherNet"]


def test_labels(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "script.pt", tmp_path)
    (tmp_path / "index_to_name.json").write_text('{"0": ["x", "cat"]}')
    assert loaded(tmp_path, serializedFile="script.pt").mapping == {"0": "cat"}
    assert loaded(files, serializedFile="script.pt").mapping is None


def test_rows_that_are_no_numbers_fail(files: Path) -> None:
    handler = loaded(files, serializedFile="script.pt")
    with pytest.raises(TypeError, match="rows of dict make no tensor"):
        handler.handle([{"body": {"a": 1}}], handler.context)


FAKE_RUNTIME = """
import numpy


class InferenceSession:
    def __init__(self, path, providers):
        self.providers = providers

    def get_inputs(self):
        return [type("Input", (), {"name": "x", "type": "tensor(float)"})]

    def run(self, outputs, feeds):
        return [numpy.asarray(feeds["x"]) * 2]
"""


@pytest.fixture
def fake_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package with a session that has the same three calls."""
    (tmp_path / "onnxruntime.py").write_text(FAKE_RUNTIME)
    (tmp_path / "net.onnx").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    yield tmp_path
    sys.modules.pop("onnxruntime")


@pytest.mark.parametrize(
    ("device", "cuda", "providers"),
    [
        ("cpu", True, ["CPUExecutionProvider"]),
        ("cuda:1", True, [("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"]),
        ("cuda", True, [("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]),
        ("cuda:1", False, ["CPUExecutionProvider"]),
    ],
)
def test_onnx_runs_on_the_workers_device(fake_runtime: Path, device: str, cuda: bool, providers: list[Any]) -> None:
    """Against a stand-in package: machines with GPUs are rare in tests."""
    known = ["CUDAExecutionProvider"] if cuda else []
    source = f"{FAKE_RUNTIME}\n\ndef get_available_providers():\n    return {known}\n"
    (fake_runtime / "onnxruntime.py").write_text(source)
    model = load_onnx(fake_runtime / "net.onnx", torch.device(device))
    assert model.providers == providers
    assert model(torch.tensor([1.0])).tolist() == [2.0]
    assert model.run(None, {"x": [3.0]})[0].tolist() == [6.0]


def test_onnx_runs_in_onnx_runtime(tmp_path: Path) -> None:
    """The real one: x times weights plus bias; whole numbers are made the floats that the model declares."""
    make = onnx.helper
    graph = make.make_graph(
        [make.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "linear",
        [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2])],
        [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 1])],
        [
            make.make_tensor("w", onnx.TensorProto.FLOAT, [2, 1], [10.0, 1.0]),
            make.make_tensor("b", onnx.TensorProto.FLOAT, [1], [0.5]),
        ],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "net.onnx")
    handler = loaded(tmp_path, serializedFile="net.onnx")
    assert handler.handle([[1.0, 2.0], [3.0, 4.0]], handler.context) == [[12.5], [34.5]]
    assert handler.handle([{"body": [1, 2]}], handler.context) == [[12.5]]


# --- torch.compile


@pytest.mark.parametrize(
    ("pt2", "options"),
    [
        (None, None),
        ("inductor", {"backend": "inductor"}),
        ({"backend": "eager", "mode": "default"}, {"backend": "eager", "mode": "default"}),
        ({"compile": {"enable": True, "backend": "eager"}}, {"backend": "eager"}),
        ({"compile": {"backend": "eager"}}, {"backend": "eager"}),
        ({"compile": {"enable": True}}, {}),
        ({"compile": {"enable": False, "backend": "eager"}}, None),
        ({"compile": False}, None),
        ({"export": {"aot_compile": True}}, None),
        ({}, None),
    ],
)
def test_compile_options(pt2: Any, options: dict[str, Any] | None) -> None:
    assert compile_options({"pt2": pt2}) == options


def test_a_compiled_model_answers_the_same(files: Path) -> None:
    config = {"pt2": {"compile": {"enable": True, "backend": "eager"}}}
    handler = loaded(files, config, modelFile="tiny_net.py", serializedFile="net.pt")
    assert type(handler.model).__name__ == "OptimizedModule"
    torch.testing.assert_close(handler.handle(ROWS, handler.context), expected(files), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "pt2", "warning"),
    [(FORMS[0], "no_such_backend", "isn't a torch.compile backend"), (FORMS[1], "eager", "can't be compiled")],
)
def test_what_cannot_be_compiled_runs_as_it_is(
    files: Path, form: dict[str, str], pt2: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler = loaded(files, {"pt2": pt2}, **form)
    assert warning in caplog.text
    torch.testing.assert_close(handler.handle(ROWS, handler.context), expected(files), rtol=1e-5, atol=1e-6)


def test_a_package_is_told_from_a_program(files: Path, tmp_path: Path) -> None:
    """By the files in it, without loading it."""
    with zipfile.ZipFile(tmp_path / "package.pt2", "w") as archive:
        archive.writestr("package/data/aotinductor/model/model.so", b"")
    assert is_compiled_package(tmp_path / "package.pt2") and not is_compiled_package(files / "program.pt2")


@pytest.mark.slow  # the compiler reads torch's headers for half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling ahead of time needs a C++ compiler")
def test_a_package_compiled_ahead_of_time(files: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(str(files / "program.pt2"))
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
        handler = loaded(tmp_path, serializedFile="package.pt2")
        answers = handler.handle(ROWS, handler.context)
    torch.testing.assert_close(answers, expected(files), rtol=1e-4, atol=1e-5)


# --- handle


class Steps(BaseHandler):
    """Doubles numbers, remembers which rows each step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def preprocess(self, data: Any) -> Any:
        self.seen.append(len(data))
        return [row["body"] for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if "fail" in data:
            raise ValueError("asked to fail")
        return [2 * number for number in data]

    def postprocess(self, data: Any) -> Any:
        return data

    def describe_handle(self) -> Any:
        return {"labels": 3}

    def get_insights(self, data_preprocess: Any, inputs: Any, target: Any) -> Any:
        return [{"inputs": inputs, "target": target}]


def test_describe(tmp_path: Path) -> None:
    assert Steps().handle(None, context_of(tmp_path, headers=[{"describe": "True"}])) == [{"labels": 3}]
    assert BaseHandler().handle(None, context_of(tmp_path, headers=[{"describe": "True"}])) == [None]


def test_explain(tmp_path: Path) -> None:
    context = context_of(tmp_path, headers=[{"explain": "True"}])
    handler = Steps()
    assert handler.handle([{"body": 5, "target": 2}], context) == [{"inputs": 5, "target": 2}]
    assert handler.handle([{"body": 5}], context) == [{"inputs": 5, "target": 0}]
    assert handler.handle([{"body": 5}], context_of(tmp_path, headers=[{"explain": "False"}])) == [10]


def test_explaining_needs_insights(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="BaseHandler has no get_insights"):
        BaseHandler().explain_handle(None, [{"body": 1}])


def test_steps_are_timed_when_asked(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = loaded(files, {"handler": {"profile": True}}, serializedFile="script.pt")
    handler.handle(ROWS, handler.context)
    names = [line.split("|")[0].partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "[METRICS]ts_handler_preprocess.Milliseconds",
        "[METRICS]ts_handler_inference.Milliseconds",
        "[METRICS]ts_handler_postprocess.Milliseconds",
        "[METRICS]HandlerTime.Milliseconds",
    ]


def test_torch_profiler_writes_a_trace(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    monkeypatch.setattr("ts.torch_handler.base_handler.PROFILE_DIR", str(tmp_path))
    handler = loaded(files, serializedFile="script.pt")
    torch.testing.assert_close(handler.handle(ROWS, handler.context), expected(files), rtol=1e-5, atol=1e-6)
    assert list((tmp_path / "net").glob("*.json"))


# --- micro-batching


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_micro_batches_keep_the_order(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    handler = Steps()
    batching = MicroBatching(handler, size, {"preprocess": 2, "inference": 3})
    handler.handle = batching  # type: ignore[method-assign]
    assert handler.handle([{"body": n} for n in range(7)], context_of(tmp_path)) == [2 * n for n in range(7)]
    assert sorted(handler.seen, reverse=True) == [size] * (7 // size) + ([7 % size] if 7 % size else [])
    assert capsys.readouterr().out.count("HandlerTime") == 1
    batching.shutdown()


def test_micro_batches_describe_and_fail_like_the_handler(tmp_path: Path) -> None:
    batching = MicroBatching(Steps(), 1)
    assert batching([], context_of(tmp_path, headers=[{"describe": "True"}])) == [{"labels": 3}]
    assert batching([{"body": 5}], context_of(tmp_path, headers=[{"explain": "True"}])) == [{"inputs": 5, "target": 0}]
    with pytest.raises(ValueError, match="asked to fail"):
        batching([{"body": 1}, {"body": "fail"}, {"body": 3}], context_of(tmp_path))
    assert batching([{"body": 1}], context_of(tmp_path)) == [2]
    batching.shutdown()


class Indexed(Steps):
    """Notes in which part of the batch each step was."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, int | None]] = []
        self.batching = MicroBatching(self, 2)

    def preprocess(self, data: Any) -> Any:
        self.places.append(("preprocess", self.batching.get_micro_batch_idx()))
        return super().preprocess(data)

    def postprocess(self, data: Any) -> Any:
        self.places.append(("postprocess", self.batching.get_micro_batch_idx()))
        return super().postprocess(data)


def test_a_step_knows_its_part_of_the_batch_under_torchserves_names() -> None:
    handler = Indexed()
    assert handler.batching.handle([{"body": n} for n in range(5)]) == [0, 2, 4, 6, 8]
    assert sorted(handler.places) == [(step, place) for step in ("postprocess", "preprocess") for place in range(3)]
    assert handler.batching.get_micro_batch_idx() is None
    assert handler.batching.handler is handler
    handler.batching.shutdown()


def test_threads_of_a_step_can_be_more_and_fewer() -> None:
    batching = MicroBatching(Steps(), 1)
    for counts in ({"preprocess": 3, "inference": 2}, {"preprocess": 1}, {"postprocess": 4, "inference": 1}):
        batching.parallelism = counts
        assert {step: len(group) for step, group in batching.thread_groups.items()} == batching.parallelism
        assert batching.handle([{"body": n} for n in range(9)]) == [2 * n for n in range(9)]
    assert batching.parallelism == {"preprocess": 1, "inference": 1, "postprocess": 4}
    threads = [thread for group in batching.thread_groups.values() for thread in group]
    batching.shutdown()
    assert not any(thread.is_alive() for thread in threads)


def test_micro_batching_checks_its_settings() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        MicroBatching(Steps(), 0)
    with pytest.raises(ValueError, match="parallelism of predict: the steps are"):
        MicroBatching(Steps(), 1, {"predict": 2})
