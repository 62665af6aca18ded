"""`python -m ts.llm_launcher`, with a stand-in for vLLM."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
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


@pytest.mark.long
def test_a_language_model_is_served_until_it_is_ended(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text(SETTINGS)
    (tmp_path / "packages").mkdir()
    for file in STAND_INS.glob("vllm*.*"):
        shutil.copy(file, tmp_path / "packages")
    path = os.pathsep.join(filter(None, (str(tmp_path / "packages"), os.environ.get("PYTHONPATH"))))
    env = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    env |= {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-u", "-m", "ts.llm_launcher", "--model_id", "org/echo", "--model_store", "store"]
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
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
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(GUARD_S) == 0
    assert not (tmp_path / "store" / "model").exists()


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_model_is_spread_over_all_gpus(gpus: int) -> None:
    config = model_config(parser().parse_args(["--model_id", "m", "--vllm_engine.max_model_len", "10"]), gpus)
    assert config["deviceType"] == ("gpu" if gpus else "cpu")
    assert config.get("parallelLevel", 1) == max(gpus, 1)
    assert config["handler"]["vllm_engine_config"].get("tensor_parallel_size", 1) == max(gpus, 1)
    assert config["handler"]["vllm_engine_config"]["max_model_len"] == 10
