"""The commands of Dynamo and MAX as commands of `torchserve`."""

from __future__ import annotations

from pathlib import Path

from ts.compat import start as modules

START = ["--start", "--foreground"]
NOWHERE = Path("/nowhere")


def test_dynamos_words() -> None:
    for argv in ([], ["--kserve-mode"]):
        assert modules.dynamo_words(argv, NOWHERE, NOWHERE) == [*START, "--profile", "dynamo", *argv]
    assert modules.dynamo_words(["--profile=triton"], NOWHERE, NOWHERE) == [*START, "--profile=triton"]


def test_folders_that_dynamo_takes_when_none_is_named(tmp_path: Path) -> None:
    def places(*argv: str) -> list[str]:
        return modules.dynamo_words(["--profile=dynamo", *argv], tmp_path / "here", tmp_path / "mounted")[2:-1]

    (tmp_path / "mounted").mkdir()
    assert places() == ["--model-store", str(tmp_path / "mounted"), "--models", "all"]
    (tmp_path / "mounted" / "model").mkdir()
    (tmp_path / "mounted" / "model" / "config.pbtxt").touch()
    assert places() == ["--model-repository", str(tmp_path / "mounted")]
    (tmp_path / "here" / "model_store").mkdir(parents=True)
    assert places() == ["--model-store", "model_store", "--models", "all"]
    (tmp_path / "here" / "model_repository").mkdir()
    assert places() == ["--model-repository", "model_repository"]
    assert places("--model_store=/elsewhere") == ["--profile=dynamo"]


def test_maxs_words() -> None:
    assert modules.max_words(["--model=llama31"]) == [*START, "--model=llama31"]
    assert modules.max_words(["--bypass-serve"]) == [*START, "--profile", "max", "--bypass-serve"]
