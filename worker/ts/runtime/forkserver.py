"""Forks workers from a process that has imported torch: `python -m ts.runtime.forkserver --fd N [--no-torch]`.

`ts.runtime.forking` has its control socket's protocol. A `fork` request with `"holds": true` makes a process that
loads a model and forks its workers (`ts.runtime.holder`), with a control socket in the place of the worker's.

It has one thread and computes nothing: a child forked after a parallel operation in its parent would hang.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import socket
import sys
from typing import Any

from ts.runtime import process
from ts.runtime.forking import Forking

PRELOADED = ("ts.runtime.main", "ts.handler_utils.utils", "yaml")
PRELOADED_WITH_TORCH = ("torch", "numpy", "ts.torch_handler.base_handler")


class Forkserver(Forking):
    """Its children are workers that load their model, and holders."""

    def become(self, fds: list[int], request: dict[str, Any]) -> None:
        process.reset_signals()
        socket_fd, progress_fd = process.keep_only(*fds)
        if request.get("holds"):
            from ts.runtime.holder import hold

            hold(socket_fd)
        else:
            from ts.runtime.main import live

            live(socket_fd, progress_fd)


def preload(with_torch: bool) -> None:
    """Imports the modules that workers need. Torch is imported with one thread per pool, which the children change."""
    with process.one_thread():
        for name in (*PRELOADED, *(PRELOADED_WITH_TORCH if with_torch else ())):
            try:
                importlib.import_module(name)
            except Exception as error:
                if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                    continue  # the server says so, once
                print(f"forkserver: {name} isn't preloaded: {type(error).__name__}: {error}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # the collector's marks would copy every shared page in the children


def main() -> None:
    parser = argparse.ArgumentParser(prog="ts.runtime.forkserver", description="Forks torchserve's worker processes.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--no-torch", action="store_true")
    arguments = parser.parse_args()
    preload(not arguments.no_torch)
    Forkserver(socket.socket(fileno=arguments.fd)).serve()


if __name__ == "__main__":
    main()
