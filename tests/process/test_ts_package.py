"""The names of `ts` that other people's handlers, tests and scripts import."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from ts.arg_parser import ArgParser
from ts.context import Context
from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator
from ts.handler_utils.utils import PackageMissing, import_class
from ts.metrics.metrics_store import MetricsStore
from ts.model_loader import ModelLoader, ModelLoaderFactory
from ts.model_service.model_service import SingleNodeService
from ts.model_service_worker import TorchModelServiceWorker
from ts.protocol.decoder import decode_bytes
from ts.protocol.frames import Chunk, Failed
from ts.service import Service, emit_metrics
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext
from ts.utils.hf_utils import download_model
from ts.utils.timeit_decorator import timeit


def test_a_handler_runs_with_torchserves_mock_context(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
    )
    (tmp_path / "model-config.yaml").write_text("scale: 3\n")
    context: Any = MockContext(None, tmp_path, "net.py", model_yaml_config_file="model-config.yaml")
    assert context.model_yaml_config == {"scale": 3}
    handler = BaseHandler()
    handler.initialize(context)
    assert handler.handle([{"data": [1.0, 2.0]}], context) == [[2.0, 4.0]]
    assert not context.get_request_header(0, "explain")
    context.explain = True
    assert context.get_request_header(1, "explain") and not context.get_request_header(0, "explain")
    assert {metric.name for metric in context.metrics.store} >= {"HandlerTime"}


# --- classes by name


@pytest.mark.parametrize(
    ("name", "prefix"), [("json.JSONDecoder", None), ("JSONDecoder", "json"), ("decoder.JSONDecoder", "json")]
)
def test_a_class_by_its_dotted_name(name: str, prefix: str | None) -> None:
    assert import_class(class_name=name, module_prefix=prefix) is json.JSONDecoder


@pytest.mark.parametrize(
    ("name", "prefix"), [("JSONDecoder", None), ("", None), ("json.Nothing", None), ("x.Y", "json")]
)
def test_no_such_class(name: str, prefix: str | None) -> None:
    with pytest.raises(ImportError):
        import_class(name, prefix)


# --- the loader and the service

HANDLER = """
from ts.utils.util import PredictionException


class Handler:
    def initialize(self, context):
        self.greeting = context.model_yaml_config["greeting"]

    def handle(self, data, context):
        if data[0]["who"] == "nobody":
            raise PredictionException("nobody is there", 404)
        return [f"{self.greeting} {row['who']}" for row in data]


def other(data, context):
    return None if data is None else "no list"
"""


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked archive; its handler has a name of its own in every test."""
    name = f"greeter_{abs(hash(tmp_path))}"
    (tmp_path / "MAR-INF").mkdir()
    model = {"modelName": "greeter", "handler": f"{name}.py", "configFile": "model-config.yaml"}
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    (tmp_path / "model-config.yaml").write_text("greeting: hello\n")
    (tmp_path / f"{name}.py").write_text(HANDLER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def request(who: str, ident: bytes = b"one") -> dict[str, Any]:
    parameter = {"name": "who", "value": who, "contentType": "text/plain"}
    return {"requestId": ident, "parameters": [parameter], "headers": [{"name": b"a", "value": b"b"}]}


def load(model_dir: Path, handler: str | None = None, **more: Any) -> Service:
    return ModelLoaderFactory.get_model_loader().load("greeter", str(model_dir), handler, **more)


def test_a_service_answers_as_a_worker_does(model_dir: Path) -> None:
    store = MetricsStore({}, "greeter")
    service = load(model_dir, metrics_cache=store)
    pieces = decode_bytes(service.predict([request("you"), request("me", b"two")]))
    assert [bytes(piece.data) for piece in pieces if isinstance(piece, Chunk)] == [b"hello you", b"hello me"]
    assert service.context.request_ids == {0: "one", 1: "two"}
    assert service.context.get_request_header(0, "a") == "b"
    assert service.context.get_request_header(0, "who") == {"content-type": "text/plain"}
    assert [metric.name for metric in store.store] == ["PredictionTime"]


@pytest.mark.parametrize(
    ("handler", "who", "code", "message"),
    [(None, "nobody", 404, "nobody is there"), ("{}:other", "x", 503, "Invalid model predict output")],
)
def test_a_service_says_what_failed(model_dir: Path, handler: str | None, who: str, code: int, message: str) -> None:
    name = next(model_dir.glob("greeter_*.py")).stem
    (failed,) = decode_bytes(load(model_dir, handler and handler.format(name)).predict([request(who)]))
    assert isinstance(failed, Failed)
    assert failed.code == code and failed.message.startswith(message)


def test_a_service_needs_requests() -> None:
    with pytest.raises(ValueError, match="Received invalid inputs"):
        Service.retrieve_data_for_inference(None)


def test_the_loader_knows_envelopes_and_says_what_is_wrong(model_dir: Path) -> None:
    service = load(model_dir, envelope="body")
    entry: Any = service._entry_point
    assert type(entry.__self__).__name__ == "BodyEnvelope"
    with pytest.raises(ValueError, match="not found"):
        load(model_dir, "nowhere")
    assert inspect.isabstract(ModelLoader)


def test_metrics_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    emit_metrics({"Some.Milliseconds:1": 1})
    emit_metrics(None)
    assert caplog.messages == ["[METRICS]Some.Milliseconds:1"]


def test_a_listening_worker_checks_what_it_is_given(tmp_path: Path, model_dir: Path) -> None:
    for arguments in (("unix",), ("tcp",), ("other",), ()):
        with pytest.raises(ValueError, match="No socket name|No socket port|Incomplete data"):
            TorchModelServiceWorker(*arguments)
    (tmp_path / "taken.9000").mkdir()
    with pytest.raises(RuntimeError, match="already in use"):
        TorchModelServiceWorker("unix", str(tmp_path / "taken.9000"))
    worker = TorchModelServiceWorker("unix", str(tmp_path / "sock.9000"))
    try:
        loaded = {"modelPath": str(model_dir).encode(), "modelName": b"greeter", "handler": b"", "batchSize": b"1"}
        service, text, code = worker.load_model(loaded)
        assert (text, code) == ("loaded model greeter", 200)
        assert service is not None
    finally:
        worker.sock.close()


def test_the_options_of_the_command_line() -> None:
    found = ArgParser.extract_args(["--start", "--ncs", "--model-store", "s", "--models", "a=b", "c", "--dt"])
    assert (found.start, found.stop, found.no_config_snapshots, found.token_auth) == (True, False, True, True)
    assert (found.model_store, found.models) == ("s", ["a=b", "c"])
    worker = ArgParser.model_service_worker_args().parse_args(["--sock-type", "unix", "--sock-name", "n", "--async"])
    assert (worker.sock_type, worker.sock_name, worker.async_comm) == ("unix", "n", True)


# --- model services

SIGNATURE = {"input_type": "application/json", "inputs": [{"data_name": "numbers"}]}


class Sum(SingleNodeService):
    def _inference(self, data: Any) -> Any:
        return sum(data[0])


@pytest.mark.parametrize("row", [{"numbers": b"[1, 2]"}, {"body": [1, 2]}, {"data": bytearray(b"[1, 2]")}])
def test_a_model_service(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "signature.json").write_text(json.dumps(SIGNATURE))
    context = Context("m", str(tmp_path), {"Model": {"Signature": "signature.json"}}, 1, None)
    service = Sum()
    service.initialize(context)
    assert service.signature() == SIGNATURE
    assert service.handle([row], context) == [3]
    assert service.ping() is None


def test_a_model_service_without_signature(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Signature file is not found"):
        Sum().initialize(Context("m", str(tmp_path), {}, 1, None))


# --- small things


def test_words_and_their_neighbours() -> None:
    assert list(ngrams_iterator(["a", "b", "c"], 2)) == ["a", "b", "c", "a b", "b c"]
    assert get_tokenizer(None)("A b") == ["A", "b"]
    english = get_tokenizer("basic_english")
    assert english('You can\'t "stop": now, (really)!') == [
        *("you", "can", "'", "t", "stop", "now", ",", "(", "really", ")", "!")
    ]
    assert get_tokenizer(len) is len
    for wrong in (("basic_english", "de"), ("moses", "en")):
        with pytest.raises(ValueError, match=r"for English|no tokenizer"):
            get_tokenizer(*wrong)


def test_how_long_a_function_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeit(max)(1, 2) == 2
    assert capsys.readouterr().out.startswith("max took 0.")


STREAMERS = """
class TextIteratorStreamer:
    '''Two pieces of text per prompt.'''

    def __init__(self, tokenizer, skip_prompt=False, timeout=None, **decode_kwargs):
        self.tokenizer, self.values, self.options = tokenizer, [], (skip_prompt, timeout, decode_kwargs)

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.values.append(None)

    def __iter__(self):
        return iter([self.tokenizer(value) for value in self.values if value is not None])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stand_in(name, source)`: a module of that name for this test."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, source: str) -> None:
        (folder / f"{name}.py").write_text(source)
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)

    return write


def test_a_batch_of_streams(stand_in: Any) -> None:
    import torch

    from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch

    stand_in("transformers", STREAMERS)
    streamer = TextIteratorStreamerBatch(lambda ids: str(ids.flatten().tolist()), 2, True, 3.0, clean=True)
    assert streamer.streamers[1].options == (True, 3.0, {"clean": True})
    for ids in ([[1, 2], [3, 4]], [5, 6]):
        streamer.put(torch.tensor(ids))
    streamer.end()
    with pytest.raises(ValueError, match="2 rows of token ids"):
        streamer.put(torch.tensor([1]))
    streamer._iterators = [iter(one) for one in streamer.streamers]
    assert list(streamer) == [[{"text": "[1, 2]"}, {"text": "[3, 4]"}], [{"text": "[5]"}, {"text": "[6]"}]]


def test_the_hub_is_asked_for_what_a_model_needs(stand_in: Any) -> None:
    stand_in("huggingface_hub", "def snapshot_download(**asked):\n    return asked\n")
    asked: Any = download_model("org/model", model_path="cache", use_auth_token="t")
    assert (asked["repo_id"], asked["cache_dir"], asked["token"], asked["revision"]) == (
        "org/model",
        "cache",
        "t",
        "main",
    )
    assert "*.safetensors" in asked["allow_patterns"]


@pytest.mark.parametrize("package", ["transformers", "pippy", "deepspeed", "vllm"])
def test_what_is_missing_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ts.handler_utils.distributed.deepspeed import get_ds_engine
    from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver
    from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch
    from ts.torch_handler.vllm_handler import VLLMHandler

    monkeypatch.setitem(sys.modules, package, None)
    config = {
        "deepspeed": {},
        "pippy": {"input_names": ["x"], "model_type": "other"},
        "handler": {"model_path": str(tmp_path)},
    }
    context = Context("m", str(tmp_path), {}, 1, None, model_yaml_config=config)
    calls = {
        "transformers": lambda: TextIteratorStreamerBatch(None, 1),
        "pippy": lambda: get_pipeline_driver(None, 2, context),
        "deepspeed": lambda: get_ds_engine(None, context),
        "vllm": lambda: asyncio.run(VLLMHandler().initialize(context)),
    }
    with pytest.raises(PackageMissing, match=f"needs the package .*{package}.*pip install"):
        calls[package]()


def test_deepspeed_gets_what_the_configuration_says(stand_in: Any, tmp_path: Path) -> None:
    from ts.handler_utils.distributed.deepspeed import get_ds_engine

    stand_in("deepspeed", "def init_inference(model, **asked):\n    return model, asked\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.bin").touch()
    config: dict[str, Any] = {
        "handler": {"model_path": str(tmp_path / "weights")},
        "deepspeed": {"checkpoint": "c.json"},
    }
    context = Context("m", str(tmp_path), {}, 1, None, model_yaml_config=config)
    model, asked = get_ds_engine("model", context)
    assert (model, asked["checkpoint"], asked["config"]) == ("model", str(tmp_path / "c.json"), None)
    assert json.loads((tmp_path / "c.json").read_text())["checkpoints"] == [str(tmp_path / "weights" / "a.bin")]
    config["deepspeed"]["config"] = "nowhere.json"
    with pytest.raises(ValueError, match=r"nowhere.json isn't there"):
        get_ds_engine("model", context)


def test_handlers_of_other_systems_say_what_to_use(tmp_path: Path) -> None:
    context = Context("m", str(tmp_path), {}, 1, None)
    for name, words in (
        ("trt_llm_handler", "TensorRT-LLM isn't part of this server: use the handler vllm_handler"),
        ("dali_image_classifier", "DALI isn't part of this server: use the handler image_classifier"),
    ):
        module = importlib.import_module(f"ts.torch_handler.{name}")
        handlers: list[Any] = [
            one
            for one in vars(module).values()
            if inspect.isclass(one) and one.__module__ == module.__name__ and hasattr(one, "initialize")
        ]
        (handler,) = handlers
        with pytest.raises(NotImplementedError, match=words):
            handler().initialize(context)
