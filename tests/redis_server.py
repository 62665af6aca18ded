"""A real Redis for tests, on a port of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import redis

from support import GUARD_S, free_port, until

PROGRAM = shutil.which("redis-server")


class Redis:
    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (directory / "redis.log").open("wb") as log:
            self.process = subprocess.Popen([str(PROGRAM), *words, "--dir", str(directory)], stdout=log)
        self.client = redis.Redis(port=self.port)
        until(self._answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def end(self, sign: signal.Signals = signal.SIGKILL) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(sign)
        self.process.wait(GUARD_S)
