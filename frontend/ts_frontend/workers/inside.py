"""Handlers inside the server's own process (`bypass_serve`): a thread with the worker's runtime in a process's place.

For development alone: breakpoints see the terminal, and a handler that crashes takes the server with it. The only
module of the frontend that imports a worker's code, and only when such a thread starts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import dataclass

from ts_frontend.workers.exits import Exit
from ts_frontend.workers.started import Ends, LineSink, Process, Spec


@dataclass(slots=True, eq=False)
class Inside(Process):
    """A worker that is a thread. It can't be killed: it ends as soon as its handler returns."""

    def kill(self) -> None:
        """Lets it find its socket closed."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed already
            pass
        self.ended(Exit(None))

    def release(self) -> None:
        self.progress.close()


class InsideLauncher:
    """Starts threads."""

    async def launch(self, spec: Spec, sink: LineSink) -> Process:
        ends = Ends()
        sock_fd, progress_fd = (os.dup(fd) for fd in ends.worker_fds()[:2])
        ends.close_worker_side()
        for fd in (ends.stdout, ends.stderr):
            os.close(fd)
        process = Inside(os.getpid(), spec.name, ends.sock, ends.progress)
        loop = asyncio.get_running_loop()

        def live() -> None:
            from ts.runtime.inside import live_inside

            status = live_inside(sock_fd, progress_fd)
            try:
                loop.call_soon_threadsafe(process.ended, Exit(status))
            except RuntimeError:  # the loop has ended before its handler has
                pass

        threading.Thread(target=live, name=f"handler-{spec.name}", daemon=True).start()
        return process

    async def close(self) -> None:
        """Threads end with their sockets."""
