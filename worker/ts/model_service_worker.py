"""A worker that listens: `python -m ts.model_service_worker --sock-type unix --sock-name PATH.NUMBER`.

The server's own workers get a connected socket (`ts.runtime.main`); this module is for programs that start a worker
themselves and connect to it. The connection's protocol is `ts.protocol.frames`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import sys
import tempfile
from typing import Any

from ts.arg_parser import ArgParser
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.model_loader import ModelLoaderFactory
from ts.protocol.shared import PROGRESS_BYTES
from ts.service import Service

SOCKET_ACCEPT_TIMEOUT = 30.0

logger = logging.getLogger(__name__)


class TorchModelServiceWorker:
    """`s_type`: "unix" (with `s_name`, PATH.NUMBER) or "tcp" (with `port_num`). A process that torchrun started
    listens LOCAL_RANK further on. Raises ValueError for a missing argument, RuntimeError if the path is in use."""

    def __init__(
        self,
        s_type: str | None = None,
        s_name: str | None = None,
        host_addr: str | None = None,
        port_num: int | str | None = None,
        metrics_config: str | None = None,
        async_comm: bool = False,
    ) -> None:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if s_type == "unix":
            if s_name is None:
                raise ValueError("Wrong arguments passed. No socket name given.")
            self.sock_name, self.port = _numbered(s_name, rank), -1
            _remove(self.sock_name)
        elif s_type == "tcp":
            if port_num is None:
                raise ValueError("Wrong arguments passed. No socket port given.")
            self.sock_name, self.port = host_addr or "127.0.0.1", int(port_num) + rank
        else:
            raise ValueError(f"Incomplete data provided: the socket type is unix or tcp, not {s_type!r}")
        self.sock_type, self.async_comm = s_type, async_comm
        self.sock = socket.socket(socket.AF_INET if s_type == "tcp" else socket.AF_UNIX, socket.SOCK_STREAM)
        self.metrics_cache = MetricsCacheYamlImpl(metrics_config)
        self.metrics_cache.initialize_cache()

    def load_model(self, load_model_request: dict[str, Any]) -> tuple[Service | None, str, int]:
        """A model in this process, with a text and a status: 200; 507 out of memory; 500 otherwise.

        The request has, in bytes, `modelPath`, `modelName`, `handler` and, optional, `envelope`, `batchSize`, `gpu`,
        `limitMaxImagePixels`.
        """
        request = {
            key: value.decode() if isinstance(value, bytes) else value for key, value in load_model_request.items()
        }
        name = request["modelName"]
        self.metrics_cache.model_name = name
        try:
            service = ModelLoaderFactory.get_model_loader().load(
                name,
                request["modelPath"],
                request.get("handler") or None,
                int(request["gpu"]) if request.get("gpu") is not None else None,
                int(request.get("batchSize") or 1),
                request.get("envelope") or None,
                bool(request.get("limitMaxImagePixels", True)),
                self.metrics_cache,
            )
        except MemoryError:
            logger.exception("Load model %s cpu OOM", name)
            return None, "System out of memory", 507
        except RuntimeError as error:
            logger.exception("Failed to load model %s", name)
            out_of_memory = "CUDA" in str(error)
            return None, "System out of memory" if out_of_memory else "Unknown exception", 507 if out_of_memory else 500
        return service, f"loaded model {name}", 200

    def run_server(self) -> int:
        """Takes one connection, within SOCKET_ACCEPT_TIMEOUT seconds, and serves it to its end: the exit status.

        Raises TimeoutError when nobody connects.
        """
        from ts.runtime.main import run

        with self.sock as listening:
            listening.settimeout(SOCKET_ACCEPT_TIMEOUT)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(self.sock_name if self.sock_type == "unix" else (self.sock_name, self.port))
            listening.listen(1)
            print(f"[PID]{os.getpid()}\nTorch worker started.\nPython runtime: {platform.python_version()}", flush=True)
            connection, _ = listening.accept()
        connection.setblocking(True)
        return run(connection.detach(), _progress_file())


def _numbered(name: str, rank: int) -> str:
    """A path that ends in a number, `rank` further on."""
    path, dot, number = name.rpartition(".")
    if not rank:
        return name
    if not dot or not number.isdecimal():
        raise ValueError(f"a socket's name must end in a dot and a number, not {name!r}")
    return f"{path}.{int(number) + rank}"


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)
    if os.path.exists(path):
        raise RuntimeError(f"socket already in use: {path}.")


def _progress_file() -> int:
    with tempfile.TemporaryFile(prefix="torchrelay-progress-") as file:
        file.truncate(PROGRESS_BYTES)
        return os.dup(file.fileno())


def main() -> int:
    """The command; its exit status."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    given = ArgParser.model_service_worker_args().parse_args()
    worker = TorchModelServiceWorker(
        given.sock_type, given.sock_name, given.host, given.port, given.metrics_config, given.async_comm
    )
    try:
        return worker.run_server()
    except TimeoutError:
        logger.error("Backend worker did not receive connection in: %g", SOCKET_ACCEPT_TIMEOUT)
        return 1
    finally:
        if worker.sock_type == "unix":
            with contextlib.suppress(OSError):
                os.remove(worker.sock_name)


if __name__ == "__main__":
    sys.exit(main())
