"""tests/conform.py against this server: every dialect as its own server was recorded to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conform as suite

TEXT = """
def text(value):
    return value if isinstance(value, str) else bytes(value).decode()

def handle(data, context):
    return None if data is None else [text(*row.values()).upper() for row in data]
"""
SUMS = """
def one(value):
    if isinstance(value, dict) and "instances" in value:
        return {"predictions": [sum(row) for row in value["instances"]]}
    return float(sum(value)) if isinstance(value, list) else len(str(value))

def handle(data, context):
    return None if data is None else [one(row.get("body") or row.get("data") or row.get("x")) for row in data]
"""
CONFIG = """
openInference:
  inputs: [{name: x, datatype: FP32, shape: [-1]}]
  outputs: [{name: sum, datatype: FP64, shape: [1]}]
"""


@pytest.fixture(scope="module")
def served(server_of: Any) -> Iterator[Any]:
    with server_of({"text": (TEXT, ""), "sums": (SUMS, CONFIG)}, metrics_mode="prometheus") as server:
        yield server


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("inputs")
    tensors = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}]}
    texts = {"tensors.json": json.dumps(tensors), "v1.json": '{"instances": [[1, 2]]}', "words.txt": "some words"}
    for name, text in texts.items():
        (directory / name).write_text(text)
    return {name: directory / name for name in texts}


def conform(server: Any, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    """The exit status, and the report's sections by dialect."""
    where = ["--management", server.http_management, "--metrics", f"http://127.0.0.1:{server.port('http_metrics')}"]
    where += ["--grpc", server.inference, "--grpc-management", server.management]
    status = suite.main([server.http, *where, "--json", *map(str, words)])
    sections = json.loads(capsys.readouterr().out)["sections"]
    return status, {section["facts"]["dialect"]: section for section in sections}


def wrong(sections: dict[str, Any]) -> str:
    return "\n".join(
        f"{section['title']}: {one['about']}: {one['text']}"
        for section in sections.values()
        for one in section["findings"]
        if one["severity"] != "ok" or section["facts"]["support"] != "supported"
    )


def test_every_dialect_is_supported(served: Any, inputs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sent = ("--input", inputs["tensors.json"], "--input", inputs["v1.json"], "--change")
    status, sections = conform(served, capsys, "--model", "sums", *sent)
    assert (wrong(sections), status) == ("", 0)
    left = {name for name, section in sections.items() if section["facts"]["left_out"]}
    assert left == {"openai"}
    status, sections = conform(served, capsys, "--model", "text", "--input", inputs["words.txt"])
    assert (wrong(sections), status) == ("", 0)
    assert sections["openai"]["facts"]["left_out"] == 0


def test_nothing_is_changed(served: Any, inputs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = served.describe("sums")
    conform(served, capsys, "--model", "sums", "--change")
    after = served.describe("sums")
    assert [after[key] for key in after if key != "workers"] == [before[key] for key in before if key != "workers"]
    assert [worker["pid"] for worker in after["workers"]] == [worker["pid"] for worker in before["workers"]]


def test_what_is_elsewhere_is_not_there(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics address has no other APIs."""
    url = f"http://127.0.0.1:{served.port('http_metrics')}"
    status = suite.main([url, "--json"])
    facts = [section["facts"] for section in json.loads(capsys.readouterr().out)["sections"]]
    support = {fact["dialect"]: fact["support"] for fact in facts}
    assert support.pop("torchserve-metrics") == "supported"
    over_grpc = {"torchserve-grpc", "torchserve-oip", "oip-grpc", "triton-grpc"}
    assert {name for name, how in support.items() if how == "not asked"} == over_grpc
    assert {name for name, how in support.items() if how != "not there"} == over_grpc
    assert status == 0
    assert suite.main([url, "--dialect", "openai"]) == 1
    assert "OpenAI's API (REST): not there" in capsys.readouterr().out
