"""The README is true: its commands and programs run, in their order, and print the shown output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import module_of

NOT_RUN = "<!-- not run:"


class Block(NamedTuple):
    """A fenced block: its language, its text, its first line's number, and whether the reader is told it isn't run."""

    language: str
    text: str
    line: int
    run: bool


def blocks(markdown: str) -> Iterator[Block]:
    lines = markdown.splitlines()
    at = 0
    while at < len(lines):
        opening = re.fullmatch(r"```(\w+)", lines[at])
        if opening:
            end = lines.index("```", at)
            yield Block(opening[1], "\n".join(lines[at + 1 : end]), at + 2, NOT_RUN not in lines[at - 1])
            at = end
        at += 1


def ports(root: Path) -> dict[str, Any]:
    quickstart = module_of(root / "ts_scripts/quickstart.py")
    chosen = quickstart.choose_ports(only_free=True)
    return {**chosen, "quickstart": quickstart}


class Reader:
    """A reader who types the README's commands, in a folder that looks like a checkout, next to other servers."""

    def __init__(self, root: Path, folder: Path, env: dict[str, str]) -> None:
        chosen = ports(root)
        self.folder = folder
        self.inference_port = chosen["grpc_inference_port"]
        chosen.pop("quickstart").write_config(chosen, folder / "ports.properties")
        self.env = {
            **env,
            "TMPDIR": str(folder),
            "TS_CONFIG_FILE": str(folder / "ports.properties"),
            "TORCHSERVE_INFERENCE_PORT": str(self.inference_port),
            "TORCHSERVE_MANAGEMENT_PORT": str(chosen["grpc_management_port"]),
        }
        for name in ("model_store", "examples"):
            shutil.copytree(root / name, folder / name)

    def follow(self, block: Block) -> str:
        """Runs a block, and returns its output."""
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.language == "python" and name:
            (self.folder / name[1]).write_text(block.text + "\n")
            return ""
        if block.language == "python":
            return self.call([sys.executable, "-c", block.text.replace("7070", str(self.inference_port))], block)
        return self.call(["sh", "-euc", block.text], block)

    def call(self, command: list[str], block: Block) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"README.md line {block.line}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def leave(self) -> None:
        subprocess.run(["torchserve", "--stop"], cwd=self.folder, env=self.env, capture_output=True)


@pytest.fixture
def reader(root: Path, tmp_path: Path, clean_env: dict[str, str]) -> Iterator[Reader]:
    somebody = Reader(root, tmp_path, clean_env)
    yield somebody
    somebody.leave()


@pytest.mark.long
def test_everything_in_the_readme_runs(root: Path, reader: Reader) -> None:
    printed, ran = "", 0
    for block in blocks((root / "README.md").read_text()):
        if block.language == "text":
            missing = [line for line in block.text.splitlines() if line not in printed]
            assert not missing, f"README.md line {block.line} promises {missing}, printed was:\n{printed}"
        elif block.run and block.language != "dockerfile":  # tests/deploy and test_packaging_wheel.py build those
            printed = reader.follow(block)
            ran += 1
    assert ran >= 8


def test_blocks_have_a_language_that_is_known(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert text.count("```") == 2 * len(list(blocks(text)))
    assert {block.language for block in blocks(text)} <= {"sh", "python", "text", "dockerfile"}


def test_the_comparison_is_drawn_from_the_measurements(root: Path) -> None:
    script = module_of(root / "ts_scripts/draw_comparison.py")
    page, picture = (root / "docs/benchmarks.md").read_text(), (root / "docs/images/comparison.svg").read_text()
    assert script.drawn(script.rates(page)) == picture, "run ts_scripts/draw_comparison.py"
    slower = re.sub(r"(\| 64 clients \| `ours` \| )[\d,]+", r"\g<1>1", page)
    assert script.drawn(script.rates(slower)) != picture
