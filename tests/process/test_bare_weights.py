"""Weights without an archive: the adapter's reading of each kind of file, and of requests of each protocol."""

from __future__ import annotations

import fractions
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, save
from safetensors.torch import save_file

from support import GUARD_S
from ts.compat import weights
from ts.runtime import handlers
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.forms import ModelSpec
from ts.tensors.types import InferenceRequest, InferenceResponse, Tensor, bytes_array
from ts.tensors.v1_form import V1Form
from ts.torch_handler.model_files import ModelFileError
from ts_frontend.errors import InvalidArchive
from ts_frontend.models.formats.format import ModelFiles
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.formats.weights import WeightsFormat
from ts_frontend.models.inspection import how_to_serve

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
MODEL_FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x * self.part
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.part


class Words(torch.nn.Module):
    """Whole numbers in, and two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 2)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.table(ids)
        return {"sum": (found * scale).sum(-1), "ids": ids}


def written(kind: str, folder: Path) -> Path:
    if kind == "model.pt":
        torch.jit.script(Net()).save(str(folder / kind))
    elif kind == "model.pt2":
        size = {"x": {0: torch.export.Dim("rows")}}
        torch.export.save(torch.export.export(Net(), (torch.zeros(3, 2),), dynamic_shapes=size), folder / kind)
    elif kind == "model.onnx":
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 2]) for name in "xy")
        half = helper.make_tensor("half", TensorProto.FLOAT, [], [0.5])
        nodes = [helper.make_node("Mul", ["x", "half"], ["y"])]
        graph = helper.make_graph(nodes, "halves", [x], [y], [half])
        save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / kind)
    elif kind == "state":
        torch.save(Net().state_dict(), folder / "model.pt")
        (folder / "model.py").write_text(MODEL_FILE)
    else:
        save_file(Net().state_dict(), folder / "model.safetensors")
        (folder / "model.py").write_text(MODEL_FILE)
    return folder


def loaded(folder: Path) -> Any:
    (archive,) = WeightsFormat().open(ModelFiles(folder, folder))
    settings = {"model_dir": str(folder), "model_name": "net", "model_version": "1.0"}
    return weights.load(settings | {"adapter_settings": archive.adapter_settings})


def answered(handler: Any, *inputs: Tensor) -> dict[str, Any]:
    (answer,) = handler.entry([InferenceRequest(list(inputs))], None)
    assert isinstance(answer, InferenceResponse), answer
    return {one.name: (one.datatype, one.array.tolist()) for one in answer.outputs}


def v1(handler: Any, body: dict[str, Any]) -> Any:
    named = handler.tensors
    form = V1Form(
        json.dumps(body).encode(), {}, frozenset(), ModelSpec("net", "1.0", named["inputs"], named["outputs"])
    )
    (answer,) = handler.entry([form.request], None)
    assert isinstance(answer, InferenceResponse), answer
    return json.loads(form.answer(answer, True))["predictions"]


@pytest.mark.parametrize("kind", ["model.pt", "model.pt2", "model.onnx", "state", "safetensors"])
def test_each_kind_takes_tensors_and_instances(kind: str, tmp_path: Path) -> None:
    handler = loaded(written(kind, tmp_path))
    output = "y" if kind == "model.onnx" else "output__0"
    found = answered(handler, Tensor.of("x", np.array([[1, 2]], np.float32)))
    assert found == {output: ("FP32", [[0.5, 1.0]])}
    assert v1(handler, {"instances": [[3, 4], [5, 6]]}) == [[1.5, 2.0], [2.5, 3.0]]
    declares = [(one["name"], one["shape"]) for one in handler.signature["inputs"]]
    assert declares == ([("x", [-1, 2])] if kind in ("model.pt2", "model.onnx") else [])


def test_whole_numbers_stay_whole_for_an_embedding_and_names_are_arguments(tmp_path: Path) -> None:
    words = Words()
    torch.jit.script(words).save(str(tmp_path / "model.pt"))
    handler = loaded(tmp_path)
    rows = v1(handler, {"instances": [{"scale": [1.0, 0.0], "ids": 3}]})
    expected = words.table.weight[3, 0].item()
    assert rows == [{"sum": pytest.approx(expected), "ids": 3}]
    ids, scale = np.array([3]), np.array([1, 0], np.float32)
    by_name = answered(handler, Tensor.of("scale", scale), Tensor.of("ids", ids))
    assert by_name == answered(handler, Tensor.of("in__1", scale), Tensor.of("in__0", ids))
    assert by_name == answered(handler, Tensor.of("first", ids), Tensor.of("second", scale))


def test_what_the_model_refuses_fails_its_request_alone(tmp_path: Path) -> None:
    handler = loaded(written("model.pt", tmp_path))
    good = InferenceRequest([Tensor.of("x", np.ones(1, np.float32))])
    texts = InferenceRequest([Tensor("x", "BYTES", bytes_array([b"a"], [1]))])
    many = InferenceRequest([Tensor.of(name, np.ones(1, np.float32)) for name in ("a", "b")])
    first, second, third = handler.entry([texts, many, good], None)
    assert "no tokenizer" in str(first) and "2 inputs, a, b; forward takes: x" in str(second)
    assert isinstance(third, InferenceResponse)


def test_a_state_without_a_class_says_so(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    with pytest.raises(HandlerNotUsable, match=r"is not TorchScript. A state dict needs its class: put a model\.py"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["", "model_state_dict", "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_is_read_like_its_state(name: str, prefix: str, tmp_path: Path) -> None:
    folder = written("state", tmp_path)
    state = {prefix + key: value for key, value in Net().state_dict().items()}
    torch.save({name: state, "epoch": 3} if name else state, folder / "model.pt")
    found = answered(loaded(folder), Tensor.of("x", np.array([[1, 2]], np.float32)))
    assert found == {"output__0": ("FP32", [[0.5, 1.0]])}


def test_a_checkpoint_without_a_state_says_which_keys_it_has(tmp_path: Path) -> None:
    folder = written("state", tmp_path)
    torch.save({"epoch": 3, "best": {}}, folder / "model.pt")
    with pytest.raises(
        ModelFileError, match=r"is no state of Net: its keys are 'best, epoch'\. Save `model.state_dict"
    ):
        loaded(folder)


def opened(path: Path) -> Any:
    return Formats((WeightsFormat(),)).open(path, path.parent)


@pytest.mark.parametrize("old", [False, True])
def test_a_pickled_module_is_refused_with_the_handler_that_serves_it(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    whole = torch.nn.Sequential(torch.nn.Linear(2, 1))
    torch.save(whole, tmp_path / "net.pt", _use_new_zipfile_serialization=not old)
    for place in (tmp_path, tmp_path / "net.pt"):
        with pytest.raises(InvalidArchive, match="a pickled 'torch.nn.modules.container.Sequential'") as refused:
            opened(place)
    code = refused.value.message.split("\n\n")[1]
    assert len(code.splitlines()) == 4
    (tmp_path / "handler.py").write_text(code)
    handler = handlers.load({"model_dir": str(tmp_path), "handler": "handler.py", "model_name": "net"})
    answers: Any = handler.entry([{"body": [[1, 2]]}], handler.context)
    assert answers == [whole(torch.tensor([[1.0, 2.0]])).tolist()]
    sys.modules.pop("handler")


def test_a_pickled_module_of_a_script_says_that_no_server_finds_its_class(tmp_path: Path) -> None:
    code = "import torch\nclass Mine(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    code += "        self.w = torch.nn.Parameter(torch.zeros(1))\ntorch.save(Mine(), 'net.pt')\n"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=GUARD_S)
    with pytest.raises(InvalidArchive, match=r"'__main__\.Mine', whose class was defined in a script"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["model.pt", "state"])
def test_weights_are_no_pickled_module(kind: str, tmp_path: Path) -> None:
    assert how_to_serve(written(kind, tmp_path) / "model.pt") == ""


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_other_pickles_are_recognised_without_loading_them(protocol: int, tmp_path: Path) -> None:
    file = tmp_path / "net.joblib"
    file.write_bytes(pickle.dumps(fractions.Fraction(1, 2), protocol))
    with pytest.raises(InvalidArchive, match=r"a pickled 'fractions.Fraction'(.|\n)*joblib.load\('net.joblib'\)"):
        opened(file)
    file.write_bytes(b"\x78\x01 compressed")
    with pytest.raises(InvalidArchive, match="a pickled object"):
        opened(file)


def test_a_file_that_is_no_safetensors_says_so(tmp_path: Path) -> None:
    (written("safetensors", tmp_path) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(HandlerNotUsable, match=r"model\.safetensors can't be read: .*header"):
        loaded(tmp_path)


@pytest.mark.long
def test_a_triton_repository_may_have_a_program_of_torch_export(tmp_path: Path) -> None:
    from ts.compat import triton

    file = written("model.pt2", tmp_path) / "model.pt2"
    config = {"name": "m", "backend": "pytorch", "max_batch_size": 4}
    settings = {"model_dir": str(tmp_path), "model_name": "m", "model_version": "1"}
    adapted = {"config": config, "model_file": str(file), "backend": "pytorch"}
    handler: Any = triton.load(settings | {"adapter_settings": adapted})
    assert handler.signature["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2], "optional": False}]
    rows = [InferenceRequest([Tensor.of("x", np.full((count, 2), count, np.float32))]) for count in (1, 2)]
    answers = handler.entry(rows, None)
    assert [one.outputs[0].array.tolist() for one in answers] == [[[0.5, 0.5]], [[1.0, 1.0], [1.0, 1.0]]]
