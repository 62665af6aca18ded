"""The walks of docs/workflows.md, first-model.md and cookbook.md: their commands run in order, and print the output."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support import module_of

USUAL = {
    "inference_address": "127.0.0.1:8080",
    "management_address": "127.0.0.1:8081",
    "grpc_inference_port": "127.0.0.1:7070",
}


@pytest.fixture
def walk(root: Path, tmp_path: Path, clean_env: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """Runs commands in a folder that looks like a checkout, beside other servers."""
    quickstart = module_of(root / "ts_scripts/quickstart.py")
    ports = quickstart.choose_ports(only_free=True)
    quickstart.write_config(ports, tmp_path / "ports.properties")
    env = {
        **clean_env,
        "TMPDIR": str(tmp_path),
        "TS_CONFIG_FILE": str(tmp_path / "ports.properties"),
        "TS_PRELOAD_TORCH": "false",  # seconds of computing, and no model of the pages needs it at once
        "TORCHSERVE_INFERENCE_PORT": str(ports["grpc_inference_port"]),
        "TORCHSERVE_MANAGEMENT_PORT": str(ports["grpc_management_port"]),
    }
    for name in ("model_store", "examples"):
        shutil.copytree(root / name, tmp_path / name)

    def run(commands: str) -> str:
        for key, usual in USUAL.items():
            commands = commands.replace(usual, f"127.0.0.1:{ports[key]}")
        done = subprocess.run(
            ["sh", "-euc", commands.replace("curl ", "curl -sS ")],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    yield run
    subprocess.run(["torchserve", "--stop"], cwd=tmp_path, env=env, capture_output=True, timeout=60)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
@pytest.mark.parametrize(
    "page",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("workflows.md", "first-model.md")),
        pytest.param("cookbook.md", marks=pytest.mark.slow),  # it takes as long as all others together
    ],
)
def test_the_walk(root: Path, walk: Callable[[str], str], page: str) -> None:
    text_of_page = (root / "docs" / page).read_text()
    printed, checked = "", 0
    for language, text in re.findall(r"^```(sh|text)\n(.*?)^```", text_of_page, re.DOTALL | re.MULTILINE):
        if language == "sh":
            printed = walk(text)
            continue
        missing = [line for line in text.splitlines() if line not in printed]
        assert not missing, f"promised {missing}, printed was:\n{printed}"
        checked += 1
    assert checked >= 4


@pytest.mark.external
def test_the_hugging_face_entry_of_the_cookbook(root: Path, walk: Callable[[str], str]) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    (block,) = re.findall(r"^```bash\n(.*?)^```", (root / "docs/cookbook.md").read_text(), re.DOTALL | re.MULTILINE)
    printed = walk(block)
    assert '"label": "LABEL_' in printed and '"score": 0.' in printed, printed


def test_the_specification_is_the_examples(root: Path) -> None:
    page = (root / "docs/workflows.md").read_text()
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]
    assert yaml.safe_load(shown) == yaml.safe_load((root / "examples/workflow/spec.yaml").read_text())
