"""What `python -m dynamo.frontend` and `python -m max.serve.grpc_server` are here: words of a `torchserve` command.
Pure, but for looking which folders are there.

Dynamo's frontend is told its models by others, MAX's server has one; this one serves folders. Without an option about
them it takes those that the page about Dynamo draws, and that KServe mounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

#: Options that say what is served.
PLACES = {"--model-store", "--model-repository", "--model-dir", "--model", "--model-path", "--program"}
MOUNTED = Path("/mnt/models")
_START = ("--start", "--foreground")


def dynamo(argv: Sequence[str], directory: Path, mounted: Path = MOUNTED) -> list[str]:
    """With Dynamo's ports. `directory`: where it is started; `mounted`: where KServe puts models."""
    given = _given(argv)
    profile = [] if "--profile" in given else ["--profile", "dynamo"]
    return [*_START, *profile, *([] if PLACES & given else _places(directory, mounted)), *argv]


def max_server(argv: Sequence[str]) -> list[str]:
    """`--model` brings MAX's profile by itself."""
    named = {"--model", "--model-path", "--profile"} & _given(argv)
    return [*_START, *([] if named else ["--profile", "max"]), *argv]


def _given(argv: Sequence[str]) -> set[str]:
    """The options' names, with `-` for `_`."""
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}


def _places(directory: Path, mounted: Path) -> list[str]:
    if (directory / "model_repository").is_dir():
        return ["--model-repository", "model_repository"]
    if (directory / "model_store").is_dir():
        return ["--model-store", "model_store", "--models", "all"]
    if not mounted.is_dir():
        return []
    if any(mounted.glob("*/config.pbtxt")):
        return ["--model-repository", str(mounted)]
    return ["--model-store", str(mounted), "--models", "all"]
