"""A worker under `torchserve dev`: breakpoints in the server's terminal, and debuggers that connect."""

from __future__ import annotations

import importlib
import os
import pdb
import sys
import time
from typing import Any

#: The longest wait until the previous worker has released the debugger's port.
PORT_S_MAX = 5.0
PORT_PAUSE_S = 0.1
INSTALL = "debugpy isn't installed: pip install debugpy"


def prepare(settings: dict[str, Any], *, holds: bool = False) -> None:
    """Prepares the process for breakpoints, as the Load's settings say: `terminal`, the path of the server's
    terminal, and `debugpy_port`. `holds`: the process is a holder, which can't have a debugger's threads."""
    if settings.get("terminal"):
        stop_in(str(settings["terminal"]))
    if settings.get("debugpy_port") and not holds:
        _listen(int(settings["debugpy_port"]))


def stop_in(terminal: str) -> None:
    """Makes breakpoints of pdb, and of debuggers based on it, use that terminal. It becomes this process's input and
    output at the first breakpoint."""
    begin = pdb.Pdb.__init__

    def begin_there(self: pdb.Pdb, *arguments: Any, **named: Any) -> None:
        take(terminal)
        begin(self, *arguments, **named)

    pdb.Pdb.__init__ = begin_there  # type: ignore[method-assign]


def take(terminal: str) -> None:
    try:
        fd = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        print(f"no breakpoint can stop in {terminal}: {error.strerror}", file=sys.stderr)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (0, 1, 2):
        os.dup2(fd, number)
    os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)


def _listen(port: int) -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # it would complain of Python's own modules
    try:
        debugpy = importlib.import_module("debugpy")
    except ImportError:
        print(INSTALL, file=sys.stderr)
        return
    end_s = time.monotonic() + PORT_S_MAX
    while True:
        try:
            debugpy.listen(("127.0.0.1", port))
            return
        except RuntimeError as error:  # the worker before has the port
            if time.monotonic() > end_s:
                print(f"no debugger can connect to port {port}: {error}", file=sys.stderr)
                return
            time.sleep(PORT_PAUSE_S)
