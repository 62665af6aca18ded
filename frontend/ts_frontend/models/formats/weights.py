"""Weights without an archive: a file of TorchScript, torch.export or ONNX, or a folder with one, as KServe's storage
initializer leaves them in /mnt/models (docs/weights.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ts.protocol.tasks import ADAPTER_CONFIG
from ts_frontend.models.archive import CONFIG_FILE, Archive, read_config, read_text
from ts_frontend.models.extraction import refusal
from ts_frontend.models.formats.format import ModelFiles, ModelFormat
from ts_frontend.models.pickles import SUFFIXES, how_to_serve

ADAPTER = "weights"
#: The runtime of a file that has a graph, by its suffix. Of others, another file must name the class.
GRAPHS = {".onnx": "onnx", ".pt2": "exported", ".pt": "torchscript", ".pth": "torchscript"}
#: Files that name the class of weights: a Python file with it, or Hugging Face's configuration.
CLASS_FILE, TRANSFORMERS_FILE = "model.py", "config.json"
#: The names of weights in several files: model-00002-of-00003.safetensors.
_PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})(\.\w+)", re.ASCII)
_PACKED = (".mar", ".model", ".tgz", ".gz", ".zip")


class WeightsFormat(ModelFormat):
    """A folder's weights are one model if it has one file with a graph, or any number of `.safetensors`, and neither
    archives nor other Python files than model.py, which may be handlers. `handled`: the server has a handler for
    folders that name none (default_service_handler), which gets them instead."""

    adapter = ADAPTER
    alone = True

    def __init__(self, handled: bool = False) -> None:
        self._handled = handled

    def matches(self, path: Path) -> bool:
        if not path.is_dir():
            return path.suffix in (*GRAPHS, *SUFFIXES) and path.is_file()
        if self._handled:
            return False
        files = [one for one in path.iterdir() if one.is_file() and not one.name.startswith(".")]
        named = (path / TRANSFORMERS_FILE).is_file()
        code = [one.name for one in files if one.suffix == ".py" and one.name != CLASS_FILE]
        if (code and not named) or any(one.suffix in _PACKED for one in files):
            return False
        return bool(_weights(files, named))

    def open(self, files: ModelFiles) -> list[Archive]:
        path, directory = files.path, files.directory
        single = path.suffix in (*GRAPHS, *SUFFIXES) and path.is_file()
        if single and path.suffix in SUFFIXES:
            raise refusal(path, how_to_serve(path))
        there = [path] if single else sorted(one for one in directory.iterdir() if one.is_file())
        beside = set() if single else {one.name for one in there}
        chosen = _weights(there, TRANSFORMERS_FILE in beside)
        kind = _kind(directory, chosen[0], beside)
        _check_parts(directory, [one.name for one in chosen])
        if kind == "torchscript" and (told := how_to_serve(directory / chosen[0].name)):
            raise refusal(directory, f"{chosen[0].name} is {told}")
        name = path.stem if single else directory.name
        configured = CONFIG_FILE in beside
        archive = Archive(
            dir=directory,
            name=re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) or "model",
            manifest={"runtime": "python", "model": {"serializedFile": chosen[0].name, "handler": ADAPTER}},
            handler=ADAPTER,
            serialized_file=chosen[0].name,
            model_file=CLASS_FILE if kind == "class" else None,
            requirements_file="requirements.txt" if "requirements.txt" in beside else None,
            config_file=CONFIG_FILE if configured else None,
            config=read_config(path, directory / CONFIG_FILE) if configured else {},
            adapter=self.adapter,
            adapter_settings=_settings(kind, directory, chosen),
            remembered=single,
        )
        return [archive]


def _settings(kind: str, directory: Path, chosen: list[Path]) -> dict[str, Any]:
    files = [str(directory / one.name) for one in chosen]
    found: dict[str, Any] = {"kind": kind, "files": files, "torch": kind != "onnx"}
    return found | ({"class_file": str(directory / CLASS_FILE)} if kind == "class" else {})


def _weights(files: list[Path], named: bool) -> list[Path]:
    """The files of the one model among these, [] when there is none, or several. `named`: they include Hugging Face's
    configuration, so that only the preferred form of the same weights counts."""
    states = [one for one in files if one.suffix == ".safetensors"]
    if named:
        return states or [one for one in files if one.suffix == ".bin" and one.name.startswith("pytorch_model")]
    graphs = [one for one in files if one.suffix in GRAPHS]
    return graphs if len(graphs) == 1 and not states else states if not graphs else []


def _kind(directory: Path, weights: Path, beside: set[str]) -> str:
    """The runtime for the weights. Raises InvalidArchive when they have no graph and no file names their class."""
    found = GRAPHS.get(weights.suffix, "")
    if CLASS_FILE in beside and found in ("", "torchscript"):
        return "class"
    if found:
        return found
    if TRANSFORMERS_FILE in beside:
        if '"architectures"' in (read_text(directory, directory / TRANSFORMERS_FILE) or ""):
            return "transformers"
        raise refusal(directory, "it names no architectures, the class of the weights", TRANSFORMERS_FILE)
    if ADAPTER_CONFIG in beside:
        raise refusal(
            directory,
            f"{weights.name} is an adapter for another model: merge it into that model (merge_and_unload of the "
            "package peft), and save the whole",
        )
    raise refusal(
        directory,
        f"{weights.name} has weights but no model: put a {CLASS_FILE} with their torch.nn.Module next to it, or "
        f"Hugging Face's {TRANSFORMERS_FILE}; or export the model (torch.export, TorchScript, ONNX)",
    )


def _check_parts(directory: Path, names: list[str]) -> None:
    """Raises InvalidArchive when a part of the weights is missing, as after an interrupted download."""
    for name in names:
        if found := _PART.fullmatch(name):
            stem, _, last, suffix = found.groups()
            there = sum(one.startswith(f"{stem}-") and one.endswith(f"-of-{last}{suffix}") for one in names)
            if there != int(last):
                raise refusal(directory, f"one of {int(last)} parts of the weights, of which {there} are there", name)
