"""`python -m ts.llm_launcher`, with a stand-in for vLLM."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support import GUARD_S
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
def launched(place: Path) -> Iterator[subprocess.Popen[str]]:
    """The launcher, in a directory with the packages of its `packages`."""
    (place / "config.properties").write_text(SETTINGS)
    path = os.pathsep.join(filter(None, (str(place / "packages"), os.environ.get("PYTHONPATH"))))
    env = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    env |= {"PYTHONPATH": path, "TMPDIR": str(place)}
    argv = [sys.executable, "-u", "-m", "ts.llm_launcher", "--model_id", "org/echo", "--model_store", "store"]
    with subprocess.Popen(
        argv, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def refused(place: Path) -> str:
    """What the launcher prints that ends by itself, with status 1."""
    with launched(place) as process:
        said, _ = process.communicate(timeout=GUARD_S)
        assert process.returncode == 1, said
    return said


def test_without_its_engine_nothing_is_started(tmp_path: Path) -> None:
    said = refused(tmp_path)
    assert said == (
        "The package vllm, the engine of vllm_handler, is not installed. Install it: "
        f"{shlex.quote(sys.executable)} -m pip install vllm\n"
    )
    assert not (tmp_path / "store").exists() and not (tmp_path / "logs").exists()


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").write_text('raise ImportError("libcuda.so.1: no such file")\n')
    said = refused(tmp_path)
    assert "libcuda.so.1: no such file" in said
    assert said.endswith("The server did not start\n")
    assert not (tmp_path / "store" / "model").exists()


def test_a_model_of_the_same_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").touch()
    (tmp_path / "store" / "model" / "MAR-INF").mkdir(parents=True)
    assert "store/model is there already. Delete it, or give another --model_name" in refused(tmp_path)
    assert (tmp_path / "store" / "model").exists()


@pytest.mark.long
@pytest.mark.parametrize("by_itself", [False, True], ids=["launcher", "server"])
def test_a_language_model_is_served_until_it_is_ended(tmp_path: Path, by_itself: bool) -> None:
    (tmp_path / "packages").mkdir()
    shutil.copy(STAND_INS / "vllm.py", tmp_path / "packages")
    with launched(tmp_path) as process:
        assert process.stdout is not None
        seen, port = [], None
        for line in process.stdout:
            seen.append(line)
            port = port or re.search(r"http_inference listens on \S+:(\d+)", line)
            if port and any("Model server started" in one for one in seen):
                break
        assert port, "".join(seen)
        config = yaml.safe_load((tmp_path / "store" / "model" / "model-config.yaml").read_text())
        assert config["handler"] == {"model_path": "org/echo", "vllm_engine_config": {"max_num_seqs": 256}}
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=GUARD_S)
        body = json.dumps({"prompt": "hello you"})
        connection.request("POST", "/predictions/model/1.0/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["choices"][0]["text"] == "hello you"
        server = int((tmp_path / ".model_server.pid").read_text())
        os.kill(server if by_itself else process.pid, signal.SIGINT)
        assert process.stdout.read().endswith("The server has ended\n") is by_itself
        assert process.wait(GUARD_S) == by_itself
    assert not (tmp_path / "store" / "model").exists()


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_model_is_spread_over_all_gpus(gpus: int) -> None:
    config = model_config(parser().parse_args(["--model_id", "m", "--vllm_engine.max_model_len", "10"]), gpus)
    assert config["deviceType"] == ("gpu" if gpus else "cpu")
    assert config.get("parallelLevel", 1) == max(gpus, 1)
    assert config["handler"]["vllm_engine_config"].get("tensor_parallel_size", 1) == max(gpus, 1)
    assert config["handler"]["vllm_engine_config"]["max_model_len"] == 10
