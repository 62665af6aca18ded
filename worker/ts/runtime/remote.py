"""A worker on another machine than its frontend: `python -m ts.runtime.remote`, with its instructions (a JSON object)
on standard input.

It connects to the frontend over TLS and identifies itself; then it is a worker like any other. The begun batches, which
the frontend otherwise reads from a shared file, are sent over a second connection before the handler is called, and
recorded in a file that the agent reads when the worker has died.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import sys
from functools import partial
from typing import Any

from ts.protocol.shared import PROGRESS_BYTES
from ts.runtime.agent import greet
from ts.runtime.handlers import Loaded, load
from ts.runtime.main import answer, prepare_logging, prepare_process
from ts.runtime.process import die_with, outlive_stops
from ts.runtime.remote_link import RemoteLedger, RemoteLink, SentProgress
from ts.runtime.worker import leave


def moved(value: Any, origin: str, here: str) -> Any:
    """Settings with paths of this machine."""
    if isinstance(value, str):
        inside = value == origin or value.startswith(origin + "/")
        return here + value[len(origin) :] if inside else value
    if isinstance(value, list):
        return [moved(one, origin, here) for one in value]
    if isinstance(value, dict):
        return {key: moved(one, origin, here) for key, one in value.items()}
    return value


def _load(instructions: dict[str, Any], settings: dict[str, Any]) -> Loaded:
    found: dict[str, Any] = moved(settings, instructions["origin"], instructions["model_dir"])
    if found.get("metrics_config"):
        found["metrics_config"] = instructions["metrics_config"]
    return load(found)


def main() -> None:
    die_with(os.getppid())
    outlive_stops()
    instructions = json.load(sys.stdin)
    try:
        notes, _ = greet(instructions, "notes")
        sock, ahead_s = greet(instructions, "worker")
    except OSError as error:
        sys.exit(f"the worker can't reach the server at {instructions['host']}:{instructions['port']}: {error}")
    memory = mmap.mmap(instructions["record"], PROGRESS_BYTES)
    os.close(instructions["record"])
    link = RemoteLink(sock, ahead_s, notes)
    link.part_from_forks()
    prepare_process()
    ledger: Any = partial(RemoteLedger, ahead_s)
    status = answer(link, SentProgress(notes, memory), ledger, prepare_logging, loading=partial(_load, instructions))
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    leave(status)


if __name__ == "__main__":
    main()
