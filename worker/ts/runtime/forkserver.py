"""Forks workers from a process that has imported their modules: `python -m ts.runtime.forkserver --fd N [--plain]`.

`ts.runtime.forkable` has its control socket's protocol. A `fork` request with `"holds": true` makes a process that
loads a model and forks its workers (`ts.runtime.holder`), with a control socket in the place of the worker's. A request
`{"op": "preload", "id": int}` comes with one descriptor, the control socket of a second forkserver: a fork that imports
torch, which takes a second or more, while this one goes on forking workers that don't need it.

It has one thread and computes nothing: a child forked after a parallel operation in its parent would hang.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import socket
import sys
from collections.abc import Iterable
from typing import Any

from ts.runtime import process
from ts.runtime.forkable import Forking

PRELOADED = ("ts.runtime.main", "ts.handler_utils.utils", "yaml")
#: The modules that --plain omits. NumPy's random numbers are a module of their own, which each child would import to
#: have others than its siblings.
MORE_PRELOADED = ("numpy", "numpy.random")
PRELOADED_WITH_TORCH = ("torch", "ts.torch_handler.base_handler")


class Forkserver(Forking):
    """Its children are workers that load their model, holders, and the forkserver with torch."""

    forks = {**Forking.forks, "preload": 1}

    def become(self, fds: list[int], request: dict[str, Any]) -> None:
        process.reset_signals()
        if request["op"] == "preload":
            return _become_forkserver(fds[0])
        os.setsid()
        socket_fd, progress_fd = process.keep_only(*fds)
        if request.get("holds"):
            from ts.runtime.holder import hold

            return hold(socket_fd)
        from ts.runtime.main import live

        return live(socket_fd, progress_fd)


def _become_forkserver(control_fd: int) -> None:
    """The life of the fork that imports torch."""
    process.keep_open({0, 1, 2, control_fd})
    preload(PRELOADED_WITH_TORCH)
    Forkserver(socket.socket(fileno=control_fd)).serve()
    os._exit(0)


def preload(names: Iterable[str]) -> None:
    """Imports modules that workers need, with one thread in each pool of threads, which the children change."""
    gc.disable()  # modules stay; looking for others among them takes an eighth of the time
    with process.one_thread():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                    continue  # the server says so, once
                print(f"forkserver: {name} isn't preloaded: {type(error).__name__}: {error}", file=sys.stderr)
    gc.freeze()  # the collector's marks would copy every shared page in the children
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(prog="ts.runtime.forkserver", description="Forks torchserve's worker processes.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--plain", action="store_true", help="import nothing but the worker's own modules")
    arguments = parser.parse_args()
    preload(PRELOADED if arguments.plain else (*PRELOADED, *MORE_PRELOADED))
    Forkserver(socket.socket(fileno=arguments.fd)).serve()
    os._exit(0)  # freeing all modules would take as long as half of their import


if __name__ == "__main__":
    main()
