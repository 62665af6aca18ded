"""What commands of Dynamo and MAX are as words of `torchserve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts.compat import modules

START = ["--start", "--foreground"]
NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, ["--profile", "dynamo"]),
        (["--profile=triton"], {}, ["--profile=triton"]),
        (["--kserve_mode=false"], {}, ["--profile", "dynamo", "--kserve_mode=false"]),
        (["--kserve-mode"], {}, ["--set", "grpc_metrics=true", "--grpc-port", "8001", "--kserve-mode"]),
        (["--kserve-mode"], {"DYNAMO_GRPC_PORT": "1"}, ["--set", "grpc_metrics=true", "--kserve-mode"]),
    ],
)
def test_dynamos_words(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    assert modules.dynamo(argv, environ, NOWHERE, NOWHERE) == [*START, *words]


def test_folders_that_dynamo_takes_when_none_is_named(tmp_path: Path) -> None:
    def places(*argv: str) -> list[str]:
        return modules.dynamo(["--profile=dynamo", *argv], {}, tmp_path / "here", tmp_path / "mounted")[2:-1]

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
    assert modules.max_server(["--model=llama31"]) == [*START, "--model=llama31"]
    assert modules.max_server(["--bypass-serve"]) == [*START, "--profile", "max", "--bypass-serve"]
