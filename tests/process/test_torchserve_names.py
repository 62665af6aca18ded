"""The public names of TorchServe 0.12's wheel: each is here, or its absence has a reason."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "torchserve_names.json"
PAGE = Path(__file__).parents[2] / "docs" / "ts-package.md"
RECORDED: dict[str, Any] = json.loads(DATA.read_text())


def names_of(folder: Path) -> dict[str, list[str]]:
    """The classes with their methods, functions and constants that the modules of a wheel define, without tests."""
    found = {}
    for path in sorted((folder / "ts").rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        names: set[str] = set()
        parts: list[ast.AST] = [ast.parse(path.read_text())]
        while parts:
            for node in ast.iter_child_nodes(parts.pop()):
                if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                    parts.append(node)
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                    inside = node.body if isinstance(node, ast.ClassDef) else []
                    methods = (one.name for one in inside if isinstance(one, ast.FunctionDef))
                    names |= {f"{node.name}.{method}" for method in methods if not method.startswith("_")}
                elif isinstance(node, ast.Assign):
                    names |= {one.id for one in node.targets if isinstance(one, ast.Name) and one.id.isupper()}
        public = sorted(name for name in names if not name.startswith("_"))
        if public and "unit_tests" not in module:
            found[module] = public
    return found


def is_there(module: str, name: str) -> bool:
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ModuleNotFoundError, AttributeError):
        return False
    return True


def reason_of(module: str, name: str) -> str:
    """The reason for the absence of a name, of its class, or of its module."""
    absent: dict[str, str] = RECORDED["absent"]
    whole = f"{module}.{name}"
    return next((absent[key] for key in (whole, whole.rpartition(".")[0], module) if key in absent), "")


@pytest.mark.parametrize("module", RECORDED["names"])
def test_every_public_name_is_there_or_its_absence_has_a_reason(module: str) -> None:
    for name in RECORDED["names"][module]:
        assert is_there(module, name) != bool(reason_of(module, name)), f"{module}.{name}"


def test_the_page_names_what_is_absent_with_the_reasons() -> None:
    table = PAGE.read_text().partition("## Names that are absent")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", table, re.MULTILINE)
    told = {f"ts.{name}": reason for names, reason in rows for name in re.findall(r"`([^`]+)`", names)}
    assert told == RECORDED["absent"]


@pytest.mark.slow
def test_the_recorded_names_are_those_of_the_wheel(tmp_path: Path) -> None:
    words = ["download", "torchserve==0.12.0", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=600)
    (wheel,) = tmp_path.glob("torchserve-0.12.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    assert names_of(tmp_path / "wheel") == RECORDED["names"]


def test_an_envelope_of_torchserves_form_takes_the_batch() -> None:
    from ts.context import Context
    from ts.torch_handler.request_envelope.base import BaseEnvelope
    from ts.torch_handler.request_envelope.json import JSONEnvelope

    class Upper(BaseEnvelope):
        def parse_input(self, data: Any) -> list[Any]:
            return [row["body"].upper() for row in data]

        def format_output(self, results: Any) -> list[Any]:
            return [{"said": result} for result in results]

    def twice(data: Any, context: Any) -> list[Any]:
        return [value * 2 for value in data]

    context = Context("m", ".", {}, 2, None)
    context.request_processor = [{}, {}]
    assert Upper(twice).handle([{"body": "a"}, {"body": "b"}], context) == [{"said": "AA"}, {"said": "BB"}]
    known = JSONEnvelope(twice)
    assert known.parse_input([{"body": {"instances": [1, 2]}}, {"body": b'{"instances": [3]}'}]) == [1, 2, 3]
    assert known.format_output([2, 4, 6]) == ['{"predictions": [2, 4]}', '{"predictions": [6]}']


def test_metrics_of_the_older_names_work(capsys: pytest.CaptureFixture[str]) -> None:
    from ts.metrics import process_memory_metric, system_metrics
    from ts.metrics.caching_metric import CachingMetric
    from ts.metrics.dimension import Dimension
    from ts.metrics.metric import Metric
    from ts.metrics.metric_encoder import MetricEncoder
    from ts_frontend.telemetry.metrics.requests import parse_record

    metric = Metric("Load", 2, "ms", [Dimension("Level", "Host")])
    found = json.loads(json.dumps([metric, {"of": metric}], cls=MetricEncoder))
    assert found[0]["Dimensions"] == [{"Name": "Level", "Value": "Host"}] and found[0] == found[1]["of"]
    assert json.loads(json.dumps(Dimension("a", "b"), cls=MetricEncoder)) == {"Name": "a", "Value": "b"}
    CachingMetric("Seen", "count", ["Level"]).emit_metrics("id", 3, "Level:Model")
    seen = parse_record(capsys.readouterr().out.strip())
    assert seen is not None and (seen.name, seen.value, seen.labels) == ("Seen", 3.0, {"Level": "Model"})
    system_metrics.collect_all()
    records = [parse_record(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 7 and all(record is not None for record in records)
    assert process_memory_metric.get_cpu_usage(os.getpid()) > 1 << 20
