"""Which models a program has that starts its own server (docs/aissemble.md): it is run, up to there, and says so."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ts_frontend.errors import InvalidArchive
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.program import ADAPTER
from ts_frontend.workers.launchers import run_tool

SHOWN_LINES = 15
SHOWN_CHARS_MAX = 4000
#: Blanks and "" leave sys.path, so that a directory named `ts` where the program runs isn't taken for ours.
_CODE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ts.compat.program import list_models; list_models(sys.argv[1:]) # torchserve"
)


class Programs:
    """`env`: a worker's environment; `timeout_s`: how long a program may take to come to its server's start;
    `latency_logging` of its arguments: does it want a line for each request?"""

    def __init__(
        self, env: Mapping[str, str], work_dir: Path, timeout_s: float, latency_logging: Callable[[Sequence[str]], bool]
    ) -> None:
        self._env, self._work_dir, self._timeout_s = env, work_dir, timeout_s
        self._latency_logging = latency_logging

    def completed(self, archive: Archive) -> Archive:
        """With what options, environment and oip.properties say to a program; every other archive as it is.
        ConfigError."""
        adapted = archive.adapter_settings
        if archive.adapter != ADAPTER or "latency_logging" in adapted:
            return archive
        return replace(archive, adapter_settings=adapted | {"latency_logging": self._latency_logging(adapted["argv"])})

    async def named(self, archive: Archive) -> Archive:
        """With a name, when nobody gave it one and it is a program: that of its only model. InvalidArchive."""
        names = await self.names(archive)
        if len(names) > 1:
            raise InvalidArchive(
                f"{archive.adapter_settings['program']} serves {', '.join(names)}: name the one that is meant "
                "(model_name, or NAME=URL)"
            )
        return replace(archive, name=names[0]) if names else archive

    async def names(self, archive: Archive) -> list[str]:
        """The models of a program that nobody named, [] for every other archive. InvalidArchive, with the end of what
        the program said."""
        if archive.adapter != ADAPTER or archive.name is not None:
            return []
        adapted, last = archive.adapter_settings, deque[str](maxlen=SHOWN_LINES)
        with tempfile.TemporaryDirectory(dir=self._work_dir, prefix="asked-") as scratch:
            result = Path(scratch, "models.json")
            argv = [sys.executable, "-c", _CODE, str(result), adapted["program"], *adapted["argv"]]
            cwd = Path(adapted["directory"])
            status = await run_tool(argv, cwd, self._timeout_s, last.append, env=self._env)
            if status is None:
                last.append(f"it took longer than {self._timeout_s:g} s (default_startup_timeout) and was ended")
            elif found := await asyncio.to_thread(_read, result):
                return _checked(json.loads(found), adapted["program"])
        text = "\n".join(last)[-SHOWN_CHARS_MAX:]
        raise InvalidArchive(f"{adapted['program']} didn't come to its server's start: {text or f'status {status}'}")


def _read(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _checked(names: list[str], program: str) -> list[str]:
    if not names:
        raise InvalidArchive(f"{program} starts its server without a model")
    return names
