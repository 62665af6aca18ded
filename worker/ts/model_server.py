"""The `torchserve` command as a function under TorchServe's name: `ts.model_server:start`."""

from __future__ import annotations

import os
import subprocess
import sys

from ts.launcher import COMMAND


def start() -> None:
    """Runs `torchserve` with this program's arguments. Returns if it succeeds; otherwise ends this program with its
    exit code. With --foreground this process becomes the server: signals for it reach the server itself."""
    command = [*COMMAND, *sys.argv[1:]]
    if "--foreground" in command and "--stop" not in command:
        sys.stdout.flush()
        os.execv(command[0], command)
    code = subprocess.call(command)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    start()
