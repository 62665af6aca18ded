"""The handlers in the documentation behave as it describes."""

from __future__ import annotations

import io
import re
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from ts.context import Context
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.protocol.completions import ASKING, PROMPTS_MAX, STOP_CHARS_MAX, STOPS_MAX
from ts.runtime.handlers import openai_of
from ts.torch_handler.base_handler import compile_options
from ts_frontend.telemetry.metrics.requests import parse_record


def blocks(root: Path, page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (root / "docs" / page).read_text(), re.DOTALL)


def modules(root: Path, page: str) -> list[types.ModuleType]:
    """Every Python block of a page, run."""
    found = []
    for number, source in enumerate(blocks(root, page, "python")):
        module = types.ModuleType(f"block_{number}")
        exec(compile(source, f"{page} block {number}", "exec"), module.__dict__)  # noqa: S102 - our own page
        found.append(module)
    return found


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Of an archive whose model gives each image's mean colours."""
    source = "import torch\n\n\nclass Means(torch.nn.Module):\n    def forward(self, x):\n"
    (tmp_path / "means.py").write_text(source + "        return x.mean(dim=(2, 3)) if x.dim() == 4 else 2 * x\n")
    metrics = MetricsCacheYamlImpl(model_name="mymodel")
    metrics.initialize_cache()
    made = Context("mymodel", str(tmp_path), {"model": {"modelFile": "means.py"}}, 1, None, metrics=metrics)
    made.request_ids = {0: "ID"}
    made.request_processor = [{}]
    return made


def test_metrics_page_shows_the_records_of_its_handler(
    root: Path, context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    simple, declared = modules(root, "custom_metrics.md")
    assert simple.handle([{}], context) == ["done"]
    parsed = [parse_record(line) for line in capsys.readouterr().out.splitlines()]
    records = [one.text(one.definition(), tuple(one.labels.values())) for one in parsed if one is not None]
    shown = blocks(root, "custom_metrics.md", "text")[0].splitlines()
    masked = [re.sub(r"#hostname:[^,]*", "#hostname:HOST", record) for record in records]
    assert [re.sub(r"\d+$", "", one) for one in masked] == [re.sub(r"\d+$", "", one) for one in shown]
    handler = declared.Handler()
    handler.initialize(context)
    handler.handle([{}], context)
    assert "TokensOut.tokens:40|#ModelName:mymodel,Language:en|#type:HISTOGRAM" in capsys.readouterr().out


def test_metrics_page_shows_a_usable_file(root: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.yaml").write_text(blocks(root, "custom_metrics.md", "yaml")[0])
    cache = MetricsCacheYamlImpl(tmp_path / "metrics.yaml")
    cache.initialize_cache()
    assert cache.get_metric("TokensIn").dimension_names == ["ModelName", "Level"]


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (9, 9), (0, 200, 0)).save(out, "PNG")
    return out.getvalue()


def test_handlers_of_the_base_handler_page(root: Path, context: Context) -> None:
    doubler, digits, overlapped = modules(root, "base_handler.md")
    answers: list[Any] = []
    for handler, row in (
        (doubler.Doubler(), {"body": "2.5"}),
        (digits.Digits(), {"data": picture()}),
        (overlapped.Overlapped(), {"data": picture()}),
    ):
        handler.initialize(context)
        answers.append(handler.handle([row], context)[0])
    assert answers[0] == {"doubled": 5.0}
    assert answers[1] == 1
    assert next(iter(answers[2])) == "1"


def test_yaml_of_the_base_handler_page(root: Path) -> None:
    weights, compilation = (yaml.safe_load(block) for block in blocks(root, "base_handler.md", "yaml"))
    assert weights == {"handler": {"weights_only": False}}
    assert compile_options(compilation) == {"backend": "inductor", "mode": "reduce-overhead"}


def test_the_page_of_openais_api(root: Path) -> None:
    (page,) = modules(root, "openai.md")
    assert openai_of(page) == {"speaks": False, "names": [], "honours": ["response_format", "logit_bias"]}
    row = SimpleNamespace(request=SimpleNamespace(parameters={"max_tokens": 1}))
    assert page.handle([row], None) == ["parameters: ['max_tokens']"] and page.handle(None, None) is None
    text = (root / "docs" / "openai.md").read_text()
    assert not [name for name in ASKING if f"`{name}`" not in text]
    for limit in (PROMPTS_MAX, STOPS_MAX, STOP_CHARS_MAX):
        assert f"up to {limit} " in text
