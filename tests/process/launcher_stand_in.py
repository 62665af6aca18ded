"""A `torchserve` whose server is a few lines: the launcher's tests run it where the model server doesn't matter.

`load_models` chooses the server's behaviour: `ready`, `refuse` (reports an error), `die`, `mute` (never reports).
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ts_frontend.cli.main import Program, main
from ts_frontend.config.table import ServerConfig
from ts_frontend.process import STARTED


def run(config: ServerConfig, ready_fd: int | None, check: object = None) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    assert ready_fd is not None
    what = config.load_models[0]
    if what == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if what == "refuse":
        os.write(ready_fd, json.dumps({"ready": False, "error": "port 1 is taken"}).encode() + b"\n")
        return 1
    if what == "ready":
        os.write(ready_fd, b'{"progress": "loading m"}\n')
        print(STARTED, flush=True)
        os.write(ready_fd, b'{"ready": true, "listening": {"grpc_inference": "127.0.0.1:1"}}\n')
        os.close(ready_fd)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    print("drained", flush=True)
    return 7


def command() -> int:
    return main(program=Program((sys.executable, __file__), run))


if __name__ == "__main__":
    sys.exit(command())
