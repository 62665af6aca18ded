"""What the process that started the server is told of its start."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

log = logging.getLogger(__name__)


class Report:
    """Tells the launcher, once, how the start went. `fd` None: nobody asked."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def progress(self, text: str) -> None:
        """What the server is doing before it is ready."""
        if self._fd is not None:
            self._send(self._fd, {"progress": text})

    def ready(self, listening: dict[str, str], warnings: list[str]) -> None:
        self._write({"ready": True, "listening": listening, "warnings": warnings})

    def failed(self, error: str) -> None:
        self._write({"ready": False, "error": error})

    def _write(self, value: dict[str, Any]) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._send(fd, value)
        os.close(fd)

    def _send(self, fd: int, value: dict[str, Any]) -> None:
        try:
            os.write(fd, json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            log.warning("The launcher left before the server was ready")
