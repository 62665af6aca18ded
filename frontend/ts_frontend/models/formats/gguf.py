"""Language models in llama.cpp's format: a `.gguf` file, or a folder with one, whose parts count as one."""

from __future__ import annotations

import re
from pathlib import Path

from ts_frontend.models.archive import CONFIG_FILE, Archive, read_config
from ts_frontend.models.formats.format import ModelFiles, ModelFormat

SUFFIX = ".gguf"
HANDLER = "llama_cpp_handler"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
#: One engine computes requests side by side on all cores: a second one would hold the weights twice.
_ONE_ENGINE = {"minWorkers": 1, "maxWorkers": 1, "maxConcurrency": 4}


class GgufFormat(ModelFormat):
    """Of a folder with several models, `handler: {file: …}` in its model-config.yaml names one."""

    alone = True

    def matches(self, path: Path) -> bool:
        if path.is_dir():
            return not (path / "MAR-INF").is_dir() and bool(_files(path))
        return path.suffix == SUFFIX and path.is_file()

    def open(self, files: ModelFiles) -> list[Archive]:
        path, directory = files.path, files.directory
        single = path.suffix == SUFFIX and path.is_file()
        names = [path.name] if single else _files(directory)
        configured = not single and (directory / CONFIG_FILE).is_file()
        config = read_config(path, directory / CONFIG_FILE) if configured else {}
        model = {"handler": HANDLER, **({"serializedFile": names[0]} if len(names) == 1 else {})}
        archive = Archive(
            dir=directory,
            name=re.sub(r"[^\w.-]", "_", path.stem if single else directory.name, flags=re.ASCII) or "model",
            manifest={"runtime": "python", "model": model},
            handler=HANDLER,
            serialized_file=model.get("serializedFile"),
            config_file=CONFIG_FILE if configured else None,
            config=_ONE_ENGINE | config,
            remembered=single,
        )
        return [archive]


def _files(folder: Path) -> list[str]:
    """The models of a folder: of one in several parts, the first part."""
    names = sorted(one.name for one in folder.iterdir() if one.suffix == SUFFIX and one.is_file())
    return [name for name in names if not _LATER_PART.search(name)]
