"""Programs that start an aiSSEMBLE or KServe server (docs/aissemble.md), run up to that start to learn their models."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ts_frontend.config.foreign import kserve
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArchive
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.format import ModelFiles, ModelFormat
from ts_frontend.models.handler_imports import may_need_torch, starts_a_server
from ts_frontend.workers.launchers import run_tool

#: The file that makes a folder a program, when it shows no other format's sign.
FILE = "main.py"
SUFFIX = ".py"
SHOWN_LINES = 15
SHOWN_CHARS_MAX = 4000
#: Blanks and "" leave sys.path, so that a directory named `ts` where the program runs isn't imported instead of ours.
_CODE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ts.compat.program import list_models; list_models(sys.argv[1:]) # torchserve"
)


class ProgramFormat(ModelFormat):
    """A Python file, or a folder with a main.py that imports one of their servers. `env`: a worker's environment;
    `work_dir`: for the model lists that programs write when they are run."""

    adapter = "program"
    several = True

    def __init__(self, config: ServerConfig, env: Mapping[str, str], work_dir: Path) -> None:
        self._config, self._env, self._work_dir = config, env, work_dir

    def matches(self, path: Path) -> bool:
        if path.suffix == SUFFIX and path.is_file():
            return True
        return starts_a_server(path / FILE)

    def claims(self, path: Path) -> bool:
        """Any Python file may be run as a program; one that imports neither server may be a handler as well."""
        return starts_a_server(path) if path.is_file() else self.matches(path)

    def open(self, files: ModelFiles) -> list[Archive]:
        """The archive has no name: the program defines its models' names."""
        itself = files.path.suffix == SUFFIX and files.path.parent == files.directory
        program = files.path if itself else files.directory / FILE
        folder = program.parent
        archive = Archive(
            dir=files.directory,
            manifest={"runtime": "python", "model": {"handler": program.name}},
            handler=program.name,
            requirements_file="requirements.txt" if (folder / "requirements.txt").is_file() else None,
            adapter=self.adapter,
            adapter_settings={
                "program": str(program),
                "module": "",
                "argv": list(files.argv),
                "path": [str(folder)],
                "directory": str(files.cwd or folder),
                "stand_in": True,
                "torch": may_need_torch(folder, program.name),
            },
        )
        return [archive]

    def prepared(self, archive: Archive) -> Archive:
        """The archive with the setting of the request log: from its options, the environment or oip.properties."""
        settings = archive.adapter_settings
        if "latency_logging" in settings:
            return archive
        environ = self._config.environment
        found = kserve.value_of("enable_latency_logging", settings["argv"], environ, kserve.read(environ))
        return replace(archive, adapter_settings=settings | {"latency_logging": bool(found)})

    async def named(self, archive: Archive) -> list[Archive]:
        """The archive under the name of each model of the program, with whether the program imports torch before its
        server's start. InvalidArchive, with the end of the program's output, when it doesn't start a server."""
        if archive.name is not None:
            return [archive]
        settings, last = archive.adapter_settings, deque[str](maxlen=SHOWN_LINES)
        timeout_s = self._config.default_startup_timeout
        with tempfile.TemporaryDirectory(dir=self._work_dir, prefix="asked-") as scratch:
            result = Path(scratch, "models.json")
            argv = [sys.executable, "-c", _CODE, str(result), settings["program"], *settings["argv"]]
            status = await run_tool(argv, Path(settings["directory"]), timeout_s, last.append, env=self._env)
            if status is None:
                last.append(f"it took longer than {timeout_s:g} s (default_startup_timeout) and was ended")
            elif found := await asyncio.to_thread(_read, result):
                told = json.loads(found)
                settings = settings | {"torch": told["torch"]}
                names = _checked(told["models"], settings["program"])
                return [replace(archive, name=name, adapter_settings=settings) for name in names]
        text = "\n".join(last)[-SHOWN_CHARS_MAX:]
        raise InvalidArchive(f"{settings['program']} ended before it started its server: {text or f'status {status}'}")


def _read(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _checked(names: list[str], program: str) -> list[str]:
    if not names:
        raise InvalidArchive(f"{program} starts its server without a model")
    return names
