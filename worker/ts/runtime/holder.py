"""A process that has loaded a model once, on the CPU, and forks the model's workers: `python -m ts.runtime.holder
--fd N --progress-fd M`, or `hold` in a child of the forkserver.

Workers share its memory until one of them writes to it (copy-on-write). After `ready` the frontend asks `{"op": "load",
"id": int, "settings": {...}}`, the settings of a worker's Load. The answer `loaded` has `load_s`, and `refusal` with
the reason why workers can't be forked from this handler (`ts.runtime.forkable`), else "". A handler whose load fails is
`failed`: its workers announce the exception.

With `renewable` among the settings, a request `{"op": "renewal", "id": int}` is answered by `renewal`, whose `refusal`
says why the model must be loaded again for the present source files, else "" (`ts.runtime.renewal`): workers take
their code from these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ts.protocol.memory import give_back_freed
from ts.runtime import process
from ts.runtime.calls import NoServer
from ts.runtime.forkable import Footprint, Forking, owned_files, refusal_since
from ts.runtime.handlers import Loaded, Settings, load, new_loop, renewed
from ts.runtime.main import live, prepare_logging, prepare_process
from ts.runtime.renewal import Loading, renew

SignalHandler = Callable[[int, "FrameType | None"], Any]


class Holder(Forking):
    """A model that is loaded at most once, for as long as the process lives."""

    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._loaded: Loaded | None = None
        self._failure: BaseException | None = None
        self._threads: int | None = None
        self._signals: dict[int, SignalHandler] = {}
        self._loading: Loading | None = None

    def asked(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("op") == "load" and self._loaded is None:
            return self._load(request["settings"])
        if request.get("op") == "renewal" and self._loading is not None:
            return {"op": "renewal", "refusal": self._loading.refusal()}
        return super().asked(request)

    # --- loading

    def _load(self, settings: Settings) -> dict[str, Any]:
        prepare_process()
        prepare_logging(settings)
        if settings.get("terminal"):
            from ts.runtime.debugging import prepare

            prepare(settings, holds=True)
        before, begun_s = Footprint.now(), time.monotonic()
        refusal = ""
        try:
            # A pool of threads wouldn't be in the forks, which would wait for it for ever.
            with process.one_thread(), self._threads_noted(), self._noted(settings):
                loaded = load(settings)
            loaded, refusal = _without_loop(loaded)
            self._loaded = loaded
        except NoServer:
            refusal = "it calls another model while it is loaded"
        except BaseException as error:  # the workers announce it
            self._failure = error
        load_s = round(time.monotonic() - begun_s, 6)
        self._note_signals()
        gc.collect()
        refusal = refusal or refusal_since(before)
        gc.freeze()  # the collector's marks would copy every shared page in the workers
        give_back_freed()
        return {
            "op": "loaded",
            "load_s": load_s,
            "refusal": "" if self._failure is not None else refusal,
            "failed": self._failure is not None,
        }

    @contextlib.contextmanager
    def _noted(self, settings: Settings) -> Iterator[None]:
        """Records the functions that run in the block, for a model whose source may change."""
        if not settings.get("renewable"):
            yield
            return
        self._loading = Loading(settings["model_dir"])
        with self._loading.noted():
            yield

    @contextlib.contextmanager
    def _threads_noted(self) -> Iterator[None]:
        """torch computes with one thread in the block, and the number that the handler sets is noted for the workers:
        with torch imported before, also if it is one."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            yield
            torch = sys.modules.get("torch")
            if torch is not None and torch.get_num_threads() != 1:
                self._threads = torch.get_num_threads()
            return
        torch.set_num_threads(1)
        setting = torch.set_num_threads

        def note(count: int) -> None:
            setting(count)
            self._threads = count

        torch.set_num_threads = note
        try:
            yield
        finally:
            torch.set_num_threads = setting

    def _note_signals(self) -> None:
        """Notes the signal handlers that the model has installed, which override a worker's own."""
        for number in process.STOPPING:
            how = signal.getsignal(number)
            if callable(how) and how is not process.stays and how is not signal.default_int_handler:
                self._signals[number] = how
        self._watch_children()  # even if the handler has set SIGCHLD

    # --- workers

    def become(self, fds: list[int], request: dict[str, Any]) -> None:
        socket_fd, progress_fd, stdout_fd, stderr_fd = fds
        os.setsid()
        self.forget()
        process.replace_streams(stdout_fd, stderr_fd)
        owned_files({socket_fd, progress_fd})
        live(socket_fd, progress_fd, loading=self._taken)

    def _taken(self, settings: Settings) -> Loaded:
        """The handler in a worker. Raises the exception of the load."""
        if self._failure is not None:
            raise self._failure
        assert self._loaded is not None
        if self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)
        for number, how in self._signals.items():
            signal.signal(number, how)
        loaded = self._loaded
        if self._loading is not None and renew(self._loading):
            loaded = renewed(loaded, settings)
        return loaded._replace(loop=new_loop()) if loaded.kind == "async" else loaded


def _without_loop(loaded: Loaded) -> tuple[Loaded, str]:
    """An async handler without the loop that initialised it, as each worker has its own; and a reason for refusal."""
    loop = loaded.loop
    if loop is None:
        return loaded, ""
    tasks = asyncio.all_tasks(loop)
    kept = loop in vars(getattr(loaded.entry, "target", loaded.entry)).values()
    loop.close()
    asyncio.set_event_loop(None)
    refusal = ""
    if tasks:
        refusal = f"{len(tasks)} of its asyncio tasks still run after it is loaded"
    elif kept:
        refusal = "it keeps the event loop that it was loaded in"
    return loaded._replace(loop=None), refusal


def hold(control_fd: int) -> None:
    """Serves until the control socket ends, and then ends the process."""
    Holder(socket.socket(fileno=control_fd)).serve()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="ts.runtime.holder", description="Holds a model's weights for its workers.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True, help="closed: only workers report progress")
    arguments = parser.parse_args()
    os.close(arguments.progress_fd)
    hold(arguments.fd)


if __name__ == "__main__":
    main()
