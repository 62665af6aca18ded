"""Checkpoints of transformers as they lie on a hub and as KServe's initializer leaves them in /mnt/models: config.json,
safetensors, the tokenizer's files. The package comes from the environment `transformers`, torch from this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from e2e.servers import TRANSFORMERS, Serving
from support import until

pytestmark = [pytest.mark.external, pytest.mark.slow]
TEXTS = ["a good film", "bad"]


class Hub(NamedTuple):
    """Folders of checkpoints, the logits of TEXTS by folder, and the variables with which a server has transformers."""

    folder: Path
    logits: dict[str, list[list[float]]]
    env: dict[str, str]


@pytest.fixture(scope="module")
def hub(client_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Hub:
    (packages,) = client_python("transformers").parent.parent.glob("lib/python*/site-packages")
    folder = tmp_path_factory.mktemp("hub")
    env = {"PYTHONPATH": str(packages)}
    program = Path(__file__).with_name("programs") / "hub_models.py"
    command = [sys.executable, str(program), str(folder), *TEXTS]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Hub(folder, json.loads(done.stdout), env)


@pytest.fixture
def serve(hub: Hub, tmp_path: Path) -> Iterator[Callable[[str], Serving]]:
    running: list[Serving] = []

    def begin(name: str) -> Serving:
        words = ["--profile=kserve", "--model_name=net", f"--model_dir={hub.folder / name}"]
        settings = {"env": hub.env, "preloaded": TRANSFORMERS, "default_workers_per_model": 1}
        running.append(Serving(tmp_path, None, settings, words))
        return running[-1].wait_started()

    yield begin
    for server in running:
        assert server.terminate() == 0, server.log


@pytest.mark.parametrize("name", ["whole", "parts", "half"])
def test_a_checkpoint_answers_texts_and_tokens(name: str, hub: Hub, serve: Callable[[str], Serving]) -> None:
    url = f"http://127.0.0.1:{serve(name).port('http_inference')}"
    until(lambda: httpx.get(f"{url}/v2/health/ready").status_code == 200)

    def asked(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    expected = [pytest.approx(row, rel=0.02 if name == "half" else 1e-4) for row in hub.logits[name]]
    assert expected[0] != hub.logits[name][1], "the texts differ"
    classes = [row.index(max(row)) for row in hub.logits[name]]
    assert asked("/v1/models/net:predict", {"instances": TEXTS})["predictions"] == classes
    tensor = {"name": "texts", "shape": [2], "datatype": "BYTES", "data": TEXTS}
    (found,) = asked("/v2/models/net/infer", {"inputs": [tensor]})["outputs"]
    assert [json.loads(one)["label"] for one in found["data"]] == [f"LABEL_{one}" for one in classes]
    ids, mask = [2, 4, 5, 7, 3, 2, 6, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    inputs = [
        {"name": key, "shape": [2, 5], "datatype": "INT64", "data": data}
        for key, data in (("input_ids", ids), ("attention_mask", mask))
    ]
    (found,) = asked("/v2/models/net/infer", {"inputs": inputs})["outputs"]
    assert (found["name"], found["shape"]) == ("logits", [2, 2])
    assert found["datatype"] == ("BF16" if name == "half" else "FP32")
    tokens = {"input_ids": [2, 6, 3], "attention_mask": [1, 1, 1]}
    assert asked("/v1/models/net:predict", {"instances": [tokens]})["predictions"] == [expected[1]]


def test_weights_of_another_model_are_not_served_as_random_ones(serve: Callable[[str], Serving]) -> None:
    server = serve("other")
    server.wait_for_log("config.json doesn't fit model.safetensors")
    url = f"http://127.0.0.1:{server.port('http_inference')}"
    assert httpx.get(f"{url}/v2/models/net/ready").status_code != 200
