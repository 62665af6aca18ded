"""Handlers that need other packages: the server around vLLM's application, with a stand-in, and missing packages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import until

STAND_INS = Path(__file__).parents[1] / "data" / "stand_ins"
CONFIG = """
handler:
  model_path: weights
  vllm_engine_config: {served_model_name: echo}
  adapters: {tuned: adapters/tuned}
"""


def add(store: Path, name: str, handler: str, config: str = "", **names: str) -> Path:
    folder = store / name
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": name, "handler": handler, **names}
    if config:
        (folder / "model-config.yaml").write_text(config)
        model["configFile"] = "model-config.yaml"
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    return folder


@pytest.fixture(scope="module")
def served(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("engines") / "store"
    shutil.copy(STAND_INS / "vllm.py", add(store, "llm", "vllm_handler", CONFIG))
    add(store, "without", "vllm_handler")
    (store / "without" / "vllm.py").write_text("raise ImportError('not here')\n")
    add(store, "dali", "dali_image_classifier")
    add(store, "trt", "trt_llm_handler")
    add(store, "onnx", "base_handler", serializedFile="net.onnx")
    (store / "onnx" / "net.onnx").touch()
    (store / "onnx" / "onnxruntime.py").write_text("raise ImportError('not here')\n")
    with serving(tmp_path_factory.mktemp("server"), store, {"preload_torch": "true"}, ["--ncs"]) as server:
        server.register("llm")
        yield server


def asked(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http}/v1/completions", json={"model": "llm", "prompt": "one two", **body})


def test_names_of_the_handler_are_models(served: Any) -> None:
    found = httpx.get(f"{served.http}/v1/models").json()
    assert [one["id"] for one in found["data"]] == ["echo", "llm", "llm:tuned", "tuned"] and found["models"] == ["llm"]
    for name in ("echo", "llm", "tuned"):
        assert asked(served, model=name).json()["asked"] == name
    assert asked(served, model="other").status_code == 404


def test_its_errors_have_openais_form(served: Any) -> None:
    for answer, status in (
        (asked(served, prompt="fail"), 503),
        (asked(served, prompt="fail", stream=True), 503),
        (httpx.post(f"{served.http}/v1/embeddings", json={"model": "llm"}), 404),
    ):
        assert answer.status_code == status and answer.json()["error"]["message"], answer.text


def test_one_worker_is_started_and_again_after_its_engine_died(served: Any) -> None:
    (before,) = served.worker_pids("llm")
    assert asked(served, prompt="die").status_code == 200
    until(lambda: before not in served.worker_pids("llm"), "the worker goes on without an engine")
    until(lambda: served.worker_pids("llm"), "no other worker was started")
    assert asked(served).json()["choices"][0]["text"] == "one two"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("without", "vllm_handler needs the package vllm, which can't be imported (not here)"),
        ("dali", "DALI isn't part of this server: use the handler image_classifier"),
        ("trt", "TensorRT-LLM isn't part of this server: use the handler vllm_handler"),
        ("onnx", "net.onnx needs ONNX Runtime: add `onnxruntime`"),
    ],
)
def test_what_is_missing_is_said_when_a_model_is_registered(served: Any, model: str, words: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        served.register(model)
    assert words in refused.value.details()
